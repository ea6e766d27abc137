import contextlib
import copy
import dataclasses
import itertools
import json
import math
import re
import shutil
import signal
import threading
import time
from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import best, equal, latest, metrics, no_space, small_disk, small_gpt

import model as model_module
from char_dataset import ORDER_STEPS, CharDataset, DataConfig, MicroBatches, window_order
from engine import precision
from engine.errors import UserError
from engine.machine.hardware import is_out_of_memory
from engine.parallel import distributed
from engine.precision import missing_to_compile
from engine.run import evaluation
from engine.run.plan import Plan
from engine.run.requests import Requests
from engine.signals import REQUESTS, Stopped
from engine.snapshots.snapshot import SnapshotError
from engine.snapshots.storage import SnapshotStorage, load
from model import GPT, OptimizerConfig, create_optimizer
from sample import load_model
from trainer import Trainer, TrainerConfig

SETTINGS = {
    "max_epochs": None,
    "max_steps": 6,
    "batch_size": 12,
    "amp_dtype": "float32",
    "log_every_steps": 1,
    "device": "cpu",
    "eval_every_steps": 3,
    "threads": 1,
}


@pytest.fixture
def parts(text_file):
    return CharDataset(DataConfig(path=str(text_file), block_size=8, train_split=0.8)).split()


def make(parts, tmp_path, arch="gpt2", pdrop=0.0, optimizer="adamw", **settings) -> Trainer:
    train, test = copy.deepcopy(parts)
    model = small_gpt(arch, pdrop, vocab_size=train.vocab_size, block_size=8)
    opt = create_optimizer(model, OptimizerConfig(name=optimizer, learning_rate=1e-2))
    tmp_path.mkdir(exist_ok=True)
    config = TrainerConfig(**{**SETTINGS, **settings})
    trainer = Trainer(config, model, opt, train, test, run_dir=str(tmp_path))
    trainer._probe = lambda: torch.empty(0)  # many tests replace the model's forward pass
    return trainer


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.parameters])


def multiply_loss(trainer: Trainer, factor) -> None:
    """Multiplies the model's loss by `factor(step)`."""
    forward = trainer.bare.forward

    def multiplied(x, y):
        logits, loss = forward(x, y)
        return logits, loss * factor(trainer.state.step)

    trainer.bare.forward = multiplied


def after_step(trainer: Trainer, action) -> None:
    """Has `action(step)` run after each step of the optimizer."""
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (step(), action(trainer.state.step + 1))


def set_losses(trainer: Trainer, *losses: float) -> None:
    """Sets what the trainer's evaluations give."""
    left = iter(losses)
    trainer.evaluate = lambda: evaluation.Evaluation(next(left), 1, [0.0])


def during(trainer: Trainer, moment: str, step: int, action) -> None:
    """Has `action()` run in the middle of the given step, of its evaluation, or of its save."""
    owner, name = {
        "start": (trainer.requests, "check"),
        "step": (trainer, "train_step"),
        "micro-batch": (trainer.bare, "forward"),
        "evaluation": (trainer.test_dataset, "eval_windows"),
        "save": (trainer.snapshots.storage, "_put"),
    }[moment]
    call, save = getattr(owner, name), trainer.snapshots.save
    done = threading.Event()

    def acting(*args):
        if trainer.state.step == step and not done.is_set():
            action()
            done.set()
        return call(*args)

    setattr(owner, name, acting)
    if moment == "save":  # is another thread's: it may come late
        trainer.snapshots.save = lambda *args: (save(*args), trainer.state.step == step and done.wait(30))[0]


def stop(trainer: Trainer, moment: str, step: int, number: int = signal.SIGTERM) -> None:
    """Trains until a signal comes at that moment."""
    during(trainer, moment, step, lambda: signal.raise_signal(number))
    with pytest.raises(Stopped) as stopped:
        trainer.train()
    assert stopped.value.status == 128 + number


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The time, as the application sees it."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_the_model_and_settings_of_another_program_are_trained_and_stored_but_not_sampled(parts, tmp_path):
    class Bare(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(99, 99)

        def forward(self, x, y):
            return None, torch.nn.functional.cross_entropy(self.table(x).flatten(0, 1), y.flatten())

    model = Bare()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = {"optimizer": {"dtype": torch.float32, "lr": np.float64(0.5), "path": tmp_path, "n": (1, 2)}}
    config = TrainerConfig(**SETTINGS | {"eval_every_steps": None})
    Trainer(config, model, optimizer, parts[0], run_dir=str(tmp_path), run_config=said).train()
    kept = latest(tmp_path).config
    assert kept["optimizer"] == {"dtype": "torch.float32", "lr": 0.5, "path": str(tmp_path), "n": [1, 2]}
    assert kept["trainer"]["batch_size"] == config.batch_size
    with pytest.raises(SnapshotError, match="does not record the size of its model"):
        load_model(latest(tmp_path), "cpu")


@pytest.mark.parametrize(
    "optimizer, data, says",
    [
        ("adamw", {"train_split": 0.5}, r"data\.train_split was 0\.8, is 0\.5"),
        ("muon", {}, r"optimizer\.class was AdamW, is Muon"),
    ],
)
def test_a_trainer_without_main_refuses_to_resume_with_another_optimizer_or_part_of_the_text(
    parts, tmp_path, optimizer, data, says
):
    make(parts, tmp_path).train()
    others = CharDataset(dataclasses.replace(parts[0].config, **data)).split()
    with pytest.raises(UserError, match=says):
        make(others, tmp_path, optimizer=optimizer)


def test_the_speed_is_of_recent_steps_without_the_first_and_evaluations(parts, tmp_path, clock, caplog):
    """The time left is at that speed, with evaluations as often as so far."""
    trainer = make(parts, tmp_path, log_every_steps=4, max_steps=12, eval_every_steps=3)

    def take_time(step):
        clock[0] += {1: 1000.0, 2: 1.0, 3: 1.0, 4: 1.0}.get(step, 5.0)

    def evaluate():
        clock[0] += 6.0
        return evaluation.Evaluation(1.0, 1, [1.0])

    after_step(trainer, take_time)
    trainer.evaluate = evaluate
    with caplog.at_level("INFO", logger="gpt"):
        trainer.train()
    assert re.findall(r"step +(\d+)/12 .* (\S+) left", caplog.text) == [("4", "0:20"), ("8", "0:26"), ("12", "0:00")]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["tokens_per_s"] for line in lines if line["split"] == "train"] == [96 / 1, 96 / 5, 96 / 5]


@pytest.mark.parametrize(
    "total, seconds, taken",
    [(60, 0.5, 60), (60, 1.0, 60), (60, 2.0, 32), (60, 10.0, 8), (150, 0.4, 150), (150, 0.8, 76), (150, 4.0, 22)],
)
def test_a_run_with_a_time_limit_ends_by_its_steps_or_by_the_clock_with_its_whole_schedule(
    parts, tmp_path, clock, total, seconds, taken
):
    """The last step, of up to 10 s, begins in the last quarter of the schedule."""
    trainer = make(parts, tmp_path, max_steps=total, eval_every_steps=20, max_minutes=3.0)
    trainer.schedule = OptimizerConfig(schedule="linear").learning_rate_factor

    def take_time(step):
        clock[0] += 50.0 if step == 1 else seconds

    after_step(trainer, take_time)
    trainer.train(deadline=50.0 + 59.0)
    assert trainer.state.step == taken
    lines = metrics(tmp_path)
    assert [(line["step"], line["split"]) for line in lines[-2:]] == [(taken, "train"), (taken, "val")]
    assert lines[-2]["lr"] <= 1e-2 * 0.26
    resumed = make(parts, tmp_path, max_steps=total, eval_every_steps=20, max_minutes=3.0)
    resumed.train()
    assert resumed.state.step == taken and resumed._is_over()


def test_a_steady_run_with_a_time_limit_is_resumed_bit_for_bit_and_counts_on(parts, tmp_path):
    limited = {"max_minutes": 10.0, "max_steps": 8}
    whole = make(parts, tmp_path / "a", **limited)
    whole.train()
    stop(make(parts, tmp_path / "b", **limited), "start", 0)  # before the clock has started
    again = make(parts, tmp_path / "b", **limited)
    assert again.state.limit_s is None and again.state.step == 0
    stop(again, "micro-batch", 5)
    saved = latest(tmp_path / "b")
    assert saved.limit_s == pytest.approx(600, abs=30) and saved.seconds > 0
    resumed = make(parts, tmp_path / "b", **limited)
    assert resumed.state.limit_s == saved.limit_s
    resumed.train()
    assert torch.equal(weights(whole), weights(resumed)) and resumed.state.seconds > saved.seconds
    longer = make(parts, tmp_path / "b", **limited | {"max_minutes": 20.0})
    assert longer.state.limit_s == pytest.approx(2 * saved.limit_s)


def test_a_rescued_snapshot_is_the_best_again(parts, tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.LAST_SAVE", (1, 0.0))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    trainer = make(parts, tmp_path)
    put = trainer.snapshots.storage._put
    trainer.snapshots.storage._put = lambda *args: no_space() if trainer.state.step == 6 else put(*args)
    with pytest.raises(UserError, match=r"step 6 was not written: .*; it is in") as failed:
        trainer.train()
    shutil.move(re.search(r"it is in (\S+):", str(failed.value))[1], tmp_path / "gpt_snapshot.pt")
    make(parts, tmp_path).train()
    assert best(tmp_path).step == 6


def test_no_room_for_a_rescue_is_said(parts, tmp_path, monkeypatch):
    trainer = make(parts, tmp_path)
    with small_disk(tmp_path, "8k") as disk, pytest.raises(UserError, match="No space left on device"):
        monkeypatch.setattr("tempfile.tempdir", str(disk))
        trainer.snapshots.rescue(trainer._snapshot())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_parameter_follows_the_schedule(parts, tmp_path, optimizer):
    trainer = make(parts, tmp_path, optimizer=optimizer)
    trainer.schedule = lambda step, total: 0.5**step
    seen = []
    after_step(trainer, lambda _: seen.append([group["lr"] for group in trainer.optimizer.param_groups]))
    trainer.train()
    assert len(seen[0]) > 1
    assert seen == [[1e-2 * 0.5**k] * len(seen[0]) for k in range(6)]
    assert [line["lr"] for line in metrics(tmp_path, "train")] == [1e-2 * 0.5**k for k in range(6)]


@pytest.mark.parametrize("amp_dtype", ["bfloat16", "float16", "float32"])
def test_training_and_evaluation_compute_in_the_chosen_dtype(parts, tmp_path, amp_dtype):
    trainer = make(parts, tmp_path, amp_dtype=amp_dtype, eval_every_steps=6)
    seen = set()

    def note(model, _):
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        seen.add((model.training, dtype))

    trainer.bare.register_forward_pre_hook(note)
    trainer.train()
    assert seen == {(True, getattr(torch, amp_dtype)), (False, getattr(torch, amp_dtype))}


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize("device, rounds", [("cuda", True), ("cpu", False)])
def test_float32_on_a_gpu_takes_tf32_for_steps_alone(parts, tmp_path, device, rounds):
    trainer = make(parts, tmp_path, max_steps=2)
    trainer.precision = dataclasses.replace(trainer.precision, device=device)
    seen = set()
    matmul = torch.backends.cuda.matmul
    trainer.bare.register_forward_pre_hook(lambda model, _: seen.add((model.training, matmul.allow_tf32)))
    trainer.train()
    assert seen == {(True, rounds), (False, False)}


def test_any_map_style_data_set_trains_its_items_stacked(parts, tmp_path, caplog):
    """As PyTorch's tutorial has them: `random_split` of the windows, and a `TensorDataset`."""
    whole = CharDataset(dataclasses.replace(parts[0].config))
    x, y = zip(*(whole[i] for i in range(len(whole))), strict=True)
    tensors = torch.utils.data.TensorDataset(torch.stack(x), torch.stack(y))
    losses = []
    for name, dataset in (("windows", whole), ("tensors", tensors)):
        halves = torch.utils.data.random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(1))
        model = small_gpt("gpt2", 0.0, vocab_size=whole.vocab_size, block_size=8)
        optimizer = create_optimizer(model, OptimizerConfig(learning_rate=1e-2))
        trainer = Trainer(TrainerConfig(**SETTINGS), model, optimizer, *halves, run_dir=str(tmp_path / name))
        losses.append(trainer.train())
        assert trainer.evaluate().characters == 8 * len(halves[1])
    assert losses[0] == losses[1] < 4
    assert caplog.text.count("windows of the training and the held-out part overlap") == 2
    assert latest(tmp_path / "windows").vocabulary == whole.vocabulary
    for other in ([1, 2], torch.utils.data.TensorDataset(torch.zeros(3))):
        with pytest.raises(UserError, match="the Trainer takes a CharDataset or a map-style data set"):
            Trainer(TrainerConfig(**SETTINGS), model, optimizer, other)


@pytest.mark.parametrize("deterministic, mode", [(True, 2), (False, 0)])
def test_determinism_is_switched_on_and_off_again(parts, tmp_path, deterministic, mode):
    chosen = make(parts, tmp_path, compile=False, deterministic=deterministic).precision  # also by Python's booleans
    assert (chosen.compile, chosen.deterministic) == (False, deterministic)
    with chosen.determinism():
        assert torch.get_deterministic_debug_mode() == mode
    assert torch.get_deterministic_debug_mode() == 0 and torch.utils.deterministic.fill_uninitialized_memory


# --- data order ---


@pytest.fixture
def audited(parts) -> CharDataset:
    """A data set whose batches are the indices of their windows."""
    parts[0].batch = lambda indices: (torch.as_tensor(indices), torch.zeros(1))
    return parts[0]


@pytest.mark.parametrize("steps", [11, 25, 40, 80])
def test_a_run_ends_with_a_whole_pass_over_the_text_and_an_extended_one_takes_other_windows(audited, steps):
    config = TrainerConfig(max_epochs=None, max_steps=steps, batch_size=20)
    n, size = len(audited), audited.block_size
    positions = set()
    for first_step, total_steps in ((0, steps), (steps, 2 * steps), (2 * steps, 2 * steps + 1)):
        first = Plan(n, size, 20, 1, 1, total_steps).first_position
        taken = range(first + first_step * 20, first + total_steps * 20)
        assert positions.isdisjoint(taken)
        positions.update(taken)
    micro_batches = MicroBatches(audited, 7, Plan.make(config, n, size, 1))
    seen = [window for step in range(steps) for window in micro_batches[step][0].tolist()]
    offset = seen[-1] % size
    last_pass = [*range(offset, n, size)]
    assert sorted(seen[-len(last_pass) :]) == last_pass
    assert steps < 80 or sorted(seen[-n:]) == [*range(n)]  # and with a whole epoch


def test_the_order_of_a_huge_plan_is_computed_in_pieces(audited, monkeypatch):
    def windows(steps: int, step: int) -> list[int]:
        plan = Plan(len(audited), audited.block_size, 20, 1, 1, steps)
        return MicroBatches(audited, 7, plan)[step][0].tolist()

    last = windows(10**14, 10**14 - 1)
    assert len({window % audited.block_size for window in last}) == 1  # of one pass
    expected = [windows(10, step) for step in range(10)]
    monkeypatch.setattr("char_dataset.ORDER_WINDOWS", 60)
    assert [windows(10, step) for step in range(10)] == expected
    plan = Plan(len(audited), audited.block_size, 2**18, 1, 1, 10)
    assert MicroBatches(audited, 7, plan).chunk_steps == 1


@pytest.mark.parametrize(
    "device, amp_dtype, has_kernels, flops, compiles",
    [
        ("cpu", "float32", False, 1e15, True),
        ("cpu", "float32", False, 1e12, False),
        ("cpu", "float32", True, 1e15, False),
        ("cpu", "bfloat16", False, 1e15, False),
        ("cuda", "bfloat16", False, 1e16, True),
        ("cuda", "bfloat16", False, 1e15, False),
    ],
)
def test_long_runs_are_compiled_on_a_cpu_only_in_float32_without_kernels(
    device, amp_dtype, has_kernels, flops, compiles, monkeypatch
):
    monkeypatch.setattr("engine.kernels.build.library", lambda _: object() if has_kernels else None)
    monkeypatch.setattr(precision, "missing_to_compile", lambda _: None)
    config = TrainerConfig(amp_dtype=amp_dtype)
    assert precision.resolve(config, torch.device(device), flops, {}).compile == compiles
    monkeypatch.setattr(precision, "missing_to_compile", lambda _: "a compiler")
    config = TrainerConfig(compile="true")
    assert not precision.resolve(config, torch.device(device), flops, {}).compile


@pytest.mark.parametrize(
    "device, has, missing",
    [
        ("cpu", {"g++"}, None),
        ("cpu", {"gcc"}, "C++ compiler (g++)"),
        ("cuda", {"gcc", "triton", "Python.h"}, None),
        ("cuda", {"gcc", "Python.h"}, "Triton"),
        ("cuda", {"triton", "Python.h"}, "C compiler (gcc)"),
        ("cuda", {"gcc", "triton"}, "header of Python (python3-dev)"),
    ],
)
def test_missing_requirements_of_compiling_are_named(device, has, missing, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: name if name in has else None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in has else None)
    monkeypatch.setattr("os.path.exists", lambda path: path.rpartition("/")[2] in has)
    assert missing_to_compile(device) == missing


def test_another_seed_is_another_order_and_loader_workers_change_nothing(parts, tmp_path):
    def batches(**settings):
        with contextlib.closing(make(parts, tmp_path, **settings).batches) as micro_batches:
            x, y, weights = zip(*(micro_batches[k] for k in range(2 * ORDER_STEPS)), strict=True)
        assert set(weights) == {1}
        return torch.stack((*x, *y))

    first = batches(seed=1)
    assert torch.equal(first, batches(seed=1, data_loader_workers=4))
    assert not torch.equal(first, batches(seed=2))


def test_prefetch_threads_raise_errors_and_end_when_closed(audited):
    plan = Plan(len(audited), audited.block_size, 1, 1, 1, 100)
    cut, seen = audited.batch, []

    def batch(indices):
        seen.append(indices)
        if len(seen) == 9:
            raise OSError("gone")
        return cut(indices)

    audited.batch = batch
    before = threading.active_count()
    batches = MicroBatches(audited, 7, plan, workers=3)
    with pytest.raises(OSError, match="gone"):
        for k in range(20):
            batches[k]
    assert threading.active_count() > before
    batches.close()
    assert threading.active_count() == before


def test_a_plan_of_many_passes_warns_of_overfitting(parts, tmp_path, caplog):
    for steps in (2, 10**6):
        assert "will probably overfit" not in caplog.text
        trainer = make(parts, tmp_path, max_steps=steps, max_epochs=None)
        trainer.log.start(trainer.precision)
    assert "will probably overfit; the best snapshot is kept" in caplog.text


@pytest.mark.parametrize("max_steps, max_epochs, steps", [(None, 2, 21), (5, 2, 5), (500, None, 500)])
def test_the_plan_covers_every_window_of_its_epochs(max_steps, max_epochs, steps):
    config = TrainerConfig(batch_size=10, max_steps=max_steps, max_epochs=max_epochs)
    assert Plan.make(config, windows=101, block_size=8, world_size=1).total_steps == steps


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7])
def test_micro_batches_partition_a_step_and_are_weighted_by_their_windows(audited, size):
    for batch, limit in itertools.product(range(size, size + 12), (1, 2, 3, 7, None)):
        config = TrainerConfig(batch_size=batch, micro_batch_size=limit)
        plan = Plan.make(config, len(audited), audited.block_size, size)
        ranks = [MicroBatches(audited, 7, plan, rank) for rank in range(size)]
        for step in (0, ORDER_STEPS + 1):
            first = step * plan.accumulation
            cuts = [ranks[rank][first + i] for rank in range(size) for i in range(plan.accumulation)]
            weights = [Fraction(weight).limit_denominator(batch) for _, _, weight in cuts]
            sizes = [weight * batch / size for weight in weights]
            # An empty one computes on a window all the same.
            assert [max(1, count) for count in sizes] == [len(windows) for windows, _, _ in cuts]
            positions = plan.first_position + step * batch + np.arange(batch)  # the same at any world size
            order = window_order(positions, len(audited), 7, plan.block_size)
            assert [w for windows, _, weight in cuts if weight for w in windows.tolist()] == order.tolist()
            assert max(sizes) == plan.micro_batch_size <= (limit or batch)
            assert max(sizes) - min(sizes) <= 1 and sum(weights) == size


# --- the step ---


def test_the_loss_that_checks_a_cuda_graph_equals_the_steps(parts, tmp_path):
    trainer = make(parts, tmp_path, batch_size=7, micro_batch_size=4)
    micro_batches = [*trainer._step_inputs()]
    assert [len(x) for x, _, _ in micro_batches] == [3, 4]
    expected = trainer._loss(micro_batches)
    assert trainer._eager_step(micro_batches)[0].item() == pytest.approx(expected.item(), rel=1e-6)


def test_float16_clips_the_true_gradients(parts, tmp_path):
    after = {}
    for name in ("float32", "float16"):
        trainer = make(parts, tmp_path / name, grad_norm_clip=0.1, max_steps=3, amp_dtype=name)
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)  # does not hide a gradient's size
        start = weights(trainer).clone()
        trainer.train()
        after[name] = weights(trainer) - start
        assert trainer.scaler.is_enabled() == (name == "float16")
    assert after["float32"].norm() > 0.05
    assert (after["float16"] - after["float32"]).norm() < 0.05 * after["float32"].norm()


def test_the_logged_norm_is_of_the_unclipped_gradient(parts, tmp_path):
    make(parts, tmp_path / "a", max_steps=1, grad_norm_clip=1e-3).train()
    make(parts, tmp_path / "b", max_steps=1, grad_norm_clip=None).train()
    a, b = (metrics(tmp_path / x, "train")[0] for x in "ab")
    assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5) and a["grad_norm"] > 0.1


def test_dropout_differs_by_step_and_rank_and_repeats_by_seed(monkeypatch):
    def first_draw(seed: int, step: int, rank: int) -> float:
        monkeypatch.setattr(distributed, "rank", lambda: rank)
        distributed.seed_step(seed, step)
        return torch.rand(()).item()

    draws = {first_draw(s, t, r) for s in (1, 2) for t in range(50) for r in range(4)}
    assert len(draws) == 400 and first_draw(1, 2, 3) == first_draw(1, 2, 3)


@pytest.mark.parametrize("found_by, at", [("log_every_steps", 11), ("eval_every_steps", 11), ("save_every_steps", 12)])
def test_divergence_ends_the_run_and_keeps_the_snapshot(parts, tmp_path, found_by, at):
    every = {"save_every_steps": 4, "log_every_steps": 20, "eval_every_steps": 20}
    if found_by != "save_every_steps":
        every[found_by] = at
    trainer = make(parts, tmp_path, max_steps=18, **every)
    multiply_loss(trainer, lambda step: math.nan if step == 9 else 1)
    with pytest.raises(UserError, match=r"step 10: loss nan, gradient norm \S+ at learning rate 0.01.*optimizer.learn"):
        trainer.train()
    assert trainer.state.step == at and latest(tmp_path).step == 8
    assert all(torch.isfinite(value).all() for value in latest(tmp_path).model_state.values())


def test_a_held_out_loss_that_is_not_finite_ends_the_run_and_keeps_the_best(parts, tmp_path):
    trainer = make(parts, tmp_path)
    set_losses(trainer, 2.0, math.nan)
    with pytest.raises(UserError, match=r"step 6: the held-out loss is nan at learning rate 0.01"):
        trainer.train()
    assert (best(tmp_path).step, best(tmp_path).loss) == (3, 2.0)


def test_float16_skips_a_step_that_overflows_and_ends_a_run_that_overflows_at_every_scale(parts, tmp_path):
    trainer = make(parts, tmp_path, amp_dtype="float16", max_steps=8)
    multiply_loss(trainer, lambda step: math.inf if step == 4 else 1)
    assert math.isfinite(trainer.train())
    assert trainer.scaler.get_scale() == 2.0**15
    trainer = make(parts, tmp_path / "every", amp_dtype="float16", max_steps=50, eval_every_steps=None)
    multiply_loss(trainer, lambda step: math.inf)
    with pytest.raises(UserError, match=r"step 10: loss inf, .* 10 steps in a row were skipped"):
        trainer.train()


@pytest.mark.parametrize("amp_dtype", ["float16", "float32"])
@pytest.mark.parametrize("at", ["loss", "weights"])
def test_a_run_that_diverges_keeps_its_good_snapshots(parts, tmp_path, amp_dtype, at):
    """Step 4 gives weights that are not finite, or whose loss is not, although its own loss and gradient are."""
    trainer = make(parts, tmp_path, max_steps=30, save_every_steps=1, eval_every_steps=9, amp_dtype=amp_dtype)
    if at == "loss":
        multiply_loss(trainer, lambda step: math.nan if step >= 4 else 1)
    else:
        after_step(trainer, lambda step: trainer.parameters[0].data[0, 0].add_(math.inf if step == 4 else 0))
    is_skipped = (amp_dtype, at) == ("float16", "loss")  # as a step that overflows is
    says = "" if is_skipped else f"the {at} to be saved: not finite.* "
    with pytest.raises(UserError, match=f"{says}training has diverged"):
        trainer.train()
    assert latest(tmp_path).step == 3 and load(str(tmp_path / "gpt_snapshot.prev.pt")).step == 2
    make(parts, tmp_path, max_steps=30, amp_dtype=amp_dtype).train()
    assert latest(tmp_path).step == 30


def test_float16_saves_no_weights_with_which_some_losses_overflow(parts, tmp_path):
    trainer = make(parts, tmp_path, max_steps=30, save_every_steps=1, eval_every_steps=2, amp_dtype="float16")
    number = itertools.count()
    multiply_loss(trainer, lambda step: math.nan if step >= 4 and trainer.bare.training and next(number) % 3 else 1)
    with pytest.raises(UserError, match="training has diverged"):
        trainer.train()
    assert latest(tmp_path).step == 3


@pytest.mark.parametrize("amp_dtype", ["float16", "float32"])
def test_a_run_does_not_end_well_with_a_last_loss_that_is_not_finite(parts, tmp_path, amp_dtype):
    trainer = make((parts[0], None), tmp_path, max_steps=4, eval_every_steps=None, amp_dtype=amp_dtype)
    after_step(trainer, lambda step: multiply_loss(trainer, lambda step: math.nan) if step == 4 else None)
    with pytest.raises(UserError, match=r"step 4: .* not finite .* diverged"):
        trainer.train()
    assert not (tmp_path / "gpt_snapshot.pt").exists()


# --- evaluation ---


def test_evaluation_scores_the_held_out_part_whatever_the_batch(parts, tmp_path, monkeypatch):
    trainer = make(parts, tmp_path, pdrop=0.5)
    results = []
    for characters in (1, 100, 10_000):
        monkeypatch.setattr(evaluation, "EVAL_CHARACTERS", {"cpu": characters})
        results.append(trainer.evaluate())
    test = parts[1]
    x, y = test.eval_windows(0, test.num_eval_windows)
    with torch.no_grad():
        expected = trainer.bare.eval()(x, y)[1].item()
    for loss, scored, rank_losses in results:
        assert loss == pytest.approx(expected, abs=1e-5) and rank_losses == [loss]
        assert scored == len(test.data) - 1


@pytest.mark.parametrize(
    "steps, every, evaluated",
    [(24, 100, [12, 24]), (24, 24, [12, 24]), (24, None, [12, 24]), (24, 20, [20, 24]), (8, 100, [8])],
)
def test_a_run_too_short_for_its_interval_is_evaluated_halfway(parts, tmp_path, steps, every, evaluated):
    trainer = make(parts, tmp_path, max_steps=steps, eval_every_steps=every, batch_size=1)
    trainer.train()
    assert [line["step"] for line in metrics(tmp_path, "val")] == evaluated


def test_evaluation_does_not_affect_training(parts, tmp_path):
    plain, often = (make(parts, tmp_path / str(n), pdrop=0.3, eval_every_steps=n) for n in (100, 1))
    plain.train()
    often.train()
    assert torch.equal(weights(plain), weights(often))
    for mode in (True, False):
        often.bare.train(mode)
        often.evaluate()
        assert often.bare.training is mode
    often.test_dataset = None
    with pytest.raises(UserError, match="no test_dataset"):
        often.evaluate()


# --- snapshots ---


@pytest.mark.parametrize(
    "arch, optimizer, settings",
    [
        ("gpt2", "adamw", {}),
        ("modern", "muon", {"micro_batch_size": 4, "data_loader_workers": 1}),
        ("gpt2", "adamw", {"amp_dtype": "bfloat16"}),
        ("gpt2", "muon", {"amp_dtype": "float16"}),
        pytest.param("modern", "muon", {"compile": "true"}, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(parts, tmp_path, arch, optimizer, settings):
    """A run that is stopped, resumes, is killed, and resumes."""

    def start(name: str, step: int) -> Trainer:
        given = {"save_every_steps": 4, "max_steps": 9, **settings}
        trainer = make(parts, tmp_path / name, arch, 0.2, optimizer, **given)
        assert trainer.state.step == step
        return trainer

    whole = start("a", 0)
    whole.train()
    stop(start("b", 0), "step", 3)
    killed = start("b", 3)
    during(killed, "step", 5, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        killed.train()
    resumed = start("b", 4)
    resumed.train()
    assert torch.equal(weights(whole), weights(resumed))
    for p, q in zip(whole.parameters, resumed.parameters, strict=True):
        for key, value in whole.optimizer.state[p].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(resumed.optimizer.state[q][key])), key
    assert whole.scaler.state_dict() == resumed.scaler.state_dict()
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")


def test_a_finished_run_says_so_and_changes_nothing(parts, tmp_path, caplog):
    loss = make(parts, tmp_path).train()
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    caplog.set_level("INFO", logger="gpt")
    assert make(parts, tmp_path).train() == loss
    assert "this run is finished: it has 6 steps of 6" in caplog.text
    make(parts, tmp_path, max_steps=5).train()
    assert "this run has 6 steps, more than the 5 asked for" in caplog.text
    assert before == {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}


@pytest.mark.parametrize("fails_at, best_step, best_loss", [(None, 2, 2.0), (2, 5, 2.2)])
def test_the_best_snapshot_is_that_of_the_lowest_held_out_loss(parts, tmp_path, fails_at, best_step, best_loss):
    """Of those that were written."""
    trainer = make(parts, tmp_path, max_steps=5, eval_every_steps=1, save_every_steps=100)
    set_losses(trainer, 3.0, 2.0, 2.5, 2.7, 2.2)
    write = trainer.snapshots.storage.write
    trainer.snapshots.storage.write = lambda content, step, *kinds: (
        no_space() if step == fails_at else write(content, step, *kinds)
    )
    trainer.train()
    first, last = best(tmp_path), latest(tmp_path)
    assert (first.step, first.loss, trainer.state.best_loss) == (best_step, best_loss, best_loss)
    assert (last.step, last.loss, last.best_step, last.best_loss) == (5, 2.2, best_step, best_loss)


def test_patience_ends_a_run_and_more_patience_resumes_it(parts, tmp_path, caplog):
    def train(losses: list[float], folder="run", **settings) -> int:
        trainer = make(parts, tmp_path / folder, **{"max_steps": 9, "eval_every_steps": 1, **settings})
        set_losses(trainer, *losses)
        trainer.train()
        return trainer.state.step

    with caplog.at_level("INFO", logger="gpt"):
        assert train([3.0, 3.1, 2.0, 2.5, 2.0], patience=2) == 5  # an equal loss is no lower one
        assert "stopped by trainer.patience=2: no lower held-out loss" in caplog.text
        assert train([], patience=2) == 5
        assert "to train longer, raise trainer.patience" in caplog.text
    assert train([1.9, 2.0, 2.0, 1.95], patience=3) == 9
    assert train([1.9, 2.0, 2.0], "other", patience=4, eval_every_steps=3) == 9
    # Evaluations are counted as they happen: a shorter interval counts none of the earlier steps.
    assert train([2.0], "other", patience=4, max_steps=10) == 10
    with pytest.raises(UserError, match="there is nothing to evaluate"):
        make((parts[0], None), tmp_path / "none", patience=2)


class Refusing:
    """An allocator that refuses: the model's forward pass in training runs out of memory over `limit` windows."""

    error: Exception = torch.OutOfMemoryError()

    def __init__(self, monkeypatch, limit: int):
        monkeypatch.setattr("engine.run.memory.RAISES_OUT_OF_MEMORY", {"cpu"})
        self.limit, self.forward, self.seen, self.evaluated = limit, GPT.forward, [], []
        monkeypatch.setattr(GPT, "forward", lambda model, *args, **more: self(model, *args, **more))

    def __call__(self, model, x, *args, **more):
        if model.training:
            self.seen.append(len(x))
            if len(x) > self.limit:
                raise self.error
        else:
            self.evaluated.append(len(x))
        return self.forward(model, x, *args, **more)


def test_a_micro_batch_on_a_cpu_is_limited_as_a_stop_waits_for_it(parts, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.run.memory.CHARACTERS", 3 * parts[0].block_size + 1)
    plan = make(parts, tmp_path, batch_size=8).plan
    assert (plan.micro_batch_size, plan.accumulation) == (2, 4)
    assert make(parts, tmp_path, batch_size=8, micro_batch_size=8).plan.accumulation == 1


def test_the_largest_micro_batch_that_fits_is_found_by_trial_and_kept(parts, tmp_path, monkeypatch):
    given = make(parts, tmp_path / "given", micro_batch_size=3)
    given.train()
    memory = Refusing(monkeypatch, limit=5)
    trainer = make(parts, tmp_path / "found")
    assert memory.seen == [12, 6, 3]  # halves of the batch
    trainer.train()
    assert torch.equal(weights(trainer), weights(given))
    assert latest(tmp_path / "found").micro_batch_size == 3
    assert max(memory.evaluated) == 3
    memory.seen.clear()
    resumed = make(parts, tmp_path / "found", max_steps=8)
    assert memory.seen == [3] and resumed.plan.micro_batch_size == 3  # another GPU may have less
    memory.limit = 12
    make(parts, tmp_path / "enough").train()
    assert max(memory.evaluated) > 12  # without gradients, and as many as keep the device busy
    memory.limit = 0
    with pytest.raises(UserError, match=r"one window of data\.block_size=8 does not fit"):
        make(parts, tmp_path / "none")


def test_a_step_that_runs_out_of_memory_names_the_setting_with_which_the_run_resumes(parts, tmp_path, monkeypatch):
    messages = "CUDA error: out of memory", "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
    assert all(is_out_of_memory(error) for error in (torch.OutOfMemoryError(), *map(RuntimeError, messages)))
    memory = Refusing(monkeypatch, limit=12)
    advice = {12: r"with 12 windows .* trainer\.micro_batch_size=6", 1: r"data\.block_size=8 does not fit"}
    for windows, says in advice.items():
        memory.limit = 12
        trainer = make(parts, tmp_path, micro_batch_size=windows)
        memory.limit, memory.error = 0, MemoryError("of a kernel")
        with pytest.raises(UserError, match=f"out of memory .*{says}"):
            trainer.train()


def test_minutes_without_steps_are_refused_outside_main(parts, tmp_path):
    for settings in ({"max_minutes": 1}, {"max_minutes": 1, "max_steps": None, "max_epochs": None}):
        with pytest.raises(UserError, match=r"give the Trainer max_steps"):
            make(parts, tmp_path, **{"max_steps": None, **settings})


@pytest.mark.parametrize("max_epochs, save_every, steps", [(3, 2, [4, 6]), (3, 3, [6]), (1, None, [2])])
def test_saves_at_epochs_and_at_the_end(parts, tmp_path, max_epochs, save_every, steps):
    length = {"max_steps": None, "max_epochs": max_epochs, "batch_size": -(-len(parts[0]) // 2)}
    make(parts, tmp_path, **length, save_every=save_every, eval_every_steps=None, keep_snapshots=9).train()
    saved = [load(str(path)) for path in sorted(tmp_path.glob("*.step*.pt"))]
    assert [(snapshot.step, snapshot.finished_epoch) for snapshot in saved] == [(step, step // 2) for step in steps]


KEPT = {"amp_dtype": "float16", "deterministic": False}


@pytest.mark.parametrize(
    "first, chosen, asked, changed",
    [
        ({}, KEPT, {}, KEPT),
        ({}, KEPT, {"amp_dtype": "bfloat16"}, {"deterministic": False}),
        ({}, {**KEPT, "device": "cuda"}, {}, {}),  # chosen again
        # What was asked for is not what auto means later.
        ({"amp_dtype": "float32"}, {}, {}, {"amp_dtype": "bfloat16"}),
    ],
)
def test_auto_choices_are_kept_on_the_same_kind_of_device(
    parts, tmp_path, monkeypatch, caplog, first, chosen, asked, changed
):
    monkeypatch.setattr("engine.machine.hardware.computes_in_bfloat16", lambda _: True)
    trainer = make(parts, tmp_path, **{"amp_dtype": "auto", **first})
    own = dict(trainer.state.choices)
    trainer.state.choices |= chosen
    trainer.train()
    with caplog.at_level("INFO", "gpt"):
        assert make(parts, tmp_path, **{"amp_dtype": "auto", **asked}).state.choices == own | changed
    moved = "changed since the snapshot: device was cuda, is cpu"
    assert (moved in caplog.text) == ("device" in chosen)


def test_must_resume_fails_without_a_snapshot_and_never_sets_it_aside(parts, tmp_path, caplog):
    with pytest.raises(UserError, match=r"trainer\.resume=must: there is no snapshot at"):
        make(parts, tmp_path, resume="must")
    make(parts, tmp_path).train()
    assert make(parts, tmp_path, resume="must").state.step == 6
    (tmp_path / "tensorboard").mkdir(exist_ok=True)
    (tmp_path / "tensorboard" / "events").write_text("of the run before")
    anew = make(parts, tmp_path, resume="never")
    assert anew.state.step == 0 and latest(tmp_path).step == 6  # nothing is lost
    anew.train()
    assert (tmp_path / "metrics.old1.jsonl").exists()
    assert (tmp_path / "tensorboard.old1" / "events").exists()
    assert load(str(tmp_path / "gpt_snapshot.old1.pt")).step == 6
    make(parts, tmp_path, snapshot_path="other.pt").train()
    assert f"there is no snapshot at {tmp_path / 'other.pt'}: training" in caplog.text
    assert (tmp_path / "metrics.old2.jsonl").exists()  # nor is a history


# --- asked to stop, and saves that fail ---


@pytest.mark.parametrize(
    "stops",
    [
        [("micro-batch", 5, signal.SIGINT)],
        [("evaluation", 3, signal.SIGTERM), ("micro-batch", 3, signal.SIGTERM)],
        [("evaluation", 9, signal.SIGTERM)],
        [("save", 4, signal.SIGTERM)],
    ],
)
def test_a_run_asked_to_stop_saves_and_equals_an_uninterrupted_one(parts, tmp_path, monkeypatch, stops):
    monkeypatch.setattr(evaluation, "EVAL_CHARACTERS", {"cpu": 8})  # several batches in one evaluation
    settings = {"save_every_steps": 4, "max_steps": 9, "micro_batch_size": 4}
    whole = make(parts, tmp_path / "a", pdrop=0.2, **settings)
    whole.train()
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    for moment, step, number in stops:
        stopped = make(parts, tmp_path / "b", pdrop=0.2, **settings)
        stop(stopped, moment, step, number)
        assert before == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
        assert latest(tmp_path / "b").step == stopped.state.step < 9 + (moment == "evaluation")
    resumed = make(parts, tmp_path / "b", pdrop=0.2, **settings)
    assert resumed.state.step == stopped.state.step
    resumed.train()
    for _ in range(2):
        for of in (latest, best):
            assert equal(of(tmp_path / "a"), of(tmp_path / "b"))
        assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
        make(parts, tmp_path / "b", pdrop=0.2, **settings).train()  # is finished


def test_missing_metrics_lines_are_a_warning(parts, tmp_path, caplog):
    make(parts, tmp_path).train()
    history = tmp_path / "metrics.jsonl"
    lines = history.read_text().splitlines(keepends=True)
    for left in (lines[:3], None):
        history.unlink() if left is None else history.write_text("".join(left))
        make(parts, tmp_path, max_steps=7 if left else 8).train()
        assert f"metrics.jsonl: missing 5 of {8 if left else 5} lines up to step" in caplog.text
        caplog.clear()


def test_a_stop_right_after_a_failed_save_saves_again(parts, tmp_path):
    trainer = make(parts, tmp_path, max_steps=50, save_every_steps=4, eval_every_steps=4)
    put = trainer.snapshots.storage._put
    tries = []

    def once(*args):
        if trainer.state.step == 4 and not tries:
            tries.append(1)
            signal.raise_signal(signal.SIGTERM)
            no_space()
        put(*args)

    trainer.snapshots.storage._put = once
    save = trainer.snapshots.save
    trainer.snapshots.save = lambda *args: (save(*args), trainer.snapshots._saving[1].exception(30))[0]
    with pytest.raises(Stopped):
        trainer.train()
    assert tries and latest(tmp_path).step == trainer.state.step == 4


def test_train_called_again_after_failed_saves_loses_nothing(parts, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("trainer.LAST_SAVE", (2, 0.1))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    trainer = make(parts, tmp_path, max_steps=8, save_every_steps=4)
    put = trainer.snapshots.storage._put
    trainer.snapshots.storage._put = lambda *args: no_space() if trainer.state.step else put(*args)
    with pytest.raises(UserError, match=r"step 8 was not written: .*No space left .*; nor to the system's temporary"):
        trainer.train()
    trainer.snapshots.storage._put = put
    caplog.clear()
    trainer.train()
    assert "from scratch" not in caplog.text
    assert latest(tmp_path).step == trainer.state.step == 8
    make(parts, tmp_path / "whole", max_steps=8, save_every_steps=4).train()
    again, whole = (
        {(line["split"], line["step"]): line["loss"] for line in metrics(run)} for run in (tmp_path, tmp_path / "whole")
    )
    assert again == whole


def test_the_highest_of_several_signals_counts():
    def taken(*names: str) -> list[str]:
        with Requests() as requests:
            for name in names:
                signal.raise_signal(getattr(signal, name))
            return [REQUESTS[requests.take()], REQUESTS[requests.take()]]

    assert taken("SIGUSR1", "SIGHUP", "SIGTERM", "SIGUSR1") == ["SIGTERM", "SIGTERM"]
    assert taken("SIGUSR2", "SIGTERM") == ["SIGUSR2", "SIGUSR2"]  # SLURM's SIGTERM does not take it back
    assert taken("SIGUSR1") == ["SIGUSR1", ""]


def test_saving_by_the_clock_changes_no_result(parts, tmp_path, monkeypatch):
    trained, saved = [], []
    for minutes in (1e-9, None):
        trainer = make(parts, tmp_path / str(minutes), max_steps=8, save_every_steps=3, save_every_minutes=minutes)
        write = trainer.snapshots.storage.write
        monkeypatch.setattr(trainer.snapshots.storage, "write", lambda *a, w=write: saved.append(a[1:]) or w(*a))
        monkeypatch.setattr(trainer.requests, "is_time", lambda m=minutes: m is not None)  # after each step
        trainer.train()
        trained.append(weights(trainer))
    assert torch.equal(*trained)
    steps = [step for step, _, _ in saved]
    numbered = [step for step, _, is_numbered in saved if is_numbered]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8, 3, 6, 8] and numbered == [3, 6, 8] * 2


def test_training_does_not_wait_for_a_slow_save_by_the_clock_and_survives_its_failures(parts, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.snapshots.manager.RETRY_S", 0.0)
    settings = {"save_every": None, "save_every_minutes": 1e-9}
    trainer = make(parts, tmp_path, max_steps=15, eval_every_steps=None, **settings)
    storage, attempts = trainer.snapshots.storage, []

    def write(content, step, *flags):
        attempts.append(step)
        deadline = time.monotonic() + 5
        while trainer.state.step < min(step + 3, 14) and time.monotonic() < deadline:
            time.sleep(0.001)
        if step < 12:
            raise OSError("full")
        SnapshotStorage.write(storage, content, step, *flags)

    monkeypatch.setattr(storage, "write", write)
    trainer.train()
    assert 3 <= len(attempts) <= 6 and attempts[-1] == 15


@pytest.mark.parametrize("snapshot_format", ["single", "sharded"])
def test_weights_that_do_not_fit_the_model_get_one_line(parts, tmp_path, monkeypatch, snapshot_format):
    class MLP(model_module.MLP):
        def __init__(self, config):
            super().__init__(config)
            self.renamed = self._modules.pop("c_fc")

    make(parts, tmp_path, snapshot_format=snapshot_format).train()
    monkeypatch.setattr(model_module, "MLP", MLP)
    says = r"gpt_snapshot\.pt: cannot be restored into this model; start another"
    with pytest.raises(UserError, match=says) as refused:
        make(parts, tmp_path, snapshot_format=snapshot_format)
    assert "\n" not in str(refused.value)


def test_a_stopped_trainer_can_train_again(parts, tmp_path):
    whole = make(parts, tmp_path / "a", micro_batch_size=4)
    whole.train()
    make(parts, tmp_path / "b").train()  # to be set aside
    trainer = make(parts, tmp_path / "b", micro_batch_size=4, resume="never")
    stop(trainer, "micro-batch", 2)
    trainer.evaluate()
    trainer.train()
    assert torch.equal(weights(whole), weights(trainer))
    assert (tmp_path / "b" / "gpt_snapshot.old1.pt").exists()
    assert not (tmp_path / "b" / "gpt_snapshot.old2.pt").exists()
    assert latest(tmp_path / "b").step == 6
