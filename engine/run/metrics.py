"""Metrics: one JSON line per measurement in `metrics.jsonl`."""

import contextlib
import errno
import io
import json
import logging
import math
import os
from typing import Any

from engine.errors import UserError
from engine.files import atomic_write
from engine.run.directory import METRICS

log = logging.getLogger("gpt")


def parse_lines(path: str, *keys: str) -> list[dict[str, Any] | None]:
    """Reads a file of JSON objects, one per line; an empty list if there is no file. NaN becomes None, and so does a
    line that is damaged or lacks `step` or one of `keys`. Half a line at the end is left out: it is being written.
    """
    if not os.path.exists(path):
        return []
    with open(path, errors="replace") as file:
        lines = file.readlines()
    records: list[dict[str, Any] | None] = []
    for line in lines:
        try:
            record = json.loads(line, parse_constant=lambda name: None)
            is_whole = isinstance(record["step"], int) and record.keys() >= {*keys}
            records.append(record if is_whole else None)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            records.append(None)
    if records and records[-1] is None and not lines[-1].endswith("\n"):
        records.pop()
    return records


def read_lines(path: str, *keys: str) -> list[dict[str, Any]]:
    """`parse_lines` without damaged lines at the end: the writer was killed. Raises `UserError` naming any other."""
    records = parse_lines(path, *keys)
    while records and records[-1] is None:
        records.pop()
    if None in records:
        raise UserError(f"{path}, line {records.index(None) + 1}: damaged; correct it, or move it away")
    return [record for record in records if record is not None]


def as_line(record: dict[str, Any]) -> bytes:
    """A line of JSON."""
    return json.dumps(record).encode() + b"\n"


def position(record: dict[str, Any]) -> tuple[int, bool]:
    """Sort key of a line of metrics: its step, and whether it is an evaluation, which follows the training line."""
    return record["step"], record["split"] == "val"


def duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def format_loss(loss: float | None) -> str:
    """Four decimals, or "-" for None."""
    return "-" if loss is None else f"{loss:.4f}"


class MetricsFile:
    """Appends to `metrics.jsonl` in `run_dir`.

    Every line has `step`, `epoch`, `split` (train, val, or final), `loss` in nats per character, `bpc` in bits, and
    `seconds` of training so far; those of training and evaluation also `progress`, from 0 to 1. Training lines add
    `lr`, `grad_norm` (before clipping), `tokens_per_s` (characters, of all processes), `mfu` (share of the peak rate),
    `memory` (peak bytes) and sometimes `samples`; the others add `tokens` (characters scored) and `rank_losses`. If the
    run diverged, the last line says why in `diverged`.

    Resuming at `step` drops all later lines, which will be logged again, and the evaluation of `step` itself unless
    `evaluated`. Warns if fewer than `lines`, the count in the snapshot, are left. `logged`: the last line so far, as
    (step, whether an evaluation), or the snapshot, if that is later.
    """

    def __init__(self, run_dir: str, step: int = 0, evaluated: bool = True, lines: int = 0):
        self.path = os.path.join(run_dir, METRICS)
        earlier = read_lines(self.path, "split")
        kept = [line for line in earlier if position(line) <= (step, evaluated) and line["split"] != "final"]
        if len(kept) < lines:
            log.warning("%s: missing %d of %d lines up to step %d", self.path, lines - len(kept), lines, step)
        self.logged = max([(step, evaluated), *map(position, earlier)])
        self.lines = len(kept)  # in the file, or waiting to be written
        self.unwritten = b"".join(map(as_line, kept))
        self.file: io.FileIO | None = None  # None: `flush` makes it anew
        self.fails = False  # whether the last write failed
        self.flush()

    def reopen(self) -> None:
        """Writes the lines so far into a new file: the old one may be deleted."""
        if self.file is None:
            return
        with contextlib.suppress(OSError), self.file:  # of NFS, a deleted file cannot be read
            self.file.seek(0)
            self.unwritten = self.file.read() + self.unwritten
        self.file = None
        self.flush()

    def log(self, step: int, epoch: float, split: str, loss: float, seconds: float, **values: Any) -> dict[str, Any]:
        """Writes one measurement, and returns it. Non-finite values become null: JSON has no NaN."""
        record = {"step": step, "epoch": epoch, "split": split, "loss": loss}
        record |= {"bpc": loss / math.log(2), "seconds": round(seconds, 3), **values}
        for name, value in record.items():
            if isinstance(value, float) and not math.isfinite(value):
                record[name] = None
        self.unwritten += as_line(record)
        self.lines += 1
        self.flush()
        return record

    def flush(self, sync: bool = False) -> None:
        """Writes all pending lines or none; `sync` flushes them to disk. Logs the first of several errors in a row;
        unwritten lines stay in memory for the next call.
        """
        try:
            if self.file is None:
                os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
                with atomic_write(self.path, "wb") as file:
                    file.write(self.unwritten)
                self.unwritten, self.file = b"", open(self.path, "a+b", buffering=0)
            size = self.file.seek(0, os.SEEK_END)
            if self.file.write(self.unwritten) < len(self.unwritten):  # unbuffered: it reaches the system or fails
                self.file.truncate(size)  # half a line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.unwritten = b""
            if sync:
                os.fsync(self.file.fileno())
            self.fails = False
        except OSError as error:
            if not self.fails:
                log.warning("cannot write %s (%s); will retry", self.path, error.strerror)
            self.fails = True

    def close(self) -> None:
        """Closes the file. Warns of unwritten lines, which are lost."""
        self.flush()
        if self.unwritten:
            log.warning("%s: %d lines are lost", self.path, self.unwritten.count(b"\n"))
        if self.file is not None:
            self.file.close()
