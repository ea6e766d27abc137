"""Parameters, memory, communication and expected efficiency of runs larger than a machine.

    python benchmarks/scaling.py            prints the tables of docs/scaling.md
    python benchmarks/scaling.py measure    compares the formulas with 1 to 4 processes of this machine

Formulas, per optimizer step, for P parameters of which a GPU of N holds its share:

memory          4 P for the weights, 4 P for the gradients, 8 P for AdamW's two moments (Muon has
                one for the hidden matrices), and 12 P that a snapshot takes until it is in the
                host's memory (on rank 0), over N with FSDP2; the weights in bfloat16, 2 P, or two
                gathered blocks of them; what the backward pass needs, 38 bytes a character, block
                and channel (compiled, without dropout, counted with fake tensors; 40 for gpt2 and
                77 for modern where nothing is compiled; Korthikanti et al., 2022, count 34 with
                dropout), or the inputs of the blocks alone with activation checkpointing; 10 bytes
                a character and distinct character of logits.
communication   DDP adds up 4 P bytes of gradients, for which each GPU sends 2 (N - 1) / N times as
                much; FSDP2 gathers 2 P bytes twice and reduces and scatters 4 P once, (N - 1) / N
                of each. (gloo has no reduce-scatter and adds up instead, for twice as much.)
compute         6 FLOP a parameter and character and attention (`GPT.flops_per_token`), a third more
                with activation checkpointing.

Communication is hidden behind computation at best and added to it at worst: efficiency is given as
that range. Rates are of one H200: 989 TFLOP/s in bfloat16 of which `UTILISATION` are reached, 450
GB/s each way to the other GPUs of the host (NVLink), 50 GB/s to other hosts (400 Gbit/s each).
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from engine.optim.optimizer import OptimizerConfig, create_optimizer
from engine.parallel import (
    distributed,
    sharding,
)
from model import GPT, GPTConfig

VOCABULARY = 256
PEAK, UTILISATION = 989e12, 0.4
NVLINK, NETWORK, GPUS_PER_HOST = 450e9, 50e9, 8
MEMORY = 141e9

# layers, heads, width, context; 10^7 to 10^10 parameters
SIZES = {
    "11 M": (6, 6, 384, 256),
    "85 M": (12, 12, 768, 1024),
    "1.5 B": (48, 25, 1600, 1024),
    "9.7 B": (48, 32, 4096, 2048),
}
CHARACTERS = 32_768  # a step and GPU
KEPT = 38  # bytes a character, block and channel, for the backward pass


@dataclass
class Cost:
    """What a step costs one of `gpus` processes."""

    parameters: int
    memory: float  # bytes
    sent: float  # bytes
    compute_s: float
    communication_s: float

    @property
    def efficiency(self) -> tuple[float, float]:
        """Worst and best share of the time that is spent computing."""
        worst = self.compute_s / (self.compute_s + self.communication_s)
        return worst, min(1.0, self.compute_s / max(self.compute_s, self.communication_s))


def gpt(size: str) -> GPT:
    """The model, without memory."""
    n_layer, n_head, n_embd, block_size = SIZES[size]
    with torch.device("meta"):
        return GPT(
            GPTConfig(
                arch="modern",
                n_layer=n_layer,
                n_head=n_head,
                n_embd=n_embd,
                vocab_size=VOCABULARY,
                block_size=block_size,
            )
        )


def cost(
    model: GPT,
    gpus: int,
    strategy: str,
    checkpointing: bool = False,
) -> Cost:
    """The formulas above, for AdamW and `CHARACTERS` a step and GPU."""
    config = model.config
    parameters = sum(p.numel() for p in model.parameters())
    block = sum(p.numel() for p in model.blocks[0].parameters())
    others = (gpus - 1) / gpus
    share = gpus if strategy == "fsdp" else 1
    states = (16 + 12) * parameters / share
    channels = config.n_layer * config.n_embd
    kept = 2 * channels + KEPT * config.n_embd if checkpointing else KEPT * channels
    memory = states + CHARACTERS * (kept + 10 * config.vocab_size)
    if strategy == "fsdp":
        memory += 2 * 2 * block
        sent = (2 * 2 + 4) * parameters * others
    else:
        memory += 2 * parameters
        sent = 2 * 4 * parameters * others
    rate = NVLINK if gpus <= GPUS_PER_HOST else NETWORK
    flops = model.flops_per_token() * (4 / 3 if checkpointing else 1)
    compute = CHARACTERS * flops / (PEAK * UTILISATION)
    return Cost(parameters, memory, sent, compute, sent / rate)


def tables() -> str:
    """The tables of docs/scaling.md."""
    out = [
        "| model | GPUs | strategy | memory a GPU | sent a step and GPU | efficiency |",
        "|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        model = gpt(size)
        for gpus in (8, 64, 1024):
            for strategy in ("ddp", "fsdp"):
                c = cost(model, gpus, strategy, checkpointing=size == "9.7 B")
                fits = "" if c.memory < MEMORY else " (does not fit)"
                worst, best = c.efficiency
                out.append(
                    f"| {size} | {gpus:,} | {strategy} | {c.memory / 1e9:,.1f} GB{fits} "
                    f"| {c.sent / 1e9:,.2f} GB | {worst:.0%} to {best:.0%} |"
                )
    out += ["", "| link | characters a GPU and step that hide FSDP2's communication |", "|---|---|"]
    for name, rate in (("NVLink, one host", NVLINK), ("network, several hosts", NETWORK)):
        out.append(f"| {name} | {8 / rate * PEAK * UTILISATION / 6:,.0f} |")
    return "\n".join(out)


# --------------------------------------------------------------------------------------------------
# The measured small cases


def worker(strategy: str) -> None:
    """One process of several: a few steps; rank 0 prints what they took."""
    import torch._dynamo  # what torch loads sooner or later anyhow is not counted
    import torch.distributed.fsdp

    world = distributed.join_processes("cpu", threads=1, timeout_s=300)
    base = resident()
    config = GPTConfig(
        arch="modern",
        model_type="gpt2",
        n_layer=6,
        vocab_size=VOCABULARY,
        block_size=64,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = sharding.build(lambda: GPT(config), world, strategy, torch.float32, offload=False)
    optimizer = create_optimizer(model, OptimizerConfig())
    x, y = torch.randint(VOCABULARY, (2, 64)), torch.randint(VOCABULARY, (2, 64))
    times, bytes_sent = [], []
    for _ in range(4):
        before, began = loopback(), time.perf_counter()
        model(x, y)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        if world.size > 1:
            torch.distributed.barrier()
        times.append(time.perf_counter() - began)
        bytes_sent.append((loopback() - before) / world.size)
    peaks = distributed.gather(resident(peak=True) - base, world)
    if world.is_first:
        parameters = sum(p.numel() for p in model.parameters())
        bare = distributed.unwrap(model)
        block = sum(p.numel() for p in bare.get_submodule("blocks.0").parameters())
        values = {"parameters": parameters, "block": block, "peak": max(peaks)}
        values |= {"sent": statistics.median(bytes_sent), "seconds": statistics.median(times)}
        print(json.dumps(values))
    distributed.leave(0)


def resident(peak: bool = False) -> int:
    """Bytes of memory of this process."""
    if peak:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def loopback() -> int:
    """Bytes sent so far over this host's own interface, on which gloo talks here."""
    line = next(x for x in Path("/proc/net/dev").read_text().splitlines() if "lo:" in x)
    return int(line.split(":")[1].split()[8])


def measure() -> None:
    print("| processes | strategy | memory: formula, measured | sent: formula, measured |")
    print("|---|---|---|---|")
    for count, strategy in ((1, "ddp"), (2, "ddp"), (2, "fsdp"), (4, "fsdp")):
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
        command = [sys.executable, *torchrun, __file__, "worker", strategy]
        run = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if run.returncode:
            sys.exit(run.stderr)
        seen = json.loads(run.stdout.splitlines()[-1])
        parameters = seen["parameters"]
        states = 16 * parameters / (count if strategy == "fsdp" else 1)
        states += 2 * 4 * seen["block"] * (strategy == "fsdp")
        # In float32 and by gloo here: FSDP2 gathers 4 bytes a parameter twice, and adds up 4.
        sent = (2 * 4 + 8 if strategy == "fsdp" else 8) * parameters * (count - 1) / count
        print(
            f"| {count} | {strategy} | {states / 2**20:,.0f}, {seen['peak'] / 2**20:,.0f} MiB "
            f"| {sent / 2**20:,.0f}, {seen['sent'] / 2**20:,.0f} MiB |"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2])
    elif sys.argv[1:] == ["measure"]:
        measure()
    else:
        print(tables())
