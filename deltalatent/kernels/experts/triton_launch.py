# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
r"""Tile sizes, and the launches that make up a forward and a backward pass of the routed experts.

Forward, for the hidden values h of a pair, its activated values a = act(h), and the routing weight w:

    h = W_gate_up x,   y = W_down a,   output = sum over the K pairs of a token of w y

Backward, with the token's gradient u and v = W_down^T u:

    gradient of w         = v . a
    gradient of h         = w v act'(h)
    gradient of W_down    = u (w a)^T, summed over the rows of the expert
    gradient of W_gate_up = (gradient of h) x^T, summed over the rows of the expert
    gradient of x         = W_gate_up^T (gradient of h), summed over the K pairs of the token
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from deltalatent.kernels.experts.plan_layout import SMALLEST_TILE, Plan, plan_views
from deltalatent.kernels.experts.triton_gradients import weight_gradient_kernel
from deltalatent.kernels.experts.triton_plan import make_plan
from deltalatent.kernels.experts.triton_products import product_kernel
from deltalatent.kernels.experts.triton_rows import combine_kernel, gated_unit_backward_kernel, gated_unit_kernel
from deltalatent.kernels.tiles import cdiv, device_limits, next_power_of_2, on_its_device
from deltalatent.kernels.triton_gluon import hopper_kernels_run


class ProductTile(NamedTuple):
    """Block sizes and launch parameters of the products: output channels, depth, and rows in the plan's tiles."""

    BM: int
    BK: int
    BT: int
    TAIL: int
    warps: int
    stages: int


class GradientTile(NamedTuple):
    """Block sizes and launch parameters of the weight gradients.

    `panel`: all tiles of BN columns in one program, for experts that have few rows and are many themselves.
    """

    BM: int
    BN: int
    BK: int
    warps: int
    stages: int
    panel: bool


class Config(NamedTuple):
    """What is chosen for a call from its shapes, its dtype and the device alone."""

    product: ProductTile
    gradient: GradientTile
    precision: str


def choose_config(num_pairs: int, num_experts: int, dtype: torch.dtype, device: torch.device) -> Config:
    """Tiles as tall as an expert has rows on average, if all are chosen equally often."""
    average = num_pairs / num_experts
    BT = next(rows for rows in (SMALLEST_TILE, 32, 64, 128) if average <= 0.75 * rows or rows == 128)
    limits = device_limits(device)
    if dtype == torch.float32:
        BT = min(BT, 64)
        # Three tf32 products make one of float32 precision; AMD's compiler has none.
        precision = "tf32x3" if torch.version.hip is None else "ieee"
        return Config(ProductTile(64, 32, BT, 0, 4, 2), GradientTile(64, 64, 32, 4, 2, False), precision)
    if BT <= 32:
        product = ProductTile(64, 128, BT, 0, 4, 4)
    elif BT == 64:
        product = ProductTile(128, 64, 64, 0, 4, 3)
    else:
        product = ProductTile(128, 64, 128, 32 if average < 512 else 0, 4, 3)
    fitting = _fitting_stages(limits.shared_memory, 2 * product.BK * (product.BM + product.BT + product.TAIL))
    product = product._replace(stages=min(product.stages, fitting))
    if limits.capability >= (9, 0) and average <= 160 and num_experts >= 64:
        gradient = GradientTile(64, 128, 64, 4, 3, True)
    else:
        gradient = GradientTile(128, 128, 64, 8, 5, False)
        # Rows are asked for after the numbers of their tokens: two stages to a buffer.
        fitting = 2 * _fitting_stages(limits.shared_memory, 2 * gradient.BK * (gradient.BM + gradient.BN)) - 1
        gradient = gradient._replace(stages=min(gradient.stages, fitting))
    return Config(product, gradient, "ieee")


def _fitting_stages(shared_memory: int, stage_bytes: int) -> int:
    """Pipeline stages for which a multiprocessor has the shared memory, with some to spare; two hold one tile."""
    return max(2, (shared_memory - 4096) // stage_bytes)


class HopperKernels(NamedTuple):
    """The modules of kernels for Hopper."""

    products: ModuleType
    gradients: ModuleType


@functools.cache
def hopper_kernels(capability: tuple[int, int]) -> HopperKernels | None:
    """Those for GPUs of this compute capability, if there are any."""
    if not hopper_kernels_run("grouped_experts", capability):
        return None
    from deltalatent.kernels.experts import triton_hopper_gradients, triton_hopper_products

    return HopperKernels(triton_hopper_products, triton_hopper_gradients)


def grouped_product(
    x: Tensor, w: Tensor, plan: Plan, config: Config, *, top_k: int, gather: bool, transposed: bool
) -> Tensor:
    """Rows x [S, IN] (`gather`: tokens [T, IN]) times w [E, OUT, IN] (`transposed`: [E, IN, OUT]): [S, OUT]."""
    tile = config.product
    IN, OUT = w.shape[1:] if transposed else (w.shape[2], w.shape[1])
    y = torch.empty(plan.order.shape[0], OUT, dtype=x.dtype, device=x.device)
    limits = device_limits(x.device)
    hopper = hopper_kernels(limits.capability)
    if hopper is not None and tile.BT == hopper.products.ROWS.value and hopper.products.takes(x, w, transposed):
        hopper.products.hopper_product_kernel[(limits.processors,)](
            x, w, plan.order, plan.tiles, y, plan.num_tiles,
            OUT=OUT, IN=IN, K=top_k, GATHER=gather, TRANSPOSED=transposed, num_warps=4,
        )  # fmt: skip
        return y
    product_kernel[(plan.num_tiles * cdiv(OUT, tile.BM),)](
        x, w, plan.order, plan.tiles, y, plan.num_tiles, OUT, IN, K=top_k,
        GATHER=gather, TRANSPOSED=transposed, BM=tile.BM, BT=tile.BT, TAIL=tile.TAIL, BK=tile.BK,
        EVEN_M=OUT % tile.BM == 0, EVEN_K=IN % tile.BK == 0, PRECISION=config.precision,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def weight_gradient(
    left: Tensor, right: Tensor, w: Tensor, plan: Plan, config: Config, *, top_k: int, gather_left: bool
) -> Tensor:
    """Like w [E, M, N]: the sum of left [., M] times right [., N] over each expert's rows; one of them is gathered."""
    tile = config.gradient
    E, M, N = w.shape
    dw = torch.empty(E, M, N, dtype=w.dtype, device=w.device)
    limits = device_limits(w.device)
    hopper = hopper_kernels(limits.capability)
    if hopper is not None and tile.panel and hopper.gradients.takes(left, right, w):
        hopper.gradients.hopper_gradient_kernel[(limits.processors,)](
            left, right, plan.order, plan.offsets, dw, E, M=M, N=N, K=top_k, GATHER_LEFT=gather_left, num_warps=4
        )
        return dw
    blocks_m = 1 if tile.panel else cdiv(M, tile.BM)
    weight_gradient_kernel[(E * blocks_m * cdiv(N, tile.BN),)](
        left, right, plan.order, plan.offsets, dw, M, N,
        K=top_k, GATHER_LEFT=gather_left, PANEL=tile.panel, BM=tile.BM, BN=tile.BN, BK=tile.BK,
        EVEN_M=M % tile.BM == 0, EVEN_N=N % tile.BN == 0, PRECISION=config.precision,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dw


def combine(y: Tensor, weights: Tensor | None, plan: Plan, num_tokens: int) -> Tensor:
    """Rows y [S, Z] summed per token, with weights [T, K] if given: [T, Z]."""
    Z = y.shape[1]
    out = torch.empty(num_tokens, Z, dtype=y.dtype, device=y.device)
    BZ = min(1024, next_power_of_2(Z))
    BT = 1024 // BZ
    combine_kernel[(cdiv(num_tokens, BT), cdiv(Z, BZ))](
        y, weights, plan.inverse, out, num_tokens, Z,
        K=y.shape[0] // max(num_tokens, 1), WEIGHTED=weights is not None, BT=BT, BZ=BZ, num_warps=4,
    )  # fmt: skip
    return out


def gated_unit(hidden: Tensor, situ: bool, beta: float, linear_beta: float) -> Tensor:
    """[S, 2F] -> [S, F]."""
    S, F = hidden.shape[0], hidden.shape[1] // 2
    activated = torch.empty(S, F, dtype=hidden.dtype, device=hidden.device)
    BF = min(512, next_power_of_2(F))
    BS = 2048 // BF
    gated_unit_kernel[(cdiv(S, BS), cdiv(F, BF))](
        hidden, activated, S, F, beta, linear_beta, SITU=situ, BS=BS, BF=BF, num_warps=8
    )
    return activated


def gated_unit_backward(
    v: Tensor, hidden: Tensor, weights: Tensor, plan: Plan, situ: bool, beta: float, linear_beta: float
) -> tuple[Tensor, Tensor]:
    """Gradients of the hidden values and of the routing weights; v [S, F] becomes weight times activated value."""
    S, F = v.shape
    dhidden, dweights = torch.empty_like(hidden), torch.empty_like(weights)
    BF = min(512, next_power_of_2(F))
    BS = 1024 // BF
    gated_unit_backward_kernel[(cdiv(S, BS),)](
        v, hidden, plan.order, plan.offsets, weights, dhidden, dweights, S, plan.offsets.shape[0] - 1, F, beta,
        linear_beta, SITU=situ, BS=BS, BF=BF, num_warps=4,
    )  # fmt: skip
    return dhidden, dweights


@on_its_device
def experts_forward(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor,
    situ: bool, beta: float, linear_beta: float, save: bool,
) -> list[Tensor]:  # fmt: skip
    """The output, and if `save` the hidden values [S, 2F] and the plan's integers; all inputs contiguous."""
    num_tokens, top_k = index.shape
    config = choose_config(index.numel(), gate_up.shape[0], x.dtype, x.device)
    tile = config.product
    integers, plan = make_plan(index, gate_up.shape[0], tile.BT, tile.TAIL)
    hidden = grouped_product(x, gate_up, plan, config, top_k=top_k, gather=True, transposed=False)
    activated = gated_unit(hidden, situ, beta, linear_beta)
    if not save:
        del hidden
    y = grouped_product(activated, down, plan, config, top_k=top_k, gather=False, transposed=False)
    del activated
    output = combine(y, weights, plan, num_tokens)
    return [output, hidden, integers] if save else [output]


@on_its_device
def experts_backward(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, hidden: list[Tensor], integers: Tensor, dy: Tensor,
    situ: bool, beta: float, linear_beta: float, needed: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Gradients of x, gate_up, down and weights, empty where not `needed`; all inputs contiguous.

    `hidden` is a list of one tensor and is emptied, so that its memory can be used again.
    """
    num_tokens, top_k = weights.shape
    config = choose_config(weights.numel(), gate_up.shape[0], x.dtype, x.device)
    tile = config.product
    plan = plan_views(integers, weights.numel(), gate_up.shape[0], tile.BT, tile.TAIL)
    dx, dgate_up, ddown = (x.new_empty(0) for _ in range(3))
    v = grouped_product(dy, down, plan, config, top_k=top_k, gather=True, transposed=True)
    dhidden, dweights = gated_unit_backward(v, hidden.pop(), weights, plan, situ, beta, linear_beta)
    if needed[0]:  # before the gradients of the weights, which take the most memory
        dxs = grouped_product(dhidden, gate_up, plan, config, top_k=top_k, gather=False, transposed=True)
        dx = combine(dxs, None, plan, num_tokens)
        del dxs
    if needed[2]:
        ddown = weight_gradient(dy, v, down, plan, config, top_k=top_k, gather_left=True)
    del v
    if needed[1]:
        dgate_up = weight_gradient(dhidden, x, gate_up, plan, config, top_k=top_k, gather_left=False)
    return [dx, dgate_up, ddown, dweights if needed[3] else weights.new_empty(0)]
