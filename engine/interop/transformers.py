"""A model as Hugging Face's Transformers keeps it, in a directory, and back.

    files = to_files(config, weights, vocabulary)        # file name -> content
    config, weights, vocabulary = read(folder)

`arch="gpt2"` is its `GPT2LMHeadModel`, `arch="modern"` its `NanoChatForCausalLM`: the same numbers
under other names; with a `token_shift` it has none. Transformers itself is not needed;
`safetensors` is (`pip install safetensors`).

A tokenizer has to give an id to every character, also to one that the model has never seen. There
is one more token for that, at the end of the vocabulary: U+FFFD, which Unicode has for what cannot
be represented, so that a text keeps its length and all of its other characters. Its embedding is
the mean of all; so is its row of the head, which makes its logit the mean of all logits, and never
the highest. `generation_config.json` keeps it from being drawn.
"""

import json
import os
import re
from collections import defaultdict
from typing import Any

import torch

from engine.errors import UserError, one_line
from model import NORM_EPS, ROPE_BASE, SOFTCAP, CompleteConfig, GPTConfig

WEIGHTS = "model.safetensors"

# Our modules and those of Transformers that hold the same, `{}` being the number of the block.
# Where there are several, our matrix is theirs on top of each other.
MODULES: dict[str, dict[str, list[str]]] = {
    "gpt2": {
        "tok_emb": ["transformer.wte"],
        "pos_emb": ["transformer.wpe"],
        "blocks.{}.ln_1": ["transformer.h.{}.ln_1"],
        "blocks.{}.attn.c_attn": ["transformer.h.{}.attn.c_attn"],
        "blocks.{}.attn.c_proj": ["transformer.h.{}.attn.c_proj"],
        "blocks.{}.ln_2": ["transformer.h.{}.ln_2"],
        "blocks.{}.mlp.c_fc": ["transformer.h.{}.mlp.c_fc"],
        "blocks.{}.mlp.c_proj": ["transformer.h.{}.mlp.c_proj"],
        "ln_f": ["transformer.ln_f"],
        "head": ["lm_head"],
    },
    "modern": {
        "tok_emb": ["model.embed_tokens"],
        "blocks.{}.attn.c_attn": [f"model.layers.{{}}.self_attn.{x}_proj" for x in "qkv"],
        "blocks.{}.attn.c_proj": ["model.layers.{}.self_attn.o_proj"],
        "blocks.{}.mlp.c_fc": ["model.layers.{}.mlp.fc1"],
        "blocks.{}.mlp.c_proj": ["model.layers.{}.mlp.fc2"],
        "head": ["lm_head"],
    },
}
# of gpt2: the norms, and the matrices, which Transformers has transposed there (`Conv1D`)
BIASED = [ours for ours in MODULES["gpt2"] if ours not in ("tok_emb", "pos_emb", "head")]
PER_CHARACTER = ("tok_emb.weight", "head.weight")  # a row for each


def unknown_token(vocabulary: str) -> str:
    """The character that stands for those not in `vocabulary`: U+FFFD, or, where the text has that
    itself, the next that is not in it.
    """
    return next(c for c in map(chr, range(0xFFFD, 0x110000)) if c not in vocabulary)


def to_files(
    config: CompleteConfig, weights: dict[str, torch.Tensor], vocabulary: str
) -> dict[str, bytes]:
    """The files, by name, of a directory that `from_pretrained` loads model and tokenizer from.

    `weights` are those of `GPT(config)`, `vocabulary[i]` is the character with the id i. Raises
    `UserError` without the package `safetensors`, and for what Transformers has no model for.
    """
    if config.token_shift:
        raise UserError("model.token_shift=true: Transformers has no such model to export to")
    try:
        import safetensors.torch
    except ImportError as error:
        raise UserError("an export needs safetensors: pip install safetensors") from error
    tensors = to_transformers(config, weights)
    described = {
        "config.json": model_json(config),
        "generation_config.json": generation_json(config),
        "tokenizer.json": tokenizer_json(vocabulary),
        "tokenizer_config.json": tokenizer_config_json(config, vocabulary),
    }
    files = {
        name: (json.dumps(value, indent=2) + "\n").encode() for name, value in described.items()
    }
    return files | {WEIGHTS: safetensors.torch.save(tensors, {"format": "pt"})}


# --------------------------------------------------------------------------------------------------
# There


def to_transformers(config: GPTConfig, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of `GPT(config)`, in float32, under the names and in the layout of
    Transformers, the unknown token's included.
    """
    tensors = {}
    for name, tensor in weights.items():
        if name == "head.weight" and config.tie_weights:
            continue
        tensor = tensor.float()
        if name in PER_CHARACTER:
            tensor = torch.cat((tensor, tensor.mean(dim=0, keepdim=True)))
        module, _, kind = name.rpartition(".")
        ours, layer = _pattern(module)
        if ours not in MODULES[config.arch]:
            raise UserError(f"{name}: there is no such weight in Transformers' model")
        theirs = MODULES[config.arch][ours]
        if _is_transposed(config.arch, ours, tensor):
            tensor = tensor.T
        for target, part in zip(theirs, tensor.chunk(len(theirs)), strict=True):
            tensors[f"{target.format(layer)}.{kind}"] = part.contiguous().clone()
        if config.arch == "gpt2" and not config.bias and kind == "weight" and ours in BIASED:
            zeros = torch.zeros(tensor.size(-1))
            tensors[f"{theirs[0].format(layer)}.bias"] = zeros
    return tensors


def _pattern(module: str) -> tuple[str, str]:
    """A module's name with {} for the number of its block, and that number."""
    found = re.search(r"(?<=\.)\d+(?=\.)", module)
    return (module.replace(found[0], "{}", 1), found[0]) if found else (module, "")


def _is_transposed(arch: str, ours: str, tensor: torch.Tensor) -> bool:
    return arch == "gpt2" and ours in BIASED and tensor.dim() == 2


def model_json(config: CompleteConfig) -> dict[str, Any]:
    """`config.json`; the unknown token pads batches of texts, too."""
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": config.vocab_size}
    common = {"vocab_size": config.vocab_size + 1, "dtype": "float32", **ids}
    if config.arch == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            **common,
            "n_positions": config.block_size,
            "n_layer": config.n_layer,
            "n_head": config.n_head,
            "n_embd": config.n_embd,
            "tie_word_embeddings": config.tie_weights,
            "embd_pdrop": config.embd_pdrop,
            "resid_pdrop": config.resid_pdrop,
            "attn_pdrop": config.attn_pdrop,
            **fixed(config),
        }
    return {
        "architectures": ["NanoChatForCausalLM"],
        "model_type": "nanochat",
        **common,
        "max_position_embeddings": config.block_size,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "hidden_size": config.n_embd,
        "attention_dropout": config.attn_pdrop,
        **fixed(config),
    }


def fixed(config: CompleteConfig) -> dict[str, Any]:
    """What Transformers lets one choose, and all models of this architecture and size share."""
    if config.arch == "gpt2":
        return {
            "n_inner": None,  # 4 n_embd
            "activation_function": "gelu",  # exact, where GPT-2 itself has an approximation
            "layer_norm_epsilon": 1e-5,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        }
    return {
        "intermediate_size": 4 * config.n_embd,
        "num_key_value_heads": config.n_head,
        "hidden_act": "relu2",
        "rms_norm_eps": NORM_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE},
        "final_logit_softcapping": float(SOFTCAP),
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def generation_json(config: GPTConfig) -> dict[str, Any]:
    """`generation_config.json`: draws as `sample.py` does, up to what the model can see at once.

    Without that limit a pipeline makes 256 characters, more than some models have positions for.
    Beside a `max_new_tokens`, which wins, Transformers warns of it.
    """
    return {
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 0,  # among all
        "max_length": config.block_size,
        "suppress_tokens": [config.vocab_size],
        "pad_token_id": config.vocab_size,
    }


def tokenizer_json(vocabulary: str) -> dict[str, Any]:
    """`tokenizer.json`: every character is a word by itself, whatever it is."""
    unknown = unknown_token(vocabulary)
    added = {"id": len(vocabulary), "content": unknown, "special": True, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**added, "single_word": False, "lstrip": False, "rstrip": False}],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": r"[\s\S]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {character: i for i, character in enumerate(vocabulary + unknown)},
            "unk_token": unknown,
        },
    }


def tokenizer_config_json(config: GPTConfig, vocabulary: str) -> dict[str, Any]:
    unknown = unknown_token(vocabulary)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.block_size,
        "unk_token": unknown,
        "pad_token": unknown,
        "padding_side": "left",
    }


# --------------------------------------------------------------------------------------------------
# And back


def read(folder: str) -> tuple[GPTConfig, dict[str, torch.Tensor], str]:
    """Configuration, weights (float32) and vocabulary of an exported model, also of one that
    Transformers has trained on and saved again.

    Raises `UserError` for what is not there, or cannot be a `GPT` over characters.
    """
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise UserError(f"{folder}: needs safetensors: pip install safetensors") from error
    try:
        given = _read_json(folder, "config.json")
        tokenizer = _read_json(folder, "tokenizer.json")["model"]
        tensors = load_file(os.path.join(folder, WEIGHTS))
        vocabulary, rows = _characters(tokenizer, folder)
        config = _config(given, len(vocabulary), folder)
        weights = from_transformers(config.arch, tensors)
        if config.arch == "gpt2":  # Transformers' always has biases: zero where ours has none
            biases = [name for name in weights if name.endswith(".bias")]
            config.bias = any(weights[name].any() for name in biases)
            if not config.bias:
                weights = {name: t for name, t in weights.items() if name not in biases}
        if config.tie_weights:
            weights["head.weight"] = weights["tok_emb.weight"]
        for name in PER_CHARACTER:
            weights[name] = weights[name][rows]
    except UserError:
        raise
    except Exception as error:  # files made by hand can be wrong in any way
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"{folder}: not an exported model: {reason}") from error
    return config, weights, vocabulary


def _read_json(folder: str, name: str) -> dict[str, Any]:
    with open(os.path.join(folder, name), encoding="utf-8") as file:
        return json.load(file)


def _characters(tokenizer: dict[str, Any], folder: str) -> tuple[str, torch.Tensor]:
    """The characters in the order of their ids, and those, without the unknown token."""
    ids = {token: i for token, i in tokenizer["vocab"].items() if token != tokenizer["unk_token"]}
    longer = next((token for token in ids if len(token) != 1), None)
    if longer is not None:
        raise UserError(
            f"{folder}: its tokens are not characters: there is {longer!r}; start from a model "
            "that export.py has written"
        )
    vocabulary = "".join(sorted(ids, key=lambda token: ids[token]))
    return vocabulary, torch.tensor([ids[character] for character in vocabulary])


def _config(given: dict[str, Any], vocab_size: int, folder: str) -> CompleteConfig:
    """What a `config.json` says; `UserError` where it says what no `GPT` has."""
    archs = {"gpt2": "gpt2", "nanochat": "modern"}
    if given["model_type"] not in archs:
        raise UserError(
            f"{folder}: model_type={given['model_type']}: must be gpt2 or nanochat, which are the "
            "architectures gpt2 and modern here"
        )
    arch = archs[given["model_type"]]
    gpt2 = arch == "gpt2"
    config = GPTConfig(
        arch=arch,
        model_type=None,
        n_layer=given["n_layer" if gpt2 else "num_hidden_layers"],
        n_head=given["n_head" if gpt2 else "num_attention_heads"],
        n_embd=given["n_embd" if gpt2 else "hidden_size"],
        block_size=given["n_positions" if gpt2 else "max_position_embeddings"],
        vocab_size=vocab_size,
        tie_weights=given["tie_word_embeddings"] if gpt2 else None,
    ).complete()
    for name, value in fixed(config).items():
        if given.get(name) != value:
            raise UserError(
                f"{folder}: {name}={given.get(name)}: models of this application have {value}"
            )
    return config


def from_transformers(arch: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `to_transformers`, but for the unknown token, which stays."""
    ours_of = {
        their: (our, part)
        for our, theirs in MODULES[arch].items()
        for part, their in enumerate(theirs)
    }
    parts: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        theirs, layer = _pattern(module)
        if theirs not in ours_of:
            raise UserError(f"{WEIGHTS} has {name}, which no model of this application has")
        ours, part = ours_of[theirs]
        tensor = tensor.float()
        if _is_transposed(arch, ours, tensor):
            tensor = tensor.T.contiguous()
        parts[f"{ours.format(layer)}.{kind}"][part] = tensor
    return {
        name: torch.cat([found[part] for part in sorted(found)]) for name, found in parts.items()
    }
