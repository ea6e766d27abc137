"""The command lines of the small programs."""

import re
from dataclasses import dataclass, field

import pytest
from conftest import start

from engine.config import arguments
from engine.config.arguments import field_table
from engine.errors import UserError
from export import ExportConfig
from report import ReportArguments
from sample import SampleConfig


@dataclass
class Config:
    out: str = "a"
    text: str | None = None
    number: int | None = 3
    rate: float = 0.5
    flag: bool = False
    names: list[str] | None = None

    def __post_init__(self):
        if self.text == "bad":
            raise UserError("text=bad: is bad")


def test_values_have_the_types_of_their_fields_and_texts_are_taken_as_they_are():
    given = ["out=null", "text=a=${b} [c] 'd", "number=null", "rate=1e-3", "flag=true"]
    assert arguments.parse(Config, given) == Config("null", "a=${b} [c] 'd", None, 1e-3, True)
    assert arguments.parse(Config, ["out=1", "out=2"]) == Config("2")
    for value, names in (("[010, null]", ["010", "null"]), ("[ab]*", ["[ab]*"]), ("[]", [])):
        assert arguments.parse(Config, ["out=1", f"names={value}"]).names == names


@pytest.mark.parametrize(
    "given, says",
    [
        (["out=a", "nunber=1"], "nunber=1: not an argument; did you mean number=?"),
        (["zz=1"], "zz=1: not an argument; there are out=, text=, number="),
        (["out"], "out: not an argument"),
        (["out="], "out=: is empty"),
        (
            ["out=a", "number=x"],
            "number: Value 'x' of type 'str' could not be converted to Integer",
        ),
        (["out=a", "text=bad"], "text=bad: is bad"),
    ],
)
def test_bad_input_gets_one_line(given, says):
    with pytest.raises(UserError) as caught:
        arguments.parse(Config, given)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@dataclass
class Base:
    """Not a field: nor = this."""

    first: str  # must be given
    rate: float = 3e-4


@dataclass
class Derived(Base):
    names: list[str] = field(default_factory=list)  # in order
    mode: str = "a=b"  # = or # in it

    limit: int | None = 1


def test_help_has_type_default_and_meaning_of_every_field():
    assert field_table(Derived, "x.").splitlines() == [
        "  x.first=???    str         must be given",
        "  x.rate=0.0003  float",
        "  x.names=[]     list[str]   in order",
        "  x.mode=a=b     str         = or # in it",
        "  x.limit=1      int | None",
    ]


@pytest.mark.parametrize("program", ["sample", "export", "report"])
def test_a_program_explains_itself(program, tmp_path):
    result = start("--help", script=f"{program}.py", cwd=tmp_path)
    assert result.returncode == 0 and f"python {program}.py" in result.stdout
    wrong = start("no=argument", script=f"{program}.py", cwd=tmp_path)
    assert wrong.returncode == 1 and wrong.stderr.startswith("error: no=argument: not an argument")
    assert wrong.stderr.count("\n") == 1


@pytest.mark.parametrize("program", [SampleConfig, ExportConfig, ReportArguments])
def test_help_has_a_meaning_for_every_argument(program):
    for line in field_table(program).splitlines():
        assert len(re.split("  +", line.strip())) == 3, line
