# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of a linear head, without the logits of all tokens."""

from deltalatent.kernels.linear_cross_entropy.api import linear_cross_entropy
from deltalatent.kernels.linear_cross_entropy.reference import linear_cross_entropy_reference

__all__ = ["linear_cross_entropy", "linear_cross_entropy_reference"]
