"""Starts of the program, and of torchrun, as copies of a process that has imported torch,
TensorBoard and Hydra, and nothing of ours. That import is four fifths of a tiny run, and the tests
make hundreds of them.

What torchrun starts and what is killed is started for real.
"""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch.utils.tensorboard", "hydra.main", "fsspec", "torch.distributed.launcher.api"])
PREFIXES = (sys.prefix, sys.base_prefix)


def run(command: list[str], cwd: Path, environment: dict[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` would of `python SCRIPT ARGUMENTS...` or `python -m MODULE ...`,
    without standard input.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, name) for name in ("stdin", "stdout", "stderr")]
        process = CONTEXT.Process(target=_become, args=(command[1:], str(cwd), environment, paths))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout)
        out, err = (Path(path).read_text() for path in paths[1:])
    return subprocess.CompletedProcess(command, process.exitcode, out, err)


def _become(argv: list[str], cwd: str, environment: dict[str, str], paths: list[str]) -> None:
    """Makes of this process a start of the script `argv[0]`, or of the module `argv[1]` after -m;
    does not return.
    """
    for fd, path in enumerate(paths):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), fd)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    is_module = argv[0] == "-m"
    sys.argv = argv[1:] if is_module else [*argv]
    sys.orig_argv = [sys.executable, *argv]
    first = str(cwd) if is_module else os.path.dirname(argv[0])
    given = filter(None, environment.get("PYTHONPATH", "").split(":"))
    sys.path[:] = [first, *given, *(p for p in sys.path if p.startswith(PREFIXES))]
    status: object = 0
    try:
        if is_module:
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as leaving:
        status = leaving.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    os._exit(status or 0)
