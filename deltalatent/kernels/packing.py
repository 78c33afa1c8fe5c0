# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Packed sequences: several documents behind one another in one row, described by their cumulative lengths.

`cu_seqlens` [N+1] (int32 or int64) holds the offsets of N documents in a flattened row of T tokens: document n is
`cu_seqlens[n] : cu_seqlens[n+1]`, the first entry is 0, entries never decrease (a document may be empty), and the last
may be smaller than T. Tokens at or beyond the last offset are slack: they belong to no document.
"""

import itertools
import os

import torch

DEBUG_VARIABLE = "DELTALATENT_DEBUG"


def document_starts(position_ids: torch.Tensor) -> torch.Tensor:
    """Mark the first token of every document of a batch without padding.

    A token starts a document if it is the first of its row, or if its position is not the position before it plus
    one; the value itself does not matter, so a row that begins at position 17 (a continued prompt) is one document.
    This is the rule of Transformers' `masking_utils.find_packed_sequence_indices`, which applies it only in the
    absence of an attention mask, because the position of padding is arbitrary: left padding written as `1, 1, 0, 1, 2`
    or `0, 0, 0, 1, 2` would read as further documents. `sequence_layout` finds documents beside padding.

    Args:
        position_ids: [B, T], integer, position of each token in its document.

    Returns:
        bool [B, T].

    Raises:
        ValueError: the shape is wrong.
    """
    if position_ids.dim() != 2:
        raise ValueError(f"`position_ids` must have shape [B, T], got {list(position_ids.shape)}: add the batch axis.")
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return starts


def validate_cu_seqlens(cu_seqlens: torch.Tensor, total: int, *, batch_size: int = 1) -> None:
    """Check the offsets of a packed row.

    Type and shape are always checked. The values are checked where that is free, for offsets on the CPU, and on other
    devices (at the price of a synchronisation per call) if the environment variable `DELTALATENT_DEBUG` is `1`.
    Compiled regions skip the check of values.

    Args:
        cu_seqlens: [N+1], int32 or int64.
        total: T, number of tokens in the row.
        batch_size: number of rows of the operator's input; packing needs one.

    Raises:
        TypeError: not an integer tensor.
        ValueError: more than one row, not one-dimensional, does not start at 0, decreases, or ends beyond T.
    """
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, torch.Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"`cu_seqlens` must be an int32 or int64 tensor, got {got}: use `.to(torch.int32)`.")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(
            f"`cu_seqlens` must have shape [N+1] for N documents, got {list(cu_seqlens.shape)}: "
            "pass the offsets of one flattened row."
        )
    if batch_size != 1:
        raise ValueError(
            f"`cu_seqlens` needs inputs with batch size 1, got {batch_size}: flatten the batch to [1, B*T, ...]."
        )
    if torch.compiler.is_compiling():
        return
    if cu_seqlens.device.type == "cpu" or os.environ.get(DEBUG_VARIABLE) == "1":
        _validate_offsets(cu_seqlens.tolist(), total)


def _validate_offsets(offsets: list[int], total: int) -> None:
    if offsets[0] != 0:
        raise ValueError(f"`cu_seqlens` must start at 0, got {offsets[0]}: pass offsets, not lengths.")
    for n, (start, end) in enumerate(itertools.pairwise(offsets)):
        if end < start:
            raise ValueError(
                f"`cu_seqlens` must not decrease, got {start} then {end} at document {n}: pass cumulative lengths."
            )
    if offsets[-1] > total:
        raise ValueError(
            f"`cu_seqlens` must end at or before T={total}, got {offsets[-1]}: pass offsets of the packed batch."
        )


def document_index(cu_seqlens: torch.Tensor, total: int) -> torch.Tensor:
    """Document of every token of a packed row, without synchronisation.

    Args:
        cu_seqlens: [N+1], int32 or int64.
        total: T, number of tokens in the row.

    Returns:
        int64 [T], in [0, N); N for slack tokens.
    """
    tokens = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    # The number of documents that end at or before the token; empty documents are passed over.
    return torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)


def chunk_index(cu_seqlens: torch.Tensor, total: int, chunk_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut every document of a packed row into chunks, without synchronisation and in few launches.

    Args:
        cu_seqlens: [N+1], int32 or int64.
        total: T, number of tokens in the row.
        chunk_size: C, tokens per chunk; the last chunk of a document may hold fewer.

    Returns:
        `documents` [T // C + N], which no split of the row into documents exceeds (none without documents), and
        `first` [N], both int64: entry i is chunk `i - first[documents[i]]` of document `documents[i]`, whose first
        token is `cu_seqlens[documents[i]] + C * (i - first[documents[i]])`. Sorted by token. Unused entries come last:
        they name the last document, and by the same rule begin at or behind its end.
    """
    num_documents = cu_seqlens.numel() - 1
    chunks = (cu_seqlens.diff() + (chunk_size - 1)) // chunk_size
    ends = chunks.cumsum(0)
    entries = torch.arange(total // chunk_size + num_documents if num_documents else 0, device=cu_seqlens.device)
    return torch.searchsorted(ends[:-1], entries, right=True), ends - chunks
