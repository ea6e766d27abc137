"""Large texts: encoded once into a file that every process of a host maps into memory.

A text of more than `LARGE` bytes need not fit in memory, so it is streamed. One pass over its
source gives every character an id in the order of first appearance; a second pass, over the file
that this made, gives the ids their order among the sorted characters. The file holds the ids, in
the smallest unsigned integer type that has room for the vocabulary, and after them a record of what
they are: JSON, its length in 8 bytes, and the SHA-256 of both. Its name is a digest of what
identifies the source.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import torch

from engine.errors import UserError, one_line
from engine.files import atomic_write
from engine.text.sources import PYDOC, DataConfig, Source, check_digest, pydoc_text

log = logging.getLogger("gpt")

LARGE = 64 * 2**20  # bytes, compressed or not; texts up to this are kept in memory
FORMAT = 1
CHUNK = 2**18  # ids changed at once
UNSEEN = 2**32 - 1


class EncodedText(NamedTuple):
    """A text as ids: `data` is a 1-D tensor of uint8, uint16 or uint32, a character's id its
    position in `vocabulary`; `digest` is the SHA-256 of the text.
    """

    vocabulary: str
    data: torch.Tensor
    digest: str


def open_text(config: DataConfig) -> str | EncodedText:
    """The text at `config.path`: itself, whole, or, where it is large, encoded and mapped into
    memory, of which only the share `config.truncate`.

    A large text is encoded into `config.cache_dir`, unless that has been done before and its source
    has not changed since; processes that want to at the same time wait for one of them.

    Raises `UserError` for a text that is missing, unreachable, not UTF-8 (naming the byte offset),
    or whose SHA-256 is not `config.sha256`, and where the cache cannot be written.
    """
    if config.path == PYDOC:
        return pydoc_text()
    source = Source(config.path)
    identity = json.dumps([FORMAT, config.truncate, source.version])
    name = hashlib.sha256(identity.encode()).hexdigest()[:32]
    path = os.path.join(config.cache_dir, f"{name}.ids")
    is_large = source.stored > LARGE
    if (is_large or source.size is None) and (cached := load(path, config)):
        return cached
    pieces: Iterator[str] = iter(source)
    if not is_large:
        read = []  # as bytes, which take less memory
        for piece in pieces:
            read.append(piece.encode())
            if source.num_bytes > LARGE:
                break
        else:
            check_digest(source.digest.hexdigest(), config.sha256, f"data.path={config.path}")
            return b"".join(read).decode()
        pieces = itertools.chain(map(bytes.decode, read), pieces)
    build(path, source, pieces, config)
    return cast(EncodedText, load(path, config))


def fill(config: DataConfig) -> str | None:
    """What one process of a host does for all: puts a large text into the cache of the host.

    Returns a small text that is remote, or whose size could not be known before it was read: it is
    to be handed to the other processes. They read any other small text themselves. Raises what
    `open_text` does.
    """
    if config.path == PYDOC:
        return None
    source = Source(config.path)
    names = [file.name for file in source.files]
    if names != [config.path]:
        more = ", ..." * (len(names) > 5)
        log.info("files       %d: %s%s", len(names), ", ".join(names[:5]), more)
    if not source.is_remote and source.size is not None and source.size <= LARGE:
        return None
    text = open_text(config)
    return text if isinstance(text, str) else None


# --------------------------------------------------------------------------------------------------
# The file


def load(path: str, config: DataConfig) -> EncodedText | None:
    """The text in the cache file at `path`, mapped into memory; None if there is none, or it is
    damaged.

    Raises `UserError` if the SHA-256 of its source is not `config.sha256`.
    """
    try:
        with open(path, "rb") as file:
            record = read_record(file)
            if record is None:
                return None
            check_digest(record["source_digest"], config.sha256, f"data.path={config.path}")
            if not record["characters"]:
                return EncodedText("", torch.empty(0, dtype=torch.uint8), record["digest"])
            ids = np.memmap(file, record["type"], mode="r", shape=(record["characters"],))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(
            f"data.cache_dir={config.cache_dir}: {path} cannot be read: {error.strerror}"
        ) from error
    # Read only: the kernel refuses a private copy larger than memory, even one that is never
    # made. Torch warns of that, but nothing writes into a text.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return EncodedText(record["vocabulary"], torch.from_numpy(ids), record["digest"])


def write_record(file: BinaryIO, record: dict[str, Any]) -> None:
    content = json.dumps(record).encode()
    content += len(content).to_bytes(8, "little")
    file.write(content + hashlib.sha256(content).hexdigest().encode())


def read_record(file: BinaryIO) -> dict[str, Any] | None:
    """The record that ends a cache file; None if it is not whole, or what stands before it is not
    of the length that it says.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 72))
    end = file.read()
    length = int.from_bytes(end[:8], "little")
    start = size - 72 - length
    if start < 0:
        return None
    file.seek(start)
    content = file.read(length + 8)
    if hashlib.sha256(content).hexdigest().encode() != end[8:]:
        return None
    record = json.loads(content[:-8])
    is_whole = record["characters"] * np.dtype(record["type"]).itemsize == start
    return record if is_whole else None


# --------------------------------------------------------------------------------------------------
# Building it


def build(path: str, source: Source, pieces: Iterable[str], config: DataConfig) -> None:
    """Encodes `pieces`, which are `source`'s, into the cache file at `path`, unless another process
    does so first.

    The file is whole or not there. One process at a time writes into the directory, so temporaries
    found there are of killed ones, and are removed. Raises `UserError` if nothing can be written.
    """
    try:
        os.makedirs(config.cache_dir, exist_ok=True)
        with locked(config.cache_dir):
            if load(path, config):
                return
            if os.path.exists(path):
                log.warning("%s: damaged: rebuilding it", path)
            for name in os.listdir(config.cache_dir):
                if name.endswith(".ids.tmp"):
                    os.remove(os.path.join(config.cache_dir, name))
            log.info("encoding    %s into %s", source.name, path)
            with atomic_write(path, "w+b") as file:
                encode(source, pieces, file, config.truncate)
    except OSError as error:
        raise UserError(
            f"data.cache_dir={config.cache_dir}: cannot be written: {one_line(error)}"
        ) from error


@contextlib.contextmanager
def locked(folder: str) -> Iterator[None]:
    """Has `folder` to itself among the processes that ask for that; waits for it."""
    with open(os.path.join(folder, ".lock"), "a") as lock:  # the kernel's: it dies with its holder
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            log.info("waiting     for another process that writes into %s", folder)
            fcntl.lockf(lock, fcntl.LOCK_EX)
        yield


def encode(source: Source, pieces: Iterable[str], file: BinaryIO, truncate: float) -> None:
    """Writes the share `truncate` of the text, and its record, into the empty `file`."""
    ids = AppearanceIds()
    count, dtype = 0, ids.dtype
    for text in pieces:
        encoded = ids.encode(text)
        if ids.dtype != dtype:
            rewrite(file, count, dtype, ids.dtype, lambda chunk: chunk)
            file.seek(0, os.SEEK_END)
            dtype = ids.dtype
        file.write(encoded.data)
        count += len(encoded)

    digest, points = source.digest, np.array(ids.points, np.uint32)
    if truncate < 1:
        count, digest = int(count * truncate), hashlib.sha256()
        file.truncate(count * dtype.itemsize)
        used = 0
        for _, chunk in chunks(file, count, dtype):
            used = max(used, int(chunk.max()) + 1)
            digest.update(points[chunk].tobytes().decode("utf-32-le").encode())
        points = points[:used]  # those that appear first
    final = np.min_scalar_type(max(0, len(points) - 1))
    order = np.argsort(points)
    final_id = np.zeros(max(len(points), 256), final)  # 256, to translate bytes with
    final_id[order] = np.arange(len(points), dtype=final)
    rewrite(file, count, dtype, final, lambda chunk: look_up(final_id, chunk))
    file.truncate(count * final.itemsize)
    file.seek(0, os.SEEK_END)
    write_record(
        file,
        {
            "vocabulary": "".join(map(chr, points[order])),
            "type": final.name,
            "characters": count,
            "digest": digest.hexdigest(),
            "source_digest": source.digest.hexdigest(),
        },
    )


class AppearanceIds:
    """Gives each character an id, in the order of first appearance.

    `points` are the code points by id, and `dtype` the smallest type that holds the ids so far.
    """

    def __init__(self):
        self.points: list[int] = []
        self.dtype = np.dtype(np.uint8)
        self.id_of = np.full(0x110000, UNSEEN, np.uint32)  # of every code point
        self.id_of_byte = np.zeros(256, np.uint8)  # of ASCII characters, while ids are bytes
        self.seen = b""  # ASCII characters that have an id

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, 1-D of type `dtype`, after it has learnt new characters from it."""
        if text.isascii():
            points = np.frombuffer(text.encode(), np.uint8)
            unseen = np.frombuffer(points.tobytes().translate(None, self.seen), np.uint8)
        else:
            points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
            unseen = points[self.id_of.take(points) == UNSEEN]
        if len(unseen):
            self._learn(unseen)
        if points.dtype == self.dtype == np.uint8:
            return look_up(self.id_of_byte, points)
        return self.id_of.take(points).astype(self.dtype)

    def _learn(self, unseen: np.ndarray) -> None:
        first = np.sort(np.unique(unseen, return_index=True)[1])
        new = unseen[first].tolist()
        self.id_of[new] = np.arange(len(self.points), len(self.points) + len(new))
        self.points += new
        self.dtype = np.min_scalar_type(len(self.points) - 1)
        self.seen += bytes(point for point in new if point < 128)
        self.id_of_byte = self.id_of[:256].astype(np.uint8)


def look_up(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """`table[ids]`, of which bytes by bytes have a faster way."""
    if table.dtype == ids.dtype == np.uint8:
        return np.frombuffer(ids.tobytes().translate(table[:256].tobytes()), np.uint8)
    return table.take(ids)


def chunks(
    file: BinaryIO, count: int, dtype: np.dtype, backwards: bool = False
) -> Iterator[tuple[int, np.ndarray]]:
    """The `count` ids of type `dtype` in `file`, in pieces, each with the number of its first."""
    starts = range(0, count, CHUNK)
    for start in reversed(starts) if backwards else starts:
        file.seek(start * dtype.itemsize)
        length = min(CHUNK, count - start)
        yield start, np.frombuffer(file.read(length * dtype.itemsize), dtype)


def rewrite(
    file: BinaryIO,
    count: int,
    old: np.dtype,
    new: np.dtype,
    change: Callable[[np.ndarray], np.ndarray],
) -> None:
    """Replaces, in place, the `count` ids of type `old` by what `change` makes of them, of type
    `new`. From the end where they grow, so that nothing is overwritten before it is read.
    """
    for start, ids in chunks(file, count, old, backwards=new.itemsize > old.itemsize):
        file.seek(start * new.itemsize)
        file.write(change(ids).astype(new, copy=False).data)
