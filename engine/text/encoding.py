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
    """A text as ids."""

    vocabulary: str  # the distinct characters, sorted
    data: torch.Tensor  # their positions in it, 1-D, uint8, uint16 or uint32
    digest: str  # SHA-256 of the text in UTF-8, hexadecimal


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


def encode(pieces: Iterable[str], truncate: float, file: BinaryIO) -> dict[str, Any]:
    """Streaming encoder: writes the ids of the first share `truncate` of a text into the empty
    `file`, in the smallest unsigned type that holds them.

    Returns plain values: `vocabulary`, `type` of the ids, number of `characters`, and `digest` of
    the text. Raises `UserError` if no character is left.
    """
    dtype, length = np.dtype(np.uint8), 0  # of the ids in the file
    points = np.empty(0, np.uint32)  # code points by id, in the order of first appearance
    id_of = np.full(0x110000, UNSEEN, np.uint32)  # of every code point
    for text in pieces:
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        ids = id_of.take(codes)
        if len(unseen := codes[ids == UNSEEN]):
            first = np.sort(np.unique(unseen, return_index=True)[1])
            points = np.append(points, unseen[first])
            id_of[points] = np.arange(len(points))
            ids = id_of.take(codes)
            wider = np.min_scalar_type(len(points) - 1)
            if wider != dtype:
                rewrite(file, length, dtype, np.arange(np.iinfo(dtype).max + 1, dtype=wider))
                file.seek(0, os.SEEK_END)
                dtype = wider
        file.write(ids.astype(dtype).data)
        length += len(ids)

    length = int(length * truncate)
    if not length:
        raise UserError(f"data.path: the text is empty (data.truncate={truncate})")
    digest, num_used = hashlib.sha256(), 0
    for _, ids in chunks(file, length, dtype):
        digest.update(points.take(ids).tobytes().decode("utf-32-le").encode())
        num_used = max(num_used, int(ids.max()) + 1)
    points = points[:num_used]  # the others appear only in what is cut off

    vocabulary = np.sort(points)
    final = np.searchsorted(vocabulary, points).astype(np.min_scalar_type(num_used - 1))
    rewrite(file, length, dtype, final)
    file.truncate(length * final.itemsize)
    return {
        "vocabulary": vocabulary.tobytes().decode("utf-32-le"),
        "type": final.dtype.name,
        "characters": length,
        "digest": digest.hexdigest(),
    }


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
        file.write(table.take(ids).data)
