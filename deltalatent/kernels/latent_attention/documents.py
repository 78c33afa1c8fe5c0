# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Documents of similar length side by side, so that the causal flag of attention kernels says all there is to say.

A mask of T*T entries costs more than the attention it describes, and keeps the fast kernels away. Documents need none:
those of one length form a batch, and causality hides what a shorter one is filled up with. The tokens of all groups,
fillers included, are laid out behind one another in one row, in which every group is a view of some of its rows.

B rows of T tokens, L real tokens, M places (real tokens and fillers).
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from deltalatent.kernels.sequence_layout import SequenceLayout

SHORTEST_SHARE = 0.75
"""Shortest document of a group, in lengths of its longest: at most (4/3)^2 of the needed scores are computed."""
SHORT = 16
"""Documents up to this length go together: launches cost more than their scores."""


class DocumentGroups(NamedTuple):
    """Where the documents of a batch are, in groups. A named tuple, which the hooks of split models know how to move.

    Attributes:
        shapes: (documents, longest length) of every group; their products sum to M.
        batch_shape: (B, T).
        tokens: int64 [M], the token of the flattened batch [B*T] at every place; a filler repeats the first token of
            its document. `None`, as all that follows, if the places are the tokens in order.
        places: int64 [B*T], the place of every token; 0 at tokens of no document.
        fillers: bool [M], True at places that are fillers; `None` if none is.
        absent: bool [B*T], True at tokens of no document; `None` if none is.
    """

    shapes: tuple[tuple[int, int], ...]
    batch_shape: tuple[int, int]
    tokens: Tensor | None = None
    places: Tensor | None = None
    fillers: Tensor | None = None
    absent: Tensor | None = None

    def gather(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [1, M, D]. Fillers get no gradient: causality keeps them from all that `scatter` keeps."""
        flat = x.flatten(0, 1)
        if self.tokens is not None:
            flat = _Move.apply(flat, self.tokens, None, self.places, self.absent)
        return flat[None]

    def scatter(self, x: Tensor) -> Tensor:
        """[1, M, D] -> [B, T, D], zeros at tokens of no document; fillers are dropped."""
        flat = x.squeeze(0)
        if self.tokens is not None:
            flat = _Move.apply(flat, self.places, self.absent, self.tokens, self.fillers)
        return flat.view(*self.batch_shape, x.shape[2])

    def split(self, x: Tensor) -> list[Tensor]:
        """[1, M, ...] -> views [documents, length, ...], one per group."""
        # Not `x[0]`, nor a split into one part: their gradients are copies.
        x = x.squeeze(0)
        parts = x.split([count * length for count, length in self.shapes]) if len(self.shapes) > 1 else (x,)
        return [part.unflatten(0, shape) for part, shape in zip(parts, self.shapes, strict=True)]


# Reads lengths back, which a compiled graph cannot hold, as `sequence_layout` does.
@torch.compiler.disable
def document_groups(layout: SequenceLayout) -> DocumentGroups:
    """Group the sequences of a batch by length.

    Args:
        layout: Where they are: rows without their padding, or packed documents. Its offsets are read back from the
            device, once per forward of a model.

    Returns:
        The groups, the longest documents first; each is filled up to its longest with copies of first tokens, and none
        holds a document shorter than 3/4 of that (documents up to 16 tokens aside).
    """
    offsets = layout.cu_seqlens.tolist()
    starts, lengths = offsets[:-1], [end - start for start, end in itertools.pairwise(offsets)]
    order = sorted((n for n in range(len(lengths)) if lengths[n] > 0), key=lambda n: -lengths[n])
    device = layout.cu_seqlens.device
    total = math.prod(layout.shape)
    if not order:
        # Nothing but padding, as a rank may get that has run out of data: one place that nothing is read from, so that
        # the layer's parameters take part in backward like those of the other ranks.
        tokens, places = (torch.zeros(n, dtype=torch.int64, device=device) for n in (1, total))
        return DocumentGroups(((1, 1),), layout.shape, tokens, places, tokens == 0, places == 0)
    groups: list[list[int]] = []
    for n in order:
        longest = lengths[groups[-1][0]] if groups else 0
        if not groups or (longest > SHORT and lengths[n] < SHORTEST_SHARE * longest):
            groups.append([])
        groups[-1].append(n)
    shapes = tuple((len(group), lengths[group[0]]) for group in groups)
    if layout.indices is None and len(shapes) == 1 and math.prod(shapes[0]) == total:
        return DocumentGroups(shapes, layout.shape)  # one length throughout: the batch as it is

    rooms = [length for count, length in shapes for _ in range(count)]
    table = torch.tensor([[starts[n] for n in order], [lengths[n] for n in order], rooms])
    first, length, room = table.to(device, non_blocking=True)  # per document, in the order of the groups
    document, within = _count_up(room, sum(rooms))
    is_filler = within >= length[document]
    tokens = first[document] + within.masked_fill(is_filler, 0)
    if layout.indices is not None:
        tokens = layout.indices[tokens]
    document, within = _count_up(length, sum(lengths))
    slots = (room.cumsum(0) - room)[document] + within  # the places that are no fillers
    places = tokens.new_zeros(total).index_copy(0, tokens[slots], slots)
    is_absent = torch.ones(total, dtype=torch.bool, device=device).index_fill(0, tokens[slots], False)
    fillers = is_filler if sum(rooms) > sum(lengths) else None
    return DocumentGroups(shapes, layout.shape, tokens, places, fillers, is_absent if sum(lengths) < total else None)


class _Move(torch.autograd.Function):
    """Rows picked by an index, blank where told. The gradient moves the same way by the inverse index.

    An index is followed by its inverse: what autograd would do, adding up gradients row by row with atomic additions,
    is slower and not deterministic.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, index: Tensor, blank: Tensor | None, inverse: Tensor, inverse_blank: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(index, blank, inverse, inverse_blank)
        moved = x.index_select(0, index)
        return moved if blank is None else moved.masked_fill_(blank[:, None], 0)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        index, blank, inverse, inverse_blank = ctx.saved_tensors
        return _Move.apply(grad, inverse, inverse_blank, index, blank), None, None, None, None


def _count_up(sizes: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """[0, 0, 0, 1, 1, ...] and [0, 1, 2, 0, 1, ...], both int64 [total], for sizes [3, 2, ...]; waits for nothing."""
    number = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes, output_size=total)
    return number, torch.arange(total, device=sizes.device) - (sizes.cumsum(0) - sizes)[number]
