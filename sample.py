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
python sample.py num_samples=20 stop=$'\\n' copied=true      one line each, and the share that is copied
"""

from engine import signals

if __name__ == "__main__":
    signals.prepare()

import codecs
import itertools
import logging
import math
import operator
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from char_dataset import CharDataset, encode
from engine.config.arguments import Text, parse, run_program
from engine.config.schema import as_typed
from engine.errors import UserError, check_only_one, check_range, one_line
from engine.generation import default_prompt, enough_threads
from engine.machine.hardware import check_device
from engine.precision import Precision
from engine.run.directory import choose_snapshots
from engine.snapshots.sharded import load_full
from engine.snapshots.snapshot import CHANGED, Snapshot, has_changed, probe_logits
from engine.text.documents import from_text, read_text
from engine.text.sources import real_files
from model import GPT, GPTConfig

log = logging.getLogger("gpt")

BATCH_CHARACTERS = 8192  # per batch, context included
COPIED = 32  # length of a copied substring, characters


@dataclass
class SampleConfig:
    """Command-line arguments, `name=value`."""

    prompt: Text | None = None  # text to continue; by default a newline, or the first character
    prompt_file: str | None = None  # file or URL of the prompt; -: standard input
    num_samples: int = 1  # number of texts
    max_new_tokens: int = 500  # characters per text, at most
    stop: Text | None = None  # end a text before this string; by default never
    copied: bool = False  # print the share of the texts that is copied from the training text
    temperature: float = 0.8  # divides the logits; 0: greedy
    top_k: int | None = None  # draw among the k likeliest; null: among all
    top_p: float | None = None  # draw among the fewest whose probabilities reach p; null: among all
    seed: int | None = 1337  # null: different samples every time
    run_dir: str | None = None  # the run; null: the newest under runs/
    snapshot: str | None = None  # a file, URL or run; null: the best of run_dir, or its latest
    score: str | None = None  # a file, URL or pattern: print the loss of this text instead
    snapshots: list[str] | None = None  # for score=: several, [a.pt,b.pt], alone and as an ensemble
    stride: int | None = None  # for score=: characters between windows; null: the context
    device: str = "auto"  # cpu, cuda, auto, or another torch device: mps, xpu

    def __post_init__(self):
        check_only_one(prompt=self.prompt, prompt_file=self.prompt_file, score=self.score)
        if self.score is not None:
            for name in ["num_samples", "max_new_tokens", "stop", "copied", "temperature", "top_k", "top_p", "seed"]:
                if (value := getattr(self, name)) != getattr(SampleConfig, name):
                    raise UserError(f"{name}={as_typed(value)}: has no effect with score=; leave it out")
        for name in ("snapshots", "stride"):
            if getattr(self, name) is not None and self.score is None:
                raise UserError(f"{name}= requires score=")
        check_range("num_samples", self.num_samples, 1, 10_000)
        check_range("max_new_tokens", self.max_new_tokens, 1)
        if self.temperature != 0 and not 1e-3 <= self.temperature <= 1e3:
            raise UserError(f"temperature={self.temperature}: must be 0, or from 0.001 to 1000")
        check_range("top_k", self.top_k, 1)
        check_range("top_p", self.top_p, above=0, high=1)
        check_range("seed", self.seed, 0, 2**63 - 1)
        check_device("device", self.device)

    def options(self) -> dict[str, Any]:
        """Keyword arguments for `GPT.stream`."""
        is_drawn = self.temperature > 0
        temperature = self.temperature if is_drawn else 1.0
        return dict(temperature=temperature, do_sample=is_drawn, top_k=self.top_k, top_p=self.top_p, seed=self.seed)


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
    """Yields `num_samples` texts as iterables: the prompt, then characters as they are drawn. For a given seed,
    samples do not depend on `num_samples`, up to rounding.
    """
    vocabulary, encoding = snapshot.vocabulary, snapshot.encoding
    prompt, ids = read_prompt(config, snapshot)
    stop = from_text(config.stop or "", encoding)
    encode_setting(f"stop={config.stop!r}", stop, snapshot)  # raises for what is never drawn
    model = load_model(snapshot, config.device)
    ids = ids.to(model.tok_emb.weight.device)
    batch_size = min(config.num_samples, max(1, BATCH_CHARACTERS // model.config.block_size))
    with enough_threads(model, batch_size):
        for first in range(0, config.num_samples, batch_size):
            start = ids.expand(min(batch_size, config.num_samples - first), -1)
            new = model.stream(start, config.max_new_tokens, first_row=first, **config.options())
            # All texts are drawn together; the first is yielded while it is drawn, and the others wait here.
            streams = itertools.tee((ids_of_all.tolist() for ids_of_all in new), len(start))
            for i, stream in enumerate(streams):
                drawn = map(vocabulary.__getitem__, map(operator.itemgetter(i), stream))
                pieces: Iterable[str] = itertools.chain([prompt], cut_at_stop(drawn, stop))
                if encoding == "bytes":
                    content = (piece.encode("latin-1") for piece in pieces)
                    pieces = codecs.iterdecode(content, "utf-8", "replace")
                yield pieces


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


def training_text(snapshot: Snapshot) -> str:
    """The text that a model was trained on. Raises `UserError` if it is missing or has changed."""
    try:
        data = CharDataset(snapshot.data_config())
    except UserError as error:
        raise UserError(f"copied=true: needs the training text, as named when training started: {error}") from error
    if data.digest != snapshot.text_digest:
        raise UserError(f"copied=true: {data.config.path} is not the text that was trained on")
    train, _ = data.split()
    return train.decode(train.data.tolist())


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


def read_prompt(config: SampleConfig, snapshot: Snapshot) -> tuple[str, torch.Tensor]:
    """The characters to continue, at least one, and their ids."""
    encoding = snapshot.encoding
    name = "prompt" if config.prompt_file is None else f"prompt_file={config.prompt_file}"
    try:
        if config.prompt_file == "-":
            content = open(0, "rb", closefd=False).read()  # standard input, which may be closed
            prompt = content.decode("latin-1" if encoding == "bytes" else "utf-8-sig")
        elif config.prompt_file is not None:
            prompt = read_text(config.prompt_file, snapshot.data_config())
        elif config.prompt is not None:
            prompt = from_text(config.prompt, encoding)
        else:
            prompt = default_prompt(snapshot.vocabulary)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name}: cannot be read: {one_line(error)}") from error
    if not prompt:
        raise UserError(f"{name}: is empty; a prompt has at least one character")
    return prompt, encode_setting(name, prompt, snapshot)


def encode_setting(name: str, text: str, snapshot: Snapshot) -> torch.Tensor:
    """The ids of the text that a setting gives. Raises `UserError`, naming the setting, for an unknown character."""
    try:
        return encode(text, snapshot.vocabulary, snapshot.encoding)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error


def score(config: SampleConfig, *snapshots: Snapshot) -> torch.Tensor:
    """Losses in nats, float64 of shape (models, characters), of every character but the first of the text at
    `config.score`: a row for each of `snapshots` and, if several, one more for their ensemble. They are computed in
    each run's dtype, and without `config.stride` in its windows: the mean is what the run's evaluation gives.

    Sliding-window evaluation (Baevski and Auli, 2019): windows start `config.stride` characters apart; each
    but the first scores only its last `stride` characters, which see more than `block_size - stride`
    characters. With the default stride, `block_size`, windows do not overlap.

    Ensemble (Hansen and Salamon, 1990): the probability of a character is the mean of the models'. The
    `snapshots` must have the same vocabulary and context.
    """
    assert config.score is not None
    models = [load_model(snapshot, config.device) for snapshot in snapshots]
    block_size, device = models[0].config.block_size, models[0].tok_emb.weight.device
    stride = block_size if config.stride is None else config.stride
    if not 1 <= stride <= block_size:
        raise UserError(f"stride={stride}: must be from 1 to the model's context, {block_size}")
    types = [snapshot.choices.get("amp_dtype", "float32") for snapshot in snapshots]
    precisions = [Precision(device.type, name).autocast() for name in types]
    text = read_text(config.score, snapshots[0].data_config())
    if len(text) < 2:
        raise UserError(f"score={config.score}: characters: {len(text)}; at least 2 are needed")
    ids = encode_setting(f"score={config.score}", text, snapshots[0])
    overlap, end = block_size - stride, len(ids) - 1  # the last character has no next one
    starts = torch.arange(0, max(end - overlap, 1), stride)[:, None]
    batches = []
    for first in starts.split(max(1, BATCH_CHARACTERS // block_size)):
        positions = first + torch.arange(block_size)  # (windows, block_size)
        is_new = (first == 0) | (positions >= first + overlap)  # not scored by an earlier window
        is_new &= positions < end
        x = ids[positions.clamp(max=end - 1)].to(device)
        targets = ids[positions[is_new] + 1].to(device)
        losses = []
        for model, precision in zip(models, precisions, strict=True):
            with torch.no_grad(), precision:
                logits = model(x)[0][is_new.to(device)]
            each = F.cross_entropy(logits, targets, reduction="none")
            losses.append(each.cpu().double())  # not every device has float64
        if len(models) > 1:  # -log of the mean probability
            losses.append(math.log(len(models)) - torch.stack(losses).neg().logsumexp(dim=0))
        batches.append(torch.stack(losses))
    return torch.cat(batches, dim=1)


def print_score(config: SampleConfig, snapshots: dict[str, Snapshot]) -> None:
    """Prints the loss of the text at `config.score`, for each of `snapshots`, by path, and their ensemble. Raises
    `UserError`, naming two of them, if their vocabularies or contexts differ.
    """
    first, *_ = snapshots
    unit, vocabulary = snapshots[first].unit, (snapshots[first].vocabulary, snapshots[first].encoding)
    for path, snapshot in snapshots.items():
        if (snapshot.vocabulary, snapshot.encoding) != vocabulary:
            raise UserError(f"snapshots=: {path} has another vocabulary than {first}")
        if snapshot.model_config.get("block_size") != snapshots[first].model_config.get("block_size"):
            raise UserError(f"snapshots=: {path} has another context than {first}")
    assert config.score is not None
    scored = real_files(config.score)
    if any(scored & real_files(snapshot.config.get("data", {}).get("path", [])) for snapshot in snapshots.values()):
        note = "this is text of the run, which trained on most of its text; its held-out loss is over the rest"
        print(f"[{note}]", file=sys.stderr)
    losses = score(config, *snapshots.values())
    *each, loss = losses.mean(dim=1).tolist()
    print(f"{unit}s scored".ljust(19), losses.size(1))
    if config.stride is not None:
        print("stride".ljust(19), config.stride)
    if each:
        for path, its_loss in zip(snapshots, each, strict=True):
            print(f"{path}: {its_loss:.6f} nats per {unit}")
        print(f"ensemble of {len(each)} snapshots")
    print(f"nats per {unit}".ljust(19), f"{loss:.6f}")
    print(f"bits per {unit}".ljust(19), f"{loss / math.log(2):.6f}")
    print("perplexity".ljust(19), f"{math.exp(loss):.6f}")


def main(arguments: list[str]) -> None:
    config = parse(SampleConfig, arguments)
    paths = choose_snapshots(config.snapshots, config.snapshot, config.run_dir)
    snapshots = {path: load_full(path) for path in paths}
    for path, snapshot in snapshots.items():
        print(f"[{path}, {snapshot}]", file=sys.stderr)
    if config.score is not None:
        print_score(config, snapshots)
        return
    [snapshot] = snapshots.values()
    source = training_text(snapshot) if config.copied else ""
    texts = print_texts(sample(config, snapshot), "" if config.stop == "\n" else "-" * 40)
    if config.copied:
        share = copied_share(texts, source)
        where = f"from the training text, in pieces of {COPIED} characters or whole lines"
        print(f"[{share:.1%} of this is copied {where}]", file=sys.stderr)


def print_texts(texts: Iterable[Iterable[str]], separator: str) -> list[str]:
    """Prints texts, on a terminal character by character, with a line between them if `separator` is not empty;
    returns what follows the prompt of each.
    """
    printed = []
    for i, text in enumerate(texts):
        if i and separator:
            print(separator)
        pieces: list[str] = []
        for piece in text:
            if pieces or piece != "\n":  # the default prompt
                print(piece, end="", flush=sys.stdout.isatty())
            pieces.append(piece)
        print(flush=True)
        printed.append("".join(pieces[1:]))
    return printed


if __name__ == "__main__":
    signals.interruptible()
    run_program(main, SampleConfig)
