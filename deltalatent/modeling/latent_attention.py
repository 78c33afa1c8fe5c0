# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA) without positions, with an output gate.

Sources: DeepSeek-V2 (arXiv 2405.04434, section 2.1), Kimi Linear (arXiv 2510.26692), Kimi K3 report (arXiv
2607.24653), golden README "MLA layers".
Shapes: B rows, T new tokens, S tokens in view, D model width, H heads, R latent rank, P = `qk_nope_head_dim`,
Q = `qk_rope_head_dim` (the key part that the heads share), V value width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, StaticLayer
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from deltalatent.configuration.configuration_kimi_k3 import KimiK3TextConfig
from deltalatent.kernels.latent_attention import (
    DocumentGroups,
    KeyBlock,
    blockwise_attention,
    causal_attention,
    keys_and_values,
    latent_attention,
)
from deltalatent.modeling.norms import KimiK3RMSNorm

logger = logging.get_logger(__name__)

LOW_RANK_NORM_EPS = 1e-6
"""Epsilon of the two low-rank norms: released models use this, not `rms_norm_eps`."""
SMALLEST_BLOCK = 4096
"""Cached tokens whose keys and values are made at a time, at least: smaller products would not fill a GPU."""


def _is_recording(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded, which cannot wait for a value."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class CausalView(NamedTuple):
    """What the tokens of a batch see of each other, said without a mask. Always causal.

    Attributes:
        continues: The new tokens follow those in a cache, and see them.
        keys: bool [B, tokens in the cache + T], True at real tokens; `None` if all are. Only where `continues`.
        groups: The sequences of the batch, if they are not simply its rows. Only where not `continues`.
    """

    continues: bool = False
    keys: Tensor | None = None
    groups: DocumentGroups | None = None


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
    on the latents themselves. The form with fewer multiplications is taken; decoding absorbs. Behind a long cache, the
    expanded form makes keys and values of max(T, 4096) cached tokens at a time.

    With `attn_implementation="sdpa"` (default) no mask is made: padding and packed documents are said by lengths
    (`CausalView`). `"eager"` gives attention weights; other attention functions get Transformers' masks.
    """

    is_causal = True
    num_key_value_groups = 1  # keys and values reach the attention function with as many heads as the queries

    def __init__(self, config: KimiK3TextConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.q_lora_rank = config.q_lora_rank
        self.kv_lora_rank = config.kv_lora_rank
        self.qk_nope_head_dim = config.qk_nope_head_dim
        self.qk_rope_head_dim = config.qk_rope_head_dim
        self.v_head_dim = config.v_head_dim
        self.qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        self.scaling = self.qk_head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.has_output_gate = config.mla_use_output_gate
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
        if self.has_output_gate:
            self.g_proj = nn.Linear(config.hidden_size, value_width, bias=False)
        self.o_proj = nn.Linear(value_width, config.hidden_size, bias=False)

    @force_accelerate_hooks("kv_b_proj")
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: CausalView | Tensor | Any | None,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """[B, T, D] -> [B, T, D] and, from the eager attention function, the weights [B, H, T, S].

        Args:
            hidden_states: Normalised input of the layer.
            attention_mask: A `CausalView`, or what the mask functions of Transformers made for the attention function
                in use.
            cache: Latents of earlier tokens; extended.
        """
        if isinstance(attention_mask, CausalView):
            if kwargs.get("output_attentions"):
                logger.warning_once(
                    '`attn_implementation="sdpa"` gives no attention weights, got `output_attentions=True`: use '
                    '`model.set_attn_implementation("eager")`.'
                )
            return self._forward_without_mask(hidden_states, attention_mask, cache), None
        kwargs.pop("is_causal", None)  # the layers around this one are causal whatever a caller says
        query, latent, shared_key = self._project(hidden_states)
        query = query.transpose(1, 2)  # [B, H, T, P+Q]
        latent, shared_key = latent[:, None], shared_key[:, None]  # one "head" for the cache classes
        if cache is not None:
            latent, shared_key = cache.update(latent, shared_key, self.layer_idx)  # [B, 1, S, .]
            latent, shared_key = self._blank_unwritten(cache, latent, shared_key)

        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attend = self._absorbed if self._absorbing_is_cheaper(query.shape[2], latent.shape[2]) else self._expanded
        output, weights = attend(attention, query, latent, shared_key, attention_mask, **kwargs)  # [B, T, H, V]
        return self._gate_and_project(output, hidden_states), weights

    def _forward_without_mask(self, hidden_states: Tensor, view: CausalView, cache: Cache | None) -> Tensor:
        """Attention in which lengths say what a mask of T*S entries would: `attn_implementation="sdpa"`."""
        groups = view.groups
        if groups is not None:
            hidden_states = groups.gather(hidden_states)  # [1, M, D]; from here on M places take the part of T tokens
        query, latent, shared_key = self._project(hidden_states)
        if view.continues and cache is not None:
            latent, shared_key = cache.update(latent[:, None], shared_key[:, None], self.layer_idx)
            output = self._behind_cache(query, latent[:, 0], shared_key[:, 0], view.keys, cache)
        else:
            if cache is not None:
                rows = [x if groups is None else groups.scatter(x) for x in (latent, shared_key)]
                cache.update(rows[0][:, None], rows[1][:, None], self.layer_idx)
            key, value = self._keys_and_values(latent, shared_key)
            if groups is None:
                output = self._causal(query, key, value)
            else:
                documents = zip(*(groups.split(x) for x in (query, key, value)), strict=True)
                outputs = [self._causal(*document).flatten(0, 1) for document in documents]
                output = (torch.cat(outputs) if len(outputs) > 1 else outputs[0])[None]
        output = self._gate_and_project(output, hidden_states)
        return output if groups is None else groups.scatter(output)

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, H, P+Q], normalised latents [B, T, R], shared key parts [B, T, Q]."""
        if self.q_lora_rank is None:
            query = self.q_proj(hidden_states)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        latent, shared_key = self.kv_a_proj_with_mqa(hidden_states).split(
            [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1
        )
        return query.unflatten(-1, (self.num_heads, self.qk_head_dim)), self.kv_a_layernorm(latent), shared_key

    def _gate_and_project(self, output: Tensor, hidden_states: Tensor) -> Tensor:
        """[B, T, H, V] -> [B, T, D]."""
        output = output.flatten(2)
        if self.has_output_gate:
            output = output * torch.sigmoid(self.g_proj(hidden_states))
        return self.o_proj(output)

    def _keys_and_values(self, latent: Tensor, shared_key: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, R] and [B, S, Q] -> keys [B, S, H, P+Q] and values [B, S, H, V]."""
        per_head = self.kv_b_proj(latent).unflatten(-1, (self.num_heads, -1))
        return keys_and_values(per_head, shared_key, self.qk_nope_head_dim)

    def _causal(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Tokens among themselves: [n, l, H, P+Q] twice and [n, l, H, V] -> [n, l, H, V]."""
        output = causal_attention(
            *(x.transpose(1, 2) for x in (query, key, value)), scale=self.scaling, dropout=self._dropout
        )
        return output.transpose(1, 2)

    def _behind_cache(
        self, query: Tensor, latent: Tensor, shared_key: Tensor, keys: Tensor | None, cache: Cache
    ) -> Tensor:
        """The last T of the tokens written to the cache: queries [B, T, H, P+Q] and S latents -> [B, T, H, V].

        `keys` [B, <= S], True at tokens that may be seen, lacks the part of a preallocated cache not written yet.
        """
        length, room = query.shape[1], latent.shape[1]
        end: Any = cache.get_seq_length(self.layer_idx)  # of a static cache, a tensor on its device
        if keys is not None:
            keys = nn.functional.pad(keys, (0, room - keys.shape[1]))
        if self._absorbing_is_cheaper(length, room):
            end = end if isinstance(end, Tensor) else None
            return self._absorbed_in_cache(query, latent, shared_key, keys, end)
        is_graph = torch.compiler.is_compiling() or _is_recording(query.device)
        if is_graph or (torch.is_grad_enabled() and query.requires_grad):
            return self._masked(query, latent, shared_key, keys, end)

        end = int(end)
        past = end - length
        query = query.transpose(1, 2)

        def blocks() -> Iterator[KeyBlock]:
            # As many tokens at a time as there are new ones need no more memory than a prefill of these alone.
            size = max(length, SMALLEST_BLOCK)
            for start in [*range(0, past, size), past]:
                part = slice(start, min(start + size, past) if start < past else end)
                cached, cached_key, mask = latent[:, part], shared_key[:, part], None
                if keys is not None:
                    hidden = ~keys[:, part, None]  # may be anything, and 0 * NaN is NaN
                    cached, cached_key = cached.masked_fill(hidden, 0), cached_key.masked_fill(hidden, 0)
                    mask = keys[:, None, None, part]
                is_own = start == past
                if mask is not None and is_own:
                    mask = mask & torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
                yield self._key_block(cached, cached_key, mask, is_own and mask is None)

        return blockwise_attention(query, blocks(), scale=self.scaling).transpose(1, 2)

    def _key_block(self, latent: Tensor, shared_key: Tensor, mask: Tensor | None, is_causal: bool) -> KeyBlock:
        key, value = self._keys_and_values(latent, shared_key)
        return KeyBlock(key.transpose(1, 2), value.transpose(1, 2), mask, is_causal)

    def _absorbed_in_cache(
        self, query: Tensor, latent: Tensor, shared_key: Tensor, keys: Tensor | None, end: Tensor | None
    ) -> Tensor:
        """`W_kv_b` moved over to the query and to the output; attention runs on the latents themselves."""
        key_weight, value_weight = self._key_and_value_weights()
        own_query, shared_query = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        latent_query = torch.einsum("bthp,hpr->bthr", own_query, key_weight)
        output = latent_attention(
            latent_query.to(latent.dtype),
            shared_query.to(latent.dtype),
            latent,
            shared_key.to(latent.dtype),
            scale=self.scaling,
            mask=None if keys is None else keys[:, None],
            end=end,
        )
        return torch.einsum("bthr,hvr->bthv", output, value_weight)

    def _masked(self, query: Tensor, latent: Tensor, shared_key: Tensor, keys: Tensor | None, end: Any) -> Tensor:
        """With a mask after all: where gradients pass through a cache, or a graph cannot know its length."""
        length, room = query.shape[1], latent.shape[1]
        places = torch.arange(room, device=query.device)
        last = torch.arange(length, device=query.device) + (end - length)
        visible = places <= last[:, None]
        visible = visible[None, None] if keys is None else visible & keys[:, None, None]
        # What nobody sees may be anything, and 0 * NaN is NaN.
        seen = (places < end if keys is None else (places < end) & keys)[..., None]
        key, value = self._keys_and_values(torch.where(seen, latent, 0), torch.where(seen, shared_key, 0))
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        output = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, dropout_p=self._dropout, scale=self.scaling
        )
        return output.transpose(1, 2)

    def _expanded(self, attention, query, latent, shared_key, attention_mask, **kwargs):
        """Keys and values of every head, computed from the latents."""
        key, value = (x.transpose(1, 2) for x in self._keys_and_values(latent[:, 0], shared_key[:, 0]))
        return self._call(attention, query, key, value, attention_mask, **kwargs)

    def _absorbed(self, attention, query, latent, shared_key, attention_mask, **kwargs):
        """Multi-query attention on the latents: one key and value head that all H queries of a token share.

        The heads are laid out along the query axis (T*H queries on one head), so no attention function copies the
        latents for each head.
        """
        batch_size, num_heads, length, _ = query.shape
        key_weight, value_weight = self._key_and_value_weights()
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
        return attention(
            self, query, key, value, attention_mask, dropout=self._dropout, scaling=self.scaling, **kwargs
        )

    @property
    def _dropout(self) -> float:
        return self.attention_dropout if self.training else 0.0

    def _key_and_value_weights(self) -> tuple[Tensor, Tensor]:
        """The two halves of `kv_b_proj.weight`, [H, P, R] and [H, V, R]."""
        weight = self.kv_b_proj.weight.view(self.num_heads, -1, self.kv_lora_rank)
        return weight.split([self.qk_nope_head_dim, self.v_head_dim], dim=1)

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
