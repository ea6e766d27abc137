"""Where a text comes from: one file or several, compressed or not, local or not."""

import bz2
import functools
import gzip
import hashlib
import http.server
import lzma
import os
import sys
import threading

import fsspec
import pytest
from conftest import ROOT
from omegaconf import OmegaConf

from char_dataset import CharDataset
from engine.errors import UserError
from engine.text import sources as text_files
from engine.text.sources import PYDOC, DataConfig, Source, fetch

TEXT = "naïve café 漢字 🙂\r\n" * 50


def read(path) -> str:
    return "".join(Source(path))


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


# --- fetching ---


def test_a_text_is_read_through_fsspec():
    with fsspec.open("memory://texts/a.txt", "wb") as file:
        file.write("naïve text".encode() * 10)
    data = CharDataset(DataConfig(path="memory://texts/a.txt", block_size=4))
    assert data.decode(data.data) == "naïve text" * 10


def test_a_text_is_fetched_once_checked_and_moved_into_place_whole(text_file, tmp_path):
    digest = hashlib.sha256(text_file.read_bytes()).hexdigest()
    path = tmp_path / "new" / "input.txt"
    config = DataConfig(path=str(path), url=str(text_file), sha256=digest)
    assert fetch(config) == str(path) and path.read_bytes() == text_file.read_bytes()
    assert [p.name for p in path.parent.iterdir()] == ["input.txt"]
    text_file.unlink()
    assert fetch(config) == str(path)  # is there: nothing to fetch


def test_a_text_with_another_digest_is_refused_and_not_kept(text_file, tmp_path):
    path = tmp_path / "input.txt"
    config = DataConfig(path=str(path), url=str(text_file), sha256="0" * 64)
    with pytest.raises(UserError, match=r"SHA-256 is [0-9a-f]{64}.*data.sha256=0{64}"):
        fetch(config)
    assert not path.exists()
    path.write_text("something else")
    with pytest.raises(UserError, match="SHA-256"):
        CharDataset(config)
    assert path.read_text() == "something else"


def test_only_a_text_that_has_a_fallback_falls_back(tmp_path):
    nowhere = str(tmp_path / "nowhere")
    config = DataConfig(path=str(tmp_path / "input.txt"), url=nowhere, fallback=PYDOC)
    assert fetch(config) == PYDOC
    with pytest.raises(UserError, match="nowhere: no such file"):
        fetch(DataConfig(path=config.path, url=nowhere))


def test_the_embedded_text_needs_nothing():
    data = CharDataset(DataConfig(path=PYDOC))
    assert len(data.data) > 300_000 and data.vocab_size > 80


def test_shakespeare_is_the_text_that_its_digest_promises(shakespeare):
    data = CharDataset(DataConfig(path=str(shakespeare)))
    assert data.digest == OmegaConf.load(ROOT / "conf" / "data" / "shakespeare.yaml").sha256
    assert (len(data.data), data.vocab_size) == (1_115_394, 65)


# --- several files ---


def test_a_list_is_one_text_in_the_order_given(books):
    a, b = str(books / "a.txt"), str(books / "b.txt")
    assert read([b, a, b]) == "second first second "
    assert read([a, f"{books}/[bc]*.txt"]) == "first second third "


def test_a_pattern_is_one_text_of_the_files_sorted_by_name(books):
    assert read(f"{books}/*.txt") == "first second third "
    assert read(f"file://{books}/*.txt") == "first second third "
    file_system = fsspec.filesystem("memory")
    for name in "ba":
        file_system.pipe_file(f"/several/{name}.txt", name.encode())
    assert read("memory://several/*.txt") == "ab"
    with pytest.raises(UserError, match=r"nothing.*: no file has a name like this"):
        read(f"{books}/nothing*")


def test_the_files_of_a_pattern_are_named_as_it_is_typed(books, monkeypatch):
    def names(path) -> list[str]:
        return [file.name for file in text_files.find(path)]

    monkeypatch.chdir(books.parent)
    monkeypatch.setenv("HOME", str(books.parent))
    whole = [str(books / "a.txt"), str(books / "b.txt")]
    assert names(f"{books.name}/[ab].txt") == [f"{books.name}/a.txt", f"{books.name}/b.txt"]
    assert names(f"{books}/[ab].txt") == names(f"~/{books.name}/[ab].txt") == whole
    assert names(f"file://{books}/a*.txt") == [f"file://{whole[0]}"]


def test_a_file_may_be_called_like_a_pattern(books):
    assert read(f"{books}/c[1].txt") == "third "


def test_a_byte_order_mark_is_no_character(tmp_path):
    for name, content in (("1.txt", b"first "), ("2.txt", b"caf\xc3\xa9"), ("3.txt", b"\xff")):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
    assert read([str(tmp_path / "1.txt"), str(tmp_path / "2.txt")]) == "first café"
    with pytest.raises(UserError, match=r"3.txt: not UTF-8: byte 0xff at offset 3"):
        read(str(tmp_path / "3.txt"))


def test_a_character_does_not_go_on_in_the_next_file(tmp_path):
    first, second = tmp_path / "1.txt", tmp_path / "2.txt"
    first.write_bytes(b"caf\xc3")
    second.write_bytes(b"\xa9 au lait")
    with pytest.raises(UserError, match=r"1.txt: not UTF-8: byte 0xc3 at offset 3"):
        read([str(first), str(second)])


def test_a_configuration_keeps_a_list_as_plain_types(books):
    config = DataConfig(path=[str(books / "a.txt"), 1984])
    kept = OmegaConf.to_container(OmegaConf.structured(config))
    assert kept["path"] == [str(books / "a.txt"), "1984"]
    assert DataConfig(path=1984).path == "1984"


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"path": None}, "data.path=None: must be the path or URL of a text, or a list"),
        ({"path": {"a": 1}}, "is of type dict"),
        ({"path": ["a.txt", ["b.txt"]]}, "is of type list"),
        ({"path": ["a.txt", None]}, "None is of type NoneType"),
        ({"path": []}, "data.path is empty"),
        ({"path": ["a.txt", ""]}, "data.path is empty"),
        ({"path": ["a.txt", "b.txt"], "url": "c.txt"}, "data.url=c.txt: is fetched to one"),
        ({"path": "a.txt", "cache_dir": ""}, "data.cache_dir=: must be a directory"),
        ({"path": "a.txt", "cache_dir": "s3://b/c"}, "data.cache_dir=s3://b/c: must be a"),
    ],
)
def test_a_path_that_is_none_is_refused(settings, says):
    with pytest.raises(UserError) as refused:
        DataConfig(**settings)
    assert says in str(refused.value)


def test_a_url_of_several_files_is_refused(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    several = DataConfig(path=str(tmp_path / "input"), url=f"file://{tmp_path}/*.txt")
    with pytest.raises(UserError, match="txt: is 2 files; it must be one"):
        fetch(several)


# --- compressed ---


def zstd(content: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    half = len(content) // 2
    return b"".join(
        zstandard.ZstdCompressor().compress(part) for part in (content[:half], content[half:])
    )


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_compressed_text_is_its_content(ending, tmp_path):
    path = tmp_path / f"text{ending}"
    path.write_bytes(COMPRESS[ending](TEXT.encode()))
    data = CharDataset(DataConfig(path=str(path), sha256=hashlib.sha256(TEXT.encode()).hexdigest()))
    assert data.decode(data.data) == TEXT
    plain = tmp_path / "plain.txt"
    plain.write_text("plain ", newline="")
    assert read([str(plain), str(path)]) == "plain " + TEXT


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_compressed_text_that_was_cut_off_is_refused(ending, tmp_path):
    path = tmp_path / f"text{ending}"
    path.write_bytes(COMPRESS[ending](os.urandom(3000).hex().encode())[:-9])
    with pytest.raises(UserError, match=f"text{ending}: cannot be read: .*end"):
        read(str(path))


def test_a_zst_text_names_the_package_that_it_needs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path = tmp_path / "text.zst"
    path.write_bytes(b"whatever")
    with pytest.raises(UserError, match=r"text.zst: .*pip install zstandard"):
        read(str(path))


@pytest.mark.parametrize("name, kept", [("text.txt", TEXT.encode()), ("text.gz", None)])
def test_a_compressed_text_is_fetched_as_its_path_says(name, kept, tmp_path):
    source, path = tmp_path / "there.gz", tmp_path / name
    source.write_bytes(gzip.compress(TEXT.encode()))
    digest = hashlib.sha256(TEXT.encode()).hexdigest()
    assert fetch(DataConfig(path=str(path), url=str(source), sha256=digest)) == str(path)
    assert path.read_bytes() == (kept or source.read_bytes()) and read(str(path)) == TEXT


# --- pieces, and a network ---


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_characters_and_errors_may_lie_across_the_borders_of_pieces(size, tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "PIECE", size)
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    source = Source(str(path))
    assert "".join(source) == TEXT
    assert source.digest.hexdigest() == hashlib.sha256(TEXT.encode()).hexdigest()
    assert source.num_bytes == source.size == len(TEXT.encode())
    for bad in (b"\xff", b"\xe6\xbc", b"\xf0\x9f\x99a", b"\xed\xa0\x80", b"\xc0\x80"):
        content = TEXT.encode()[:101] + bad + b"."
        with pytest.raises(UnicodeDecodeError) as expected:
            content.decode()
        path.write_bytes(content)
        at = expected.value.start
        with pytest.raises(UserError, match=f"byte 0x{content[at]:02x} at offset {at}$"):
            read(str(path))


def test_invalid_utf_8_is_refused_with_its_offset(tmp_path):
    path = tmp_path / "bad.txt"
    path.write_bytes(b"good \xc3\xa9 text \xff and more")
    with pytest.raises(UserError, match=r"not UTF-8: byte 0xff at offset 13"):
        CharDataset(DataConfig(path=str(path), block_size=4))


class Server(http.server.SimpleHTTPRequestHandler):
    """Hands out files whole, as Python's server does, or half of them where asked for `cut`."""

    def log_message(self, *_) -> None:
        pass

    def copyfile(self, source, target) -> None:
        content = source.read()
        target.write(content[: len(content) // 2] if "cut" in self.path else content)


@pytest.fixture
def site(tmp_path):
    handler = functools.partial(Server, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_server_that_hands_out_no_parts_is_read_to_the_end(site, tmp_path):
    text = TEXT * 2000  # of several pieces
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.gz").write_bytes(gzip.compress(TEXT.encode()))
    assert Source(f"{site}/a.txt").size == len(text.encode()) > 4 * text_files.PIECE
    assert read([f"{site}/a.txt", f"{site}/b.gz"]) == text + TEXT


def test_a_text_that_does_not_come_whole_is_refused(site, tmp_path):
    (tmp_path / "cut.txt").write_bytes(TEXT.encode())
    with pytest.raises(UserError, match=r"cut.txt: cannot be read: ."):
        read(f"{site}/cut.txt")
    target = tmp_path / "new" / "text.txt"
    with pytest.raises(UserError, match=r"cut.txt: cannot be read: ."):
        fetch(DataConfig(path=str(target), url=f"{site}/cut.txt"))
    assert list(target.parent.iterdir()) == []


def test_the_place_of_a_bad_byte_is_that_in_its_own_file(tmp_path):
    (tmp_path / "a").write_text("abc")
    (tmp_path / "b").write_bytes(b"de\xff")
    with pytest.raises(UserError, match="b: not UTF-8: byte 0xff at offset 2"):
        list(Source([str(tmp_path / "a"), str(tmp_path / "b")]))
