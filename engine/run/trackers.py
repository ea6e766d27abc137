"""Where else a run can be watched: TensorBoard, Trackio and Weights & Biases. Rank 0 only.

None of them is needed, and none ends a run: one that fails says so once and is disabled.
"""

import glob
import importlib
import importlib.util
import logging
import os
import sys
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from types import ModuleType
from typing import Any, cast

from engine.config.settings import flatten
from engine.errors import UserError, one_line

log = logging.getLogger("gpt")
PROJECT = "character-level-gpt"  # that Trackio and W&B file all runs under
TRACKERS = ("tensorboard", "trackio", "wandb")


def check(names: Iterable[str]) -> None:
    """Raises `UserError` for a name that is none of `TRACKERS`, or whose package is missing."""
    for name in names:
        if name not in TRACKERS:
            raise UserError(
                f"trainer.trackers: {name} is not one of them; choose from {', '.join(TRACKERS)}"
            )
        if name != "tensorboard" and not is_installed(name):
            raise UserError(f"trainer.trackers: {name} is not installed: pip install {name}")


def is_installed(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None  # none: a folder that has its name


class Trackers:
    """Those of `TRACKERS` that are called `names`, for the run in `run_dir`.

    A run that begins (`step` 0) is a new one in each of them, one that goes on from `step` goes on
    there too. What was logged past `step` before it was killed TensorBoard hides. Trackio and W&B
    cannot: they get nothing up to `logged`, the last (step, is it of the held-out split) that had
    been logged; what a kill kept them from storing stays missing there. `config` are the
    hyperparameters, nested dictionaries.
    """

    def __init__(
        self,
        names: Iterable[str],
        run_dir: str,
        config: dict[str, Any],
        step: int,
        logged: tuple[int, bool],
    ):
        self.logged = logged if step else (0, False)
        self.trackers: dict[str, TensorBoard | Hosted] = {}
        for name in dict.fromkeys(names):
            if not is_installed(name):  # tensorboard, or `check` would have refused
                log.info("tensorboard is not installed: metrics go to metrics.jsonl alone")
                continue
            kind = TensorBoard if name == "tensorboard" else Hosted
            with self._giving_up(name):
                self.trackers[name] = kind(name, os.path.abspath(run_dir), config, step)

    def log(self, step: int, split: str, values: dict[str, float], texts: list[str]) -> None:
        """Records the numbers and the sampled texts of one step; "train" or "val" goes before their
        names.
        """
        for name, tracker in list(self.trackers.items()):
            if name == "tensorboard" or (step, split == "val") > self.logged:
                with self._giving_up(name):
                    tracker.log(step, {f"{split}/{key}": x for key, x in values.items()}, texts)

    def close(self) -> None:
        for name, tracker in list(self.trackers.items()):
            with self._giving_up(name):
                tracker.close()

    @contextmanager
    def _giving_up(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # other people's programs, disks and networks fail in many ways
            log.warning("%s: %s; disabled for this run", name, one_line(error))
            self.trackers.pop(name, None)


class TensorBoard:
    """Event files in `run_dir/tensorboard`, the configuration among them as hyperparameters."""

    def __init__(self, name: str, run_dir: str, config: dict[str, Any], step: int):
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder = os.path.join(run_dir, name)
        events = glob.glob(os.path.join(glob.escape(folder), "events.*"))
        if step == 0:  # those of a start that left no snapshot; only the first hparams are shown
            for path in events:
                os.remove(path)
        begins = step == 0 or not events
        self.writer = SummaryWriter(folder, purge_step=step + 1)
        if begins:  # add_hparams would make a folder for them, and with it a second run
            flat = {
                key: value if isinstance(value, bool | int | float) else str(value)
                for key, value in flatten(config).items()
            }
            experiment, session, _ = hparams(flat, {"train/loss": 0, "val/loss": 0})
            file_writer: Any = self.writer.file_writer  # torch's own annotation says None
            file_writer.add_summary(experiment)
            file_writer.add_summary(session)

    def log(self, step: int, values: dict[str, float], texts: list[str]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        if texts:  # Markdown: four blanks keep the lines as they are
            indented = ("    " + text.replace("\n", "\n    ") for text in texts)
            self.writer.add_text("train/samples", "\n\n---\n\n".join(indented), step)

    def close(self) -> None:
        self.writer.close()


class Hosted:
    """Trackio or W&B, which have one interface: `init`, `log`, `finish`. All stays on this machine
    and in `run_dir`, unless WANDB_MODE or TRACKIO_DIR say otherwise.
    """

    def __init__(self, name: str, run_dir: str, config: dict[str, Any], step: int):
        settings = {"project": PROJECT, "name": os.path.basename(run_dir), "config": config}
        start = {"trackio": start_trackio, "wandb": start_wandb}[name]
        with redirect_stdout(None):  # what they print is not for the run's own output
            self.package = start(run_dir, step > 0, settings)

    def log(self, step: int, values: dict[str, float], texts: list[str]) -> None:
        samples = {"train/samples": "\n---\n".join(texts)} if texts else {}
        self.package.log({**values, **samples}, step=step)

    def close(self) -> None:
        with redirect_stdout(None):
            self.package.finish()


def start_trackio(run_dir: str, resumes: bool, settings: dict[str, Any]) -> ModuleType:
    """Begins a run of Trackio, its database in `run_dir/trackio` or TRACKIO_DIR; returns the
    package.
    """
    if os.environ.get("TRACKIO_DIR"):
        import trackio
    else:  # the package reads the variable when it is imported, and the jobs of a sweep share it
        for module in [m for m in sys.modules if m.split(".")[0] == "trackio"]:
            del sys.modules[module]
        os.environ["TRACKIO_DIR"] = os.path.join(run_dir, "trackio")
        try:
            trackio = importlib.import_module("trackio")
        finally:
            del os.environ["TRACKIO_DIR"]
    trackio.init(resume="allow" if resumes else "never", embed=False, **settings)
    return trackio


def start_wandb(run_dir: str, resumes: bool, settings: dict[str, Any]) -> ModuleType:
    """Begins a run of W&B in `run_dir/wandb`, offline unless WANDB_MODE says otherwise; returns the
    package.

    Each start leaves a folder of its own there. What makes one run of them is the id, kept beside
    them.
    """
    import wandb

    path = os.path.join(run_dir, "wandb", "run_id")
    if not (resumes and os.path.exists(path)):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(uuid.uuid4().hex[:8])
    with open(path) as file:
        run_id = file.read()
    wandb.init(
        id=run_id,
        resume="allow",
        mode=cast(Any, os.environ.get("WANDB_MODE", "offline")),  # W&B checks it
        dir=run_dir,
        # The terminal is ours, and an unreachable server is not waited for forever.
        settings=wandb.Settings(console="off", silent=True, finish_timeout=60),
        **settings,
    )
    return wandb
