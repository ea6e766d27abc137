"""A run read back from its directory: what `report.py` shows and compares."""

import functools
import os
import statistics
from dataclasses import dataclass
from typing import Any, cast

from omegaconf import OmegaConf

from config import CONF, Config, compose, plain
from engine.config.settings import OWN, differences, flatten
from engine.errors import UserError, one_line
from engine.run.directory import CONFIG, ENVIRONMENT, METRICS, newest_instead
from engine.run.metrics import read_lines


def median_rate(lines: list[dict[str, Any]]) -> float | None:
    """The median of the characters a second that lines of metrics have; None where none does."""
    rates = [line["tokens_per_s"] for line in lines if line.get("tokens_per_s")]
    return statistics.median(rates) if rates else None


@dataclass
class Run:
    """What a run has left so far in the directory `path`.

    Attributes:
        config: `config.yaml`, nested dictionaries.
        starts: the lines of `environment.jsonl`, of which there is at least one.
        train, val: the lines of `metrics.jsonl` of either split whose loss is a number, by step.
        diverged: the step and the words with which the run ended in numbers that are not finite,
            or the last whose loss is none; None if all are numbers.
    """

    path: str
    config: dict[str, Any]
    starts: list[dict[str, Any]]
    train: list[dict[str, Any]]
    val: list[dict[str, Any]]
    diverged: tuple[int, str] | None

    @classmethod
    def read(cls, path: str) -> "Run":
        """Raises `UserError` if a file is missing in the directory, or damaged."""
        file = os.path.join(path, METRICS)
        if not os.path.exists(file):
            raise UserError(f"run_dir={path}: there is no {METRICS} in it{newest_instead(path)}")
        lines = read_lines(file, "split", "loss", "seconds")
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
        if not lines:
            raise UserError(f"{file}: no step has been logged yet")
        good, ends = [], []
        for line in lines:
            if line["loss"] is not None and "diverged" not in line:
                good.append(line)
            else:
                ends.append((line["step"], line.get("diverged", "its loss is not a number")))
        return cls(
            path=path,
            config=config,
            starts=starts,
            train=[line for line in good if line["split"] == "train"],
            val=[line for line in good if line["split"] == "val"],
            diverged=max(ends, key=lambda end: end[0], default=None),
        )

    @functools.cached_property
    def lines(self) -> list[dict[str, Any]]:
        """Of both splits, by step."""
        return sorted([*self.train, *self.val], key=lambda line: line["step"])

    @property
    def step(self) -> int:
        """The last that was logged; 0 where none is with numbers."""
        return self.lines[-1]["step"] if self.lines else 0

    @property
    def total_steps(self) -> int:
        """Of the plan."""
        return self.starts[-1]["total_steps"]

    @property
    def best(self) -> dict[str, Any] | None:
        """The line of the lowest held-out loss, the first of equals."""
        return min(self.val, key=lambda line: line["loss"], default=None)

    @property
    def seconds(self) -> float:
        """From the first step to the last that was logged, evaluations and saves included."""
        return self.lines[-1]["seconds"] if self.lines else 0.0

    @property
    def recipe(self) -> str | None:
        """The name of the recipe it was made from, as far as that is known."""
        if self.starts[-1]["overrides"] is not None:
            return self.starts[-1]["recipe"]
        name = self.config.get("run_name")  # a recipe's own, unless given
        return name if os.path.exists(os.path.join(CONF, "experiment", f"{name}.yaml")) else None

    @functools.cached_property
    def changes(self) -> dict[str, tuple[Any, Any]]:
        """The keys whose values are not those of its recipe, with (the recipe's, its own).

        Without a recipe, those that are not the defaults. Raises `UserError` if there is no such
        recipe (any more).
        """
        recipe, own = compose_recipe(self.recipe), flatten(self.config)
        return {
            key: values
            for key, values in differences(recipe, self.config).items()
            if key in own and key not in OWN
        }


@functools.cache  # a tenth of a second each time
def compose_recipe(name: str | None) -> dict[str, Any]:
    """The configuration of a recipe, or without a name the defaults, as a run that changes nothing
    has it; not to be changed.
    """
    composed = compose([f"experiment={name}"] if name else [])
    return plain(cast(Config, OmegaConf.to_object(composed)))
