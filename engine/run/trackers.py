"""Experiment trackers: TensorBoard and Weights & Biases, on rank 0. A run needs none of them.

To add one, write a class like `TensorBoard`, and add it to `TRACKERS` under the name of its package. A resumed run logs
the steps after its snapshot again.
"""

import os
import sys
import uuid
from pathlib import Path
from typing import Any, Protocol, cast

from engine.files import masked
from engine.run.metrics import position


class Tracker(Protocol):
    """What a run calls of a tracker. One that raises is not called again."""

    def start(self, run_dir: str, hyperparameters: dict[str, Any], step: int, logged: tuple[int, bool]) -> None:
        """Starts the run in `run_dir`, an absolute path, with flat hyperparameters, at `step`; 0 for a new run.
        `logged` is the last line so far, as `MetricsFile` has it.
        """

    def log(self, line: dict[str, Any]) -> None:
        """Logs a line of `metrics.jsonl`: see `MetricsFile`."""

    def close(self) -> None: ...


def numbers(line: dict[str, Any]) -> dict[str, float]:
    """The finite numbers of a line by name: `train/loss`."""
    measured = {name: value for name, value in line.items() if name not in ("step", "seconds")}
    return {f"{line['split']}/{name}": value for name, value in measured.items() if isinstance(value, int | float)}


class TensorBoard:
    """TensorBoard: event files in `run_dir/tensorboard`. A resumed run replaces the steps that it repeats."""

    def start(self, run_dir: str, hyperparameters: dict[str, Any], step: int, logged: tuple[int, bool]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(os.path.join(run_dir, "tensorboard"), purge_step=step + 1)

    def log(self, line: dict[str, Any]) -> None:
        for name, value in numbers(line).items():
            self.writer.add_scalar(name, value, line["step"])
        if "samples" in line:  # Markdown: an indent of four keeps lines as they are
            indented = ("    " + text.replace("\n", "\n    ") for text in line["samples"])
            self.writer.add_text("train/samples", "\n\n---\n\n".join(indented), line["step"])

    def close(self) -> None:
        self.writer.close()


class WandB:
    """Weights & Biases, in `run_dir/wandb`, offline, unless its environment variables (WANDB_DIR, WANDB_MODE, ...) say
    otherwise.

    Each start of a run writes its own folder; a shared id, stored beside them, makes them one W&B run. W&B cannot
    remove lines, so none is logged twice. A kill loses those that W&B has not written (wandb 0.31: up to 32 KiB);
    `metrics.jsonl` has them.
    """

    def start(self, run_dir: str, hyperparameters: dict[str, Any], step: int, logged: tuple[int, bool]) -> None:
        import wandb

        id_file = Path(run_dir, "wandb", "run_id")
        resumes = step > 0 and id_file.exists()
        if not resumes:
            id_file.parent.mkdir(parents=True, exist_ok=True)
            id_file.write_text(os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8])
        self.logged = logged if resumes else (0, False)
        # W&B records the command line.
        typed, sys.argv = sys.argv, masked(sys.argv)
        try:
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "character-level-gpt"),
                name=os.environ.get("WANDB_NAME", os.path.basename(run_dir)),
                config=hyperparameters,
                id=id_file.read_text(),
                resume="allow",
                dir=os.environ.get("WANDB_DIR", run_dir),
                mode=cast(Any, os.environ.get("WANDB_MODE") or "offline"),
                settings=wandb.Settings(console="off", silent=True, finish_timeout=60),
            )
        finally:
            sys.argv = typed

    def log(self, line: dict[str, Any]) -> None:
        if position(line) > self.logged:
            samples = {"train/samples": "\n---\n".join(line["samples"])} if "samples" in line else {}
            self.run.log(numbers(line) | samples, step=line["step"])

    def close(self) -> None:
        self.run.finish()


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB}
