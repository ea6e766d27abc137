"""Text: from its sources to ids.

Sources: `find_files` and `read_file`. A text is the concatenation of its files, which fsspec finds, opens and
decompresses.

Characters: `read_text` decodes the files piece by piece, as a text may be larger than memory. `shuffled`, the one step
that reads it whole, reorders lines, paragraphs or files.

Ids: `encode_stream` writes code points in one pass, then replaces them, in place, by positions in the sorted
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
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

import fsspec
import numpy as np
import torch
from fsspec.core import OpenFile
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import infer_compression

from engine.config.schema import SHAKESPEARE_URL, DataConfig
from engine.errors import UserError, one_line
from engine.files import atomic_write, file_lock

log = logging.getLogger("gpt")

PYDOC = "pydoc:topics"  # documentation that comes with Python; needs no download
PIECE = 2**18  # bytes read at once
FILE_END = ""  # follows the pieces of each file: joining ignores it, `shuffled` sees it
PROGRESS_S = 5  # seconds between progress lines
# Keys of fsspec file infos that change with the content of a file.
VERSION = re.compile("(?i)size|mtime|created|modified|updated|etag|md5|sha|crc|generation|blob_?id")
LARGE = 64 * 2**20  # bytes
CHECKED = 256 * 2**20  # bytes of ids that are read to check a cache file
FORMAT = 5  # version of the cache files
CHUNK = 2**18  # characters rewritten at once
# What ends an item of `data.shuffle`.
SEPARATORS = {"lines": "\n", "paragraphs": "\n\n", "files": ""}


# --- sources ---


class Unreadable(UserError):
    """A file that is missing or cannot be read."""


@contextlib.contextmanager
def writes(setting: str, path: str) -> Iterator[None]:
    """Turns an `OSError` of the block, which writes `path`, into a `UserError` that names the setting."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{setting}={path}: cannot be written: {error.strerror or one_line(error)}") from error


@contextlib.contextmanager
def file_errors(name: str) -> Iterator[None]:
    """Turns the errors of every kind of file system into `Unreadable`, naming the file."""
    try:
        yield
    except IsADirectoryError as error:
        raise Unreadable(f"{name}: is a directory; for the files in it: '{name}/*'") from error
    except Exception as error:  # each remote file system raises its own
        if isinstance(error, FileNotFoundError) and error.__cause__ is None:
            raise Unreadable(f"{name}: no such file") from error
        # The cause is, say, a refused connection; of a missing package, fsspec says which.
        reason = one_line(error if isinstance(error, ImportError) else error.__cause__ or error)
        raise Unreadable(f"{name}: cannot be read: {reason}") from error


def find_files(path: str | list[str]) -> list[OpenFile]:
    """Finds the files at `path`, without opening them: a local path or fsspec URL, a pattern (with a `*`; files sorted
    by name), or a list of these, in the order given. As in a shell, `*` does not match a dot at the start of a name.
    """
    files = []
    for name in listed(path):
        options: dict[str, Any] = {}
        if name.startswith(("http://", "https://")):
            import aiohttp  # slow to import

            # Fail within seconds without a network, but do not limit the total time.
            timeout = aiohttp.ClientTimeout(sock_connect=10, sock_read=60)
            # Block size 0 reads one stream: not every server supports ranges.
            options = {"client_kwargs": {"timeout": timeout}, "block_size": 0}
        with file_errors(name):
            fs, pattern = fsspec.core.url_to_fs(name, **options)
            fs.invalidate_cache()  # drop cached listings
            matches = fsspec.open_files(name, "rb", compression="infer", **options)
        dots = f"/{pattern}".count("/.")
        matches = [file for file in matches if f"/{file.path}".count("/.") <= dots]
        if not matches:
            raise Unreadable(f"{name}: no file matches this pattern")
        files += matches
    return files


def listed(path: str | list[str]) -> list[str]:
    """The names in `data.path`, one or several."""
    return [path] if isinstance(path, str) else path


def is_pipe(path: str) -> bool:
    """Whether a local path is a pipe or a device, which can be read only once."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def real_files(path: str | list[str]) -> set[str]:
    """The files at local paths or patterns, symbolic links resolved, and URLs as they are."""
    names = listed(path)
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
    name, is_local = name_of(file), isinstance(file.fs, LocalFileSystem)
    # An archive's headers would be text. Of .zst, fsspec reads only the first frame, or a part.
    if re.search(r"\.(zst|zip|tgz|tar(\.(gz|bz2|xz))?)$", file.path):
        raise UserError(f"{name}: unpack it first, or name a file in it: zip://NAME::PATH, tar://NAME::PATH")
    count, logged = 0, time.monotonic()
    with file_errors(name):
        size = None if file.compression or is_local else file.fs.info(file.path).get("size")
        # fsspec rewinds a local file, which a pipe cannot do.
        with open(file.path, "rb") if is_local and is_pipe(file.path) else file as stream:
            for piece in iter(lambda: stream.read(PIECE), b""):
                count += len(piece)
                if time.monotonic() - logged > PROGRESS_S:
                    logged = time.monotonic()
                    log.info("reading     %s: %s MB", name, f"{count / 1e6:,.0f}")
                yield piece
        if size not in (None, count):
            raise EOFError(f"{count} of {size} bytes received")


def download(url: str, path: str, sha256: str | None) -> None:
    """Atomic download: into a temporary file beside `path`, checked against `sha256`, renamed. One process at a time
    downloads; an existing file is kept.

    Raises `Unreadable` for a `url` that cannot be read, `UserError` for a wrong SHA-256.
    """
    files = find_files(url)
    if len(files) > 1:
        raise UserError(f"data.url={url}: matches {len(files)} files; must be one")
    if infer_compression(url) != infer_compression(path):
        raise UserError(f"data.path={path}: must end as data.url={url}, which is not converted")
    files[0].compression = None
    folder, name = os.path.split(os.path.abspath(path))
    with writes("data.path", path):
        os.makedirs(folder, exist_ok=True)
        with file_lock(os.path.join(folder, f".{name}.lock")):
            if os.path.exists(path):
                return
            with atomic_write(path, "wb") as target:
                target.writelines(read_file(files[0]))
                target.flush()
                if sha256 is not None:
                    partial = OpenFile(LocalFileSystem(), target.name, compression=infer_compression(path))
                    for _ in read_text([partial], sha256, "bytes"):  # raises for another
                        pass


def copy_pipe(path: str, cache_dir: str) -> str:
    """Copies a pipe, which one process can read, once, into `cache_dir`. Returns the path of the copy, named by its
    SHA-256, so that the same text has the same path again; any other `path` as it is.
    """
    if not is_pipe(path):
        return path
    log.info("reading     %s until it ends", path)
    with writes("data.cache_dir", cache_dir):
        os.makedirs(cache_dir, exist_ok=True)
        copy = os.path.join(cache_dir, f"{os.getpid()}.pipe")
        with atomic_write(copy, "w+b") as target:
            target.writelines(read_file(OpenFile(LocalFileSystem(), path)))
            if not target.tell():
                raise UserError(f"data.path={path}: the text is empty")
            target.seek(0)
            digest = hashlib.file_digest(target, "sha256").hexdigest()
        named = os.path.join(cache_dir, digest[:32] + os.path.splitext(path)[1])
        os.replace(copy, named)
    return named


# --- characters ---


def read_text(files: list[OpenFile], sha256: str | None = None, encoding: str = "utf-8") -> Iterator[str]:
    """Yields the text of `files` in pieces, decoded from UTF-8, without byte order marks; with the
    `encoding` "bytes", each byte as the character of its number. `FILE_END` follows each file.

    Raises `UserError` for a file that is not UTF-8 (naming the byte), and at the end if the SHA-256 of the content
    differs from `sha256`.
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
                raise UserError(
                    f"{name_of(file)}: not UTF-8: byte 0x{byte:02x} at offset {offset}; "
                    "a model of bytes, trained with data.encoding=bytes, reads any file"
                ) from error
            if text:
                yield text
        yield FILE_END
    if sha256 not in (None, digest.hexdigest()):
        raise UserError(
            f"SHA-256 is {digest.hexdigest()}, but data.sha256={sha256}; "
            "remove a damaged file to download it again, or set data.sha256=null to accept this text"
        )


def pydoc_text() -> str:
    from pydoc_data import topics  # takes a quarter of a second

    return "\n\n".join(text for _, text in sorted(topics.topics.items()))


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


SEPARATORS_BY_NAME = {"none": "", "newline": "\n", "blank_line": "\n\n"}


def separator_text(setting: str | None) -> str:
    """The string that `data.separator` stands for; empty for none, and for older runs, which had none."""
    if setting is None:
        return ""
    return SEPARATORS_BY_NAME[setting] if setting in SEPARATORS_BY_NAME else unescaped(setting)


def unescaped(text: str, vocabulary: str = "") -> str:
    """`text` as typed on a command line, with \\n, \\t and \\\\ read as newline, tab and backslash; unchanged if the
    `vocabulary` has a backslash.
    """
    if "\\" in vocabulary:
        return text
    escapes = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}
    return re.sub(r"\\[nt\\]", lambda match: escapes[match[0]], text)


def unit_of(encoding: str | None) -> str:
    """What a character of the model stands for."""
    return "byte" if encoding == "bytes" else "character"


def shuffled(pieces: Iterable[str], shuffle: str, truncate: float) -> str:
    """Shuffles the items of the first part of a text, the share `truncate`, always into the same order: lines, files,
    or paragraphs with the empty lines after them. The end of a file ends an item; text after the last item stays at the
    end. Raises `UserError` for fewer than two items.
    """
    separator = SEPARATORS[shuffle]
    files = ["".join(group) for is_end, group in itertools.groupby(pieces, FILE_END.__eq__) if not is_end]
    for i, text in enumerate(files[:-1]):
        files[i] += "\n" * (len(separator) - (len(text) - len(text.rstrip("\n"))))
    text = "".join(files)
    text = text[: int(len(text) * truncate)]
    if separator:
        more = "\n*" if shuffle == "paragraphs" else ""
        items = re.findall(f"(?s).*?{separator}{more}", text)
    else:
        ends = itertools.accumulate(map(len, files))
        items = [file for file, end in zip(files, ends, strict=True) if end <= len(text)]
    if text and len(items) < 2:
        raise UserError(f"data.shuffle={shuffle}, data.truncate={truncate:g}: the text has fewer than two {shuffle}")
    rest = text[sum(map(len, items)) :]
    return "".join([*(items[i] for i in np.random.default_rng(0).permutation(len(items))), rest])


# --- ids ---


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


def open_text(config: DataConfig) -> EncodedText:
    """Encodes the text that a `DataConfig` names: in memory if it is small, otherwise in `cache_dir`, until one of its
    files or a setting changes. Raises `UserError` for a text or a cache that cannot be used.
    """
    path, sha256, encoding = config.path, config.sha256, config.encoding
    if is_small_local_file(path):
        ids = io.BytesIO()
        pieces = [from_text(pydoc_text(), encoding)] if path == PYDOC else read_text(find_files(path), sha256, encoding)
        record = encode_stream(pieces, config, ids)
        data = torch.from_numpy(np.frombuffer(ids.getbuffer(), record["type"]))
        return EncodedText(record["vocabulary"], data, record["digest"])

    files = find_files(path)
    archives = find_files([name.partition("::")[2] for name in listed(path) if "::" in name])
    settings = (path, config.truncate, sha256, encoding, config.shuffle)
    identity = json.dumps([FORMAT, *settings, *map(version_of, files + archives)])
    stem = os.path.join(config.cache_dir, hashlib.sha256(identity.encode()).hexdigest()[:32])
    if encoded := load_cached(stem):
        return encoded
    with writes("data.cache_dir", config.cache_dir):
        os.makedirs(config.cache_dir, exist_ok=True)
        shown = ", ".join(map(name_of, files[:5])) + ", ..." * (len(files) > 5)
        log.info("encoding    %s into %s.ids", shown, stem)
        with file_lock(os.path.join(config.cache_dir, ".cache.lock")):
            if load_cached(stem) is None:
                with atomic_write(f"{stem}.ids", "w+b") as ids:
                    record = encode_stream(read_text(files, sha256, encoding), config, ids)
                record["checksum"] = checksum(record, f"{stem}.ids")
                with atomic_write(f"{stem}.json") as file:
                    json.dump(record, file)
        encoded = load_cached(stem)
        assert encoded
        return encoded


def prepare_text(config: DataConfig, recorded_path: str | list[str] | None = None) -> DataConfig:
    """Downloads the text of the `DataConfig` if its `path` does not exist, copies pipes, and encodes a large text into
    the cache; call it in one process per host.

    Returns the configuration of the text to use. A copy replaces a pipe. Without a network, `pydoc:topics` replaces the
    default text, and a run that started on it (`recorded_path`) keeps it. Raises `UserError` for any other missing
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
                "%s; training on %s, which comes with Python, instead. To train on Shakespeare, put it at %s",
                error, PYDOC, os.path.abspath(config.path),
            )  # fmt: skip
            return pydoc
    copies = [copy_pipe(path, config.cache_dir) for path in listed(config.path)]
    config = dataclasses.replace(config, path=copies if isinstance(config.path, list) else copies[0])
    if not is_small_local_file(config.path):
        open_text(config)
    return config


def load_cached(stem: str) -> EncodedText | None:
    """Memory-maps a cached text: ids in `stem`.ids, the rest in `stem`.json, written last. None if it is missing or
    damaged.
    """
    try:
        with open(f"{stem}.json", encoding="utf-8") as file:
            record = dict(json.load(file))
        if record.pop("checksum") != checksum(record, f"{stem}.ids"):
            return None
        ids = np.memmap(f"{stem}.ids", record["type"], mode="r")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # Mapped read-only: Linux may refuse a writable private mapping larger than memory. torch warns
    # about read-only arrays; nothing writes to this one.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return EncodedText(record["vocabulary"], torch.from_numpy(ids), record["digest"])


def checksum(record: dict[str, Any], path: str) -> str:
    """SHA-256 of a cached text: its `record` and its ids at `path`. Of more than `CHECKED` bytes of ids, every n-th MiB
    is read, and the time of the last change is included.
    """
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        step = 1 + status.st_size // CHECKED
        changed = int(status.st_mtime) if step > 1 else None
        digest = hashlib.sha256(json.dumps([record, status.st_size, changed]).encode())
        for start in range(0, status.st_size, step * 2**20):
            file.seek(start)
            digest.update(file.read(2**20))
    return digest.hexdigest()


def encode_stream(pieces: Iterable[str], config: DataConfig, file: BinaryIO) -> dict[str, Any]:
    """Streaming encoder: truncates the text to the share `config.truncate`, shuffles it by `config.shuffle`, and writes
    its ids into the empty `file`, in the smallest unsigned type that holds them.

    Returns plain values: `vocabulary`, `type` of the ids, and `digest` of the text. Raises `UserError` if no character
    is left.
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
        "digest": digest.hexdigest(),
    }


def chunks(file: BinaryIO, length: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (position, code points) for chunks of the first `length` code points, 4 bytes each, in `file`."""
    for start in range(0, length, CHUNK):
        file.seek(4 * start)
        yield start, np.frombuffer(file.read(4 * min(CHUNK, length - start)), np.uint32)
