# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch form of absorbed latent attention: readable, differentiable, any floating dtype.

B rows, T query tokens, H heads, S cached tokens, R latent rank, Q width of the shared key part.
"""

import torch

SCORES_PER_BLOCK = 1 << 24
"""Scores held at a time, so that the workspace does not grow with the cache."""


def latent_attention_reference(
    query: torch.Tensor,
    shared_query: torch.Tensor,
    latent: torch.Tensor,
    shared_key: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
) -> torch.Tensor:
    """`softmax(scale * ([query, shared_query] [latent, shared_key]^T)) latent`; see `latent_attention`.

    The cache is read in blocks with an online softmax (Milakov and Gimelshein, arXiv 1805.02867). Computed in float32
    (float64 for float64 inputs).
    """
    batch_size, length, num_heads, rank = query.shape
    tokens = latent.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    queries = torch.cat([query, shared_query], dim=-1).to(dtype) * scale  # [B, T, H, R+Q]
    end = torch.full((1,), tokens, device=query.device) if end is None else end.clamp(max=tokens).view(-1)
    last = end[:, None] - length + torch.arange(length, device=query.device)  # [B or 1, T], a token's own place

    top = queries.new_full((batch_size, length, num_heads), -torch.inf)
    total = torch.zeros_like(top)
    weighted = queries.new_zeros(batch_size, length, num_heads, rank)
    block = max(16, SCORES_PER_BLOCK // max(1, top.numel()))
    for start in range(0, tokens, block):
        places = torch.arange(start, min(start + block, tokens), device=query.device)
        visible = places <= last[..., None]  # [B or 1, T, block]
        if mask is not None:
            visible = visible & mask[..., places]
        # What no query sees may be uninitialised memory, and 0 * NaN is NaN.
        seen = visible.any(1)[..., None]
        values = torch.where(seen, latent[:, places], 0).to(dtype)  # [B, block, R]
        keys = torch.cat([values, torch.where(seen, shared_key[:, places], 0).to(dtype)], dim=-1)
        scores = torch.einsum("bthr,bsr->bths", queries, keys).masked_fill(~visible[:, :, None], -torch.inf)
        # The maximum cancels in the result, and so do its gradients.
        new_top = torch.maximum(top, scores.amax(-1)).detach()
        finite_top = new_top.masked_fill(new_top == -torch.inf, 0)
        weights = torch.exp(scores - finite_top[..., None])
        faded = torch.exp(top - finite_top)
        total = total * faded + weights.sum(-1)
        weighted = weighted * faded[..., None] + torch.einsum("bths,bsr->bthr", weights, values)
        top = new_top
    return (weighted / total.masked_fill(total == 0, 1)[..., None]).to(query.dtype)
