"""What a run writes for people and programs to read: its directory, its log, its metrics. Rank 0
only.
"""

import contextlib
import fcntl
import json
import logging
import math
import os
from typing import Any

from errors import UserError

log = logging.getLogger("gpt")
LOCK = ".lock"
METRICS = "metrics.jsonl"


class LogFile(logging.FileHandler):
    """A log file that is given up, with a word, when it cannot be written."""

    def handleError(self, record: logging.LogRecord) -> None:
        log.removeHandler(self)
        log.warning("%s cannot be written: it gets no more", self.baseFilename)


@contextlib.contextmanager
def run_directory(run_dir: str):
    """Makes `run_dir` and owns it for as long as the block lasts; the log is written to `main.log`
    in it too.

    One run at a time owns a run directory. The lock is the kernel's, so it dies with its holder.
    Raises `UserError` if the directory cannot be written or is taken.
    """
    try:
        os.makedirs(run_dir, exist_ok=True)
        lock = open(os.path.join(run_dir, LOCK), "a")
    except OSError as error:
        raise UserError(f"run_dir={run_dir}: cannot be written: {error.strerror}") from error
    with lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, not kept by children
        except (BlockingIOError, PermissionError) as error:
            raise UserError(
                f"run_dir={run_dir}: another run is using this directory; wait for it, or set "
                "run_name=NEW_NAME"
            ) from error
        handler = LogFile(os.path.join(run_dir, "main.log"))
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(message)s"))
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)
            handler.close()


class Metrics:
    """Appends to `metrics.jsonl`, and to TensorBoard where it is installed.

    One JSON object a line: `step`, `epoch`, `split` ("train" or "val"), `loss` in nats per
    character, `bpc` in bits per character, and what else is known of that split. When a run goes on
    from `step`, what was logged past it is dropped first, because it will be logged again; so is
    the evaluation of that step itself, unless it has been `evaluated`.
    """

    def __init__(self, run_dir: str, step: int, evaluated: bool = True):
        os.makedirs(run_dir, exist_ok=True)
        self.path = os.path.join(run_dir, METRICS)
        self._keep_until(step, evaluated)
        self.file = open(self.path, "ab", buffering=0)
        self.unwritten = b""
        self.tensorboard = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            log.info("tensorboard is not installed: metrics go to metrics.jsonl alone")
        else:
            folder = os.path.join(run_dir, "tensorboard")
            self.tensorboard = SummaryWriter(folder, purge_step=step + 1)

    def _keep_until(self, step: int, evaluated: bool) -> None:
        temporary = self.path + ".tmp"
        with contextlib.suppress(FileNotFoundError):  # of a start that was killed
            os.remove(temporary)
        if not os.path.exists(self.path):
            if step:
                log.warning("%s: the lines up to step %d are not on this disk", self.path, step)
            return
        with open(self.path) as file:
            lines = file.readlines()
        kept = []
        for number, line in enumerate(lines, 1):
            try:
                if not line.endswith("\n"):
                    continue  # the writer was killed in the middle of it
                record = json.loads(line)
                if (record["step"], record["split"] == "val") <= (step, evaluated):
                    kept.append(line)
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{self.path}, line {number}: not a line of metrics") from error
        if kept != lines:
            with open(temporary, "w") as file:
                file.writelines(kept)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)

    def log(self, step: int, epoch: float, split: str, loss: float, **values: Any) -> None:
        """Records one measurement; null is written for None and for what is not finite."""
        record = {
            "step": step,
            "epoch": epoch,
            "split": split,
            "loss": loss,
            "bpc": loss / math.log(2),
            **values,
        }
        for name, value in record.items():
            if isinstance(value, float) and not math.isfinite(value):
                record[name] = None  # JSON has no NaN
        self.unwritten += json.dumps(record, allow_nan=False).encode() + b"\n"
        try:
            self._write()
        except OSError as error:
            log.warning("%s: %s; its lines are kept for later", self.path, error.strerror)
        if self.tensorboard is not None:
            try:
                for name, value in record.items():
                    if name not in ("step", "split") and isinstance(value, int | float):
                        self.tensorboard.add_scalar(f"{split}/{name}", value, step)
            except OSError as error:
                log.warning("TensorBoard: %s; it gets no more", error.strerror)
                self.tensorboard = None

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
        if self.unwritten:
            raise OSError(f"{self.path}: lines are waiting to be written")
        os.fsync(self.file.fileno())

    def close(self) -> None:
        """Raises OSError if lines are still waiting that cannot be written."""
        if self.unwritten:
            self._write()
        self.file.close()
        if self.tensorboard is not None:
            self.tensorboard.close()
