# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""SiTU-GLU in plain PyTorch (Kimi K3 report, arXiv 2607.24653; golden README, "Channel mixers")."""

import torch
from torch import Tensor


def situ_glu(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    r"""Gated unit whose two branches are softly capped: no activation exceeds `beta * linear_beta`.

    .. math:: \mathrm{SiTU}(g, u) = b_1 \tanh(g / b_1)\, \sigma(g) \cdot b_2 \tanh(u / b_2)

    Args:
        gate: g, [..., I]. The sigmoid takes it uncapped.
        up: u, [..., I], same dtype.
        beta: b1 > 0, cap of the gate branch.
        linear_beta: b2 > 0, cap of the linear branch.

    Returns:
        [..., I] in the dtype of `gate`; computed in float32 (float64 for float64), since two saturating functions
        multiply.
    """
    acc = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(acc), up.to(acc)
    capped = beta * torch.tanh(g / beta) * torch.sigmoid(g) * (linear_beta * torch.tanh(u / linear_beta))
    return capped.to(gate.dtype)
