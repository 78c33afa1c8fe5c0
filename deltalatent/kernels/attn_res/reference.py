# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Depth mixing of block attention residuals in plain PyTorch (Kimi K3 report, arXiv 2607.24653; golden README).

Shapes: S sources of [..., D] each, D the width of the residual stream. Arithmetic is float32, or float64 if the
sources are. Neither direction ever holds the [S, ..., D] stack, or a float32 copy of more than one source.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attention_residual_mix_reference(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    """Forward pass; see `attention_residual_mix` for the equation and the arguments.

    Sources are folded in one after the other with a running maximum (online softmax).

    Returns:
        The mix [..., D] in the dtype of the sources, and for the backward pass, in the dtype of the arithmetic,
        [2 S + 1, ...]: a score per source, an inverse root mean square per source, and the logarithm of the sum of the
        exponentials of the scores.
    """
    w = _score_vector(sources, query, key_weight)

    def scored(source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = source.to(w.dtype)
        r = torch.rsqrt(s.square().mean(-1) + eps)
        return s, (s @ w) * r, r

    mixed, highest, r = scored(sources[0])
    # One, and a function of the query: of a single source, too, its gradient is zero and not absent.
    denominator = torch.exp(highest - highest)
    scores, inverse_rms = [highest], [r]
    for source in sources[1:]:
        s, score, r = scored(source)
        new_highest = torch.maximum(highest, score)
        old_share, share = torch.exp(highest - new_highest), torch.exp(score - new_highest)
        mixed = torch.addcmul(mixed * old_share[..., None], s, share[..., None])
        denominator = denominator * old_share + share
        highest = new_highest
        scores.append(score)
        inverse_rms.append(r)
    mixed = mixed / denominator[..., None]
    if norm_weight is not None:
        mixed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + norm_eps) * norm_weight.to(w.dtype)
    return mixed.to(sources[0].dtype), torch.stack([*scores, *inverse_rms, highest + denominator.log()])


def attention_residual_mix_backward_reference(
    sources: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    norm_weight: Tensor | None,
    stats: Tensor,
    doutput: Tensor,
    arriving: Sequence[Tensor | None],
    norm_eps: float,
) -> list[Tensor]:
    """Gradients from the sources and what the forward pass returned besides the mix, which is made again.

    Args:
        arriving: For each source the gradient from its later readers, if any; added before the sum is rounded.

    Returns:
        Gradients of the sources, of `query`, and of those of `key_weight` and `norm_weight` that there are.
    """
    w = _score_vector(sources, query, key_weight)
    scores, inverse_rms = stats[:-1].chunk(2)
    weights = torch.exp(scores - stats[-1])
    do = doutput.to(w.dtype)
    dnorm_weight = []
    if norm_weight is not None:
        mixed = torch.zeros_like(do)
        for source, weight in zip(sources, weights, strict=True):
            mixed = torch.addcmul(mixed, source.to(w.dtype), weight[..., None])
        rho = torch.rsqrt(mixed.square().mean(-1, keepdim=True) + norm_eps)
        normed = mixed * rho
        dnorm_weight.append((do * normed).flatten(0, -2).sum(0).to(norm_weight.dtype))
        do = do * norm_weight.to(w.dtype)
        do = rho * (do - normed * (do * normed).mean(-1, keepdim=True))

    gains = torch.stack([(do * source).sum(-1) for source in sources])  # d loss / d weight
    dscores = weights * (gains - (weights * gains).sum(0))
    dw = torch.zeros_like(w)
    dsources = []
    for source, weight, score, dscore, r, later in zip(
        sources, weights, scores, dscores, inverse_rms, arriving, strict=True
    ):
        s = source.to(w.dtype)
        # score = r <w, s>:  d score / d s = r w - (r^2 score / D) s,  d score / d w = r s
        along_w = dscore * r
        along_s = dscore * score * r.square() / s.shape[-1]
        ds = weight[..., None] * do + along_w[..., None] * w - along_s[..., None] * s
        dsources.append((ds if later is None else ds + later).to(source.dtype))
        dw = dw + along_w.flatten() @ s.flatten(0, -2)
    if key_weight is None:
        return [*dsources, dw.to(query.dtype), *dnorm_weight]
    dquery, dkey_weight = dw * key_weight.to(w.dtype), dw * query.to(w.dtype)
    return [*dsources, dquery.to(query.dtype), dkey_weight.to(key_weight.dtype), *dnorm_weight]


def _score_vector(sources: Sequence[Tensor], query: Tensor, key_weight: Tensor | None) -> Tensor:
    dtype = torch.promote_types(sources[0].dtype, torch.float32)
    return query.to(dtype) if key_weight is None else query.to(dtype) * key_weight.to(dtype)
