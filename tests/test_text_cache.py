"""Texts larger than memory: encoded once, shared, and the same as if they were in memory."""

import fcntl
import gzip
import hashlib
import http.server
import os
import random
import signal
import subprocess
import sys
import threading
import time

import chaos
import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, command, metrics, small_disk, start

from char_dataset import CharDataset, encode_text
from engine.errors import UserError
from engine.text import encoding as text_cache
from engine.text import sources as text_files
from engine.text.encoding import fill, load, open_text, write_record
from engine.text.sources import DataConfig, TextFile

TEXTS = {
    "ascii": "the quick brown fox\n" * 400 + "jumps!",
    "one character": "a" * 5000,
    "mixed": "".join(random.Random(1).choices("abc é漢🙂\r\n\0\U0010ffff", k=9000)),
    "ascii that comes late": "".join(map(chr, range(300, 600))) * 9 + "plain text " * 300,
    "exactly 256": "".join(map(chr, range(255, -1, -1))) * 30,
    "257 and more": "z" * 3000 + "".join(map(chr, range(257))) * 20,
    "70,000 characters": "".join(map(chr, range(0x10000, 0x10000 + 70_000))) + "tail" * 99,
}


@pytest.fixture
def large(tmp_path, monkeypatch):
    """Makes all texts large ones, read in small pieces; returns how to write and configure one."""
    monkeypatch.setattr(text_cache, "LARGE", 1000)
    monkeypatch.setattr(text_files, "PIECE", 777)
    monkeypatch.setattr(text_cache, "CHUNK", 501)

    def make(text: str, name: str = "text.txt", **settings) -> DataConfig:
        content = text.encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
        return DataConfig(
            path=str(tmp_path / name), cache_dir=str(tmp_path / "cache"), block_size=8, **settings
        )

    return make


@pytest.fixture
def passes(monkeypatch) -> list[str]:
    """The names of the files that are read, one for each time."""
    names, pieces = [], TextFile.pieces

    def counted(file, *arguments, **named):
        names.append(os.path.basename(file.name))
        return pieces(file, *arguments, **named)

    monkeypatch.setattr(TextFile, "pieces", counted)
    return names


def caches(config: DataConfig) -> list[str]:
    return [name for name in os.listdir(config.cache_dir) if name != ".lock"]


def cache(config: DataConfig) -> str:
    [name] = caches(config)
    return os.path.join(config.cache_dir, name)


# --- the same as in memory ---


@pytest.mark.parametrize("truncate", [1.0, 0.73, 0.25])
@pytest.mark.parametrize("name", TEXTS)
def test_a_large_text_gives_what_it_gives_in_memory(name, truncate, large, monkeypatch):
    config = large(TEXTS[name], truncate=truncate, train_split=0.83)
    data = CharDataset(config)
    assert caches(config)
    whole = encode_text(TEXTS[name][: int(len(TEXTS[name]) * truncate)])
    monkeypatch.setattr(text_cache, "LARGE", 2**20)
    expected = CharDataset(config)
    assert (expected.vocabulary, expected.digest) == (whole.vocabulary, whole.digest)
    for ours, theirs in zip([data, *data.split()], [expected, *expected.split()], strict=True):
        assert ours.vocabulary == theirs.vocabulary and ours.digest == theirs.digest
        assert ours.data.dtype == theirs.data.dtype and torch.equal(ours.data, theirs.data)
        assert len(ours) == len(theirs) and ours.stoi == theirs.stoi
        indices = np.array([0, len(ours) - 1, len(ours) // 2])
        for method, arguments in (
            ("batch", [indices]),
            ("eval_windows", [0, ours.num_eval_windows + 1]),
        ):
            results = zip(
                getattr(ours, method)(*arguments), getattr(theirs, method)(*arguments), strict=True
            )
            assert all(torch.equal(a, b) for a, b in results)


@pytest.mark.parametrize("name", ["mixed", "ascii"])  # large before, and large after decompression
def test_a_compressed_text_is_large_by_its_size_or_what_was_read(name, large, passes):
    config = large(TEXTS[name], "text.gz")
    assert (os.path.getsize(config.path) > text_cache.LARGE) == (name == "mixed")
    assert CharDataset(config).digest == hashlib.sha256(TEXTS[name].encode()).hexdigest()
    assert caches(config) and passes == ["text.gz"]
    small = large("short text " * 9, "small.gz")
    assert open_text(small) == "short text " * 9 and len(caches(small)) == 1


def test_only_what_others_need_not_read_is_handed_to_them(large, passes):
    assert fill(large("short text " * 9)) is None and passes == []
    assert fill(large("short text " * 9, "small.gz")) == "short text " * 9
    config = large(TEXTS["ascii"], "large.gz")
    assert fill(config) is None and load(cache(config), config) is not None


# --- once ---


def test_the_source_is_read_once_and_not_again_by_a_second_start(large, passes):
    config = large(TEXTS["70,000 characters"])
    first = CharDataset(config)
    assert passes == ["text.txt"]
    second = CharDataset(config)
    assert passes == ["text.txt"] and torch.equal(first.data, second.data)


def test_a_changed_text_is_encoded_anew(large, passes):
    before = CharDataset(large("a text " * 999))
    after = CharDataset(large("A TEXT " * 999))  # of the same size
    assert passes == ["text.txt"] * 2 and before.digest != after.digest
    assert set(after.vocabulary) == set("A TEXT ")
    CharDataset(large("A TEXT " * 999, truncate=0.5))
    assert len(passes) == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: content[:5],
        lambda content: b"",
        lambda content: content + b"\n",
        lambda content: content[1:],
        lambda content: b"-" + content,
        lambda content: content[:-90] + bytes([content[-90] ^ 1]) + content[-89:],
    ],
)
def test_a_damaged_cache_is_noticed_and_made_anew(damage, large, passes, caplog):
    config = large(TEXTS["mixed"])
    digest = CharDataset(config).digest
    with open(cache(config), "rb") as file:
        good = file.read()
    with open(cache(config), "wb") as file:
        file.write(damage(good))
    assert CharDataset(config).digest == digest and len(passes) == 2
    assert caplog.text.count("damaged: rebuilding it") == 1
    with open(cache(config), "rb") as file:
        assert file.read() == good


def test_a_text_of_twice_the_memory_is_mapped(tmp_path):
    """Of zeros that take no disk, for which the file system is asked first."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    path = tmp_path / "zeros.ids"
    with open(path, "wb") as file:
        try:
            file.truncate(2 * memory)
        except OSError as error:
            pytest.skip(f"no file may be that large here: {error.strerror}")
        file.seek(0, os.SEEK_END)
        record = {"vocabulary": "ab", "type": "uint8", "characters": 2 * memory}
        write_record(file, record | {"digest": "0", "source_digest": "0"})
    config = DataConfig(path="zeros.txt", block_size=8)
    part = CharDataset.__new__(CharDataset)
    part._init(config, *load(str(path), config), name="text")
    _, test = part.split()
    x, _ = test.batch(np.array([0, len(test) - 1]))
    assert len(test) > 0.19 * memory and x.shape == (2, 8) and not x.any()


# --- failures ---


@pytest.mark.parametrize(
    "content, settings, says",
    [
        (b"x" * 2000 + b"caf\xe9 ", {}, "not UTF-8: byte 0xe9 at offset 2003"),
        (b"x" * 775 + "漢".encode()[:2] + b"x" * 900, {}, "not UTF-8: byte 0xe6 at offset 775"),
        (b"x" * 2000, {"sha256": "0" * 64}, "SHA-256 is"),
        (b"x" * 2000, {"truncate": 1e-5}, "the text is empty (data.truncate=1e-05)"),
        (b"x" * 2000, {"truncate": 0.004}, "data.block_size=8: the text has 8 characters"),
    ],
)
def test_a_bad_text_is_refused_as_it_is_in_memory(content, settings, says, large, monkeypatch):
    config = large("", **settings)
    with open(config.path, "wb") as file:
        file.write(content)
    for limit in (1000, 10**6):
        monkeypatch.setattr(text_cache, "LARGE", limit)
        for _ in range(2):  # a cache must not hide it
            with pytest.raises(UserError) as refused:
                CharDataset(config)
            assert says in str(refused.value)
    assert not [name for name in caches(config) if name.endswith(".tmp")]


def test_a_cache_directory_that_cannot_be_used_is_named(large, tmp_path):
    config = large(TEXTS["ascii"])
    config.cache_dir = "/proc/nowhere"
    with pytest.raises(UserError, match=r"data.cache_dir=/proc/nowhere: cannot be written: "):
        CharDataset(config)
    config.cache_dir = str(tmp_path / "cache")
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match=r"data.cache_dir=.*cache: .*cannot be read: Not a dir"):
        CharDataset(config)


def test_a_full_disk_leaves_nothing_behind(large, tmp_path):
    config = large(TEXTS["70,000 characters"] * 20)
    with small_disk(tmp_path, "1m") as disk:
        config.cache_dir = str(disk / "cache")
        with pytest.raises(UserError, match=r"cannot be written: .*No space left"):
            CharDataset(config)
        assert caches(config) == []


def test_who_wants_to_write_waits_for_who_does(large, tmp_path, passes):
    """Lines of the other process, and what it finds when it is its turn."""
    config = large(TEXTS["mixed"])
    os.makedirs(config.cache_dir)
    script = (
        "import logging, sys; from engine.text import encoding as text_cache\n"
        "from engine.text.sources import DataConfig\n"
        "logging.basicConfig(level=20, stream=sys.stdout, format='%(message)s')\n"
        "text_cache.LARGE = 1000\n"
        "print(text_cache.open_text(DataConfig(path=sys.argv[1], cache_dir=sys.argv[2])).digest)\n"
    )
    with open(os.path.join(config.cache_dir, ".lock"), "a") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [sys.executable, "-c", script, config.path, config.cache_dir],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout.readline().startswith("waiting ")
            assert caches(config) == []
            fcntl.lockf(lock, fcntl.LOCK_UN)
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert "encoding" in out and out.split()[-1] == CharDataset(config).digest and passes == []


# --- whole processes ---


def write_large(path, num_bytes: int = 80 * 2**20) -> None:
    block = "".join(random.Random(3).choices("etaoin shrdlu\n", k=2**20))
    with open(path, "w") as file:
        for _ in range(num_bytes // len(block)):
            file.write(block)


def test_encoding_takes_little_memory_whatever_the_size_of_the_text(tmp_path):
    write_large(tmp_path / "a.txt", 200 * 2**20)
    script = (
        "import resource, sys; from char_dataset import CharDataset, DataConfig\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "config, before = DataConfig(path=sys.argv[1], cache_dir=sys.argv[2]), peak()\n"
        "CharDataset(config).split()\n"
        "print(peak() - before)\n"
    )
    arguments = [str(tmp_path / "a.txt"), str(tmp_path)]
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 50 * 1024, f"{result.stdout} KiB"


@pytest.mark.parametrize("nproc", [0, 2])
def test_a_build_that_is_killed_is_done_again_and_shared(nproc, tmp_path):
    write_large(tmp_path / "a.txt")
    settings = [
        *(s for s in TINY if not s.startswith("data")),
        "data=text",
        f"data.path={tmp_path / 'a.txt'}",
        f"data.cache_dir={tmp_path / 'cache'}",
        "data.block_size=16",
        "data.train_split=0.9999",
        f"run_dir={tmp_path / 'run'}",
    ]
    process = subprocess.Popen(
        command(*settings, nproc=nproc), cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("cache/*.tmp")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
    assert not list(tmp_path.glob("cache/*.ids"))

    process = subprocess.Popen(
        command(*settings, "trainer.max_steps=100000", "trainer.max_epochs=null", nproc=nproc),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 90
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        [built] = tmp_path.glob("cache/*.ids")
        assert not list(tmp_path.glob("cache/*.tmp"))
        for pid in chaos.children(process.pid) if nproc else [process.pid]:
            with open(f"/proc/{pid}/maps") as maps:
                mapped = [line.split() for line in maps if str(built) in line]
            assert mapped and all(fields[1] == "r--s" for fields in mapped)  # one copy for all
        process.terminate()
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert out.count("encoding    ") == 1 and "SIGTERM: stopped after step" in out


def test_several_files_train_and_go_on_as_one(tmp_path):
    text = "To be, or not to be, that is the question. " * 40
    (tmp_path / "1.txt").write_text(text[:500])
    (tmp_path / "2.gz").write_bytes(gzip.compress(text[500:].encode()))
    (tmp_path / "whole.txt").write_text(text)
    settings = [*(s for s in TINY if not s.startswith(("data=", "data.truncate"))), "data=text"]
    for steps, path, nproc in (
        (2, f"[{tmp_path / '1.txt'},{tmp_path / '2.gz'}]", 0),
        (3, f"'{tmp_path}/[12].*'", 2),
        (4, str(tmp_path / "whole.txt"), 0),
    ):
        run = [f"data.path={path}", f"trainer.max_steps={steps}", f"run_dir={tmp_path / 'run'}"]
        result = start(*settings, *run, nproc=nproc)
        assert result.returncode == 0, result.stderr
        assert steps == 2 or f"gpt_snapshot.pt, step {steps - 1}" in result.stdout
    assert [line["step"] for line in metrics(tmp_path / "run", "train")] == [1, 2, 3, 4]


class Slow(http.server.BaseHTTPRequestHandler):
    """A server that takes its time for what it tells at once the size of."""

    text = b"A text that is long in coming. " * 99
    requests: list[str] = []  # noqa: RUF012

    def do_HEAD(self) -> None:
        self.requests.append(self.command)
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.text)))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        time.sleep(7)
        self.wfile.write(self.text)


@pytest.mark.slow
def test_reading_may_take_longer_than_processes_wait_for_each_other(tmp_path):
    settings = [s for s in TINY if not s.startswith(("data=", "data.truncate"))]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = start(
            *settings,
            "data=text",
            f"data.path=http://127.0.0.1:{server.server_address[1]}/text.txt",
            "trainer.timeout_s=4",
            f"run_dir={tmp_path / 'run'}",
            nproc=2,
        )
        server.shutdown()
    assert result.returncode == 0, result.stderr
    assert "step 6/6" in result.stdout and Slow.requests.count("GET") == 1


def test_another_share_of_a_text_is_another_one_in_the_cache(large):
    whole = large(TEXTS["ascii"])
    half = large(TEXTS["ascii"], truncate=0.5)
    length = len(TEXTS["ascii"])
    assert [len(CharDataset(c).data) for c in (whole, half, whole)] == [length, length // 2, length]
