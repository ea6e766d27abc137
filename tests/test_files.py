import errno
import os

import pytest

from engine.errors import UserError
from engine.files import atomic_write
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


def test_a_file_system_without_locks_is_an_error_that_names_the_setting(tmp_path, monkeypatch):
    def refuse(file, wait):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("engine.portable.lock", refuse)
    with pytest.raises(UserError, match=r"run_dir=runs/a: cannot be locked: No locks available"):
        locked_file(str(tmp_path / "lock"), "run_dir=runs/a")
