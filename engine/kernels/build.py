"""Build: compiles `kernels.c` for this machine, caches the library and loads it."""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from engine.errors import one_line

DIGEST_LENGTH = 64
SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = "-O3 -mfma -fno-math-errno -fno-strict-aliasing -ffp-contract=fast -fopenmp -shared -fPIC"
INSTRUCTION_FLAGS = {
    "AVX2": "-mavx2",
    "AVX512": "-mavx512f -mavx512bw -mavx512dq -mavx512vl",
    "AVX-512 BF16": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -DBF16",
}


def library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The kernels for `dtype`, compiled on first use; None if this machine cannot run them."""
    return _build(dtype)[0]


def describe(dtype: torch.dtype) -> str:
    """Which kernels are used for `dtype`, or why there are none; for the log."""
    found, detail = _build(dtype)
    if found is None:
        return f"plain PyTorch: {detail}"
    return f"C, for {instructions(dtype)}, in {detail}"


def instructions(dtype: torch.dtype) -> str | None:
    """The instruction set of the kernels for `dtype`; None if this CPU has no suitable one."""
    if dtype is torch.bfloat16:
        return "AVX-512 BF16" if torch.cpu._is_avx512_bf16_supported() else None
    if dtype is torch.float32:  # the one torch uses; set by ATEN_CPU_CAPABILITY
        capability = torch.backends.cpu.get_cpu_capability()
        return capability if capability in INSTRUCTION_FLAGS else None
    return None


def digest(content: bytes) -> bytes:
    """SHA-256, hexadecimal, which ends the file of a library."""
    return hashlib.sha256(content).hexdigest().encode()


@functools.cache
def _build(dtype: torch.dtype) -> tuple[ctypes.CDLL | None, str]:
    """The kernels and their file, or None and the reason."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None, "the C kernels need Linux on x86-64"
    chosen = instructions(dtype)
    if chosen is None:
        return None, f"no C kernels for {str(dtype).removeprefix('torch.')} on this CPU"
    try:
        compiler = shlex.split(os.environ.get("CC", "cc"))
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        flags = [*FLAGS.split(), *INSTRUCTION_FLAGS[chosen].split()]
        key = repr((compiler, flags, SOURCE.read_bytes(), platform.libc_ver()))
        key = hashlib.sha256(key.encode()).hexdigest()[:16]
        built = Path(cache, "character-level-gpt", f"kernels-{key}.so")
        with contextlib.suppress(OSError):  # missing, unreadable, or of another system: built again
            content = built.read_bytes()
            if digest(content[:-DIGEST_LENGTH]) == content[-DIGEST_LENGTH:]:
                return ctypes.CDLL(str(built)), str(built)
        if not compiler or shutil.which(compiler[0]) is None:
            return None, "no C compiler (cc, or what CC names)"
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            fresh = Path(folder, "kernels.so")
            command = [*compiler, *flags, str(SOURCE), "-o", str(fresh), "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            with open(fresh, "r+b") as file:
                # A part of a library, as a full disk leaves it, would crash the process. ELF ignores what follows it.
                file.write(digest(file.read()))
                file.flush()
                os.fsync(file.fileno())  # complete before it has its name
            os.replace(fresh, built)  # atomic: other processes may be building too
        return ctypes.CDLL(str(built)), str(built)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        return None, f"{' '.join(compiler)} failed: {lines[0] if lines else error.returncode}"
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        return None, one_line(error)
