# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The Triton short convolution as PyTorch operators: opaque to `torch.compile`, with shapes and gradients registered.

| operator | saved for backward |
| --- | --- |
| `deltalatent::short_conv(xs, weights, states, cu_seqlens, silu, final) -> ys + finals` | all inputs, no outputs |
| `deltalatent::short_conv_backward(...) -> dxs + dweights + dstates` | - |
| `deltalatent::short_conv_step(xs, weights, states, silu) -> ys + finals` | no gradient |
| `deltalatent::short_conv_step_(xs, weights, states, silu) -> ys`, states updated in place | no gradient |

Lists have one entry for each stream; `states` and `dfinals` may be empty.
"""

import torch


def _triton_ready(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    # Any batch and time stride will do (slices of a fused projection), but channels must be adjacent.
    return [x if x.stride(2) == 1 else x.contiguous() for x in xs]


def _contiguous(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.contiguous() for tensor in tensors]


def _fake_outputs(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]


def _fake_states(xs, weights, num_documents) -> list[torch.Tensor]:
    return [x.new_empty(num_documents, x.shape[2], w.shape[2] - 1) for x, w in zip(xs, weights, strict=True)]


@torch.library.custom_op("deltalatent::short_conv", mutates_args=())
def short_conv(
    xs: list[torch.Tensor],
    weights: list[torch.Tensor],
    states: list[torch.Tensor],
    cu_seqlens: torch.Tensor | None,
    silu: bool,
    final: bool,
) -> list[torch.Tensor]:
    from deltalatent.kernels.short_conv.triton_fwd import short_conv_final_state, short_conv_forward

    xs, weights, states = _triton_ready(xs), _contiguous(weights), _contiguous(states)
    outputs = short_conv_forward(xs, weights, states, cu_seqlens, silu)
    if final:
        outputs += short_conv_final_state(xs, states, weights[0].shape[2], cu_seqlens)
    return outputs


@short_conv.register_fake
def _(xs, weights, states, cu_seqlens, silu, final):
    num_documents = xs[0].shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return _fake_outputs(xs) + (_fake_states(xs, weights, num_documents) if final else [])


@torch.library.custom_op("deltalatent::short_conv_backward", mutates_args=())
def short_conv_backward(
    xs: list[torch.Tensor],
    weights: list[torch.Tensor],
    states: list[torch.Tensor],
    cu_seqlens: torch.Tensor | None,
    dys: list[torch.Tensor],
    dfinals: list[torch.Tensor],
    silu: bool,
) -> list[torch.Tensor]:
    from deltalatent.kernels.short_conv import triton_bwd

    dxs, dweights, dstates = triton_bwd.short_conv_backward(
        _triton_ready(xs),
        _contiguous(weights),
        _contiguous(states),
        cu_seqlens,
        _contiguous(dys),
        _contiguous(dfinals),
        silu,
    )
    return dxs + dweights + dstates


@short_conv_backward.register_fake
def _(xs, weights, states, cu_seqlens, dys, dfinals, silu):
    return _fake_outputs(xs) + _fake_outputs(weights) + _fake_outputs(states)


def _setup_context(ctx, inputs, output):
    xs, weights, states, cu_seqlens, silu, _ = inputs
    # Absent gradients arrive as None, so that an unused final state costs nothing.
    ctx.set_materialize_grads(False)
    ctx.num_streams, ctx.num_states, ctx.silu = len(xs), len(states), silu
    ctx.save_for_backward(*xs, *weights, *states, cu_seqlens)


def _backward(ctx, grads):
    *tensors, cu_seqlens = ctx.saved_tensors
    count = ctx.num_streams
    xs, weights, states = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
    dys = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(xs, grads[:count], strict=True)]
    dfinals = []
    if any(grad is not None for grad in grads[count:]):
        shapes = _fake_states(xs, weights, xs[0].shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1)
        pairs = zip(shapes, grads[count:], strict=True)
        dfinals = [torch.zeros_like(shape) if grad is None else grad for shape, grad in pairs]
    results = short_conv_backward(xs, weights, states, cu_seqlens, dys, dfinals, ctx.silu)
    return results[:count], results[count : 2 * count], results[2 * count :], None, None, None


short_conv.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("deltalatent::short_conv_step", mutates_args=())
def short_conv_step(
    xs: list[torch.Tensor], weights: list[torch.Tensor], states: list[torch.Tensor], silu: bool
) -> list[torch.Tensor]:
    from deltalatent.kernels.short_conv.triton_fwd import short_conv_update

    states = _contiguous(states)
    finals = [torch.empty_like(state) for state in states]
    return short_conv_update(_triton_ready(xs), _contiguous(weights), states, finals, silu) + finals


@short_conv_step.register_fake
def _(xs, weights, states, silu):
    return _fake_outputs(xs) + _fake_outputs(states)


@torch.library.custom_op("deltalatent::short_conv_step_", mutates_args=("states",))
def short_conv_step_(
    xs: list[torch.Tensor], weights: list[torch.Tensor], states: list[torch.Tensor], silu: bool
) -> list[torch.Tensor]:
    from deltalatent.kernels.short_conv.triton_fwd import short_conv_update

    return short_conv_update(_triton_ready(xs), _contiguous(weights), states, states, silu)


@short_conv_step_.register_fake
def _(xs, weights, states, silu):
    return _fake_outputs(xs)
