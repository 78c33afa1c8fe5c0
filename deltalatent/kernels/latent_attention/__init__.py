# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention: over documents without a mask, over a cache block by block, and absorbed."""

from deltalatent.kernels.latent_attention.api import latent_attention
from deltalatent.kernels.latent_attention.documents import DocumentGroups, document_groups
from deltalatent.kernels.latent_attention.expanded import (
    KeyBlock,
    blockwise_attention,
    causal_attention,
    keys_and_values,
)
from deltalatent.kernels.latent_attention.reference import latent_attention_reference

__all__ = [
    "DocumentGroups",
    "KeyBlock",
    "blockwise_attention",
    "causal_attention",
    "document_groups",
    "keys_and_values",
    "latent_attention",
    "latent_attention_reference",
]
