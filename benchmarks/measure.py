"""Measurements: each function returns the figures of one row of docs/benchmarks.md.

    python -m benchmarks.measure growth width 64      prints them as one line of JSON

`bench.py` runs each in a process of its own. This project is measured through its command line and
the files that a run leaves, as a user would; only `generate` calls the model.
"""

import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from char_dataset import CharDataset, DataConfig
from engine.errors import UserError
from engine.machine import hardware
from model import GPT, GPTConfig

ROOT = Path(__file__).resolve().parent.parent
LEARNING_RATE = 1e-3
NO_DROPOUT: dict[str, Any] = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}

# layers, heads, width, characters of context, windows a step, measured blocks of steps
SIZES = {
    "4L/4H/128, 64 x 64": (4, 4, 128, 64, 64, 60),
    "8L/8H/512, 16 x 128": (8, 8, 512, 128, 16, 12),
    "8L/8H/512, 32 x 128": (8, 8, 512, 128, 32, 8),
}
# Steps timed together. Reading the clock waits for a GPU, which would else compute while Python runs ahead.
BLOCK = 10 if torch.cuda.is_available() else 1
GENERATORS = {"4L/2H/128": (4, 2, 128), "6L/6H/384": (6, 6, 384)}  # layers, heads, width


def step(size: str, trainer: str) -> dict:
    """One training step: GPT-2 with AdamW and clipping, no dropout, the same text for all."""
    layers, heads, width, context, windows, blocks = SIZES[size]
    steps = blocks * BLOCK
    text = CharDataset(DataConfig(path="pydoc:topics", block_size=context)).split()[0]
    if trainer == "this":
        rate = train(
            *("model=gpt2", "optimizer=adamw", "data=pydoc", f"data.block_size={context}"),
            *(f"model.n_layer={layers}", f"model.n_head={heads}", f"model.n_embd={width}"),
            *(f"model.{name}={value}" for name, value in NO_DROPOUT.items()),
            *(f"optimizer.learning_rate={LEARNING_RATE}", f"trainer.batch_size={windows}"),
            f"trainer.max_steps={steps}",
        )["characters_per_s"]
    else:
        hardware.keep_freed_memory()  # as this project does, for all of them
        model, times = _transformers_gpt2(layers, heads, width, text.vocab_size, context), []
        inputs = (text[i][0] for i in range(steps * windows))  # Transformers' models shift them
        dataset: Any = [{"input_ids": x, "labels": x} for x in inputs]

        done = itertools.count(1)

        def tick() -> None:
            if next(done) % BLOCK == 0:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                times.append(time.perf_counter())

        name, precision = trainer.split(", ")
        peer = PEERS[name]
        peer(model, dataset, windows, steps, precision == "bfloat16", tick)
        seconds = _settled([b - a for a, b in itertools.pairwise(times)])
        rate = BLOCK * windows * context / seconds
    flops = flops_per_character(layers, width, context, text.vocab_size)
    return {"characters_per_s": rate, "share_of_matmul": rate * flops / _matmul_flops()}


def growth(what: str, value: str) -> dict:
    """A step of 4,096 characters and its peak memory, as one size grows from a common middle."""
    size = {"width": 128, "layers": 4, "context": 128, "vocabulary": 65} | {what: int(value)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text.txt")  # random characters: what they are does not matter
        draw = torch.randint(size["vocabulary"], (200_000,)).tolist()
        path.write_text("".join(chr(0x4E00 + i) for i in [*range(size["vocabulary"]), *draw]))
        figures = train(
            *("model=modern", "optimizer=muon", "data=text", f"data.path={path}"),
            *(f"data.block_size={size['context']}", f"model.n_layer={size['layers']}"),
            *(f"model.n_head={size['width'] // 32}", f"model.n_embd={size['width']}"),
            *(f"trainer.batch_size={4096 // size['context']}", f"trainer.max_steps={12 * BLOCK}"),
        )
    flops = flops_per_character(size["layers"], size["width"], size["context"], size["vocabulary"])
    share = figures["characters_per_s"] * flops / _matmul_flops()
    return {**figures, "share_of_matmul": share}


def processes(count: str, windows: str) -> dict:
    """`count` processes of one CPU thread, each with `windows` windows a step."""
    figures = train(
        *("experiment=shakespeare_cpu", "model.n_layer=4", "trainer.device=cpu", "trainer.threads=1"),
        *(f"trainer.batch_size={int(windows) * int(count)}", "trainer.max_steps=40"),
        *("trainer.log_every_steps=10", "trainer.eval_every_steps=null"),
        processes=int(count),
    )
    return {"characters_per_s": figures["characters_per_s"]}


def loss(recipe: str, seed: str) -> dict:
    """Seconds of a whole process, nothing compiled before, and its held-out loss at the end."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir, environment = Path(folder, "run"), {"XDG_CACHE_HOME": folder}
        seconds, _ = _python(
            *("main.py", f"experiment={recipe}", f"trainer.seed={seed}", f"run_dir={run_dir}"), environment=environment
        )
        config: Any = OmegaConf.load(run_dir / "config.yaml")
        if config.data.url is None:
            raise UserError(f"{recipe}: trained on {config.data.path}, as Shakespeare is not here")
        val = [line for line in _metrics(run_dir) if line["split"] == "val"][-1]
    characters = val["step"] * config.trainer.batch_size * config.data.block_size
    return {
        "seconds": seconds,
        "loss": val["loss"],
        "plan": f"{val['step']} steps = {characters:,} characters",
        "window": config.data.block_size,
    }


def nanogpt(directory: str) -> dict:
    """nanoGPT's CPU recipe, as its README has it, from its one seed; the loss is its own estimate."""
    arguments = (
        "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 "
        "--log_interval=100 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 "
        "--max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
    )
    with tempfile.TemporaryDirectory() as folder:
        seconds, printed = _python("train.py", *arguments.split(), f"--out_dir={folder}", directory=directory)
    last = [line for line in printed.splitlines() if "val loss" in line][-1]
    plan = "2000 steps = 1,536,000 characters"
    return {"seconds": seconds, "loss": float(last.split()[-1]), "window": 64, "plan": plan}


def start(caches: str) -> dict:
    """Seconds from the command to the end of the first training step, and for `import main`. With `caches` "cold" no
    kernels are built before, and the time includes building them.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {"XDG_CACHE_HOME": folder} if caches == "cold" else {}
        command = [sys.executable, "main.py", f"run_dir={folder}/run", "trainer.log_every_steps=1"]
        metrics = Path(folder, "run", "metrics.jsonl")
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
        try:
            while not (metrics.exists() and metrics.stat().st_size):
                if process.poll() is not None:
                    raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
                time.sleep(0.01)
            first_step = time.perf_counter() - began
        finally:
            process.kill()
            process.wait()
        import_seconds, _ = _python("-c", "import main", environment=environment)
    return {"first_step_s": first_step, "import_s": import_seconds}


def generate(size: str, package: str) -> dict:
    """Characters per second of `generate` on the CPU, for 128 of them after 192 of context: without
    and with the cache, and of 64 texts at once; and of the last the share of the memory's rate at
    which weights, keys and values are read.
    """
    hardware.keep_freed_memory()
    torch.manual_seed(0)
    layers, heads, width = GENERATORS[size]
    options: dict[str, Any] = {}
    if package == "this":
        shape: dict[str, Any] = {"n_layer": layers, "n_head": heads, "n_embd": width}
        model: Any = GPT(GPTConfig(arch="modern", vocab_size=65, block_size=512, **shape))
    else:
        model = _transformers_gpt2(layers, heads, width, 65, 512)
        options = {"pad_token_id": 0, "do_sample": False}
    model.eval()

    def seconds(idx: torch.Tensor, count: int, use_cache: bool) -> float:
        if package != "this":
            options.update(attention_mask=torch.ones_like(idx), min_new_tokens=count)
        began = time.perf_counter()
        model.generate(idx, max_new_tokens=count, use_cache=use_cache, **options)
        return time.perf_counter() - began

    def rate(texts: int, use_cache: bool) -> float:
        idx = torch.randint(65, (texts, 192))
        # Less the first character, with which all of the context is read.
        taken = [seconds(idx, 129, use_cache) - seconds(idx, 1, use_cache) for _ in range(3)]
        return texts * 128 / statistics.median(taken)

    figures = {"uncached": rate(1, False), "cached": rate(1, True), "cached_64": rate(64, True)}
    weights = sum(parameter.numel() for parameter in model.parameters())
    read = 4 * (weights + 64 * 2 * layers * width * 256)  # 256 characters of context in the mean
    figures["cached_64_memory"] = figures["cached_64"] / 64 * read / _memory_bytes_per_s()
    return figures


# --------------------------------------------------------------------------------------------------
# How it is measured


def train(*overrides: str, processes: int = 1) -> dict:
    """Trains with `main.py`: characters per second, and rank 0's peak memory before the last save."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    settings = {"trainer.max_epochs": "null", "trainer.log_every_steps": f"{BLOCK}"}
    settings |= {"trainer.save_every": "null", "trainer.trackers": "[]", "data.train_split": "0.99"}
    settings |= {"experiment": "null", "samples": "false", "report": "false"}
    settings |= dict(override.split("=", 1) for override in overrides)
    with tempfile.TemporaryDirectory() as folder:
        _python(
            *(launcher if processes > 1 else []),
            *("main.py", f"run_dir={folder}"),
            *(f"{key}={value}" for key, value in settings.items()),
        )
        lines = [line for line in _metrics(Path(folder)) if line["split"] == "train"]
    return {
        "characters_per_s": _settled([line["tokens_per_s"] for line in lines]),
        "peak_bytes": lines[-1]["memory"],
    }


def flops_per_character(layers: int, width: int, context: int, vocabulary: int) -> float:
    """Of training: 6 for each weight of a matrix, and attention (Chowdhery et al., "PaLM", 2022,
    appendix B).
    """
    matrices = 12 * layers * width**2 + vocabulary * width
    return 6 * matrices + 12 * layers * width * context


def _settled(values: list[float]) -> float:
    """The median, without the first third."""
    return statistics.median(values[len(values) // 3 :])


def _metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in open(run_dir / "metrics.jsonl")]


def _python(
    *arguments: str, directory: str | Path = ROOT, environment: dict[str, str] | None = None
) -> tuple[float, str]:
    """Runs Python with these arguments; returns the seconds it took and what it printed."""
    began = time.perf_counter()
    run = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    seconds = time.perf_counter() - began
    if run.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {run.stderr.strip()[-2000:]}")
    return seconds, run.stdout


def _best_of_ten(function: Callable[[], object]) -> float:
    """Seconds of the fastest call."""
    best = math.inf
    for _ in range(10):
        began = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def _matmul_flops() -> float:
    """FLOP/s of this machine's matrix products: in bfloat16 where it has that, else in float32."""
    on_gpu = torch.cuda.is_available()
    n = 8192 if on_gpu else 2048
    a = torch.randn(n, n, device="cuda" if on_gpu else "cpu")
    if hardware.computes_in_bfloat16(a.device):
        a = a.bfloat16()
    return 2 * n**3 / _best_of_ten(lambda: torch.mm(a, a))


def _memory_bytes_per_s() -> float:
    """The rate at which this machine reads memory, of far more than its caches hold."""
    x = torch.ones(2**26)  # 256 MiB
    return x.nbytes / _best_of_ten(x.sum)


# --------------------------------------------------------------------------------------------------
# The other trainers


def _transformers_gpt2(layers: int, heads: int, width: int, vocabulary: int, context: int):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        vocab_size=vocabulary,
        n_positions=context,
        bos_token_id=0,
        eos_token_id=0,
        **NO_DROPOUT,
    )
    return GPT2LMHeadModel(config)


def _with_transformers(model, dataset, batch_size, steps, bfloat16, tick) -> None:
    import transformers

    class Ticks(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            tick()

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
        transformers.Trainer(model=model, args=arguments, train_dataset=dataset, callbacks=[Ticks()]).train()


def _with_accelerate(model, dataset, batch_size, steps, bfloat16, tick) -> None:
    from accelerate import Accelerator

    precision = "bf16" if bfloat16 else "no"
    accelerator = Accelerator(mixed_precision=precision, cpu=not torch.cuda.is_available())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    loader = torch.utils.data.DataLoader(dataset, batch_size=batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tick()


def _with_lightning(model, dataset, batch_size, steps, bfloat16, tick) -> None:
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
            tick()

    lightning.Trainer(
        max_steps=steps,
        precision="bf16-mixed" if bfloat16 else "32-true",
        gradient_clip_val=1.0,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), torch.utils.data.DataLoader(dataset, batch_size=batch_size, shuffle=True))


PEERS = {"Transformers Trainer": _with_transformers, "Accelerate": _with_accelerate, "Lightning": _with_lightning}

if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
