"""Text: its sources, and its encoding as ids.

Sources: a text is the concatenation of its files, which fsspec finds, opens and decompresses. They are streamed, as
a text may be larger than memory. With `data.shuffle`, it is read whole; a line or a paragraph ends where a file ends.

Encoding: one streaming pass writes code points; one rewrite replaces them, in place, by positions in the sorted
vocabulary. A plain local file of up to `LARGE` bytes is encoded in memory; any other text into a cache file,
which all processes of a host memory-map.
"""

import codecs
import contextlib
import dataclasses
import glob
import hashlib
import io
import itertools
import json
import logging
import os
import re
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

import fsspec
import numpy as np
import torch
from fsspec.core import OpenFile
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import infer_compression

from engine.config.schema import SHAKESPEARE_URL
from engine.errors import UserError, one_line
from engine.files import atomic_write, file_lock

log = logging.getLogger("gpt")

# Tiny Shakespeare, the default text.
PYDOC = "pydoc:topics"  # documentation that comes with Python; needs no download
PIECE = 2**18  # bytes read at once
FILE_END = ""  # follows the pieces of each file: joining ignores it, `shuffled` sees it
PROGRESS_S = 5  # seconds between progress lines
# Keys of fsspec file infos that change with the content of a file.
VERSION = re.compile("(?i)size|mtime|created|modified|updated|etag|md5|sha|crc|generation|blob_?id")
LARGE = 64 * 2**20  # bytes
FORMAT = 5  # version of the cache files
CHUNK = 2**18  # characters rewritten at once


# --- sources ---


class Unreadable(UserError):
    """A file that is missing or cannot be read."""


@contextlib.contextmanager
def file_errors(name: str) -> Iterator[None]:
    """Turns the errors of every kind of file system into `Unreadable`, naming the file."""
    try:
        yield
    except IsADirectoryError as error:
        raise Unreadable(f"{name}: is a directory; for the files in it: '{name}/*'") from error
    except Exception as error:  # each remote file system raises its own
        if isinstance(error, FileNotFoundError) and error.__cause__ is None:
            hint = "; a pattern needs a *" if re.search(r"[?[]", name) and "*" not in name else ""
            raise Unreadable(f"{name}: no such file{hint}") from error
        # The cause is, say, a refused connection; of a missing package, fsspec says which.
        reason = one_line(error if isinstance(error, ImportError) else error.__cause__ or error)
        raise Unreadable(f"{name}: cannot be read: {reason}") from error


def find_files(path: str | list[str]) -> list[OpenFile]:
    """Finds the files at `path`, without opening them: a local path or fsspec URL, a pattern (with a
    `*`, which matches no hidden name; files sorted by name), or a list of these, in the order given.
    """
    files = []
    for name in [path] if isinstance(path, str) else path:
        options: dict[str, Any] = {}
        if name.startswith(("http://", "https://")):
            import aiohttp  # slow to import

            # Fail within seconds without a network, but do not limit the total time.
            timeout = aiohttp.ClientTimeout(sock_connect=10, sock_read=60)
            # Block size 0 reads one stream: not every server supports ranges.
            options = {"client_kwargs": {"timeout": timeout}, "block_size": 0}
        with file_errors(name):
            fsspec.core.url_to_fs(name, **options)[0].invalidate_cache()  # drop cached listings
            matches = fsspec.open_files(name, "rb", compression="infer", **options)
        if "*" in name:
            matches = [file for file in matches if not is_hidden(file.path, name)]
        if not matches:
            raise Unreadable(f"{name}: no file matches this pattern")
        files += matches
    return files


def is_hidden(path: str, pattern: str) -> bool:
    """Whether a name in `path` starts with a dot, which `pattern` does not have. As in a shell, * does not match it."""
    named = {*os.getcwd().split("/"), *pattern.split("/")}
    if any(name.startswith(".") and "*" in name for name in named):
        return False
    return any(name.startswith(".") and name not in named for name in path.split("/"))


def real_files(path: str | list[str]) -> set[str]:
    """The files at local paths or patterns, symbolic links resolved, and URLs as they are."""
    names = [path] if isinstance(path, str) else path
    local = [name for name in names if "://" not in name]
    files = [file for name in local for file in (glob.glob(name, recursive=True) if "*" in name else [name])]
    return {*map(os.path.realpath, files), *(name for name in names if "://" in name)}


def name_of(file: OpenFile) -> str:
    """The name of a file in messages."""
    is_local = isinstance(file.fs, LocalFileSystem)
    return file.path.removeprefix(f"{os.getcwd()}/") if is_local else file.full_name


def version_of(file: OpenFile) -> list[str]:
    """Identity of a file and its content: name, and size, time and hash if available."""
    with file_errors(name_of(file)):
        info = file.fs.info(file.path)
    return [file.full_name, *(f"{key}={info[key]}" for key in sorted(info) if VERSION.search(key))]


def read_file(file: OpenFile) -> Iterator[bytes]:
    """Yields the content of a file in non-empty pieces, decompressed according to `file.compression`;
    logs progress every few seconds. Raises `Unreadable`, also for a truncated file.
    """
    name = name_of(file)
    if file.compression == "zip":  # fsspec would read the first file in it
        raise UserError(f"{name}: use zip://NAME::{name}, or zip://**::{name} for all in it")
    if re.search(r"\.(tar|tgz|tar\.(gz|bz2|xz|zst))$", file.path):  # its headers would be text
        instead = "" if name.endswith(".tgz") else f", or use tar://NAME::{name}"  # fsspec does not decompress .tgz
        raise UserError(f"{name}: an archive: unpack it{instead}")
    if file.path.endswith(".zst"):  # fsspec's reader stops after a frame, and at a cut-off end
        raise UserError(f"{name}: .zst is not supported; decompress it first: zstd -d {name}")
    count, logged = 0, time.monotonic()
    with file_errors(name), OpenFile(file.fs, file.path, "rb", file.compression) as stream:
        size = None if file.compression else file.fs.info(file.path).get("size")
        for piece in iter(lambda: stream.read(PIECE), b""):
            count += len(piece)
            if time.monotonic() - logged > PROGRESS_S:
                logged = time.monotonic()
                log.info("reading     %s: %s MB", name, f"{count / 1e6:,.0f}")
            yield piece
        if size not in (None, count) and not isinstance(file.fs, LocalFileSystem):
            raise EOFError(f"{count} of {size} bytes received")


def read_text(files: list[OpenFile], sha256: str | None = None, encoding: str = "utf-8") -> Iterator[str]:
    """Yields the text of `files` in pieces, decoded from UTF-8, without byte order marks; with the
    `encoding` "bytes", each byte as the character of its number. `FILE_END` follows each file.

    Raises `UserError` for a file that cannot be read or is not UTF-8 (naming the byte), and at the
    end if the SHA-256 of the content differs from `sha256`.
    """
    digest = hashlib.sha256()
    for file in files:
        decoder = codecs.getincrementaldecoder("latin-1" if encoding == "bytes" else "utf-8-sig")()
        num_bytes = 0
        for piece in itertools.chain(read_file(file), [b""]):
            num_bytes += len(piece)
            digest.update(piece if sha256 is not None else b"")
            try:
                text = decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                byte = error.object[error.start]
                offset = num_bytes - len(error.object) + error.start
                hint = "a model of bytes, trained with data.encoding=bytes, reads any file"
                if offset == 0 and byte in (0xFE, 0xFF):  # a byte order mark
                    hint = "probably UTF-16; convert it: iconv -f UTF-16 -t UTF-8"
                raise UserError(f"{name_of(file)}: not UTF-8: byte 0x{byte:02x} at offset {offset}; {hint}") from error
            if text:
                yield text
        yield FILE_END
    if sha256 not in (None, digest.hexdigest()):
        raise UserError(
            f"SHA-256 is {digest.hexdigest()}, but data.sha256={sha256}; "
            "remove a damaged file to download it again, or set data.sha256=null to accept this text"
        )


def pydoc_text() -> str:
    """The text of `pydoc:topics`."""
    from pydoc_data import topics  # takes a quarter of a second

    return "\n\n".join(text for _, text in sorted(topics.topics.items()))


def download(url: str, path: str, sha256: str | None) -> None:
    """Atomic download: into a temporary file beside `path`, checked against `sha256`, renamed. One process at a time
    downloads; an existing file is kept.

    Raises `Unreadable` for a `url` that cannot be read, `UserError` for a wrong SHA-256 or a `path`
    that cannot be written.
    """
    files = find_files(url)
    if len(files) > 1:
        raise UserError(f"data.url={url}: matches {len(files)} files; must be one")
    if infer_compression(url) != infer_compression(path):
        raise UserError(f"data.path={path}: must end as data.url={url}, which is not converted")
    files[0].compression = None
    try:
        folder, name = os.path.split(os.path.abspath(path))
        os.makedirs(folder, exist_ok=True)
        with file_lock(os.path.join(folder, f".{name}.lock")):
            if os.path.exists(path):
                return
            with atomic_write(path, "wb") as target:
                target.writelines(read_file(files[0]))
                target.flush()
                compression = infer_compression(path)
                partial = OpenFile(LocalFileSystem(), target.name, compression=compression)
                if sha256 is not None:
                    deque(read_text([partial], sha256, "bytes"), maxlen=0)  # raises for another
    except OSError as error:
        raise UserError(f"data.path={path}: cannot be written: {error.strerror}") from error


# --- encoding ---


class EncodedText(NamedTuple):
    """A text as ids."""

    vocabulary: str  # the distinct characters, sorted
    data: torch.Tensor  # their positions in it, 1-D, uint8, uint16 or uint32
    digest: str  # SHA-256 of the text in UTF-8, as shuffled; hexadecimal


def is_small_local_file(path: str | list[str]) -> bool:
    """Whether the text is a plain local file of up to `LARGE` bytes, or Python's own."""
    if path == PYDOC:
        return True
    if isinstance(path, list) or infer_compression(path) or not os.path.isfile(path):
        return False
    return os.path.getsize(path) <= LARGE


def open_text(config: Any) -> EncodedText:
    """Encodes the text that a `DataConfig` names: in memory if it is small, otherwise in `cache_dir`, until one of its
    files or a setting changes.

    Raises `UserError` for a text that cannot be read, is empty or not UTF-8, or whose SHA-256 is not
    `sha256`, and for a cache that cannot be used.
    """
    path, sha256, encoding = config.path, config.sha256, config.encoding
    if is_small_local_file(path):
        ids = io.BytesIO()
        pieces = [from_text(pydoc_text(), encoding)] if path == PYDOC else read_text(find_files(path), sha256, encoding)
        record = encode_stream(pieces, config, ids)
        data = torch.from_numpy(np.frombuffer(ids.getbuffer(), record["type"]))
        return EncodedText(record["vocabulary"], data, record["digest"])

    files = find_files(path)
    paths = [path] if isinstance(path, str) else path
    archives = find_files([name.partition("::")[2] for name in paths if "::" in name])
    settings = (path, config.truncate, sha256, encoding, config.shuffle)
    identity = json.dumps([FORMAT, *settings, *map(version_of, files + archives)])
    stem = os.path.join(config.cache_dir, hashlib.sha256(identity.encode()).hexdigest()[:32])
    try:
        if encoded := load_cached(stem):
            return encoded
        os.makedirs(config.cache_dir, exist_ok=True)
        shown = ", ".join(map(name_of, files[:5])) + ", ..." * (len(files) > 5)
        log.info("encoding    %s into %s.ids", shown, stem)
        with file_lock(os.path.join(config.cache_dir, ".cache.lock")):
            if load_cached(stem) is None:
                with atomic_write(f"{stem}.ids", "w+b") as ids:
                    pieces = read_text(files, sha256, encoding)
                    record = encode_stream(pieces, config, ids)
                with atomic_write(f"{stem}.json") as file:
                    json.dump(record, file)
        encoded = load_cached(stem)
        assert encoded
        return encoded
    except OSError as error:
        where = f"data.cache_dir={config.cache_dir}"
        raise UserError(f"{where}: cannot be used: {one_line(error)}") from error


def prepare_text(config: Any, recorded_path: str | list[str] | None = None) -> Any:
    """Downloads the text of the `DataConfig` if its `path` does not exist, and encodes a large one into the cache; call
    it in one process per host. Returns the configuration of the text to use: without a network, `pydoc:topics` replaces
    the default text, and a run that started on it (`recorded_path`) keeps it. Raises `UserError` for any other missing
    text.
    """
    pydoc = dataclasses.replace(config, path=PYDOC, url=None, sha256=None)
    if recorded_path == PYDOC and config.url == SHAKESPEARE_URL:
        log.warning("this run was started on %s; for another text: run_name=NEW_NAME", PYDOC)
        return pydoc
    if config.url is not None and not ("://" in config.path or os.path.exists(config.path)):
        try:
            download(config.url, config.path, config.sha256)
        except Unreadable as error:
            if config.url != SHAKESPEARE_URL:
                raise
            log.warning(
                "%s; training on %s, which comes with Python, instead. To train on Shakespeare, put "
                "it at %s",
                error, PYDOC, os.path.abspath(config.path),
            )  # fmt: skip
            return pydoc
    if not is_small_local_file(config.path):
        open_text(config)
    return config


def load_cached(stem: str) -> EncodedText | None:
    """Memory-maps a cached text: ids in `stem`.ids, the rest in `stem`.json, written last. None if it
    is missing or damaged.
    """
    try:
        with open(f"{stem}.json", encoding="utf-8") as file:
            record = json.load(file)
        ids = np.memmap(f"{stem}.ids", record["type"], mode="r")
    except (FileNotFoundError, ValueError):
        return None
    if len(ids) != record["characters"]:
        return None
    # Mapped read-only: Linux may refuse a writable private mapping larger than memory. torch warns
    # about read-only arrays; nothing writes to this one.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return EncodedText(record["vocabulary"], torch.from_numpy(ids), record["digest"])


def from_text(text: str, encoding: str) -> str:
    """The characters of a model for `text`: itself, or one per byte."""
    if encoding == "bytes":
        return text.encode("utf-8", "surrogateescape").decode("latin-1")
    return text


def to_text(characters: str, encoding: str) -> str:
    """The inverse of `from_text`; bytes that are not UTF-8 become U+FFFD."""
    if encoding == "bytes":
        return characters.encode("latin-1").decode(errors="replace")
    return characters


def unit_of(encoding: str | None) -> str:
    """What a character of the model stands for."""
    return "byte" if encoding == "bytes" else "character"


def encode_stream(pieces: Iterable[str], config: Any, file: BinaryIO) -> dict[str, Any]:
    """Streaming encoder: truncates the text to the share `config.truncate`, shuffles it by `config.shuffle`, and writes
    its ids into the empty `file`, in the smallest unsigned type that holds them.

    Returns plain values: `vocabulary`, `type` of the ids, number of `characters`, and `digest` of
    the text. Raises `UserError` if no character is left.
    """
    length, truncate = 0, config.truncate
    if config.shuffle is not None:
        whole, truncate = shuffled(pieces, config.shuffle, truncate), 1.0
        pieces = (whole[first : first + CHUNK] for first in range(0, len(whole), CHUNK))
    for text in pieces:
        file.write(text.encode("utf-32-le"))
        length += len(text)
    length = int(length * truncate)
    if not length:
        share = f", with data.truncate={config.truncate}" if config.truncate < 1 else ""
        raise UserError(f"data.path={config.path}: the text is empty{share}")
    digest, is_used = hashlib.sha256(), np.zeros(0x110000, bool)
    for _, points in chunks(file, length):
        digest.update(points.tobytes().decode("utf-32-le").encode())
        is_used[points] = True
    vocabulary = np.flatnonzero(is_used).astype(np.uint32)
    id_of = (np.cumsum(is_used) - 1).astype(np.min_scalar_type(len(vocabulary) - 1))  # of every code point
    for start, points in chunks(file, length):  # in place: ids are no wider than code points
        file.seek(start * id_of.itemsize)
        file.write(id_of[points].data)
    file.truncate(length * id_of.itemsize)
    return {
        "vocabulary": vocabulary.tobytes().decode("utf-32-le"),
        "type": id_of.dtype.name,
        "characters": length,
        "digest": digest.hexdigest(),
    }


def chunks(file: BinaryIO, length: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (position, code points) for chunks of the first `length` code points, 4 bytes each, in `file`."""
    for start in range(0, length, CHUNK):
        file.seek(4 * start)
        yield start, np.frombuffer(file.read(4 * min(CHUNK, length - start)), np.uint32)


def shuffled(pieces: Iterable[str], shuffle: str, truncate: float) -> str:
    """Shuffles the items of the first part of a text, the share `truncate`, always into the same order: lines, files,
    or paragraphs with the empty lines after them. The end of a file ends an item; text after the last item stays at the
    end. Raises `UserError` for fewer than two items.
    """
    files = ["".join(group) for is_end, group in itertools.groupby(pieces, FILE_END.__eq__) if not is_end]
    newlines = {"lines": 1, "paragraphs": 2, "files": 0}[shuffle]  # that end an item
    for i, text in enumerate(files[:-1]):
        files[i] += "\n" * (newlines - (len(text) - len(text.rstrip("\n"))))
    text = "".join(files)
    text = text[: int(len(text) * truncate)]
    if not text:
        return text
    ends = [end for end in itertools.accumulate(map(len, files)) if end <= len(text)]
    if newlines:
        ends = [match.end() for match in re.finditer("\n" if newlines == 1 else "\n\n+", text)]
    if len(ends) < 2:
        part = f" within data.truncate={truncate:g}" * (truncate < 1)
        hint = "; lines must end in LF, not in CR LF" * (shuffle == "paragraphs" and "\r\n" in text)
        raise UserError(f"data.shuffle={shuffle}: the text has fewer than two {shuffle}{part}{hint}")
    starts = [0, *ends[:-1]]
    order = np.random.default_rng(0).permutation(len(ends))
    return "".join([*(text[starts[i] : ends[i]] for i in order), text[ends[-1] :]])
