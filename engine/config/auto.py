"""Resolves the `auto` settings of a `TrainerConfig` once, as a dictionary: `device`, `amp_dtype`, `compile`,
`deterministic`, and `micro_batch_size` where the trainer has found one. `earlier` choices, from a snapshot, are kept.
"""

import importlib.util
import logging
import math
import os
import shutil
import sysconfig
from typing import Any

import torch

from engine.kernels import build
from engine.machine import hardware

log = logging.getLogger("gpt")

# Planned floating-point operations from which compiling pays. On a CPU in float32 these take
# minutes, of which compiling saves a sixth and costs 20 s (benchmarks/experiments.md). On an H100
# compiling costs 12 to 15 s and saves 2 to 4 ms for each 10^12.
COMPILE_PAYS_FROM = {"cpu": 3e13, "cuda": 4e15}


def resolve(config: Any, device: torch.device, planned_flops: float, earlier: dict[str, Any]) -> dict[str, Any]:
    """Resolves the `auto` settings. `planned_flops`: floating-point operations of the run, per GPU on GPUs."""
    amp_dtype = resolve_amp_dtype(config, device, earlier)
    pays = planned_flops > COMPILE_PAYS_FROM.get(device.type, math.inf)
    if device.type == "cpu":  # the C kernels are faster
        pays = pays and amp_dtype == "float32" and build.library(torch.float32) is None

    def choose(name: str, setting: str, best: bool) -> bool:
        return earlier.get(name, best) if setting == "auto" else setting == "true"

    choices = {
        "device": device.type,
        "amp_dtype": amp_dtype,
        "compile": choose("compile", config.compile, pays),
        "deterministic": choose("deterministic", config.deterministic, device.type == "cpu"),
    }
    if choices["compile"] and (missing := missing_to_compile(device.type)):
        what = "trainer.compile=%s: %s not found; torch.compile disabled"
        log.warning(what, config.compile, missing)
        choices["compile"] = False
    return choices


def resolve_amp_dtype(config: Any, device: torch.device, earlier: dict[str, Any]) -> str:
    """Resolves `trainer.amp_dtype`, the dtype to compute in: bfloat16 where the hardware supports
    it, else float16 on GPUs and float32 on CPUs. Without `use_amp` it is float32.
    """
    if not config.use_amp:
        return "float32"
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


def describe(choices: dict[str, Any]) -> str:
    """The choices in words, for the log."""
    scaled = " with loss scaling" * (choices["amp_dtype"] == "float16")
    compiled = "compiled (the first step waits for it)" if choices["compile"] else "not compiled"
    deterministic = "deterministic" if choices["deterministic"] else "not deterministic"
    return f"{choices['amp_dtype']}{scaled}; {compiled}; {deterministic}"
