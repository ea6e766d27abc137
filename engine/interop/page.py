"""A model as one HTML page, which runs it in the browser: engine/interop/browser/.

    content = render([{"name": ..., **serialize(config, weights, logits)}, ...])

The page computes in float32 from float16 weights. When opened, it compares its logits for one input with PyTorch's.
"""

import base64
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import UserError
from engine.interop.transformers import NGRAM_FACTORS, ROPE_BASE, SOFTCAP
from engine.kernels import ops
from engine.kernels.native import LAYER_NORM_EPS
from engine.snapshots.snapshot import probe_ids

BROWSER = Path(__file__).resolve().parent / "browser"
CHECKED = 32  # characters of the input that the page itself compares
TOLERANCE = 0.01  # of a logit, for float16 weights


def round_to_float16(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the page, rounded to float16; integers unchanged."""
    return {name: weight.half().float() if weight.is_floating_point() else weight for name, weight in weights.items()}


def serialize(config: dict[str, Any], weights: dict[str, Tensor], logits: Tensor) -> dict[str, Any]:
    """Serializes a model for the page: `GPTConfig`'s fields, the rounded weights, and the logits (T, V) that it gives
    with them for `probe_ids`. Raises `UserError` if the page would compute others: the model's code was edited.
    """
    ids, count = probe_ids(config["vocab_size"], config["block_size"]), min(CHECKED, config["block_size"])
    try:
        is_same = torch.allclose(compute(config, weights, ids), logits, atol=TOLERANCE)
    except (KeyError, RuntimeError):  # other weights, or of other shapes
        is_same = False
    if not is_same:
        raise UserError("the page supports only an unedited model.py; sample.py runs this model")
    tensors = dict(weights)
    if (codes := tensors.pop("ngrams.codes", None)) is not None:
        config = config | {"ngram_codes": codes.tolist(), "ngram_factors": NGRAM_FACTORS}
    if config["tie_weights"]:
        del tensors["head.weight"]
    halves = torch.cat([weight.flatten() for weight in tensors.values()]).half()
    return {
        "config": config,
        "tensors": [(name, weight.numel()) for name, weight in tensors.items()],
        "weights": base64.b64encode(halves.numpy().astype("<f2").tobytes()).decode(),
        "check": {"ids": ids[:count].tolist(), "logits": logits[count - 1].tolist()},
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


def compute(config: dict[str, Any], weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    """The logits (T, V) for `ids` (T,), computed as model.js does."""
    is_modern, T, C = config["arch"] == "modern", len(ids), config["n_embd"]
    D = C // config["n_head"]
    angle = torch.arange(T)[:, None] * ROPE_BASE ** -(torch.arange(0, D, 2) / D)

    def norm(x: Tensor, name: str) -> Tensor:
        if is_modern:
            return ops.rms_norm(x)
        weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
        return ops.layer_norm(x, weight, bias, LAYER_NORM_EPS)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    x = weights["tok_emb.weight"][ids]
    if config["ngram_rows"]:
        last = F.pad(weights["ngrams.codes"][ids], (3, 0)).unfold(0, 4, 1)  # (T, 4)
        rows = (last[:, None] * torch.tensor(NGRAM_FACTORS)).sum(dim=2) % config["ngram_rows"]
        tables = weights["ngrams.weight"].split(config["ngram_rows"])
        x = x + tables[0][rows[:, 0]] + tables[1][rows[:, 1]]
    x = ops.rms_norm(x) if is_modern else x + weights["pos_emb.weight"][:T]
    for number in range(config["n_layer"]):
        block = f"blocks.{number}"
        qkv = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn")
        q, k, v = qkv.view(T, 3, -1, D).permute(1, 2, 0, 3)
        if is_modern:
            q, k = (ops.rms_norm(ops.rotate(z, angle.cos(), angle.sin())) for z in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(y.transpose(0, 1).reshape(T, C), f"{block}.attn.c_proj")
        y = norm(x, f"{block}.ln_2")
        if config["token_shift"]:
            y = y + F.pad(y, (0, 0, 1, -1)) * weights[f"{block}.shift.weight"]
        y = linear(y, f"{block}.mlp.c_fc")
        y = ops.squared_relu(y) if is_modern else ops.gelu(y)
        x = x + linear(y, f"{block}.mlp.c_proj")
    logits = linear(norm(x, "ln_f"), "tok_emb" if config["tie_weights"] else "head")
    return ops.cap(logits, SOFTCAP if is_modern else 0)
