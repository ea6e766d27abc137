"""What the loop uses of a data set: `CharDataset` has all of it; another map-style data set of (x, y) is adapted."""

import hashlib
import logging
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import Subset

from engine.errors import UserError

log = logging.getLogger("gpt")


@runtime_checkable
class Windows(Protocol):
    """A text in windows of `block_size` characters, to train or to evaluate on."""

    data: torch.Tensor  # its ids
    block_size: int
    vocabulary: str
    digest: str

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    @property
    def num_eval_windows(self) -> int: ...

    def eval_windows(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]: ...


class Items(Protocol):
    """A map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]: ...


class StackedItems:
    """A map-style data set whose items are `(x, y)`, int64 of shape (T,) each: items are stacked, and each is one
    window. Its digest covers the number of items, the first, the middle and the last.
    """

    def __init__(self, dataset: Items):
        self.dataset = dataset
        try:
            x, _ = dataset[0]
            self.block_size, size = len(x), len(dataset)
        except (TypeError, ValueError, LookupError, NotImplementedError) as error:
            raise UserError(
                f"{type(dataset).__name__}: the Trainer takes a CharDataset or a map-style data set of (x, y) of equal "
                "lengths"
            ) from error
        source = dataset.dataset if isinstance(dataset, Subset) else dataset
        self.vocabulary, self.config = getattr(source, "vocabulary", ""), getattr(source, "config", None)
        self.data = torch.empty(0)
        sampled = [item.tolist() for i in (0, size // 2, size - 1) for item in dataset[i]]
        self.digest = hashlib.sha256(repr((size, sampled)).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def num_eval_windows(self) -> int:
        return len(self)

    def batch(self, indices: np.ndarray | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = zip(*(self.dataset[i] for i in indices.tolist()), strict=True)
        return torch.stack(x), torch.stack(y)

    def eval_windows(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.batch(np.arange(first, last))


def as_windows(dataset: Windows | Items) -> Windows:
    """`dataset` itself if it has all of `Windows`, or else with its items stacked. Warns if it is a part of a data set
    whose windows overlap, as `random_split` makes of a `CharDataset`.
    """
    if isinstance(dataset, Windows):
        return dataset
    if isinstance(dataset, Subset) and hasattr(dataset.dataset, "split"):
        log.warning(
            "%s: windows of the training and the held-out part overlap, and the held-out loss is too low; "
            "CharDataset.split() cuts the text in two",
            type(dataset).__name__,
        )
    return StackedItems(dataset)
