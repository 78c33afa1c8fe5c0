# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Public function of depth mixing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from deltalatent.kernels.attn_res.autograd import attn_res
from deltalatent.kernels.attn_res.validation import validate_attention_residual_mix
from deltalatent.kernels.dispatch import Obstacle, resolve_impl, triton_obstacle

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TRITON_SOURCES = 16
# A token must fit the registers of one program.
TRITON_CHANNELS = 16384


@overload
def attention_residual_mix(
    sources: Sequence[Tensor],
    query: Tensor,
    eps: float,
    *,
    key_weight: Tensor | None = ...,
    norm_weight: Tensor | None = ...,
    norm_eps: float | None = ...,
    pass_on: Literal[False] = ...,
    impl: str = ...,
) -> Tensor: ...


@overload
def attention_residual_mix(
    sources: Sequence[Tensor],
    query: Tensor,
    eps: float,
    *,
    key_weight: Tensor | None = ...,
    norm_weight: Tensor | None = ...,
    norm_eps: float | None = ...,
    pass_on: Literal[True],
    impl: str = ...,
) -> tuple[Tensor, list[Tensor]]: ...


def attention_residual_mix(
    sources: Sequence[Tensor],
    query: Tensor,
    eps: float,
    *,
    key_weight: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float | None = None,
    pass_on: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, list[Tensor]]:
    r"""Average of earlier residual streams, weighted by how well each one, RMS-normalised, answers a learned query.

    .. math::
        r_i = (\mathrm{mean}_d\, s_{id}^2 + \epsilon)^{-1/2}, \quad
        a = \mathrm{softmax}_i(r_i \langle q \odot k, s_i \rangle), \quad
        o = \sum_i a_i s_i, \quad
        y = o \odot g \, (\mathrm{mean}_d\, o_d^2 + \epsilon')^{-1/2}

    (Kimi K3 report, arXiv 2607.24653, block attention residuals.) The scores look at normalised sources, the average
    takes the raw ones; there is no scaling by the width. The last step is the norm of the layer that reads the mix; it
    is there if `norm_weight` is given, and keeps the mix out of memory.

    For backward nothing is kept but the inputs, which a residual network keeps alive anyway, and two float32 numbers
    per token and source.

    Args:
        sources: S >= 1 tensors [..., D] of one shape and dtype (closed blocks in order, then the running sum);
            float32, float16, bfloat16 or float64.
        query: q, [D].
        eps: Added to the mean square of a source, at least 0.
        key_weight: k, [D], the weight of the norm that the query looks through; `None` is one.
        norm_weight: g, [D]; `None` returns o itself.
        norm_eps: Added to the mean square of o, at least 0; given if and only if `norm_weight` is.
        pass_on: Also return the sources, for later mixes to read in place of those given. What these contribute to
            the gradient of a source then arrives at this mix, and is added in the kernel that makes this mix's share;
            otherwise autograd adds up the shares of all readers, one pass over memory for each. The gradients are
            the same, but for fewer roundings.
        impl: `"auto"`, `"triton"` (up to 16 sources and 16384 channels) or `"torch"`.

    Returns:
        [..., D] in the dtype of the sources, rounded once: everything inside is float32 (float64 for float64).
        Differentiable, once, in the sources and in the three vectors, which may have any floating dtype.
        With `pass_on` also the list of sources, which share the memory of those given.

    Raises:
        ValueError: No sources; shapes or devices that differ; an `impl` that cannot run.
        TypeError: A tensor is not floating, or the sources' dtypes differ.
    """
    validate_attention_residual_mix(sources, query, key_weight, norm_weight, eps, norm_eps)
    sources = list(sources)
    reasons = {"triton": _triton_obstacle(sources), "torch": None}
    chosen = resolve_impl("attention_residual_mix", impl, device=query.device, reasons=reasons)
    norm_eps = 0.0 if norm_eps is None else norm_eps
    output, passed = attn_res(chosen, sources, query, key_weight, norm_weight, eps, norm_eps, pass_on)
    return (output, passed) if pass_on else output


def _triton_obstacle(sources: list[Tensor]) -> Obstacle | None:
    first = sources[0]
    if first.dtype not in TRITON_DTYPES:
        reason = f"the Triton kernels take float32, float16 or bfloat16, got {first.dtype}: use 'torch'"
        return Obstacle(reason, TypeError)
    if len(sources) > TRITON_SOURCES:
        return Obstacle(f"the Triton kernels take up to {TRITON_SOURCES} sources, got {len(sources)}: use 'torch'")
    if first.shape[-1] > TRITON_CHANNELS:
        reason = f"the Triton kernels take up to {TRITON_CHANNELS} channels, got {first.shape[-1]}: use 'torch'"
        return Obstacle(reason)
    return triton_obstacle(first.device)
