"""A model as one HTML page, which runs it in the browser: engine/interop/browser/.

    content = render([describe(name, config, weights, vocabulary, ...), ...])

The page computes in 32 bits from weights in 16. It has the logits that PyTorch gives for one input, and compares its
own with them when it is opened: they differ if the code of the model was edited.
"""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BROWSER = Path(__file__).resolve().parent / "browser"
CHECKED = 64  # characters of the input, at most; half a second for 10 million parameters


def rounded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights as the page has them, rounded to 16 bits."""
    return {name: weight.half().float() for name, weight in weights.items()}


def describe(
    name: str,
    facts: Sequence[tuple[str, str]],
    prompt: str,
    config: dict[str, Any],
    weights: dict[str, Tensor],
    vocabulary: str,
    encoding: str,
    logits: Tensor,
) -> dict[str, Any]:
    """Serializes a model for the page.

    Args:
        config: a dictionary of `GPTConfig`'s fields; `weights` are `rounded`.
        logits: (V,) of the model with these weights after `checked_ids`.
    """
    tensors = dict(weights)
    if config["tie_weights"]:
        del tensors["head.weight"]
    halves = torch.cat([weight.flatten() for weight in tensors.values()]).half()
    kept = ("arch", "n_layer", "n_head", "n_embd", "block_size", "vocab_size", "tie_weights")
    return {
        "name": name,
        "facts": facts,
        "prompt": prompt,
        "config": {key: config[key] for key in (*kept, "token_shift")},
        "vocabulary": list(vocabulary),
        "encoding": encoding,
        "tensors": [(name, weight.numel()) for name, weight in tensors.items()],
        "weights": base64.b64encode(halves.numpy().astype("<f2").tobytes()).decode(),
        "check": {"ids": checked_ids(config).tolist(), "logits": logits.tolist()},
    }


def render(models: list[dict[str, Any]]) -> str:
    """The page, with its models side by side."""
    # In a script, "<" could end it; JSON may have it as an escape.
    data = json.dumps(models).replace("<", "\\u003c")
    parts = {
        "{{worker}}": (BROWSER / "model.js").read_text("utf-8"),
        "{{script}}": (BROWSER / "page.js").read_text("utf-8"),
        "{{data}}": data,
    }
    page = (BROWSER / "page.html").read_text("utf-8")
    for name, content in parts.items():
        page = page.replace(name, content, 1)
    return page


def checked_ids(config: dict[str, Any]) -> Tensor:
    """The ids (T,) after which the page compares its logits with the model's."""
    return 7 * torch.arange(min(CHECKED, config["block_size"])) % config["vocab_size"]
