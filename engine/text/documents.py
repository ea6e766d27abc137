"""Documents of a text, as characters: files are decoded; of records (rows of tables, objects of JSON) one field."""

import codecs
import csv
import dataclasses
import hashlib
import importlib.util
import io
import itertools
import json
import logging
import re
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

from engine.config.arguments import this_command
from engine.config.schema import DataConfig
from engine.errors import UserError, one_line
from engine.text.sources import Source, check_sha256, find_files, hashed, open_sources

log = logging.getLogger("gpt")

PYDOC = "pydoc:topics"  # documentation that comes with Python; needs no download
DOCUMENT_END = ""  # follows the pieces of each document: joining ignores it
SNIFFED = 2**16  # bytes from which a file is known as text
TABLES = ("jsonl", "csv", "tsv", "parquet")  # their rows are shuffled, unless data.shuffle says otherwise
EXTENSIONS = {"ndjson": "jsonl"} | {name: name for name in ("json", *TABLES)}
# With the longest first: the mark of UTF-16 begins that of UTF-32.
MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF8: "utf-8-sig"}
MARKS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


UNMARKED = ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be")  # guessed without a mark
MAGIC = {  # how other kinds of files begin
    b"%PDF": "a PDF: extract its text",
    b"\x1f\x8b": "gzip: unpack it, or let its name end with .gz",
    b"PK": "a zip, whose name must end with .zip, or of an office program: save it as text",
    b"PAR1": "Parquet: data.format=parquet",
}


class Documents:
    """Iterates over the text at `path` in pieces of characters; `DOCUMENT_END` follows each document. What a user may
    not expect is logged once: files that are left out or the same, converted newlines, skipped records.

    Raises `UserError` for a file that cannot be read, is not in the encoding (naming the byte), or has no `data.field`.
    `has_records` and `has_tables`, at the end, are whether there were any.
    """

    def __init__(self, path: str | list[str], config: DataConfig, names: dict[bytes, str] | None = None):
        self.path, self.config = path, config
        self.has_records = self.has_tables = False
        self.left_out: list[str] = []
        self.as_text: list[str] = []  # files of JSON
        self.converted = 0  # files with CRLF or CR
        self.names = {} if names is None else names  # of files read so far, by digest
        self.repeated: list[str] = []  # files with the content of another

    def __iter__(self) -> Iterator[str]:
        if self.path == PYDOC:
            yield from (from_text(pydoc_text(), self.config.encoding), DOCUMENT_END)
            return
        whole = hashlib.sha256()
        for source in open_sources(find_files(self.path, self.config.cache_dir, says=True), self.config):
            own = hashlib.sha256()
            source = source._replace(pieces=hashed(source.pieces, own, whole))
            name = source.name.lower()
            if not source.is_member:
                name = re.sub(r"\.(gz|bz2|xz)$", "", name.partition("?")[0] if "://" in name else name)
            kind = self.config.format or EXTENSIONS.get(name.rpartition(".")[2], "text")
            if kind == "json" and not source.is_named and not self.config.field and not self.config.format:
                kind = "text"  # as the settings beside code
                self.as_text.append(source.name)
            self.has_records |= kind != "text"
            if kind == "text" and not source.is_named:
                text_source = self._only_text(source)
                if text_source is None:
                    continue
                source = text_source
            yield from self._of_text(source) if kind == "text" else self._of_records(source, kind)
            if own.digest() == hashlib.sha256().digest():  # empty files are no copies
                continue
            if own.digest() in self.names:
                self.repeated.append(f"{source.name} and {self.names[own.digest()]}")
            self.names.setdefault(own.digest(), source.name)
        check_sha256(whole.hexdigest(), self.config.sha256, self.path)
        if self.repeated:
            log.warning("files of the same content: %s", abridged(self.repeated))
        if self.left_out:
            what = f"not text in {self.config.encoding}" + f", or have no {self.config.field}" * bool(self.config.field)
            log.info("left out    %d files that are %s: %s", len(self.left_out), what, abridged(self.left_out))
        if self.as_text:
            log.info("json        read as text; data.field= reads a field of records: %s", abridged(self.as_text))
        if self.converted and self.config.newlines == "lf" and self.config.encoding != "bytes":
            log.info("newlines    CRLF and CR are read as LF; data.newlines=keep keeps them")

    def _only_text(self, source: Source) -> Source | None:
        """The source, if it is text: its beginning can be decoded, and has no NUL."""
        head = b""
        for piece in source.pieces:
            head += piece
            if len(head) >= SNIFFED:
                break
        try:
            decoder = codecs.getincrementaldecoder(codec_of(head, self.config.encoding))()
            is_text = "\0" not in decoder.decode(head, final=len(head) < SNIFFED)
        except UnicodeError:
            is_text = False
        if is_text or self.config.encoding == "bytes":
            return source._replace(pieces=itertools.chain([head] if head else [], source.pieces))
        self.left_out.append(source.name)
        return None

    def _of_text(self, source: Source) -> Iterator[str]:
        """A file as one document."""
        pieces, form = self._characters(source, self.config.encoding), self.config.normalize
        yield from normalized(pieces, form) if form and self.config.encoding != "bytes" else pieces
        yield DOCUMENT_END

    def _characters(self, source: Source, encoding: str) -> Iterator[str]:
        """The characters of a file in pieces."""
        name, head, total, nul, num_bytes = source.name, next(source.pieces, b""), 0, 0, 0
        codec = codec_of(head, encoding)
        # As Python's `open`: also where CRLF is in two pieces.
        converts = encoding != "bytes" and self.config.newlines == "lf"
        decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(codec)(), translate=converts)
        for piece in itertools.chain([head] if head else [], source.pieces, [b""]):
            num_bytes += len(piece)
            try:
                text = decoder.decode(piece, final=not piece)
                text.encode("utf-8")  # a few codecs give half characters
            except UnicodeError as error:
                if not isinstance(error, UnicodeDecodeError):  # also UTF-16 without a mark
                    raise UserError(f"{name}: {one_line(error)}; {advice(head)}") from error
                content, start, tried = error.object, error.start, codec.removesuffix("-sig")
                hint = advice(head, content[max(0, start - SNIFFED // 2) : start + SNIFFED // 2], tried)
                raise UserError(
                    f"{name}: not {tried.upper()}: byte 0x{content[start]:02x} at offset "
                    f"{num_bytes - len(content) + start}; {hint}"
                ) from error
            total, nul = total + len(text), nul + text.count("\0")
            if text:
                yield text
        self.converted += "\r" in "".join(decoder.newlines or ())
        if encoding != "bytes" and total and nul >= total / 20:
            raise UserError(f"{name}: {nul / total:.0%} of its characters are NUL; {advice(head)}")

    def _of_records(self, source: Source, kind: str) -> Iterator[str]:
        """The field `data.field` of each record, each followed by `DOCUMENT_END`."""
        field, number, missing, record = self.config.field, 0, 0, None
        self.has_tables |= kind in TABLES
        for record in self._records(source, kind):
            if field is None and isinstance(record, dict):
                raise no_field(source, record, "give data.field= the one with the text, or data.format=text")
            is_name = isinstance(record, dict) and field in record  # which may have a dot
            value: Any = record if field is None else record[field] if is_name else at(record, field.split("."))
            if value is None or value == []:
                missing += 1
                continue
            values = value if isinstance(value, list) else [value]
            text = "\n".join(as_text(each, source.name) for each in values if each is not None)
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # JSON may have half a character
            if self.config.newlines == "lf":
                text = text.replace("\r\n", "\n").replace("\r", "\n")
            if self.config.normalize:
                text = unicodedata.normalize(self.config.normalize, text)  # type: ignore[arg-type]
            text = from_text(text, self.config.encoding)
            number += 1
            yield from (text, DOCUMENT_END) if text else ()
        if field is not None and record is not None and not number:
            if source.is_named:
                raise no_field(source, record, f"no record has data.field={field}")
            self.left_out.append(source.name)
            return
        skipped = f"; {missing:,} without {field} are skipped" if missing else ""
        log.info("records     %s: %s%s", source.name, f"{number:,}", skipped)

    def _records(self, source: Source, kind: str) -> Iterator[Any]:
        """The records of a file: dictionaries, or strings of JSON."""
        if kind == "parquet":
            yield from self._parquet(source)
            return
        encoding = "utf-8" if self.config.encoding == "bytes" else self.config.encoding  # JSON is text
        characters = self._characters(source, encoding)
        number = 0

        def counted() -> Iterator[str]:
            nonlocal number
            for line in lines_of(characters):
                number += 1
                yield line

        lines = counted()
        try:
            if kind == "json":
                whole = json.loads("".join(characters))
                yield from whole if isinstance(whole, list) else [whole]
            elif kind == "jsonl":
                yield from (json.loads(line) for line in lines if line.strip())
            else:
                yield from rows(lines, kind)
        except UserError:
            raise
        except (ValueError, csv.Error, RecursionError) as error:
            line = f", line {number}" * bool(number)
            hint = "; a record a line is data.format=jsonl" * (kind == "json" and "Extra data" in str(error))
            raise UserError(f"{source.name}{line}: not {kind.upper()}: {one_line(error)}{hint}") from error

    def _parquet(self, source: Source) -> Iterator[Any]:
        if importlib.util.find_spec("pyarrow") is None:
            raise UserError(f"{source.name}: pyarrow is missing: pip install pyarrow")
        from pyarrow import ArrowException, parquet  # an extra

        with tempfile.TemporaryFile() as stream:  # a file of Parquet ends with its index
            stream.writelines(source.pieces)
            try:
                file = parquet.ParquetFile(stream, pre_buffer=False, buffer_size=2**20)  # or it holds a row group
                names, field = file.schema_arrow.names, self.config.field
                columns = [name for name in names if field and (field == name or field.startswith(f"{name}."))]
                if not columns:
                    yield dict.fromkeys(names)
                for batch in file.iter_batches(batch_size=4096, columns=columns) if columns else ():
                    yield from batch.to_pylist()
            except ArrowException as error:
                raise UserError(f"{source.name}: not PARQUET: {one_line(error)}") from error


def rows(lines: Iterator[str], kind: str) -> Iterator[dict[str, str | None]]:
    """The rows of a table whose first line has the names of its columns. Raises `csv.Error` for a row with more cells
    and, in TSV, with fewer.
    """
    csv.field_size_limit(2**31 - 1)
    first = next(lines, "")
    lines = itertools.chain([first], lines)
    cells: Iterator[list[str]] = map(tsv_cells, lines)
    if kind == "csv":
        # Where a comma is the decimal point, spreadsheets write semicolons. Without any, a line is one cell.
        delimiter = next((each for each in ",;\t" if each in first), "\x1f")
        cells = csv.reader(lines, delimiter=delimiter, strict=True)
    names: list[str] = []
    for row in cells:
        if row in ([], [""]):
            continue
        if not names:
            names = row
            continue
        if len(row) > len(names) or (len(row) < len(names) and kind == "tsv"):
            quotes = "; a text with commas has to be in quotes" * (kind == "csv")
            raise csv.Error(f"{len(row)} cells, but {len(names)} columns{quotes}")
        yield dict(itertools.zip_longest(names, row))


def tsv_cells(line: str) -> list[str]:
    """The cells of a line of TSV, which has no quotes; but some programs quote a whole cell."""
    cells = line.rstrip("\r\n").split("\t")
    return [cell[1:-1].replace('""', '"') if re.fullmatch('"([^"]|"")*"', cell) else cell for cell in cells]


def no_field(source: Source, record: Any, what: str) -> UserError:
    """The error of records without a text."""
    names = f"the fields {', '.join(filter(None, record))}" if isinstance(record, dict) else "records without fields"
    return UserError(f"{source.name} has {names}: {what}")


def abridged(names: list[str]) -> str:
    """The first of several names."""
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def as_text(value: Any, name: str) -> str:
    """A value of a record as text: a number or a nested record as JSON. Raises `UserError` for bytes."""
    if isinstance(value, bytes):
        raise UserError(f"{name}: the field has bytes, not text")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def at(value: Any, names: list[str]) -> Any:
    """The value at the path `names` in nested records; of a list, one list of those of its items that have it."""
    for i, name in enumerate(names):
        if isinstance(value, list):
            found = [at(item, names[i:]) for item in value]
            return [each for item in found if item is not None for each in (item if isinstance(item, list) else [item])]
        value = value.get(name) if isinstance(value, dict) else None
    return value


def lines_of(pieces: Iterable[str]) -> Iterator[str]:
    """The lines of a text in pieces, with their ends."""
    left: list[str] = []  # pieces of a line
    for piece in pieces:
        first, *others = piece.split("\n")
        left.append(first)
        for start in others:
            yield "".join(left) + "\n"
            left = [start]
    if any(left):
        yield "".join(left)


def codec_of(head: bytes, encoding: str) -> str:
    """The codec of a text that begins with `head`: by its mark, if the `encoding` is UTF-8, the default."""
    if encoding == "bytes":
        return "latin-1"
    if encoding != "utf-8":
        return encoding
    return next((codec for mark, codec in MARKS.items() if head.startswith(mark)), "utf-8")


def advice(head: bytes, content: bytes = b"", tried: str = "") -> str:
    """What a file that is not in the encoding `tried` may be, by its `head` and the `content` that it cannot decode."""
    for magic, what in MAGIC.items():
        if head.startswith(magic):
            return f"it is {what}"
    likely: str | None = "cp1252"
    content, head = content or head, head[: SNIFFED // 4 * 4]
    if len(re.findall(rb"[\x00-\x08\x0e-\x1f]", head)) >= 0.02 * len(head):  # in no text of single bytes
        is_utf8 = head.count(0) < 0.2 * len(head) and likelihood(head, "utf-8") > 0
        best_codec = max(UNMARKED, key=lambda codec: likelihood(head, codec))
        likely = best_codec if likelihood(head, best_codec) and not is_utf8 else None
    elif importlib.util.find_spec("charset_normalizer"):
        from charset_normalizer import from_bytes

        matches = from_bytes(content[:SNIFFED])
        best = matches.best()
        if best and not any("cp1252" in match.could_be_from_charset for match in matches):  # the commonest by far
            likely = codecs.lookup(best.encoding).name
    if likely in (None, tried):
        return "it is no text, damaged, or in a rare encoding; data.encoding=bytes reads any file"
    return f"it is probably {likely}: {this_command(f'data.encoding={likely}')}; data.encoding=bytes reads any file"


def likelihood(content: bytes, codec: str) -> float:
    """The share of characters that can be printed, plus that of ASCII, which has the spaces of most texts; 0 if the
    first is below 0.9, or the `content` cannot be decoded.
    """
    try:
        text = content[: len(content) // 4 * 4].decode(codec)
    except UnicodeError:
        return 0.0
    printed = sum(c.isprintable() or c.isspace() for c in text)
    return (printed + sum(map(str.isascii, text))) / len(text) if printed > 0.9 * len(text) else 0.0


def normalized(pieces: Iterable[str], form: Any) -> Iterator[str]:
    """The pieces in a normal form of Unicode. They are cut before characters of ASCII, which no form joins to others
    before them.
    """
    left = ""
    for piece in pieces:
        left += piece
        end = max((match.start() for match in re.finditer(r"[\x00-\x7f]", piece[-1000:])), default=-1)
        if end >= 0:
            end += len(left) - len(piece[-1000:])
            yield unicodedata.normalize(form, left[:end])
            left = left[end:]
    yield unicodedata.normalize(form, left)


def pydoc_text() -> str:
    """The text of `pydoc:topics`."""
    from pydoc_data import topics  # takes a quarter of a second

    return "\n\n".join(text for _, text in sorted(topics.topics.items()))


def read_text(path: str | list[str], config: DataConfig, has_records: bool = False) -> str:
    """The whole text at `path`, read as `config` says; several documents are separated. Raises `UserError`, also for a
    plain text if it should be one that `has_records`.
    """
    pieces = Documents(path, dataclasses.replace(config, path=path, sha256=None, url=None))
    texts = ["".join(group) for is_end, group in itertools.groupby(pieces, DOCUMENT_END.__eq__) if not is_end]
    if has_records and not pieces.has_records:
        raise UserError(f"data.field={config.field}: {path} has no records")
    separator = separator_text(config.separator) or "\n" * pieces.has_records
    if len(texts) == 1 or not separator:
        return "".join(texts)
    return "".join((text if separator.strip("\n") else text.rstrip("\n")) + separator for text in texts)


# --- characters of a model ---

SEPARATORS_BY_NAME = {"none": "", "newline": "\n", "blank_line": "\n\n"}


def separator_text(setting: str | None) -> str:
    """The string that `data.separator` stands for; empty for none, and for older runs, which had none."""
    if setting is None:
        return ""
    return SEPARATORS_BY_NAME[setting] if setting in SEPARATORS_BY_NAME else unescaped(setting)


def separator_of(data: dict[str, Any], vocabulary: str) -> str:
    """The separator of documents in the settings `data` of a text; empty for none, or one that does not occur."""
    separator = separator_text(data.get("separator"))
    return separator if set(from_text(separator, data.get("encoding", "utf-8"))) <= set(vocabulary) else ""


def unescaped(text: str, vocabulary: str = "") -> str:
    """`text` as typed on a command line, with \\n, \\t and \\\\ read as newline, tab and backslash; unchanged if the
    `vocabulary` has a backslash.
    """
    if "\\" in vocabulary:
        return text
    escapes = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}
    return re.sub(r"\\[nt\\]", lambda match: escapes[match[0]], text)


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
