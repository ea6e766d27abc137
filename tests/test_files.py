import errno
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from subprocess import PIPE

import pytest
from conftest import ROOT

from engine.errors import UserError
from engine.files import atomic_write, masked
from engine.run.directory import locked_file, log_to_file


def test_atomic_write_replaces_the_whole_file_or_nothing(tmp_path):
    path = tmp_path / "a"
    path.write_text("before")
    with pytest.raises(KeyError), atomic_write(str(path)) as file:
        file.write("half")
        raise KeyError
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["a"]
    with atomic_write(str(path)) as file:
        file.write("after")
    assert path.read_text() == "after" and os.listdir(tmp_path) == ["a"]


def test_a_write_error_names_the_target_file(tmp_path):
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "nowhere" / "a", tmp_path / "folder"):
        with pytest.raises(OSError) as raised, atomic_write(str(path)) as file:
            file.write("text")
        assert raised.value.filename == str(path) and ".tmp" not in str(raised.value)
    with pytest.raises(OSError) as raised, atomic_write(str(tmp_path / "a")):
        raise OSError(errno.ENOSPC, "No space left on device")  # as a write raises it
    assert raised.value.filename == str(tmp_path / "a")
    with pytest.raises(FileNotFoundError) as raised, atomic_write(str(tmp_path / "a")):
        open(tmp_path / "other")
    assert raised.value.filename == str(tmp_path / "other")


def test_the_log_file_has_the_traceback_of_a_bug_and_one_line_for_a_users_error(tmp_path):
    for error in (KeyError("rate"), UserError("trainer.seed=-1: must be at least 0")):
        with pytest.raises(type(error)), log_to_file(str(tmp_path / "log")):
            raise error
    first, *traceback, last = (tmp_path / "log").read_text().splitlines()
    assert first.endswith("ERROR 'rate'") and "KeyError: 'rate'" in traceback
    assert last.endswith("ERROR trainer.seed=-1: must be at least 0")


def test_a_lock_is_held_against_threads_and_released_by_a_process_that_dies(tmp_path):
    path = str(tmp_path / "lock")
    code = """
import os, signal, sys
from engine.files import file_lock
with file_lock(sys.argv[1]):
    if os.fork():  # the child outlives the holder
        os.kill(os.getpid(), signal.SIGKILL)
    print("child", flush=True)
    sys.stdin.read()
"""
    holder = subprocess.Popen([sys.executable, "-c", code, path], cwd=ROOT, stdin=PIPE, stdout=PIPE, text=True)
    assert holder.stdout.readline() == "child\n" and holder.wait(60) == -signal.SIGKILL

    def start() -> None:
        with locked_file(path, "run_dir=runs/a"):
            pass

    with locked_file(path, "run_dir=runs/a"), ThreadPoolExecutor() as threads:
        error = threads.submit(start).exception()
    assert isinstance(error, UserError) and str(error).startswith("run_dir=runs/a: another run is using it; wait")
    start()
    holder.communicate()


@pytest.mark.parametrize(
    "text, shown",
    [
        ("https://me:pw@h/f?X-Sig=a,b&c=d: cannot be read", "https://***@h/f?***: cannot be read"),
        ("https://h/f?X-Sig=a,b: cannot be read", "https://h/f?***: cannot be read"),
        ("[https://me:p@w@h/a?x=1,s3://k@h/b?y]", "[https://***@h/a?***,s3://***@h/b?***]"),
        ("zip://a.txt::https://h/f.zip?s.", "zip://a.txt::https://h/f.zip?***."),
        *((text, text) for text in ('data.path="https://${oc.env:ME}@h/f?s=${oc.env:SIG}"', "is it a?b@c")),
        ("[https://me@h/f,https://h/f?${oc.env:SIG}]", "[https://***@h/f,https://h/f?${oc.env:SIG}]"),
        ({"a": ["https://h/@me/f?x"], "b": 1}, {"a": ["https://h/@me/f?***"], "b": 1}),
        ("https://h/it's my.txt?s=1: no such file", "https://h/it's my.txt?***: no such file"),
        ('s3://me:p@h/f: no "me:p@h", he@h', 's3://***@h/f: no "***@h", he@h'),
    ],
)
def test_the_user_and_the_query_of_a_url_are_masked(text, shown):
    assert masked(text) == shown


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks_gets_a_warning(tmp_path, monkeypatch, caplog, number):
    def refuse(file, mode):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    locks = (locked_file(str(tmp_path / name / "lock"), "run_dir=runs/a") for name in "ab")
    if number == errno.EIO:
        with pytest.raises(UserError, match=r"run_dir=runs/a: cannot be written: Input/output error"), next(locks):
            pass
    else:
        with next(locks), next(locks):
            pass
        assert caplog.text.count("the file system has no locks") == 2
