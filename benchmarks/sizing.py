"""The grid of runs that the rule of engine/sizing/rule.py is fitted to.

    python benchmarks/sizing.py texts=DIRECTORY               trains what sizing.jsonl does not have yet
    python benchmarks/sizing.py texts=DIRECTORY workers=2     in two processes of one thread each
    python benchmarks/sizing.py texts=DIRECTORY unseen=true   the same on texts that the rule was not fitted to
    python benchmarks/sizing.py texts=DIRECTORY seeds=3       the choice, the best other and the default recipe again
    python benchmarks/sizing.py report=true                   prints the table of sizing.md

A cell is a text, DIRECTORY/NAME.txt, truncated to a length, and a time. Each cell trains the rule's choice, the default
recipe for the same time, and the choice with one setting changed; the best snapshot is scored on up to 100,000
characters that follow, which no choice used. Time is counted in characters of the reference model, not measured, so
that losses do not depend on the machine.
"""

import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import main
import sample
from config import Config, validate
from engine.config.arguments import parse, run_program
from engine.errors import UserError
from engine.parallel.distributed import World
from engine.sizing import rule
from engine.sizing.choose import choose_model, choose_rates
from engine.sizing.draft import Draft
from engine.snapshots.sharded import load_full

RESULTS = Path(__file__).resolve().parent / "sizing.jsonl"
SCORED = 100_000  # characters

# Text, which benchmarks/texts.py writes, characters, and the time: millions of characters of the reference model. 1.1
# million took half a minute, start included, on two cores of a Zen 4; 3.3 million one and a half, 11 million five.
CELLS = [
    ("man", 1_000_000, 0.3),
    ("pl", 10_000, 1.1),
    ("it", 30_000, 1.1),
    ("ko", 30_000, 1.1),
    ("man", 100_000, 1.1),
    ("tr", 300_000, 1.1),
    ("el", 300_000, 3.3),
    ("it", 1_000_000, 3.3),
    ("man", 5_800_000, 3.3),
    ("dictionary", 20_000_000, 3.3),
    ("dictionary", 2_000_000, 11.0),
]
# Texts that no choice was made by.
UNSEEN = [
    ("nl", 10_000, 0.5),
    ("sv", 30_000, 1.1),
    ("pt_BR", 100_000, 1.1),
    ("cs", 300_000, 1.1),
    ("vi", 1_000_000, 1.1),
]
FACTORS = {"context": (2,), "width": (0.7, 1.4), "rate": (0.6, 1.7), "decay": (0.5, 2)}
DEPTHS = {1: (2,), 2: (1, 3), 3: (2, 4), 4: (3, 6), 6: (4, 8), 8: (6,)}  # layers that are tried beside the chosen ones


@dataclass
class Arguments:
    """The arguments, `name=value`."""

    texts: str | None = None  # a directory of .txt files
    unseen: bool = False  # the cells of `UNSEEN` instead of `CELLS`
    seeds: int = 1  # from the second on: the choice, the default recipe and the best other
    workers: int = 1  # processes
    report: bool = False  # print the table instead


Settings = dict[str, Any]


def composed(text: str, *overrides: str) -> Config:
    return validate(main.configure("data=text", f"data.path={text}", *overrides))


class Reference:
    """Instead of a `Trial`: the reference model trains on a character per second, for so many `characters`."""

    world = World.alone(torch.device("cpu"))

    def __init__(self, characters: float):
        self.characters = characters

    def seconds_left(self) -> float:
        return self.characters

    def seconds_per_step(self, draft: Draft) -> float:
        return draft.step_characters


def chosen(text: str, characters: int, millions: float) -> Settings:
    """The rule's choice."""
    config: Any = composed(text, "trainer.max_minutes=1")
    config.model.vocab_size = len(set(Path(text).read_text("utf-8")[:characters]))
    draft = Draft(config, characters)
    choose_model(draft, Reference(1e6 * millions))
    settings: Settings = {
        "layers": config.model.n_layer,
        "width": config.model.n_embd,
        "heads": config.model.n_head,
        "context": config.data.block_size,
        "batch": draft.step_characters,
        "dropout": config.model.resid_pdrop,
        "ngrams": config.model.ngram_rows,
        "split": config.data.train_split,
    }
    trained = 1e6 * millions / cost(settings, config.model.vocab_size)
    trained = min(trained, rule.USEFUL_PASSES * characters * config.data.train_split)
    config.trainer.max_steps = round(trained / settings["batch"])
    choose_rates(draft)
    return settings | {
        "decay": config.optimizer.weight_decay,
        "rate": config.optimizer.learning_rate,
        "ngram_decay": config.optimizer.ngram_decay if config.model.ngram_rows else 0,
    }


def neighbours(settings: Settings) -> list[Settings]:
    """The settings with one changed; a width has its own rate."""
    changes: list[Settings] = [
        {name: settings[name] * factor} for name, factors in FACTORS.items() for factor in factors
    ]
    changes += [{"layers": layers} for layers in DEPTHS[settings["layers"]]]
    for change in changes:
        if "width" in change:
            width = 32 * round(change["width"] / 32)  # others have no kernels
            heads = width // (32 if width % 64 or width < 128 else 64)
            rate = settings["rate"] * (settings["width"] / width) ** 0.5
            change.update(width=width, heads=heads, rate=rate)
        if "context" in change:
            change["context"] = round(change["context"])
    dropout = settings["dropout"]
    if settings["ngrams"]:
        changes.append({"ngrams": 0, "ngram_decay": 0})
        changes += [{"ngram_decay": settings["ngram_decay"] * factor} for factor in (0.5, 2)]
    changes += [{"dropout": value} for value in ((0.0, 2 * dropout) if dropout else (0.1,))]
    return [settings | change for change in changes]


def cost(settings: Settings, vocabulary: int) -> float:
    """Seconds for a character of training, relative to the reference model, as measured on two cores of a Zen 4 before
    dropout had a kernel. It costs a tenth or less since; `slow` keeps 1.4, so that rows can be compared.
    """
    layers, width = settings["layers"], settings["width"]
    flops = 72 * layers * width**2 + 12 * layers * width * settings["context"] + 6 * vocabulary * width
    narrow = 3.0 if width <= 32 else 1.75 if width <= 64 else 1.25 if width < 128 else 1.0
    slow = (1.4 if settings["dropout"] else 1.0) * (1.06 if settings["ngrams"] else 1.0)
    return flops / rule.REFERENCE_FLOPS * narrow * slow


def train(text: str, characters: int, millions: float, settings: Settings, seed: int) -> Settings:
    """Trains on the first `characters` of the file `text`; returns the held-out losses by step, and the loss of the
    best snapshot on what follows, in nats per character. Without settings, trains the default recipe.
    """
    content = Path(text).read_text("utf-8")
    used = content[:characters]
    known = set(used)
    rest = "".join(c for c in content[characters:][: 2 * SCORED] if c in known)[:SCORED]
    assert len(rest) > SCORED / 2
    limit = 1e6 * millions
    if settings:
        limit = min(limit / cost(settings, len(known)), rule.USEFUL_PASSES * settings["split"] * characters)
        windows = max(1, round(settings["batch"] / settings["context"]))
        steps = round(limit / (windows * settings["context"]))
        own = [
            *("experiment=auto", "model.model_type=null", f"data.block_size={settings['context']}"),
            *(f"model.n_layer={settings['layers']}", f"model.n_head={settings['heads']}"),
            *(f"model.n_embd={settings['width']}", "model.attn_pdrop=0"),
            *(f"model.{name}_pdrop={settings['dropout']}" for name in ("embd", "resid")),
            f"optimizer.learning_rate={settings['rate']}",
            f"model.ngram_rows={settings['ngrams']}",
            f"optimizer.ngram_decay={settings['ngram_decay']}",
            f"optimizer.weight_decay={settings['decay']}",
            f"data.train_split={settings['split']}",
            f"trainer.batch_size={windows}",
        ]
    else:
        recipe = recipe_of()
        sizes = {"layers": recipe["recipe_layers"], "width": 128, "context": 256, "dropout": 0}
        steps = round(limit / cost(recipe | sizes, len(known)) / 3072)
        own = ["experiment=shakespeare_cpu"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text.txt").write_text(used, "utf-8")
        Path(folder, "rest.txt").write_text(rest, "utf-8")
        config = main.configure(
            *("data=text", f"data.path={folder}/text.txt", *own, f"trainer.max_steps={steps}"),
            *(f"trainer.eval_every_steps={max(1, steps // 10)}", "trainer.save_every_steps=null"),
            *("samples=false", "report=false", "trainer.trackers=[]", "trainer.threads=1"),
            *(f"run_dir={folder}/run", "trainer.log_every_steps=1000000", "trainer.device=cpu"),
            *(f"trainer.seed={seed}", "trainer.max_minutes=null"),
        )
        main.train(config)
        lines = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
        scored = sample.SampleConfig(score=f"{folder}/rest.txt", device="cpu")
        [loss], _ = sample.score(scored, load_full(f"{folder}/run/gpt_snapshot.best.pt"))
    held_out = [(line["step"], round(line["loss"], 4)) for line in lines if line["split"] == "val"]
    return {"steps": steps, "held_out": held_out, "score": round(loss, 4)}


def run(job: tuple[str, Settings, Settings]) -> Settings:
    text, cell, settings = job
    return {**cell, **settings, **train(text, cell["characters"], cell["millions"], settings, cell["seed"])}


def recipe_of() -> Settings:
    """What tells a run of the default recipe of today from older ones."""
    config = main.configure("experiment=shakespeare_cpu")
    return {
        "kind": "recipe",
        "recipe_layers": config.model.n_layer,  # "layers" only in lines of other settings
        "ngrams": config.model.ngram_rows,
        "embeddings": config.optimizer.decay_embeddings,
    }


def settings_of(choice: Settings) -> list[tuple[str, Settings]]:
    """What is trained in a cell: a kind, and the settings; none for the default recipe."""
    rounded = [
        {k: v if k == "split" or isinstance(v, int) else float(f"{v:.3g}") for k, v in each.items()}
        for each in (choice, *neighbours(choice))
    ]
    return [("choice", rounded[0]), ("recipe", {}), *(("other", each) for each in rounded[1:])]


def program(arguments: list[str]) -> None:
    config = parse(Arguments, arguments)
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    older = {"ngrams": 0, "ngram_decay": 0, "embeddings": False, "recipe_layers": 4}  # what their lines are without
    done = [older | json.loads(line) for line in lines]
    cells = UNSEEN if config.unseen else CELLS
    if config.report:
        report(cells, done)
        return
    if config.texts is None:
        raise UserError("texts: missing; give texts=DIRECTORY")
    jobs = []
    for (name, characters, millions), seed in itertools.product(cells, range(1, config.seeds + 1)):
        text = f"{config.texts}/{name}.txt"
        cell = {"text": name, "characters": characters, "millions": millions}
        settings = settings_of(chosen(text, characters, millions))
        if seed > 1:
            choice = settings[0][1]
            first = [line for line in done if line.items() >= {**cell, "seed": 1}.items()]
            best = best_other(first, choice)
            settings = settings[:2] + ([("other", {k: best[k] for k in choice})] if best else [])
        for kind, each in settings:
            known = {**cell, "seed": seed, **(each or recipe_of())}
            if not any(line.items() >= known.items() for line in done):
                jobs.append((text, known | {"kind": kind}, each))
    os.environ["OMP_NUM_THREADS"] = "1"
    with multiprocessing.get_context("spawn").Pool(config.workers, maxtasksperchild=1) as pool:
        for result in pool.imap_unordered(run, jobs):
            with open(RESULTS, "a") as file:
                file.write(json.dumps(result) + "\n")


def best_other(lines: list[Settings], choice: Settings) -> Settings | None:
    """Of the runs of a cell, the best that is neither the rule's `choice` nor the default recipe."""
    # Earlier runs had other widths, which have no kernels: their cost was estimated at half of what it is.
    others = [line for line in lines if "layers" in line and line["width"] % 16 == 0]
    others = [line for line in others if not line.items() >= choice.items()]
    return min(others, key=lambda line: line["score"], default=None)


def report(cells: list[tuple[str, int, float]], done: list[Settings]) -> None:
    """Prints for each cell what the rule chose, its score, the best other score of the first seed and what it changed,
    and the default recipe's score: means over the seeds, whose number is in brackets.
    """
    todays = recipe_of()
    print("| text | time | choice | its score | best of the others | default recipe |")
    print("|---|---|---|---|---|---|")
    names = (
        "layers", "width", "heads", "context", "batch", "dropout", "decay", "rate", "ngrams", "ngram_decay", "split",
    )  # fmt: skip

    def mean(lines: list[Settings]) -> str:
        scores = [line["score"] for line in {line["seed"]: line for line in lines}.values()]
        return f"{statistics.mean(scores):.3f}" + f" ({len(scores)})" * (len(scores) > 1)

    for name, characters, millions in cells:
        cell = {"text": name, "characters": characters, "millions": millions}
        lines = [line for line in done if line.items() >= cell.items()]
        choices = [line for line in lines if line["kind"] == "choice"]
        if not choices:
            continue
        choice = {key: choices[-1][key] for key in names}  # of several, the newest
        first = [line for line in lines if line["seed"] == 1]
        shown, best = "-", best_other(first, choice)
        if best is not None:
            changed = ", ".join(f"{n} {best[n]:g}" for n in names if best[n] != choice[n])
            same = {key: best[key] for key in names}
            score = mean([line for line in lines if line.items() >= same.items()])
            shown = f"{score}: {changed}; of {sum('layers' in line for line in first) - 1}"
        sizes = ", ".join(f"{n} {choice[n]:g}" for n in names[1:] if n not in ("heads", "split"))
        recipe = [line for line in lines if line.items() >= todays.items()]
        own = mean([line for line in lines if line.items() >= choice.items()])
        print(
            f"| {name}, {characters:,} | {millions} | {choice['layers']} layers, {sizes} "
            f"| {own} | {shown} | {mean(recipe) if recipe else '-'} |"
        )


if __name__ == "__main__":
    run_program(program, Arguments)
