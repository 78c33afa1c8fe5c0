# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Public function of the short convolution."""

import torch

from deltalatent.kernels.dispatch import Obstacle, resolve_impl, triton_obstacle
from deltalatent.kernels.short_conv.autograd import short_conv, short_conv_step, short_conv_step_
from deltalatent.kernels.short_conv.reference import short_convolution_reference
from deltalatent.kernels.short_conv.validation import as_streams, validate_short_convolution

Streams = torch.Tensor | tuple[torch.Tensor, ...]

TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TRITON_TAPS = (2, 3, 4)
TRITON_STREAMS = 3
# Up to this many tokens per row, the state is updated in the launch that computes the output.
STEP_TOKENS = 8


def short_convolution(
    x: Streams,
    weight: Streams,
    *,
    initial_state: Streams | None = None,
    cu_seqlens: torch.Tensor | None = None,
    output_final_state: bool = False,
    inplace_state: bool = False,
    activation: str | None = "silu",
    impl: str = "auto",
) -> tuple[Streams, Streams | None]:
    """Causal depthwise convolution of each channel over the last W tokens of its own document, then the activation.

    `y[t, d] = act(sum_{j=0}^{W-1} weight[d, 0, W-1-j] * x[t-j, d])`, where tokens before the start of the document are
    taken from `initial_state`, or are zero. (Kimi Linear, arXiv 2510.26692, section 4: the short convolutions of q, k
    and v; `act` is SiLU there.)

    Args:
        x: [B, T, D] float32, float16, bfloat16 or float64, or a tuple of such tensors with different D (the streams
            q, k, v), which one launch handles on a GPU; the other tensor arguments are then tuples alike.
        weight: [D, 1, W], float32 as released; the last tap multiplies the current token.
        initial_state: [N, D, W-1], the last W-1 inputs before each document, oldest first; `None` means zeros.
        cu_seqlens: [N+1] int32 or int64 offsets of the documents of a packed row (then B must be 1), or `None` (every
            row is one document, N = B). Rows of `x` beyond the last offset give zero output and no gradient.
        output_final_state: also return the last W-1 inputs of each document.
        inplace_state: write the final state into `initial_state` (decoding; no gradient) and return that tensor.
        activation: `"silu"` or `None`.
        impl: `"auto"`, `"triton"` (up to three streams, 2 to 4 taps) or `"torch"`.

    Returns:
        `y` [B, T, D] in the dtype of `x`, and the final state [N, D, W-1] in the dtype of `x` (`None` unless
        `output_final_state` or `inplace_state`). An empty document keeps its initial state. The sum is accumulated in
        float32 (float64 for float64 inputs). Differentiable in `x`, `weight` and `initial_state`.

    Raises:
        ValueError: wrong shape, device or option, or an `impl` that cannot run.
        TypeError: wrong dtype.
    """
    several = isinstance(x, tuple | list)
    xs = tuple(x) if several else (x,)
    weights = as_streams(weight if several else (weight,), "weight", len(xs))
    states = as_streams(
        initial_state if several or initial_state is None else (initial_state,), "initial_state", len(xs)
    )
    validate_short_convolution(xs, weights, states, cu_seqlens, activation, inplace_state)
    reasons = {"triton": _triton_obstacle(xs, weights), "torch": None}
    chosen = resolve_impl("short_convolution", impl, device=xs[0].device, reasons=reasons)
    run = _run_triton if chosen == "triton" else _run_torch
    ys, finals = run(xs, weights, states, cu_seqlens, output_final_state, inplace_state, activation)
    if not several:
        return ys[0], finals[0] if finals else None
    return ys, finals or None


def _triton_obstacle(xs: tuple[torch.Tensor, ...], weights: tuple[torch.Tensor, ...]) -> Obstacle | None:
    if xs[0].dtype not in TRITON_DTYPES:
        reason = f"the Triton kernels take float32, float16 or bfloat16, got {xs[0].dtype}: use 'torch'"
        return Obstacle(reason, TypeError)
    if weights[0].shape[2] not in TRITON_TAPS:
        return Obstacle(f"the Triton kernels take 2 to 4 taps, got {weights[0].shape[2]}: use 'torch'")
    if len(xs) > TRITON_STREAMS:
        return Obstacle(f"the Triton kernels take up to {TRITON_STREAMS} streams, got {len(xs)}: split the call")
    return triton_obstacle(xs[0].device)


def _run_torch(xs, weights, states, cu_seqlens, output_final_state, inplace_state, activation):
    results = [
        short_convolution_reference(
            x,
            weight,
            initial_state=state,
            cu_seqlens=cu_seqlens,
            output_final_state=output_final_state or inplace_state,
            activation=activation,
        )
        for x, weight, state in zip(xs, weights, states, strict=True)
    ]
    ys, finals = zip(*results, strict=True)
    if inplace_state:
        finals = tuple(state.copy_(final) for state, final in zip(states, finals, strict=True))
    return ys, finals if finals[0] is not None else ()


def _run_triton(xs, weights, states, cu_seqlens, output_final_state, inplace_state, activation):
    count, silu = len(xs), activation == "silu"
    given = [] if all(state is None for state in states) else list(states)
    for index, state in enumerate(given):
        if state is None:
            documents = next(other.shape[0] for other in states if other is not None)
            given[index] = xs[index].new_zeros(documents, xs[index].shape[2], weights[index].shape[2] - 1)
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*xs, *weights, *given))
    if given and cu_seqlens is None and xs[0].shape[1] <= STEP_TOKENS and not differentiable:
        if inplace_state and all(state.is_contiguous() for state in given):
            return tuple(short_conv_step_(list(xs), list(weights), given, silu)), states
        if output_final_state and not inplace_state:
            outputs = short_conv_step(list(xs), list(weights), given, silu)
            return tuple(outputs[:count]), tuple(outputs[count:])
    outputs = short_conv(list(xs), list(weights), given, cu_seqlens, silu, output_final_state or inplace_state)
    ys, finals = tuple(outputs[:count]), tuple(outputs[count:])
    if inplace_state:
        finals = tuple(state.copy_(final) for state, final in zip(states, finals, strict=True))
    return ys, finals
