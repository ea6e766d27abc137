"""What the loop uses of a data set: see `CharDataset`, which has all of it."""

from typing import Protocol

import numpy as np
import torch


class Text(Protocol):
    """The ids of a text, and windows of `block_size` of them."""

    data: torch.Tensor
    block_size: int


class TrainingText(Text, Protocol):
    """A text to train on."""

    vocabulary: str
    digest: str

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


class HeldOutText(Text, Protocol):
    """A text to evaluate on."""

    @property
    def num_eval_windows(self) -> int: ...

    def eval_windows(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]: ...
