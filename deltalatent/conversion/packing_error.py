# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""How far packed weights are from what they were, in sums that can be added over tensors and files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltalatent.conversion.mxfp4 import E2M1_VALUES, GROUP_SIZE, SCALE_BIAS, dequantize_mxfp4


@dataclass
class PackingError:
    """Sums over weights.

    Attributes:
        weights: How many.
        squared_error, squared_weight: Sums of squares, of errors and of the weights themselves.
        zeros: Weights that are zero after packing.
        saturated: Weights beyond the largest code of their group.
        largest: Largest error relative to the largest magnitude of its group (0.2 at most, see `quantize_mxfp4`).
    """

    weights: int = 0
    squared_error: float = 0.0
    squared_weight: float = 0.0
    zeros: int = 0
    saturated: int = 0
    largest: float = 0.0

    @classmethod
    def of(cls, weight: Tensor, packed: Tensor, scale: Tensor) -> PackingError:
        """Of one tensor [O, I] and what `quantize_mxfp4` made of it."""
        inner = torch.promote_types(weight.dtype, torch.float32)
        exact, unpacked = weight.to(inner), dequantize_mxfp4(packed, scale, inner)
        error = unpacked - exact
        magnitudes = exact.abs().unflatten(-1, (-1, GROUP_SIZE))
        of_group = magnitudes.amax(-1)
        largest = error.abs().unflatten(-1, (-1, GROUP_SIZE)).amax(-1) / of_group.masked_fill(of_group == 0, 1.0)
        limit = E2M1_VALUES[-1] * (scale.to(inner) - SCALE_BIAS).exp2()
        return cls(
            weights=weight.numel(),
            squared_error=float(error.square_().sum(dtype=torch.float64)),
            squared_weight=float(exact.square().sum(dtype=torch.float64)),
            zeros=weight.numel() - int(unpacked.count_nonzero()),
            saturated=int((magnitudes > limit[..., None]).sum()),
            largest=float(largest.max()) if largest.numel() else 0.0,
        )

    def add(self, other: PackingError) -> None:
        """Take in the sums of other weights."""
        self.weights += other.weights
        self.squared_error += other.squared_error
        self.squared_weight += other.squared_weight
        self.zeros += other.zeros
        self.saturated += other.saturated
        self.largest = max(self.largest, other.largest)

    def row(self, layer: int, matrix: str) -> dict[str, Any]:
        """For the report; the error is its root mean square over that of the weights."""
        return {
            "layer": layer,
            "matrix": matrix,
            "weights": self.weights,
            "error": round((self.squared_error / self.squared_weight) ** 0.5, 6) if self.squared_weight else 0.0,
            "largest_error_in_group": round(self.largest, 6),
            "zeros": round(self.zeros / max(self.weights, 1), 6),
            "saturated": round(self.saturated / max(self.weights, 1), 6),
        }
