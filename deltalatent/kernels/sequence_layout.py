# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a batch form one sequence: padding, packed documents, or neither.

Recurrent layers run over sequences, not over rows. A `SequenceLayout` says where the sequences are: the KDA layers
gather the real tokens into one long row with document boundaries, so that padding neither enters the convolution nor
decays the state, wherever it stands; the attention layers run over the documents in groups of similar length
(`latent_attention.document_groups`). Only eager attention, which returns its weights, gets a mask of documents: from
positions that restart with each of them, or from `same_document` where there is padding as well.

Shapes: B rows of T tokens, N sequences, L = number of real tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from deltalatent.kernels.packing import document_index, document_starts, validate_cu_seqlens


class SequenceLayout(NamedTuple):
    """Where the sequences of a batch are. A named tuple of tensors, which the hooks of split models know how to move.

    Attributes:
        cu_seqlens: int32 [N+1], offsets of the sequences among the real tokens, rows flattened.
        indices: int64 [L], positions of the real tokens in the flattened batch [B*T]; `None` if all are real.
        documents: int64 [B, T], a number per document, the same within a document and different in its neighbours;
            -1 at padding. `None` if every row is one sequence: only packed batches have them.
        shape: (B, T).
    """

    cu_seqlens: Tensor
    indices: Tensor | None
    documents: Tensor | None
    shape: tuple[int, int]

    @property
    def is_packed(self) -> bool:
        """Whether some row holds several documents."""
        return self.documents is not None

    def restarting_positions(self) -> Tensor:
        """int64 [B, T], distance to the first token of the document; needs a packed batch."""
        documents = self._packed_documents()
        starts = torch.ones_like(documents, dtype=torch.bool)
        starts[:, 1:] = documents.diff(dim=1) != 0
        index = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
        last_start = torch.where(starts, index, 0).cummax(dim=1).values
        return index - last_start

    def same_document(self, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether two tokens of a row of a packed batch may see each other, as a mask function of Transformers."""
        documents = self._packed_documents()
        return documents[row, query] == documents[row, key]

    def _packed_documents(self) -> Tensor:
        if self.documents is None:
            raise ValueError("the layout must be of a packed batch, got one sequence per row: ask `is_packed` first.")
        return self.documents

    def gather(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [1, L, ...], the real tokens of all sequences in one row."""
        flat = x.flatten(0, 1)
        return (flat if self.indices is None else flat.index_select(0, self.indices))[None]

    def scatter(self, x: Tensor) -> Tensor:
        """[1, L, ...] -> [B, T, ...], zeros at padding; the inverse of `gather`."""
        flat = x[0]
        if self.indices is not None:
            flat = x.new_zeros(math.prod(self.shape), *x.shape[2:]).index_copy(0, self.indices, flat)
        return flat.view(*self.shape, *x.shape[2:])

    def blank_padding(self, x: Tensor) -> Tensor:
        """[B, T, D] with zeros at padding: a mask gives it weight 0, but garbage that is not finite survives that."""
        return x.masked_fill(~self.real_tokens().view(*self.shape, 1), 0)

    def real_tokens(self) -> Tensor:
        """bool [B*T], True at tokens that belong to a sequence."""
        token = torch.arange(math.prod(self.shape), device=self.cu_seqlens.device)
        if self.indices is None:
            return token < self.cu_seqlens[-1]
        return torch.zeros_like(token, dtype=torch.bool).index_fill(0, self.indices, True)


# Finds lengths of sequences by value, which a compiled graph cannot hold; batches without padding need not come here.
@torch.compiler.disable
def sequence_layout(
    batch_size: int,
    length: int,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> SequenceLayout | None:
    """Find the sequences of a batch.

    `cu_seqlens` is taken at its word. Otherwise a document starts at the first real token of a row and wherever, from
    one real token to the next, the position does not go on: neither by one nor by the distance of the two tokens in
    the row (masks with holes come with either numbering). Without a mask this is the rule of
    `transformers.masking_utils.find_packed_sequence_indices`. Waits for the device once.

    Args:
        batch_size: B.
        length: T.
        attention_mask: [B, T], nonzero for real tokens; `None` if all are real.
        position_ids: [B, T] or [1, T], as the caller gave them; `None` if each row is one sequence.
        cu_seqlens: [N+1], integer, offsets of packed documents; needs B = 1. Tokens beyond the last offset belong to
            no document.

    Returns:
        The layout, or `None` if every row is one sequence without padding.

    Raises:
        ValueError: `cu_seqlens` does not describe a row of T tokens (see `kernels.packing.validate_cu_seqlens`), or
            comes with padding; or `position_ids` has another shape.
    """
    shape = (batch_size, length)
    if position_ids is not None and tuple(position_ids.shape) not in (shape, (1, length)):
        raise ValueError(
            f"`position_ids` must have shape {shape} or {(1, length)}, got {tuple(position_ids.shape)}: pass one "
            "position per new token."
        )
    if cu_seqlens is not None:
        validate_cu_seqlens(cu_seqlens, length, batch_size=batch_size)
        if cu_seqlens.numel() < 2:
            raise ValueError(
                f"`cu_seq_lens_q` must hold the offsets of at least one document, got {cu_seqlens.numel()} of them "
                f"for {length} tokens: if accelerate cut a streamed batch in pieces, pass "
                '`accelerator_config={"dispatch_batches": False}` to the Trainer.'
            )
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError(
                "`cu_seq_lens_q` and an `attention_mask` with padding describe the batch twice: pass one of the two."
            )
        return SequenceLayout(cu_seqlens.to(torch.int32), None, document_index(cu_seqlens, length)[None], shape)

    if attention_mask is None:
        if position_ids is None or length == 1:
            return None
        starts = document_starts(position_ids.expand(batch_size, length))
        if int(starts.sum()) == batch_size:
            return None
        return SequenceLayout(_offsets(starts.flatten()), None, starts.cumsum(1), shape)

    real = attention_mask.bool()
    indices = real.flatten().nonzero().flatten()  # [L]
    row = indices // length
    if position_ids is not None:
        position = position_ids.expand(batch_size, length).flatten()[indices]
        step, distance = position.diff(), indices.diff()
        same_row = row.diff() == 0
        restarts = same_row & (step != 1) & (step != distance)
        if bool(restarts.any()):
            starts = torch.ones_like(indices, dtype=torch.bool)
            starts[1:] = restarts | ~same_row
            documents = indices.new_full((real.numel(),), -1).index_copy(0, indices, starts.cumsum(0))
            return SequenceLayout(_offsets(starts), indices, documents.view(shape), shape)
    if indices.numel() == real.numel():
        return None
    lengths = real.sum(1)
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
    return SequenceLayout(cu_seqlens, indices, None, shape)


def _offsets(starts: Tensor) -> Tensor:
    """bool [L], True where a sequence starts -> int32 [N+1]."""
    first = starts.nonzero().flatten()
    return torch.cat([first, first.new_tensor([starts.numel()])]).to(torch.int32)
