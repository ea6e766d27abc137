"""What a run writes for people and programs to read: its directory, its log, its metrics. Rank 0
only.
"""

import contextlib
import fcntl
import json
import logging
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch

from errors import UserError, one_line
from signals import Stopped
from trackers import Trackers

log = logging.getLogger("gpt")
LOCK = ".lock"
METRICS = "metrics.jsonl"
REPORT = "report.html"


class LogFile(logging.FileHandler):
    """A log file that is given up, with a word, when it cannot be written."""

    def handleError(self, record: logging.LogRecord) -> None:
        log.removeHandler(self)
        log.warning("%s cannot be written: it gets no more", self.baseFilename)


@contextlib.contextmanager
def owned(path: str, name: str):
    """Owns the file at `path`, which it makes, for as long as the block lasts.

    The lock is the kernel's, so it dies with its holder. Raises `UserError`, saying `name`, if it
    cannot be made or another process owns it.
    """
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        lock = open(path, "a")
    except OSError as error:
        raise UserError(f"{name}: cannot be written: {error.strerror}") from error
    with lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, not kept by children
        except (BlockingIOError, PermissionError) as error:
            raise UserError(
                f"{name}: another run is using it; wait for that one, or set run_name=NEW_NAME"
            ) from error
        yield


@contextlib.contextmanager
def run_directory(run_dir: str):
    """Makes `run_dir` and owns it for as long as the block lasts; the log is written to `main.log`
    in it too. Raises `UserError` if it cannot be written or another run owns it.
    """
    with owned(os.path.join(run_dir, LOCK), f"run_dir={run_dir}"):
        handler = LogFile(os.path.join(run_dir, "main.log"))
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(message)s"))
        log.addHandler(handler)
        try:
            yield
        except Stopped:  # no error, and said already
            raise
        except Exception as error:  # the console has it from elsewhere
            handler.handle(logging.makeLogRecord({"levelname": "ERROR", "msg": one_line(error)}))
            raise
        finally:
            log.removeHandler(handler)
            with contextlib.suppress(OSError):  # a full disk, and said so already
                handler.close()


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
    did not run, and what else is known of that split. When a run goes on
    from `step`, what was logged past it is dropped first, because it will be logged again; so is
    the evaluation of that step itself, unless it has been `evaluated`.
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
        temporary = self.path + ".tmp"
        with contextlib.suppress(FileNotFoundError):  # of a start that was killed
            os.remove(temporary)
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
            with open(temporary, "w") as file:
                file.writelines(kept)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
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


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held so far: of a GPU in tensors, else of the host's
    memory, all included.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # elsewhere in KiB
