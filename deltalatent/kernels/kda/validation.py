# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of the KDA operators."""

from __future__ import annotations

import torch

from deltalatent.kernels.packing import validate_cu_seqlens

TRITON_LOWER_BOUND = -10.0
"""Strongest log decay of a token that the chunked Triton kernels hold: the decay of half a 16-token tile,
2^(8 * 10 / ln 2), still leaves float32 room for sums."""


def _expect_shape(name: str, x: torch.Tensor, expected: tuple[int, ...], letters: str) -> None:
    if tuple(x.shape) != expected:
        raise ValueError(f"`{name}` must have shape {letters} = {list(expected)}, got {list(x.shape)}.")


def validate_kda_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    gate_lower_bound: float | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> None:
    """Raise `ValueError` (shape, value, device) or `TypeError` (dtype) unless the arguments fit `kda_chunk`.

    The values of `cu_seqlens` are looked at where `validate_cu_seqlens` says that this is free.
    """
    for name, x in (("q", q), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"`{name}` must have 4 dimensions [B, T, heads, width], got shape {list(x.shape)}.")
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    _expect_shape("k", k, (B, T, H, K), "[B, T, H, K]")
    _expect_shape("v", v, (B, T, HV, V), "[B, T, HV, V]")
    if H == 0 or HV % H:
        raise ValueError(f"the number of value heads must be a multiple of the number of key heads {H}, got {HV}.")
    _expect_shape("g", g, (B, T, HV, K), "[B, T, HV, K]")
    _expect_shape("beta", beta, (B, T, HV), "[B, T, HV]")
    if A_log.numel() != HV:
        raise ValueError(
            f"`A_log` must have HV = {HV} elements, got {A_log.numel()}: cut a padded checkpoint tensor to the heads."
        )
    if dt_bias.numel() != HV * K:
        raise ValueError(f"`dt_bias` must have HV*K = {HV * K} elements, got {dt_bias.numel()}.")
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}
    N = B
    if cu_seqlens is not None:
        validate_cu_seqlens(cu_seqlens, T, batch_size=B)
        N = cu_seqlens.numel() - 1
    if initial_state is not None:
        _expect_shape("initial_state", initial_state, (N, HV, K, V), "[N, HV, K, V]")
        tensors["initial_state"] = initial_state
    for name, x in tensors.items():
        if not x.is_floating_point():
            raise TypeError(f"`{name}` must be a floating point tensor, got {x.dtype}.")
        if x.device != q.device:
            raise ValueError(f"`{name}` is on {x.device} but `q` is on {q.device}: move all inputs to one device.")
    if gate_lower_bound is not None and not gate_lower_bound < 0:
        raise ValueError(
            f"`gate_lower_bound` must be negative (log decay per token), got {gate_lower_bound}: pass None for the"
            " unbounded softplus gate."
        )
