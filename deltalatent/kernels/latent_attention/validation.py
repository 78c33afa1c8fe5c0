# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Contract of `latent_attention`, shared by every implementation."""

import torch


def validate_latent_attention(
    query: torch.Tensor,
    shared_query: torch.Tensor,
    latent: torch.Tensor,
    shared_key: torch.Tensor,
    mask: torch.Tensor | None,
    end: torch.Tensor | None,
) -> None:
    """Check shapes, dtypes and devices; raises `ValueError` or `TypeError` naming the argument."""
    if query.dim() != 4 or shared_query.dim() != 4 or latent.dim() != 3:
        shapes = [list(x.shape) for x in (query, shared_query, latent)]
        raise ValueError(
            "`query`, `shared_query` and `latent` must have shapes [B, T, H, R], [B, T, H, Q] and [B, S, R], got "
            f"{shapes}: keep one latent per token, without a head axis."
        )
    (batch_size, length, num_heads, rank), shared_width = query.shape, shared_query.shape[3]
    tokens = latent.shape[1]
    for name, tensor, expected in (
        ("shared_query", shared_query, (batch_size, length, num_heads, shared_width)),
        ("latent", latent, (batch_size, tokens, rank)),
        ("shared_key", shared_key, (batch_size, tokens, shared_width)),
    ):
        if tuple(tensor.shape) != expected:
            raise ValueError(
                f"`{name}` must have shape {list(expected)} as `query` {list(query.shape)} and `latent` say, got "
                f"{list(tensor.shape)}: pass tensors of the same rows and tokens."
            )
    for name, tensor in (("query", query), ("shared_query", shared_query), ("shared_key", shared_key)):
        if tensor.dtype != latent.dtype or not tensor.is_floating_point():
            raise TypeError(f"`{name}` must have the floating dtype of `latent`, {latent.dtype}, got {tensor.dtype}.")
    for name, other in (
        ("query", query), ("shared_query", shared_query), ("shared_key", shared_key), ("mask", mask), ("end", end),
    ):  # fmt: skip
        if other is not None and other.device != latent.device:
            raise ValueError(f"`{name}` must be on the device of `latent`, {latent.device}, got {other.device}.")
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(f"`mask` must be bool, True at visible tokens, got {mask.dtype}: use `.bool()`.")
        rows_and_queries = [(b, t, tokens) for b in (1, batch_size) for t in (1, length)]
        if tuple(mask.shape) not in rows_and_queries:
            raise ValueError(
                f"`mask` must have shape [B or 1, T or 1, S] for B={batch_size}, T={length}, S={tokens}, got "
                f"{list(mask.shape)}."
            )
    if end is not None:
        if end.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"`end` must be int32 or int64, got {end.dtype}: use `.to(torch.int32)`.")
        if end.dim() > 1 or end.numel() not in (1, batch_size):
            raise ValueError(f"`end` must have shape [B] = [{batch_size}], [1] or [], got {list(end.shape)}.")
