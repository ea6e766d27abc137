"""What a run measures, a line of JSON each, for people and programs to read. Rank 0 writes."""

import contextlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterable
from typing import Any

from engine.errors import UserError
from engine.files import atomic_write
from engine.run.directory import METRICS
from engine.run.trackers import Trackers

log = logging.getLogger("gpt")


def read_lines(path: str, *keys: str) -> list[dict[str, Any]]:
    """The JSON objects, one a line, that a run has written to `path`; none if there is no file.

    A last line without an end is left out: it is being written, or its writer was killed. Raises
    `UserError` naming any other line that is not one, or lacks `step` or another of `keys`.
    """
    if not os.path.exists(path):
        return []
    with open(path, errors="replace") as file:
        lines = [line for line in file if line.endswith("\n")]
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            records.append({key: record[key] for key in ("step", *keys)} | record)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}, line {number}: not a line of this file; mend it, or move the file away"
            ) from error
    return records


class Metrics:
    """Appends to `metrics.jsonl`, and hands on to the `trackers` named, with the configuration.

    One JSON object a line: `step`, `epoch`, `split` ("train" or "val"), `loss` in nats per
    character, `bpc` in bits per character, `seconds` since the run began, without the time that it
    did not run. A training line has `lr`, `grad_norm` (before clipping), `tokens_per_s` (characters
    of all processes), `mfu` (a share of the peak rate), `memory` (the most bytes held so far) and
    `rank_losses`; where text was sampled, `samples`. A held-out one has `tokens`, the characters
    scored. Of the step that ended the run because it was not finite, `diverged` is true.

    When a run goes on from `step`, what was logged past it is dropped first, because it will be
    logged again; so is the evaluation of that step itself, unless it has been `evaluated`.
    """

    def __init__(
        self,
        run_dir: str,
        step: int = 0,
        evaluated: bool = True,
        lines: int = 0,
        trackers: Iterable[str] = ("tensorboard",),
        config: dict[str, Any] | None = None,
    ):
        os.makedirs(run_dir, exist_ok=True)
        self.path = os.path.join(run_dir, METRICS)
        self.began = time.perf_counter()
        # In the file, or on their way to it; and the last it had before.
        self.lines, logged = self._keep_until(step, evaluated)
        if self.lines < lines:
            log.warning(
                "%s: %d of the %d lines up to step %d are not on this disk",
                self.path, lines - self.lines, lines, step,
            )  # fmt: skip
        self.file = open(self.path, "ab", buffering=0)
        self.unwritten, self.lock = b"", threading.Lock()
        self.trackers = Trackers(trackers, run_dir, config or {}, step, logged)

    def _keep_until(self, step: int, evaluated: bool) -> tuple[int, tuple[int, bool]]:
        """Drops the lines past `step`; returns how many are left, and (step, is it of the held-out
        split) of the last there was.
        """
        with contextlib.suppress(FileNotFoundError):  # of a start that was killed
            os.remove(f"{self.path}.tmp")
        if not os.path.exists(self.path):
            return 0, (step, evaluated)
        with open(self.path, errors="replace") as file:
            lines = file.readlines()
        kept, bad, logged = [], None, (step, evaluated)
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                at = (record["step"], record["split"] == "val")
                keep = at <= (step, evaluated)
                logged = max(logged, at)
            except (ValueError, KeyError, TypeError):
                bad = bad or number
                continue
            # The last line has no end if its writer was killed in the middle of it.
            if keep and line.endswith("\n"):
                if bad:
                    raise UserError(
                        f"{self.path}, line {bad}: not a line of metrics; mend it, or move the "
                        "file away"
                    )
                kept.append(line)
        if kept:
            self.began -= json.loads(kept[-1]).get("seconds", 0)
        if kept != lines:
            with atomic_write(self.path) as file:
                file.writelines(kept)
        return len(kept), logged

    def log(self, step: int, epoch: float, split: str, loss: float, **values: Any) -> None:
        """Records one measurement; null is written for None and for what is not finite."""
        record = {
            "step": step,
            "epoch": epoch,
            "split": split,
            "loss": loss,
            "bpc": loss / math.log(2),
            "seconds": round(time.perf_counter() - self.began, 3),
            **values,
        }
        for name, value in record.items():
            if isinstance(value, float) and not math.isfinite(value):
                record[name] = None  # JSON has no NaN
        with self.lock:
            self.unwritten += json.dumps(record, allow_nan=False).encode() + b"\n"
            self.lines += 1
            try:
                self._write()
            except OSError as error:
                log.warning("%s: %s; its lines are kept for later", self.path, error.strerror)
        numbers = {
            name: value
            for name, value in record.items()
            if name not in ("step", "seconds") and isinstance(value, int | float)
        }
        self.trackers.log(step, split, numbers, values.get("samples", []))

    def _write(self) -> None:
        """Writes the lines that are waiting, all or none of them."""
        size = os.fstat(self.file.fileno()).st_size
        try:
            left = memoryview(self.unwritten)
            while left:
                left = left[os.write(self.file.fileno(), left) :]
        except OSError:
            os.ftruncate(self.file.fileno(), size)
            raise
        self.unwritten = b""

    def sync(self) -> None:
        """Has what was logged so far survive a power cut; from any thread.

        OSError if not all of it could be written.
        """
        with self.lock:
            self._write()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        """Lines that cannot be written are lost, and no snapshot has vouched for them."""
        with contextlib.suppress(OSError):
            self._write()
        self.file.close()
        self.trackers.close()
