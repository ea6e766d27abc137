"""Texts of many kinds, for benchmarks/sizing.py, from the files of a Debian system.

    python benchmarks/texts.py directory=DIRECTORY

Writes NAME.txt for each: messages of programs in a language, paragraphs of code and of documentation, names of Unicode
characters. Items are distinct, in a random but reproducible order, so that every part has the same distribution.
"""

import gettext
import gzip
import random
import re
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from engine.config.arguments import parse, run_program

LANGUAGES = ("cs", "de", "el", "es", "fr", "it", "ja", "ko", "nl", "pl", "pt_BR", "ru", "sv", "tr", "uk", "vi")
PARAGRAPHS = {  # files whose paragraphs are taken
    "headers": ("/usr/include", "*.h"),
    "cpp": (str(Path(torch.__file__).parent / "include"), "*.h"),
    "perl": ("/usr/share/perl", "*.p[lm]"),
    "python": (str(Path(gettext.__file__).parent), "*.py"),
    "man": ("/usr/share/man/man1", "*.1.gz"),
    "dictionary": ("/usr/share/dictd", "gcide.dict.dz"),  # Debian's package dict-gcide
}
MAX_CHARACTERS = 40_000_000  # of a text


@dataclass
class Arguments:
    """The arguments, `name=value`."""

    directory: str  # where the texts are written


def messages(language: str) -> Iterator[str]:
    """The translated messages of all programs."""
    for path in sorted(Path("/usr/share/locale", language, "LC_MESSAGES").glob("*.mo")):
        try:
            with path.open("rb") as file:  # gettext looks messages up, but does not list them
                catalog = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
        except UnicodeDecodeError:  # a few catalogs do not have the encoding that they state
            print(f"{path}: left out, its encoding is wrong")
            continue
        yield from (message for key, message in catalog.items() if key)


def paragraphs(directory: str, pattern: str) -> Iterator[str]:
    """The paragraphs of all files that match."""
    for path in sorted(Path(directory).rglob(pattern)):
        content = path.read_bytes()
        if path.suffix in (".gz", ".dz"):
            content = gzip.decompress(content)
        yield from re.split(r"\n\s*\n", content.decode(errors="ignore"))


def names() -> Iterator[str]:
    """The names of Unicode characters, but for the numbered ones and Hangul's syllables."""
    for code in range(sys.maxunicode):
        name = unicodedata.name(chr(code), "")
        if not re.search(r"\d|SYLLABLE", name):
            yield name


def program(arguments: list[str]) -> None:
    directory = Path(parse(Arguments, arguments).directory)
    directory.mkdir(parents=True, exist_ok=True)
    kinds = {name: messages(name) for name in LANGUAGES}
    kinds |= {name: paragraphs(*place) for name, place in PARAGRAPHS.items()}
    kinds["unicode"] = names()
    for name, found in kinds.items():
        items = sorted(set(found))
        random.Random(name).shuffle(items)
        text = "\n\n".join(items)[:MAX_CHARACTERS]
        (directory / f"{name}.txt").write_text(text, "utf-8")
        print(f"{name}: {len(text):,} characters, {len(set(text))} distinct")


if __name__ == "__main__":
    run_program(program, Arguments)
