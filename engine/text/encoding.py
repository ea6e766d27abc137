"""Encoding: a text as ids, in memory or, if it is large, in a cache file that all processes of a host memory-map.

The code points of all documents are written once. Then they are read in their final order, with separators between
documents, for the digest and the vocabulary, and once more to be replaced by their positions in the vocabulary.
"""

import array
import dataclasses
import hashlib
import io
import json
import logging
import operator
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from fsspec.utils import infer_compression

from engine.config.schema import ITEM_SEPARATORS, SHAKESPEARE_URL, DataConfig
from engine.errors import UserError
from engine.files import atomic_write, file_lock, masked, writes
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
)

log = logging.getLogger("gpt")

LARGE = 64 * 2**20  # bytes
CHECKED = 256 * 2**20  # bytes of ids that are read to check a cache file
FORMAT = 7  # version of the cache files
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
    `ends[i]`, and its last `tails[i]` characters are newlines. The first `whole` documents are not truncated.
    """

    start: int
    ends: np.ndarray
    tails: np.ndarray
    whole: int
    has_lines: bool  # whether there are newlines inside a document


class Notes(logging.Handler):
    """A context that collects what is logged in it, shown or not, except progress: (level, message) each."""

    def __enter__(self) -> list[tuple[int, str]]:
        self.lines: list[tuple[int, str]] = []
        self.level_before = log.level
        log.setLevel(logging.INFO)
        log.addHandler(self)
        return self.lines

    def __exit__(self, *_) -> None:
        log.removeHandler(self)
        log.setLevel(self.level_before)

    def emit(self, record: logging.LogRecord) -> None:
        message = masked(record.getMessage())
        if not message.startswith("reading"):
            self.lines.append((record.levelno, message))


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


def open_text(config: DataConfig, says: bool = False) -> EncodedText:
    """Encodes the text that a `DataConfig` names: in memory if it is small, otherwise in `cache_dir`, until one of its
    files or a setting changes. What was chosen for it is logged when it is encoded and, if `says`, when it is cached.

    Raises `UserError` for a text that cannot be read or is empty, whose encoding or SHA-256 is not as said, and for a
    cache that cannot be used.
    """
    if is_small_local_file(config):
        ids = io.BytesIO()
        record = write_ids(config, ids, io.BytesIO())
        kind = record.pop("type")
        return EncodedText(data=torch.from_numpy(np.frombuffer(ids.getbuffer(), kind)), **record)

    paths = [path for path in (config.path, config.val_path, config.test_path) if path is not None and path != PYDOC]
    names = [name for path in paths for name in listed(path)]
    files = [found.file for found in find_files(names, config.cache_dir)]
    archives = [found.file for found in find_files([name.partition("::")[2] for name in names if "::" in name])]
    settings = {name: getattr(config, name) for name in SETTINGS}
    identity = json.dumps(masked([FORMAT, settings, *map(version_of, files + archives)]))  # signatures change daily
    stem = os.path.join(config.cache_dir, hashlib.sha256(identity.encode()).hexdigest()[:32])
    if encoded := load_cached(stem, says):
        return encoded
    with writes("data.cache_dir", config.cache_dir):
        os.makedirs(config.cache_dir, exist_ok=True)
        shown = ", ".join(map(name_of, files[:5])) + ", ..." * (len(files) > 5)
        log.info("encoding    %s into %s.ids", shown, stem)
        with file_lock(os.path.join(config.cache_dir, ".cache.lock")):
            if load_cached(stem, says) is None:
                with (
                    Notes() as notes,
                    atomic_write(f"{stem}.ids", "w+b") as ids,
                    tempfile.TemporaryFile(dir=config.cache_dir) as points,
                ):
                    record = write_ids(config, ids, points) | {"notes": notes}
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
        config = dataclasses.replace(config, path=copy_stdin(folder, recorded_path, config.max_bytes))
    for name in ("path", "val_path", "test_path"):
        path = getattr(config, name)
        if path is not None:
            copies = [copy_pipe(each, config.cache_dir, config.max_bytes) for each in listed(path)]
            copied: Any = {name: copies if isinstance(path, list) else copies[0]}
            config = dataclasses.replace(config, **copied)
    if not is_small_local_file(config):
        open_text(config, says=True)
    return config


def load_cached(stem: str, says: bool = False) -> EncodedText | None:
    """Memory-maps a cached text: ids in `stem`.ids, the rest in `stem`.json, written last. None if it is missing or
    damaged. `says`: logs what was logged when it was encoded.
    """
    try:
        with open(f"{stem}.json", encoding="utf-8") as file:
            record = dict(json.load(file))
        if record.pop("checksum") != checksum(record, f"{stem}.ids"):
            return None
        ids = np.memmap(f"{stem}.ids", record.pop("type"), mode="r")
        for level, note in record.pop("notes"):
            if says:
                log.log(level, "%s", note)
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


def write_ids(config: DataConfig, ids: BinaryIO, points: BinaryIO) -> dict[str, Any]:
    """Writes the ids of a text into the empty file `ids`, in the smallest unsigned type that holds them; `points` is an
    empty file for its code points meanwhile. The text is truncated to the share `config.truncate`, then its items or
    documents are shuffled, and separated.

    Returns plain values: the fields of `EncodedText` but the data, and the `type` of the ids. Raises `UserError` if no
    character is left.
    """
    parts, shuffled = read_parts(config, points)
    has_items = config.shuffle in ITEM_ENDS
    separator = choose_separator(config, parts)
    between = from_text(separator_text(separator), config.encoding)

    lengths, digest, is_used, left, repeated = [0, 0, 0], hashlib.sha256(), np.zeros(0x110000, bool), "", 0

    def final() -> Iterator[np.ndarray]:
        """The code points in their final order; counts those of each part."""
        for i, part in enumerate(parts):
            lengths[i] = 0
            is_first = i == 0
            for found in ordered(part, points, "" if is_first and has_items else between, shuffled * is_first):
                lengths[i] += len(found)
                yield found

    for found in final():
        text = found.tobytes().decode("utf-32-le")
        digest.update(text.encode())
        is_used[found] = True
        if between:
            repeated += (left + text).count(between)
            left = (left + text)[1 - len(between) :] if len(between) > 1 else ""
    for name, length in zip(("path", "val_path", "test_path"), lengths, strict=True):
        if not length and getattr(config, name) is not None:
            share = f", with data.truncate={config.truncate}" if config.truncate < 1 and name == "path" else ""
            raise UserError(f"data.{name}={getattr(config, name)}: the text is empty{share}")
    if sum(lengths) > lengths[0]:
        digest.update(repr(lengths).encode())
    vocabulary = np.flatnonzero(is_used).astype(np.uint32)
    id_of = (np.cumsum(is_used) - 1).astype(np.min_scalar_type(len(vocabulary) - 1))  # of every code point
    for found in final():
        ids.write(id_of[found].data)
    is_cut = config.val_path is None and config.shuffle is None and not shuffled
    if is_cut and has_sorted_lines(parts[0], points, between):
        log.warning("the lines are sorted: only their end is held out; data.shuffle=lines mixes them")
    number = sum(len(part.ends) for part in parts)
    if between and number > 1 and not has_items:
        mixed = "shuffled, and " * bool(shuffled)
        inside = ", which they contain: data.separator='<|end|>\\n' keeps them apart" * (repeated > number)
        log.info("documents   %s, %sseparated by %s%s", f"{number:,}", mixed, separator, inside)
    return {
        "vocabulary": vocabulary.tobytes().decode("utf-32-le"),
        "type": id_of.dtype.name,
        "digest": digest.hexdigest(),
        "separator": separator,
        "parts": lengths,
    }


def read_parts(config: DataConfig, points: BinaryIO) -> tuple[list[Part], int]:
    """Writes the code points of `path`, `val_path` and `test_path` into `points`. Returns where they lie, and how many
    of the first documents of `path` are shuffled.
    """
    parts, shuffles, has_records = [], config.shuffle == "documents", False
    held_out = dataclasses.replace(config, sha256=None)
    names: dict[bytes, str] = {}  # of files, by digest
    for name, path in (("path", config.path), ("val_path", config.val_path), ("test_path", config.test_path)):
        is_first = name == "path"
        documents = Documents(path, config if is_first else held_out, names) if path is not None else None
        pieces: Iterable[str] = documents or ()
        if is_first and config.shuffle in ("lines", "paragraphs"):
            pieces = joined(pieces, len(ITEM_ENDS[config.shuffle]))
        parts.append(write_points(pieces, config.truncate if is_first else 1.0, points))
        shuffles |= is_first and config.shuffle is None and bool(documents and documents.has_tables)
        has_records |= bool(documents and documents.has_records)
    if config.field is not None and not has_records:
        raise UserError(
            f"data.field={config.field}: {config.path} has no records; data.format= says what a file is if its name "
            "does not"
        )
    if config.shuffle == "documents" and len(parts[0].ends) < 2:
        log.warning("data.shuffle=documents: the text is a single document; data.shuffle=lines or paragraphs")
    if config.shuffle in ITEM_ENDS and len(parts[0].ends):
        parts[0] = cut_items(parts[0], points, config)
        return parts, parts[0].whole
    return parts, len(parts[0].ends) * shuffles


def joined(pieces: Iterable[str], newlines: int) -> Iterator[str]:
    """The pieces of documents as those of one, with at least so many newlines between two."""
    tail, missing = newlines, 0  # nothing is missing before the first
    for piece in pieces:
        if piece == DOCUMENT_END:
            missing = max(newlines - tail, 0)
            continue
        if missing:
            yield "\n" * missing
            missing = 0
        tail = count_tail(piece, tail)
        yield piece
    yield DOCUMENT_END


def count_tail(piece: str, tail: int) -> int:
    """The newlines at the end of a document so far: of its last `piece`, and of the `tail` before if it has no other
    characters.
    """
    newlines = len(piece) - len(piece.rstrip("\n"))
    return newlines if newlines < len(piece) else tail + newlines


def write_points(pieces: Iterable[str], truncate: float, file: BinaryIO) -> Part:
    """Appends the code points of documents to `file`, four bytes each. Returns where the share `truncate` lies."""
    start = end = file.seek(0, os.SEEK_END) // 4
    ends, tails, have_lines, tail, has_lines = array.array("q"), array.array("q"), array.array("b"), 0, False
    for piece in pieces:
        if piece == DOCUMENT_END:
            ends.append(end)
            tails.append(tail)
            have_lines.append(has_lines)
            tail, has_lines = 0, False
        else:
            end += file.write(piece.encode("utf-32-le")) // 4
            content = piece.rstrip("\n")
            has_lines |= "\n" in content or (tail > 0 and bool(content))
            tail = count_tail(piece, tail)
    used = np.minimum(np.array(ends, np.int64), start + int((end - start) * truncate))
    tails_used = np.where(used < ends, 0, tails)
    is_left = np.diff(used, prepend=start) > 0
    whole, with_lines = np.sum((used == ends)[is_left]), np.sum(np.array(have_lines)[is_left])
    return Part(start, used[is_left], tails_used[is_left], int(whole), bool(with_lines))


def mapped(points: BinaryIO) -> np.ndarray:
    """The code points in a file, uint32; memory-mapped, so that what was read counts as memory of the process until the
    array is gone.
    """
    if isinstance(points, io.BytesIO):
        return np.frombuffer(points.getbuffer(), np.uint32)
    points.flush()
    return np.memmap(points, np.uint32, mode="r")


def cut_items(part: Part, points: BinaryIO, config: DataConfig) -> Part:
    """The part with its items, as `config.shuffle` says, for documents: lines, or paragraphs with the empty lines after
    them, or files. Text after the last whole item is one more. Raises `UserError` for fewer than two.
    """
    end = part.ends[-1]
    if config.shuffle != "files":
        starts = range(part.start, end, CHUNK)
        newlines = [i + np.flatnonzero(mapped(points)[i : min(i + CHUNK, end)] == ord("\n")) for i in starts]
        last = np.concatenate(newlines)  # the last character of each item
        if config.shuffle == "paragraphs":  # of two newlines or more
            last = last[(np.diff(last, prepend=part.start - 2) == 1) & (np.diff(last, append=end + 1) > 1)]
        rest = [end] if not len(last) or last[-1] + 1 < end else []
        part = part._replace(ends=np.append(last + 1, rest).astype(np.int64), whole=len(last))
    if part.whole < 2:
        shuffle, truncate = config.shuffle, config.truncate
        raise UserError(f"data.shuffle={shuffle}, data.truncate={truncate:g}: the text has fewer than two {shuffle}")
    return part


def choose_separator(config: DataConfig, parts: list[Part]) -> str:
    """`config.separator` or, if it is null, the separator of the documents: a newline if no document has one inside,
    else a blank line; none if each part is a single document.
    """
    if config.separator is not None:
        return config.separator
    if config.shuffle in ITEM_SEPARATORS:
        return ITEM_SEPARATORS[config.shuffle]
    if max(len(part.ends) for part in parts) <= 1:
        return "none"
    return "blank_line" if any(part.has_lines for part in parts) else "newline"


def ordered(part: Part, points: BinaryIO, separator: str, shuffled: int = 0) -> Iterator[np.ndarray]:
    """Yields the code points of a part in arrays: without a `separator`, as they are; with one, each document followed
    by it. If the separator is of newlines, those at the end of a document count towards it. The first `shuffled`
    documents are in random order, always the same.
    """
    starts, ends = np.concatenate(([part.start], part.ends[:-1])), part.ends
    if separator and not separator.strip("\n"):
        ends = ends - part.tails
    lengths, order = ends - starts, np.arange(len(ends))
    order[:shuffled] = np.random.default_rng(0).permutation(shuffled)
    order = order[lengths[order] > 0]
    starts, lengths = starts[order], lengths[order]
    following = np.array([*map(ord, separator)], np.uint32)
    sizes = lengths + len(following)
    ends = np.cumsum(sizes)  # in this order
    for first in range(0, sizes.sum(), CHUNK):
        last = min(first + CHUNK, ends[-1])
        begin, end = np.searchsorted(ends, (first, last - 1), "right")  # the first and the last document
        if begin == end and last <= ends[end] - len(following):
            start = starts[end] + first - (ends[end] - sizes[end])
            yield mapped(points)[start : start + last - first]
            continue
        here = slice(begin, end + 1)
        counts = np.diff(np.minimum(ends[here], last), prepend=first)
        within = np.arange(first, last) - np.repeat(ends[here] - sizes[here], counts)
        beyond = within - np.repeat(lengths[here], counts)  # in the separator, from 0
        found = mapped(points)[np.repeat(starts[here], counts) + within - np.maximum(beyond + 1, 0)]
        found[beyond >= 0] = following[beyond[beyond >= 0]]
        yield found


def has_sorted_lines(part: Part, points: BinaryIO, between: str) -> bool:
    """Whether the text begins with many lines in sorted order, as a list of names does, perhaps after a title."""
    text = next(ordered(part, points, between)).tobytes().decode("utf-32-le")
    lines = [*filter(None, text.split("\n")[:-1])][1:]
    orders = (each[::step] for each in (lines, [*map(str.casefold, lines)]) for step in (1, -1))
    is_sorted = any(all(map(operator.le, order, order[1:])) for order in orders)
    return is_sorted and len(lines) >= MANY_LINES and lines[0] != lines[-1]
