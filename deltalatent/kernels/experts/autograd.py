# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The Triton experts with their gradients, for eager calls and for `torch.compile`.

Eager calls go through an `autograd.Function`; under `torch.compile` the same launches are the opaque operators
`deltalatent::grouped_experts` and `deltalatent::grouped_experts_backward`. Saved for backward, besides the inputs: the
hidden values before the gated unit [S, 2I] (S = T K pairs), and the plan of the permutation (integers, about 9 bytes
per pair). The gathered tokens, the activated values [S, I] and the experts' outputs [S, Z] are not kept.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltalatent.kernels.experts.plan_layout import plan_size


def _forward(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    situ: bool,
    beta: float,
    linear_beta: float,
    save: bool,
) -> list[Tensor]:
    """The output, and if `save` also the hidden values [S, 2I] and the plan's integers."""
    from deltalatent.kernels.experts.triton_launch import experts_forward

    inputs = (x.contiguous() for x in (hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights))
    return experts_forward(*inputs, situ, beta, linear_beta, save)


def _backward(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    hidden: list[Tensor],
    plan: Tensor,
    grad: Tensor,
    situ: bool,
    beta: float,
    linear_beta: float,
    needed: list[bool],
) -> list[Tensor]:
    """Gradients of the tokens, both weights and the routing weights; an empty tensor where none is needed.

    The list with the hidden values is emptied as soon as they have been read.
    """
    from deltalatent.kernels.experts.triton_launch import experts_backward

    inputs = (x.contiguous() for x in (hidden_states, gate_up_proj, down_proj, top_k_weights))
    return experts_backward(*inputs, hidden, plan, grad.contiguous(), situ, beta, linear_beta, needed)


class GroupedExpertsFunction(torch.autograd.Function):
    """Saved: tokens [T, Z], both weights, routing weights [T, K], hidden values [S, 2I], the plan."""

    @staticmethod
    def forward(ctx, hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights, situ, beta, linear_beta):
        inputs = (hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights)
        output, hidden, plan = _forward(*inputs, situ, beta, linear_beta, True)
        ctx.options = (situ, beta, linear_beta)
        ctx.save_for_backward(hidden_states, gate_up_proj, down_proj, top_k_weights, hidden, plan)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 4)]
        hidden_states, gate_up_proj, down_proj, top_k_weights, *hidden, plan = ctx.saved_tensors
        # Unless the graph is retained, the list now holds the only reference, and memory for the weights' gradients.
        ctx.maybe_clear_saved_tensors()
        grads = _backward(
            hidden_states, gate_up_proj, down_proj, top_k_weights, hidden, plan, grad, *ctx.options, needs
        )
        dx, dgate_up, ddown, dweights = (g if need else None for g, need in zip(grads, needs, strict=True))
        return dx, dgate_up, ddown, None, dweights, None, None, None


grouped_experts_op = torch.library.custom_op("deltalatent::grouped_experts", _forward, mutates_args=())
grouped_experts_backward_op = torch.library.custom_op(
    "deltalatent::grouped_experts_backward", _backward, mutates_args=()
)


@grouped_experts_op.register_fake
def _(hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights, situ, beta, linear_beta, save):
    output = torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device)
    if not save:
        return [output]
    num_pairs = top_k_index.shape[0] * top_k_index.shape[1]
    hidden = output.new_empty(num_pairs, gate_up_proj.shape[1])
    return [output, hidden, output.new_empty(plan_size(num_pairs, gate_up_proj.shape[0]), dtype=torch.int32)]


@grouped_experts_backward_op.register_fake
def _(hidden_states, gate_up_proj, down_proj, top_k_weights, hidden, plan, grad, situ, beta, linear_beta, needed):
    inputs = (hidden_states, gate_up_proj, down_proj, top_k_weights)
    return [
        torch.empty(x.shape if need else (0,), dtype=x.dtype, device=x.device)
        for x, need in zip(inputs, needed, strict=True)
    ]


def _op_setup_context(ctx, inputs, output):
    hidden_states, gate_up_proj, down_proj, _, top_k_weights, *ctx.options, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden_states, gate_up_proj, down_proj, top_k_weights, *output[1:])


def _op_backward(ctx, grads):
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 2, 4)]
    *inputs, hidden, plan = ctx.saved_tensors
    results = grouped_experts_backward_op(*inputs, [hidden], plan, grads[0], *ctx.options, needs)
    dx, dgate_up, ddown, dweights = (g if need else None for g, need in zip(results, needs, strict=True))
    return dx, dgate_up, ddown, None, dweights, None, None, None, None


grouped_experts_op.register_autograd(_op_backward, setup_context=_op_setup_context)


def grouped_experts(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    situ: bool,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """[T, Z], differentiable in the floating tensors; see `api.grouped_experts`."""
    inputs = (hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights)
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if torch.compiler.is_compiling():
        return grouped_experts_op(*inputs, situ, beta, linear_beta, differentiable)[0]
    if differentiable:
        return GroupedExpertsFunction.apply(*inputs, situ, beta, linear_beta)
    return _forward(*inputs, situ, beta, linear_beta, False)[0]
