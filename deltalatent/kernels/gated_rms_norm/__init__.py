# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Head-wise RMS norm multiplied by a sigmoid gate: what follows the read-out of a delta-attention layer."""

from deltalatent.kernels.gated_rms_norm.api import gated_rms_norm
from deltalatent.kernels.gated_rms_norm.reference import gated_rms_norm_reference

__all__ = ["gated_rms_norm", "gated_rms_norm_reference"]
