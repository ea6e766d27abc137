"""Precision: the dtype, compilation and determinism of a run, resolved once from the `auto` settings."""

import contextlib
import importlib.util
import logging
import math
import os
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from engine.config.schema import TrainerConfig
from engine.kernels import build
from engine.machine import hardware

log = logging.getLogger("gpt")

# Planned floating-point operations from which compiling pays. On a CPU in float32 these take
# minutes, of which compiling saves a sixth and costs 20 s (benchmarks/experiments.md). On an H100
# compiling costs 12 to 15 s and saves 2 to 4 ms for each 10^12.
COMPILE_PAYS_FROM = {"cpu": 3e13, "cuda": 4e15}


@dataclass(frozen=True)
class Precision:
    """How a model computes. Snapshots hold these fields as `choices`."""

    device: str = "cpu"  # type of the device
    amp_dtype: str = "float32"  # bfloat16, float16 or float32
    compile: bool = False
    deterministic: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.amp_dtype)

    def __str__(self) -> str:
        scaled = " with loss scaling" * (self.amp_dtype == "float16")
        compiled = "compiled (the first step waits for it)" if self.compile else "not compiled"
        return f"{self.amp_dtype}{scaled}; {compiled}; {'deterministic' if self.deterministic else 'not deterministic'}"

    def autocast(self) -> torch.autocast:
        """Automatic mixed precision: a context that computes in `dtype`."""
        enabled = self.amp_dtype != "float32"
        return torch.autocast(self.device, dtype=self.dtype if enabled else None, enabled=enabled)

    def eagerly(self) -> contextlib.AbstractContextManager:
        """A context that runs the model eagerly: compiling evaluation would cost more than it saves."""
        return torch.compiler.set_stance("force_eager") if self.compile else contextlib.nullcontext()

    @contextlib.contextmanager
    def tf32(self) -> Iterator[None]:
        """TF32: a context in which a GPU's float32 products keep 10 bits of 23 (bfloat16: 7) and are several times as
        fast. Used in training steps, even deterministic ones, since TF32 repeats bit for bit. Evaluation and sampling
        stay in float32, to agree with sample.py and export.py.
        """
        if (self.device, self.amp_dtype) != ("cuda", "float32"):
            yield
            return
        matmul = torch.backends.cuda.matmul  # set_float32_matmul_precision also changes the CPU's
        before, matmul.allow_tf32 = matmul.allow_tf32, True
        try:
            yield
        finally:
            matmul.allow_tf32 = before

    @contextlib.contextmanager
    def determinism(self) -> Iterator[None]:
        """A context in which torch uses deterministic algorithms, if chosen, and raises an error where it has none."""
        deterministic: Any = torch.utils.deterministic
        before, filled = torch.get_deterministic_debug_mode(), deterministic.fill_uninitialized_memory
        deterministic.fill_uninitialized_memory = False  # a debugging aid that writes every new tensor once more
        torch.set_deterministic_debug_mode("error" if self.deterministic else "default")
        if self.compile:  # tells the compiler, too; not needed otherwise, as importing it takes a second
            torch.use_deterministic_algorithms(self.deterministic)
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)
            deterministic.fill_uninitialized_memory = filled


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which `model` is in evaluation mode; afterward it is in the mode that it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def resolve(config: TrainerConfig, device: torch.device, planned_flops: float, earlier: dict[str, Any]) -> Precision:
    """Resolves the `auto` settings; `earlier` choices, from a snapshot, are kept. `planned_flops`: floating-point
    operations of the run, per GPU on GPUs.
    """
    amp_dtype = resolve_amp_dtype(config, device, earlier)
    pays = planned_flops > COMPILE_PAYS_FROM.get(device.type, math.inf)
    if device.type == "cpu":  # the C kernels are faster
        pays = pays and amp_dtype == "float32" and build.library(torch.float32) is None

    def choose(name: str, setting: str, best: bool) -> bool:
        return earlier.get(name, best) if setting == "auto" else setting == "true"

    compile_ = choose("compile", config.compile, pays)
    if compile_ and (missing := missing_to_compile(device.type)):
        log.warning("trainer.compile=%s: %s not found; torch.compile disabled", config.compile, missing)
        compile_ = False
    deterministic = choose("deterministic", config.deterministic, device.type == "cpu")
    if deterministic and device.type == "cuda":  # cuBLAS reads it once, at its first product
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return Precision(device.type, amp_dtype, compile_, deterministic)


def resolve_amp_dtype(config: TrainerConfig, device: torch.device, earlier: dict[str, Any]) -> str:
    """Resolves `trainer.amp_dtype`, the dtype to compute in; `auto` is bfloat16 where the hardware supports
    it, else float16 on GPUs and float32 on CPUs.
    """
    if config.amp_dtype != "auto":
        return config.amp_dtype
    if "amp_dtype" in earlier:
        return earlier["amp_dtype"]
    if hardware.computes_in_bfloat16(device):
        return "bfloat16"
    return "float16" if device.type == "cuda" else "float32"


def missing_to_compile(device_type: str) -> str | None:
    """What torch.compile needs and this machine lacks, if anything: a C++ compiler for a CPU; for a
    GPU Triton, which builds a Python module with a C compiler.
    """
    if device_type == "cpu":
        return None if shutil.which(os.environ.get("CXX", "g++")) else "C++ compiler (g++)"
    if importlib.util.find_spec("triton") is None:
        return "Triton"
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        return "C compiler (gcc)"
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    return None if os.path.exists(header) else "header of Python (python3-dev)"
