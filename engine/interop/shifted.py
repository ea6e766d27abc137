"""Transformers' nanochat with token shift (RWKV, Peng et al., 2023) and hashed n-gram embeddings (Huang et al.,
"Over-Tokenized Transformer", 2025), as export.py writes them beside such a model.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

The MLPs also see the position before, scaled per channel; the embedding is the sum of the character's and two vectors
for the last three and four characters. With a cache, a `DynamicCache`, each layer keeps the last position's input, and
the cache the last characters. It can be neither reordered nor cropped: beam search and assisted generation are refused.

`type: ignore` stands where a method has other arguments than Transformers', on purpose, and where its cache gets an
attribute.
"""

import functools
import inspect

import torch
from torch import nn
from transformers import NanoChatConfig, NanoChatForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.models.nanochat.modeling_nanochat import NanoChatDecoderLayer

from engine.kernels.ops import NGRAM_FACTORS  # export.py writes the values here

# The keyword of the cache: `past_key_values` up to Transformers 5.23.
CACHE = "cache" if "cache" in inspect.signature(NanoChatDecoderLayer.forward).parameters else "past_key_values"


class NgramEmbedding(nn.Module):
    """The sum of a vector for the last three characters and one for the last four, by a hash."""

    codes: torch.Tensor

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2 * config.ngram_rows, config.hidden_size))
        self.register_buffer("codes", torch.zeros(config.vocab_size, dtype=torch.int64))

    def forward(self, input_ids, cache, attention_mask):
        codes = self.codes[input_ids]
        if attention_mask is not None and attention_mask.dim() == 2:  # padding is no character
            codes = codes * (attention_mask[:, -codes.size(1) :] != 0)
        before, length = codes.new_zeros(len(codes), 3), 0
        if cache is not None:
            before, length = getattr(cache, "last_codes", (before, 0))
            if cache.get_seq_length() != length:
                raise ValueError("n-gram embeddings need a DynamicCache that was not cropped")
        codes = torch.cat((before, codes), dim=1)
        if cache is not None:
            cache.last_codes = codes[:, -3:], length + input_ids.size(1)
        last = codes.unfold(1, 4, 1).unbind(2)
        three, four = (
            table[torch.stack([x * f for x, f in zip(last, factors, strict=True)]).sum(0) % len(table)]
            for table, factors in zip(self.weight.chunk(2), NGRAM_FACTORS, strict=True)
        )
        return three + four


class ShiftedLayer(NanoChatDecoderLayer):
    """The base class's layer, with a token shift between the second norm and the MLP."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.layer_idx = layer_idx
        self.shift = nn.ParameterDict({"weight": torch.zeros(config.hidden_size)})

    def forward(self, hidden_states, cache=None, attention_mask=None, **kwargs):  # type: ignore[override]
        cache = kwargs.pop("past_key_values", cache)
        if cache is None and kwargs.get("use_cache"):
            raise ValueError("token shift does not know where this Transformers has its cache")
        x = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(x, attention_mask=attention_mask, **{CACHE: cache}, **kwargs)
        hidden_states = hidden_states + attended
        y = self.post_attention_layernorm(hidden_states)
        last = torch.zeros_like(y[:, :1])
        if cache is not None:
            cached = cache.layers[self.layer_idx]
            length = cached.get_seq_length()
            last, end = getattr(cached, "last_input", (last, 0))
            if not isinstance(cached, DynamicLayer) or length != end + y.size(1):
                raise ValueError("token shift needs a DynamicCache that was not cropped")
            cached.last_input = y[:, -1:], length  # type: ignore[attr-defined]
        before = torch.cat((last, y[:, :-1]), dim=1)
        if attention_mask is not None:  # (B, 1, S, T): padding, which is hidden, has nothing to add
            S, T = attention_mask.shape[-2:]
            seen = attention_mask[:, 0].diagonal(T - S - 1, 1, 2)  # whether a position sees the one before it
            seen = seen if seen.dtype is torch.bool else seen == 0
            before = before.clone()
            before[:, S - seen.size(1) :] *= seen[..., None]
        return hidden_states + self.mlp(y + before * self.shift["weight"])


class ShiftedConfig(NanoChatConfig):
    model_type = "nanochat_shift"
    token_shift: bool = True
    ngram_rows: int = 0


class ShiftedForCausalLM(NanoChatForCausalLM):
    config_class = ShiftedConfig
    _is_stateful = True  # Transformers refuses assisted generation
    # Their masks do not say which position is padding.
    _supports_flash_attn = _supports_flex_attn = False

    def __init__(self, config):
        super().__init__(config)
        if config.token_shift:
            self.model.layers = nn.ModuleList(ShiftedLayer(config, i) for i in range(config.num_hidden_layers))
        self.ngrams = NgramEmbedding(config) if config.ngram_rows else None
        self.post_init()

    @functools.wraps(NanoChatForCausalLM.forward)  # Transformers looks at its signature for what a model takes
    def forward(self, input_ids=None, attention_mask=None, **kwargs):  # type: ignore[override]
        if self.ngrams is not None:
            if input_ids is None:
                raise ValueError("n-gram embeddings need input_ids")
            cache = kwargs.pop("cache", None)
            cache = kwargs.pop("past_key_values", cache)
            use_cache = kwargs.get("use_cache")
            if cache is None and (self.config.use_cache if use_cache is None else use_cache):
                cache = DynamicCache(config=self.config)
            embedded = self.get_input_embeddings()(input_ids) + self.ngrams(input_ids, cache, attention_mask)
            kwargs |= {"inputs_embeds": embedded, CACHE: cache}
            input_ids = None
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)

    def generate(self, inputs=None, generation_config=None, **kwargs):  # type: ignore[override]
        default = getattr(generation_config or self.generation_config, "num_beams", None)
        if kwargs.get("num_beams", default) not in (1, None):
            raise ValueError("num_beams: a model with token shift has no beam search")
        return super().generate(inputs, generation_config=generation_config, **kwargs)  # type: ignore[misc]
