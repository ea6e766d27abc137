"""Probe: logits of a model for one fixed input, kept in snapshots.

A snapshot holds weights, not code. Whoever loads it computes the probe again: if the logits differ, the
model's code has changed since.
"""

import torch
import torch.nn as nn

KEPT = 16  # characters at the beginning of a context, and at its end, whose logits are kept
TOLERANCE = 0.03  # of the largest logit; bfloat16 and other devices round by less
CHANGED = "model.py gives different outputs than when this snapshot was saved; was it edited?"


@torch.no_grad()
def probe_logits(
    model: nn.Module, vocab_size: int, block_size: int, device: torch.device | str
) -> torch.Tensor:
    """The logits (T, V) of `model`, in evaluation mode, at the beginning and the end of a context of the ids 0, 1,
    2, ...; float32 on the CPU.
    """
    ids = torch.arange(block_size, device=device) % vocab_size
    was_training = model.training
    model.eval()
    try:
        logits = model(ids[None])[0][0].float().cpu()
        return torch.cat((logits[:KEPT], logits[KEPT:][-KEPT:]))
    finally:
        model.train(was_training)


def has_changed(logits: torch.Tensor, recorded: torch.Tensor) -> bool:
    """Whether `logits` differ from those `recorded` in a snapshot; False if it has none."""
    if recorded.numel() == 0:
        return False
    logits = logits[: len(recorded)]  # older snapshots have those of the beginning alone
    if logits.shape != recorded.shape:
        return True
    limit = TOLERANCE * recorded.abs().max().clamp(min=1.0)
    return not bool((logits - recorded).abs().max() <= limit)
