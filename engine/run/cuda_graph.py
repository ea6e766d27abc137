"""CUDA graph: the launches of a whole training step, recorded once and replayed as one."""

from collections.abc import Callable, Iterable

import torch

from engine.errors import UserError, one_line
from engine.machine.hardware import is_out_of_memory
from engine.run.plan import MicroBatch

WARM_UP = 3  # steps before capture, which allocate persistent memory

SWITCH_OFF = "train with trainer.cuda_graph=false"


def can_capture(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all parameters are on a GPU and the optimizer is capturable: reads its learning rate there."""
    groups = optimizer.param_groups
    on_gpu = all(parameter.is_cuda for group in groups for parameter in group["params"])
    return on_gpu and all("capturable" in group for group in groups)


class CapturedStep:
    """Calls `step(micro_batches)`, from the fourth call on by replaying a CUDA graph of it. The learning rates of its
    `optimizer` become tensors on the GPU.

    `step` takes the micro-batches (x, y, weight) of one step, on the GPU, whose shapes and loss weights never change,
    and returns (loss, gradient norm), scalars on the GPU. It must not synchronize with the device. Only tensors that it
    reads and the GPU's random state may change between calls.

    A replay runs the captured kernels again; Python code, control flow included, does not run. `loss(micro_batches)`,
    the same loss by itself, is therefore compared at the first replay and at the 2nd, 4th, 8th and so on. Raises
    `UserError` if they differ by more than a relative `tolerance`, or if `step` cannot be captured.
    """

    def __init__(
        self,
        step: Callable[[Iterable[MicroBatch]], tuple[torch.Tensor, torch.Tensor]],
        loss: Callable[[Iterable[MicroBatch]], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        tolerance: float,
    ):
        self.step, self.loss, self.tolerance = step, loss, tolerance
        for group in optimizer.param_groups:  # a graph reads tensors, but freezes numbers
            peak = group.setdefault("initial_lr", float(group["lr"]))
            group["lr"] = torch.tensor(peak, device="cuda")
            group["capturable"] = True
        self.calls = 0
        self.graph = torch.cuda.CUDAGraph()
        # The default stream cannot be captured. One side stream, as memory is pooled per stream.
        self.stream = torch.cuda.Stream()

    def __call__(self, micro_batches: Iterable[MicroBatch]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = list(micro_batches)
        self.calls += 1
        if self.calls <= WARM_UP:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                results = self.step(inputs)
            torch.cuda.current_stream().wait_stream(self.stream)
            return results
        if self.calls == WARM_UP + 1:
            self._capture(inputs)
        replays = self.calls - WARM_UP
        is_checked = replays.bit_count() == 1
        if is_checked:
            random_state = torch.cuda.get_rng_state()
            expected = self.loss(inputs).item()
            torch.cuda.set_rng_state(random_state)
        for (x, y, _), (new_x, new_y, _) in zip(self.inputs, inputs, strict=True):
            x.copy_(new_x)
            y.copy_(new_y)
        self.graph.replay()
        loss, norm = (result.clone() for result in self.results)
        if is_checked and abs(loss.item() - expected) > self.tolerance * abs(expected):
            raise UserError(
                f"the CUDA graph of a step gives a loss of {loss.item():g}, the model itself {expected:g}: "
                f"the model changes from step to step; {SWITCH_OFF}"
            )
        return loss, norm

    def _capture(self, inputs: list[MicroBatch]) -> None:
        self.inputs = [(x.clone(), y.clone(), weight) for x, y, weight in inputs]
        try:
            # Prefetch threads may be pinning memory, which a global capture forbids.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.results = self.step(self.inputs)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            cause = one_line(error.__context__ or error).split(" Search for")[0]
            raise UserError(
                f"CUDA graph capture failed: {cause}. The model may read a number from the GPU (.item(), "
                f"print); {SWITCH_OFF}"
            ) from error
