"""Run directory: the names of its files, its lock and owner, the newest run, the snapshot to read."""

import contextlib
import glob
import logging
import os
import shlex
import shutil
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import yaml
from filelock import Timeout

from engine.config.schema import TrainerConfig
from engine.errors import UserError, check_only_one, one_line
from engine.files import atomic_write, file_lock, masked, usable
from engine.parallel.distributed import name_failed_ranks, run_on_rank_0
from engine.signals import Stopped
from engine.snapshots import storage

log = logging.getLogger("gpt")

LOCK = ".lock"
OWNER = ".owner"  # a token of the run that holds the lock beside it
LOG = "main.log"
CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
ENVIRONMENT = "environment.jsonl"
REPORT = "report.html"
JOB = "job.yaml"  # of a job of a sweep: its overrides and how it ended
OTHER_FILES = (LOCK, OWNER, LOG, CONFIG, METRICS, ENVIRONMENT, REPORT, JOB)
HISTORY = (METRICS, ENVIRONMENT, "tensorboard")  # renamed by a run from scratch
SNAPSHOT = TrainerConfig.snapshot_path  # unless the run's configuration names another


@contextlib.contextmanager
def open_run(run_dir: str, snapshot_path: str) -> Iterator[Callable[[], bool]]:
    """On rank 0, creates `run_dir`, holds its lock and that of a snapshot on a local disk, and logs to a file
    in it, for as long as the block lasts. If a collective fails within it, the log names the ranks that do not respond.
    Gives `restore_missing_files` of this run, for rank 0.

    Raises `UserError` on every rank if a file cannot be written, another run holds a lock, or `snapshot_path`
    names no file, or another file of the run.
    """
    path = storage.snapshot_path(snapshot_path, run_dir)
    folder, name = os.path.split(path) if storage.is_local(path) else (run_dir, "")
    beside = os.path.join(folder, f".{name}" if name else "")  # the lock and the owner of the snapshots
    owner, token = f"{beside}{OWNER}", uuid.uuid4().hex
    stack = contextlib.ExitStack()

    def enter() -> None:
        is_new = not os.path.exists(run_dir)
        if os.path.basename(snapshot_path) in ("", ".", "..", *OTHER_FILES):
            raise UserError(f"trainer.snapshot_path={snapshot_path}: must name a file of its own")
        stack.enter_context(locked_file(os.path.join(run_dir, LOCK), f"run_dir={run_dir}"))
        if is_new:
            stack.callback(remove_if_unused, run_dir)
        stack.enter_context(log_to_file(os.path.join(run_dir, LOG)))
        if name:
            stack.enter_context(locked_file(f"{beside}{LOCK}", f"trainer.snapshot_path={path}"))
        with atomic_write(owner) as file:
            file.write(token)

    with stack, name_failed_ranks(lambda: "while the run starts or ends"):
        run_on_rank_0(enter)
        yield lambda: restore_missing_files(run_dir, owner, token)


def remove_if_unused(run_dir: str) -> None:
    """Removes the directory of a run that ended before it wrote more than its log."""
    with contextlib.suppress(OSError):  # already removed
        if all(name == LOG or name.endswith((LOCK, OWNER)) for name in os.listdir(run_dir)):
            shutil.rmtree(run_dir)


def locked_file(path: str, setting: str) -> contextlib.AbstractContextManager[object]:
    """`file_lock`, without waiting. Raises `UserError` naming `setting` if the file cannot be created or another run
    holds it.
    """
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        return file_lock(path, wait=False)
    except Timeout as error:
        why = "another run is using it; wait for it, or set run_name=NEW_NAME"
        raise UserError(f"{setting}: {why}") from error
    except OSError as error:
        raise UserError(f"{setting}: cannot be written: {error.strerror}") from error


def restore_missing_files(run_dir: str, owner: str, token: str) -> bool:
    """If a file of this run is missing, or the token cannot be read, writes the token and the log again, with a
    warning. Returns whether all were there; if not, the caller writes the others.

    Raises `UserError` if the token is another run's. Deleting a run directory deletes its lock, and another run can
    start there. Do not open the lock file itself: closing it releases a POSIX lock.
    """
    try:
        with open(owner, encoding="utf-8", errors="replace") as file:
            found = file.read()
    except OSError:
        found = ""
    if found not in ("", token):
        raise UserError(f"{owner}: another run has started in this directory; this run ends without writing")
    paths = [os.path.join(run_dir, name) for name in (LOG, CONFIG, METRICS, ENVIRONMENT)]
    gone = [path for path in paths if not os.path.exists(path)] + [owner] * (not found)
    if not gone:
        return True
    try:
        for path in (os.path.join(run_dir, LOG), owner):
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with atomic_write(owner) as file:
            file.write(token)
        for handler in (each for each in log.handlers if isinstance(each, logging.FileHandler)):
            if old := handler.setStream(open(handler.baseFilename, "a", encoding="utf-8", errors="replace")):
                old.close()
    except OSError as error:
        log.warning("cannot write %s (%s); will retry", error.filename, error.strerror)
    log.warning("missing, deleted or not written before; writing again: %s", ", ".join(gone))
    return False


class MaskedFormatter(logging.Formatter):
    """Messages and tracebacks without what may be secret in a URL."""

    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))


@contextlib.contextmanager
def log_to_file(path: str) -> Iterator[None]:
    """Logs to the file at `path` during the block, including the error that ends it."""
    handler = logging.FileHandler(path, encoding="utf-8", errors="replace")
    # A full disk does not end the run here: metrics and snapshots report it, each with a line.
    handler.handleError = lambda record: None  # type: ignore[method-assign]
    handler.setFormatter(MaskedFormatter("[%(asctime)s] %(levelname)s %(message)s"))
    log.addHandler(handler)
    try:
        yield
    except Exception as error:
        if not isinstance(error, Stopped):  # the console gets it from the program
            # The message of another error may be only a key, so its traceback is logged.
            traceback = None if isinstance(error, UserError) else (type(error), error, error.__traceback__)
            handler.handle(log.makeRecord(log.name, logging.ERROR, path, 0, one_line(error), (), traceback))
        raise
    finally:
        log.removeHandler(handler)
        with contextlib.suppress(OSError):  # a full disk
            handler.close()


# --- finding runs and their snapshots ---


def is_run(path: str) -> bool:
    """Whether `path` is the directory of a run that has logged something."""
    file = os.path.join(path, METRICS)
    return os.path.exists(file) and os.path.getsize(file) > 0


def runs() -> list[str]:
    """The directories of the runs under runs/, the most recently logged first."""
    newest = sorted(glob.glob(f"runs/**/{METRICS}", recursive=True), key=os.path.getmtime, reverse=True)
    return [*filter(is_run, map(os.path.dirname, newest))]


def newest_run() -> str:
    """The most recently logged run under runs/. Raises `UserError` if there is none."""
    found = runs()
    if not found:
        raise UserError("no run under runs/ has logged anything yet; train first, or give run_dir=")
    return found[0]


def newest_run_hint(run_dir: str) -> str:
    """Hint for an error about a wrong `run_dir`: the likely directory."""
    if glob.glob(os.path.join(glob.escape(run_dir), "*", JOB)):
        return "; it is a sweep's: give the directory of one of its jobs"
    found = runs() if not os.path.isdir(run_dir) else []
    return f"; the newest run is {found[0]}" if found else ""


def shell_path(path: str) -> str:
    """`path` for a command line: quoted, and relative if it is below the working directory."""
    relative = os.path.relpath(path)
    return shlex.quote(path if relative.startswith("..") else relative)


def read_yaml(path: str, **types: type) -> dict[str, Any]:
    """Reads a dictionary from a file. Raises `UserError` if it cannot be read, or an entry does not have its type."""
    try:
        with open(path, encoding="utf-8") as file:
            found = yaml.safe_load(file)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: not UTF-8, or no such date
        raise UserError(f"{path}: cannot be read: {one_line(error)}") from error
    values = found if isinstance(found, dict) else {}
    for key, kind in types.items():
        if not isinstance(values.get(key), kind):
            raise UserError(f"{path}: {key} is missing, or not of type {kind.__name__}")
    return values


def choose_snapshot(snapshot: str | None, run_dir: str | None) -> str:
    """The path of the snapshot to load: `snapshot` (a file, URL or run directory), or that of the run in `run_dir`, or
    of the newest run. For a run, it is the best snapshot (lowest held-out loss), or the latest if there is none.

    Raises `UserError` if there is none.
    """
    if snapshot is not None and not os.path.isdir(snapshot):
        return snapshot
    run_dir, name = snapshot or run_dir or newest_run(), SNAPSHOT
    if os.path.exists(config := os.path.join(run_dir, CONFIG)):  # a Trainer without main.py writes none
        name = read_yaml(config, trainer=dict)["trainer"].get("snapshot_path", SNAPSHOT)
        if not isinstance(name, str):
            raise UserError(f"{config}: trainer.snapshot_path is not of type str")
    latest = storage.snapshot_path(usable(name, "snapshot"), run_dir)
    for path in (storage.beside(latest, "best"), latest):
        if storage.exists(path):
            return path
    key, hint = "snapshot" if snapshot else "run_dir", newest_run_hint(run_dir)
    raise UserError(f"{key}={run_dir}: there is no snapshot at {latest}{hint}")


def choose_snapshots(snapshots: list[str] | None, snapshot: str | None, run_dir: str | None) -> list[str]:
    """`choose_snapshot` for each of `snapshots`, or for `snapshot` or `run_dir`. Raises `UserError` for more than one
    of the three, or if there is no snapshot.
    """
    check_only_one(snapshots=snapshots, snapshot=snapshot, run_dir=run_dir)
    if snapshots == []:
        raise UserError("snapshots=[]: names no snapshot; use [a.pt,b.pt]")
    paths = [snapshot] if snapshots is None else snapshots
    return [choose_snapshot(path, run_dir) for path in paths]
