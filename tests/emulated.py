"""A pytest plugin, `-p emulated`: bfloat16 kernels on a CPU without AVX-512, which `avx512.h` emulates."""

from pathlib import Path

import torch

from engine.kernels import build

HEADER = Path(__file__).with_name("avx512.h")
build.INSTRUCTION_FLAGS["emulated"] = f"-mavx2 -include {HEADER} -DBF16"
build.instructions = lambda dtype: "emulated" if dtype is torch.bfloat16 else None
