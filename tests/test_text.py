"""Texts from any source, of any size, encoded to the same ids in memory and in the cache."""

import bz2
import dataclasses
import functools
import gzip
import hashlib
import http.server
import logging
import lzma
import os
import random
import re
import sys
import tarfile
import threading
import time
import zipfile
from pathlib import Path

import chaos
import fsspec
import numpy as np
import pytest
from conftest import ROOT, UNREAD, command, read_until, run_python, small_disk, succeed, wait_until
from omegaconf import OmegaConf

import main
from char_dataset import CharDataset, DataConfig
from config import Config
from engine.errors import UserError
from engine.files import file_lock
from engine.text import documents, encoding, sources
from engine.text.documents import PYDOC
from engine.text.encoding import SHAKESPEARE_URL, prepare_text

TEXT = "naïve café 漢字 🙂\r\n" * 50
TEXTS = {
    "ascii": "the quick brown fox\n" * 400 + "jumps!",
    "one character": "a" * 5000,
    "mixed": "".join(random.Random(1).choices("abc é漢🙂\r\n\1\U0010ffff", k=9000)) + "\0",
    "ascii that comes late": "".join(map(chr, range(300, 600))) * 9 + "plain text " * 300,
    "exactly 256": "".join(map(chr, range(255, -1, -1))) * 30,
    "257 and more": "z" * 3000 + "".join(map(chr, range(257))) * 20,
    "40,000 characters": "".join(map(chr, range(0x10000 + 40_000, 0x10000, -1))),
    "70,000 characters": "".join(map(chr, range(0x10000, 0x10000 + 70_000))) + "tail" * 99,
}


def read(path, **settings) -> str:
    """The text at `path`; several documents follow each other."""
    return documents.read_text(path, DataConfig(path="-", **{"newlines": "keep", "separator": "none", **settings}))


@pytest.fixture
def books(tmp_path):
    """A folder of three texts, and what else a folder may hold."""
    folder = tmp_path / "books"
    folder.mkdir()
    for name, content in (("b.txt", "second "), ("a.txt", "first "), ("c[1].txt", "third ")):
        (folder / name).write_text(content)
    (folder / "notes.md").write_text("not a book")
    (folder / "d.txt").mkdir()
    return folder


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes texts of 1,000 bytes large ones, read in small pieces; returns how to write and configure one."""
    monkeypatch.setattr(encoding, "LARGE", 1000)
    monkeypatch.setattr(sources, "PIECE", 777)
    monkeypatch.setattr(encoding, "CHUNK", 501)

    def make(text: str, name: str = "text.txt", **settings) -> DataConfig:
        content = text.encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
        usual = {"cache_dir": str(tmp_path / "cache"), "block_size": 8, "newlines": "keep"}
        return DataConfig(path=str(tmp_path / name), **(usual | settings))

    return make


@pytest.fixture
def passes(monkeypatch) -> list[str]:
    """The names of the files that are read, one for each time."""
    names, read_file = [], sources.read_file

    def counted(file):
        names.append(os.path.basename(file.path))
        return read_file(file)

    monkeypatch.setattr(sources, "read_file", counted)
    return names


def cached(config: DataConfig) -> list[str]:
    """The texts in the cache: paths without extensions."""
    files = os.listdir(config.cache_dir) if os.path.exists(config.cache_dir) else []
    return [os.path.join(config.cache_dir, file[:-4]) for file in files if file.endswith(".ids")]


# --- where a text comes from ---


def test_lists_and_patterns_are_one_text(books, monkeypatch):
    a, b = str(books / "a.txt"), str(books / "b.txt")
    (books / ".d.txt").write_text("hidden ")
    (books / ".copies").mkdir()
    (books / ".copies" / "a.txt").write_text("copy ")
    fsspec.filesystem("memory").pipe({f"/several/{name}.txt": name.encode() for name in "ba"})
    for path, text in (
        ([b, a, b], "second first second "),  # in the order given
        ([a, f"{books}/b*"], "first second "),
        (f"{books}/*.txt", "first second third "),  # sorted by name
        (f"file://{books}/**/*.txt", "first second third "),
        ("memory://several/*.txt", "ab"),
        (f"{books}/c[1].txt", "third "),  # a name without a *
        (f"{books}/.d*", "hidden "),
        (f"{books}/.copies/*", "copy "),
        (f"{books}", "first second third not a book"),  # not what is hidden
    ):
        assert read(path) == text
    monkeypatch.chdir(books.parent)
    for path, says in (
        (f"{books}/nothing*", r"nothing\*: no file matches this pattern"),
        (f"{books}/none.txt", "^books/none.txt: no such file$"),  # relative to the working directory
        ("/dev/fd/63", r"no such file; torchrun does not pass on <\(...\)"),
    ):
        with pytest.raises(UserError, match=says):
            read(path)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_characters_and_errors_across_piece_boundaries(size, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE", size)
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    assert read(str(path)) == TEXT
    for bad in (b"\xff", b"\xe6\xbc", b"\xf0\x9f\x99a", b"\xed\xa0\x80", b"\xc0\x80"):
        content = TEXT.encode()[:101] + bad + b"."
        with pytest.raises(UnicodeDecodeError) as expected:
            content.decode()
        path.write_bytes(content)
        at = expected.value.start
        with pytest.raises(UserError, match=f"byte 0x{content[at]:02x} at offset {at};"):
            read(str(path))


def test_every_file_is_decoded_on_its_own(tmp_path):
    paths = [tmp_path / f"{i}.txt" for i in range(3)]
    for contents, expected in (
        ((b"\xef\xbb\xbffirst ", b"\xef\xbb\xbfcaf\xc3\xa9", b""), "first café"),  # byte order marks
        ((b"\xef\xbb\xbffirst ", b"\xef\xbb\xbf\xff", b""), "1.txt: not UTF-8: byte 0xff at offset 3"),
        ((b"caf\xc3", b"\xa9 au lait", b""), "0.txt: not UTF-8: byte 0xc3 at offset 3"),  # a character in two files
    ):
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
        try:
            assert read([*map(str, paths)]) == expected
        except UserError as error:
            assert expected in str(error)


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("extension", COMPRESS)
def test_a_compressed_text_is_decompressed_and_refused_if_truncated(extension, make, tmp_path):
    config = make("", f"text{extension}", sha256=hashlib.sha256(TEXT.encode()).hexdigest())
    (tmp_path / f"text{extension}").write_bytes(COMPRESS[extension](TEXT.encode()))
    data = CharDataset(config)
    assert data.decode(data.data) == TEXT
    (tmp_path / "plain.txt").write_text("plain ")
    assert read([str(tmp_path / "plain.txt"), config.path]) == "plain " + TEXT
    cut = tmp_path / f"cut{extension}"
    cut.write_bytes(COMPRESS[extension](os.urandom(3000).hex().encode())[:-9])
    with pytest.raises(UserError, match=f"cut{extension}: cannot be read: .*end"):
        read(str(cut))


def test_archives_are_read_by_members_that_are_text(tmp_path, caplog):
    caplog.set_level("INFO", "gpt")
    (tmp_path / "text.zst").write_bytes(b"whatever")
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        for name in ("folder/b", "a", "folder/._b", "__MACOSX/c", "picture"):
            archive.writestr(name, name[-1] if name != "picture" else b"\0\xff")
    with pytest.raises(UserError, match=r"text\.zst: unpack it first"):
        read(str(tmp_path / "text.zst"))
    fsspec.filesystem("memory").pipe_file("/two.zip", (tmp_path / "two.zip").read_bytes())
    assert read(str(tmp_path / "two.zip")) == read("memory://two.zip") == "ab"
    assert caplog.text.count("two.zip: 2 hidden files and links are left out") == 2
    assert read(f"zip://folder/*::{tmp_path / 'two.zip'}") == "b"


def test_the_cache_of_a_text_in_an_archive_depends_on_archive_and_content(tmp_path):
    for name, letter in (("one.zip", "a"), ("two.zip", "b"), ("one.zip", "c"), ("one.tar", "a"), ("one.tar", "b")):
        (tmp_path / "text").write_text(letter)
        os.utime(tmp_path / "text", (1e9, 1e9))  # of a file in it, a tar archive says only the size and the time
        archive = zipfile.ZipFile(tmp_path / name, "w") if "zip" in name else tarfile.open(tmp_path / name, "w")
        with archive:
            (archive.write if "zip" in name else archive.add)(tmp_path / "text", "text")
        config = DataConfig(path=f"{name[-3:]}://text::{tmp_path / name}", cache_dir=str(tmp_path / "c"))
        assert encoding.open_text(config).vocabulary == letter


def test_a_pipe_is_read_once_and_its_text_is_found_again(tmp_path, caplog):
    caplog.set_level("INFO")
    pipe, cache_dir = tmp_path / "pipe", str(tmp_path / "cache")
    os.mkfifo(pipe)
    (tmp_path / "a.txt").write_text("first ")
    for path, text in ((str(pipe), TEXT), ([str(tmp_path / "a.txt"), str(pipe)], "first " + TEXT)):
        writer = threading.Thread(target=pipe.write_text, args=(TEXT,))
        writer.start()
        settings = {"cache_dir": cache_dir, "block_size": 2, "newlines": "keep", "separator": "none"}
        config = prepare_text(DataConfig(path=path, **settings))
        writer.join()
        for _ in range(2):  # ranks
            data = CharDataset(config)
            assert data.decode(data.data) == text
    assert len(list(tmp_path.glob("cache/*[0-9a-f]"))) == 1  # the same text has the same name again
    assert caplog.text.count(f"{pipe} until it ends") == 2
    with pytest.raises(UserError, match=r"data.path=/dev/null: the text is empty"):
        prepare_text(DataConfig(path="/dev/null", cache_dir=cache_dir))
    with pytest.raises(UserError, match="more than 1,000 bytes"):
        prepare_text(DataConfig(path="/dev/zero", cache_dir=cache_dir, max_bytes=1000))


# --- downloads ---


class Server(http.server.SimpleHTTPRequestHandler):
    """Sends whole files, not ranges; of the file `cut.txt`, the first half; `late.txt` after a second, `slow.txt` after
    seven.
    """

    sent: list[str] = []  # noqa: RUF012

    def log_message(self, *_) -> None:
        pass

    def copyfile(self, source, target) -> None:
        content = source.read()
        self.sent.append(self.path)
        time.sleep({"/late.txt": 1, "/slow.txt": 7}.get(self.path, 0))
        target.write(content[: len(content) // 2] if "cut" in self.path else content)


@pytest.fixture
def site(tmp_path):
    handler = functools.partial(Server, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_server_without_range_requests_is_read_completely(site, tmp_path, monkeypatch, caplog):
    text = TEXT * 2000
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.gz").write_bytes(gzip.compress(TEXT.encode()))
    assert len(text.encode()) > 4 * sources.PIECE
    assert read([f"{site}/a.txt", f"{site}/b.gz?signature=1"]) == text + TEXT
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        archive.writestr("rows.jsonl", '{"t": "a"}')
    with pytest.raises(UserError, match=r"rows\.jsonl has the fields t: give data\.field="):
        read(f"{site}/c.zip?signature=1")
    monkeypatch.setattr(sources, "PROGRESS_S", 0)
    with caplog.at_level(logging.INFO, "gpt"):
        read(f"{site}/a.txt")
    assert caplog.messages[-1] == f"reading     {site}/a.txt: {len(text.encode()) / 1e6:.0f} MB"


def test_an_incomplete_download_is_refused(site, tmp_path):
    (tmp_path / "cut.txt").write_bytes(TEXT.encode())
    with pytest.raises(UserError, match=r"cut.txt: cannot be read: ."):
        read(f"{site}/cut.txt")
    target = tmp_path / "new" / "text.txt"
    with pytest.raises(UserError, match=r"cut.txt: cannot be read: ."):
        prepare_text(DataConfig(path=str(target), url=f"{site}/cut.txt"))
    assert [p.name for p in target.parent.iterdir()] == [".text.txt.lock"]


def test_processes_that_start_together_download_a_text_once(site, tmp_path, spawn):
    (tmp_path / "late.txt").write_bytes(TEXT.encode())
    target = tmp_path / "new" / "text.txt"
    settings = {"path": str(target), "url": f"{site}/late.txt"}
    code = f"from char_dataset import *; import engine.text.encoding as e; e.prepare_text(DataConfig(**{settings!r}))"
    both = [spawn([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert sorted(p.name for p in target.parent.iterdir()) == [".text.txt.lock", "text.txt"]


def test_a_text_is_downloaded_once_checked_and_renamed(text_file, tmp_path):
    digest = hashlib.sha256(text_file.read_bytes()).hexdigest()
    path = tmp_path / "new" / "input.txt"
    config = DataConfig(path=str(path), url=str(text_file), sha256=digest)
    other = dataclasses.replace(config, sha256="0" * 64)
    with pytest.raises(UserError, match=r"SHA-256 is [0-9a-f]{64}.*data.sha256=0{64}"):
        prepare_text(other)
    assert not path.exists()
    assert prepare_text(config) == config and path.read_bytes() == text_file.read_bytes()
    assert sorted(p.name for p in path.parent.iterdir()) == [".input.txt.lock", "input.txt"]
    text_file.unlink()
    assert prepare_text(config) == config  # is there: no download
    assert CharDataset(config).digest == digest


def test_what_is_downloaded_is_one_file_and_not_converted(make, books, tmp_path):
    config = make("", url=make(TEXT, "there.gz").path, sha256=hashlib.sha256(TEXT.encode()).hexdigest())
    config.path = str(tmp_path / "here.gz")
    prepare_text(config)
    assert read(config.path) == TEXT
    for url, says in ((config.url, "must end as data.url=.*there.gz"), (f"{books}/*.txt", "txt: matches 3 files")):
        with pytest.raises(UserError, match=says):
            prepare_text(DataConfig(path=str(tmp_path / "input"), url=url))


def test_only_the_default_text_falls_back_to_pydoc_and_a_run_keeps_it(tmp_path, monkeypatch, caplog):
    default = OmegaConf.load(ROOT / "conf" / "data" / "shakespeare.yaml")
    assert default.url == SHAKESPEARE_URL

    def refuse(*_):
        raise sources.Unreadable("no network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("engine.text.encoding.download", refuse)
    config = prepare_text(DataConfig(**default))
    assert (config.path, config.url, config.sha256) == (PYDOC, None, None)
    assert len(CharDataset(config).data) > 300_000
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with pytest.raises(UserError, match="no network"):
        prepare_text(DataConfig(path=default.path, url="https://example.org/mirror.txt"))
    with pytest.raises(UserError, match=r"another text: data=text data.path=my.txt$"):
        DataConfig(path="my.txt", url=default.url, sha256=default.sha256)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "input.txt").write_text("is here now")
    assert prepare_text(DataConfig(**default)).path == default.path
    run = Config(data=DataConfig(**default))
    main.load_text(run, {"data": {"path": PYDOC}})
    assert run.data.path == PYDOC and "this run was started on pydoc:topics" in caplog.text


def test_shakespeare_has_the_configured_sha256():
    paths = [ROOT / "data" / "input.txt", ROOT.parent / "shared" / "data" / "tinyshakespeare.txt"]
    if not (found := [path for path in paths if path.exists()]):
        pytest.skip(f"tiny Shakespeare is at neither of {', '.join(map(str, paths))}")
    data = CharDataset(DataConfig(path=str(found[0])))
    assert data.digest == OmegaConf.load(ROOT / "conf" / "data" / "shakespeare.yaml").sha256
    assert (len(data.data), data.vocab_size) == (1_115_394, 65)


# --- encoding, in memory and in the cache ---


@pytest.mark.parametrize("truncate", [1.0, 0.73, 0.25])
@pytest.mark.parametrize("name", TEXTS)
def test_encoding_in_memory_and_in_the_cache_agree(name, truncate, make, monkeypatch):
    config = make(TEXTS[name], truncate=truncate)
    text = TEXTS[name][: int(len(TEXTS[name]) * truncate)]
    vocabulary = "".join(sorted(set(text)))
    for limit in (1000, 2**20):
        monkeypatch.setattr(encoding, "LARGE", limit)
        data = CharDataset(config)
        assert data.vocabulary == vocabulary
        assert data.digest == hashlib.sha256(text.encode()).hexdigest()
        assert data.decode(data.data) == text
        assert data.data.element_size() == np.min_scalar_type(len(vocabulary) - 1).itemsize
        assert len(cached(config)) == 1  # of the first limit
        x, y = data.batch(np.array([0, len(data) - 1]))
        assert data.decode(x[0]) == text[:8] and data.decode(y[1]) == text[-8:]


@pytest.mark.parametrize("num_repeats", [3, 9])  # in memory, in the cache
def test_with_encoding_bytes_every_byte_is_a_character(num_repeats, make):
    config = make("", encoding="bytes")
    content = bytes(range(255, 0, -1)) * num_repeats
    Path(config.path).write_bytes(content)
    data = CharDataset(config)
    assert data.vocabulary.encode("latin-1") == bytes(range(1, 256)) and data.unit == "byte"
    assert bytes(ord(data.itos[int(i)]) for i in data.data) == content
    ids = data.encode("é 1")
    assert bytes(ord(data.itos[int(i)]) for i in ids) == "é 1".encode()
    assert data.decode(ids) == "é 1" and data.decode(ids[:1]) == "\ufffd"


@pytest.mark.parametrize("shuffle, separator", [("lines", "\n"), ("paragraphs", "\n\n"), ("files", "")])
@pytest.mark.parametrize("limit", [1000, 2**20])
def test_items_are_shuffled_whole_after_truncation_and_reproducibly(
    limit, shuffle, separator, make, monkeypatch, tmp_path
):
    monkeypatch.setattr(encoding, "LARGE", limit)
    items = [f"<item {i}, a line{separator and '.' * (i % 7)}>{separator}" for i in range(90)]
    if shuffle == "paragraphs":
        items = [item.replace(",", "\n") for item in items]
    for i, item in enumerate(items):
        (tmp_path / f"{i:02}.part").write_text(item)
    config = make("".join(items), shuffle=shuffle, truncate=0.9)
    if shuffle == "files":
        config.path = str(tmp_path / "*.part")
    data, again = CharDataset(config), CharDataset(config)
    text = data.decode(data.data)
    assert text == again.decode(again.data) and len(text) == int(0.9 * sum(map(len, items)))
    whole = [item for item in items if item in text]
    assert len(whole) == "".join(items)[: len(text)].count(">" + separator)
    assert [items.index(item) for item in sorted(whole, key=text.index)] != sorted(items.index(item) for item in whole)


@pytest.mark.parametrize("shuffle, separator", [("lines", "\n"), ("paragraphs", "\n\n")])
def test_items_end_where_a_file_ends(tmp_path, shuffle, separator):
    (tmp_path / "_.part").touch()
    for name in "abc":
        (tmp_path / f"{name}.part").write_text(separator.join(f"{name}{i}" for i in range(9)))
    config = DataConfig(path=f"{tmp_path}/*.part", block_size=2, shuffle=shuffle)
    data = CharDataset(config)
    items = data.decode(data.data).rstrip("\n").split(separator)
    assert sorted(items) == sorted(f"{name}{i}" for name in "abc" for i in range(9))
    config.path = str(tmp_path / "one.txt")
    Path(config.path).write_text("one item " * 20)
    with pytest.raises(UserError, match=rf"data\.shuffle={shuffle}, .*: the text has fewer than two {shuffle}$"):
        CharDataset(config)


@pytest.mark.parametrize("name, is_cached", [("small.txt", False), ("small.gz", True), ("memory://small.txt", True)])
def test_only_small_plain_local_files_are_encoded_in_memory(name, is_cached, make, passes):
    text = "short text " * 9
    fsspec.filesystem("memory").pipe_file("/small.txt", text.encode())
    config = make(text, name.removeprefix("memory://"))
    if name.startswith("memory"):
        config.path = name
    assert prepare_text(config) == config
    assert len(passes) == len(cached(config)) == is_cached
    for _ in range(2):  # ranks
        data = CharDataset(config)
        assert data.decode(data.data) == text
    assert len(passes) == (1 if is_cached else 2)


def test_a_changed_text_or_another_share_is_encoded_again(make, passes):
    before = CharDataset(make("a text " * 999))
    after = CharDataset(make("A TEXT " * 999))  # of the same size
    assert passes == ["text.txt"] * 2 and before.digest != after.digest and set(after.vocabulary) == set("A TEXT ")
    half = CharDataset(make("A TEXT " * 999, truncate=0.5))
    assert len(passes) == 3 and len(half.data) == len(after.data) // 2


def inverted(content: bytes) -> bytes:
    """A third of it: of ids, others of the vocabulary and beyond."""
    first, last = len(content) // 3, 2 * len(content) // 3
    return content[:first] + bytes(255 - byte for byte in content[first:last]) + content[last:]


@pytest.mark.parametrize("extension", [".ids", ".json"])
@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]", lambda content: content[:-1], inverted])
def test_a_damaged_cache_is_encoded_again(damage, extension, make, passes, monkeypatch):
    config = make(TEXTS["ascii that comes late"])
    digest = CharDataset(config).digest
    [stem] = cached(config)
    path = Path(stem + extension)
    good = path.read_bytes()
    path.write_bytes(damage if isinstance(damage, bytes) else damage(good))
    for _ in range(2):
        assert CharDataset(config).digest == digest and len(passes) == 2
    assert path.read_bytes() == good
    monkeypatch.setattr(encoding, "CHECKED", 1000)  # of a large one, a part and the time of its last change
    assert CharDataset(config).digest == digest and len(passes) == 3  # the check is another one
    assert CharDataset(config).digest == digest and len(passes) == 3
    os.utime(f"{stem}.ids", (1, 1))
    assert CharDataset(config).digest == digest and len(passes) == 4


@pytest.mark.parametrize(
    "content, settings, says",
    [
        (b"x" * 2000 + b"caf\xe9 ", {}, "not UTF-8: byte 0xe9 at offset 2003"),
        (b"x" * 2000, {"sha256": "0" * 64}, "SHA-256 is"),
        (b"x" * 2000, {"truncate": 1e-5}, ": the text is empty, with data.truncate=1e-05"),
        (b"x" * 2000, {"truncate": 0.004}, "has 8 characters (data.truncate=0.004 leaves out the rest), but a win"),
    ],
)
@pytest.mark.parametrize("limit", [1000, 10**6])
def test_a_bad_text_is_refused_whatever_its_size(content, settings, says, limit, make, monkeypatch):
    monkeypatch.setattr(encoding, "LARGE", limit)
    config = make("", **settings)
    Path(config.path).write_bytes(content)
    for _ in range(2):  # a cache must not hide it
        with pytest.raises(UserError, match=re.escape(says)):
            CharDataset(config)
    assert not list(Path(config.cache_dir).glob("*.tmp"))


def test_a_cache_directory_that_cannot_be_written_is_named(make, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in ("/proc/nowhere", str(tmp_path / "file")):
        with pytest.raises(UserError, match=rf"data.cache_dir={folder}: cannot be written: "):
            CharDataset(make(TEXTS["ascii"], cache_dir=folder))
    with small_disk(tmp_path, "1m") as disk:
        config = make(TEXTS["70,000 characters"] * 20, cache_dir=str(disk / "cache"))
        with pytest.raises(UserError, match=r"cannot be written: .*No space left"):
            CharDataset(config)
        assert cached(config) == []


def test_two_processes_encode_a_text_once(make, passes, spawn):
    config = make(TEXTS["mixed"])
    os.makedirs(config.cache_dir)
    script = (
        "import sys; from char_dataset import CharDataset, DataConfig; from engine.text import encoding\n"
        "from engine.run.console import log_to_console; log_to_console(); encoding.LARGE = 1000\n"
        "print(CharDataset(DataConfig(path=sys.argv[1], cache_dir=sys.argv[2], newlines='keep')).digest)\n"
    )
    with file_lock(os.path.join(config.cache_dir, ".cache.lock")):
        process = spawn([sys.executable, "-c", script, config.path, config.cache_dir])
        read_until(process, "encoding ")
        time.sleep(1)  # encoding takes milliseconds
        assert cached(config) == []  # it waits for the lock
    out, _ = process.communicate(timeout=60)
    assert out.split()[-1] == CharDataset(config).digest and passes == []


# --- whole processes ---


def write_large(path, num_bytes: int = 80 * 2**20) -> None:
    block = "".join(random.Random(3).choices("etaoin shrdlu\n", k=2**20))
    with open(path, "w") as file:
        for _ in range(num_bytes // len(block)):
            file.write(block)


def test_a_large_text_takes_constant_memory(tmp_path):
    write_large(tmp_path / "a.txt", 100 * 2**20)
    script = (  # resource.getrusage() would begin with the peak of this process
        "import numpy, sys; from char_dataset import CharDataset, DataConfig\n"
        "peak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "config, before = DataConfig(path=sys.argv[1], block_size=8, cache_dir=sys.argv[2]), peak()\n"
        "for part in CharDataset(config).split(): part.batch(numpy.array([0, len(part) - 1]))\n"
        "print(peak() - before)\n"
    )
    run = run_python(script, str(tmp_path / "a.txt"), str(tmp_path))
    assert int(run.stdout) < 50 * 1024, f"{run.stdout} KiB {run.stderr}"


def test_a_killed_encoding_is_repeated(tmp_path, spawn):
    write_large(tmp_path / "a.txt")
    settings = [*UNREAD, f"run_dir={tmp_path / 'run'}", "data.block_size=16", "data.train_split=0.9999"]
    settings += [f"data.path={tmp_path / 'a.txt'}", f"data.cache_dir={tmp_path / 'cache'}"]
    process = spawn(command(*settings))
    wait_until(lambda: list(tmp_path.glob("cache/*.tmp")), process)
    process.kill()
    process.communicate(timeout=30)
    assert not list(tmp_path.glob("cache/*.ids"))

    endless = [*settings, "trainer.max_steps=100000", "trainer.max_epochs=null"]
    process = spawn(command(*endless, nproc=2))
    # The first line: rank 0 opens the file before the other rank catches SIGTERM.
    log = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: log.exists() and log.stat().st_size, process)
    [built] = tmp_path.glob("cache/*.ids")
    assert not list(tmp_path.glob("cache/*.tmp"))
    for pid in chaos.children(process.pid):
        with open(f"/proc/{pid}/maps") as maps:
            mapped = [line.split() for line in maps if str(built) in line]
        assert mapped and all(fields[1] == "r--s" for fields in mapped)  # one copy for all
    process.terminate()
    out, _ = process.communicate(timeout=60)
    assert out.count("encoding    ") == 1 and "SIGTERM: stopped after step" in out


@pytest.mark.slow
def test_reading_may_take_longer_than_processes_wait_for_each_other(site, tmp_path):
    (tmp_path / "slow.txt").write_text("A text that is long in coming. " * 99)
    url = f"data.path={site}/slow.txt"
    result = succeed(*UNREAD, "data.block_size=16", url, "trainer.timeout_s=4", f"run_dir={tmp_path / 'run'}", nproc=2)
    assert "step 6/6" in result.stdout and Server.sent.count("/slow.txt") == 1
