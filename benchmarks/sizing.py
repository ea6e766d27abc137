"""The grid of runs behind the rule of engine/sizing/rule.py.

    python benchmarks/sizing.py texts=DIRECTORY             trains what sizing.jsonl does not have yet
    python benchmarks/sizing.py texts=DIRECTORY workers=2   in two processes of one thread each
    python benchmarks/sizing.py texts=DIRECTORY seeds=3     the choice, the best other and the default recipe again
    python benchmarks/sizing.py report=true                 prints the table of sizing.md

A cell is a text, DIRECTORY/NAME.txt, truncated to a length, and a time. Each cell trains the rule's choice, the choice
with one setting changed, and the default recipe for the same time. The best snapshot is scored on up to 100,000
characters that follow, which no choice used. Time is counted in characters of the reference model, not measured, so
that losses do not depend on the machine.
"""

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


import main
import sample
from config import Config, as_config
from engine.config.arguments import parse, run_program
from engine.errors import UserError
from engine.sizing import rule
from engine.sizing.choose import CHOSEN, choose_model, choose_rates, step_characters, useful_steps
from engine.snapshots.sharded import load_full

RESULTS = Path(__file__).resolve().parent / "sizing.jsonl"
SCORED = 100_000  # characters

# Text, which benchmarks/texts.py writes, characters, and the time: millions of characters of the reference model. 1.1
# million take half a minute, start included, on two cores of a Zen 4; 3.3 million one and a half.
CELLS = [
    ("nl", 10_000, 0.5),
    ("pl", 10_000, 1.1),
    ("it", 30_000, 1.1),
    ("unicode", 30_000, 1.1),
    ("ko", 30_000, 1.1),
    ("pt_BR", 100_000, 1.1),
    ("cpp", 100_000, 1.1),
    ("nl", 300_000, 0.5),
    ("pl", 300_000, 1.1),
    ("sv", 1_000_000, 1.1),
    ("el", 300_000, 3.3),
    ("cpp", 1_000_000, 3.3),
    ("cpp", 20_000_000, 3.3),
]
# Layers that are tried beside the chosen ones.
DEPTHS = {1: (2,), 2: (1, 3), 3: (2, 4), 4: (3, 6), 6: (4, 8), 8: (6,)}


@dataclass
class Arguments:
    """The arguments, `name=value`."""

    texts: str | None = None  # a directory of .txt files
    seeds: int = 1  # from the second on: the choice, the default recipe, and the best other of the first seed
    workers: int = 1  # processes
    report: bool = False  # print the table instead


Line = dict[str, Any]  # of sizing.jsonl: a cell, a seed, a kind, the fields of `CHOSEN` and the results


def chosen(text: str, characters: int, millions: float) -> Line:
    """The rule's choice."""
    config = as_config(main.configure("data=text", f"data.path={text}", "trainer.max_minutes=1"))
    config.model.vocab_size = len(set(Path(text).read_text("utf-8")[:characters]))
    # The reference model trains on a character per second.
    choose_model(config, characters, time.monotonic() + 1e6 * millions, step_characters)
    trained = 1e6 * millions / cost(config)
    config.trainer.max_steps = min(round(trained / step_characters(config)), useful_steps(config, characters))
    choose_rates(config, characters)
    return values(config)


def values(config: Config) -> Line:
    """The fields of `CHOSEN` with their values."""
    return {key: attrgetter(key)(config) for key in CHOSEN}


def neighbours(choice: Line) -> list[Line]:
    """The choice with one setting changed; the batch follows the context, heads and rate the width."""
    rate, decay, ngram_decay = (
        choice[f"optimizer.{name}"] for name in ("learning_rate", "weight_decay", "ngram_decay")
    )
    width, dropout = choice["model.n_embd"], choice["model.resid_pdrop"]
    context, batch = choice["data.block_size"], choice["trainer.batch_size"]
    changes = [{"data.block_size": 2 * context, "trainer.batch_size": max(1, round(batch / 2))}]
    changes += [{"model.n_layer": layers} for layers in DEPTHS[choice["model.n_layer"]]]
    for other in {32 * round(width * factor / 32) for factor in (0.7, 1.4)}:  # others have no kernels
        heads = other // (32 if other % 64 or other < 128 else 64)
        own = rule.rounded(rate * (width / other) ** 0.5)
        changes.append({"model.n_embd": other, "model.n_head": heads, "optimizer.learning_rate": own})
    changes += [{"optimizer.learning_rate": rule.rounded(factor * rate)} for factor in (0.6, 1.7)]
    changes += [{"optimizer.weight_decay": rule.rounded(factor * decay)} for factor in (0.5, 2)]
    if dropout:
        changes += [{"model.embd_pdrop": value, "model.resid_pdrop": value} for value in (0.0, 2 * dropout)]
    if choice["model.ngram_rows"]:
        changes += [{"optimizer.ngram_decay": rule.rounded(factor * ngram_decay)} for factor in (0.5, 2)]
    return [choice | change for change in changes]


def cost(config: Config) -> float:
    """Seconds for a character of training, relative to the reference model. Fitted to 16 models on a core of a Zen 4,
    within 6 %.
    """
    model, width = config.model, config.model.n_embd
    in_layers = model.n_layer * (72 * width**2 + 12 * width * config.data.block_size) / 6.4e6
    narrow = 1.3 if width <= 64 else 1.1 if width < 128 else 1.0
    small_steps = (3072 / step_characters(config)) ** 0.22
    dropout = 1.05 if model.resid_pdrop else 1.0
    return in_layers * narrow * small_steps * dropout + width * (0.13 / 128 + 6 * model.vocab_size / 6.4e6)


def train(job: tuple[str, Line]) -> Line:
    """Trains a line of sizing.jsonl on the first characters of a text; `job`: path of the text, and the line. Returns
    the line with its results: the steps, the lowest held-out loss, and the loss of the best snapshot on what follows,
    in nats per character.
    """
    text, line = job
    content, characters = Path(text).read_text("utf-8"), line["characters"]
    known = set(content[:characters])
    rest = "".join(c for c in content[characters:][: 2 * SCORED] if c in known)[:SCORED]
    assert len(rest) > SCORED / 2
    own = ["experiment=shakespeare_cpu"]
    if line["kind"] != "recipe":
        own = ["experiment=auto", "model.model_type=null", *(f"{key}={line[key]}" for key in CHOSEN)]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text.txt").write_text(content[:characters], "utf-8")
        Path(folder, "rest.txt").write_text(rest, "utf-8")
        own += ["data=text", f"data.path={folder}/text.txt", "trainer.max_minutes=null"]
        config = as_config(main.configure(*own, "trainer.max_steps=1"))
        config.model.vocab_size = len(known)
        steps = round(1e6 * line["millions"] / cost(config) / step_characters(config))
        if line["kind"] != "recipe":
            steps = min(steps, useful_steps(config, characters))
        composed = main.configure(
            *(*own, f"trainer.max_steps={steps}", f"trainer.eval_every_steps={max(1, steps // 10)}"),
            *("trainer.save_every_steps=null", "samples=false", "report=false", "trainer.trackers=[]"),
            *("trainer.threads=1", "trainer.device=cpu", f"trainer.seed={line['seed']}"),
            *(f"run_dir={folder}/run", "trainer.log_every_steps=1000000"),
        )
        main.train(composed)
        metrics = [json.loads(each) for each in open(f"{folder}/run/metrics.jsonl")]
        scored = sample.SampleConfig(score=f"{folder}/rest.txt", device="cpu")
        loss = sample.score(scored, load_full(f"{folder}/run/gpt_snapshot.best.pt")).mean().item()
    held_out = min(each["loss"] for each in metrics if each["split"] == "val")
    return line | {"steps": steps, "held_out": round(held_out, 4), "score": round(loss, 4)}


def lines_of(cell: Line, text: str, seeds: int, done: list[Line]) -> list[Line]:
    """The lines of a cell, without their results."""
    choice = chosen(text, cell["characters"], cell["millions"])
    recipe = values(as_config(main.configure("experiment=shakespeare_cpu")))
    again = [choice | {"kind": "choice"}, recipe | {"kind": "recipe"}]
    first = again + [other | {"kind": "other"} for other in neighbours(choice)]
    best = best_other([line for line in done if line.items() >= cell.items()], choice)
    if best is not None:
        again.append({key: best[key] for key in CHOSEN} | {"kind": "other"})
    return [cell | {"seed": 1} | line for line in first] + [
        cell | {"seed": seed} | line for seed in range(2, seeds + 1) for line in again
    ]


def is_done(line: Line, done: list[Line]) -> bool:
    """Whether a line has results; a choice may have been another setting of an earlier rule, and the reverse."""
    if line["kind"] != "recipe":
        line = {key: value for key, value in line.items() if key != "kind"}
    return any(each.items() >= line.items() for each in done)


def best_other(lines: list[Line], choice: Line) -> Line | None:
    """Of the lines of a cell with the first seed, the best that is neither the `choice` nor the default recipe."""
    others = [line for line in lines if line["seed"] == 1 and line["kind"] != "recipe"]
    others = [line for line in others if any(line[key] != choice[key] for key in CHOSEN)]
    return min(others, key=lambda line: line["score"], default=None)


def program(arguments: list[str]) -> None:
    config = parse(Arguments, arguments)
    done = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    if config.report:
        report(done)
        return
    if config.texts is None:
        raise UserError("texts: missing; give texts=DIRECTORY")
    jobs = []
    for name, characters, millions in CELLS:
        text, cell = f"{config.texts}/{name}.txt", {"text": name, "characters": characters, "millions": millions}
        jobs += [(text, line) for line in lines_of(cell, text, config.seeds, done) if not is_done(line, done)]
    os.environ["OMP_NUM_THREADS"] = "1"
    with multiprocessing.get_context("spawn").Pool(config.workers, maxtasksperchild=1) as pool:
        for result in pool.imap(train, jobs):
            with open(RESULTS, "a") as file:
                file.write(json.dumps(result) + "\n")


def report(done: list[Line]) -> None:
    """Prints for each cell the rule's newest choice and its score, the best other of the first seed, by what it
    changes, and the score of the newest default recipe: means over the seeds, whose number is in brackets.
    """
    print("| text | time | choice | its score | best of the others | default recipe |")
    print("|---|---|---|---|---|---|")

    follows = ("model.n_head", "model.embd_pdrop", "data.train_split")  # from the others

    def mean(lines: list[Line], settings: Line) -> str:
        same = [line for line in lines if all(line[key] == settings[key] for key in CHOSEN)]
        scores = {line["seed"]: line["score"] for line in same}.values()
        return f"{statistics.mean(scores):.3f} ({len(scores)})"

    def shown(settings: Line, keys: Iterable[str]) -> str:
        return ", ".join(f"{key.split('.')[1]} {settings[key]:g}" for key in keys if key not in follows)

    for name, characters, millions in CELLS:
        cell = {"text": name, "characters": characters, "millions": millions}
        lines = [line for line in done if line.items() >= cell.items()]
        recipes = [line for line in lines if line["kind"] == "recipe"]
        trained = [line for line in lines if line["kind"] != "recipe"]
        choices = [line for line in trained if line["kind"] == "choice"]
        best = best_other(lines, choices[-1]) if choices else None
        if best is None or not recipes:
            continue
        choice = choices[-1]
        other = shown(best, (key for key in CHOSEN if best[key] != choice[key]))
        print(
            f"| {name}, {characters:,} | {millions} | {shown(choice, CHOSEN)} | {mean(trained, choice)} "
            f"| {mean(trained, best)}: {other} | {mean(recipes, recipes[-1])} |"
        )


if __name__ == "__main__":
    run_program(program, Arguments)
