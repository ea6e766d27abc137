"""Transformers' nanochat with token shift (RWKV, Peng et al., 2023), as export.py writes it beside such a model.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

The MLPs also see the position before, scaled per channel. With a cache each layer keeps the last position's input.
Beam search would need that reordered, and a static cache hides what is padding: both are refused.
"""

import torch
from torch import nn
from transformers import NanoChatConfig, NanoChatForCausalLM, NanoChatModel
from transformers.models.nanochat.modeling_nanochat import NanoChatDecoderLayer


class ShiftedConfig(NanoChatConfig):
    model_type = "nanochat_shift"


class TokenShift(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))


class ShiftedLayer(NanoChatDecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.layer_idx, self.shift = layer_idx, TokenShift(config.hidden_size)

    def forward(  # type: ignore[override]
        self, hidden_states, attention_mask=None, past_key_values=None, **kwargs
    ):
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        hidden_states = hidden_states + attended
        y = self.post_attention_layernorm(hidden_states)
        last = torch.zeros_like(y[:, :1])
        if past_key_values is not None:
            cached = past_key_values.layers[self.layer_idx]
            last, cached.last_input = getattr(cached, "last_input", last), y[:, -1:]
        before = torch.cat((last, y[:, :-1]), dim=1)
        if attention_mask is not None:  # (B, 1, S, T): padding, which is hidden, has nothing to add
            S, T = attention_mask.shape[-2:]
            seen = attention_mask[:, 0].diagonal(T - S - 1, 1, 2)
            seen = seen if seen.dtype is torch.bool else seen == 0
            before = before.clone()
            before[:, S - seen.size(1) :] *= seen[..., None]
        return hidden_states + self.mlp(y + before * self.shift.weight)


class ShiftedModel(NanoChatModel):
    config: ShiftedConfig

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(
            ShiftedLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.post_init()


class ShiftedForCausalLM(NanoChatForCausalLM):
    config: ShiftedConfig
    config_class = ShiftedConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = ShiftedModel(config)
        self.post_init()

    def generate(self, *args, generation_config=None, **kwargs):
        for name, plain in (("num_beams", 1), ("cache_implementation", None)):
            value = kwargs.get(
                name, getattr(generation_config or self.generation_config, name, None)
            )
            if value not in (plain, None):
                raise ValueError(f"{name}={value}: a model with token shift has no such generation")
        return super().generate(*args, generation_config=generation_config, **kwargs)  # type: ignore[misc]
