"""The command lines of the small programs."""

import functools
import os
import re
from dataclasses import dataclass, field

import pytest
from conftest import model_snapshot, start

import export
import report
import sample
from engine.config import arguments
from engine.config.arguments import field_table, split_paths
from engine.errors import UserError
from export import ExportConfig
from report import ReportArguments
from sample import SampleConfig


@dataclass
class Config:
    """Not a field: nor = this."""

    out: str  # must be given
    text: str | None = None
    number: int | None = 3
    rate: float = 3e-4
    flag: bool = False
    names: list[str] | None = None
    items: list[str] = field(default_factory=list)  # in order

    mode: str = "a=b"  # = or # in it

    def __post_init__(self):
        if self.text == "bad":
            raise UserError("text=bad: is bad")


def test_values_are_converted_to_the_type_of_their_field(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    given = ["out=~/x", "text=a=${b} [c] 'd", "number=null", "rate=1e-3", "flag=true", "names=[~/a,b~]"]
    expected = Config("/home/ada/x", "a=${b} [c] 'd", None, 1e-3, True, ["/home/ada/a", "b~"])
    assert arguments.parse(Config, given) == expected
    assert arguments.parse(SampleConfig, ["prompt=~", "stop=null", "run_dir=null"]) == SampleConfig("~", stop="null")
    verbatim = 'a: b, (c) = [d] "e" #1.3 + %'
    assert arguments.parse(SampleConfig, [f"prompt={verbatim}"]) == SampleConfig(verbatim)
    assert arguments.parse(Config, ["out=1", "out=2"]) == Config("2")
    assert arguments.parse(Config, ["out=1", "text=a", "text=null"]) == Config("1")
    assert arguments.parse(Config, ["out=1", "text=null", "text=a"]) == Config("1", "a")
    for value, names in (("[010, null]", ["010", "null"]), ("[ab]*", ["[ab]*"]), ("[]", [])):
        assert arguments.parse(Config, ["out=1", f"names={value}"]).names == names


parse = functools.partial(arguments.parse, Config)


@pytest.mark.parametrize(
    "main, given, says",
    [
        (parse, "out=a nunber=1", "nunber=1: not an argument; there are out=, text=, number="),
        (parse, "out", "out: not an argument"),
        (parse, "out=", "out=: is empty"),
        (parse, "number=1", "out: missing; give out=VALUE"),
        (parse, "out=null", "out: must not be null"),
        (parse, "number=x", "number: Value 'x' of type 'str' could not be converted to Integer"),
        (parse, "out=a text=bad", "text=bad: is bad"),
        (sample.main, "snapshot=a.pt prompt=漢", "prompt: character '漢' (U+6F22) at position 0 is"),
        (sample.main, "snapshot=a.pt prompt=\udcff", "'\\udcff' (U+DCFF) at position 0 is"),  # no UTF-8
        (sample.main, "top_k=0", "top_k=0: must be at least 1"),
        (sample.main, "score=b stop=x", "stop=x: has no effect with score=; leave it out"),
        (sample.main, "num_samples=0", "num_samples=0: must be at least 1"),
        (sample.main, "snapshot=a.pt device=tpu", "device=tpu: no such device"),
        (sample.main, "temperature=-1", "temperature=-1.0: must be at least 0 and at most 1000"),
        (sample.main, "snapshot=a.pt prompt_file=nowhere", "nowhere: no such file"),
        (sample.main, "snapshot=a.pt prompt_file=/dev/null", "prompt_file=/dev/null: is empty"),
        (sample.main, "prompt=a prompt_file=b", "prompt= and prompt_file=: give only one of them"),
        (sample.main, "snapshot=a.pt score=b stride=0", "stride=0: must be from 1 to the model's"),
        (sample.main, "snapshot=a.pt score=b stride=25", "must be from 1 to the model's context, 24"),
        (sample.main, "snapshot=a.pt score=file", "score=file: known characters: 1; at least 2 are needed"),
        (sample.main, "snapshot=a.pt score=/dev/null", "score=/dev/null: known characters: 0;"),
        (sample.main, "stride=4", "stride= requires score="),
        (sample.main, "score=b out=x", "by= and out= belong together"),
        (sample.main, "score=b by=word out=x", "by=word: must be one of line, document, character"),
        (sample.main, "snapshot=a.pt score=file by=document out=x", "by=document: the run's text has no separator"),
        (sample.main, "score=b by=line out=nowhere/x", "out=nowhere/x: its folder does not exist"),
        (sample.main, "snapshots=[] score=b", "snapshots=[]: names no snapshot"),
        (sample.main, "snapshot=a.pt score=b snapshots=[a.pt]", "snapshots= and snapshot=: give only one of them"),
        (sample.main, "snapshot=nowhere.pt", "nowhere.pt: no such snapshot"),
        (sample.main, "snapshot=/etc/hostname", "/etc/hostname: not a complete snapshot"),
        (sample.main, "run_dir=nowhere", "there is no snapshot at nowhere/gpt_snapshot.pt"),
        (sample.main, "", "no run under runs/"),
        (export.main, "", "nothing to write: give out= or page="),
        (export.main, "page=x out=y", "out= and page=: give only one of them"),
        (export.main, "out=x snapshots=[a.pt]", "snapshots= requires page="),
        (export.main, "out=x snapshot=nowhere.pt", "nowhere.pt: no such snapshot"),
        (export.main, "out=file snapshot=a.pt", "out=file: already exists"),
        (export.main, "out=file/x snapshot=a.pt", "out=file/x: cannot be written"),
        (export.main, "out=s3://x/y", "out=s3://x/y: must be local"),
        (report.main, "run_dir=nowhere", "nowhere: no run has logged anything there"),
        (report.main, "check .", ".: not an argument; there are run_dir="),
        (report.main, "check out=a", "out=a: check writes no page; leave it out"),
        (sample.main, "run_dir=runs/y", "there is no snapshot at runs/y/gpt_snapshot.pt; the newest run is runs/x"),
        (report.main, "run_dirs=nowhere/*", "nowhere/*: no run has logged anything there"),
        (report.main, "", "no run under runs/ has logged"),
    ],
)
def test_bad_input_gets_one_line_and_changes_nothing(main, given, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("engine.portable.restore_sigpipe", lambda: None)  # it would be pytest's
    (tmp_path / "file").write_text("mine")
    if "runs/" in given:
        (tmp_path / "runs" / "x").mkdir(parents=True)
        for name in ("metrics.jsonl", ".lock"):
            (tmp_path / "runs" / "x" / name).write_text("{}")
    (tmp_path / "a.pt").write_bytes(model_snapshot("\nabm").to_bytes())
    with pytest.raises((UserError, OSError)) as caught:
        main(given.split())
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(set(os.listdir(tmp_path)) - {"runs"}) == ["a.pt", "file"]
    assert (tmp_path / "file").read_text() == "mine"


def test_help_has_type_default_and_meaning_of_every_field():
    assert field_table(Config, "x.").splitlines() == [
        "  x.out=???      str               must be given",
        "  x.text=null    str | None",
        "  x.number=3     int | None",
        "  x.rate=0.0003  float",
        "  x.flag=false   bool",
        "  x.names=null   list[str] | None",
        "  x.items=[]     list[str]         in order",
        "  x.mode=a=b     str               = or # in it",
    ]


@pytest.mark.parametrize(
    "program, fields", [("sample", SampleConfig), ("export", ExportConfig), ("report", ReportArguments)]
)
def test_every_program_has_help_and_refuses_an_unknown_argument_in_one_line(program, fields, tmp_path):
    helped, refused = (start(typed, script=f"{program}.py", cwd=tmp_path) for typed in ("--help", "no=argument"))
    assert helped.returncode == 0 and f"python {program}.py" in helped.stdout
    assert refused.returncode == 1 and refused.stderr.startswith("error: no=argument: not an argument")
    assert refused.stderr.count("\n") == 1
    for line in field_table(fields).splitlines():
        assert len(re.split("  +", line.strip())) == 3, line  # its meaning, too


def test_a_list_has_files_and_patterns_with_commas(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=1,b=2").write_text("")
    for text, items in (
        ("a=1,b=2", ["a=1,b=2"]),
        ("x,a=1,b=2,y", ["x", "a=1,b=2", "y"]),
        ("x,y*", ["x", "y*"]),
        ("a=1,b*,x", ["a=1,b*", "x"]),
    ):
        assert split_paths(text) == items
