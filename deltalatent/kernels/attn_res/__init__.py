# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Depth mixing of block attention residuals."""

from deltalatent.kernels.attn_res.reference import attention_residual_mix

__all__ = ["attention_residual_mix"]
