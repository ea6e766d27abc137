"""What each `auto` of a run means: chosen once, kept in its snapshots, the same when it resumes."""

import importlib.util
import logging
import os
import shutil
import sysconfig
from typing import Any

import torch
import torch.nn as nn

from engine.errors import UserError
from engine.kernels import native as kernels
from engine.machine import hardware
from trainer_config import TrainerConfig

log = logging.getLogger("gpt")

# Planned floating-point operations. On a CPU in float32 these are minutes, of which compiling saves
# a sixth and costs 20 s; where there are C kernels, they are faster (benchmarks/experiments.md). On a GPU
# about a minute of its share, by estimate: not measured.
COMPILE_PAYS_FROM = {"cpu": 3e13, "cuda": 1e16}


def choose(
    config: TrainerConfig, device: torch.device, planned_flops: float, earlier: dict[str, Any]
) -> dict[str, Any]:
    """The choices of a run that needs `planned_flops` floating-point operations of each GPU, or of
    the CPUs in all: `device` ("cpu" or "cuda"), `amp_dtype`, `compile` and `deterministic`. The
    `earlier` ones of a snapshot stand where the setting is `auto`.

    Raises `UserError` where `choose_amp_dtype` does.
    """
    choices: dict[str, Any] = {
        "device": device.type,
        "amp_dtype": choose_amp_dtype(config, device, earlier),
    }
    pays = planned_flops > COMPILE_PAYS_FROM[device.type]
    if device.type == "cpu":
        is_float32 = choices["amp_dtype"] == "float32"
        pays = pays and is_float32 and kernels.library(torch.float32) is None
    automatic = {"compile": pays, "deterministic": device.type == "cpu"}
    for name, choice in automatic.items():
        setting = getattr(config, name)
        choices[name] = earlier.get(name, choice) if setting == "auto" else setting == "true"
    missing = missing_to_compile(device.type) if choices["compile"] else None
    if missing:
        log.warning("trainer.compile=%s: no %s here: not compiling", config.compile, missing)
        choices["compile"] = False
    return choices


def choose_amp_dtype(config: TrainerConfig, device: torch.device, earlier: dict[str, Any]) -> str:
    """The type to compute in: the one asked for, or that a snapshot's choices name, or the best:
    bfloat16 where the hardware computes in it, float16 on other GPUs, float32 on other CPUs.

    Raises `UserError` for float16 with `config.offload` on a GPU, and where a snapshot names a
    type other than these three.
    """
    if not config.use_amp:
        return "float32"
    if config.amp_dtype != "auto":
        dtype = config.amp_dtype
    elif earlier.get("amp_dtype"):
        dtype = earlier["amp_dtype"]
        if dtype not in ("bfloat16", "float16", "float32"):
            raise UserError(f"the snapshot says that the run computes in {dtype!r}")
    elif hardware.computes_in_bfloat16(device):
        dtype = "bfloat16"
    else:
        dtype = "float16" if device.type == "cuda" else "float32"
    # GradScaler would bring its scale to gradients in the host's memory without waiting for it.
    if dtype == "float16" and config.offload and device.type == "cuda":
        raise UserError(
            f"trainer.amp_dtype={config.amp_dtype}: computes in float16 here, which does not go "
            "with trainer.offload=true on a GPU; set it to bfloat16, or trainer.use_amp=false"
        )
    return dtype


def missing_to_compile(device_type: str) -> str | None:
    """What torch.compile needs here and does not find: on a CPU a C++ compiler; on a GPU Triton,
    which builds a module for Python when it starts.
    """
    if device_type == "cpu":
        return None if shutil.which(os.environ.get("CXX", "g++")) else "C++ compiler (g++)"
    if importlib.util.find_spec("triton") is None:
        return "Triton"
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        return "C compiler (gcc)"
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    return None if os.path.exists(header) else "header of Python (python3-dev)"


def apply(choices: dict[str, Any], model: nn.Module) -> None:
    """Makes torch deterministic, or not, and has `model` compiled at its first step, or not."""
    if choices["deterministic"]:
        if choices["device"] == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # A debugging aid that comes with it costs a pass over memory.
        deterministic: Any = torch.utils.deterministic  # whose class has this as a property
        deterministic.fill_uninitialized_memory = False
    torch.set_deterministic_debug_mode("error" if choices["deterministic"] else "default")
    if choices["compile"]:  # the same for the compiler, whose import takes a second
        torch.use_deterministic_algorithms(choices["deterministic"])
        torch.compiler.reset()  # or the ninth model of a process would not be compiled
        model.compile(dynamic=False)
