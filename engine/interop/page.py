"""A model as one HTML page, which runs it in the browser: engine/interop/browser/.

    content = render([{"name": ..., **serialize(config, weights, ids, logits)}, ...])

The page computes in float32 from float16 weights. When opened, it compares its logits for one input with PyTorch's, and
warns if they differ, as those of an edited model.py may.
"""

import base64
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.interop.transformers import CODES
from engine.kernels.ops import NGRAM_FACTORS, ROPE_BASE, SOFTCAP

BROWSER = Path(__file__).resolve().parent / "browser"


def round_to_float16(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the page, rounded to float16; integers unchanged."""
    return {name: weight.half().float() if weight.is_floating_point() else weight for name, weight in weights.items()}


def serialize(config: dict[str, Any], weights: dict[str, Tensor], ids: Tensor, logits: Tensor) -> dict[str, Any]:
    """Serializes a model for the page: `GPTConfig`'s fields, the rounded weights, and the logits (V,) that it gives
    with them after `ids` (T,), which the page compares with its own.
    """
    config = config | {"softcap": SOFTCAP, "rope_base": ROPE_BASE}
    tensors = dict(weights)
    if (codes := tensors.pop(CODES, None)) is not None:
        config = config | {"ngram_codes": codes.tolist(), "ngram_factors": NGRAM_FACTORS}
    if config["tie_weights"]:
        del tensors["head.weight"]
    halves = torch.cat([weight.flatten() for weight in tensors.values()]).half()
    return {
        "config": config,
        "tensors": [(name, weight.numel()) for name, weight in tensors.items()],
        "weights": base64.b64encode(halves.numpy().astype("<f2").tobytes()).decode(),
        "check": {"ids": ids.tolist(), "logits": logits.tolist()},
    }


def render(models: list[dict[str, Any]]) -> str:
    """The page, with its models side by side."""
    parts = {
        "{{worker}}": (BROWSER / "model.js").read_text("utf-8"),
        "{{script}}": (BROWSER / "page.js").read_text("utf-8"),
        # Last, as it may contain the names of the others. "<" could end the script; JSON allows this escape.
        "{{data}}": json.dumps(models).replace("<", "\\u003c"),
    }
    page = (BROWSER / "page.html").read_text("utf-8")
    for name, content in parts.items():
        page = page.replace(name, content, 1)
    return page
