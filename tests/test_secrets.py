"""Passwords and signatures in a URL are in no file of a run, and in no line that a program prints."""

import functools
import http.server
import threading

import pytest
from conftest import UNREAD, start, succeed

from engine.portable import is_installed
from engine.snapshots.storage import load


@pytest.fixture
def host(text_file, tmp_path):
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def settings(tmp_path) -> list[str]:
    return [*UNREAD, "data.block_size=16", f"data.cache_dir={tmp_path / 'cache'}", f"run_dir={tmp_path / 'run'}"]


def test_secrets_are_neither_shown_nor_written_nor_compared(host, settings, tmp_path, text_file):
    printed = []
    for number, steps in ((1, 2), (2, 4)):  # resumes with another signature
        url = f"'http://me:SECRET{number}@{host}/text.txt?X-Sig=SECRET{number}'"
        result = succeed(*settings, f"data.path={url}", f"trainer.max_steps={steps}", "report=true", cwd=tmp_path)
        printed.append(result.stdout)
    shown = f"http://***@{host}/text.txt?***"
    assert "changed since the snapshot: data" not in printed[1] and f"text        {shown}: 1,800" in printed[1]
    assert load(str(tmp_path / "run" / "gpt_snapshot.pt")).config["data"]["path"] == shown
    missing = start(*settings, f"data.path='http://{host}/no.txt?SECRET'", "run_dir=none", cwd=tmp_path)
    assert missing.returncode == 1 and "/no.txt?***: cannot be read: 404" in missing.stderr
    sweep = f"data.path='http://{host}/text.txt?SECRET','http://SECRET@{host}/text.txt'"
    result = succeed("-m", *settings, sweep, "run_name=sweep", cwd=tmp_path)
    copied = ("copied=true", "num_samples=1", "max_new_tokens=5", f"run_dir={tmp_path / 'run'}")
    refused = start(*copied, script="sample.py")
    assert refused.returncode == 1 and f"{shown}: the run recorded this without" in refused.stderr
    given = start(*copied, f"text={text_file}", script="sample.py")
    assert given.returncode == 0 and "of this is copied" in given.stderr
    exported = start(
        f"snapshot=http://{host}/run/gpt_snapshot.pt?SECRET", f"out={tmp_path / 'model'}", script="export.py"
    )
    scored = start(f"score=http://{host}/run/config.yaml?SECRET", f"run_dir={tmp_path / 'run'}", script="sample.py")
    assert "skipped" in scored.stderr and exported.returncode == 0, scored.stderr + exported.stderr
    if is_installed("wandb"):  # which records the command line
        succeed(*settings, f"data.path={url}", "run_dir=wandb", "trainer.trackers=[wandb]", cwd=tmp_path)
        assert (tmp_path / "wandb" / "wandb").is_dir()
    for program in (missing, result, refused, given, exported, scored):
        printed += [program.stdout, program.stderr]
    assert not any("SECRET" in text for text in printed)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not [path for path in files if "SECRET" in str(path) or b"SECRET" in path.read_bytes()]


def test_a_variable_of_the_environment_is_recorded_by_its_name(host, settings, tmp_path):
    url = f"http://me:${{oc.env:PASSWORD}}@{host}/text.txt?X-Sig=${{oc.env:SIGNATURE}}"
    secrets = {"PASSWORD": "SECRET1", "SIGNATURE": "SECRET2"}
    result = start(*settings, f'data.path="{url}"', env=secrets)
    assert result.returncode == 0 and "SECRET" not in result.stdout, result.stderr
    assert load(str(tmp_path / "run" / "gpt_snapshot.pt")).config["data"]["path"] == url
    copied = ("copied=true", "num_samples=1", "max_new_tokens=5", f"run_dir={tmp_path / 'run'}")
    assert start(*copied, script="sample.py", env=secrets).returncode == 0
    refused = start(*copied, script="sample.py")
    assert refused.returncode == 1 and "Environment variable 'PASSWORD' not found" in refused.stderr
