# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""SiTU-GLU, the soft-capped gated activation."""

from deltalatent.kernels.situ.api import situ_glu
from deltalatent.kernels.situ.reference import situ_glu_reference

__all__ = ["situ_glu", "situ_glu_reference"]
