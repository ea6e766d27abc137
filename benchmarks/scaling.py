"""Scaling: memory, communication and expected efficiency of runs larger than one machine.

    python benchmarks/scaling.py            prints the tables of docs/scaling.md
    python benchmarks/scaling.py measure    compares the formulas with 1 to 4 processes of this machine
    python benchmarks/scaling.py simulate   and with what one rank of 8 and of 64 asks of a process group

The formulas, per optimizer step, for P parameters on N GPUs:

memory          Weights 4 P, gradients 4 P, AdamW's moments 8 P, and 12 P on rank 0 while a snapshot is
                copied to the host; with FSDP2 each over N. The weights in bfloat16: 2 P, or two gathered
                blocks. Activations: 38 bytes a character, block and channel (compiled, no dropout, counted
                with fake tensors; Korthikanti et al., 2022, count 34 with dropout), or the inputs of the
                blocks and one block's activations with activation checkpointing. Logits: 10 bytes a
                character and distinct character.
communication   DDP sums 4 P bytes of gradients, for which each GPU sends 2 (N - 1) / N times as much.
                FSDP2 gathers 2 P bytes twice and reduce-scatters 4 P once, (N - 1) / N of each. (gloo has
                no reduce-scatter and sums instead, for twice as much.)
compute         `flops_per_character`, a third more with activation checkpointing.

Efficiency is a range: at worst communication adds to computation, at best it is hidden behind it. The
rates are those of an H200: 989 TFLOP/s in bfloat16, of which 40 % are assumed, 450 GB/s each way to the
other GPUs of the host (NVLink), and 50 GB/s to other hosts (400 Gbit/s).
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the application

from benchmarks.measure import flops_per_character, train
from engine.parallel import sharding
from model import GPT, GPTConfig

VOCABULARY = 256
CHARACTERS = 32_768  # a step and GPU
FLOPS = 0.4 * 989e12
NVLINK, NETWORK, GPUS_PER_HOST = 450e9, 50e9, 8
MEMORY = 141e9
KEPT = 38  # bytes a character, block and channel, for the backward pass


@dataclass
class Size:
    """A model of the architecture `modern`."""

    layers: int
    width: int
    context: int
    checkpointing: bool = False

    @property
    def block(self) -> int:
        """Parameters of a block."""
        return 12 * self.width**2

    @property
    def parameters(self) -> int:
        return self.layers * self.block + 2 * VOCABULARY * self.width


SIZES = {
    "11 M": Size(6, 384, 256),
    "85 M": Size(12, 768, 1024),
    "1.5 B": Size(48, 1600, 1024),
    "9.7 B": Size(48, 4096, 2048, checkpointing=True),
}


def memory(size: Size, gpus: int, strategy: str) -> float:
    """Bytes that rank 0 needs at most."""
    activations = KEPT * size.layers * size.width
    if size.checkpointing:
        activations = 2 * size.layers * size.width + KEPT * size.width
    share = gpus if strategy == "fsdp" else 1
    weights = 2 * 2 * size.block if strategy == "fsdp" else 2 * size.parameters
    states = (16 + 12) * size.parameters / share
    return states + weights + CHARACTERS * (activations + 10 * VOCABULARY)


def sent(size: Size, gpus: int) -> float:
    """Bytes that a GPU sends in a step, the same with DDP and FSDP2."""
    return 8 * size.parameters * (gpus - 1) / gpus


def efficiency(size: Size, gpus: int) -> tuple[float, float]:
    """The share of the time that is spent computing: worst and best."""
    flops = flops_per_character(size.layers, size.width, size.context, VOCABULARY)
    compute = CHARACTERS * flops * (4 / 3 if size.checkpointing else 1) / FLOPS
    communicate = sent(size, gpus) / (NVLINK if gpus <= GPUS_PER_HOST else NETWORK)
    return compute / (compute + communicate), compute / max(compute, communicate)


def tables() -> str:
    """The tables of docs/scaling.md."""
    out = ["| model | GPUs | memory a GPU: DDP | FSDP2 | sent a step and GPU | efficiency |"]
    out += ["|---|---|---|---|---|---|"]
    for name, size in SIZES.items():
        for gpus in (8, 1024):
            needed = (memory(size, gpus, strategy) for strategy in ("ddp", "fsdp"))
            cells = [f"{x / 1e9:,.1f} GB{' (too much)' * (x > MEMORY)}" for x in needed]
            worst, best = efficiency(size, gpus)
            cells += [f"{sent(size, gpus) / 1e9:,.2f} GB", f"{worst:.0%} to {best:.0%}"]
            out.append(f"| {name} | {gpus:,} | {' | '.join(cells)} |")
    out += ["", "| link | characters a GPU and step that hide FSDP2's communication |", "|---|---|"]
    for name, rate in (("NVLink, one host", NVLINK), ("network, several hosts", NETWORK)):
        out.append(f"| {name} | {8 / rate * FLOPS / 6:,.0f} |")
    return "\n".join(out)


# --------------------------------------------------------------------------------------------------
# Small cases, measured


def measured(processes: int, strategy: str, size: Size) -> tuple[float, float]:
    """Peak bytes of rank 0, and bytes that a process sends in a step, in float32."""
    settings = (
        *("model=modern", f"model.n_layer={size.layers}", f"model.n_embd={size.width}"),
        *("model.n_head=12", f"data.block_size={size.context}", "data=text"),
        *(f"trainer.batch_size={4 * processes}", f"trainer.strategy={strategy}"),
        *("trainer.device=cpu", "trainer.threads=1", "trainer.use_amp=false"),
    )
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text("".join(chr(0x4E00 + i % VOCABULARY) for i in range(100 * VOCABULARY)))
        peaks, totals = [], []
        for steps in (2, 6):  # what is sent at the start and the end cancels out
            before = loopback()
            run = train(*settings, f"data.path={text}", f"trainer.max_steps={steps}", processes=processes)
            totals.append(loopback() - before)
            peaks.append(run["peak_bytes"])
    return peaks[-1], (totals[1] - totals[0]) / 4 / processes


def loopback() -> int:
    """Bytes sent so far over this host's own interface, which gloo uses here."""
    line = next(x for x in Path("/proc/net/dev").read_text().splitlines() if "lo:" in x)
    return int(line.split(":")[1].split()[8])


def measure() -> None:
    """Prints the table of small cases, in MiB."""
    size, tiny = Size(6, 768, 64), Size(1, 48, 64)
    print("| processes | strategy | memory: formula, measured | sent: formula, measured |")
    print("|---|---|---|---|")
    for processes, strategy in ((1, "ddp"), (2, "ddp"), (2, "fsdp"), (4, "fsdp")):
        peak, bytes_sent = measured(processes, strategy, size)
        peak -= measured(processes, strategy, tiny)[0]  # the program itself
        sharded = strategy == "fsdp"
        states = 16 * size.parameters / (processes if sharded else 1)
        states += 2 * 4 * size.block * sharded
        # float32 over gloo: FSDP2 gathers 4 bytes a parameter twice, and sums 4.
        each = (2 * 4 + 8 if sharded else 8) * size.parameters
        figures = (states, peak, each * (processes - 1) / processes, bytes_sent)
        a, b, c, d = (f"{x / 2**20:,.0f}" for x in figures)
        print(f"| {processes} | {strategy} | {a}, {b} MiB | {c}, {d} MiB |", flush=True)


# --------------------------------------------------------------------------------------------------
# Large cases, simulated


class Collectives(TorchDispatchMode):
    """Records the collectives of sharded parameters, in order: the letter of its kind, gather or reduce, and the
    bytes of the full tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        full = {"c10d::_allgather_base_": 0, "c10d::_reduce_scatter_base_": 1}.get(func.name())
        if full is not None:
            self.calls.append(("gr"[full], args[full].nbytes))
        return func(*args, **(kwargs or {}))

    def note(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The sum of a DDP bucket, which no dispatch shows: on the fake group, the bucket itself."""
        self.calls.append(("r", bucket.buffer().nbytes))
        result: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        result.set_result(bucket.buffer())
        return result


def simulated(processes: int, strategy: str, accumulation: int, size: Size) -> tuple[int, list[tuple[str, int]]]:
    """The second step of rank 0 of `processes`, in float32, on torch's fake process group, which returns at once: bytes
    of weights that the rank keeps, and the collectives in order.
    """
    config = GPTConfig(
        arch="modern", model_type=None, n_layer=size.layers, n_head=6, n_embd=size.width,
        vocab_size=VOCABULARY, block_size=size.context, embd_pdrop=0, resid_pdrop=0,
    )  # fmt: skip
    dist.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
    try:
        model = sharding.build(lambda: GPT(config), strategy, torch.float32)
        shards = [getattr(p, "_local_tensor", p) for p in model.parameters()]
        x = torch.zeros((1, size.context), dtype=torch.int64)
        with Collectives() as seen:
            if isinstance(model, DistributedDataParallel):
                model.register_comm_hook(seen, Collectives.note)
            for i in range(2 * accumulation):
                if i == accumulation:
                    seen.calls.clear()  # DDP fills its buckets in the order of the first step
                if isinstance(model, DistributedDataParallel):  # as the Trainer does
                    model.require_backward_grad_sync = i % accumulation == accumulation - 1
                model(x, x)[1].backward()
        return sum(shard.nbytes for shard in shards), seen.calls
    finally:
        dist.destroy_process_group()


def simulate() -> None:
    """Prints the table of large cases, in MB: formula, simulated; and the order of FSDP2's collectives."""
    size = SIZES["11 M"]
    columns = "weights: formula, simulated | collectives | gathered | reduced"
    print(f"| processes | strategy | micro-batches | {columns} |")
    print("|---|---|---|---|---|---|---|")
    for processes in (8, 64):
        for strategy, accumulation in (("ddp", 1), ("ddp", 4), ("fsdp", 1), ("fsdp", 4)):
            kept, calls = simulated(processes, strategy, accumulation, size)
            expected = formula(processes, strategy, accumulation, size)
            found = (kept, *(sum(b for kind, b in calls if kind == k) for k in "gr"))
            cells = [f"{a / 1e6:.2f}, {b / 1e6:.2f}" for a, b in zip(expected, found, strict=True)]
            cells.insert(1, str(len(calls)))
            print(f"| {processes} | {strategy} | {accumulation} | {' | '.join(cells)} |")
    print(*(kind for kind, _ in simulated(8, "fsdp", 1, size)[1]), sep="")


def formula(processes: int, strategy: str, accumulation: int, size: Size) -> tuple[float, float, float]:
    """Bytes in float32 of a rank's weights, and of the full tensors gathered and reduced in a step."""
    weights = 4.0 * size.parameters
    if strategy == "ddp":
        return weights, 0.0, weights
    return weights / processes, 2 * weights * accumulation, weights * accumulation


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        measure()
    elif sys.argv[1:] == ["simulate"]:
        simulate()
    else:
        print(tables())
