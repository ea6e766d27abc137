"""Experiment trackers: TensorBoard and Weights & Biases, on rank 0. A run needs none of them.

To add one, write a class like `TensorBoard`, and add it to `TRACKERS` under the name of its package. `log` gets finite
numbers, whose names vary; a resumed run logs the steps after its snapshot again.
"""

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast


class Start(NamedTuple):
    """The start of a run, for its trackers."""

    run_dir: str  # absolute path
    hyperparameters: dict[str, Any]  # flat
    step: int  # where training starts; 0 for a new run
    # What was logged last, as (step, whether an evaluation): by an earlier start or at the snapshot, if that is later.
    logged: tuple[int, bool]


class Tracker(Protocol):
    """What a run calls of a tracker."""

    def log(self, step: int, values: dict[str, float], texts: list[str]) -> None:
        """Logs numbers by name (`train/loss`) and sampled texts, either of which may be empty."""

    def close(self) -> None: ...


class TensorBoard:
    """TensorBoard: event files in `run_dir/tensorboard`. A resumed run replaces the steps that it repeats."""

    def __init__(self, start: Start):
        from torch.utils.tensorboard import SummaryWriter

        folder = os.path.join(start.run_dir, "tensorboard")
        self.writer = SummaryWriter(folder, purge_step=start.step + 1)

    def log(self, step: int, values: dict[str, float], texts: list[str]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        if texts:  # Markdown: an indent of four keeps lines as they are
            indented = ("    " + text.replace("\n", "\n    ") for text in texts)
            self.writer.add_text("train/samples", "\n\n---\n\n".join(indented), step)

    def close(self) -> None:
        self.writer.close()


class WandB:
    """Weights & Biases, in `run_dir/wandb`, offline, unless its environment variables (WANDB_DIR, WANDB_MODE, ...) say
    otherwise.

    Each start of a run writes its own folder; a shared id, stored beside them, makes them one W&B run. W&B cannot
    remove lines, so none is logged twice. A kill loses those that W&B has not written (wandb 0.31: up to 32 KiB);
    `metrics.jsonl` has them.
    """

    def __init__(self, start: Start):
        import wandb

        id_file = Path(start.run_dir, "wandb", "run_id")
        resumes = start.step > 0 and id_file.exists()
        if not resumes:
            id_file.parent.mkdir(parents=True, exist_ok=True)
            id_file.write_text(os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8])
        self.logged = start.logged if resumes else (0, False)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "character-level-gpt"),
            name=os.environ.get("WANDB_NAME", os.path.basename(start.run_dir)),
            config=start.hyperparameters,
            id=id_file.read_text(),
            resume="allow",
            dir=os.environ.get("WANDB_DIR", start.run_dir),
            mode=cast(Any, os.environ.get("WANDB_MODE") or "offline"),
            settings=wandb.Settings(console="off", silent=True, finish_timeout=60),
        )

    def log(self, step: int, values: dict[str, float], texts: list[str]) -> None:
        if (step, "val/loss" in values) > self.logged:  # a step's evaluation follows its training line
            samples = {"train/samples": "\n---\n".join(texts)} if texts else {}
            self.run.log({**values, **samples}, step=step)

    def close(self) -> None:
        self.run.finish()


TRACKERS: dict[str, Callable[[Start], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB}
