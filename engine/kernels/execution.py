"""Execution: autocast, TF32, determinism and torch.compile, by the choices of a run (engine/config/auto.py)."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn


def apply(choices: dict[str, Any], model: nn.Module) -> None:
    """Sets torch's determinism, and compiles `model` at its first step if chosen."""
    if choices["deterministic"]:
        if choices["device"] == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        deterministic: Any = torch.utils.deterministic
        deterministic.fill_uninitialized_memory = False  # a debugging aid that writes every new tensor once more
    torch.set_deterministic_debug_mode("error" if choices["deterministic"] else "default")
    if choices["compile"]:
        # Tells the compiler, too; not needed otherwise, as importing it takes a second.
        torch.use_deterministic_algorithms(choices["deterministic"])
        torch.compiler.reset()  # otherwise a process compiles at most eight models
        model.compile(dynamic=False)


def autocast(choices: dict[str, Any]) -> torch.autocast:
    """Automatic mixed precision: a context that computes in the chosen type."""
    dtype = getattr(torch, choices["amp_dtype"])
    enabled = dtype is not torch.float32
    return torch.autocast(choices["device"], dtype=dtype if enabled else None, enabled=enabled)


@contextlib.contextmanager
def tf32(choices: dict[str, Any]) -> Iterator[None]:
    """TF32: a context in which a GPU's float32 products keep 10 bits of 23 (bfloat16: 7) and are several
    times as fast. Used in training steps, even deterministic ones, since TF32 repeats bit for bit.
    Evaluation and sampling stay in float32, to agree with sample.py and export.py.
    """
    if (choices["device"], choices["amp_dtype"]) != ("cuda", "float32"):
        yield
        return
    matmul = torch.backends.cuda.matmul  # set_float32_matmul_precision also changes the CPU's
    before, matmul.allow_tf32 = matmul.allow_tf32, True
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def eagerly(choices: dict[str, Any]) -> contextlib.AbstractContextManager:
    """Context that runs the model eagerly: compiling evaluation would cost more than it saves."""
    return torch.compiler.set_stance("force_eager") if choices["compile"] else contextlib.nullcontext()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which `model` is in evaluation mode; afterward it is in the mode that it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
