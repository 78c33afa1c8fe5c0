# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Contract of `grouped_experts`, shared by every implementation."""

from __future__ import annotations

from torch import Tensor

ACTIVATIONS = ("situ", "silu")


def validate_grouped_experts(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    activation: str,
    beta: float,
    linear_beta: float,
) -> None:
    """Check shapes, dtypes, devices and options; raises `ValueError` or `TypeError` naming the argument."""
    floating = {
        "hidden_states": hidden_states,
        "gate_up_proj": gate_up_proj,
        "down_proj": down_proj,
        "top_k_weights": top_k_weights,
    }
    for name, tensor in floating.items():
        if not tensor.is_floating_point():
            raise TypeError(f"`{name}` must be a floating tensor, got {tensor.dtype}.")
    for name in ("gate_up_proj", "down_proj"):
        if floating[name].dtype != hidden_states.dtype:
            raise TypeError(
                f"`{name}` must have the dtype of `hidden_states`, {hidden_states.dtype}, got {floating[name].dtype}: "
                "cast one of them."
            )
    if top_k_index.is_floating_point() or top_k_index.dtype.itemsize < 4:
        raise TypeError(f"`top_k_index` must be int32 or int64, got {top_k_index.dtype}: pass expert ids.")
    for name, tensor in (floating | {"top_k_index": top_k_index}).items():
        if tensor.device != hidden_states.device:
            raise ValueError(
                f"`{name}` must be on the device of `hidden_states`, {hidden_states.device}, got {tensor.device}: "
                "move it."
            )
    if hidden_states.dim() != 2:
        raise ValueError(
            f"`hidden_states` must have shape [T, Z], got {list(hidden_states.shape)}: flatten batch and sequence."
        )
    num_tokens, width = hidden_states.shape
    if gate_up_proj.dim() != 3 or gate_up_proj.shape[2] != width or gate_up_proj.shape[1] % 2:
        raise ValueError(f"`gate_up_proj` must have shape [E, 2I, Z={width}], got {list(gate_up_proj.shape)}.")
    expected = [gate_up_proj.shape[0], width, gate_up_proj.shape[1] // 2]
    if list(down_proj.shape) != expected:
        raise ValueError(f"`down_proj` must have shape [E, Z, I] = {expected}, got {list(down_proj.shape)}.")
    if 0 in expected:
        raise ValueError(f"there must be experts of some width, got [E, Z, I] = {expected}.")
    if top_k_index.dim() != 2 or top_k_index.shape[0] != num_tokens or top_k_index.shape[1] == 0:
        raise ValueError(f"`top_k_index` must have shape [T={num_tokens}, K], got {list(top_k_index.shape)}.")
    if top_k_weights.shape != top_k_index.shape:
        raise ValueError(
            f"`top_k_weights` must have the shape {list(top_k_index.shape)} of `top_k_index`, got "
            f"{list(top_k_weights.shape)}."
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"`activation` must be one of {', '.join(map(repr, ACTIVATIONS))}, got {activation!r}.")
    if activation == "situ" and not (beta > 0 and linear_beta > 0):
        raise ValueError(f"`beta` and `linear_beta` must be positive, got {beta} and {linear_beta}.")
