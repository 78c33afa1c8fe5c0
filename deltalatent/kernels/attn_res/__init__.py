# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Depth mixing of block attention residuals."""

from deltalatent.kernels.attn_res.api import attention_residual_mix
from deltalatent.kernels.attn_res.reference import attention_residual_mix_reference

__all__ = ["attention_residual_mix", "attention_residual_mix_reference"]
