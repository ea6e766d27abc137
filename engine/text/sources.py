"""Where a text comes from: files and URLs, one or several, compressed or not, fetched, decoded.

A text is the concatenation of its files. Everything is read through fsspec, in order and piece by
piece, so that a text may be larger than memory.
"""

import codecs
import contextlib
import glob
import hashlib
import itertools
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import fsspec
from fsspec.core import OpenFile
from fsspec.implementations.local import LocalFileSystem
from omegaconf import MISSING

from engine.errors import UserError, one_line

log = logging.getLogger("gpt")

# the reference text inside every Python, used as a corpus that needs no download
PYDOC = "pydoc:topics"
CONNECT_TIMEOUT_S = 10  # a machine without a network should notice within seconds
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
PIECE = 2**18  # bytes read at once
PROGRESS_S = 5  # between two lines of progress
# What file systems call the version of a file, in small letters alone.
VERSION = {"size", "mtime", "created", "modified", "lastmodified", "updated"} | {
    "etag", "contentmd5", "md5hash", "generation", "blobid",
}  # fmt: skip


@dataclass
class DataConfig:
    """Which text, and how it is cut. The fields are explained in `conf/data/`."""

    path: Any = MISSING  # str or list[str], which OmegaConf cannot say
    url: str | None = None
    sha256: str | None = None
    fallback: str | None = None
    block_size: int = 128
    train_split: float = 0.9
    truncate: float = 1.0
    cache_dir: str = "data/cache"

    def __post_init__(self):
        if self.block_size < 1:
            raise UserError(f"data.block_size={self.block_size}: must be at least 1 character")
        several = isinstance(self.path, list)
        paths = self.path if several else [self.path]
        for path in paths:
            if path is None or isinstance(path, list | dict):
                raise UserError(
                    f"data.path={self.path}: must be the path or URL of a text, or a list of "
                    f"them; {path} is of type {type(path).__name__}"
                )
        if not paths or "" in paths:
            raise UserError("data.path is empty: give the path or URL of a text")
        self.path = [str(path) for path in self.path] if several else str(self.path)
        if several and self.url is not None:
            raise UserError(
                f"data.url={self.url}: is fetched to one data.path, and {len(self.path)} are "
                "given; set data.url=null"
            )
        if not 0 < self.train_split < 1:
            raise UserError(
                f"data.train_split={self.train_split}: must lie between 0 and 1, both excluded"
            )
        if not 0 < self.truncate <= 1:
            raise UserError(
                f"data.truncate={self.truncate}: must be above 0 and at most 1 (the whole text)"
            )
        if not self.cache_dir or "://" in self.cache_dir:
            raise UserError(f"data.cache_dir={self.cache_dir}: must be a directory of this machine")


# --------------------------------------------------------------------------------------------------
# Files


class Unreadable(UserError):
    """A file of a text that is not there, or that its file system does not hand out."""


@contextlib.contextmanager
def reading(name: str):
    """Turns the errors of every kind of file system into `Unreadable`, naming the file."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        if "://" in name and error.__cause__ is not None:  # fsspec's for a refused connection
            raise Unreadable(f"{name}: cannot be read: {error.__cause__}") from error
        raise Unreadable(f"{name}: no such file") from error
    except IsADirectoryError as error:
        raise Unreadable(f"{name}: is a directory; for the files in it: '{name}/*'") from error
    except ImportError as error:  # s3fs, gcsfs, ...: fsspec names the package to install
        raise Unreadable(f"{name}: {error}") from error
    except Exception as error:  # every remote file system has its own; all mean the same here
        raise Unreadable(f"{name}: cannot be read: {one_line(error)}") from error


@dataclass(frozen=True)
class TextFile:
    """One file of a text.

    Attributes:
        name: its path or URL, for people.
        file_system, inner: where fsspec finds it.
        size: in bytes, as it is stored; None where that is not known before it is read.
        version: what its file system tells of it that changes with its content; plain.
    """

    name: str
    file_system: Any
    inner: str
    size: int | None
    version: list[str]

    @property
    def compression(self) -> str | None:
        """The ending that says how it is compressed, or None."""
        ending = os.path.splitext(self.inner)[1]
        return ending if ending in COMPRESSED else None

    def pieces(self, decompress: bool = True) -> Iterator[bytes]:
        """Its content, none of the pieces empty. Raises `Unreadable` if it does not all come."""
        compression = self.compression if decompress else None
        # fsspec's reader of .zst takes a file that was cut off for a whole one.
        by_fsspec = "infer" if compression not in (None, ".zst") else None
        count = 0
        with (
            reading(self.name),
            OpenFile(self.file_system, self.inner, "rb", compression=by_fsspec) as file,
        ):
            for piece in zstd_pieces(file) if compression == ".zst" else raw_pieces(file):
                count += len(piece)
                yield piece
            if "://" in self.name and compression is None and self.size not in (None, count):
                raise EOFError(f"{count} of {self.size} bytes came")


def raw_pieces(file: Any) -> Iterator[bytes]:
    while piece := file.read(PIECE):
        yield piece


def zstd_pieces(file: Any) -> Iterator[bytes]:
    """The content of a .zst file of any number of frames; EOFError where it ends within one."""
    try:
        import zstandard
    except ImportError as error:
        raise ImportError("to read .zst files: pip install zstandard") from error
    frame = None
    for compressed in raw_pieces(file):
        for start in range(0, len(compressed), 4096):  # which bounds what comes out at once
            rest = compressed[start : start + 4096]
            while rest:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                if piece := frame.decompress(rest):
                    yield piece
                rest = frame.unused_data
                if frame.eof:
                    frame = None
    if frame is not None:
        raise EOFError("it ends in the middle of a zstd frame")


def find(path: str | list[str]) -> list[TextFile]:
    """The files that make up the text at `path`: a local path or any fsspec URL, a pattern of
    either (its files are sorted by name), or a list of these, in the order given.

    A pattern has a `*`; in a local one that is not itself the name of a file, `?` and `[...]` count
    too. Raises `UserError` for a file that is missing or unreachable, and a pattern without files.
    """
    files = []
    for name in [path] if isinstance(path, str) else path:
        options: dict[str, Any] = {}
        if name.startswith(("http://", "https://")):
            import aiohttp  # comes with fsspec[http]; only needed for a download

            timeout = aiohttp.ClientTimeout(
                sock_connect=CONNECT_TIMEOUT_S, sock_read=6 * CONNECT_TIMEOUT_S
            )
            # A block size of 0 is one stream: not every server hands out parts.
            options = {"client_kwargs": {"timeout": timeout}, "block_size": 0}
        with reading(name):
            file_system, inner = fsspec.core.url_to_fs(name, **options)
            file_system.invalidate_cache()  # a listing may be older than the file
            remote = "://" in name
            pattern = "*" in name if remote else glob.has_magic(name) and not os.path.exists(name)
            if not pattern:
                files.append(text_file(name, file_system, inner, name))
                continue
            found = [
                text_file(as_typed(one, file_system, name), file_system, one, name)
                for one, info in sorted(file_system.glob(inner, detail=True).items())
                if info["type"] != "directory"
            ]
            if not found:
                raise Unreadable(f"{name}: no file has a name like this")
            files += found
    return files


def as_typed(inner: str, file_system: Any, pattern: str) -> str:
    """The name of a file that a pattern has found: relative where the pattern is."""
    if "://" in pattern:
        return file_system.unstrip_protocol(inner)
    absolute = os.path.isabs(os.path.expanduser(pattern))
    return inner if absolute else os.path.relpath(inner)


def text_file(name: str, file_system: Any, inner: str, asked: str) -> TextFile:
    """The file that fsspec finds at `inner`; `asked` is the path or pattern that led to it."""
    info = file_system.info(inner)
    if info["type"] == "directory":
        raise IsADirectoryError(name)
    is_local = isinstance(file_system, LocalFileSystem)
    facts = {key.lower().replace("-", "").replace("_", ""): value for key, value in info.items()}
    version = [f"{fact}={facts[fact]}" for fact in sorted(VERSION & facts.keys())]
    return TextFile(
        name,
        file_system,
        inner,
        info.get("size"),
        [os.path.realpath(inner) if is_local else f"{asked} {inner}", *version],
    )


class ReadingProgress:
    """Says every few seconds how much of `name` has been read, `size` bytes if that is known."""

    def __init__(self, name: str, size: int | None):
        self.name, self.size, self.num_bytes = name, size, 0
        self.started = self.said = time.monotonic()

    def add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        now = time.monotonic()
        if now - self.said < PROGRESS_S:
            return
        self.said = now
        log.info(
            "reading     %s: %s%s MB, %.0f MB/s",
            self.name,
            f"{self.num_bytes / self.size:.0%} of " if self.size else "",
            f"{(self.size or self.num_bytes) / 1e6:,.0f}",
            self.num_bytes / 1e6 / (now - self.started),
        )


# --------------------------------------------------------------------------------------------------
# Texts


class Source:
    """The text at a `data.path`, to be read once, by iterating over it: pieces of decoded text.

    `stored` is how many bytes its files are known to have, and `size` how many the text has, None
    where that is not known beforehand; `version` identifies it and changes with it. `num_bytes` and
    `digest`, a SHA-256, are of what has been read.

    Raises `UserError` for a file that is missing, unreachable, or not UTF-8 (naming the byte).
    """

    def __init__(self, path: str | list[str]):
        self.files = find(path)
        self.stored = sum(file.size or 0 for file in self.files)
        known = all(file.size is not None and file.compression is None for file in self.files)
        self.size = self.stored if known else None
        self.is_remote = any("://" in file.name for file in self.files)
        self.version = [file.version for file in self.files]
        self.name = self.files[0].name
        if len(self.files) > 1:
            self.name += f" and {len(self.files) - 1} more"
        self.digest = hashlib.sha256()
        self.progress = ReadingProgress(self.name, self.size)

    @property
    def num_bytes(self) -> int:
        return self.progress.num_bytes

    def __iter__(self) -> Iterator[str]:
        for file in self.files:
            decoder = codecs.getincrementaldecoder("utf-8-sig")()  # without a byte order mark
            first = self.num_bytes
            for piece in itertools.chain(file.pieces(), [b""]):
                try:
                    text = decoder.decode(piece, final=not piece)
                except UnicodeDecodeError as error:
                    kept = len(error.object) - len(piece)  # by the decoder, from the piece before
                    offset = self.num_bytes - first - kept + error.start
                    raise UserError(
                        f"{file.name}: not UTF-8: byte 0x{error.object[error.start]:02x} "
                        f"at offset {offset}"
                    ) from error
                self.digest.update(piece)
                self.progress.add(len(piece))
                if text:
                    yield text


def pydoc_text() -> str:
    """The text of `pydoc:topics`."""
    from pydoc_data import topics  # a quarter of a second, only for those who use it

    return "\n\n".join(text for _, text in sorted(topics.topics.items()))


def fetch(config: DataConfig) -> Any:
    """Makes the text available and returns the path to read it from: `config.path`, or
    `config.fallback`.

    With a `url`, a text that is not yet at `path` is downloaded to a temporary file beside it,
    checked against `sha256`, and moved into place whole; compressed or not, as the ending of `path`
    says. One process per host calls this; see `distributed.run_on_each_host`.

    Raises `UserError` where the text cannot be had, or is not the one that `sha256` promises.
    """
    if config.url is None or config.path == PYDOC:
        return config.path
    if "://" in config.path or os.path.exists(config.path):
        return config.path
    folder, name = os.path.split(os.path.abspath(config.path))
    ending = os.path.splitext(name)[1]
    temporary = None
    try:
        with reading(config.url):
            found = find(config.url)
        if len(found) > 1:
            raise UserError(f"data.url={config.url}: is {len(found)} files; it must be one")
        [file] = found
        progress = ReadingProgress(
            file.name, file.size if file.compression in (None, ending) else None
        )
        os.makedirs(folder, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=folder, prefix=".download-", suffix=ending, delete=False
        ) as target:
            temporary = target.name
            for piece in file.pieces(decompress=file.compression != ending):
                target.write(piece)
                progress.add(len(piece))
            target.flush()
            os.fsync(target.fileno())
        if config.sha256 is not None:
            digest = hashlib.sha256()
            for piece in find(temporary)[0].pieces():
                digest.update(piece)
            check_digest(digest.hexdigest(), config.sha256, f"data.url={config.url}")
        os.chmod(temporary, 0o644)  # a temporary file is private; a text is not
        os.replace(temporary, config.path)
    except Unreadable:
        if config.fallback is None:
            raise
        return config.fallback
    except OSError as error:
        raise UserError(
            f"data.path={config.path}: cannot write the downloaded text: {error.strerror}"
        ) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):  # it is in place
                os.remove(temporary)
    return config.path


def check_digest(digest: str, expected: str | None, name: str) -> None:
    """Raises `UserError`, calling the text `name`, unless it has the digest that is `expected`."""
    if expected is not None and digest != expected:
        raise UserError(
            f"{name}: SHA-256 is {digest}, but data.sha256={expected}; remove a damaged file to "
            "download it again, or set data.sha256=null to accept this text"
        )
