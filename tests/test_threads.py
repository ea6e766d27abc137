"""Fewer threads while other processes are busy; the result of a run does not depend on their number."""

from types import SimpleNamespace

import pytest
import torch

from char_dataset import CharDataset, DataConfig
from engine import portable
from engine.kernels import build
from engine.machine import hardware, threads
from engine.machine.threads import AdaptiveThreads
from engine.parallel.distributed import join_processes
from model import GPT, GPTConfig, OptimizerConfig, create_optimizer
from trainer import Trainer, TrainerConfig


class Machine:
    """Cores that other processes leave to this one, and a clock."""

    def __init__(self, monkeypatch):
        self.now = self.cpu = self.preempted = 0.0
        clock = SimpleNamespace(perf_counter=lambda: self.now, process_time=lambda: self.cpu)
        monkeypatch.setattr(threads, "time", clock)
        monkeypatch.setattr(portable, "preemptions", lambda: int(self.preempted))

    def run(self, adaptive: AdaptiveThreads, seconds: int, cores: float) -> list[int]:
        """The numbers of threads in so many seconds of steps, of a quarter of a second each."""
        numbers = []
        for _ in range(4 * seconds):
            wanted = torch.get_num_threads()
            numbers.append(wanted)
            with adaptive.step():
                self.now += 0.25
                self.cpu += 0.25 * min(wanted, cores)
                self.preempted += 0.25 * (150 if wanted > cores else 30)
            adaptive.adapt()
        return numbers


def test_threads_decrease_beside_busy_processes_and_increase_again(monkeypatch):
    torch.set_num_threads(4)
    machine = Machine(monkeypatch)
    asked = []
    adaptive = AdaptiveThreads(enabled=True, may_have=lambda threads: asked.append(threads) or True)
    assert set(machine.run(adaptive, 30, cores=4)) == {4} and not asked
    numbers = machine.run(adaptive, 60, cores=2.3)
    assert numbers[0] == 4 and max(numbers[12:]) == 3  # tried, and taken away again
    assert numbers[12:].count(2) > 0.9 * len(numbers[12:])
    assert machine.run(adaptive, 60, cores=4)[-1] == 4
    machine.run(adaptive, 10, cores=1)
    adaptive.close()
    assert torch.get_num_threads() == 4 and asked == [3, 2, 1]
    adaptive = AdaptiveThreads(enabled=True, may_have=lambda threads: False)
    assert set(machine.run(adaptive, 10, cores=1)) == {4}


@pytest.mark.parametrize("preempted", [0, 1000])
def test_typed_thread_counts_and_sleeping_threads_do_not_adapt(monkeypatch, preempted):
    torch.set_num_threads(2)
    machine = Machine(monkeypatch)
    adaptive = AdaptiveThreads(enabled=not preempted)
    for _ in range(10):
        with adaptive.step():
            machine.now, machine.preempted = machine.now + 1, machine.preempted + preempted
        adaptive.adapt()
        machine.now, machine.preempted = machine.now + 9, machine.preempted + 9e9  # between steps
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    "arch, optimizer, width, deterministic, may_adapt",
    [
        ("modern", "muon", 64, "auto", True),
        ("gpt2", "adamw", 64, "auto", True),
        ("gpt2", "adamw", 40, "auto", False),
        ("gpt2", "adamw", 40, "false", True),
    ],
)
def test_a_change_of_threads_does_not_change_a_deterministic_run(
    tmp_path, monkeypatch, arch, optimizer, width, deterministic, may_adapt
):
    config = TrainerConfig(
        batch_size=16, micro_batch_size=8, max_epochs=None, max_steps=10, trackers=[], save_every=None,
        deterministic=deterministic,
    )  # fmt: skip
    if build.library(torch.float32) is None:
        pytest.skip("without the C kernels, sums depend on the number of threads")
    (tmp_path / "text.txt").write_text("".join(chr(97 + i * i % 131) for i in range(9000)))
    results = []
    for change in (False, True):
        data = DataConfig(path=str(tmp_path / "text.txt"), block_size=64)
        train, _ = CharDataset(data).split()
        torch.manual_seed(0)
        shape = dict(n_layer=2, n_head=2, n_embd=width, block_size=64, token_shift=arch == "modern")
        model = GPT(GPTConfig(arch=arch, vocab_size=train.vocab_size, **shape))
        optimizer_config = OptimizerConfig(name=optimizer, learning_rate=1e-2)
        seen = []

        def adapt(adaptive, now, change=change, seen=seen):
            seen.append(threads := torch.get_num_threads())
            if change and threads > 1 and adaptive.may_have(threads - 1):
                torch.set_num_threads(threads - 1)

        monkeypatch.setattr(AdaptiveThreads, "_adapt", adapt)
        monkeypatch.setattr(threads, "PERIOD", 0.0)
        Trainer(
            config, model, create_optimizer(model, optimizer_config), train,
            run_dir=str(tmp_path / f"{change}"), world=join_processes("cpu", 8),
        ).train()  # fmt: skip
        # The kernels have no layer norm 40 wide, and that of plain PyTorch depends on the threads. Seen on AMD's CPUs.
        if may_adapt or "AuthenticAMD" in hardware.cpuinfo():
            assert set(seen) == (set(range(1, 9)) if change and may_adapt else {8})
        results.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert deterministic == "false" or torch.equal(*results)
