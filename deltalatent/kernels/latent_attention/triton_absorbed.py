# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of absorbed latent attention: a few query tokens against a long cache of latents.

Alphabet: B rows, T query tokens, H heads, M = T*H query vectors of a row, S cached tokens, R latent rank, Q width of
the shared key part, N splits of the cache.

One latent serves all heads as key and as value, so a program takes BM query vectors of a row, whatever their head or
token, and walks over its part of the cache with an online softmax (FlashAttention, arXiv 2205.14135); the parts are
joined by a second kernel (split softmax of flash decoding). The bytes floor is the cache, once: programs of one part
are neighbours in the launch, so that the second one finds the part in the L2 cache. How much of a part is written is
read on the device, and nothing depends on values on the host, so that a launch can be captured in a CUDA graph.

On Hopper, many query vectors run in `triton_hopper` instead of the first kernel.
"""

import functools
from types import ModuleType
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from deltalatent.kernels.tiles import cdiv, device_limits, next_power_of_2, on_its_device
from deltalatent.kernels.triton_gluon import hopper_kernels_run

LOG2_E = 1.4426950408889634
MINIMUM_SPLIT = 64
"""Fewest cached tokens of a split: joining costs about as much as reading so many."""
MAXIMUM_SPLITS = 512
SHARED_MEMORY_RESERVE = 4096
"""Left to the compiler, times the bytes of an element: softmax weights pass between warps through shared memory."""


# A cache grows by one token per step: kernels made anew for lengths that are multiples of 16 would stall a generation.
@triton.jit(
    do_not_specialize=["T", "S", "splits", "seen_b", "mask_b", "mask_t"],
    do_not_specialize_on_alignment=["seen", "mask", "end"],
)
def absorbed_split_kernel(
    query,
    shared_query,
    latent,
    shared_key,
    seen,
    mask,
    end,
    o,
    lse,
    T,
    S,
    splits,
    scale_log2,
    query_b,
    query_t,
    query_h,
    shared_query_b,
    shared_query_t,
    shared_query_h,
    latent_b,
    latent_s,
    shared_key_b,
    shared_key_s,
    seen_b,
    mask_b,
    mask_t,
    end_b,
    H: tl.constexpr,
    R: tl.constexpr,
    Q: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    BQ: tl.constexpr,
    HAS_MASK: tl.constexpr,
    MASK_PER_TOKEN: tl.constexpr,
    HAS_END: tl.constexpr,
):
    """Grid (B * blocks of query vectors, N). Writes a normalised partial output and its log2-sum-exp."""
    M = T * H
    blocks = tl.cdiv(M, BM)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    split = tl.program_id(1)
    row = (tl.program_id(0) % blocks) * BM + tl.arange(0, BM)
    in_rows = row < M
    token, head = row // H, row % H
    # Long prompts times wide heads are more elements than 32 bits count.
    wide_token, wide_head = token.to(tl.int64), head.to(tl.int64)
    r, q = tl.arange(0, BR), tl.arange(0, BQ)

    stop = S
    if HAS_END:
        stop = tl.minimum(tl.load(end + b * end_b).to(tl.int32), S)
    last = stop - T + token  # the last cached token that a query vector may see: its own
    per_split = tl.cdiv(tl.cdiv(stop, BN), splits) * BN
    first = split * per_split
    stop = tl.minimum(stop, first + per_split)

    query_rows = query + b * query_b + wide_token * query_t + wide_head * query_h
    latent_query = tl.load(query_rows[:, None] + r[None, :], mask=in_rows[:, None] & (r < R)[None, :], other=0.0)
    query_rows = shared_query + b * shared_query_b + wide_token * shared_query_t + wide_head * shared_query_h
    key_query = tl.load(query_rows[:, None] + q[None, :], mask=in_rows[:, None] & (q < Q)[None, :], other=0.0)

    latent += b * latent_b
    shared_key += b * shared_key_b
    seen += b * seen_b
    mask += b * mask_b
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BR], tl.float32)
    n = tl.arange(0, BN)
    if HAS_MASK:
        next_seen = tl.load(seen + first + n, mask=first + n < stop, other=0)
    for start in range(first, stop, BN):
        s = start + n
        in_view = s < stop
        places = s.to(tl.int64)
        if HAS_MASK:
            # What no query sees is not read: it may be anything, and weight 0 times NaN is NaN. Loaded a tile ahead,
            # so that reading the cache does not wait for it.
            in_view = in_view & (next_seen != 0)
            next_seen = tl.load(seen + places + BN, mask=s + BN < stop, other=0)
        c = tl.load(
            latent + places[:, None] * latent_s + r[None, :], mask=in_view[:, None] & (r < R)[None, :], other=0.0
        )
        k = tl.load(
            shared_key + places[:, None] * shared_key_s + q[None, :],
            mask=in_view[:, None] & (q < Q)[None, :],
            other=0.0,
        )
        scores = tl.dot(latent_query, tl.trans(c), input_precision="ieee")
        scores = tl.dot(key_query, tl.trans(k), scores, input_precision="ieee") * scale_log2
        visible = in_view[None, :] & (s[None, :] <= last[:, None])
        if MASK_PER_TOKEN:
            allowed = tl.load(
                mask + wide_token[:, None] * mask_t + places[None, :],
                mask=in_rows[:, None] & in_view[None, :],
                other=0,
            )
            visible = visible & (allowed != 0)
        scores = tl.where(visible, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        finite_top = tl.where(new_top == -float("inf"), 0.0, new_top)  # nothing seen yet: -inf - -inf is NaN
        weights = tl.exp2(scores - finite_top[:, None])
        faded = tl.exp2(top - finite_top)
        total = total * faded + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(c.dtype), c, acc * faded[:, None], input_precision="ieee")
        top = new_top

    o_row = ((b * M + row) * splits + split) * R
    o_tile = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(o + o_row[:, None] + r[None, :], o_tile.to(o.dtype.element_ty), mask=in_rows[:, None] & (r < R)[None, :])
    tl.store(lse + (b * M + row) * splits + split, top + tl.log2(total), mask=in_rows)


@triton.jit(do_not_specialize=["splits"])
def absorbed_join_kernel(partial, lse, o, splits, R: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr):
    """Grid (B * M, blocks of R): the mean of the partial outputs, weighted by their share of the softmax."""
    row = tl.program_id(0).to(tl.int64)
    r = tl.program_id(1) * BR + tl.arange(0, BR)
    n = tl.arange(0, BN)
    parts = tl.load(lse + row * splits + n, mask=n < splits, other=-float("inf"))
    top = tl.max(parts, axis=0)
    weights = tl.exp2(parts - tl.where(top == -float("inf"), 0.0, top))
    weights = weights / tl.maximum(tl.sum(weights, axis=0), 1e-30)
    tile = tl.load(
        partial + (row * splits + n[:, None]) * R + r[None, :],
        mask=(n < splits)[:, None] & (r < R)[None, :],
        other=0.0,
    )
    tl.store(o + row * R + r, tl.sum(tile * weights[:, None], axis=0).to(o.dtype.element_ty), mask=r < R)


class LaunchShape(NamedTuple):
    """Tile of a program, and how it runs.

    Attributes:
        BM: Query vectors. BN: cached tokens.
        programs: How many are launched per multiprocessor: one hides the latency of another.
        gluon: Whether `triton_hopper.hopper_split_kernel` runs; it knows one tile only.
    """

    BM: int
    BN: int
    num_warps: int
    num_stages: int
    programs: int = 1
    gluon: bool = False


HOPPER = LaunchShape(64, 64, 4, 2, gluon=True)
"""Its only tile: the matrix units know no fewer rows than 64, and two tiles of tokens fill the shared memory. The
warps are those of one of its three groups."""
HOPPER_VECTORS = 17
"""Fewest query vectors of a row for which it was faster, on an H200."""
FASTEST = (LaunchShape(16, 64, 4, 3, 2), LaunchShape(32, 32, 4, 3, 2), LaunchShape(64, 64, 8, 2, 1))
"""For 16-bit inputs, by number of query vectors; measured on an H200 for R + Q = 224, 320 and 576."""


def launch_shape(vectors: int, width: int, itemsize: int, shared_memory: int) -> LaunchShape:
    """The tile that was fastest, cut down until it fits the shared memory of the device.

    Args:
        vectors: M, query vectors of a row.
        width: R + Q, each rounded up to a power of two.
        itemsize: Bytes per element.
        shared_memory: Bytes of shared memory of a program.
    """
    shape = next((shape for shape in FASTEST if vectors <= shape.BM), FASTEST[-1])
    if itemsize > 2:  # exact products, without matrix units
        shape = LaunchShape(shape.BM, 64, 8 if shape.BM * width > 8192 else 4, 2)
    while (shape.BM + shape.BN * shape.num_stages) * width > shared_memory // itemsize - SHARED_MEMORY_RESERVE:
        if shape.num_stages > 2:
            shape = shape._replace(num_stages=2)
        elif shape.BN > 32:
            shape = shape._replace(BN=32)
        elif shape.num_stages > 1 and itemsize > 2:
            # Not in 16 bits: without a pipeline a tile is laid out twice, as a right and as a left operand.
            shape = shape._replace(num_stages=1)
        elif shape.BN > 16:
            shape = shape._replace(BN=16)
        elif shape.BM > 16:
            shape = shape._replace(BM=shape.BM // 2)
        else:
            raise ValueError(f"a latent of {width} values does not fit {shared_memory} bytes of shared memory.")
    return shape


@functools.cache
def gluon_kernels(capability: tuple[int, int]) -> ModuleType | None:
    """The module of kernels for GPUs of this compute capability, if there is one."""
    if not hopper_kernels_run("latent_attention", capability):
        return None
    from deltalatent.kernels.latent_attention import triton_hopper

    return triton_hopper


def num_splits(vectors: int, batch_size: int, tokens: int, shape: LaunchShape, processors: int) -> int:
    """Parts into which the cache is cut: enough to fill the device, but none of fewer than `MINIMUM_SPLIT` tokens."""
    programs = batch_size * cdiv(vectors, shape.BM)
    wanted = processors * shape.programs // programs
    return max(1, min(wanted, cdiv(tokens, MINIMUM_SPLIT), MAXIMUM_SPLITS))


def _run(
    query: torch.Tensor,
    shared_query: torch.Tensor,
    latent: torch.Tensor,
    shared_key: torch.Tensor,
    mask: torch.Tensor | None,
    end: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    return launch(query, shared_query, latent, shared_key, mask, end, scale)


@on_its_device
def launch(
    query: torch.Tensor,
    shared_query: torch.Tensor,
    latent: torch.Tensor,
    shared_key: torch.Tensor,
    mask: torch.Tensor | None,
    end: torch.Tensor | None,
    scale: float,
    shape: LaunchShape | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """The two kernels; `shape` and `splits` replace the choice made here."""
    batch_size, length, num_heads, rank = query.shape
    tokens, shared_width = shared_key.shape[1:]
    vectors = length * num_heads
    o = torch.empty_like(query, memory_format=torch.contiguous_format)
    if o.numel() == 0:
        return o
    block_r, block_q = (max(16, next_power_of_2(width)) for width in (rank, shared_width))
    limits = device_limits(query.device)
    gluon = gluon_kernels(limits.capability)
    if shape is None:
        if gluon is not None and vectors >= HOPPER_VECTORS and gluon.takes(query, shared_query, latent, shared_key):
            shape = HOPPER
        else:
            shape = launch_shape(vectors, block_r + block_q, query.element_size(), limits.shared_memory)
    splits = splits or num_splits(vectors, batch_size, tokens, shape, limits.processors)

    # The last axis of everything is read in steps of one.
    query, shared_query, latent, shared_key = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (query, shared_query, latent, shared_key)
    )
    partial = o
    if splits > 1:
        partial = torch.empty(batch_size, vectors, splits, rank, dtype=torch.float32, device=o.device)
    lse = torch.empty(batch_size, vectors, splits, dtype=torch.float32, device=o.device)
    seen = None
    seen_b = mask_b = mask_t = end_b = 0
    if mask is not None:
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        mask_b, mask_t = (mask.stride(i) if mask.shape[i] > 1 else 0 for i in (0, 1))
        seen = mask[:, 0] if mask.shape[1] == 1 else mask.any(1)  # by some query
        seen_b = seen.stride(0) if seen.shape[0] > 1 else 0
    if end is not None:
        end_b = end.stride(0) if end.numel() > 1 else 0
    kernel, options = absorbed_split_kernel, {"BR": block_r, "BQ": block_q, "num_stages": shape.num_stages}
    if shape.gluon and gluon is not None:
        kernel, options = gluon.hopper_split_kernel, {}
    kernel[(batch_size * cdiv(vectors, shape.BM), splits)](
        query,
        shared_query,
        latent,
        shared_key,
        o if seen is None else seen.view(torch.uint8),
        o if mask is None else mask.view(torch.uint8),
        o if end is None else end,
        partial,
        lse,
        length,
        tokens,
        splits,
        scale * LOG2_E,
        *query.stride()[:3],
        *shared_query.stride()[:3],
        *latent.stride()[:2],
        *shared_key.stride()[:2],
        seen_b,
        mask_b,
        mask_t,
        end_b,
        H=num_heads,
        R=rank,
        Q=shared_width,
        BM=shape.BM,
        BN=shape.BN,
        HAS_MASK=mask is not None,
        MASK_PER_TOKEN=mask_t != 0,
        HAS_END=end is not None,
        num_warps=shape.num_warps,
        **options,
    )
    if splits > 1:
        block_r = min(block_r, 64)
        absorbed_join_kernel[(batch_size * vectors, cdiv(rank, block_r))](
            partial, lse, o, splits, R=rank, BN=next_power_of_2(splits), BR=block_r, num_warps=4
        )
    return o


# For `torch.compile`; eager calls do without the operator, which costs the host more than the launch.
latent_attention_op = torch.library.custom_op("deltalatent::latent_attention", _run, mutates_args=())


@latent_attention_op.register_fake
def _(query, shared_query, latent, shared_key, mask, end, scale):
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def absorbed_triton(
    query: torch.Tensor,
    shared_query: torch.Tensor,
    latent: torch.Tensor,
    shared_key: torch.Tensor,
    mask: torch.Tensor | None,
    end: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Arguments and result as `latent_attention`, checked by it; no gradient."""
    run = latent_attention_op if torch.compiler.is_compiling() else _run
    return run(query, shared_query, latent, shared_key, mask, end, scale)
