"""Texts as people have them: tables, archives, folders, encodings, held-out files, standard input."""

import csv
import gzip
import hashlib
import io
import json
import os
import tarfile
import unicodedata
import zipfile

import pytest
from conftest import UNREAD, metrics, start, succeed

from char_dataset import CharDataset, DataConfig
from engine.errors import UserError
from engine.snapshots.storage import load
from engine.text import encoding, sources
from engine.text.documents import read_text

NAMES = [f"name {i}" for i in range(40)]


@pytest.fixture(params=[2**26, 0], ids=["in memory", "cached"])
def dataset(request, tmp_path, monkeypatch):
    """Opens a text: in memory, or in the cache, with small pieces."""
    monkeypatch.setattr(encoding, "LARGE", request.param)
    monkeypatch.setattr(encoding, "CHUNK", 7)
    monkeypatch.setattr(sources, "PIECE", 5)

    def open_text(path, **settings) -> CharDataset:
        return CharDataset(DataConfig(path=path, cache_dir=str(tmp_path / "cache"), **{"block_size": 4, **settings}))

    return open_text


def text_of(data: CharDataset) -> str:
    return data.decode(data.data.tolist())


def table(kind: str, rows: list[dict]) -> bytes:
    if kind == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    if kind == "json":
        return json.dumps(rows).encode()
    if kind == "parquet":
        arrow, file = pytest.importorskip("pyarrow"), io.BytesIO()
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), file)
        return file.getvalue()
    file = io.StringIO()
    writer = csv.DictWriter(file, [*rows[0]], delimiter="\t" if kind == "tsv" else ",")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


# --- tables and records ---


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "parquet"])
def test_the_field_of_each_record_is_a_document_and_rows_of_tables_are_shuffled(kind, dataset, tmp_path, caplog):
    rows = [{"id": i, "name": name} for i, name in enumerate(NAMES)]
    path = tmp_path / f"names.{kind}"
    path.write_bytes(table(kind, rows))
    with pytest.raises(UserError, match=r"has the fields id, name: give data.field= the one with the text"):
        dataset(str(path))
    with pytest.raises(UserError, match=r"has the fields id, name: no record has data.field=title"):
        dataset(str(path), field="title")
    data = dataset(str(path), field="name")
    found = text_of(data).splitlines()
    assert sorted(found) == sorted(NAMES) and (found == NAMES) == (kind == "json")
    assert data.config.separator == "newline"
    assert text_of(dataset(str(path), field="name", shuffle="none")).splitlines() == NAMES
    (tmp_path / "other").write_bytes(path.read_bytes())
    with pytest.raises(UserError, match=r"other has no records; data.format= says|it is Parquet: data.format=parquet"):
        dataset(str(tmp_path / "other"), field="name", encoding="latin-1" if kind == "parquet" else "utf-8")
    assert text_of(dataset(str(tmp_path / "other"), field="name", format=kind)) == text_of(data)


def test_missing_fields_are_counted_lists_are_joined_and_escapes_decoded(dataset, tmp_path, caplog):
    caplog.set_level("INFO", "gpt")
    chats = [
        {"messages": [{"content": "h\u00e9llo\r\n"}, {"role": "x"}, {"content": "bye \ud83d\ude42"}]},
        {"messages": None},
        {"other": 1},
        {"messages": [{"content": "half \ud83d"}]},
    ]
    path = tmp_path / "chats.json.gz"
    path.write_bytes(gzip.compress(json.dumps(chats).encode()))
    data = dataset(str(path), field="messages.content")
    assert text_of(data) == "h\u00e9llo\n\nbye \U0001f642\n\nhalf \ufffd\n\n" and data.config.separator == "blank_line"
    assert "chats.json.gz: 2; 2 without messages.content are skipped" in caplog.text


LISTS = '[{"t": "a"}, {"t": "b"}]\n"no field"\n{"t": "c"}\n{"x": [{"y": [{"z": "d"}]}, {"y": {"z": "e"}}]}'
VALUES = '{"t": ["a", null, "b"]}\n{"t": true}\n{"t": {"x": "é"}}\n{"t": 1.5}\n{"t": [], "a.b": 10}\n'


@pytest.mark.parametrize(
    "kind, content, settings, found",
    [
        ("csv", "id,t\r1,a b\r2,c\r", {}, "a b\nc"),  # as other programs write it
        ("csv", "id;t\n1;a b\n2;c\n", {}, "a b\nc"),
        ("csv", "id\tt\n1\ta b\n2\tc\n", {}, "a b\nc"),
        ("csv", "\ufeffid,t\r\n1,a b\r\n2,c", {}, "a b\nc"),
        ("csv", "t\nWell, he said\n", {}, "Well, he said"),  # a single column
        ("csv", "id,t\n1,Well, he said\n", {}, UserError("3 cells, but 2 columns; a text with commas has to be in")),
        ("csv", 't,n\n"open,1\nb,2\n', {}, UserError("t.csv, line 3: not CSV: unexpected end of data")),
        ("tsv", 'id\tt\n1\t"Now begins\n2\tand ends"\n', {}, '"Now begins\nand ends"'),
        ("tsv", 'id\tt\n3\t"one ""whole"" cell"\n', {}, 'one "whole" cell'),
        ("tsv", 'id\tt\n1\t"two\nlines"\n', {}, UserError("line 3: not TSV: 1 cells, but 2 columns")),
        ("jsonl", '{"t": "b"}\n{"t": \n', {}, UserError("t.jsonl, line 2: not JSONL: ")),
        ("jsonl", LISTS, {"field": "x.y.z", "block_size": 1}, "d\ne"),
        ("jsonl", VALUES, {"separator": "|"}, 'a\nb|true|{"x": "é"}|1.5|'),
        ("jsonl", VALUES, {"separator": "|", "encoding": "bytes"}, 'a\nb|true|{"x": "é"}|1.5|'),
        ("jsonl", VALUES, {"field": "a.b", "block_size": 1}, "10"),
        ("json", LISTS, {}, UserError("t.json: not JSON: .*; a record a line is data.format=jsonl")),
        ("json", '["a", "b"]', {}, UserError("t.json has records without fields: no record has data.field=t")),
    ],
)
def test_no_value_of_a_record_is_cut_or_joined_to_another(kind, content, settings, found, dataset, tmp_path):
    path = tmp_path / f"t.{kind}"
    path.write_bytes(content.encode())
    settings = {"field": "t", "shuffle": "none", **settings}
    if isinstance(found, UserError):
        with pytest.raises(UserError, match=str(found)):
            dataset(str(path), **settings)
    else:
        assert text_of(dataset(str(path), **settings)).rstrip("\n") == found


def test_a_folder_may_have_records_without_the_field(dataset, tmp_path, caplog):
    caplog.set_level("INFO", "gpt")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "info.json").write_text('{"name": "x"}')
    (folder / "code.py").write_text("code")
    assert text_of(dataset(str(folder))) == 'code\n{"name": "x"}\n'
    assert "json        read as text; data.field= reads a field of records" in caplog.text
    (folder / "rows.jsonl").write_text('{"t": "a"}\n')
    assert text_of(dataset(str(folder), field="t", shuffle="none")) == "code\na\n"
    assert "left out    1 files that are not text in utf-8, or have no t" in caplog.text


def test_a_field_is_looked_for_in_lists_and_only_some_parts_need_records(dataset, tmp_path):
    (tmp_path / "t.jsonl").write_text(LISTS)
    (tmp_path / "held.txt").write_text("plain text")
    data = dataset(str(tmp_path / "t.jsonl"), field="t", shuffle="none", val_path=str(tmp_path / "held.txt"))
    assert text_of(data) == "a\nb\n\nc\n\nplain text\n\n"


def test_a_text_to_score_is_read_as_the_runs_or_as_a_table(tmp_path):
    (tmp_path / "t.txt").write_text("a\nb\n")
    (tmp_path / "t.csv").write_text("id,t\n1,a\n2,b\n")
    for field, name in (("t", "t.txt"), ("t", "t.csv"), (None, "t.txt")):
        config = DataConfig(path="run.csv", field=field, separator="none")
        assert read_text(str(tmp_path / name), config) == "a\nb\n"
    assert read_text(str(tmp_path / "t.csv"), DataConfig(path="run.csv", format="text")) == "id,t\n1,a\n2,b\n"


# --- documents ---


def test_documents_stay_apart_and_a_single_one_is_as_it_is(dataset, tmp_path):
    files = {"a.txt": "dogs.", "b.txt": "The quick\n\n", "c.txt": "", "d.txt": "\nfox"}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    paths = [str(tmp_path / name) for name in files]
    for settings, expected in (
        ({"separator": "none"}, "dogs.The quick\n\n\nfox"),
        ({"separator": "blank_line"}, "dogs.\n\nThe quick\n\n\nfox\n\n"),
        ({"separator": r"<\\n|\t>\n"}, "dogs.<\\n|\t>\nThe quick\n\n<\\n|\t>\n\nfox<\\n|\t>\n"),
        ({}, "dogs.\n\nThe quick\n\n\nfox\n\n"),  # the last has a newline inside
    ):
        assert text_of(dataset(paths, **settings)) == expected
    assert text_of(dataset(paths[:2])) == "dogs.\nThe quick\n"
    single = dataset(paths[1])
    assert text_of(single) == "The quick\n\n" and single.config.separator == "none"


def test_documents_that_contain_the_separator_and_files_that_are_the_same_are_said(dataset, tmp_path, caplog):
    for name in "abc":
        (tmp_path / name).write_text("one|two" if name == "b" else "three")
    paths = [str(tmp_path / name) for name in "abc"]
    caplog.set_level("INFO", "gpt")
    dataset(paths, separator="#")
    assert f"files of the same content: {paths[2]} and {paths[0]}" in caplog.text
    assert "documents   3, separated by #\n" in caplog.text
    dataset(paths, separator="|")
    assert "documents   3, separated by |, which they contain: " in caplog.text


def test_a_shuffle_with_a_separator_of_its_own_takes_no_other(dataset, tmp_path, caplog):
    (tmp_path / "t.txt").write_text("a line\n" * 9)
    with pytest.raises(UserError, match=r"data.separator=\|: data.shuffle=lines has one of its own, newline; leave"):
        DataConfig(path="t.txt", shuffle="lines", separator="|")
    dataset(str(tmp_path / "t.txt"), shuffle="documents")
    assert "data.shuffle=documents: the text is a single document; data.shuffle=lines" in caplog.text


@pytest.mark.parametrize(
    "order, is_said",
    [
        (sorted, True),
        (lambda lines: ["title", "", *sorted(lines), ""], True),
        (lambda lines: sorted((line.title() if "7" in line else line for line in lines), reverse=True), True),
        (list, False),
    ],
)
def test_sorted_lines_are_said(order, is_said, dataset, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(encoding, "CHUNK", 2000)
    (tmp_path / "names.txt").write_text("\n".join(order([f"{chr(97 + i % 26)}{i} name" for i in range(101)])))
    dataset(str(tmp_path / "names.txt"))
    assert ("data.shuffle=lines mixes them" in caplog.text) == is_said
    caplog.clear()
    dataset(str(tmp_path / "names.txt"), val_path=str(tmp_path / "names.txt"))
    assert "data.shuffle=lines" not in caplog.text


def test_a_folder_and_archives_give_their_texts(dataset, tmp_path, caplog):
    caplog.set_level("INFO", "gpt")
    folder = tmp_path / "texts"
    contents = {"b.txt": b"second", "a/c.md": b"first", "d.png": b"\0PNG", "e.bin": b"\xff\xfe\xfd", "f.csv": b"t\nrow"}
    of_others = (".git/x", ".h", "__pycache__/y", "run/.lock", "run/main.log", "cache/z", "s.sweep/multirun.yaml")
    hidden = dict.fromkeys((*of_others, "s.sweep/0/x"), b"no")
    for name, content in (contents | hidden).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "pipe")
    with zipfile.ZipFile(tmp_path / "t.zip", "w") as archive, tarfile.open(tmp_path / "t.tgz", "w:gz") as tar:
        for name in contents:
            archive.write(folder / name, name)
        for name in ("b.txt", "a/c.md", "f.csv"):
            tar.add(folder / name, name)
    settings = {"field": "t", "shuffle": "none", "cache_dir": str(folder / "cache")}
    for path, texts in ((folder, "first second"), ("t.zip", "first second"), ("t.tgz", "second first")):
        config = DataConfig(path=str(tmp_path / path), block_size=4, **settings)
        assert text_of(CharDataset(config)) == f"{texts} row ".replace(" ", "\n")
    assert caplog.text.count("left out    2 files that are not text in utf-8, or have no t: ") == 2
    assert caplog.text.count("texts: 5 files are left out: hidden, of runs, or no files") == 1
    with pytest.raises(UserError, match=r"run: there is no file in this folder but hidden ones and those of runs"):
        CharDataset(DataConfig(path=str(folder / "run")))
    settings |= {"cache_dir": str(tmp_path), "max_bytes": 8}
    with pytest.raises(UserError, match=r"t.zip: more than 8 bytes; data.max_bytes= allows more"):
        CharDataset(DataConfig(path=str(tmp_path / "t.zip"), block_size=4, **settings))


# --- encodings ---


def test_newlines_are_read_as_python_reads_them(dataset, tmp_path, caplog):
    caplog.set_level("INFO", "gpt")
    path = tmp_path / "t.txt"
    path.write_bytes(b"abcd\r\nefg\rh\r\r\n")
    assert text_of(dataset(str(path))) == path.read_text() == "abcd\nefg\nh\n\n"
    assert "data.newlines=keep keeps them" in caplog.text
    assert text_of(dataset(str(path), newlines="keep")) == "abcd\r\nefg\rh\r\r\n"
    assert text_of(dataset(str(path), encoding="bytes")) == "abcd\r\nefg\rh\r\r\n"


def test_any_codec_and_marks_are_read(dataset, tmp_path):
    path, text = tmp_path / "t.txt", "naïve café\n" * 9
    for codec, settings in (("cp1252", {"encoding": "cp1252"}), ("utf-16", {}), ("utf-32", {}), ("utf-8-sig", {}),
                            ("utf-16-le", {"encoding": "UTF-16LE"})):  # fmt: skip
        path.write_bytes(text.encode(codec))
        assert text_of(dataset(str(path), **settings)) == text
    for codec in ("hex", "undefined"):
        with pytest.raises(UserError, match=rf"data.encoding={codec}: must be bytes, or a codec that Python knows"):
            DataConfig(path="-", encoding=codec)
    path.write_bytes(b"+2AA-")  # half a character
    with pytest.raises(UserError, match=r"t.txt: .*surrogates not allowed"):
        dataset(str(path), encoding="utf-7")


@pytest.mark.parametrize(
    "content, says",
    [
        ("naïve café\n".encode("cp1252") * 9, r"byte 0xef at offset 2; it is probably cp1252: data.encoding=cp1252"),
        ("Příliš žluťoučký kůň úpěl ďábelské ódy.\n".encode("cp1250"), r"it is probably (cp1250|cp1252): data.enc"),
        ("plain words\n".encode("utf-16-le") * 9, r"50% of its characters are NUL; it is probably utf-16-le"),
        ("plain words\n".encode("utf-32-be") * 9, r"75% of its characters are NUL; it is probably utf-32-be"),
        ("吾輩は猫である。\n".encode("utf-16-le") * 9, r"it is probably utf-16-le: data.encoding=utf-16-le"),
        (b"with \0 NUL " * 9, "it is no text, damaged, or in a rare encoding"),
        (b"%PDF-1.7 \xff\xff", "it is a PDF: extract its text"),
        (b"plain " * 20_000 + "café".encode("cp1252"), r"at offset 120003; it is probably cp1252: data.encoding="),
        (gzip.compress(b"text"), r"it is gzip: unpack it, or let its name end with \.gz"),
    ],
    ids=["cp1252", "cp1250", "utf-16", "utf-32", "Japanese", "NUL", "pdf", "late", "gzip"],
)
def test_a_file_in_another_encoding_names_the_likely_one(content, says, tmp_path):
    (tmp_path / "t.txt").write_bytes(content)
    with pytest.raises(UserError, match=says):
        CharDataset(DataConfig(path=str(tmp_path / "t.txt")))


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_normal_forms_do_not_depend_on_the_pieces(form, dataset, tmp_path):
    text = "cafe\u0301 caf\u00e9 \u1112\u1161\u11ab \u00e9" + "o\u0302\u0323" * 9
    (tmp_path / "t.txt").write_text(text)
    assert text_of(dataset(str(tmp_path / "t.txt"), normalize=form)) == unicodedata.normalize(form, text)


# --- whole runs ---


def test_held_out_files_replace_the_split(tmp_path):
    texts = {"a": "abcab" * 60, "v": "cbaz" * 9, "t": "bcay" * 8}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    run = [*UNREAD, "data.block_size=8", f"run_dir={tmp_path / 'run'}", f"data.path={tmp_path / 'a.txt'}"]
    held = [f"data.val_path={tmp_path / 'v.txt'}", f"data.test_path={tmp_path / 't.txt'}"]
    result = succeed(*run, *held)
    assert "300 characters to train on, 36 held out" in result.stdout
    assert "31 characters of the final part" in result.stdout
    assert load(str(tmp_path / "run" / "gpt_snapshot.pt")).vocabulary == "abcyz"
    assert {line["tokens"] for line in metrics(tmp_path / "run", "val")} == {35}
    (tmp_path / "v.txt").write_text("cbax" * 9)
    result = start(*run, *held, "trainer.max_steps=9")
    assert result.returncode == 1 and "run: the text and data.val_path and data.test_path had SHA" in result.stderr
    result = start(*run, f"data.val_path={tmp_path / 'a.txt'}", held[1], "trainer.max_steps=9")
    assert f"data.val_path was {tmp_path / 'v.txt'}, is {tmp_path / 'a.txt'}; the text and" in result.stderr
    parts = CharDataset(DataConfig(path=str(tmp_path / "a.txt"), test_path=str(tmp_path / "t.txt"), block_size=8))
    assert [len(part.data) for part in (*parts.split(), parts.final_part())] == [270, 30, 32]


@pytest.mark.parametrize("nproc", [0, 2])
def test_standard_input_is_read_once_and_kept_for_resuming(nproc, tmp_path):
    run = [*UNREAD, "data.block_size=8", "data.path=-", "data.format=jsonl", "data.field=t"]
    run += [f"run_dir={tmp_path / 'run'}"]
    lines = "".join(json.dumps({"t": name}) + "\n" for name in NAMES)
    succeed(*run, input=lines, nproc=nproc)
    assert load(str(tmp_path / "run" / "gpt_snapshot.pt")).config["data"]["separator"] == "newline"
    result = start(*run, "trainer.max_steps=8", input="", nproc=nproc)
    assert result.returncode == 0 and "step 8/8" in result.stdout, result.stderr
    result = start(*run, "trainer.max_steps=9", input=lines + lines, nproc=nproc)
    assert result.returncode == 1 and "belongs to another run" in result.stderr
    result = start(*run[:-1], f"run_dir={tmp_path / 'new'}", input="", nproc=nproc)
    assert result.returncode == 1 and "data.path=-: standard input is empty" in result.stderr


def test_what_is_wrong_with_a_part_is_said_of_it(dataset, tmp_path):
    for name, content in (("a.txt", b"abcdefgh" * 9), ("empty.txt", b""), ("u.txt", "wort".encode("utf-16-le"))):
        (tmp_path / name).write_bytes(content)
    with zipfile.ZipFile(tmp_path / "T.ZIP", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in "ab":
            archive.writestr(name, name * 9)
    (tmp_path / "cut.tgz").write_bytes(gzip.compress(b"x" * 999)[:-9])
    a, empty = str(tmp_path / "a.txt"), str(tmp_path / "empty.txt")
    assert text_of(dataset(str(tmp_path / "T.ZIP"), separator="none")) == "a" * 9 + "b" * 9
    for path, settings, says in (
        (a, {"val_path": empty}, r"data.val_path=.*empty.txt: the text is empty"),
        (a, {"test_path": empty}, r"data.test_path=.*empty.txt: the text is empty"),
        (str(tmp_path / "cut.tgz"), {}, r"cut.tgz: cannot be read"),
        (str(tmp_path / "u.txt"), {"encoding": "utf-16"}, r"u.txt: .*; it is probably utf-16-le"),
    ):
        with pytest.raises(UserError, match=says):
            dataset(path, **settings)
    sha256 = hashlib.sha256((tmp_path / "a.txt").read_bytes()).hexdigest()
    assert dataset(a, val_path=str(tmp_path / "T.ZIP"), sha256=sha256).parts == [73, 20, 0]


def test_members_of_an_archive_that_have_one_name_are_all_read(dataset, tmp_path):
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        for content in ("first", "second"):
            archive.writestr("a.txt", content)
    assert text_of(dataset(str(tmp_path / "two.zip"), separator="|")) == "first|second|"


def test_what_was_chosen_for_a_text_is_said_again_when_it_is_cached(tmp_path, caplog):
    (tmp_path / "a.txt").write_bytes(b"one line\r\n" * 9)
    (tmp_path / "b.txt").write_text("another line\n" * 9)
    paths = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    config = DataConfig(path=paths, block_size=4, cache_dir=str(tmp_path / "cache"))
    caplog.set_level("INFO")
    for number in (1, 2):
        encoding.prepare_text(config)
        CharDataset(config)  # another line for each rank would be too many
        for line in ("data.newlines=keep", "separated by blank_line"):
            assert caplog.text.count(line) == number
