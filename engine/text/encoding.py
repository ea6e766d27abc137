"""Encoding: a text as ids, in memory or, if it is large, in a cache file that all processes of a host memory-map.

The code points of all documents are written once. Then they are read in their final order, with separators between
documents, for the digest and the vocabulary, and once more to be replaced by their positions in the vocabulary.
"""

import array
import dataclasses
import hashlib
import io
import itertools
import json
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from fsspec.utils import infer_compression

from engine.config.schema import ITEM_SEPARATORS, SHAKESPEARE_URL, DataConfig
from engine.errors import UserError
from engine.files import atomic_write, file_lock, masked
from engine.text.documents import DOCUMENT_END, PYDOC, Documents, from_text, separator_text
from engine.text.sources import (
    ARCHIVE,
    STDIN,
    Unreadable,
    copy_pipe,
    copy_stdin,
    download,
    find_files,
    listed,
    name_of,
    version_of,
    writes,
)

log = logging.getLogger("gpt")

LARGE = 64 * 2**20  # bytes
CHECKED = 256 * 2**20  # bytes of ids that are read to check a cache file
FORMAT = 6  # version of the cache files
CHUNK = 2**18  # characters at once
MANY_LINES = 50  # from which sorted lines are no accident
ITEM_ENDS = {name: separator_text(separator) for name, separator in ITEM_SEPARATORS.items()}
# The settings on which the ids depend, beside the files.
SETTINGS = (
    "path", "val_path", "test_path", "truncate", "sha256", "encoding", "format", "field", "separator", "shuffle",
    "newlines", "normalize",
)  # fmt: skip


class EncodedText(NamedTuple):
    """A text as ids."""

    vocabulary: str  # the distinct characters, sorted
    data: torch.Tensor  # their positions in it, 1-D, uint8, uint16 or uint32
    digest: str  # SHA-256 of the text in UTF-8, as shuffled; hexadecimal
    separator: str  # between documents, as `data.separator` names it
    parts: list[int]  # characters of `path`, `val_path` and `test_path`


class Part(NamedTuple):
    """Where the documents of one path lie in the file of code points: the first begins at `start`; document i ends at
    `ends[i]`, and its last `tails[i]` characters are newlines.
    """

    start: int
    ends: np.ndarray
    tails: np.ndarray


# --- opening a text ---


def is_small_local_file(config: DataConfig) -> bool:
    """Whether the text is a plain local file of up to `LARGE` bytes, or Python's own."""
    path = config.path
    if (config.val_path, config.test_path) != (None, None) or isinstance(path, list):
        return False
    if path == PYDOC:
        return True
    if infer_compression(path) or ARCHIVE.search(path) or not os.path.isfile(path):
        return False
    return os.path.getsize(path) <= LARGE


def open_text(config: DataConfig) -> EncodedText:
    """Encodes the text that a `DataConfig` names: in memory if it is small, otherwise in `cache_dir`, until one of its
    files or a setting changes.

    Raises `UserError` for a text that cannot be read or is empty, whose encoding or SHA-256 is not as said, and for a
    cache that cannot be used.
    """
    if is_small_local_file(config):
        ids = io.BytesIO()
        record = encode(config, ids, io.BytesIO())
        kind = record.pop("type")
        return EncodedText(data=torch.from_numpy(np.frombuffer(ids.getbuffer(), kind)), **record)

    paths = [path for path in (config.path, config.val_path, config.test_path) if path is not None and path != PYDOC]
    names = [name for path in paths for name in listed(path)]
    files = [found.file for found in find_files(names, config.cache_dir)]
    archives = [found.file for found in find_files([name.partition("::")[2] for name in names if "::" in name])]
    settings = {name: getattr(config, name) for name in SETTINGS}
    identity = json.dumps(masked([FORMAT, settings, *map(version_of, files + archives)]))  # signatures change daily
    stem = os.path.join(config.cache_dir, hashlib.sha256(identity.encode()).hexdigest()[:32])
    if encoded := load_cached(stem):
        return encoded
    with writes("data.cache_dir", config.cache_dir):
        os.makedirs(config.cache_dir, exist_ok=True)
        shown = ", ".join(map(name_of, files[:5])) + ", ..." * (len(files) > 5)
        log.info("encoding    %s into %s.ids", shown, stem)
        with file_lock(os.path.join(config.cache_dir, ".cache.lock")):
            if load_cached(stem) is None:
                with atomic_write(f"{stem}.ids", "w+b") as ids, tempfile.TemporaryFile(dir=config.cache_dir) as points:
                    record = encode(config, ids, points)
                record["checksum"] = checksum(record, f"{stem}.ids")
                with atomic_write(f"{stem}.json") as file:
                    json.dump(record, file)
        encoded = load_cached(stem)
        assert encoded
        return encoded


def prepare_text(config: DataConfig, folder: str = ".", recorded: dict[str, Any] | None = None) -> DataConfig:
    """Downloads the text of the `DataConfig` if its `path` does not exist, copies pipes, and standard input into
    `folder`, and encodes a large text into the cache; call it in one process per host.

    Returns the configuration of the text to use. A copy replaces a pipe. Without a network, `pydoc:topics` replaces the
    default text, and a run that started on it, by its `recorded` settings, keeps it. Raises `UserError` for any other
    missing text.
    """
    pydoc = dataclasses.replace(config, path=PYDOC, url=None, sha256=None)
    recorded_path = recorded.get("path") if recorded else None
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
    if config.path == STDIN:
        config = dataclasses.replace(config, path=copy_stdin(folder, recorded_path))
    for name in ("path", "val_path", "test_path"):
        path = getattr(config, name)
        if path is not None:
            copies = [copy_pipe(each, config.cache_dir) for each in listed(path)]
            copied: Any = {name: copies if isinstance(path, list) else copies[0]}
            config = dataclasses.replace(config, **copied)
    if not is_small_local_file(config):
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
        ids = np.memmap(f"{stem}.ids", record.pop("type"), mode="r")
        # Mapped read-only: Linux may refuse a writable private mapping larger than memory. torch warns
        # about read-only arrays; nothing writes to this one.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return EncodedText(data=torch.from_numpy(ids), **record)
    except (OSError, ValueError, KeyError, TypeError):
        return None


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


# --- encoding it ---


def encode(config: DataConfig, ids: BinaryIO, points: BinaryIO) -> dict[str, Any]:
    """Writes the ids of a text into the empty file `ids`, in the smallest unsigned type that holds them; `points` is an
    empty file for its code points meanwhile. The text is truncated to the share `config.truncate`, then its items or
    documents are shuffled, and separated.

    Returns plain values: the fields of `EncodedText` but the data, and the `type` of the ids. Raises `UserError` if no
    character is left.
    """
    parts, shuffles, has_records = [], config.shuffle == "documents", False
    held_out = dataclasses.replace(config, sha256=None)
    names: dict[bytes, str] = {}  # of files, by digest
    for name, path in (("path", config.path), ("val_path", config.val_path), ("test_path", config.test_path)):
        is_first = name == "path"
        documents = Documents(path, config if is_first else held_out, names) if path is not None else None
        parts.append(write_points(documents or (), config if is_first else None, points))
        shuffles |= is_first and config.shuffle is None and bool(documents and documents.has_tables)
        has_records |= bool(documents and documents.has_records)
        if path is not None and not len(parts[-1].ends):
            share = f", with data.truncate={config.truncate}" if config.truncate < 1 and is_first else ""
            raise UserError(f"data.{name}={path}: the text is empty{share}")
    if config.field is not None and not has_records:
        raise UserError(
            f"data.field={config.field}: {config.path} has no records; data.format= says what a file is if its name "
            "does not"
        )
    if config.shuffle == "documents" and len(parts[0].ends) < 2:
        log.warning("data.shuffle=documents: the text is a single document; data.shuffle=lines or paragraphs")
    separator = choose_separator(config, parts, points)
    between = from_text(separator_text(separator), config.encoding)

    lengths, digest, is_used, left, repeated = [0, 0, 0], hashlib.sha256(), np.zeros(0x110000, bool), "", 0

    def final() -> Iterator[np.ndarray]:
        """The code points in their final order; counts those of each part."""
        for i, part in enumerate(parts):
            lengths[i] = 0
            has_separators = i == 0 and config.shuffle in ITEM_ENDS
            for found in ordered(part, points, "" if has_separators else between, shuffles and i == 0):
                lengths[i] += len(found)
                yield found

    for found in final():
        text = found.tobytes().decode("utf-32-le")
        digest.update(text.encode())
        is_used[found] = True
        if between:
            repeated += (left + text).count(between)
            left = (left + text)[1 - len(between) :] if len(between) > 1 else ""
    if sum(lengths) > lengths[0]:
        digest.update(repr(lengths).encode())
    vocabulary = np.flatnonzero(is_used).astype(np.uint32)
    id_of = (np.cumsum(is_used) - 1).astype(np.min_scalar_type(len(vocabulary) - 1))  # of every code point
    for found in final():
        ids.write(id_of[found].data)
    is_cut = config.val_path is None and config.shuffle is None and not shuffles
    if is_cut and has_sorted_lines(parts[0], points, between):
        log.warning("the lines are sorted: only their end is held out; data.shuffle=lines mixes them")
    number = sum(len(part.ends) for part in parts)
    if between and number > 1 and config.shuffle not in ITEM_ENDS:
        mixed = "shuffled, and " * shuffles
        inside = ", which they contain: data.separator='<|end|>\\n' keeps them apart" * (repeated > number)
        log.info("documents   %s, %sseparated by %s%s", f"{number:,}", mixed, separator, inside)
    return {
        "vocabulary": vocabulary.tobytes().decode("utf-32-le"),
        "type": id_of.dtype.name,
        "digest": digest.hexdigest(),
        "separator": separator,
        "parts": lengths,
    }


def write_points(pieces: Iterable[str], config: DataConfig | None, file: BinaryIO) -> Part:
    """Appends the code points of documents to `file`, four bytes each. With a `config`, truncates them, and shuffles
    items.
    """
    truncate = config.truncate if config else 1.0
    if config and config.shuffle in ITEM_ENDS:
        whole, truncate = shuffled(pieces, config.shuffle, truncate), 1.0
        pieces = itertools.chain((whole[i : i + CHUNK] for i in range(0, len(whole), CHUNK)), [DOCUMENT_END])
    start = end = file.seek(0, os.SEEK_END) // 4
    ends, tails, tail = array.array("q"), array.array("q"), 0
    for piece in pieces:
        if piece == DOCUMENT_END:
            ends.append(end)
            tails.append(tail)
            tail = 0
        else:
            end += file.write(piece.encode("utf-32-le")) // 4
            newlines = len(piece) - len(piece.rstrip("\n"))
            tail = newlines if newlines < len(piece) else tail + newlines
    used = np.minimum(np.array(ends, np.int64), start + int((end - start) * truncate))
    tails_used = np.where(used < ends, 0, tails)
    is_empty = np.diff(used, prepend=start) == 0
    return Part(start, used[~is_empty], tails_used[~is_empty])


def choose_separator(config: DataConfig, parts: list[Part], points: BinaryIO) -> str:
    """`config.separator` or, if it is null, the separator of the documents: a newline if no document has one inside,
    else a blank line; none if each part is a single document.
    """
    if config.separator is not None:
        return config.separator
    if config.shuffle in ITEM_SEPARATORS:
        return ITEM_SEPARATORS[config.shuffle]
    if max(len(part.ends) for part in parts) <= 1:
        return "none"
    has_inside = any(
        (found == ord("\n")).any()
        for part in parts
        for found in ordered(part, points, "\n", is_shuffled=False, after="")
    )
    return "blank_line" if has_inside else "newline"


def ordered(
    part: Part, file: BinaryIO, separator: str, is_shuffled: bool, after: str | None = None
) -> Iterator[np.ndarray]:
    """Yields the code points of a part in arrays: without a `separator`, as they are; with one, each document followed
    by it, or by `after`. If the separator is of newlines, those at the end of a document count towards it.
    """
    starts, ends = np.concatenate(([part.start], part.ends[:-1])), part.ends
    if separator and not separator.strip("\n"):
        ends = ends - part.tails
    order = np.random.default_rng(0).permutation(len(ends)) if is_shuffled else range(len(ends))
    following = np.array([*map(ord, separator if after is None else after)], np.uint32)
    found, size = [], 0
    for i in order:
        for first in range(starts[i], ends[i], CHUNK):
            found.append(read_points(file, first, min(first + CHUNK, ends[i])))
            size += len(found[-1])
            if size >= CHUNK:
                yield np.concatenate(found)
                found, size = [], 0
        if ends[i] > starts[i]:
            found.append(following)
    yield np.concatenate([*found, following[:0]])


def has_sorted_lines(part: Part, points: BinaryIO, between: str) -> bool:
    """Whether the text begins with many lines in sorted order, as a list of names does."""
    text = next(ordered(part, points, between, is_shuffled=False)).tobytes().decode("utf-32-le")
    lines = [line.casefold() for line in text.split("\n")[:-1]]
    return len(lines) >= MANY_LINES and lines[0] < lines[-1] and lines == sorted(lines)


def read_points(file: BinaryIO, start: int, end: int) -> np.ndarray:
    """The code points from `start` to `end` (exclusive), uint32."""
    file.seek(4 * start)
    return np.frombuffer(file.read(4 * (end - start)), np.uint32)


def shuffled(pieces: Iterable[str], shuffle: str, truncate: float) -> str:
    """Shuffles the items of the first part of a text, the share `truncate`, always into the same order: lines, files,
    or paragraphs with the empty lines after them. The end of a file ends an item; text after the last item stays at the
    end. Raises `UserError` for fewer than two items.
    """
    separator = ITEM_ENDS[shuffle]
    files = ["".join(group) for is_end, group in itertools.groupby(pieces, DOCUMENT_END.__eq__) if not is_end]
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
