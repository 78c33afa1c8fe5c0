# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Depth mixing of block attention residuals in plain PyTorch (Kimi K3 report, arXiv 2607.24653; golden README).

Shapes: S sources of [..., D] each, D the width of the residual stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def attention_residual_mix(sources: Sequence[Tensor], query: Tensor, eps: float) -> Tensor:
    r"""Average of earlier residual streams, weighted by how well each one, RMS-normalised, answers a learned query.

    .. math::
        r_i = (\mathrm{mean}_d\, s_{id}^2 + \epsilon)^{-1/2}, \quad
        a = \mathrm{softmax}_i(r_i \langle w, s_i \rangle), \quad
        o = \sum_i a_i s_i

    The scores look at normalised sources, the average takes the raw ones; there is no scaling by the width.

    Sources are folded in one after the other with a running maximum (online softmax), so no [S, ..., D] stack and no
    float32 copy of more than one source exists at a time. The backward pass recomputes everything from the sources,
    which the residual network keeps alive anyway: an added mix costs no activation memory.

    Args:
        sources: S >= 1 tensors [..., D] of one shape and dtype (closed blocks in order, then the running sum).
        query: w, [D], the product of the norm's weight and the projection's; any floating dtype.
        eps: Added to the mean square, > 0.

    Returns:
        [..., D] in the dtype of the sources. Scores and average are accumulated in float32 (float64 for float64).

    Raises:
        ValueError: No sources, or shapes that differ.
    """
    if not sources:
        raise ValueError("`sources` must hold at least one tensor, got none: pass the running sum at least.")
    shape = sources[0].shape
    for i, source in enumerate(sources):
        if source.shape != shape:
            raise ValueError(
                f"`sources` must have one shape, got {tuple(shape)} at 0 and {tuple(source.shape)} at {i}: pass "
                "streams of the same batch."
            )
    if query.shape != shape[-1:]:
        raise ValueError(
            f"`query` must have shape {(shape[-1],)}, got {tuple(query.shape)}: pass the product of norm and "
            "projection weights as a vector."
        )
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, *sources))):
        # `torch.compile` cannot trace the function below where nothing needs a gradient.
        return _fold(query, eps, sources)
    return _AttentionResidualMix.apply(query, eps, *sources)


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _fold(query: Tensor, eps: float, sources: Sequence[Tensor]) -> Tensor:
    acc = _accumulation_dtype(sources[0].dtype)
    w = query.to(acc)

    def scored(source: Tensor) -> tuple[Tensor, Tensor]:
        s = source.to(acc)
        return s, (s @ w) * torch.rsqrt(s.square().mean(-1) + eps)

    mixed, highest = scored(sources[0])
    denominator = torch.ones_like(highest)
    for source in sources[1:]:
        s, score = scored(source)
        new_highest = torch.maximum(highest, score)
        old_share, share = torch.exp(highest - new_highest), torch.exp(score - new_highest)
        mixed = torch.addcmul(mixed * old_share[..., None], s, share[..., None])
        denominator = denominator * old_share + share
        highest = new_highest
    return (mixed / denominator[..., None]).to(sources[0].dtype)


class _AttentionResidualMix(torch.autograd.Function):
    """Saves the query [D] and the sources [..., D]; nothing that the forward pass computed."""

    @staticmethod
    def forward(ctx, query: Tensor, eps: float, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(query, *sources)
        ctx.eps = eps
        return _fold(query, eps, sources)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor):
        query, *sources = ctx.saved_tensors
        eps = ctx.eps
        acc = _accumulation_dtype(sources[0].dtype)
        w, do = query.to(acc), grad_output.to(acc)

        # Per source three numbers per token: r_i, <w, s_i> and the gradient of its weight, <do, s_i>.
        inverse_rms, products, products_out = [], [], []
        for source in sources:
            s = source.to(acc)
            inverse_rms.append(torch.rsqrt(s.square().mean(-1) + eps))
            products.append(s @ w)
            products_out.append((do * s).sum(-1))
        weights = torch.softmax(torch.stack([p * r for p, r in zip(products, inverse_rms, strict=True)]), dim=0)
        dweights = torch.stack(products_out)
        dscores = weights * (dweights - (weights * dweights).sum(0))

        dquery = torch.zeros_like(w)
        dsources = []
        for source, r, product, weight, dscore in zip(sources, inverse_rms, products, weights, dscores, strict=True):
            s = source.to(acc)
            # score = r <w, s>:  d score / d s = r w - (r^3 <w, s> / D) s,  d score / d w = r s
            along_w = dscore * r
            along_s = along_w * product * r.square() / s.shape[-1]
            ds = weight[..., None] * do + along_w[..., None] * w - along_s[..., None] * s
            dsources.append(ds.to(source.dtype))
            dquery += torch.einsum("nd,n->d", s.flatten(0, -2), along_w.flatten())
        return dquery.to(query.dtype), None, *dsources
