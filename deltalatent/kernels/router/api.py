# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Public functions of the router."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deltalatent.kernels.autocast import float32_autocast_disabled
from deltalatent.kernels.dispatch import Obstacle, resolve_impl, triton_obstacle
from deltalatent.kernels.router import autograd
from deltalatent.kernels.router.reference import (
    Choice,
    choose_experts_reference,
    count_required_biases_reference,
)
from deltalatent.kernels.router.validation import validate_choose_experts

# A token's scores must fit the registers of one program.
TRITON_EXPERTS = 4096


def router_logits(hidden_states: Tensor, weight: Tensor) -> Tensor:
    """`x W^T` in float32 whatever the dtype of the model or autocast: in bfloat16 one token in twenty goes elsewhere.

    Where both are bfloat16 on a GPU, tensor cores make the (exact) products, whose partial sums are added in float32:
    as exact as a float32 product, at many times its speed.

    Args:
        hidden_states: x, [T, D], floating.
        weight: W, [E, D], floating.

    Returns:
        [T, E] float32 (float64 if an input is). Differentiable in both.

    Raises:
        ValueError: shapes that do not fit.
    """
    if hidden_states.dim() != 2 or weight.dim() != 2 or hidden_states.shape[1] != weight.shape[1]:
        raise ValueError(
            "`hidden_states` and `weight` must have shapes [T, D] and [E, D], got "
            f"{list(hidden_states.shape)} and {list(weight.shape)}: flatten batch and sequence."
        )
    with float32_autocast_disabled(hidden_states.device):
        if hidden_states.dtype == weight.dtype == torch.bfloat16 and hidden_states.is_cuda:
            if triton_obstacle(hidden_states.device) is None:
                return autograd.router_logits(hidden_states, weight)
        dtype = torch.promote_types(torch.promote_types(hidden_states.dtype, weight.dtype), torch.float32)
        return F.linear(hidden_states.to(dtype), weight.to(dtype))


def choose_experts(
    logits: Tensor,
    bias: Tensor,
    top_k: int,
    *,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    impl: str = "auto",
) -> Choice:
    r"""Choose K of E experts for each token.

    .. math::
        s = \sigma(\mathrm{logits}), \quad \text{choose the K largest of } s + b, \quad
        w = \lambda\, s_{chosen} / (\textstyle\sum s_{chosen} + 10^{-20})

    The bias decides who is chosen but not the weights (DeepSeek-V3, arXiv 2412.19437, equation 16; Kimi K3 report,
    arXiv 2607.24653). With groups, these are ranked by the sum of their two best biased scores, and only experts of
    the best `top_groups` are eligible. T tokens, E experts.

    Args:
        logits: [T, E], float32 or float64.
        bias: b, [E], dtype of the logits. Gets no gradient.
        top_k: K, in [1, E].
        renormalize: divide the weights by their sum.
        scaling_factor: lambda.
        num_groups: groups of neighbouring experts, a divisor of E.
        top_groups: groups that are eligible, in [1, num_groups].
        impl: `"auto"`, `"triton"` (float32, no groups, E up to 4096) or `"torch"`. They may differ in the order of the
            chosen experts, in the last bit of a score, and in which of two equal scores they take (Triton: the first).

    Returns:
        `Choice`: scores [T, E], index int64 [T, K], weights [T, K], cutoff [T]. Scores and weights are differentiable
        in the logits.

    Raises:
        ValueError: wrong shape, device, option, or an `impl` that cannot run.
        TypeError: wrong dtype.
    """
    validate_choose_experts(logits, bias, top_k, num_groups, top_groups)
    reasons = {"triton": _triton_obstacle(logits, num_groups), "torch": None}
    if resolve_impl("choose_experts", impl, device=logits.device, reasons=reasons) == "triton":
        return Choice(*autograd.choose(logits, bias, top_k, renormalize, scaling_factor))
    return choose_experts_reference(
        logits, bias, top_k, renormalize=renormalize, scaling_factor=scaling_factor, num_groups=num_groups,
        top_groups=top_groups,
    )  # fmt: skip


def _triton_obstacle(logits: Tensor, num_groups: int) -> Obstacle | None:
    if logits.dtype != torch.float32:
        return Obstacle(f"the Triton kernel takes float32 logits, got {logits.dtype}: use 'torch'", TypeError)
    if num_groups > 1:
        return Obstacle(f"the Triton kernel knows no expert groups, got {num_groups}: use 'torch'")
    if logits.shape[1] > TRITON_EXPERTS:
        return Obstacle(f"the Triton kernel takes up to {TRITON_EXPERTS} experts, got {logits.shape[1]}: use 'torch'")
    return triton_obstacle(logits.device)


def count_required_biases(
    flat: Tensor,
    scores: Tensor,
    cutoff: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    selected: Tensor | None,
    num_bins: int,
    *,
    impl: str = "auto",
) -> None:
    """Add one micro-batch to the histograms of quantile balancing (Kimi K3 report, arXiv 2607.24653), in place.

    The required bias of expert e and token t is `cutoff_t - scores_te`; its bin is that of `num_bins` equal ones over
    `[min(bias) - 1, max(bias) + 1]`, and the outermost where it lies outside. Tokens whose cutoff is not finite do not
    count. Never waits for the device, and makes no tensor of tokens x experts x bins.

    Args:
        flat: int32 [E num_bins + E + 1]: counts, tokens that selected each expert, counted tokens.
        scores: [T, E], float32 or float64.
        cutoff: [T], dtype of the scores.
        bias: [E], dtype of the scores.
        mask: bool [T], tokens that count; `None` counts all.
        selected: int64 [T, K], chosen experts; `None`: those whose score plus bias is above the cutoff.
        num_bins: bins per expert.
        impl: `"auto"`, `"triton"` (float32 scores, `selected` given) or `"torch"`; integers, so all agree exactly.

    Raises:
        ValueError: an `impl` that cannot run. (Shapes are checked by `QuantileHistogram.add`.)
    """
    if scores.dtype != torch.float32 or selected is None:
        obstacle: Obstacle | None = Obstacle("the Triton kernel takes float32 scores and `selected`: use 'torch'")
    else:
        obstacle = triton_obstacle(scores.device)
    reasons = {"triton": obstacle, "torch": None}
    arguments: tuple[Any, ...] = (flat, scores, cutoff, bias, mask, selected, num_bins)
    if resolve_impl("count_required_biases", impl, device=scores.device, reasons=reasons) == "triton":
        autograd.count_required_biases(*arguments)
    else:
        count_required_biases_reference(*arguments)
