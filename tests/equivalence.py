# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What the tests of equal ways to compute one thing share: exact models, the plain oracle, the tensors of a cache.

Padded or alone, packed or apart, cached or not, cut here or there: these must give the same numbers, and in float64
they do to about 1e-13 of the largest logit, where float32 leaves 1e-5 (measured on all tiny variants). Hence two
tolerances, each with room for more roundings than there are, and far below what any fault gives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from tests.testing_common import linear_attn_config, tiny_model

EXACT = 1e-10
"""Relative tolerance of float64 models."""

ROUNDED = 5e-5
"""Relative tolerance of float32 models: two results, each up to 1e-5 from the float64 one, and a margin of 2.5."""

ONE_KIND = {
    "kda_only": {"linear_attn_config": linear_attn_config(kda_layers=[1, 2, 3, 4, 5], full_attn_layers=[])},
    "mla_only": {"linear_attn_config": linear_attn_config(kda_layers=[], full_attn_layers=[1, 2, 3, 4, 5])},
}
"""Models with one kind of token mixer, beside the variants of `testing_common`."""


def exact_model(variant: str = "default", *, seed: int = 0, **overrides: Any) -> Any:
    """A float64 model with random weights, in eval mode (parameters that are always float32 are used as they are)."""
    if variant in ONE_KIND:
        variant, overrides = "default", ONE_KIND[variant] | overrides
    model = tiny_model(variant, seed=seed, **overrides).double()
    if model.config.num_experts:
        model.set_experts_implementation("batched_mm")  # torch has no grouped product in float64
    return model


@torch.no_grad()
def greedy_oracle(model: Any, row: Tensor, new_tokens: int) -> Tensor:
    """A prompt int64 [T] and its greedy continuation by full recomputation: no batch, padding, cache or `generate`."""
    for _ in range(new_tokens):
        row = torch.cat([row, model(row[None], use_cache=False).logits[0, -1:].argmax(-1)])
    return row


def state_tensors(cache: Cache) -> dict[str, Tensor]:
    """Every tensor that a cache carries from token to token, by name; the batch is the first axis of each.

    Of latent attention only the written part (a static cache allocates more).
    """
    tensors = {}
    for i, layer in enumerate(cache.layers):
        if cache.is_linear[i]:
            tensors |= {f"{i}.window{j}": layer.conv_states[j] for j in layer.conv_states}
            tensors[f"{i}.state"] = layer.recurrent_states[0]
        else:
            length = int(layer.get_seq_length())
            tensors |= {f"{i}.latent": layer.keys[:, :, :length], f"{i}.shared_key": layer.values[:, :, :length]}
    return tensors
