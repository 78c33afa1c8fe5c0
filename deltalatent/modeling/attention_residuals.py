# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Block attention residuals: a mixer reads a learned average of earlier streams (Kimi K3 report, arXiv 2607.24653)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deltalatent.kernels.attn_res import attention_residual_mix
from deltalatent.modeling.norms import KimiK3RMSNorm


class KimiK3PseudoQuery(nn.Module):
    """Learned query [1, D] of a depth mix, zero at first.

    Not an `nn.Linear`: the mix reads the weight and nothing calls the module, so nothing that wraps linear layers
    (quantisers, adapters) must find it.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))


class KimiK3MixedRMSNorm(KimiK3RMSNorm):
    """RMS norm of what a mixer reads: of one stream, or of the depth mix of several.

    Mix and norm are one operation, so that the mix itself is never in memory. The weights of the mix belong to the
    layer, as released; they come along as arguments, so that hooks and wrappers of the norm see one ordinary call.
    """

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        *others: Tensor,
        key_norm: KimiK3RMSNorm | None = None,
        query: KimiK3PseudoQuery | None = None,
        impl: str = "auto",
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """[..., D] in the dtype of the streams; with a query also the streams, for those who read them later.

        Args:
            hidden_states, *others: [..., D] each, the streams in order: closed blocks, then the running sum.
            key_norm: Norm through which the query sees each stream; its own forward is not called.
            query: What the streams are scored by; `None` for a plain residual network, which has one stream.
            impl: Implementation of the mix, as in `attention_residual_mix`.
        """
        if query is None or key_norm is None:
            return super().forward(hidden_states, *others)
        return attention_residual_mix(
            (hidden_states, *others),
            query.weight.flatten(),
            key_norm.variance_epsilon,
            key_weight=key_norm.weight,
            norm_weight=self.weight,
            norm_eps=self.variance_epsilon,
            pass_on=True,
            impl=impl,
        )


def unmixed(norm: KimiK3RMSNorm, *streams: Tensor) -> tuple[Tensor, list[Tensor]]:
    """What is read in a plain residual network, and its only stream, as a mix would return them."""
    return norm(*streams), list(streams)
