"""The machine: what its devices are called and can do, and how much memory is used."""

import ctypes
import functools
import os
import platform
import re
import resource
import sys

import torch

# Peak dense bfloat16 and float16 rates in FLOP/s, from NVIDIA's data sheets. The first name that
# fits counts.
PEAK_FLOPS = {
    "H200 NVL": 835e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "T4": 65e12,
}


def device_name(device: torch.device) -> str:
    """The make of a GPU, or of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@functools.cache
def is_by_amd() -> bool:
    """Whether AMD made the CPU: Intel's MKL, with which torch multiplies float32 matrices, has its
    best code for Intel's own.
    """
    try:
        with open("/proc/cpuinfo") as file:
            return "AuthenticAMD" in file.read()
    except OSError:
        return False


def computes_in_bfloat16(device: torch.device) -> bool:
    """Whether the hardware does; where it does not, bfloat16 is slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def peak_flops(device: torch.device) -> float | None:
    """The device's peak rate in half precision, FLOP/s; None where it is not known (every CPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if "MIG" in name:  # a slice of the GPU
        return None
    found = (peak for key, peak in PEAK_FLOPS.items() if re.search(rf"\b{key}\b", name))
    return next(found, None)


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held so far: of a GPU in tensors, else of the host's
    memory, all included.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # elsewhere in KiB


def keep_freed_memory() -> None:
    """Has glibc keep freed memory for the next allocation instead of returning it to the kernel.

    A CPU step allocates and frees the same tensors again and again; without this, a sixth of its
    time goes to page faults, and more where tensors are large (benchmarks/experiments.md). Elsewhere than
    on Linux with glibc nothing happens.
    """
    # What is mapped is returned, and the threshold can be no higher: nothing may be mapped.
    _set_malloc(trim=2**31 - 1, threshold=2**25, mapped=0)


def return_freed_memory() -> None:
    """The opposite, where memory counts for more than time."""
    _set_malloc(trim=2**17, threshold=2**16, mapped=2**16)


def _set_malloc(trim: int, threshold: int, mapped: int) -> None:
    """How many freed bytes are kept, from how many on memory is mapped, and how often at most."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # <malloc.h>
        mallopt(M_TRIM_THRESHOLD, trim)
        mallopt(M_MMAP_THRESHOLD, threshold)
        mallopt(M_MMAP_MAX, mapped)
