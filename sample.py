"""Prints text from a trained model, or how well it predicts a given one, from its snapshot alone.

python sample.py                                            the newest run, its best snapshot
python sample.py prompt="ROMEO:" num_samples=3              what to start from, and how many
python sample.py prompt_file=opening.txt                    the same, from a file; -: standard input
python sample.py max_new_tokens=200 temperature=0.8 top_k=20 top_p=0.95 seed=7 device=cpu
python sample.py run_dir=runs/NAME                          another run
python sample.py snapshot=runs/NAME/gpt_snapshot.pt
python sample.py score=book.txt                             the loss of a text; per_character=FILE

Unless told otherwise, 500 characters at temperature 0.8, drawn among all, with seed 1337; on a GPU
if there is one.
"""

from engine.run import signals

if __name__ == "__main__":
    signals.prepare()

import contextlib
import itertools
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

import torch
import torch.nn.functional as F

from char_dataset import encode
from engine.config.arguments import parse, run_program
from engine.errors import UserError, one_line
from engine.files import atomic_write
from engine.run.directory import choose_snapshot
from engine.run.progress import show_every_character
from engine.run.provenance import CHANGED, model_has_changed
from engine.snapshots.sharded import load_full
from engine.snapshots.snapshot import Snapshot
from engine.text.sources import PROGRESS_S, Source, reading
from model import GPT, GPTConfig

SMALL = 10_000_000  # texts x parameters; below, a second CPU thread won a third or lost a quarter
AT_ONCE = 8192  # characters, with their context, in a batch; a CPU evaluates as many
IN_TRAINING = (4, 32)  # texts and characters of each: several at once cost little more than one


@dataclass
class SampleConfig:
    """What to print; every field is an argument, `name=value`."""

    prompt: str | None = None  # to continue; without: a newline, or the first character
    prompt_file: str | None = None  # it is in this file or URL, as it is; -: in standard input
    num_samples: int = 1  # continuations
    max_new_tokens: int = 500  # characters in each
    temperature: float = 0.8  # logits are divided by it; 0: always the likeliest character
    top_k: int | None = None  # draw among the k likeliest; null: among all
    top_p: float | None = None  # draw among the fewest whose probabilities reach p; null: among all
    seed: int | None = 1337  # of the draw; null: another text every time
    run_dir: str | None = None  # the run; without: the newest under runs/
    snapshot: str | None = None  # a file or URL; without: the best of run_dir, or else its latest
    score: str | None = None  # a file, URL or pattern: print the loss of this text, and no other
    per_character: str | None = None  # a new file: the loss of each character, in lines of JSON
    device: str = "auto"  # cpu, cuda or auto

    def __post_init__(self):
        texts = [n for n in ("prompt", "prompt_file", "score") if getattr(self, n) is not None]
        if len(texts) > 1:
            raise UserError(f"{'= and '.join(texts)}=: give only one of them")
        if self.per_character is not None and self.score is None:
            raise UserError(f"per_character={self.per_character}: needs score=FILE, the text")
        for name in ("num_samples", "max_new_tokens", "top_k"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}={value}: must be at least 1")
        if self.temperature != 0 and not 1e-3 <= self.temperature <= 1e3:
            raise UserError(f"temperature={self.temperature}: must be 0, or from 0.001 to 1000")
        if self.num_samples > 10_000:
            raise UserError(f"num_samples={self.num_samples}: must be at most 10000")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UserError(f"seed={self.seed}: must be at least 0 and below 2^63")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}: must be above 0 and at most 1")

    def draws(self) -> dict[str, Any]:
        """How `GPT.stream` is to draw."""
        return {
            "temperature": self.temperature or 1.0,
            "do_sample": self.temperature > 0,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "seed": self.seed,
        }


def load_model(snapshot: Snapshot, device: str) -> GPT:
    """The trained model of a snapshot, ready to generate. Raises `UserError` for weights that are
    not finite, or of another model.
    """
    model = GPT(GPTConfig.recorded(snapshot.model_config))
    try:
        model.load_state_dict(snapshot.model_state)
    except RuntimeError as error:
        raise UserError(
            "the snapshot's weights are of another model; was model.py changed since? "
            f"{one_line(error)[:300]}"
        ) from error
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise UserError("the snapshot's weights are not finite: the run has diverged; take another")
    return model.to(device).eval()


def is_small(model: GPT, num_texts: int) -> bool:
    """Whether a character of each of so many texts is too little work to share between threads."""
    return num_texts * sum(p.numel() for p in model.parameters()) < SMALL


def choose_device(name: str) -> str:
    """The device that `device=name` means here."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UserError(
            "device=cuda: no GPU that this build of torch can use; set device=cpu or auto"
        )
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"device={name}: must be auto, cpu or cuda")
    return "cuda" if available and name != "cpu" else "cpu"


# --------------------------------------------------------------------------------------------------
# Texts from the model


def sample(config: SampleConfig, snapshot: Snapshot) -> Iterator[Iterable[str]]:
    """`num_samples` texts, prompt included, each in pieces: a single text comes as it is made, the
    prompt and then character by character.

    Several are made in batches of bounded memory. Which text is which follows from the seed and its
    number, not from how many there are, but for rounding (`GPT.stream`).

    Raises `UserError` for a prompt that cannot be read, is empty, or has an unknown character.
    """
    device, vocabulary = choose_device(config.device), snapshot.vocabulary
    prompt = read_prompt(config, vocabulary)
    try:
        ids = encode(prompt, vocabulary).to(device)
    except UserError as error:
        name = "prompt" if config.prompt_file is None else f"prompt_file={config.prompt_file}"
        raise UserError(f"{name}: {error}") from error
    model = load_model(snapshot, device)
    size = max(1, AT_ONCE // model.config.block_size)
    if is_small(model, min(size, config.num_samples)):
        torch.set_num_threads(1)
    for first in range(0, config.num_samples, size):
        made = model.stream(
            ids.expand(min(size, config.num_samples - first), -1),
            config.max_new_tokens,
            first_row=first,
            **config.draws(),
        )
        if config.num_samples == 1:
            yield itertools.chain([prompt], (vocabulary[int(ids)] for ids in made))
        else:
            for row in torch.stack(list(made), dim=1).tolist():
                yield [prompt, *(vocabulary[i] for i in row)]


def read_prompt(config: SampleConfig, vocabulary: str) -> str:
    """The characters to continue, of which there is at least one."""
    if config.prompt_file is None:
        return opening(vocabulary) if config.prompt is None else config.prompt
    name = f"prompt_file={config.prompt_file}"
    if config.prompt_file == "-":
        with reading(name), open(0, "rb", closefd=False) as file:
            prompt = file.read().decode("utf-8-sig")  # as `Source` reads
    else:
        prompt = "".join(Source(config.prompt_file))
    if not prompt:
        raise UserError(f"{name}: is empty; a prompt has at least one character")
    return prompt


def opening(vocabulary: str) -> str:
    """The character that a text without a prompt goes on from."""
    return "\n" if "\n" in vocabulary else vocabulary[0]


def draw(model: GPT, vocabulary: str, device: torch.device) -> list[str]:
    """A few short texts from a model that is being trained on `device`, always with the same seed.

    The global random state, the threads and the model are left as they are. Every rank of a model
    that is sharded must call it.
    """
    number, characters = IN_TRAINING
    first = torch.tensor([[vocabulary.index(opening(vocabulary))]], device=device)
    was_training, threads = model.training, torch.get_num_threads()
    if is_small(model, number):
        torch.set_num_threads(1)
    model.eval()
    try:
        with torch.no_grad():
            if not model(first)[0].isfinite().all():  # a GPU that draws from nan is of no more use
                return ["(nothing: the model's output is not finite)"]
        out = model.generate(
            first.expand(number, -1),
            characters,
            temperature=SampleConfig.temperature,
            do_sample=True,
            seed=SampleConfig.seed,
        )
    finally:
        model.train(was_training)
        torch.set_num_threads(threads)
    return ["".join(vocabulary[i] for i in row[1:]) for row in out.tolist()]


# --------------------------------------------------------------------------------------------------
# The loss of a text


def score(config: SampleConfig, snapshot: Snapshot) -> tuple[float, int]:
    """The loss of the text at `config.score`, as `Trainer.evaluate` has it of the held-out text:
    every character but the first is scored once, in windows laid end to end.

    Returns (nats per character, characters scored). Where `config.per_character` names a file, it
    gets a line `{"character": "e", "loss": 1.25}` for each of them, in nats, in their order.

    Raises `UserError` for a text that cannot be read, has an unknown character or fewer than two,
    and for a file that already exists or cannot be written.
    """
    total, count, said = 0.0, 0, time.monotonic()
    with contextlib.ExitStack() as stack:
        path = config.per_character
        file = stack.enter_context(new_file(path)) if path is not None else None
        for text, losses in score_batches(config, snapshot):
            total += sum(losses)
            count += len(text)
            if time.monotonic() - said > PROGRESS_S:
                print(f"[{count:,} characters: {total / count:.4f}]", file=sys.stderr)
                said = time.monotonic()
            if file is not None:
                for character, loss in zip(text, losses, strict=True):
                    file.write(json.dumps({"character": character, "loss": loss}) + "\n")
    return total / count, count


def score_batches(config: SampleConfig, snapshot: Snapshot) -> Iterator[tuple[str, list[float]]]:
    """The characters of the text and the loss of each, in nats, in batches of whole windows.

    Computes in the type that the run does, so that the figure is the run's, also where that type is
    slow on this device.
    """
    device = choose_device(config.device)
    model = load_model(snapshot, device)
    assert config.score is not None
    block_size = model.config.block_size
    dtype = getattr(torch, snapshot.choices.get("amp_dtype", "float32"))
    precision = torch.autocast(device, dtype=dtype, enabled=dtype is not torch.float32)
    num_characters = max(1, AT_ONCE // block_size) * block_size
    for ids in read_batches(config.score, snapshot.vocabulary, num_characters):
        ids = ids.to(device)
        targets = ids[1:]
        x = F.pad(ids[:-1], (0, -len(targets) % block_size)).view(-1, block_size)
        with torch.no_grad(), precision:
            logits = model(x)[0].flatten(0, 1)[: len(targets)]
        losses = F.cross_entropy(logits, targets, reduction="none")
        yield "".join(snapshot.vocabulary[i] for i in targets.tolist()), losses.tolist()


def read_batches(path: str, vocabulary: str, num_characters: int) -> Iterator[torch.Tensor]:
    """The ids of the text at `path`, int64 of shape (num_characters + 1,), fewer at the end; each
    batch begins with the character that ended the one before. The text is never held whole.
    """
    ids, position = torch.empty(0, dtype=torch.int64), 0
    for piece in Source(path):
        try:
            ids = torch.cat((ids, encode(piece, vocabulary, position)))
        except UserError as error:
            raise UserError(f"score={path}: {error}") from error
        position += len(piece)
        while len(ids) > num_characters:
            yield ids[: num_characters + 1]
            ids = ids[num_characters:]
    if position < 2:
        raise UserError(
            f"score={path}: has {position} characters; it takes 2, as the first is not scored"
        )
    if len(ids) > 1:
        yield ids


@contextlib.contextmanager
def new_file(path: str) -> Iterator[TextIO]:
    """A file to write, which appears at `path` when it is whole."""
    if os.path.lexists(path):
        raise UserError(f"per_character={path}: already exists; give another name, or remove it")
    try:
        with atomic_write(path) as file:
            yield file
    except OSError as error:
        raise UserError(f"per_character={path}: cannot be written: {one_line(error)}") from error


# --------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # python sample.py | head
    show_every_character()
    try:
        config = parse(SampleConfig, arguments)
        path = choose_snapshot(config.snapshot, config.run_dir)
        snapshot = load_full(path)
        print(f"[{path}, {snapshot}]", file=sys.stderr)
        if model_has_changed(path):
            print(f"[{CHANGED}]", file=sys.stderr)
        if config.score is None:
            print_texts(sample(config, snapshot))
        else:
            print_score(*score(config, snapshot))
    except KeyboardInterrupt:
        print(file=sys.stderr)  # the shell goes on in a line of its own
        return 128 + signal.SIGINT
    return 0


def print_texts(texts: Iterable[Iterable[str]]) -> None:
    """Prints texts one after another: to a terminal in the pieces in which they come, and otherwise
    each as a whole.
    """
    for i, text in enumerate(texts):
        if i:
            print("-" * 40)
        for piece in text if sys.stdout.isatty() else ["".join(text)]:
            print(piece, end="", flush=True)
        print()


def print_score(loss: float, count: int) -> None:
    print(f"characters scored   {count}")
    print(f"nats per character  {loss:.6f}")
    print(f"bits per character  {loss / math.log(2):.6f}")
    print(f"perplexity          {math.exp(loss):.6f}")


if __name__ == "__main__":
    signals.interruptible()
    run_program(main)
