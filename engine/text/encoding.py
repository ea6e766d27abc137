"""Encoding: text to ids, in one streaming pass over the text and one rewrite of the ids.

The pass assigns ids in the order of first appearance; the rewrite replaces them by positions in the
sorted vocabulary. A plain local file of up to `LARGE` bytes is encoded in memory; any other text into
a cache file, which all processes of a host memory-map.
"""

import fcntl
import hashlib
import io
import json
import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from fsspec.utils import infer_compression

from engine.errors import UserError, one_line
from engine.files import atomic_write
from engine.text.sources import PYDOC, find_files, name_of, pydoc_text, read_text, version_of

log = logging.getLogger("gpt")

LARGE = 64 * 2**20  # bytes
FORMAT = 2  # version of the cache files
CHUNK = 2**18  # ids rewritten at once
UNSEEN = 2**32 - 1


class EncodedText(NamedTuple):
    """A text as ids.

    `vocabulary` has the distinct characters, sorted; `data` their positions in it, a 1-D tensor of
    uint8, uint16 or uint32; `digest` is the SHA-256 of the text in UTF-8, hexadecimal.
    """

    vocabulary: str
    data: torch.Tensor
    digest: str


def is_small(path: str | list[str]) -> bool:
    """Whether the text is a plain local file of up to `LARGE` bytes, or Python's own."""
    if path == PYDOC:
        return True
    if isinstance(path, list) or infer_compression(path) or not os.path.isfile(path):
        return False
    return os.path.getsize(path) <= LARGE


def open_text(
    path: str | list[str], sha256: str | None, truncate: float, cache_dir: str
) -> EncodedText:
    """Encodes the first share `truncate` of the text at `path`: in memory if it is small, otherwise in
    `cache_dir`, once until one of its files changes.

    Raises `UserError` for a text that cannot be read, is empty or not UTF-8, or whose SHA-256 is not
    `sha256`, and for a cache that cannot be used.
    """
    if is_small(path):
        ids = io.BytesIO()
        pieces = [pydoc_text()] if path == PYDOC else read_text(find_files(path), sha256)
        record = encode(pieces, truncate, ids)
        data = torch.from_numpy(np.frombuffer(ids.getbuffer(), record["type"]))
        return EncodedText(record["vocabulary"], data, record["digest"])

    files = find_files(path)
    identity = json.dumps([FORMAT, truncate, sha256, *map(version_of, files)])
    stem = os.path.join(cache_dir, hashlib.sha256(identity.encode()).hexdigest()[:32])
    try:
        if encoded := load(stem):
            return encoded
        os.makedirs(cache_dir, exist_ok=True)
        shown = ", ".join(map(name_of, files[:5])) + ", ..." * (len(files) > 5)
        log.info("encoding    %s into %s.ids", shown, stem)
        with open(os.path.join(cache_dir, ".lock"), "a") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)  # released on close; another process may encode
            if load(stem) is None:
                with atomic_write(f"{stem}.ids", "w+b") as ids:
                    record = encode(read_text(files, sha256), truncate, ids)
                with atomic_write(f"{stem}.json") as file:
                    json.dump(record, file)
        encoded = load(stem)
        assert encoded
        return encoded
    except OSError as error:
        raise UserError(f"data.cache_dir={cache_dir}: cannot be used: {one_line(error)}") from error


def load(stem: str) -> EncodedText | None:
    """Memory-maps a cached text: ids in `stem`.ids, everything else in `stem`.json, written last.
    None if it is missing or damaged.
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


def encode(pieces: Iterable[str], truncate: float, file: BinaryIO) -> dict[str, Any]:
    """Streaming encoder: writes the ids of the first share `truncate` of a text into the empty
    `file`, in the smallest unsigned type that holds them.

    Returns plain values: `vocabulary`, `type` of the ids, number of `characters`, and `digest` of
    the text. Raises `UserError` if no character is left.
    """
    ids = AppearanceIds()
    length = 0  # in characters
    for text in pieces:
        dtype = ids.dtype
        encoded = ids.encode(text)
        if ids.dtype != dtype:
            rewrite(file, length, dtype, np.arange(np.iinfo(dtype).max + 1, dtype=ids.dtype))
            file.seek(0, os.SEEK_END)
        file.write(encoded.data)
        length += len(encoded)

    length = int(length * truncate)
    if not length:
        raise UserError(f"the text is empty (data.truncate={truncate})")
    points = np.array(ids.points, np.min_scalar_type(max(ids.points)))
    codec = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}[points.itemsize]
    digest, num_used = hashlib.sha256(), 0
    for _, chunk in chunks(file, length, ids.dtype):
        digest.update(look_up(points, chunk).tobytes().decode(codec).encode())
        num_used = max(num_used, int(chunk.max()) + 1)
    points = points[:num_used]  # the others appear only in what is cut off

    order = np.argsort(points)
    final = np.empty(num_used, np.min_scalar_type(num_used - 1))
    final[order] = np.arange(num_used)
    rewrite(file, length, ids.dtype, final)
    file.truncate(length * final.itemsize)
    return {
        "vocabulary": "".join(map(chr, points[order])),
        "type": final.dtype.name,
        "characters": length,
        "digest": digest.hexdigest(),
    }


class AppearanceIds:
    """Ids in the order of first appearance. `points`: code points by id; `dtype`: the smallest type
    that holds the ids so far.
    """

    def __init__(self):
        self.points: list[int] = []
        self.dtype = np.dtype(np.uint8)
        self.id_of = np.full(0x110000, UNSEEN, np.uint32)  # of every code point
        self.seen = b""  # ASCII characters that have an id

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, 1-D of type `dtype`; new characters get the next ids."""
        if text.isascii():
            points = np.frombuffer(text.encode(), np.uint8)
            unseen = np.frombuffer(text.encode().translate(None, self.seen), np.uint8)
        else:
            points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
            unseen = points[self.id_of.take(points) == UNSEEN]
        if len(unseen):
            first = np.sort(np.unique(unseen, return_index=True)[1])
            new = unseen[first].tolist()
            self.id_of[new] = np.arange(len(self.points), len(self.points) + len(new))
            self.points += new
            self.dtype = np.min_scalar_type(len(self.points) - 1)
            self.seen += bytes(point for point in new if point < 128)
        if points.dtype == self.dtype == np.uint8:
            return look_up(self.id_of[:256].astype(np.uint8), points)
        return self.id_of.take(points).astype(self.dtype)


def look_up(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """`table[ids]`, with a fast path where both are uint8."""
    if table.dtype == ids.dtype == np.uint8:
        return np.frombuffer(ids.tobytes().translate(table.tobytes().ljust(256)), np.uint8)
    return table.take(ids)


def chunks(
    file: BinaryIO, length: int, dtype: np.dtype, backwards: bool = False
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (position, ids) for pieces of the first `length` ids in `file`, of type `dtype`."""
    starts = range(0, length, CHUNK)
    for start in reversed(starts) if backwards else starts:
        file.seek(start * dtype.itemsize)
        content = file.read(min(CHUNK, length - start) * dtype.itemsize)
        yield start, np.frombuffer(content, dtype)


def rewrite(file: BinaryIO, length: int, dtype: np.dtype, table: np.ndarray) -> None:
    """Replaces, in place, the first `length` ids in `file`, of type `dtype`, by `table[ids]`.

    Runs backwards if the ids become wider, so that none is overwritten before it is read.
    """
    for start, ids in chunks(file, length, dtype, backwards=table.itemsize > dtype.itemsize):
        file.seek(start * table.itemsize)
        file.write(look_up(table, ids).data)
