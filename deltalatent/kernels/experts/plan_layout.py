# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the integers of a permutation are: one int32 tensor, whose size follows from the shapes of a call alone."""

from __future__ import annotations

from typing import NamedTuple

import torch

FEW_PAIRS = 1024
"""Up to so many pairs the row of each is counted by comparing it with all others, in a single launch."""

SMALLEST_TILE = 16


class Plan(NamedTuple):
    """S pairs (token, expert) sorted by expert; pairs of experts that are not here come last and belong to no tile.

    Attributes:
        order: int32 [S], the pair at each row.
        inverse: int32 [S], the row of each pair, -1 if its expert is not here.
        offsets: int32 [E+1], first row of each expert.
        tiles: int32 [3, P]: expert, first row and number of rows of each tile; no rows: nothing to do.
    """

    order: torch.Tensor
    inverse: torch.Tensor
    offsets: torch.Tensor
    tiles: torch.Tensor

    @property
    def num_tiles(self) -> int:
        """P, an upper bound of the tiles in use."""
        return self.tiles.shape[1]


def plan_size(num_pairs: int, num_experts: int) -> int:
    """Elements of the tensor that holds any plan of so many pairs and experts."""
    most_tiles = num_pairs // SMALLEST_TILE + num_experts + FEW_PAIRS
    return 2 * num_pairs + num_experts + 1 + 3 * most_tiles


def counts_all_pairs(num_pairs: int, tail: int) -> bool:
    """Whether the plan is made by comparing all pairs; it then has a place for a tile per pair."""
    return num_pairs <= FEW_PAIRS and tail == 0


def plan_views(integers: torch.Tensor, num_pairs: int, num_experts: int, block_tokens: int, tail: int) -> Plan:
    """The parts of int32 [plan_size(...)] for tiles of `block_tokens` tokens, and `tail` more in an expert's last."""
    if counts_all_pairs(num_pairs, tail):
        num_tiles = num_pairs
    else:
        num_tiles = num_pairs // block_tokens + min(num_experts, num_pairs)
    sizes = [num_pairs, num_pairs, num_experts + 1, 3 * num_tiles]
    order, inverse, offsets, tiles = integers[: sum(sizes)].split(sizes)
    return Plan(order, inverse, offsets, tiles.view(3, num_tiles))
