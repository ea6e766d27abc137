"""Measures this trainer beside others, on this machine: the same model, batch and text, in turn.

    python benchmarks/bench.py                              everything; writes docs/benchmarks.md and .json
    python benchmarks/bench.py sections=step,start rounds=5
    python benchmarks/bench.py nanogpt=DIRECTORY            a checkout of nanoGPT beside `loss`
    python benchmarks/bench.py report                       docs/benchmarks.md again, from the .json alone

Every measurement is a process of its own, and a round takes each of a section once, so that a
machine that slows down slows all of them. Other trainers come from their packages
(requirements-bench.txt); one that is not installed is left out, and that is said.
"""

import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the application

from char_dataset import CharDataset, DataConfig
from engine.config.arguments import parse, run_program
from engine.config.overrides import with_recipe
from engine.errors import UserError
from engine.kernels import native as kernels
from engine.machine import hardware
from engine.optim.optimizer import OptimizerConfig, create_optimizer
from engine.parallel import distributed
from model import GPT, GPTConfig

RESULTS = ROOT / "benchmarks" / "results.json"
PAGE = ROOT / "docs" / "benchmarks.md"
LEARNING_RATE = 1e-3
NO_DROPOUT: dict[str, Any] = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}

# layers, heads, width, characters of context, windows a step, measured steps
SIZES = {
    "4L/4H/128, 64 x 64": (4, 4, 128, 64, 64, 60),
    "8L/8H/512, 16 x 128": (8, 8, 512, 128, 16, 12),
    "8L/8H/512, 32 x 128": (8, 8, 512, 128, 32, 8),
}
TRAINERS = {  # and the packages they need
    "this": (),
    "Transformers Trainer, bfloat16": ("transformers", "accelerate"),
    "Transformers Trainer, float32": ("transformers", "accelerate"),
    "Accelerate, bfloat16": ("transformers", "accelerate"),
    "Accelerate, float32": ("transformers", "accelerate"),
    "Lightning, bfloat16": ("transformers", "lightning"),
    "Lightning, float32": ("transformers", "lightning"),
}

RECIPES = (  # "default" is the one that main.py takes on this machine
    *("shakespeare_quick", "default", "shakespeare_shift", "shakespeare_lowest"),
    "nanogpt_cpu",
)
PACKAGES = {**TRAINERS, "Transformers": ("transformers",)}
GENERATORS = {"4L/2H/128": (4, 2, 128), "6L/6H/384": (6, 6, 384)}  # layers, heads, width
# of nanoGPT's CPU recipe, as its README has it
NANOGPT = {"plan": "2000 steps = 1,536,000 characters", "window": 64}


class Clock:
    """Takes the time at the end of each step."""

    def __init__(self):
        self.times: list[float] = []

    def tick(self, *_) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def seconds(self) -> float:
        """Median of a step, without the first third."""
        steps = [b - a for a, b in zip(self.times, self.times[1:], strict=False)]
        return statistics.median(steps[len(steps) // 3 :])


# --------------------------------------------------------------------------------------------------
# What is measured: each function runs in a process of its own and returns figures


def step(size: str, trainer: str) -> dict:
    """Seconds of one training step: GPT-2 with AdamW and clipping, no dropout, the same text."""
    n_layer, n_head, n_embd, block_size, batch_size, steps = SIZES[size]
    distributed.join_processes()  # threads and memory as here, for all of them
    data = CharDataset(DataConfig(path="pydoc:topics", block_size=block_size)).split()[0]
    clock = Clock()
    if trainer == "this":
        model = _gpt(n_layer, n_head, n_embd, data.vocab_size, block_size)
        _train(model, data, batch_size, steps, clock)
    else:
        model = _transformers_gpt2(n_layer, n_head, n_embd, data.vocab_size, block_size)
        peer = {"T": _with_transformers, "A": _with_accelerate, "L": _with_lightning}[trainer[0]]
        peer(model, _Windows(data), batch_size, steps, clock, trainer.endswith("bfloat16"))
    rate = batch_size * block_size / clock.seconds()
    model = _gpt(n_layer, n_head, n_embd, data.vocab_size, block_size)
    return {
        "characters_per_s": rate,
        "share_of_matmul": rate * model.flops_per_token() / _matmul_flops(),
    }


def loss(recipe: str, seed: int) -> dict:
    """Seconds of a whole process, nothing compiled before, and the held-out loss at its end."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        run = _command(
            *(ROOT / "main.py", f"experiment={recipe}", f"trainer.seed={seed}"),
            f"run_dir={folder}/run",
            environment={"XDG_CACHE_HOME": folder},
        )
        seconds = time.perf_counter() - began
        lines = [json.loads(x) for x in open(f"{folder}/run/metrics.jsonl")]
    val = [line for line in lines if line["split"] == "val"][-1]
    return {
        "seconds": seconds,
        "loss": val["loss"],
        "steps": val["step"],
        "characters_scored": val["tokens"],
        "plan": next(x for x in run.splitlines() if x.startswith("plan")).split(maxsplit=1)[1],
        "window": int(re.findall(r"^batch .* x (\d+) characters =", run, re.M)[0]),
    }


def nanogpt(directory: str) -> dict:
    """nanoGPT's CPU recipe, as its README has it; the loss is its own estimate, from one seed."""
    arguments = (
        "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 "
        "--log_interval=100 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 "
        "--max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
    )
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        out = _command("train.py", *arguments.split(), f"--out_dir={folder}", directory=directory)
        seconds = time.perf_counter() - began
    estimates = [x for x in out.splitlines() if "val loss" in x]
    return {"seconds": seconds, "loss": float(estimates[-1].split()[-1]), **NANOGPT}


def generate(model: str, package: str) -> dict:
    """Characters per second of `generate` on the CPU, 128 of them at 193 to 320 characters of
    context, and the share of the memory's rate at which weights, keys and values are read.
    """
    distributed.join_processes("cpu")
    n_layer, n_head, n_embd = GENERATORS[model]
    if package == "this":
        gpt: Any = _gpt(n_layer, n_head, n_embd, 65, 512, arch="modern").eval()

        def moments(idx, use_cache):
            return [time.perf_counter() for _ in gpt.stream(idx, 129, use_cache=use_cache)]
    else:
        gpt = _transformers_gpt2(n_layer, n_head, n_embd, 65, 512).eval()

        class Moments(list):
            """A streamer: what Transformers puts the context in, and then each character."""

            def put(self, _):
                self.append(time.perf_counter())

            def end(self):
                pass

        def moments(idx, use_cache):
            seen = Moments()
            gpt.generate(
                idx, min_new_tokens=129, max_new_tokens=129, use_cache=use_cache, streamer=seen,
                attention_mask=torch.ones_like(idx), do_sample=False, pad_token_id=0,
            )  # fmt: skip
            return seen[1:]

    weights = sum(p.numel() for p in gpt.parameters())
    figures = {}
    for name, batch, use_cache in (
        ("uncached", 1, False),
        ("cached", 1, True),
        ("cached_64", 64, True),
    ):
        idx, seconds = torch.randint(0, 65, (batch, 192)), []
        for _ in range(3):
            first, *_, last = moments(idx, use_cache)
            seconds.append((last - first) / 128)
        figures[name] = batch / statistics.median(seconds)
    # The last: of 64 texts.
    read = 4 * (weights + batch * 2 * n_layer * n_embd * 256)
    rate = figures["cached_64"] / batch * read
    figures["cached_64_memory"] = rate / _memory_bytes_per_s()
    return figures


def start(caches: str) -> dict:
    """Seconds from the command to the end of the first training step, and for `import main`."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **({"XDG_CACHE_HOME": folder} if caches == "cold" else {})}
        command = [sys.executable, "main.py", f"run_dir={folder}/run", "trainer.log_every_steps=1"]
        metrics = Path(folder, "run", "metrics.jsonl")
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        try:
            while not (metrics.exists() and metrics.stat().st_size):
                if process.poll() is not None:
                    raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
                time.sleep(0.01)
            first_step = time.perf_counter() - began
        finally:
            process.kill()
            process.wait()
        began = time.perf_counter()
        _command("-c", "import main", environment=environment)
    return {"first_step_s": first_step, "import_s": time.perf_counter() - began}


def growth(what: str, value: str) -> dict:
    """Characters per second and peak memory of a step, as one thing grows from a common middle."""
    sizes = {"width": 128, "layers": 4, "context": 128, "vocabulary": 65} | {what: int(value)}
    device = distributed.join_processes().device
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text.txt")  # random characters: what they are costs nothing
        draw = torch.randint(sizes["vocabulary"], (200_000,)).tolist()
        path.write_text("".join(chr(0x4E00 + i) for i in [*range(sizes["vocabulary"]), *draw]))
        data, _ = CharDataset(DataConfig(path=str(path), block_size=sizes["context"])).split()
    shape = (sizes["layers"], sizes["width"] // 32, sizes["width"], data.vocab_size)
    model = _gpt(*shape, sizes["context"], arch="modern")
    clock = Clock()
    _train(model, data, max(1, 4096 // sizes["context"]), 12, clock, optimizer="muon")
    rate = 4096 / clock.seconds()
    return {
        "characters_per_s": rate,
        "share_of_matmul": rate * model.flops_per_token() / _matmul_flops(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "peak_bytes": hardware.peak_memory(device),
    }


def processes(count: str, windows: str) -> dict:
    """Characters per second of `count` processes of one CPU thread, of `windows` a step each."""
    n = int(count)
    launch = (
        () if n == 1 else ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}")
    )
    with tempfile.TemporaryDirectory() as folder:
        _command(
            *(*launch, "main.py", "experiment=shakespeare_cpu", f"run_dir={folder}/run"),
            *("trainer.device=cpu", "trainer.threads=1", f"trainer.batch_size={int(windows) * n}"),
            *("trainer.max_steps=40", "trainer.log_every_steps=10", "report=false"),
            *("samples=false", "trainer.eval_every_steps=null"),
        )
        lines = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
    rates = [line["tokens_per_s"] for line in lines if line["split"] == "train"]
    return {"characters_per_s": statistics.median(rates[1:])}


# --------------------------------------------------------------------------------------------------
# The trainers


def _gpt(n_layer, n_head, n_embd, vocab_size, block_size, arch="gpt2") -> GPT:
    torch.manual_seed(0)
    return GPT(
        GPTConfig(
            arch=arch,
            n_layer=n_layer,
            n_head=n_head,
            n_embd=n_embd,
            vocab_size=vocab_size,
            block_size=block_size,
            **NO_DROPOUT,
        )
    )


def _train(model, data, batch_size, steps, clock, optimizer="adamw") -> None:
    from trainer import Trainer, TrainerConfig

    config = TrainerConfig(
        max_epochs=None,
        max_steps=steps,
        batch_size=batch_size,
        save_every=None,
        log_every_steps=steps,
    )
    settings = OptimizerConfig(name=optimizer, learning_rate=LEARNING_RATE)

    class Timed(Trainer):
        def _train_step(self):
            result = super()._train_step()
            clock.tick()
            return result

    with tempfile.TemporaryDirectory() as folder:
        Timed(config, model, create_optimizer(model, settings), data, run_dir=folder).train()


class _Windows(torch.utils.data.Dataset):
    """A window as input and as labels, which Transformers' models shift by themselves."""

    def __init__(self, data: CharDataset):
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> dict:
        x, _ = self.data[i]
        return {"input_ids": x, "labels": x}


def _transformers_gpt2(n_layer, n_head, n_embd, vocab_size, block_size):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=block_size,
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def _with_transformers(model, windows, batch_size, steps, clock, bfloat16) -> None:
    import transformers

    class Ticks(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            clock.tick()

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            learning_rate=LEARNING_RATE,
            bf16=bfloat16,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            logging_steps=steps,
            report_to=[],
            disable_tqdm=True,
        )
        transformers.Trainer(
            model=model, args=arguments, train_dataset=windows, callbacks=[Ticks()]
        ).train()


def _with_accelerate(model, windows, batch_size, steps, clock, bfloat16) -> None:
    from accelerate import Accelerator

    precision = "bf16" if bfloat16 else "no"
    accelerator = Accelerator(mixed_precision=precision, cpu=not torch.cuda.is_available())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    loader = torch.utils.data.DataLoader(windows, batch_size=batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _, batch in zip(range(steps), loader, strict=False):
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()


def _with_lightning(model, windows, batch_size, steps, clock, bfloat16) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)

        def on_train_batch_end(self, *_):
            clock.tick()

    lightning.Trainer(
        max_steps=steps,
        precision="bf16-mixed" if bfloat16 else "32-true",
        gradient_clip_val=1.0,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), torch.utils.data.DataLoader(windows, batch_size=batch_size, shuffle=True))


def _matmul_flops() -> float:
    """What this machine computes in matrix products, in bfloat16 if it has that, else in float32,
    FLOP/s: the best of ten.
    """
    on_gpu = torch.cuda.is_available()
    n = 8192 if on_gpu else 2048
    a = torch.randn(n, n, device="cuda" if on_gpu else "cpu")
    if hardware.computes_in_bfloat16(a.device):
        a = a.bfloat16()
    best = math.inf
    for _ in range(10):
        began = time.perf_counter()
        torch.mm(a, a)
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * n**3 / best


def _memory_bytes_per_s() -> float:
    """What this machine reads from memory, far more than its caches hold: the best of ten."""
    x = torch.ones(2**26)  # 256 MiB
    best = math.inf
    for _ in range(10):
        began = time.perf_counter()
        x.sum()
        best = min(best, time.perf_counter() - began)
    return 4 * x.numel() / best


def _command(*arguments, directory: str | Path = ROOT, environment: dict | None = None) -> str:
    """Runs Python with these arguments; returns what it printed."""
    command = [sys.executable, *map(str, arguments)]
    run = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)}: {run.stderr.strip()[-2000:]}")
    return run.stdout


# --------------------------------------------------------------------------------------------------
# Rounds, and the report

SECTIONS: dict[str, list[tuple[Any, ...]]] = {
    "step": [(step, size, trainer) for size in SIZES for trainer in TRAINERS],
    "loss": [(loss, recipe) for recipe in RECIPES],
    "generate": [
        (generate, model, package) for model in GENERATORS for package in ("this", "Transformers")
    ],
    "start": [(start, caches) for caches in ("warm", "cold")],
    "growth": [
        (growth, what, str(value))
        for what, values in {
            "width": (64, 128, 256, 512, 1024),
            "layers": (2, 4, 8, 16),
            "context": (32, 64, 128, 256, 512, 1024),
            "vocabulary": (65, 1000, 5000, 20000),
        }.items()
        for value in values
    ],
    "processes": [(processes, n, windows) for windows in ("16", "64") for n in ("1", "2")],
}


def run_sections(sections: list[str], rounds: int, nanogpt_directory: str | None) -> dict:
    """All measurements of the sections: {section: {arguments: [figures of each round]}}."""
    results: dict = {}
    for section in sections:
        tasks = SECTIONS[section]
        if section == "loss" and nanogpt_directory:
            tasks = [*tasks, (nanogpt, nanogpt_directory)]
        for number in range(rounds):
            for function, *arguments in tasks:
                if function is step and not pays(arguments[1]):
                    continue
                if missing := _missing(PACKAGES.get(arguments[-1], ())):
                    print(f"{arguments[-1]}: left out, {missing} is not installed", flush=True)
                    continue
                if arguments == ["default"]:
                    arguments = [with_recipe([])[0].removeprefix("experiment=")]
                key = "nanogpt" if function is nanogpt else ", ".join(arguments)
                if function is loss:
                    arguments = [*arguments, str(number + 1)]  # the seed
                out = _command("benchmarks/bench.py", "measure", function.__name__, *arguments)
                figures = json.loads(out.splitlines()[-1])
                results.setdefault(section, {}).setdefault(key, []).append(figures)
                print(section, key, json.dumps(figures), flush=True)
    return results


def pays(trainer: str) -> bool:
    """Whether somebody would have `trainer` in its type here: bfloat16 where the hardware computes
    in it, and else float32; of Transformers both, as its default is float32.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bfloat16 = hardware.computes_in_bfloat16(device)
    if trainer in ("this", "Transformers Trainer, float32"):
        return True
    return trainer.endswith("bfloat16") == bfloat16


def _missing(packages: tuple[str, ...]) -> str | None:
    for name in packages:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return name
    return None


def machine() -> dict:
    """What the figures were measured on and with."""
    name = hardware.device_name(torch.device("cpu"))
    packages = ("torch", "transformers", "accelerate", "lightning")
    return {
        "cpu": f"{name}, {len(os.sched_getaffinity(0))} cores",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "kernels": [
            str(dtype).removeprefix("torch.")
            for dtype in (torch.bfloat16, torch.float32)
            if kernels.library(dtype) is not None
        ],
        "versions": {p: importlib.metadata.version(p) for p in packages if not _missing((p,))},
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def same_machine(one: dict, other: dict) -> bool:
    return all(one[key] == other[key] for key in ("cpu", "gpu"))


def spread(rows: list[dict], name: str, form: str = "{:,.0f}") -> str:
    """Median and range over rounds."""
    values = [row[name] for row in rows]
    middle = form.format(statistics.median(values))
    if len(values) == 1:
        return middle
    return f"{middle} ({form.format(min(values))} to {form.format(max(values))})"


def report(results: dict) -> str:
    """docs/benchmarks.md, of {section: [{machine, figures}, ...]}: a table for each machine."""
    out = [
        "# Benchmarks",
        "",
        "Written by `python benchmarks/bench.py`. Medians, and ranges over the rounds; every figure is a "
        "process of its own, and the rounds take all rows of a table in turn. GPU: not measured "
        "where no table names one. The figures as data: [results.json](../benchmarks/results.json).",
    ]
    for section, (title, text, head, rows_of) in TABLES.items():
        if section not in results:
            continue
        out += ["", f"## {title}", "", text]
        for measured in results[section]:
            m = measured["machine"]
            versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
            where = f"{m['date']}, {m['gpu'] or m['cpu']}; {versions}; Python {m['python']}."
            out += ["", f"`python benchmarks/bench.py sections={section}`, {where}", ""]
            out += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
            out += [f"| {' | '.join(row)} |" for row in rows_of(measured["figures"])]
    return "\n".join(out) + "\n"


def step_rows(figures: dict) -> list[list[str]]:
    rows = []
    for key, values in figures.items():
        size = next(size for size in SIZES if key.startswith(size))
        trainer = key.removeprefix(f"{size}, ")
        ratios = [
            {"ratio": ours["characters_per_s"] / other["characters_per_s"]}
            for ours, other in zip(figures[f"{size}, this"], values, strict=True)
        ]
        rate, share = (
            spread(values, "characters_per_s"),
            spread(values, "share_of_matmul", "{:.0%}"),
        )
        rows.append([size, trainer, rate, spread(ratios, "ratio", "{:.2f}"), share])
    return sorted(rows, key=lambda row: [*SIZES].index(row[0]))


def loss_rows(figures: dict) -> list[list[str]]:
    names = {key: f"`{key}`" for key in figures}
    names["nanogpt"] = "nanoGPT's CPU recipe, its one seed and estimate"
    return [
        [
            names[key],
            spread(values, "loss", "{:.4f}"),
            spread(values, "seconds", "{:.1f}"),
            str(len(values)),
            str(values[0]["window"]),
            " = ".join(re.findall(r"[\d,]+ (?:steps|characters)", values[0]["plan"])),
        ]
        for key, values in figures.items()
    ]


def generate_rows(figures: dict) -> list[list[str]]:
    rows = []
    for key, values in figures.items():
        for row in values:
            row["gain"] = row["cached"] / row["uncached"]
            row["batch"] = row["cached_64"] / row["cached"]
        columns = {"uncached": "{:,.0f}", "cached": "{:,.0f}", "gain": "{:.1f}"}
        columns |= {"cached_64": "{:,.0f}", "batch": "{:.1f}", "cached_64_memory": "{:.0%}"}
        cells = [
            spread(values, name, form) if name in values[0] else "not measured"
            for name, form in columns.items()
        ]
        model, _, package = key.partition(", ")
        rows.append([model, package, *cells])
    return rows


def start_rows(figures: dict) -> list[list[str]]:
    return [
        [key, spread(v, "import_s", "{:.1f}"), spread(v, "first_step_s", "{:.1f}")]
        for key, v in figures.items()
    ]


def growth_rows(figures: dict) -> list[list[str]]:
    return [
        [
            *key.split(", "),
            f"{values[0]['parameters']:,}",
            spread(values, "characters_per_s"),
            spread(values, "share_of_matmul", "{:.0%}"),
            f"{max(v['peak_bytes'] for v in values) / 2**20:,.0f}",
        ]
        for key, values in figures.items()
    ]


def processes_rows(figures: dict) -> list[list[str]]:
    rows = []
    for key, values in figures.items():
        count, windows = key.split(", ")
        for row, one in zip(values, figures[f"1, {windows}"], strict=True):
            row["gain"] = row["characters_per_s"] / one["characters_per_s"]
        rates = spread(values, "characters_per_s"), spread(values, "gain", "{:.2f}")
        rows.append([windows, count, *rates])
    return rows


# Of each section: title, text, the table's head and what makes its rows of the figures.
TABLES = {
    "step": (
        "A training step",
        "GPT-2 with AdamW and clipping, no dropout, windows of the same text, from one step's "
        "end to the next's. The last column is what the model's own operations make of the "
        "rate of a bare `torch.mm` in the same process, in bfloat16 where the hardware has it. "
        "There the others are measured in bfloat16, elsewhere in float32.",
        ["size", "trainer", "characters a second", "this is times as fast", "of the matmul rate"],
        step_rows,
    ),
    "loss": (
        "Time to a loss",
        "Whole processes, from the command to its end, with nothing compiled before, one seed "
        "a round. The loss is of every held-out character but the first, in nats, in windows of so "
        "many characters laid end to end, but for nanoGPT's. The Xeon's are "
        "from before `optimizer.normalize`, which takes 1 ms a step and lowers the first two by "
        "0.01.",
        ["recipe", "held-out loss", "seconds", "seeds", "window", "trained on"],
        loss_rows,
    ),
    "generate": (
        "Generating",
        "Float32, characters a second at 193 to 320 characters of context: `modern`, beside a "
        "GPT-2 of the same size in Transformers. The last column is what reading weights, keys and "
        "values once for each character of 64 texts makes of the rate at which the machine reads "
        "its memory. The Xeon's are at up to 456 characters, and from before calling a kernel for "
        "few numbers took less.",
        [
            *("model", "of", "without cache", "with", "gain", "64 at once", "gain over one"),
            "of the memory rate",
        ],
        generate_rows,
    ),
    "start": (
        "Starting",
        "Seconds of `python -c 'import main'`, and from `python main.py` to the end of its "
        "first step; cold: the kernels are built first.",
        ["caches", "import", "first step"],
        start_rows,
    ),
    "growth": (
        "How cost grows",
        "`modern`, Muon, 4,096 characters a step; 4 layers 128 wide, heads of 32, 128 "
        "characters of context and 65 distinct ones, but for what the row says. "
        "[experiments.md](experiments.md) has what bounds each end. ![plot](growth.png)",
        [
            *("what", "value", "parameters", "characters a second"),
            *("of the matmul rate", "peak resident MiB"),
        ],
        growth_rows,
    ),
    "processes": (
        "Processes",
        "`shakespeare_cpu`, one thread a process, windows of 256 characters. What a step loses "
        "to two processes is much the same whatever it computes: gloo's sum, waiting for the "
        "other, and the memory that both share.",
        ["windows a step and process", "processes", "characters a second", "gain"],
        processes_rows,
    ),
}


def plot(results: dict) -> None:
    """docs/growth.png, where matplotlib is installed."""
    if _missing(("matplotlib",)):
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(key.split(", ")[0] for key in results))
    figure, axes = pyplot.subplots(
        2, len(names), figsize=(3.5 * len(names), 5), sharey="row", sharex="col"
    )
    for column, what in zip(axes.T, names, strict=True):
        rows = {int(k.split(", ")[1]): v for k, v in results.items() if k.startswith(what)}
        rates = [statistics.median(v["characters_per_s"] for v in row) for row in rows.values()]
        peaks = [max(v["peak_bytes"] for v in row) / 2**20 for row in rows.values()]
        for axis, values in zip(column, (rates, peaks), strict=True):
            axis.loglog([*rows], values, marker="o")
            axis.grid(True, alpha=0.3)
            axis.set_xticks([*rows], [f"{value:,}" for value in rows])
            axis.minorticks_off()
        column[1].set_xlabel(what)
    axes[0, 0].set_ylabel("characters a second")
    axes[1, 0].set_ylabel("peak resident MiB")
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "growth.png", dpi=110)


@dataclass
class Arguments:
    """What `python benchmarks/bench.py` takes."""

    sections: str = ",".join(SECTIONS)
    rounds: int = 3
    nanogpt: str | None = None


def program(arguments: list[str]) -> None:
    if arguments[:1] == ["measure"]:
        print(json.dumps(globals()[arguments[1]](*arguments[2:])))
        return
    only_report = arguments == ["report"]
    settings = parse(Arguments, [] if only_report else arguments)
    sections = settings.sections.split(",")
    for section in sections:
        if section not in SECTIONS:
            raise UserError(f"sections={section}: must be among {', '.join(SECTIONS)}")
    if settings.rounds < 1:
        raise UserError(f"rounds={settings.rounds}: must be at least 1")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not only_report:
        fresh = run_sections(sections, settings.rounds, settings.nanogpt)
        here = machine()
        for name, figures in fresh.items():  # in place of what this machine has measured before
            others = [r for r in results.get(name, []) if not same_machine(r["machine"], here)]
            results[name] = [*others, {"machine": here, "figures": figures}]
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(report(results))
    if "growth" in results and (only_report or "growth" in sections):
        plot(results["growth"][-1]["figures"])
    print(f"written: {PAGE} and {RESULTS.name}")


if __name__ == "__main__":
    run_program(program)
