"""Text sources: files, URLs and patterns, compressed or not; downloads.

A text is the concatenation of its files. fsspec finds, opens and decompresses them. They are streamed,
as a text may be larger than memory.
"""

import codecs
import contextlib
import hashlib
import itertools
import logging
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import fsspec
from fsspec.core import OpenFile
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import infer_compression

from engine.errors import UserError, one_line
from engine.files import atomic_write

log = logging.getLogger("gpt")

# Tiny Shakespeare, the default text.
SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
PYDOC = "pydoc:topics"  # documentation that comes with Python; needs no download
PIECE = 2**18  # bytes read at once
FILE_END = ""  # follows the pieces of each file
PROGRESS_S = 5  # seconds between progress lines
# Keys of fsspec file infos that change with the content of a file.
VERSION = re.compile("(?i)size|mtime|created|modified|updated|etag|md5|generation|blobid")


class Unreadable(UserError):
    """A file that is missing or cannot be read."""


@contextlib.contextmanager
def file_errors(name: str) -> Iterator[None]:
    """Turns the errors of every kind of file system into `Unreadable`, naming the file."""
    try:
        yield
    except UserError:
        raise
    except IsADirectoryError as error:
        raise Unreadable(f"{name}: is a directory; for the files in it: '{name}/*'") from error
    except Exception as error:  # each remote file system raises its own
        if isinstance(error, FileNotFoundError) and error.__cause__ is None:
            raise Unreadable(f"{name}: no such file") from error
        # The cause is, say, a refused connection; of a missing package, fsspec says which.
        reason = one_line(error if isinstance(error, ImportError) else error.__cause__ or error)
        raise Unreadable(f"{name}: cannot be read: {reason}") from error


def find_files(path: str | list[str]) -> list[OpenFile]:
    """Finds the files at `path`, without opening them: a local path or fsspec URL, a pattern (with a
    `*`; files sorted by name), or a list of these, in the order given.
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
        if not matches:
            raise Unreadable(f"{name}: no file matches this pattern")
        files += matches
    return files


def is_local_file(file: OpenFile) -> bool:
    return isinstance(file.fs, LocalFileSystem)


def name_of(file: OpenFile) -> str:
    """The name of a file in messages."""
    return file.path.removeprefix(f"{os.getcwd()}/") if is_local_file(file) else file.full_name


def version_of(file: OpenFile) -> list[str]:
    """Identity of a file and its content: name, size, time, hash, as far as its file system has them."""
    with file_errors(name_of(file)):
        info = file.fs.info(file.path)
    return [file.full_name, *(f"{key}={info[key]}" for key in sorted(info) if VERSION.search(key))]


def read_file(file: OpenFile) -> Iterator[bytes]:
    """Yields the content of a file in non-empty pieces, decompressed according to `file.compression`;
    logs progress every few seconds. Raises `Unreadable`, also for a truncated file.
    """
    name = name_of(file)
    with file_errors(name):
        if file.compression == "zip":  # fsspec would read the first file in it
            raise UserError(
                f"{name}: use zip://NAME::{name}, or zip://*::{name} for all files in it"
            )
        if file.path.endswith(".zst"):  # fsspec's reader stops after a frame, and at a cut-off end
            raise UserError(f"{name}: .zst is not read; decompress it first: zstd -d {name}")
        size = None if file.compression else file.fs.info(file.path).get("size")
        with OpenFile(file.fs, file.path, "rb", file.compression) as stream:
            count, logged = 0, time.monotonic()
            for piece in iter(lambda: stream.read(PIECE), b""):
                count += len(piece)
                if time.monotonic() - logged > PROGRESS_S:
                    logged = time.monotonic()
                    share = f" ({count / size:.0%})" if size else ""
                    log.info("reading     %s: %s MB%s", name, f"{count / 1e6:,.0f}", share)
                yield piece
            if size not in (None, count) and not is_local_file(file):
                raise EOFError(f"{count} of {size} bytes received")


def read_text(
    files: list[OpenFile], sha256: str | None = None, encoding: str = "utf-8"
) -> Iterator[str]:
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
                raise UserError(
                    f"{name_of(file)}: not UTF-8: byte 0x{byte:02x} at offset {offset}; to train on the bytes "
                    "of any file: data.encoding=bytes"
                ) from error
            if text:
                yield text
        yield FILE_END
    if sha256 not in (None, digest.hexdigest()):
        raise UserError(
            f"{name_of(files[0])}: SHA-256 is {digest.hexdigest()}, but data.sha256={sha256}; "
            "remove a damaged file to download it again, or set data.sha256=null to accept this text"
        )


def pydoc_text() -> str:
    """The text of `pydoc:topics`."""
    from pydoc_data import topics  # takes a quarter of a second

    return "\n\n".join(text for _, text in sorted(topics.topics.items()))


def download(url: str, path: str, sha256: str | None, encoding: str = "utf-8") -> None:
    """Atomic download: into a temporary file beside `path`, checked against `sha256`, renamed.

    Raises `Unreadable` for a `url` that cannot be read, `UserError` for a wrong SHA-256 or a `path`
    that cannot be written.
    """
    files = find_files(url)
    if len(files) > 1:
        raise UserError(f"data.url={url}: matches {len(files)} files; must be one")
    if infer_compression(url) != infer_compression(path):
        raise UserError(f"data.path={path}: must end as data.url={url}, which is kept as it is")
    files[0].compression = None
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with atomic_write(path, "wb") as target:
            target.writelines(read_file(files[0]))
            target.flush()
            partial = OpenFile(LocalFileSystem(), target.name, compression=infer_compression(path))
            for _ in read_text([partial], sha256, encoding) if sha256 is not None else ():
                pass
    except OSError as error:
        raise UserError(
            f"data.path={path}: cannot write the downloaded text: {error.strerror}"
        ) from error
