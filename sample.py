"""Samples text from a snapshot, or scores a given text with it.

python sample.py                                            best snapshot of the newest run
python sample.py prompt="ROMEO:" num_samples=3              a prompt; three texts
python sample.py prompt_file=opening.txt                    a prompt from a file; -: standard input
python sample.py max_new_tokens=200 temperature=0.8 top_k=20 top_p=0.95 seed=7 device=cpu
python sample.py run_dir=runs/NAME                          another run
python sample.py snapshot=runs/NAME/gpt_snapshot.pt
python sample.py score=book.txt                             the loss of a text
python sample.py score=book.txt stride=64                   in windows that overlap: more context for each character
python sample.py score=book.txt snapshots=[a.pt,b.pt]       of several models, and of their ensemble
python sample.py score=names.txt by=line out=scores.tsv     the loss of each line
python sample.py num_samples=20 stop='\\n' copied=true       one line each, and the share that is copied
python sample.py num_samples=300 new=true out=new.txt       names that are not in the text of the run
"""

from engine import signals

if __name__ == "__main__":
    signals.prepare()

import codecs
import itertools
import json
import logging
import math
import operator
import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from char_dataset import CharDataset, encode
from engine.config.arguments import Text, parse, run_program
from engine.config.schema import TEXT_OPTIONS, as_typed
from engine.errors import UserError, check_only_one, check_option, check_range, one_line
from engine.files import atomic_write, masked, usable, writes
from engine.generation import default_prompt, enough_threads
from engine.machine.hardware import check_device
from engine.precision import Precision
from engine.run.directory import choose_snapshots
from engine.snapshots.sharded import load_full
from engine.snapshots.snapshot import CHANGED, Snapshot, has_changed, probe_logits
from engine.text.documents import from_text, read_text, to_text, unescaped
from engine.text.encoding import Notes
from engine.text.sources import STDIN, has_no_size, listed, real_files
from model import GPT, GPTConfig

log = logging.getLogger("gpt")

BATCH_CHARACTERS = 8192  # per batch, context included
BATCH_LOGITS = 2**25  # per batch: 128 MiB; fewer characters of a very large vocabulary
MAX_DRAWS = 50  # texts drawn for each of `num_samples` new ones
ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t"})
COPIED = 32  # length of a copied substring, characters


@dataclass
class SampleConfig:
    """Command-line arguments, `name=value`."""

    prompt: Text | None = None  # text to continue (\n, \t); by default the separator, a newline or the first character
    prompt_file: str | None = None  # file or URL of the prompt; -: standard input
    num_samples: int = 1  # number of texts
    max_new_tokens: int = 500  # characters per text, at most
    stop: Text | None = None  # end a text before this string (\n, \t); document: at its end; by default never
    new: bool = False  # only texts that are no document (or line) of the run's text, each once; stops at its end
    out: str | None = None  # file to write instead: one text a line; .jsonl: {"text": ...} a line
    copied: bool = False  # print the share of the texts that is copied from the training text
    text: str | None = None  # for copied= and new=: the run's text; null: where it was
    temperature: float = 0.8  # divides the logits; 0: greedy
    top_k: int | None = None  # draw among the k likeliest; null: among all
    top_p: float | None = None  # draw among the fewest whose probabilities reach p; null: among all
    seed: int | None = 1337  # null: different samples every time
    run_dir: str | None = None  # the run; null: the newest under runs/
    snapshot: str | None = None  # a file, URL or run; null: the best of run_dir, or its latest
    score: str | None = None  # a file, URL or pattern: print the loss of this text instead
    field: Text | None = None  # for score= and prompt_file=: the field of records; null: as of the run's text
    snapshots: list[str] | None = None  # for score=: several, [a.pt,b.pt], alone and as an ensemble
    by: str | None = None  # for score=: line, document or character: the loss of each, into out=
    stride: int | None = None  # for score=: characters between windows; null: the context
    device: str = "auto"  # cpu, cuda, auto, or another torch device: mps, xpu

    def __post_init__(self):
        check_only_one(prompt=self.prompt, prompt_file=self.prompt_file, score=self.score)
        if self.score is not None:
            for name in (
                "num_samples", "max_new_tokens", "stop", "new", "copied", "temperature", "top_k", "top_p", "seed"
            ):  # fmt: skip
                if (value := getattr(self, name)) != getattr(SampleConfig, name):
                    raise UserError(f"{name}={as_typed(value)}: has no effect with score=; leave it out")
        if self.text is not None and not (self.copied or self.new):
            raise UserError("text= requires copied=true or new=true")
        for name in ("snapshots", "by", "stride"):
            if getattr(self, name) is not None and self.score is None:
                raise UserError(f"{name}= requires score=")
        if self.field is not None and self.score is None and self.prompt_file is None:
            raise UserError("field= requires score= or prompt_file=")
        if self.by is not None:
            check_option("by", self.by, ("line", "document", "character"))
        if self.score is not None and (self.by is None) != (self.out is None):
            raise UserError("by= and out= belong together: score=book.txt by=line out=scores.tsv")
        if self.out is not None and os.path.lexists(self.out):
            raise UserError(f"out={self.out}: already exists; give another name, or remove it")
        if self.out is not None and not os.path.isdir(os.path.dirname(self.out) or "."):
            raise UserError(f"out={self.out}: its folder does not exist")
        check_range("num_samples", self.num_samples, 1, 10_000)
        check_range("max_new_tokens", self.max_new_tokens, 1)
        check_range("temperature", self.temperature, 0, 1000)
        check_range("top_k", self.top_k, 1, null=True)
        check_range("top_p", self.top_p, above=0, high=1, null=True)
        check_range("seed", self.seed, 0, 2**63 - 1)
        check_device("device", self.device)


def load_model(snapshot: Snapshot, device: str = "auto", strict: bool = False) -> GPT:
    """Loads the model of a snapshot, in evaluation mode. Warns if its logits differ from the run's, or raises
    `UserError` if `strict`. Also raises it for weights that do not fit.
    """
    model = GPT(GPTConfig.recorded(snapshot.model_config))
    try:
        model.load_state_dict(snapshot.model_state)
    except RuntimeError as error:
        why = f"was model.py changed? {one_line(error)[:300]}"
        raise UserError(f"the snapshot's weights are of another model: {why}") from error
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device).eval()
    probe = probe_logits(model, device)
    if has_changed(probe, snapshot.probe_logits):
        if strict:
            raise UserError(f"{CHANGED} Restore that model.py; sample.py runs this one")
        log.warning(CHANGED)
    return model


def sample(config: SampleConfig, snapshot: Snapshot) -> Iterator[Iterable[str]]:
    """Yields `num_samples` texts as iterables: the prompt, without a separator that begins it, then characters as they
    are drawn. With `new`, these are `MAX_DRAWS` times as many, for `only_new`. For a given seed, samples do not depend
    on `num_samples`, up to rounding.
    """
    vocabulary, encoding = snapshot.vocabulary, snapshot.encoding
    prompt, ids = read_prompt(config, snapshot)
    shown = to_text(prompt, encoding).removeprefix(snapshot.separator or "\n")
    end = stop_string(config, snapshot)
    stop = from_text(end, encoding)
    encode_setting(f"stop={end!r}", stop, snapshot)  # raises for what is never drawn
    model = load_model(snapshot, config.device)
    vocabulary = vocabulary.ljust(model.config.vocab_size, "?")  # a model may have more, for its speed
    ids = ids.to(model.tok_emb.weight.device)
    num_texts = config.num_samples * (MAX_DRAWS if config.new else 1)
    batch_size = min(config.num_samples, batch_rows(model, model.config.block_size))
    with enough_threads(model, batch_size):
        for first in range(0, num_texts, batch_size):
            start = ids.expand(min(batch_size, num_texts - first), -1)
            options: dict[str, Any] = dict(top_k=config.top_k, top_p=config.top_p, seed=config.seed, first_row=first)
            new = model.stream(start, config.max_new_tokens, config.temperature, do_sample=True, **options)
            # All texts are drawn together; the first is yielded while it is drawn, and the others wait here.
            streams = itertools.tee((ids_of_all.tolist() for ids_of_all in new), len(start))
            for i, stream in enumerate(streams):
                drawn = map(vocabulary.__getitem__, map(operator.itemgetter(i), stream))
                pieces = cut_at_stop(drawn, stop)
                if encoding == "bytes":
                    pieces = codecs.iterdecode((piece.encode("latin-1") for piece in pieces), "utf-8", "replace")
                yield itertools.chain([shown], pieces)


def batch_rows(model: GPT, length: int) -> int:
    """How many rows of `length` characters are computed together."""
    return max(1, min(BATCH_CHARACTERS, BATCH_LOGITS // model.config.vocab_size) // length)


def stop_string(config: SampleConfig, snapshot: Snapshot) -> str:
    """The string that ends a text; empty for none."""
    if config.stop == "document" and not snapshot.separator:
        raise UserError("stop=document: the run's text has no separator of documents; give a string")
    if config.stop == "document" or (config.new and config.stop is None):
        if not snapshot.separator and "\n" not in snapshot.vocabulary:
            raise UserError("new=true: the run's text has neither documents nor lines; give stop=")
        return snapshot.separator or "\n"
    return unescaped(config.stop or "", snapshot.vocabulary)


def cut_at_stop(pieces: Iterable[str], stop: str) -> Iterator[str]:
    """Yields the characters up to the string `stop`, or all."""
    held = ""  # may be the beginning of `stop`
    for piece in pieces:
        held += piece
        if held == stop:
            return
        if len(held) >= len(stop):
            yield held[0]
            held = held[1:]
    yield from held


def run_text(snapshot: Snapshot, setting: str, path: str | None) -> CharDataset:
    """The text that a model was trained on, for `setting`, at `path` or where it was. Raises `UserError` if it is
    missing or has changed.
    """
    recorded = snapshot.config.get("data", {}).get("path")
    if recorded is None and path is None:
        raise UserError(f"{setting}: the snapshot does not record its text")
    try:
        data = CharDataset(snapshot.data_config(path=path or usable(recorded, "text"), url=None, sha256=None))
    except UserError as error:
        raise UserError(f"{setting}: needs the training text, as named when training started: {error}") from error
    if data.digest != snapshot.text_digest:
        raise UserError(f"{setting}: {data.config.path} is not the text that was trained on")
    return data


def only_new(
    texts: Iterable[Iterable[str]], known: set[str], count: int, most: int, encoding: str
) -> Iterator[list[str]]:
    """The first `count` of `texts` that are neither in `known` nor repeated, nor cut off: longer than `most` characters
    of the model. Says how many others there were. Newlines around a text are ignored.
    """
    seen: set[str] = set()
    dropped = {"of the run's text": 0, "drawn before": 0, "cut off by max_new_tokens": 0}
    for pieces in map(list, texts):
        text = "".join(pieces).strip("\n")
        if len(from_text("".join(pieces[1:]).replace("\ufffd", "?"), encoding)) > most:  # each is one byte
            dropped["cut off by max_new_tokens"] += 1
        elif text in known:
            dropped["of the run's text"] += 1
        elif text in seen:
            dropped["drawn before"] += 1
        else:
            seen.add(text)
            yield pieces
        if len(seen) == count:
            break
    fewer = f"; only {len(seen)} of {count} are new" if len(seen) < count else ""
    print(f"[dropped: {', '.join(f'{number} {why}' for why, number in dropped.items())}{fewer}]", file=sys.stderr)


def copied_share(texts: list[str], source: str) -> float:
    """The share of the characters of `texts` that are copied: in a substring of length `COPIED` of the training text
    `source`, or in a shorter line of it.
    """
    short_lines = {line for line in source.splitlines() if len(line) < COPIED}
    copied: list[bool] = []
    for text in texts:
        is_copied = np.zeros(len(text), bool)
        for line in re.finditer(r".+\n?", text):
            if line[0].rstrip("\r\n") in short_lines:
                is_copied[line.start() : line.end()] = True
        for start in range(len(text) - COPIED + 1):
            if text[start : start + COPIED] in source:
                is_copied[start : start + COPIED] = True
        copied.extend(is_copied.tolist())
    return float(np.mean(copied)) if copied else 0.0


def read_as_trained(path: str, snapshot: Snapshot, field: str | None) -> str:
    """The characters of the text at `path` (-: standard input), read as the text of the run was, but of records the
    `field` if given.
    """
    if has_no_size(path):
        print(f"[reading {path} until it ends]", file=sys.stderr)
    config = snapshot.data_config(**{} if field is None else {"field": field})
    ending = ".stdin" if path == STDIN else os.path.splitext(path)[1]
    own = {os.path.splitext(name)[1] for name in listed(config.path)}
    if own != {ending} or (field and config.format == "text"):
        config.format = None  # the names of the run's files do not say it
    try:
        with Notes() as notes:
            return read_text("/dev/stdin" if path == STDIN else path, config, has_records=field is not None)
    except UserError as error:
        what = re.sub(": data.encoding=.*|, or data.format=text", "", str(error))  # there are no such arguments
        raise UserError(what.replace("data.field=", "field=")) from error
    finally:
        for _, note in notes:
            print(f"[{note.partition('; data.')[0]}]", file=sys.stderr)  # without other programs' arguments


def read_prompt(config: SampleConfig, snapshot: Snapshot) -> tuple[str, torch.Tensor]:
    """The characters to continue, at least one, and their ids."""
    name, vocabulary, encoding = "prompt", snapshot.vocabulary, snapshot.encoding
    if config.prompt_file is not None:
        name, prompt = f"prompt_file={config.prompt_file}", read_as_trained(config.prompt_file, snapshot, config.field)
    elif config.prompt is not None:
        prompt = from_text(unescaped(config.prompt, vocabulary), encoding)
    else:
        prompt = from_text(snapshot.separator, encoding) or default_prompt(vocabulary)
    if not prompt:
        raise UserError(f"{name}: is empty; a prompt has at least one character")
    return prompt, encode_setting(name, prompt, snapshot)


def encode_setting(name: str, text: str, snapshot: Snapshot) -> torch.Tensor:
    """The ids of the text that a setting gives. Raises `UserError`, naming the setting, for an unknown character."""
    try:
        return encode(text, snapshot.vocabulary, snapshot.encoding)
    except UserError as error:
        raise UserError(f"{name}: {error}{normal_form_hint(text, snapshot)}") from error


def normal_form_hint(text: str, snapshot: Snapshot) -> str:
    """Names the normal form of Unicode in which the fewest characters of `text` are unknown; empty if none helps."""
    if snapshot.encoding == "bytes":
        return ""
    forms: Any = TEXT_OPTIONS["normalize"]
    unknown = {form: len(set(unicodedata.normalize(form, text)) - set(snapshot.vocabulary)) for form in forms}
    best = min(unknown, key=unknown.__getitem__)
    helps = unknown[best] < len(set(text) - set(snapshot.vocabulary))
    return f"; in normal form {best} of Unicode, fewer of its characters would be unknown" if helps else ""


# --- the loss of a text ---


class Units(NamedTuple):
    """What is scored: lines, documents or a whole text."""

    texts: Sequence[str]  # as read, in characters of the model; of a whole text, each scored character
    ids: torch.Tensor  # of all units, one after the other, int64 (T,)
    spans: list[tuple[int, int, int]]  # of each: where its context begins, its first scored character, its end


def read_units(config: SampleConfig, snapshot: Snapshot) -> Units:
    """Reads the text at `config.score`. The context of a line or document begins with the separator, or a newline, and
    what ends it is scored with it. Characters that the model does not know are left out; says how many.
    """
    name, vocabulary, block_size = f"score={config.score}", snapshot.vocabulary, snapshot.model_config["block_size"]
    if config.stride is not None and not 1 <= config.stride <= block_size:
        raise UserError(f"stride={config.stride}: must be from 1 to the model's context, {block_size}")
    assert config.score is not None
    text = read_as_trained(config.score, snapshot, config.field)
    separator = from_text(snapshot.separator, snapshot.encoding)
    start, end, parts = "", "", [text]
    if config.by in ("line", "document"):
        start, end = separator or default_prompt(vocabulary), "\n" if config.by == "line" else separator
        if not end:
            raise UserError("by=document: the run's text has no separator of documents; by=line")
        # The file's last newline is none of a document.
        whole = text.removesuffix(end) if config.by == "line" or text.endswith(end) else text.rstrip("\n")
        parts = whole.split(end) if whole else []
    unknown = dict.fromkeys(map(ord, set(text + end) - set(vocabulary)))
    try:
        encode_setting(name, text, snapshot)
    except UserError as error:
        count = len(text) - len(text.translate(unknown))
        print(masked(f"[{snapshot.unit}s skipped: {count}; {error}]"), file=sys.stderr)
    pieces = [start + (part + end).translate(unknown) for part in parts]
    spans, length = [], 0
    for piece in pieces:
        spans.append((length, length + max(1, len(start)), length + len(piece)))
        length += len(piece)
    if all(first >= last for _, first, last in spans):
        raise UserError(f"{name}: known {snapshot.unit}s: {length}; at least 2 are needed")
    ids = encode("".join(pieces), vocabulary, snapshot.encoding)
    return Units(parts if start else pieces[0][1:], ids, spans)


def score(config: SampleConfig, *snapshots: Snapshot) -> torch.Tensor:
    """`unit_losses` of the text at `config.score`: of every character but the first, unless `config.by` says else."""
    return unit_losses(config, read_units(config, snapshots[0]), *snapshots)


def unit_losses(config: SampleConfig, units: Units, *snapshots: Snapshot) -> torch.Tensor:
    """Losses in nats, float64 of shape (models, characters), of every scored character: a row for each of `snapshots`
    and, if several, one for their ensemble, the mean of their probabilities (Hansen and Salamon, 1990). They must have
    the same vocabulary and context. Each computes in its run's dtype; without `config.stride`, the mean over a whole
    text is what the run's evaluation gives.

    Sliding-window evaluation (Baevski and Auli, 2019): windows of a unit start `config.stride` characters apart; each
    but the first scores only its last `stride` characters, which see more than `block_size - stride` characters. By
    default they do not overlap. The longest are computed first, together with others of about the same length.
    """
    models = [load_model(snapshot, config.device) for snapshot in snapshots]
    block_size, device = models[0].config.block_size, models[0].tok_emb.weight.device
    precisions = [Precision(device.type, each.choices.get("amp_dtype", "float32")).autocast() for each in snapshots]
    ids, stride = units.ids, config.stride or block_size
    overlap = block_size - stride
    # Of each window, the positions of the first character, of the first whose next one it scores, and of the last one.
    windows = torch.tensor(
        [
            (start, max(first - 1, start + overlap) if start > begin else first - 1, end - 1)
            for begin, first, end in units.spans
            for start in range(begin, max(end - 1 - overlap, begin + 1), stride)
        ]
    )
    lengths, order = (windows[:, 2] - windows[:, 0]).clamp(1, block_size).sort(descending=True, stable=True)
    losses = torch.zeros(len(models) + (len(models) > 1), len(ids), dtype=torch.float64)
    is_scored = torch.zeros(len(ids), dtype=torch.bool)
    done = 0
    while done < len(windows):
        length = int(lengths[done])
        batch = windows[order[done : done + batch_rows(models[0], length)]]
        done += len(batch)
        start, first, end = batch[:, :, None].unbind(1)  # (windows, 1) each
        positions = start + torch.arange(length)  # (windows, length)
        is_new = (positions >= first) & (positions < end)  # not scored by an earlier window
        x = ids[positions.clamp(max=len(ids) - 1)].to(device)
        scored = positions[is_new] + 1
        targets = ids[scored].to(device)
        for row, (model, precision) in enumerate(zip(models, precisions, strict=True)):
            with torch.no_grad(), precision:
                logits = model(x)[0][is_new.to(device)]
            each = F.cross_entropy(logits, targets, reduction="none")
            losses[row, scored] = each.cpu().double()  # not every device has float64
        is_scored[scored] = True
    if len(models) > 1:  # -log of the mean probability
        losses[-1] = math.log(len(models)) - losses[:-1].neg().logsumexp(dim=0)
    return losses[:, is_scored]


def unit_rows(units: Units, losses: torch.Tensor, snapshot: Snapshot, path: str) -> Iterator[dict[str, Any]]:
    """For each of `units` its loss, sum and mean, from `losses` (characters,), and its text; unless `path` is .jsonl,
    newlines, tabs and backslashes in it are escaped.
    """
    counts = [end - first for _, first, end in units.spans]
    each = losses.split(counts if len(counts) == len(units.texts) else 1)
    for text, values in zip(units.texts, each, strict=True):
        total = values.sum().item()
        mean = total / max(1, len(values))
        text = to_text(text, snapshot.encoding)
        text = text if path.endswith(".jsonl") else text.translate(ESCAPES)
        yield {"nats": round(total, 6), f"nats per {snapshot.unit}": round(mean, 6), "text": text}


def write_rows(path: str, rows: Iterable[dict[str, Any]]) -> None:
    """Writes `rows` into the file `path`, atomically: JSON if it is .jsonl, otherwise values with tabs between them."""
    with writes("out", path), atomic_write(path) as file:
        for row in rows:
            is_json = path.endswith(".jsonl")
            print(json.dumps(row, ensure_ascii=False) if is_json else "\t".join(map(str, row.values())), file=file)


def print_score(config: SampleConfig, snapshots: dict[str, Snapshot]) -> None:
    """Prints the loss of the text at `config.score`, for each of `snapshots`, by path, and their ensemble. Raises
    `UserError`, naming two of them, if their vocabularies or contexts differ.
    """
    (first, snapshot), *others = snapshots.items()
    for path, other in others:
        if (other.vocabulary, other.encoding) != (snapshot.vocabulary, snapshot.encoding):
            raise UserError(f"snapshots=: {path} has another vocabulary than {first}")
        if other.model_config.get("block_size") != snapshot.model_config.get("block_size"):
            raise UserError(f"snapshots=: {path} has another context than {first}")
    assert config.score is not None
    scored = real_files(config.score)
    if any(scored & real_files(run.config.get("data", {}).get("path", [])) for run in snapshots.values()):
        note = "this is text of the run, which trained on most of its text; its held-out loss is over the rest"
        print(f"[{note}]", file=sys.stderr)
    units, unit = read_units(config, snapshot), snapshot.unit
    losses = unit_losses(config, units, *snapshots.values())
    *each, loss = losses.mean(dim=1).tolist()
    if config.out is not None:
        write_rows(config.out, unit_rows(units, losses[-1], snapshot, config.out))
    print(f"{unit}s scored".ljust(19), losses.size(1))
    if config.stride is not None:
        print("stride".ljust(19), config.stride)
    if each:
        for path, its_loss in zip(snapshots, each, strict=True):
            print(f"{masked(path)}: {its_loss:.6f} nats per {unit}")
        print(f"ensemble of {len(each)} snapshots")
    print("nats in total".ljust(19), f"{losses[-1].sum():.6f}")
    print(f"nats per {unit}".ljust(19), f"{loss:.6f}")
    print(f"bits per {unit}".ljust(19), f"{loss / math.log(2):.6f}")
    print("perplexity".ljust(19), f"{math.exp(loss):.6f}")


def main(arguments: list[str]) -> None:
    config = parse(SampleConfig, arguments)
    paths = choose_snapshots(config.snapshots, config.snapshot, config.run_dir)
    snapshots = {path: load_full(path) for path in paths}
    for path, snapshot in snapshots.items():
        print(f"[{masked(path)}, {snapshot}]", file=sys.stderr)
    if config.score is not None:
        print_score(config, snapshots)
        return
    [snapshot] = snapshots.values()
    end = stop_string(config, snapshot)
    for name, typed in (("stop", config.stop), ("prompt", config.prompt)):
        if typed and re.search(r"\\[nt]", typed) and "\\" in snapshot.vocabulary:
            print(f"[{name}: with a backslash, which the text has; a newline is {name}=$'\\n']", file=sys.stderr)
    name = f"{'new' if config.new else 'copied'}=true"
    data = run_text(snapshot, name, config.text) if config.new or config.copied else None
    texts: Iterable[Iterable[str]] = sample(config, snapshot)
    if data is not None and config.new:
        whole = data.decode(data.data)
        documents = itertools.chain(*(whole.split(mark) for mark in {end, snapshot.separator or "\n"}))
        known = {"", *(document.strip("\n") for document in documents)}
        most = config.max_new_tokens - len(from_text(end, snapshot.encoding))  # without what ends it
        texts = only_new(texts, known, config.num_samples, most, snapshot.encoding)
    if config.out is not None:
        is_line = end == "\n" or "\n" not in snapshot.vocabulary
        continued = write_texts(texts, is_line, config.out)
    else:
        continued = print_texts(texts, "" if end == "\n" else "-" * 40)
    if data is not None and config.copied:
        train, _ = data.split()
        share = copied_share(continued, train.decode(train.data))
        where = f"from the training text, in pieces of {COPIED} characters or whole lines"
        print(f"[{share:.1%} of this is copied {where}]", file=sys.stderr)


def print_texts(texts: Iterable[Iterable[str]], separator: str) -> list[str]:
    """Prints texts, on a terminal character by character, with a line between them if `separator` is not empty; returns
    what follows the prompt of each.
    """
    printed = []
    for i, text in enumerate(texts):
        if i and separator:
            print(separator)
        pieces: list[str] = []
        for piece in text:
            print(piece, end="", flush=sys.stdout.isatty())
            pieces.append(piece)
        print(flush=True)
        printed.append("".join(pieces[1:]))
    return printed


def write_texts(texts: Iterable[Iterable[str]], is_line: bool, path: str) -> list[str]:
    """Writes texts into the file `path`; returns the same as `print_texts`. Unless `path` is .jsonl, raises `UserError`
    for a prompt of several lines, or if not each continuation `is_line`.
    """
    written = []

    def rows() -> Iterator[dict[str, str]]:
        for prompt, *pieces in texts:
            if not path.endswith(".jsonl") and ("\n" in prompt or not is_line):  # at the first text
                raise UserError(f"out={path}: a text may have several lines; name it .jsonl, or let stop= be a newline")
            written.append("".join(pieces))
            yield {"text": prompt + written[-1]}

    write_rows(path, rows())
    return written


if __name__ == "__main__":
    signals.interruptible()
    run_program(main, SampleConfig)
