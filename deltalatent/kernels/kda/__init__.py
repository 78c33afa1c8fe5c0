# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention (KDA): chunked training and prefill form, and one-to-few-token decode form."""

from deltalatent.kernels.kda.api import kda_chunk, kda_recurrent
from deltalatent.kernels.kda.reference import kda_chunk_reference, kda_recurrent_reference

__all__ = ["kda_chunk", "kda_chunk_reference", "kda_recurrent", "kda_recurrent_reference"]
