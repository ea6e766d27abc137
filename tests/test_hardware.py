"""Device names, peak rates and memory are those of the machine."""

import os

import pytest
import torch
from conftest import TINY, metrics, start, succeed

from engine.machine.hardware import device_name, peak_flops, peak_memory


def test_peak_memory_is_in_bytes_and_never_falls():
    device = torch.device("cpu")
    before = peak_memory(device)
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert before >= resident // 2
    block = torch.ones(64 * 2**20)  # 256 MiB
    held = peak_memory(device)
    assert held >= block.nbytes
    del block
    assert peak_memory(device) >= held


PEAKS = {"NVIDIA H200": 989e12, "NVIDIA L40S": 362e12, "NVIDIA L4": 121e12, "NVIDIA L40": 181e12, "Tesla V9": None}
PEAKS |= {"NVIDIA H200 MIG 1g.18gb": None, "NVIDIA GeForce RTX 4090 Laptop GPU": None}


@pytest.mark.parametrize("name, flops", PEAKS.items())
def test_the_peak_rate_is_that_of_the_gpu_of_that_name(name, flops, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: name)
    assert peak_flops(torch.device("cuda")) == flops
    assert device_name(torch.device("cuda")) == name
    assert peak_flops(torch.device("cpu")) is None and device_name(torch.device("cpu"))


def test_an_accelerator_without_float64_trains_resumes_and_samples_as_the_cpu(tmp_path):
    """MPS and XPU, not available here, are used in the same way."""
    settings = [*TINY, "model=modern"]  # which ties no weights: tests/accelerator.py does not keep ties
    fake = {"script": "tests/accelerator.py"}
    for run_dir, device, steps, how in (("cpu", "cpu", 6, {}), ("fake", "fake", 3, fake), ("fake", "fake", 6, fake)):
        arguments = [*settings, f"trainer.device={device}", f"trainer.max_steps={steps}"]
        program = ["main.py"] if how else []
        result = succeed(*program, *arguments, f"run_dir={tmp_path / run_dir}", **how)
    assert "from step 3" in result.stdout and "device      fake;" in result.stdout
    on_cpu, on_fake = (metrics(tmp_path / name) for name in ("cpu", "fake"))
    losses = {(line["split"], line["step"]): line["loss"] for line in on_fake}
    for line in on_cpu:
        assert losses[line["split"], line["step"]] == pytest.approx(line["loss"], rel=1e-5)
    arguments = [f"run_dir={tmp_path / 'fake'}", "max_new_tokens=20"]
    texts = [start("sample.py", *arguments, "device=fake", **fake).stdout, start(*arguments, script="sample.py").stdout]
    assert texts[0] == texts[1] and len(texts[0]) > 20
