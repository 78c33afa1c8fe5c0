# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Contract of `short_convolution`, shared by every implementation."""

import torch

from deltalatent.kernels.packing import validate_cu_seqlens

ACTIVATIONS = ("silu", None)


def as_streams(value, name: str, count: int) -> tuple:
    """Return `value` as a tuple of `count` entries; `None` becomes that many `None`."""
    if value is None:
        return (None,) * count
    if not isinstance(value, tuple | list) or len(value) != count:
        got = f"{len(value)} entries" if isinstance(value, tuple | list) else type(value).__name__
        raise ValueError(f"`{name}` must be a tuple of {count} tensors, one for each stream of `x`, got {got}.")
    return tuple(value)


def validate_short_convolution(
    xs: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor, ...],
    initial_states: tuple[torch.Tensor | None, ...],
    cu_seqlens: torch.Tensor | None,
    activation: str | None,
    inplace_state: bool,
) -> None:
    """Check shapes, dtypes and devices of all streams; raises `ValueError` or `TypeError` naming the argument."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"`activation` must be 'silu' or None, got {activation!r}: apply others to the result.")
    if not xs:
        raise ValueError("`x` must hold at least one stream, got an empty tuple.")
    first = xs[0]
    for x, weight in zip(xs, weights, strict=True):
        if x.dim() != 3:
            raise ValueError(f"`x` must have shape [B, T, D], got {list(x.shape)}: keep batch and time axes.")
        if not x.is_floating_point():
            raise TypeError(f"`x` must be a floating tensor, got {x.dtype}.")
        if x.shape[:2] != first.shape[:2] or x.dtype != first.dtype or x.device != first.device:
            raise ValueError(
                f"all streams of `x` must share batch size, length, dtype and device, got {list(x.shape)} {x.dtype} "
                f"on {x.device} beside {list(first.shape)} {first.dtype} on {first.device}: call it once for each."
            )
        if weight.dim() != 3 or weight.shape[1] != 1 or weight.shape[0] != x.shape[2] or weight.shape[2] < 1:
            raise ValueError(
                f"`weight` must have shape [D, 1, W] with D={x.shape[2]}, got {list(weight.shape)}: "
                "pass the weight of the depthwise `Conv1d`."
            )
        if weight.shape[2] != weights[0].shape[2]:
            raise ValueError(
                f"all streams must have the same number of taps, got {weight.shape[2]} beside {weights[0].shape[2]}: "
                "call the operator separately."
            )
        if weight.dtype != weights[0].dtype:
            raise ValueError(
                f"all streams must have weights of one dtype, got {weight.dtype} beside {weights[0].dtype}: cast them."
            )
        if weight.device != x.device:
            raise ValueError(f"`weight` must be on the device of `x`, {x.device}, got {weight.device}: move it.")
    if cu_seqlens is not None:
        validate_cu_seqlens(cu_seqlens, first.shape[1], batch_size=first.shape[0])
        if cu_seqlens.device != first.device:
            raise ValueError(f"`cu_seqlens` must be on the device of `x`, {first.device}, got {cu_seqlens.device}.")
    documents = first.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    for x, weight, state in zip(xs, weights, initial_states, strict=True):
        if state is None:
            if inplace_state:
                raise ValueError("`inplace_state` needs an `initial_state` for every stream, got None: pass zeros.")
            continue
        expected = (documents, x.shape[2], weight.shape[2] - 1)
        if tuple(state.shape) != expected:
            raise ValueError(
                f"`initial_state` must have shape [N, D, W-1] = {list(expected)}, got {list(state.shape)}: "
                "keep the last W-1 inputs of each document."
            )
        if state.device != x.device:
            raise ValueError(f"`initial_state` must be on the device of `x`, {x.device}, got {state.device}: move it.")
        if inplace_state and state.dtype != x.dtype:
            raise TypeError(f"`inplace_state` needs `initial_state` in {x.dtype}, got {state.dtype}: cast it.")
    dtypes = [state.dtype for state in initial_states if state is not None]
    if len(set(dtypes)) > 1:
        raise ValueError(
            f"all streams must have an `initial_state` of one dtype, got {', '.join(map(str, dtypes))}: cast them."
        )
    if inplace_state and torch.is_grad_enabled():
        tensors = (*xs, *weights, *initial_states)
        if any(tensor is not None and tensor.requires_grad for tensor in tensors):
            raise ValueError("`inplace_state` has no gradient: call it under `torch.no_grad()`, or set it to False.")
