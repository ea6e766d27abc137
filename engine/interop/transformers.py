"""Hugging Face Transformers: a model as a directory that `from_pretrained` loads, and back.

    files = to_files(config, weights, vocabulary, encoding)        # file name -> content
    config, weights, vocabulary, encoding = read(folder)

`config` is a dictionary of `GPTConfig`'s fields, `weights` the model's `state_dict`, and `vocabulary[i]` the character
with the id i, which stands for a byte if `encoding` is "bytes". `arch="gpt2"` is Transformers' `GPT2LMHeadModel`,
`arch="modern"` its `NanoChatForCausalLM`; with token shift or n-gram embeddings, the directory has the code of
`shifted.py`, too, which `trust_remote_code=True` allows to run. Transformers itself is not needed, `safetensors` is.

Unknown characters become one more token at the end of the vocabulary, U+FFFD (Unicode's replacement character). Its
rows of embedding and head are the mean of all others: its logit is the mean logit, never the highest.
`generation_config.json` suppresses it.
"""

import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import UserError, one_line
from engine.kernels.native import LAYER_NORM_EPS, NORM_EPS
from engine.kernels.ops import NGRAM_FACTORS, ROPE_BASE, SOFTCAP

WEIGHTS = "model.safetensors"

# `model_type` in `config.json`, `arch`, whether it is `is_shifted`, and Transformers' class, or that of `shifted.py`
KINDS = {
    "gpt2": ("gpt2", False, "GPT2LMHeadModel"),
    "nanochat": ("modern", False, "NanoChatForCausalLM"),
    "nanochat_shift": ("modern", True, "ShiftedForCausalLM"),
}
SHIFTED = Path(__file__).with_name("shifted.py")
PER_CHARACTER = ("tok_emb.weight", "head.weight")  # one row for each character
CODES = "ngrams.codes"  # one number for each character

# Our modules and theirs; {} is the block's number. Where theirs are several, our matrix is theirs stacked.
BLOCK = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
MODULES: dict[str, dict[str, list[str]]] = {
    "gpt2": {
        "tok_emb": ["transformer.wte"],
        "pos_emb": ["transformer.wpe"],
        **{f"blocks.{{}}.{name}": [f"transformer.h.{{}}.{name}"] for name in BLOCK},
        "ln_f": ["transformer.ln_f"],
        "head": ["lm_head"],
    },
    "modern": {
        "tok_emb": ["model.embed_tokens"],
        "ngrams": ["ngrams"],
        "blocks.{}.attn.c_attn": [f"model.layers.{{}}.self_attn.{x}_proj" for x in "qkv"],
        "blocks.{}.attn.c_proj": ["model.layers.{}.self_attn.o_proj"],
        "blocks.{}.mlp.c_fc": ["model.layers.{}.mlp.fc1"],
        "blocks.{}.mlp.c_proj": ["model.layers.{}.mlp.fc2"],
        "blocks.{}.shift": ["model.layers.{}.shift"],
        "head": ["lm_head"],
    },
}

# `GPTConfig`'s fields, and their names in `config.json`.
SAME = ("n_layer", "n_head", "n_embd", "embd_pdrop", "resid_pdrop", "attn_pdrop")
FIELDS = {
    "gpt2": {**{name: name for name in SAME}, "block_size": "n_positions", "tie_weights": "tie_word_embeddings"},
    "modern": {
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_embd": "hidden_size",
        "block_size": "max_position_embeddings",
        "attn_pdrop": "attention_dropout",
    },
}
# The architecture that an export can represent.
EXPORTED = {"arch", "bias", "token_shift", "ngram_rows", *FIELDS["gpt2"]}
# Fields of GPT-2 that an export leaves out, as Transformers has the right defaults.
GPT2_DEFAULTS = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}


def is_shifted(config: dict[str, Any]) -> bool:
    """Whether Transformers needs `shifted.py` for the model."""
    return bool(config["token_shift"] or config["ngram_rows"])


def fixed_fields(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of `config.json` that Transformers leaves open, and `arch` and sizes decide here."""
    if config["arch"] == "gpt2":
        return {
            "n_inner": None,  # 4 n_embd
            "activation_function": "gelu",  # exact; OpenAI's GPT-2 has an approximation
            "layer_norm_epsilon": LAYER_NORM_EPS,
        }
    return {
        "intermediate_size": 4 * config["n_embd"],
        "num_key_value_heads": config["n_head"],
        "hidden_act": "relu2",
        "rms_norm_eps": NORM_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE},
        "final_logit_softcapping": float(SOFTCAP),
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def unknown_token(vocabulary: str, encoding: str) -> str:
    """The token for unknown characters: U+FFFD, or the next character that `vocabulary` lacks; for unknown bytes
    U+10FFFF, which is in no text.
    """
    first = 0x10FFFF if encoding == "bytes" else 0xFFFD
    return next(c for c in map(chr, range(first, 0x110000)) if c not in vocabulary)


def byte_tokens() -> list[str]:
    """The token of each byte: the character of its number if it can be printed, else one from U+0100 on, as
    Transformers' `ByteLevel` has them (Radford et al., "GPT-2", 2019).
    """
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]


def to_files(config: dict[str, Any], weights: dict[str, Tensor], vocabulary: str, encoding: str) -> dict[str, bytes]:
    """The files, by name, of a directory that `from_pretrained` loads model and tokenizer from. Raises
    `UserError` for a model that Transformers does not have, or if safetensors is missing.
    """
    if config["arch"] == "gpt2" and is_shifted(config):
        kind = "token shift" if config["token_shift"] else "n-gram embeddings"
        raise UserError(f"model.arch=gpt2 with {kind}: Transformers has no such model; page=FILE exports it")
    files = {WEIGHTS: safetensors().save(to_transformers(config, weights), {"format": "pt"})}
    for name, content in json_files(config, vocabulary, encoding).items():
        files[name] = f"{json.dumps(content, indent=2)}\n".encode()
    if is_shifted(config):
        imported = "from engine.kernels.ops import NGRAM_FACTORS"
        code = SHIFTED.read_text("utf-8").replace(imported, f"NGRAM_FACTORS = {NGRAM_FACTORS}")
        files[SHIFTED.name] = code.encode()
    return files


def to_transformers(config: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights in float32, under Transformers' names and in its layout, with the unknown token."""
    if config["arch"] == "gpt2" and not config["bias"]:  # its GPT-2 always has biases
        biased = [n for n in weights if n.startswith(("blocks.", "ln_f."))]
        weights = weights | {n.replace(".weight", ".bias"): torch.zeros(len(weights[n])) for n in biased}
    names = transformers_names(config)
    tensors = {}
    for name, tensor in weights.items():
        if name == "head.weight" and config["tie_weights"]:
            continue
        if name not in names:
            raise UserError(f"{name}: there is no such weight in Transformers' model")
        if name == CODES:
            tensors[name] = F.pad(tensor, (0, 1))
            continue
        tensor = tensor.float()
        if name in PER_CHARACTER:
            tensor = torch.cat((tensor, tensor.mean(dim=0, keepdim=True)))
        if is_transposed(name, tensor, config):
            tensor = tensor.T
        for target, part in zip(names[name], tensor.chunk(len(names[name])), strict=True):
            tensors[target] = part.clone(memory_format=torch.contiguous_format)
    return tensors


def json_files(config: dict[str, Any], vocabulary: str, encoding: str) -> dict[str, Any]:
    """The JSON files by name: model, generation and tokenizer."""
    gpt2, unknown_id = config["arch"] == "gpt2", len(vocabulary)
    unknown = unknown_token(vocabulary, encoding)
    model_type = "gpt2" if gpt2 else "nanochat" + "_shift" * is_shifted(config)
    *_, name = KINDS[model_type]
    classes = {"AutoConfig": "shifted.ShiftedConfig", "AutoModelForCausalLM": f"shifted.{name}"}
    added = {"auto_map": classes, "token_shift": config["token_shift"], "ngram_rows": config["ngram_rows"]}
    flags = dict.fromkeys(("normalized", "single_word", "lstrip", "rstrip"), False)
    pattern = {"pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    splitter: dict[str, Any] = {"type": "Split", **pattern}  # every character is one token
    decoder: dict[str, Any] = {"type": "Fuse"}
    if encoding == "bytes":
        tokens = byte_tokens()
        vocabulary = "".join(tokens[ord(character)] for character in vocabulary)
        settings = dict.fromkeys(("add_prefix_space", "trim_offsets", "use_regex"), False)
        decoder = {"type": "ByteLevel", **settings}
        splitter = {"type": "Sequence", "pretokenizers": [decoder, splitter]}
    vocab = {character: i for i, character in enumerate(vocabulary + unknown)}
    return {
        "config.json": {
            "architectures": [name],
            "model_type": model_type,
            **(added if is_shifted(config) else {}),
            "vocab_size": unknown_id + 1,
            "dtype": "float32",
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": unknown_id,
            **{theirs: config[ours] for ours, theirs in FIELDS[config["arch"]].items()},
            **fixed_fields(config),
        },
        "generation_config.json": {
            "do_sample": True,  # as sample.py does
            "temperature": 0.8,
            "top_k": 0,  # no limit
            # Or it would be 256; GPT-2 may have fewer positions.
            "max_length": config["block_size"],
            "suppress_tokens": [unknown_id],
            "pad_token_id": unknown_id,
        },
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [{"id": unknown_id, "content": unknown, "special": True, **flags}],
            "pre_tokenizer": splitter,
            "decoder": decoder,
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": unknown},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["block_size"],
            "unk_token": unknown,
            "pad_token": unknown,
            "padding_side": "left",  # so that every prompt of a batch ends where generation starts
        },
    }


def read(folder: str) -> tuple[dict[str, Any], dict[str, Tensor], str, str]:
    """Configuration, weights (float32), vocabulary and encoding of an exported model, or of one that Transformers
    has trained further and saved. Raises `UserError` for one that is damaged, or not one of ours.
    """
    try:
        tokenizer = json.loads(Path(folder, "tokenizer.json").read_text("utf-8"))
        given = json.loads(Path(folder, "config.json").read_text("utf-8"))
        vocabulary, ids = read_vocabulary(tokenizer["model"])
        decoder = tokenizer["decoder"] or {}
        encoding = "bytes" if decoder.get("type") == "ByteLevel" else "utf-8"
        if encoding == "bytes":
            tokens = byte_tokens()
            vocabulary = "".join(chr(tokens.index(token)) for token in vocabulary)
        config = read_model_config(given, len(vocabulary))
        weights = from_transformers(config, safetensors().load_file(Path(folder, WEIGHTS)))
        biases = [name for name in weights if name.endswith(".bias")]
        config["bias"] = any(weights[name].any() for name in biases)  # its GPT-2 always has them
        if not config["bias"]:
            weights = {name: tensor for name, tensor in weights.items() if name not in biases}
        if config["tie_weights"]:
            weights["head.weight"] = weights["tok_emb.weight"]
        for name in {*PER_CHARACTER, CODES} & weights.keys():
            weights[name] = weights[name][ids]
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error
    except Exception as error:  # a file that was edited can be wrong in any way
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"{folder}: not an exported model: {reason}") from error
    return config, weights, vocabulary, encoding


def read_vocabulary(tokenizer: dict[str, Any]) -> tuple[str, Tensor]:
    """The characters in the order of their ids, and the ids, without the unknown token."""
    ids = {token: i for token, i in tokenizer["vocab"].items() if token != tokenizer["unk_token"]}
    for token in ids:
        if len(token) != 1:
            raise UserError(f"its tokens must be characters, as export.py has: there is {token!r}")
    vocabulary = "".join(sorted(ids, key=ids.__getitem__))
    return vocabulary, torch.tensor([ids[character] for character in vocabulary])


def read_model_config(given: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """`GPTConfig`'s fields from `config.json`, except `bias`, which follows from the weights."""
    if given["model_type"] not in KINDS:
        raise UserError(f"model_type={given['model_type']}: must be {', '.join(KINDS)}")
    arch, shift, _ = KINDS[given["model_type"]]
    config: dict[str, Any] = {"arch": arch, "tie_weights": False, "ngram_rows": given.get("ngram_rows", 0)}
    config["token_shift"] = given.get("token_shift", shift)  # older exports do not say it
    config |= {ours: given[theirs] for ours, theirs in FIELDS[arch].items()}
    if missing := [theirs for ours, theirs in FIELDS[arch].items() if config[ours] is None]:
        raise UserError(f"config.json: {missing[0]} is null")
    optional = GPT2_DEFAULTS if arch == "gpt2" else {}
    for name, value in (fixed_fields(config) | optional).items():
        if given.get(name, optional.get(name)) != value:
            raise UserError(f"{name}={given.get(name)}: models of this application have {value}")
    return config | {"vocab_size": vocab_size}


def from_transformers(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inverse of `to_transformers`, except that the unknown token and zero biases stay."""
    weights, left = {}, dict(tensors)
    if config["n_layer"] > len(tensors):  # names for a billion layers would take the memory
        raise UserError(f"its config.json declares {config['n_layer']} layers, and {WEIGHTS} has fewer")
    for name, theirs in transformers_names(config).items():
        if theirs[0] in left:
            tensor = torch.cat([left.pop(their) for their in theirs])
            if name != CODES:
                tensor = tensor.float()
            weights[name] = tensor.T.contiguous() if is_transposed(name, tensor, config) else tensor
    if left:
        raise UserError(f"{WEIGHTS} has {min(left)}, which no model of this application has")
    return weights


def transformers_names(config: dict[str, Any]) -> dict[str, list[str]]:
    """Our parameters, and Transformers' that hold the same numbers; not every model has them all."""
    return {
        f"{ours.format(layer)}.{kind}": [f"{module.format(layer)}.{kind}" for module in theirs]
        for ours, theirs in MODULES[config["arch"]].items()
        for layer in range(config["n_layer"] if "{}" in ours else 1)
        for kind in ("weight", "bias", "codes")
    }


def is_transposed(name: str, tensor: Tensor, config: dict[str, Any]) -> bool:
    """Whether Transformers has the matrix transposed: GPT-2's are `Conv1D`s."""
    return config["arch"] == "gpt2" and name.startswith("blocks.") and tensor.dim() == 2


def safetensors() -> Any:
    """The module `safetensors.torch`. Raises `UserError` if it is missing."""
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise UserError("safetensors is missing: pip install safetensors") from error
