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
        tokens: int64 [M], the token of the flattened batch [B*T] at every place; a filler repeats the first token of
            its document. `None` if the places are the tokens in order.
        slots: int64 [L], the places that are no fillers. targets: int64 [L], `tokens` there.
        batch_shape: (B, T).
    """

    shapes: tuple[tuple[int, int], ...]
    tokens: Tensor | None
    slots: Tensor | None
    targets: Tensor | None
    batch_shape: tuple[int, int]

    def gather(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [1, M, D]."""
        flat = x.flatten(0, 1)
        return (flat if self.tokens is None else flat.index_select(0, self.tokens))[None]

    def scatter(self, x: Tensor) -> Tensor:
        """[1, M, D] -> [B, T, D], zeros at tokens of no document; fillers are dropped."""
        flat = x[0]
        if self.slots is not None and self.targets is not None:
            kept = flat.index_select(0, self.slots)
            flat = x.new_zeros(math.prod(self.batch_shape), x.shape[2]).index_copy(0, self.targets, kept)
        return flat.view(*self.batch_shape, x.shape[2])

    def split(self, x: Tensor) -> list[Tensor]:
        """[1, M, ...] -> views [documents, length, ...], one per group."""
        parts = x[0].split([count * length for count, length in self.shapes])
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
    if not order:
        # Nothing but padding, as a rank may get that has run out of data: one place that nothing is read from, so that
        # the layer's parameters take part in backward like those of the other ranks.
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        return DocumentGroups(((1, 1),), nothing.new_zeros(1), nothing, nothing, layout.shape)
    groups: list[list[int]] = []
    for n in order:
        longest = lengths[groups[-1][0]] if groups else 0
        if not groups or (longest > SHORT and lengths[n] < SHORTEST_SHARE * longest):
            groups.append([])
        groups[-1].append(n)
    shapes = tuple((len(group), lengths[group[0]]) for group in groups)
    if layout.indices is None and len(shapes) == 1 and math.prod(shapes[0]) == math.prod(layout.shape):
        return DocumentGroups(shapes, None, None, None, layout.shape)  # one length throughout: the batch as it is

    rooms = [length for count, length in shapes for _ in range(count)]
    table = torch.tensor([[starts[n] for n in order], [lengths[n] for n in order], rooms])
    first, length, room = table.to(device, non_blocking=True)  # per document, in the order of the groups
    place = room.cumsum(0) - room
    document, within = _count_up(room, sum(rooms))
    tokens = first[document] + torch.where(within < length[document], within, 0)
    document, within = _count_up(length, sum(lengths))
    slots = place[document] + within
    if layout.indices is not None:
        tokens = layout.indices[tokens]
    return DocumentGroups(shapes, tokens, slots, tokens[slots], layout.shape)


def _count_up(sizes: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """[0, 0, 0, 1, 1, ...] and [0, 1, 2, 0, 1, ...], both int64 [total], for sizes [3, 2, ...]; waits for nothing."""
    number = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes, output_size=total)
    return number, torch.arange(total, device=sizes.device) - (sizes.cumsum(0) - sizes)[number]
