"""The directory of a run: what is in it by which name, who owns it, which is the newest, and where
its snapshot is.
"""

import contextlib
import fcntl
import glob
import logging
import os
import shlex
from collections.abc import Iterator

from omegaconf import OmegaConf

from engine.errors import UserError, one_line
from engine.run.signals import Stopped
from engine.snapshots.storage import beside, exists, is_local, snapshot_path
from trainer_config import TrainerConfig

log = logging.getLogger("gpt")

LOCK = ".lock"
LOG = "main.log"
CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
ENVIRONMENT = "environment.jsonl"
REPORT = "report.html"
JOB = "job.yaml"  # of a sweep's job: its overrides and how it ended
SET_ASIDE = ".set_aside"  # marks that trainer.resume=never has been followed
OTHER_FILES = (LOCK, LOG, CONFIG, METRICS, ENVIRONMENT, REPORT, JOB, SET_ASIDE)  # than snapshots


@contextlib.contextmanager
def lock_run(run_dir: str, config: TrainerConfig) -> Iterator[None]:
    """Makes `run_dir` and owns it for as long as the block lasts, and the run's snapshots where
    they are on a disk; the log is written to a file in it too.

    Raises `UserError` if something cannot be written, another run owns it, or the snapshot would
    have the name of another file.
    """
    if os.path.normpath(config.snapshot_path) in OTHER_FILES:
        raise UserError(
            f"trainer.snapshot_path={config.snapshot_path}: the run has another file of that name"
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(file_lock(os.path.join(run_dir, LOCK), f"run_dir={run_dir}"))
        stack.enter_context(log_to_file(os.path.join(run_dir, LOG)))
        path = snapshot_path(config.snapshot_path, run_dir)
        if not os.path.basename(config.snapshot_path):
            raise UserError(f"trainer.snapshot_path={config.snapshot_path}: must name a file")
        if is_local(path):
            folder, name = os.path.split(path)
            lock = os.path.join(folder, f".{name}{LOCK}")
            stack.enter_context(file_lock(lock, f"trainer.snapshot_path={path}"))
        yield


@contextlib.contextmanager
def file_lock(path: str, name: str) -> Iterator[None]:
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


class LogFile(logging.FileHandler):
    """A log file that is given up, with a word, when it cannot be written."""

    def handleError(self, record: logging.LogRecord) -> None:
        log.removeHandler(self)
        log.warning("%s cannot be written: no more is written to it", self.baseFilename)


@contextlib.contextmanager
def log_to_file(path: str) -> Iterator[None]:
    """Writes the log to the file at `path` too, with the error that ends the block, if one does."""
    handler = LogFile(path)
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


# --------------------------------------------------------------------------------------------------
# Finding what is there


def is_run(path: str) -> bool:
    """Whether `path` is the directory of a run that has logged something."""
    file = os.path.join(path, METRICS)
    return os.path.exists(file) and os.path.getsize(file) > 0


def runs() -> list[str]:
    """The directories of the runs under runs/, the one that has logged last first."""
    found = glob.glob(f"runs/**/{METRICS}", recursive=True)
    newest = [os.path.dirname(path) for path in sorted(found, key=os.path.getmtime, reverse=True)]
    return [path for path in newest if is_run(path)]


def newest_run() -> str:
    """The directory of the run under runs/ that has logged last. Raises `UserError` without any."""
    found = runs()
    if not found:
        raise UserError("no run under runs/ has logged anything yet; train first, or give run_dir=")
    return found[0]


def shown(path: str) -> str:
    """`path` to be copied into a command line: relative where it lies below this directory."""
    relative = os.path.relpath(path)
    return shlex.quote(path if relative.startswith("..") else relative)


def newest_instead(run_dir: str) -> str:
    """The end of an error about a `run_dir` that is not there, or not a run's: which run is.
    Recipes name their runs, so an example's is not on every machine.
    """
    if glob.glob(os.path.join(glob.escape(run_dir), "*", JOB)):
        return "; it is a sweep's: give the directory of one of its jobs"
    found = runs() if not os.path.isdir(run_dir) else []
    return f"; the newest run is {found[0]}" if found else ""


def recorded_snapshot_path(run_dir: str) -> str | None:
    """The `trainer.snapshot_path` in the `config.yaml` of a run; None where there is none.

    Raises `UserError` if the file cannot be read.
    """
    path = os.path.join(run_dir, CONFIG)
    if not os.path.exists(path):
        return None
    try:
        return OmegaConf.select(OmegaConf.load(path), "trainer.snapshot_path")
    except Exception as error:  # a file can be wrong in many ways
        raise UserError(
            f"{path}: cannot be read: {one_line(error)}; mend it, or move it away"
        ) from error


def check_none_elsewhere(run_dir: str, config: TrainerConfig) -> None:
    """Raises `UserError` if this run has its snapshots, but at another `trainer.snapshot_path`."""
    was = recorded_snapshot_path(run_dir)
    if was is None or was == config.snapshot_path:
        return
    before = snapshot_path(was, run_dir)
    if exists(before):
        raise UserError(
            f"trainer.snapshot_path={config.snapshot_path}: there is no snapshot, but this run has "
            f"one at {before}; resume with trainer.snapshot_path={was}, move it there, or start "
            "afresh with run_name=NEW_NAME or trainer.resume=never"
        )


def choose_snapshot(snapshot: str | None, run_dir: str | None) -> str:
    """The path of the snapshot to read a model from: `snapshot` where it is given, or else the best
    of the run in `run_dir`, or else of the newest run. The best is the one with the lowest held-out
    loss; the latest stands in where nothing was evaluated.

    Raises `UserError` if there is none.
    """
    if snapshot is not None and run_dir is not None:
        raise UserError("run_dir= and snapshot=: give only one of them")
    if snapshot is not None:
        return snapshot
    run_dir = run_dir or newest_run()
    recorded = recorded_snapshot_path(run_dir) or TrainerConfig.snapshot_path
    latest = snapshot_path(recorded, run_dir)
    for path in (beside(latest, "best"), latest):
        if exists(path):
            return path
    raise UserError(f"run_dir={run_dir}: there is no snapshot at {latest}{newest_instead(run_dir)}")
