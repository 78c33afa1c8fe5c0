# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""SiTU-GLU in plain PyTorch (Kimi K3 report, arXiv 2607.24653; golden README, "Channel mixers")."""

import torch
from torch import Tensor


def situ_glu_reference(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """See `situ_glu`; any floating dtype."""
    acc = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(acc), up.to(acc)
    capped = beta * torch.tanh(g / beta) * torch.sigmoid(g) * (linear_beta * torch.tanh(u / linear_beta))
    return capped.to(gate.dtype)
