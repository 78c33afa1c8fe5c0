# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Contract of `attention_residual_mix`, shared by every implementation."""

from collections.abc import Sequence

from torch import Tensor


def validate_attention_residual_mix(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    norm_eps: float | None,
) -> None:
    """Check shapes, dtypes, devices and epsilons; raises `ValueError` or `TypeError` naming the argument."""
    if not sources:
        raise ValueError("`sources` must hold at least one tensor, got none: pass the running sum at least.")
    first = sources[0]
    if first.dim() < 1 or first.shape[-1] == 0:
        raise ValueError(f"`sources` must have shape [..., D] with D > 0, got {tuple(first.shape)}.")
    if not first.is_floating_point():
        raise TypeError(f"`sources` must be floating tensors, got {first.dtype}.")
    for i, source in enumerate(sources):
        if source.shape != first.shape:
            raise ValueError(
                f"`sources` must have one shape, got {tuple(first.shape)} at 0 and {tuple(source.shape)} at {i}: pass "
                "streams of the same batch."
            )
        if source.dtype != first.dtype:
            raise TypeError(f"`sources` must have one dtype, got {first.dtype} at 0 and {source.dtype} at {i}: cast.")
        if source.device != first.device:
            raise ValueError(
                f"`sources` must be on one device, got {first.device} at 0 and {source.device} at {i}: move them."
            )
    for name, vector in (("query", query), ("key_weight", key_weight), ("norm_weight", norm_weight)):
        if vector is None:
            continue
        if vector.shape != first.shape[-1:]:
            raise ValueError(
                f"`{name}` must have shape {(first.shape[-1],)}, got {tuple(vector.shape)}: pass a vector as wide as "
                "the streams."
            )
        if not vector.is_floating_point():
            raise TypeError(f"`{name}` must be a floating tensor, got {vector.dtype}.")
        if vector.device != first.device:
            raise ValueError(
                f"`{name}` must be on the device of the sources, {first.device}, got {vector.device}: move it."
            )
    if (norm_weight is None) != (norm_eps is None):
        got = "None" if norm_weight is None else "a tensor"
        raise ValueError(
            f"`norm_weight` and `norm_eps` must be given together, got {got} and {norm_eps}: pass both for the norm, "
            "neither for none."
        )
    for name, value in (("eps", eps), ("norm_eps", norm_eps)):
        if value is not None and not value >= 0:
            raise ValueError(f"`{name}` must be at least 0, got {value}: pass `rms_norm_eps` of the config.")
