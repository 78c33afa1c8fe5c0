# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Contract of `linear_cross_entropy`, shared by every implementation."""

from __future__ import annotations

from torch import Tensor


def validate_linear_cross_entropy(
    hidden_states: Tensor, weight: Tensor, targets: Tensor, chunk_size: int | None
) -> None:
    """Check shapes, dtypes and devices; raises `ValueError` or `TypeError` naming the argument."""
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(
            f"`weight` must be a floating matrix [V, D], got {list(weight.shape)} {weight.dtype}: pass the weight of "
            "the head."
        )
    if hidden_states.dim() < 2 or hidden_states.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"`hidden_states` must have shape [..., D] with D={weight.shape[1]}, got {list(hidden_states.shape)}: "
            "pass what the head reads."
        )
    if hidden_states.dtype != weight.dtype:
        raise TypeError(
            f"`hidden_states` and `weight` must have one dtype, got {hidden_states.dtype} and {weight.dtype}: cast "
            "one of them."
        )
    if targets.shape != hidden_states.shape[:-1]:
        raise ValueError(
            f"`targets` must have shape {list(hidden_states.shape[:-1])}, one per hidden state, got "
            f"{list(targets.shape)}: shift labels before."
        )
    if targets.is_floating_point() or targets.is_complex():
        raise TypeError(f"`targets` must be integers, got {targets.dtype}: pass token ids.")
    for name, tensor in (("weight", weight), ("targets", targets)):
        if tensor.device != hidden_states.device:
            raise ValueError(
                f"`{name}` must be on the device of `hidden_states`, {hidden_states.device}, got {tensor.device}: "
                "move it."
            )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"`chunk_size` must be at least 1, got {chunk_size}: pass tokens per chunk, or None.")
