# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What happens to rows between the grouped products: the gated unit, its gradients, the sum over a token's experts.

Separate passes on purpose: fused into the products they ran slower, since tensor cores wait while exponentials are
evaluated, and a product with a plain ending leaves room for a second program on the same multiprocessor. Alphabet as
in `triton_products.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deltalatent.kernels.situ.triton_kernels import gated_unit, gated_unit_gradients


@triton.jit(do_not_specialize=["S"])
def gated_unit_kernel(
    hidden, activated, S, F, beta, linear_beta, SITU: tl.constexpr, BS: tl.constexpr, BF: tl.constexpr
):
    """hidden [S, 2F] -> activated [S, F]: SiTU-GLU, or SwiGLU."""
    row = tl.program_id(0).to(tl.int64) * BS + tl.arange(0, BS)
    channel = tl.program_id(1) * BF + tl.arange(0, BF)
    inside = (row < S)[:, None] & (channel < F)[None, :]
    place = hidden + row[:, None] * (2 * F) + channel[None, :]
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + F, mask=inside, other=0.0).to(tl.float32)
    result = gated_unit(gate, up, beta, linear_beta, SITU)
    place = activated + row[:, None] * F + channel[None, :]
    tl.store(place, result.to(activated.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["S"])
def gated_unit_backward_kernel(
    v, hidden, order, offsets, weights, dhidden, dweights, S, E, F, beta, linear_beta, SITU: tl.constexpr,
    BS: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """v [S, F], hidden [S, 2F], weights [pairs] -> dhidden [S, 2F], dweights [pairs]; v becomes weight times value.

    v is the gradient of the activated values before the routing weight. Rows past the last expert have none: their
    pairs get a zero.
    """
    row = tl.program_id(0).to(tl.int64) * BS + tl.arange(0, BS)
    pair = tl.load(order + row, mask=row < S, other=0).to(tl.int64)
    here = row < tl.load(offsets + E)
    weight = tl.load(weights + pair, mask=here, other=0.0).to(tl.float32)
    dweight = tl.zeros([BS, BF], tl.float32)
    for first in range(0, F, BF):
        channel = first + tl.arange(0, BF)
        inside = here[:, None] & (channel < F)[None, :]
        of_v = v + row[:, None] * F + channel[None, :]
        of_gate = row[:, None] * (2 * F) + channel[None, :]
        gradient = tl.load(of_v, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(hidden + of_gate, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(hidden + of_gate + F, mask=inside, other=0.0).to(tl.float32)
        value, by_gate, by_up = gated_unit_gradients(gate, up, beta, linear_beta, SITU)
        dweight += gradient * value
        gradient *= weight[:, None]
        tl.store(dhidden + of_gate, (gradient * by_gate).to(dhidden.dtype.element_ty), mask=inside)
        tl.store(dhidden + of_gate + F, (gradient * by_up).to(dhidden.dtype.element_ty), mask=inside)
        tl.store(of_v, (weight[:, None] * value).to(v.dtype.element_ty), mask=inside)
    tl.store(dweights + pair, tl.sum(dweight, axis=1).to(dweights.dtype.element_ty), mask=row < S)


@triton.jit(do_not_specialize=["T"])
def combine_kernel(
    y, weights, inverse, out, T, Z, K: tl.constexpr, WEIGHTED: tl.constexpr, BT: tl.constexpr, BZ: tl.constexpr
):
    """y [S, Z], weights [T, K], inverse [S] (row of a pair, -1: none) -> out [T, Z], summed in float32 in order."""
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    channel = tl.program_id(1) * BZ + tl.arange(0, BZ)
    real = token < T
    total = tl.zeros([BT, BZ], tl.float32)
    for j in tl.static_range(K):
        row = tl.load(inverse + token * K + j, mask=real, other=-1).to(tl.int64)
        inside = (row >= 0)[:, None] & (channel < Z)[None, :]
        values = tl.load(y + row[:, None] * Z + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            weight = tl.load(weights + token * K + j, mask=row >= 0, other=0.0).to(tl.float32)
            values *= weight[:, None]
        total += values
    place = out + token[:, None] * Z + channel[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=real[:, None] & (channel < Z)[None, :])
