# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA) without positions, with an output gate.

Sources: DeepSeek-V2 (arXiv 2405.04434, section 2.1), Kimi Linear (arXiv 2510.26692), Kimi K3 report (arXiv
2607.24653), golden README "MLA layers".
Shapes: B rows, T new tokens, S tokens in view, D model width, H heads, R latent rank, P = `qk_nope_head_dim`,
Q = `qk_rope_head_dim` (the key part that the heads share), V value width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, StaticLayer
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from deltalatent.configuration.configuration_kimi_k3 import KimiK3TextConfig
from deltalatent.modeling.norms import KimiK3RMSNorm

LOW_RANK_NORM_EPS = 1e-6
"""Epsilon of the two low-rank norms: released models use this, not `rms_norm_eps`."""


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """Softmax attention as one reads it in a book.

    Args:
        query, key: [B, H, T, P+Q] and [B, H, S, P+Q]. value: [B, H, S, V].
        attention_mask: Added to the scores, broadcastable to [B, H, T, S].

    Returns:
        [B, T, H, V] and the attention weights [B, H, T, S]; the softmax is taken in float32 or wider.
    """
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class KimiK3LatentAttention(nn.Module):
    r"""One gated latent-attention layer.

    .. math::
        q &= W_{q_b}\, \mathrm{RMSNorm}(W_{q_a} x), \quad
        [c, k^S] = W_{kv_a} x, \quad
        [k^C, v] = W_{kv_b}\, \mathrm{RMSNorm}(c) \\
        y &= W_o\, \big(\mathrm{softmax}(q\, [k^C, k^S]^\top / \sqrt{P + Q})\, v \cdot \sigma(W_g\, x)\big)

    What the cache keeps per token is the normalised latent (R values) and the shared key part (Q values), never keys
    and values of heads. They are read in one of two forms that give the same numbers: *expanded*, keys and values are
    computed from all S latents; *absorbed*, `W_kv_b` is moved over to the query and to the output, and attention runs
    on the latents themselves. The form with fewer multiplications is taken; decoding absorbs.
    """

    is_causal = True
    num_key_value_groups = 1  # keys and values reach the attention function with as many heads as the queries

    def __init__(self, config: KimiK3TextConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.kv_lora_rank = config.kv_lora_rank
        self.qk_nope_head_dim = config.qk_nope_head_dim
        self.qk_rope_head_dim = config.qk_rope_head_dim
        self.v_head_dim = config.v_head_dim
        self.qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        self.scaling = self.qk_head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        query_width, value_width = self.num_heads * self.qk_head_dim, self.num_heads * self.v_head_dim

        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(config.hidden_size, query_width, bias=False)
        else:
            self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
            self.q_a_layernorm = KimiK3RMSNorm(config.q_lora_rank, LOW_RANK_NORM_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, query_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, self.kv_lora_rank + self.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = KimiK3RMSNorm(self.kv_lora_rank, LOW_RANK_NORM_EPS)
        self.kv_b_proj = nn.Linear(
            self.kv_lora_rank, self.num_heads * (self.qk_nope_head_dim + self.v_head_dim), bias=False
        )
        if config.mla_use_output_gate:
            self.g_proj = nn.Linear(config.hidden_size, value_width, bias=False)
        self.o_proj = nn.Linear(value_width, config.hidden_size, bias=False)

    @force_accelerate_hooks("kv_b_proj")
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """[B, T, D] -> [B, T, D] and, from the eager attention function, the weights [B, H, T, S].

        Args:
            hidden_states: Normalised input of the layer.
            attention_mask: What the mask functions of Transformers made for the attention function in use.
            cache: Latents of earlier tokens; extended.
        """
        kwargs.pop("is_causal", None)  # the layers around this one are causal whatever a caller says
        batch_size, length, _ = hidden_states.shape
        if self.config.q_lora_rank is None:
            query = self.q_proj(hidden_states)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        query = query.view(batch_size, length, self.num_heads, self.qk_head_dim).transpose(1, 2)  # [B, H, T, P+Q]

        latent, shared_key = self.kv_a_proj_with_mqa(hidden_states).split(
            [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1
        )
        latent = self.kv_a_layernorm(latent)[:, None]  # [B, 1, T, R], one "head" for the cache classes
        shared_key = shared_key[:, None]  # [B, 1, T, Q]
        if cache is not None:
            latent, shared_key = cache.update(latent, shared_key, self.layer_idx)  # [B, 1, S, .]
            latent, shared_key = self._blank_unwritten(cache, latent, shared_key)

        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attend = self._absorbed if self._absorbing_is_cheaper(length, latent.shape[2]) else self._expanded
        output, weights = attend(attention, query, latent, shared_key, attention_mask, **kwargs)  # [B, T, H, V]

        output = output.reshape(batch_size, length, -1)
        if self.config.mla_use_output_gate:
            output = output * torch.sigmoid(self.g_proj(hidden_states))
        return self.o_proj(output), weights

    def _expanded(self, attention, query, latent, shared_key, attention_mask, **kwargs):
        """Keys and values of every head, computed from the latents."""
        batch_size, _, seen, _ = latent.shape
        per_head = self.kv_b_proj(latent[:, 0]).view(batch_size, seen, self.num_heads, -1).transpose(1, 2)
        own_key, value = per_head.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        key = torch.cat([own_key, shared_key.expand(-1, self.num_heads, -1, -1)], dim=-1)  # [B, H, S, P+Q]
        return self._call(attention, query, key, value, attention_mask, **kwargs)

    def _absorbed(self, attention, query, latent, shared_key, attention_mask, **kwargs):
        """Multi-query attention on the latents: one key and value head that all H queries of a token share.

        The heads are laid out along the query axis (T*H queries on one head), so no attention function copies the
        latents for each head.
        """
        batch_size, num_heads, length, _ = query.shape
        key_weight, value_weight = self.kv_b_proj.weight.view(num_heads, -1, self.kv_lora_rank).split(
            [self.qk_nope_head_dim, self.v_head_dim], dim=1
        )  # [H, P, R], [H, V, R]
        own_query, shared_query = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        latent_query = torch.cat([own_query @ key_weight, shared_query], dim=-1)  # [B, H, T, R+Q]
        latent_query = latent_query.transpose(1, 2).reshape(batch_size, 1, length * num_heads, -1)
        key = torch.cat([latent, shared_key], dim=-1)
        if attention_mask is not None and attention_mask.shape[2] > 1:
            attention_mask = attention_mask.repeat_interleave(num_heads, dim=2)  # [B, 1, T*H, S]
        elif attention_mask is None and length > 1:
            # The causal flag of attention functions counts queries, of which a token now has H. Without a mask the new
            # tokens are the first in view: what follows them is the part of a static cache not written yet.
            token = torch.arange(length, device=query.device).repeat_interleave(num_heads)[:, None]
            visible = torch.arange(latent.shape[2], device=query.device) <= token
            attention_mask = torch.zeros_like(visible, dtype=query.dtype).masked_fill(~visible, -torch.inf)[None, None]
        output, weights = self._call(attention, latent_query, key, latent, attention_mask, is_causal=False, **kwargs)
        output = output.view(batch_size, length, num_heads, self.kv_lora_rank).transpose(1, 2)  # [B, H, T, R]
        output = (output @ value_weight.transpose(1, 2)).transpose(1, 2)  # [B, T, H, V]
        if weights is not None:
            weights = weights.view(batch_size, length, num_heads, -1).transpose(1, 2)
        return output, weights

    def _call(self, attention, query, key, value, attention_mask, **kwargs):
        dropout = self.attention_dropout if self.training else 0.0
        return attention(self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)

    def _absorbing_is_cheaper(self, length: int, seen: int) -> bool:
        """Compare multiplications per head: attention over wide latents against expanding them first."""
        if type(self.kv_b_proj).forward is not nn.Linear.forward:
            return False  # an adapter or quantised weights: what its call computes is not what `weight` holds
        expand = seen * self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)
        attend_expanded = length * seen * (self.qk_head_dim + self.v_head_dim)
        absorb = length * self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)
        attend_absorbed = length * seen * (2 * self.kv_lora_rank + self.qk_rope_head_dim)
        return absorb + attend_absorbed < expand + attend_expanded

    def _blank_unwritten(self, cache: Cache, latent: Tensor, shared_key: Tensor) -> tuple[Tensor, Tensor]:
        """Zero what a preallocated cache has not written yet: a mask gives it weight 0, but 0 * NaN is NaN."""
        layer = cache.layers[self.layer_idx]
        if not isinstance(layer, StaticLayer):
            return latent, shared_key
        written = torch.arange(latent.shape[2], device=latent.device) < layer.get_seq_length()
        written = written[:, None]  # [S, 1]
        return torch.where(written, latent, 0), torch.where(written, shared_key, 0)
