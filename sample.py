"""Prints text from a trained model, from its snapshot alone.

python sample.py                                            the newest run, its best snapshot
python sample.py prompt="ROMEO:" num_samples=3              what to start from, and how many
python sample.py max_new_tokens=200 temperature=0.8 top_k=20 top_p=0.95 seed=7
python sample.py run_dir=runs/shakespeare_cpu               another run
python sample.py snapshot=runs/shakespeare_cpu/gpt_snapshot.pt
"""

import signal
import sys
from dataclasses import dataclass

import torch

from arguments import parse, run_program
from char_dataset import encode
from errors import UserError
from history import choose_snapshot
from model import GPT, GPTConfig
from sharded_snapshot import read_whole
from snapshot import Snapshot

SMALL = 10_000_000  # parameters; below, one CPU thread is as fast as several, and calmer
IN_TRAINING = (4, 32)  # texts and characters of each: several at once cost little more than one


@dataclass
class SampleConfig:
    """What to print; every field is an argument, `name=value`."""

    prompt: str | None = None  # to continue; without: a newline, or the first character
    num_samples: int = 1  # continuations
    max_new_tokens: int = 500  # characters in each
    temperature: float = 0.8  # logits are divided by it; 0: always the likeliest character
    top_k: int | None = None  # draw among the k likeliest; null: among all
    top_p: float | None = None  # draw among the fewest whose probabilities reach p; null: among all
    seed: int | None = 1337  # of the draw; null: another text every time
    run_dir: str | None = None  # the run; without: the newest under runs/
    snapshot: str | None = None  # a file or URL; without: the best of run_dir, or else its latest
    device: str = "auto"  # cpu, cuda or auto

    def __post_init__(self):
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


def load_model(snapshot: Snapshot, device: str) -> GPT:
    """The trained model of a snapshot, ready to generate."""
    model = GPT(GPTConfig(**snapshot.config["model"]))
    model.load_state_dict(snapshot.model_state)
    return model.to(device).eval()


def sample(config: SampleConfig, snapshot: Snapshot) -> list[str]:
    """`num_samples` texts, prompt included. Raises `UserError` for a prompt with an unknown
    character.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise UserError(
            "device=cuda: no GPU that this build of torch can use; set device=cpu or auto"
        )
    if config.device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device={config.device}: must be auto, cpu or cuda")
    device = "cuda" if available and config.device != "cpu" else "cpu"
    stoi = {character: i for i, character in enumerate(snapshot.vocabulary)}
    prompt = opening(snapshot.vocabulary) if config.prompt is None else config.prompt
    try:
        ids = encode(prompt, stoi).to(device)
    except UserError as error:
        raise UserError(f"prompt: {error}") from error
    model = load_model(snapshot, device)
    if sum(p.numel() for p in model.parameters()) < SMALL:
        torch.set_num_threads(1)  # a character at a time is too little to share
    out = model.generate(
        ids.expand(config.num_samples, -1),
        config.max_new_tokens,
        temperature=config.temperature or 1.0,
        do_sample=config.temperature > 0,
        top_k=config.top_k,
        top_p=config.top_p,
        seed=config.seed,
    )
    return ["".join(snapshot.vocabulary[i] for i in row) for row in out.tolist()]


def opening(vocabulary: str) -> str:
    """The character that a text without a prompt goes on from."""
    return "\n" if "\n" in vocabulary else vocabulary[0]


def draw(model: GPT, vocabulary: str, device: torch.device) -> list[str]:
    """A few short texts from a model that is being trained on `device`, always with the same seed.

    The global random state, the threads and the model are left as they are. Every rank of a model
    that is shared out must call it.
    """
    number, characters = IN_TRAINING
    first = torch.tensor([[vocabulary.index(opening(vocabulary))]], device=device)
    was_training, threads = model.training, torch.get_num_threads()
    if sum(p.numel() for p in model.parameters()) < SMALL:
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


def main(arguments: list[str]) -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # python sample.py | head
    config = parse(SampleConfig, arguments)
    path = choose_snapshot(config.snapshot, config.run_dir)
    snapshot = read_whole(path)
    loss = f", held-out loss {snapshot.loss:.4f}" if snapshot.loss is not None else ""
    print(f"[{path}, step {snapshot.step}{loss}]", file=sys.stderr)
    for i, text in enumerate(sample(config, snapshot)):
        print("-" * 40 + "\n" if i else "", text, sep="")


if __name__ == "__main__":
    run_program(main)
