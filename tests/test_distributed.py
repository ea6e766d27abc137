"""Several processes, started by torchrun on this machine: gloo. One launch asserts many properties."""

import functools
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import EXACT, ROOT, RUN_FILES, TINY, latest, metrics, patched_main, small_gpt, start, succeed

from char_dataset import CharDataset, DataConfig
from engine.errors import UserError
from engine.parallel import distributed
from engine.parallel.rendezvous import name_start
from engine.portable import is_installed
from engine.run import evaluation
from engine.run.metrics import read_lines

COMPILERS = "TORCHINDUCTOR_COMPILE_THREADS"  # a variable that torch reads


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """The same short training by 1 process, by 2 that accumulate, and by 3 sharded, with unequal shares."""
    folder = tmp_path_factory.mktemp("worlds")
    run_dirs = {}
    for name, nproc, extra in (
        ("1", 0, []),
        ("2", 2, ["trainer.micro_batch_size=2"]),
        # Of shares of 5, 6 and 6 windows: one process has none in one of 6 micro-batches.
        ("3 sharded", 3, ["trainer.strategy=fsdp", "trainer.micro_batch_size=1"]),
    ):
        run_dirs[name] = folder / name
        settings = ["trainer.batch_size=17", "samples=true", f"run_dir={run_dirs[name]}"]
        result = succeed(*TINY, *EXACT, *extra, *settings, nproc=nproc)
        (run_dirs[name] / "stdout").write_text(result.stdout)
    return run_dirs


def test_losses_do_not_depend_on_the_number_of_processes(runs):
    """Nor do gradients and weights."""
    alone, weights = metrics(runs["1"]), latest(runs["1"]).model_state
    assert [line["step"] for line in alone] == [1, 2, 3, 3, 4, 5, 6, 6]
    for name in ("2", "3 sharded"):
        for one, several in zip(alone, metrics(runs[name]), strict=True):
            assert (one["step"], one["split"]) == (several["step"], several["split"])
            assert several["loss"] == pytest.approx(one["loss"], abs=2e-6)
            if one["split"] == "train":
                assert several["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        for key, value in latest(runs[name]).model_state.items():
            assert torch.allclose(value, weights[key], atol=2e-5), (name, key)
    for line in read_lines(str(runs["2"] / "metrics.jsonl")):
        assert line["bpc"] == pytest.approx(line["loss"] / math.log(2))


def test_evaluation_scores_the_split_once_at_any_number_of_processes(runs):
    held_out = int(runs["1"].joinpath("stdout").read_text().split(" held out")[0].split()[-1].replace(",", ""))
    for name, run in runs.items():
        for line in metrics(run, "val"):
            assert line["tokens"] == held_out - 1
            assert len(line["rank_losses"]) == int(name[0])
            # Ranks score different windows: their own losses differ, and average to the total.
            assert len(set(line["rank_losses"])) == int(name[0])
            assert min(line["rank_losses"]) <= line["loss"] <= max(line["rank_losses"])


def test_rank_0_alone_prints_and_writes(runs):
    for name, run in runs.items():
        assert {p.name for p in run.iterdir()} - {"stdout", "tensorboard"} == RUN_FILES, name
        out = (run / "stdout").read_text()
        assert out.count("plan ") == 1 and out.count("step 6/6 | loss") == 1 and "weights of rank" not in out
        assert len(list(run.glob("tensorboard/*"))) == is_installed("tensorboard")
    out = (runs["2"] / "stdout").read_text()
    batch = "17 windows of 16 characters = 272 characters per step; 2 processes x micro-batch 1 or 2 x accumulation 5"
    assert batch in out


def test_the_traceback_of_the_failed_rank_is_shown_and_the_others_name_its_error(tmp_path):
    patch = """
import trainer
step = trainer.Trainer._eager_step
def fail(self, micro_batches):
    if trainer.distributed.rank() == 1 and self.state.step == 2:
        raise RuntimeError('the disk of rank 1 is on fire')
    return step(self, micro_batches)
trainer.Trainer._eager_step = fail
"""
    script = patched_main(tmp_path, patch)
    result = start(*TINY, f"run_dir={tmp_path / 'run'}", nproc=2, script=script)
    assert result.returncode != 0
    summary = result.stderr[result.stderr.rindex("Root Cause") :]
    assert "rank      : 1" in summary and "RuntimeError: the disk of rank 1 is on fire" in summary
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("error (rank 0): after step 2: "))
    assert line.endswith(": rank 1 failed: RuntimeError: the disk of rank 1 is on fire")


def test_ranks_agree_on_the_micro_batch_and_running_out_of_memory_names_the_setting(tmp_path):
    patch = """
import os
import torch
import model, trainer
forward = model.GPT.forward
step = trainer.Trainer._eager_step
limit = [6, 3][int(os.environ["RANK"])]
def refusing(self, x, *args, **more):
    if self.training and len(x) > limit:
        raise torch.OutOfMemoryError
    return forward(self, x, *args, **more)
def failing(self, micro_batches):
    global limit
    limit = 0 if self.state.step == 3 and trainer.distributed.rank() == 1 else limit
    return step(self, micro_batches)
model.GPT.forward, trainer.Trainer._eager_step = refusing, failing
trainer.memory.RAISES_OUT_OF_MEMORY = {"cpu"}
"""
    script = patched_main(tmp_path, patch)
    result = start(*TINY, f"run_dir={tmp_path / 'run'}", nproc=2, script=script)
    assert result.returncode != 0
    assert "2 processes x micro-batch 3 x accumulation 2" in result.stdout, result.stdout
    assert "with 3 windows at once; the same command with trainer.micro_batch_size=1 resumes" in result.stderr
    succeed(*TINY, f"run_dir={tmp_path / 'run'}", "trainer.micro_batch_size=1")


def test_a_save_may_take_longer_than_ranks_wait_and_names_those_whose_weights_differ(tmp_path):
    patch = """
import time
import torch, trainer
from engine.snapshots.storage import SnapshotStorage
write = SnapshotStorage.write
step = trainer.Trainer._eager_step
def slow(*arguments):
    time.sleep(8)
    write(*arguments)
def drifting(self, micro_batches):
    result = step(self, micro_batches)
    if trainer.distributed.rank() == 1 and self.state.step == 2:
        bits = self.parameters[0].detach().view(torch.int32)
        bits[0, 0] ^= 1
    return result
SnapshotStorage.write, trainer.Trainer._eager_step = slow, drifting
"""
    script = patched_main(tmp_path, patch)
    run = tmp_path / "run"
    settings = ["trainer.max_steps=3", "trainer.timeout_s=5", f"run_dir={run}"]
    result = succeed(*TINY, *settings, nproc=2, script=script)
    assert latest(run).step == 3
    lines = [line for line in result.stdout.splitlines() if "the weights of rank" in line]
    assert len(lines) == 1 and "step 3: the weights of rank 1 differ from those of rank 0" in lines[0]


def fail(*_):
    raise RuntimeError("too old\n(found version 12040).")


@pytest.mark.parametrize(
    "gpus, processes, device, says",
    [
        (1, 2, "auto", "2 processes on a machine with 1 GPU: start --nproc_per_node=1"),
        (0, 1, "cuda", "trainer.device=cuda: no such device"),
        (0, 1, "mps", "trainer.device=mps: no such device"),
        (1, 1, "auto", r"cuda:0: .*trainer.device=cpu.* too old \(found version 12040\).$"),  # the driver
        (0, 2, "cpu", r"the 2 processes could not be connected \(trainer.timeout_s=600\): too old \(found"),
    ],
)
def test_a_device_or_connection_that_cannot_be_had_gets_one_line(monkeypatch, gpus, processes, device, says):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", fail)
    monkeypatch.setattr(distributed, "rendezvous", fail)
    for name, value in {"RANK": 0, "WORLD_SIZE": processes, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match=f"^{says}"):
        distributed.init(device)


def test_an_error_on_rank_0_reaches_every_rank_with_its_cause(tmp_path):
    (tmp_path / "fails.py").write_text("""
import os
from engine.parallel import distributed
distributed.init("cpu", threads=1)
for what in (lambda: {}["cause"], lambda: open("/nowhere")):
    try:
        distributed.run_on_rank_0(what)
    except Exception as error:
        os.write(1, f"{distributed.rank()} {type(error).__name__} {error}\\n".encode())  # print makes two writes
distributed.leave(0)
""")
    result = start(script=str(tmp_path / "fails.py"), nproc=2, env={"PYTHONPATH": str(ROOT)})
    missing = "UserError [Errno 2] No such file or directory: '/nowhere'"
    assert sorted(result.stdout.splitlines()) == sorted(
        ["0 KeyError 'cause'", "1 UserError rank 0: KeyError: 'cause'", f"0 {missing}", f"1 {missing}"]
    ), result.stderr


def test_restarted_processes_do_not_read_stale_keys_of_the_store():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    patience = timedelta(seconds=30)

    def arrive(rank: int, delay: float) -> str:
        time.sleep(delay)
        client = dist.TCPStore("127.0.0.1", server.port, timeout=patience)
        return name_start(client, rank, 3, patience)

    names = []
    for delays in ((0, 0, 0), (0.2, 0, 0.1), (0, 0.2, 0.1)):
        with ThreadPoolExecutor(3) as pool:
            (name,) = set(pool.map(arrive, range(3), delays))
        names.append(name)
    assert len(set(names)) == 3


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux only")
@pytest.mark.parametrize(
    "processes, given, earlier, threads, compilers",
    [
        (1, None, {}, 16, None),
        (1, None, {"OMP_NUM_THREADS": "3"}, 3, None),
        (1, 2, {"OMP_NUM_THREADS": "3"}, 2, None),
        (4, None, {"OMP_NUM_THREADS": "1"}, 4, "4"),  # torchrun sets it
        (1, None, {"OMP_NUM_THREADS": "1", "ACCELERATE_MIXED_PRECISION": "no"}, 16, None),  # Accelerate, too
        (32, None, {}, 1, "1"),
        (4, None, {COMPILERS: "7"}, 4, "7"),
    ],
)
def test_processes_of_a_host_share_its_cores(monkeypatch, processes, given, earlier, threads, compilers):
    environment = dict(earlier)
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    monkeypatch.setattr(distributed, "_local_size", processes)
    distributed.prepare_device(given)
    assert (torch.get_num_threads(), environment.get(COMPILERS)) == (threads, compilers)


def test_every_rank_scores_all_its_windows_and_polls_as_often_as_the_others(text_file, monkeypatch):
    config = DataConfig(path=str(text_file), block_size=133, train_split=0.8)  # three windows
    _, held_out = CharDataset(config).split()
    model, seen = small_gpt(vocab_size=27, block_size=133), []
    monkeypatch.setattr(distributed, "size", lambda: 2)
    monkeypatch.setattr(distributed, "all_gather", lambda value: [value])
    for rank in (0, 1):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        polls: list[None] = []
        result = evaluation.evaluate(model, held_out, functools.partial(polls.append, None), max_windows=1)
        seen.append((result.characters, len(polls)))
    assert seen == [(133, 2), (266, 2)]
