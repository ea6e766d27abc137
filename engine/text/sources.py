"""Sources of a text: files, folders, patterns, archives, URLs and pipes, read in pieces of bytes."""

import contextlib
import glob
import hashlib
import logging
import os
import re
import sys
import tarfile
import tempfile
import time
import uuid
import zipfile
from collections.abc import Generator, Iterator
from typing import IO, Any, BinaryIO, NamedTuple

import fsspec
from fsspec.core import OpenFile
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem
from fsspec.utils import infer_compression

from engine.config.schema import DataConfig
from engine.errors import UserError, one_line
from engine.files import atomic_write, file_lock, masked, writes

log = logging.getLogger("gpt")

STDIN = "-"
PIECE = 2**18  # bytes read at once
PROGRESS_S = 5  # seconds between progress lines
# Keys of fsspec file infos that change with the content of a file.
VERSION = re.compile("(?i)size|mtime|created|modified|updated|etag|md5|sha|crc|generation|blob_?id")
ARCHIVE = re.compile(r"(?i)\.(zip|tgz|tbz2|txz|tar(\.(gz|bz2|xz))?)(\?.*)?$")  # also of a signed URL
MOST_OF_ARCHIVES = 10e9  # bytes, decompressed, unless data.max_bytes says more
OF_A_RUN = {".lock", "metrics.jsonl", "multirun.yaml", ".cache.lock"}  # in the directory of a run, a sweep or a cache


class Unreadable(UserError):
    """A file that is missing or cannot be read."""


class Found(NamedTuple):
    """A file, not opened yet. One in a folder that the user named is read only if it is text."""

    file: OpenFile
    is_named: bool


class Source(NamedTuple):
    """A file, or a member of an archive, and its content; that of a file is decompressed."""

    name: str
    pieces: Iterator[bytes]
    is_named: bool
    is_member: bool = False


@contextlib.contextmanager
def file_errors(name: str) -> Iterator[None]:
    """Turns the errors of every kind of file system into `Unreadable`, naming the file."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each remote file system raises its own
        if isinstance(error, FileNotFoundError) and error.__cause__ is None:
            hint = "; torchrun does not pass on <(...): write it to a file" * name.startswith("/dev/fd/")
            raise Unreadable(f"{name}: no such file{hint}") from error
        # The cause is, say, a refused connection; of a missing package, fsspec says which.
        reason = one_line(error if isinstance(error, ImportError) else error.__cause__ or error)
        raise Unreadable(f"{name}: cannot be read: {reason}") from error


# --- finding files ---


def find_files(path: str | list[str], cache_dir: str = "", says: bool = False) -> list[Found]:
    """Finds the files at `path`, without opening them: a local path or fsspec URL, a folder (all files below it, but no
    hidden ones, runs, or `cache_dir`), a pattern (with a `*`; files sorted by name), or a list of these, in the order
    given. As in a shell, `*` does not match a dot at the start of a name. `says`: logs how many are left out.
    """
    files: list[Found] = []
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
            if not options and "*" not in name and fs.isdir(pattern):
                files += [Found(OpenFile(fs, each, compression=infer_compression(each)), False)
                          for each in files_below(fs, pattern, cache_dir, says)]  # fmt: skip
                continue
            compression = infer_compression(name.partition("?")[0]) if options else "infer"  # of a signed URL
            matches = fsspec.open_files(name, "rb", compression=compression, **options)
        dots = f"/{pattern}".count("/.")
        matches = [file for file in matches if f"/{file.path}".count("/.") <= dots]
        if not matches:
            raise Unreadable(f"{name}: no file matches this pattern")
        files += (Found(file, True) for file in matches)
    return files


def files_below(fs: AbstractFileSystem, folder: str, cache_dir: str, says: bool) -> list[str]:
    """The files below a folder, sorted, without hidden ones, those of runs, and caches."""
    found: list[str] = []
    left_out = 0
    for parent, folders, names in fs.walk(folder, topdown=True):
        if OF_A_RUN & {*names}:
            left_out += len(names)
            folders.clear()
            continue
        for name in [*folders]:
            is_cache = name == "__pycache__" or os.path.abspath(f"{parent}/{name}") == os.path.abspath(cache_dir)
            if name.startswith(".") or is_cache:
                folders.remove(name)
        for name in names:
            # A pipe in a folder would be waited for.
            is_read = not isinstance(fs, LocalFileSystem) or os.path.isfile(f"{parent}/{name}")
            if is_read and not name.startswith("."):
                found.append(f"{parent}/{name}")
            else:
                left_out += 1
    if left_out and says:
        log.info("folder      %s: %d files are left out: hidden, of runs, or no files", folder, left_out)
    if not found:
        but = " but hidden ones and those of runs" * bool(left_out)
        raise Unreadable(f"{folder}: there is no file in this folder{but}")
    return sorted(found)


def listed(path: str | list[str]) -> list[str]:
    """The names in `data.path`, one or several."""
    return [path] if isinstance(path, str) else path


def is_pipe(path: str) -> bool:
    """Whether a local path is a pipe or a device, which can be read only once."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def has_no_size(path: str) -> bool:
    """Whether a local path is standard input, a pipe, a device or a file of /proc: reading it may wait for ever."""
    return path == STDIN or is_pipe(path) or os.path.realpath(path).startswith("/proc/")


def real_files(path: str | list[str]) -> set[str]:
    """The files at local paths or patterns, symbolic links resolved, and URLs, masked."""
    names = listed(path)
    local = [name for name in names if "://" not in name]
    files = [file for name in local for file in (glob.glob(name, recursive=True) if "*" in name else [name])]
    return {*map(os.path.realpath, files), *(masked(name) for name in names if "://" in name)}


def name_of(file: OpenFile) -> str:
    """The name of a file in messages."""
    is_local = isinstance(file.fs, LocalFileSystem)
    return file.path.removeprefix(f"{os.getcwd()}/") if is_local else file.full_name


def version_of(file: OpenFile) -> list[str]:
    """Identity of a file and its content: name, and size, time and hash if available."""
    with file_errors(name_of(file)):
        info = file.fs.info(file.path)
    return [file.full_name, *(f"{key}={info[key]}" for key in sorted(info) if VERSION.search(key))]


# --- reading them ---


class Meter:
    """Counts the bytes read of several sources."""

    read = 0

    def limited(self, pieces: Iterator[bytes], name: str, most: float | None) -> Iterator[bytes]:
        """The pieces of a source. Raises `UserError`, naming it, for an error in reading, or once more than `most`
        bytes are read in all.
        """
        with file_errors(name):
            for piece in pieces:
                self.read += len(piece)
                if most is not None and self.read > most:
                    raise UserError(f"{name}: more than {most:,.0f} bytes; data.max_bytes= allows more")
                yield piece


def hashed(pieces: Iterator[bytes], *digests: "hashlib._Hash") -> Iterator[bytes]:
    """The pieces, added to each of the digests."""
    for piece in pieces:
        for digest in digests:
            digest.update(piece)
        yield piece


def open_sources(files: list[Found], config: DataConfig) -> Iterator[Source]:
    """Opens the `files`, and the members of archives: of a zip in the order of their names, of a tar in its own. Each
    source must be read before the next one is taken. Raises `UserError` beyond `config.max_bytes`.
    """
    meter = Meter()
    for file, is_named in files:
        name = name_of(file)
        if ARCHIVE.search(file.path):
            most, hidden = config.max_bytes or meter.read + MOST_OF_ARCHIVES, 0
            with file_errors(name), contextlib.closing(members(file)) as found:
                for member, pieces in found:
                    if pieces is None:
                        hidden += 1
                    else:
                        yield Source(f"{name}, {member}", meter.limited(pieces, name, most), False, is_member=True)
            if hidden:
                log.info("archive     %s: %d hidden files and links are left out", name, hidden)
        else:
            yield Source(name, meter.limited(read_file(file), name, config.max_bytes), is_named)


def members(file: OpenFile) -> Generator[tuple[str, Iterator[bytes] | None], None, None]:
    """Yields the name and the content, in pieces, of each file in an archive; None of a hidden one, or a link."""
    packed = OpenFile(file.fs, file.path)  # tarfile decompresses it
    if not re.search(r"(?i)\.zip(\?.*)?$", file.path):
        with packed as stream, tarfile.open(fileobj=stream, mode="r|*") as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isfile() and not is_hidden(member.name) else None
                if not member.isdir():
                    yield member.name, in_pieces(content) if content else None
        return
    with tempfile.TemporaryFile() if not isinstance(file.fs, LocalFileSystem) else open(file.path, "rb") as stream:
        if not isinstance(file.fs, LocalFileSystem):  # a zip ends with its list of files
            stream.writelines(read_file(packed))
        with zipfile.ZipFile(stream) as archive:
            for entry in sorted(archive.infolist(), key=lambda entry: entry.filename):
                if entry.is_dir():
                    continue
                if is_hidden(entry.filename):  # it may be encrypted
                    yield entry.filename, None
                else:
                    with archive.open(entry) as content:
                        yield entry.filename, in_pieces(content)


def is_hidden(name: str) -> bool:
    """Whether a member of an archive, or a folder that it is in, is hidden."""
    return any(part.startswith(".") or part == "__MACOSX" for part in name.removeprefix("./").split("/"))


def in_pieces(stream: IO[bytes]) -> Iterator[bytes]:
    """The content of a binary file in non-empty pieces."""
    return iter(lambda: stream.read(PIECE), b"")


def read_file(file: OpenFile) -> Iterator[bytes]:
    """Yields the content of a file in non-empty pieces, decompressed according to `file.compression`;
    logs progress every few seconds. Raises `Unreadable`, also for a truncated file.
    """
    name, is_local = name_of(file), isinstance(file.fs, LocalFileSystem)
    if file.path.endswith(".zst"):  # of which fsspec reads only the first frame, or a part
        raise UserError(f"{name}: unpack it first")
    if is_local and has_no_size(file.path):
        log.info("reading     %s until it ends", name)
    count, logged = 0, time.monotonic()
    with file_errors(name):
        size = None if file.compression or is_local else file.fs.info(file.path).get("size")
        # fsspec rewinds a local file, which a pipe cannot do.
        with open(file.path, "rb") if is_local and is_pipe(file.path) else file as stream:
            for piece in in_pieces(stream):
                count += len(piece)
                if time.monotonic() - logged > PROGRESS_S:
                    logged = time.monotonic()
                    log.info("reading     %s: %s MB", name, f"{count / 1e6:,.0f}")
                yield piece
        if size not in (None, count):
            raise EOFError(f"{count} of {size} bytes received")


# --- copies ---


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
    files[0].file.compression = None
    folder, name = os.path.split(os.path.abspath(path))
    with writes("data.path", path):
        os.makedirs(folder, exist_ok=True)
        with file_lock(os.path.join(folder, f".{name}.lock")):
            if os.path.exists(path):
                return
            with atomic_write(path, "wb") as target:
                target.writelines(read_file(files[0].file))
                target.flush()
                partial = OpenFile(LocalFileSystem(), target.name, compression=infer_compression(path))
                digest = hashlib.sha256()
                for piece in read_file(partial) if sha256 else ():
                    digest.update(piece)
                check_sha256(digest.hexdigest(), sha256, url)


def check_sha256(found: str, expected: str | None, name: str | list[str]) -> None:
    """Raises `UserError`, naming the source, if the SHA-256 of its content is not the `expected` one, if any."""
    if expected and found != expected:
        raise UserError(
            f"{name}: SHA-256 is {found}, but data.sha256={expected}; remove a damaged file to download it again, or "
            "set data.sha256=null to accept this text"
        )


def copy_pipe(path: str, cache_dir: str, most: float | None) -> str:
    """Copies a pipe, which one process can read, once, into `cache_dir`. Returns the path of the copy, named by its
    SHA-256, so that the same text has the same path again; any other `path` as it is. Raises `UserError` for more than
    `most` bytes.
    """
    if not is_pipe(path):
        return path
    pieces = Meter().limited(read_file(OpenFile(LocalFileSystem(), path)), path, most)
    copied = copy_stream(pieces, cache_dir, os.path.splitext(path)[1], "data.cache_dir")
    if copied is None:
        raise UserError(f"data.path={path}: the text is empty")
    return copied


def copy_stdin(folder: str, recorded: str | None, most: float | None) -> str:
    """Copies standard input into `folder`; returns the path of the copy. If it is a terminal, or empty, as when a run
    resumes, or for later jobs of a sweep, returns the copy of the run, `recorded` in its snapshot, or the newest one.
    """
    stream: BinaryIO | None = sys.stdin.buffer if sys.stdin is not None and not sys.stdin.isatty() else None
    pieces = Meter().limited(in_pieces(stream), "standard input", most) if stream is not None else iter(())
    if copied := copy_stream(pieces, folder, ".stdin", "run_dir"):
        return copied
    earlier = sorted(glob.glob(os.path.join(glob.escape(folder), "*.stdin")), key=os.path.getmtime)
    if recorded and os.path.exists(recorded):
        return recorded
    if not earlier:
        raise UserError("data.path=-: standard input is empty, or a terminal")
    return earlier[-1]


def copy_stream(pieces: Iterator[bytes], folder: str, extension: str, setting: str) -> str | None:
    """Writes `pieces` into a file of `folder`, as `setting` says, that is named by its SHA-256; returns its path, None
    without a byte.
    """
    with writes(setting, folder):
        os.makedirs(folder, exist_ok=True)
        copy, digest = os.path.join(folder, f"{uuid.uuid4().hex}.pipe"), hashlib.sha256()
        with atomic_write(copy, "wb") as target:
            target.writelines(hashed(pieces, digest))
            size = target.tell()
        if not size:
            os.remove(copy)
            return None
        named = os.path.join(folder, digest.hexdigest()[:32] + extension)
        os.replace(copy, named)
    return named
