"""Hardware: device names, peak rates, memory, bfloat16 support, malloc settings."""

import ctypes
import gc
import platform
import re
import sys
from pathlib import Path

import torch
import torch.nn as nn

from engine.errors import UserError
from engine.portable import resource

# Peak dense bfloat16 and float16 rates with float32 accumulation, FLOP/s, from NVIDIA's data sheets
# and architecture white papers. The first pattern found in a device's name counts.
PEAK_FLOPS = {
    "H[12]00 NVL": 835e12, "H100 PCIe": 756e12, "G?H[12]00": 989e12, "B200": 2250e12, "A100": 312e12, "A10": 125e12,
    "A6000": 154.8e12, "L40S": 362e12, "L40$": 181e12, "L4": 121e12, "T4": 65e12, "MI300X": 1307.4e12,
    "MI300A": 980.6e12,
    # GeForce: twice the float32 rate; not the Laptop and D variants. 3080: with 10 GB.
    "RTX 5090$": 209.5e12, "RTX 5080$": 112.6e12, "RTX 5070 Ti$": 87.9e12, "RTX 5070$": 61.7e12,
    "RTX 5060 Ti$": 47.4e12, "RTX 5060$": 38.4e12, "RTX 4090$": 165.2e12, "RTX 4080 SUPER$": 104.4e12,
    "RTX 4080$": 97.5e12, "RTX 4070 Ti SUPER$": 88.2e12, "RTX 4070 Ti$": 80.2e12, "RTX 4070 SUPER$": 71e12,
    "RTX 4070$": 58.3e12, "RTX 4060 Ti$": 44.1e12, "RTX 4060$": 30.2e12, "RTX 3090 Ti$": 80e12, "RTX 3090$": 71e12,
    "RTX 3080 Ti$": 68.2e12, "RTX 3080$": 59.5e12, "RTX 3070 Ti$": 43.5e12, "RTX 3070$": 40.6e12,
    "RTX 3060 Ti$": 32.4e12, "RTX 3060$": 25.5e12,
}  # fmt: skip


def check_device(key: str, device: str) -> None:
    """Raises `UserError`, naming the setting `key`, unless `device` is auto, cpu, cuda or the accelerator that
    torch names (mps, xpu), and torch can use it here.
    """
    if device in ("auto", "cpu") or (device == "cuda" and torch.cuda.is_available()):
        return
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != device:
        raise UserError(f"{key}={device}: no such device that this build of torch can use; set {key}=cpu or auto")


def device_name(device: torch.device) -> str:
    """The model name of a GPU or the CPU, or the type of another accelerator."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    names = re.findall(r"^model name\s*: (.*)$", cpuinfo(), re.MULTILINE)
    return names[0] if names else platform.processor() or platform.machine()


def cpuinfo() -> str:
    """The kernel's description of the CPUs; empty except on Linux."""
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def computes_in_bfloat16(device: torch.device) -> bool:
    """Whether the hardware supports bfloat16; emulated, it is slower than float32. False for other accelerators, where
    torch cannot tell.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def peak_flops(device: torch.device) -> float | None:
    """Peak rate in half precision, FLOP/s; None if unknown (CPUs, slices of a GPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if "MIG" in name:
        return None
    found = (peak for pattern, peak in PEAK_FLOPS.items() if re.search(rf"\b{pattern}\b", name))
    return next(found, None)


def count_flops(model: nn.Module) -> float:
    """Floating-point operations to train on a character: the model's own count, or 6 per parameter."""
    count = getattr(model, "flops_per_character", None)
    return count() if count else 6.0 * sum(p.numel() for p in model.parameters())


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process so far, bytes: in torch's allocator of a GPU, else in the host (Windows: 0)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)  # a CUDA graph keeps what it has freed
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if resource else 0
    return peak if sys.platform == "darwin" else peak * 1024  # KiB elsewhere


def is_out_of_memory(error: Exception) -> bool:
    """Whether `error` says that a GPU's or the host's memory is exhausted."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    messages = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return any(message in str(error) for message in messages)


def free_unused(device: torch.device) -> None:
    """Collects garbage, empties the cache of torch's GPU allocator, and resets its peak-memory statistics."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def keep_freed_memory(keep: bool = True) -> None:
    """Makes malloc keep freed memory, or return it to the kernel at once (Linux with glibc).

    A CPU step allocates and frees the same tensors again and again; otherwise a sixth of its time
    goes to page faults, and more with large tensors (benchmarks/experiments.md).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # <malloc.h>
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1 if keep else 2**17)
        # Mapped blocks return to the kernel when freed, and the threshold for mapping is limited.
        mallopt(M_MMAP_THRESHOLD, 2**25 if keep else 2**16)
        mallopt(M_MMAP_MAX, 0 if keep else 2**16)
