# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Contract of `gated_rms_norm`, shared by every implementation."""

import torch


def validate_gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Check shapes, dtypes, devices and `eps`; raises `ValueError` or `TypeError` naming the argument."""
    for name, tensor in (("x", x), ("gate", gate), ("weight", weight)):
        if not tensor.is_floating_point():
            raise TypeError(f"`{name}` must be a floating tensor, got {tensor.dtype}.")
        if tensor.device != x.device:
            raise ValueError(f"`{name}` must be on the device of `x`, {x.device}, got {tensor.device}: move it.")
    if x.dim() < 1 or x.shape[-1] == 0:
        raise ValueError(f"`x` must have shape [..., V] with V > 0, got {list(x.shape)}.")
    if gate.shape != x.shape:
        raise ValueError(
            f"`gate` must have the shape {list(x.shape)} of `x`, got {list(gate.shape)}: split both into heads."
        )
    if tuple(weight.shape) != (x.shape[-1],):
        raise ValueError(
            f"`weight` must have shape [V] = [{x.shape[-1]}], got {list(weight.shape)}: the heads share one weight."
        )
    if not eps >= 0:
        raise ValueError(f"`eps` must be at least 0, got {eps}: pass `rms_norm_eps` of the config.")
