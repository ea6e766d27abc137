"""An accelerator named "fake" that has no float64 and computes on the CPU; runs main.py or sample.py on it.

    python tests/accelerator.py main.py trainer.device=fake ...

It is a backend in Python: each operation on its tensors is done on tensors of the CPU that they hold. A
process can register one backend, so that tests start this file.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "fake"


class FakeTensor(torch.Tensor):
    """A tensor on the accelerator; `held`, on the CPU, has its numbers."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor):
        if held.dtype is torch.float64:
            raise TypeError("the accelerator has no float64")
        new: Any = torch.Tensor._make_wrapper_subclass
        sizes = held.shape, held.stride(), held.storage_offset()
        return new(cls, *sizes, dtype=held.dtype, device=torch.device(NAME, 0))

    def __init__(self, held: torch.Tensor):
        self.held = held

    def tolist(self):
        return self.held.tolist()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return compute(function, *args, **(kwargs or {}))


def compute(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Does an operation on the CPU; its results are on the accelerator as its inputs, or its `device`, are."""
    wrappers: dict[int, FakeTensor] = {}  # so that in-place operations return what they were given

    def on_cpu(x: Any) -> Any:
        if isinstance(x, FakeTensor):
            wrappers[id(x.held)] = x
            return x.held
        return torch.device("cpu") if is_fake(x) else x

    name = function.overloadpacket.__name__
    device = kwargs.get("device") if name == "_to_copy" else None
    decides = [args[0]] if name == "copy_" else [device] if device else tree_leaves((args, kwargs))
    on_accelerator = any(isinstance(x, FakeTensor) or is_fake(x) for x in decides)
    args, kwargs = tree_map(on_cpu, (args, kwargs))
    results = function(*args, **kwargs)

    def wrap(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not on_accelerator:
            return x
        return wrappers[id(x)] if id(x) in wrappers else FakeTensor(x)

    return tree_map(wrap, results)


def is_fake(x: Any) -> bool:
    return isinstance(x, torch.device) and x.type == NAME


class Module(_DummyBackendModule):
    """`torch.fake`."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16]

    def manual_seed(self, seed: int) -> None:
        pass

    def synchronize(self) -> None:
        pass


if __name__ == "__main__":
    _setup_privateuseone_for_python_backend(NAME, Module())
    library = torch.library.Library("_", "IMPL")
    library.fallback(compute, "PrivateUse1")
    program = str(Path(__file__).resolve().parent.parent / sys.argv[1])
    sys.path[0], sys.argv = str(Path(program).parent), [program, *sys.argv[2:]]
    runpy.run_path(program, run_name="__main__")
