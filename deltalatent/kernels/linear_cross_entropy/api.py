# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Public function of the cross-entropy of a linear head."""

from __future__ import annotations

import torch
from torch import Tensor

from deltalatent.kernels.autocast import is_autocasting
from deltalatent.kernels.dispatch import Obstacle, resolve_impl, triton_obstacle
from deltalatent.kernels.linear_cross_entropy.autograd import chunked_loss
from deltalatent.kernels.linear_cross_entropy.validation import validate_linear_cross_entropy
from deltalatent.kernels.tiles import cdiv

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

CHUNK_LOGITS = 2**28
"""Logits that exist at a time unless the caller says otherwise: 512 MiB in bf16, 1638 tokens of 163,840 words."""


TILE = 128
"""Tokens in a tile of the matrix products."""


def linear_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    num_items: Tensor | float | None = None,
    ignore_index: int = -100,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> Tensor:
    r"""Cross-entropy between `softmax(hidden_states @ weight.T)` and targets, a few tokens at a time.

    `loss = sum_t (log sum_v exp(z_tv) - z_t,target(t)) / num_items` with `z = hidden_states @ weight.T`.

    Never are there logits of more than `chunk_size` tokens. Where gradients are wanted, a chunk's are computed as soon
    as its logits exist, so that these are made once and not kept: three matrix products in all, as with full logits.
    What waits for the backward pass are the gradients, [..., D] in the dtype of the inputs and [V, D] in float32.

    Args:
        hidden_states: [..., D]; float32, float16, bfloat16 or float64. Under autocast it and `weight` are cast first.
        weight: [V, D], in the dtype of `hidden_states`.
        targets: integers [...] in [0, V), or `ignore_index` where there is no target. Not shifted here.
        num_items: What the sum is divided by; `None` for the number of targets (NaN if there is none).
        ignore_index: See `targets`.
        chunk_size: Tokens per chunk, at least 1; `None` makes equal ones of about 2^28 logits.
        impl: `"auto"`, `"triton"` or `"torch"`: what computes the softmax of a chunk and its gradient.

    Returns:
        Scalar, float32 (float64 for float64): logits are rounded to the dtype of the inputs, everything after them is
        float32, the sum over tokens of the weight's gradient included. Differentiable, once, in `hidden_states` and
        `weight`.

    Raises:
        ValueError: Wrong shape, device or chunk size; an `impl` that cannot run.
        TypeError: Wrong dtype.
        RuntimeError: A target outside of the vocabulary, on a CPU; on a GPU the loss is NaN then.
    """
    device = hidden_states.device
    if is_autocasting(device):
        dtype = torch.get_autocast_dtype(device.type)
        hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
    validate_linear_cross_entropy(hidden_states, weight, targets, chunk_size)
    reasons = {"triton": _triton_obstacle(hidden_states), "torch": None}
    chosen = resolve_impl("linear_cross_entropy", impl, device=device, reasons=reasons)
    targets = targets.flatten()
    if chunk_size is None:
        chunk_size = choose_chunk_size(targets.shape[0], weight.shape[0])
    if num_items is None:
        num_items = (targets != ignore_index).sum()
    total = chunked_loss(chosen, hidden_states.flatten(0, -2), weight, targets, ignore_index, chunk_size)
    return total / num_items


def choose_chunk_size(tokens: int, words: int) -> int:
    """Chunks of one size: every chunk reads and writes the weight's gradient, so a small last one costs as much.

    Rounded up to whole tiles of matrix products, if there are that many tokens.
    """
    most = max(1, CHUNK_LOGITS // words)
    size = max(1, cdiv(tokens, max(1, cdiv(tokens, most))))
    return size if most < TILE else cdiv(size, TILE) * TILE


def _triton_obstacle(hidden_states: Tensor) -> Obstacle | None:
    if hidden_states.dtype not in TRITON_DTYPES:
        reason = f"the Triton kernel takes float32, float16 or bfloat16, got {hidden_states.dtype}: use 'torch'"
        return Obstacle(reason, TypeError)
    return triton_obstacle(hidden_states.device)
