# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square norms."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltalatent.kernels.gated_rms_norm import gated_rms_norm
from deltalatent.modeling.precision import KeepFloat32


class KimiK3RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis [..., D]; computed in float32, returned in x's dtype."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        # PyTorch has one kernel for equal dtypes, and many for others; inside, it computes in float32 either way.
        dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)
        weight = self.weight.to(dtype)
        x = F.rms_norm(hidden_states.to(dtype), weight.shape, weight, self.variance_epsilon)
        return x.to(hidden_states.dtype)  # autocast leaves it in float32

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


class KimiK3GatedRMSNorm(KeepFloat32):
    """RMS norm of a head's read-out [..., V], times `sigmoid(gate)`; the heads share the float32 weight [V]."""

    float32_tensors = ("weight",)

    def __init__(self, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_dim, dtype=torch.float32))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor, gate: Tensor, impl: str = "auto") -> Tensor:
        return gated_rms_norm(hidden_states, gate, self.weight, self.variance_epsilon, impl=impl)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"
