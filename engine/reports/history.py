"""Run history: configuration, provenance and metrics of a run, read from its directory."""

import functools
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from omegaconf import OmegaConf

from engine.config.settings import IRRELEVANT, differences, flatten
from engine.errors import UserError, one_line
from engine.run.directory import CONFIG, ENVIRONMENT, METRICS, newest_run_hint
from engine.run.metrics import read_lines

ComposeRecipe = Callable[[str | None], dict[str, Any]]


@dataclass
class History:
    """The metrics of a run.

    Attributes:
        train, val: the lines of `metrics.jsonl` of either split whose loss is finite, by step.
        diverged: (step, reason) of the last line whose loss is not finite; None without one.
    """

    train: list[dict[str, Any]]
    val: list[dict[str, Any]]
    diverged: tuple[int, str] | None

    @functools.cached_property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of both splits, by step."""
        return sorted([*self.train, *self.val], key=lambda line: line["step"])

    @property
    def step(self) -> int:
        """The last step logged; 0 without one."""
        return self.lines[-1]["step"] if self.lines else 0

    @property
    def seconds(self) -> float:
        """Wall time from the first step to the last one logged, evaluations and saves included."""
        return self.lines[-1]["seconds"] if self.lines else 0.0

    @property
    def best(self) -> dict[str, Any] | None:
        """The line of the lowest held-out loss, the first of equals."""
        return min(self.val, key=lambda line: line["loss"], default=None)

    @property
    def last_loss(self) -> float | None:
        """The held-out loss logged last; None without one."""
        return self.val[-1]["loss"] if self.val else None

    @property
    def characters_per_s(self) -> float | None:
        """The median throughput."""
        rates = [line["tokens_per_s"] for line in self.train if line.get("tokens_per_s")]
        return statistics.median(rates) if rates else None


def read_history(run_dir: str) -> History:
    """The metrics in `run_dir`, none without a file. Raises `UserError` for a damaged line."""
    lines = read_lines(os.path.join(run_dir, METRICS), "split", "loss", "seconds")
    history = History([], [], None)
    for line in sorted(lines, key=lambda line: line["step"]):
        if line["loss"] is None or "diverged" in line:
            history.diverged = (line["step"], line.get("diverged", "the loss is not finite"))
        else:
            (history.train if line["split"] == "train" else history.val).append(line)
    return history


@dataclass
class Run(History):
    """A run's configuration, provenance and metrics.

    Attributes:
        path: its directory.
        config: `config.yaml`, nested dictionaries.
        starts: the lines of `environment.jsonl`, at least one.
        compose_recipe: returns the resolved configuration of the recipe of that name, without a
            name the defaults; raises `UserError` if there is no such recipe.
    """

    path: str
    config: dict[str, Any]
    starts: list[dict[str, Any]]
    compose_recipe: ComposeRecipe

    @classmethod
    def read(cls, path: str, compose_recipe: ComposeRecipe) -> "Run":
        """Reads a run directory. Raises `UserError` if a file is missing or damaged."""
        if not os.path.exists(os.path.join(path, METRICS)):
            raise UserError(f"run_dir={path}: there is no {METRICS} in it{newest_run_hint(path)}")
        history = read_history(path)
        if not (history.train or history.val or history.diverged):
            raise UserError(f"{path}/{METRICS}: no step has been logged yet")
        starts = read_lines(os.path.join(path, ENVIRONMENT))
        if not starts:
            raise UserError(f"run_dir={path}: has no {ENVIRONMENT}, which main.py writes")
        try:
            config = cast(dict, OmegaConf.to_container(OmegaConf.load(os.path.join(path, CONFIG))))
            int(config["model"]["vocab_size"]), config["trainer"]["max_steps"]
        except FileNotFoundError as error:
            raise UserError(f"run_dir={path}: has no {CONFIG}, which main.py writes") from error
        except Exception as error:  # a file can be wrong in many ways
            raise UserError(f"{path}/{CONFIG}: cannot be read: {one_line(error)}") from error
        return cls(
            **vars(history), path=path, config=config, starts=starts, compose_recipe=compose_recipe
        )

    @property
    def total_steps(self) -> int:
        """The planned number of steps."""
        return self.starts[-1]["total_steps"]

    @property
    def recipe(self) -> str | None:
        """The recipe the run was started from; None without one, or if it no longer exists."""
        start = self.starts[-1]
        # Of a run that another program started, only the name is known: a recipe's own, unless given.
        name = self.config.get("run_name") if start["overrides"] is None else start["recipe"]
        try:
            self.compose_recipe(name)
        except UserError:
            return None
        return name

    @functools.cached_property
    def changes(self) -> dict[str, tuple[Any, Any]]:
        """The settings that affect the loss and differ from the recipe, or without one from the
        defaults, as (the recipe's value, the run's value).
        """
        recipe = self.compose_recipe(self.recipe)
        # An older run lacks newer settings, and has some that no longer exist.
        known = (flatten(self.config).keys() & flatten(recipe).keys()) - IRRELEVANT
        return {key: v for key, v in differences(recipe, self.config).items() if key in known}
