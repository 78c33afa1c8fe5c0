# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Triton kernel of the KDA decode step: one to a few tokens per document, state read and written once.

Alphabet: B rows, T tokens, N documents, H key heads, HV value heads, K key width, V value width.

A program owns BV value columns of the state of one head of one document, [K, BV] in registers, and walks over the
tokens. L2 normalisation, gate and write strength are computed in it, in float32. With the decayed state S, the
read-out of the updated state is `q^T (S + k u^T) = q^T S + (q . k) u`, so that prediction and read-out are two
independent sums over the same tile. The bytes floor is the state, twice: nothing else is of its size. For inference
only; everything is known on the host, so that a launch can be captured in a CUDA graph.
"""

import torch
import triton
import triton.language as tl

from deltalatent.kernels.tiles import cdiv, next_power_of_2, on_its_device

L2_EPS = 1e-6
MAX_KEY_WIDTH = 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def kda_recurrent_kernel(
    q,
    k,
    v,
    g,
    beta,
    A_log,
    dt_bias,
    o,
    initial_state,
    final_state,
    cu_seqlens,
    T,
    scale,
    gate_lower_bound,
    eps,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PACKED: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    STORE_FINAL: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    value_blocks: tl.constexpr = (V + BV - 1) // BV
    head_of_document = tl.program_id(0) // value_blocks
    head = head_of_document % HV
    n = (head_of_document // HV).to(tl.int64)
    key_head = head // (HV // H)

    row = tl.arange(0, BK)
    column = (tl.program_id(0) % value_blocks) * BV + tl.arange(0, BV)
    in_keys = row < K
    in_values = column < V
    tile = (n * HV + head) * K * V + row[:, None] * V + column[None, :]
    in_tile = in_keys[:, None] & in_values[None, :]
    S = tl.zeros([BK, BV], tl.float32)
    if HAS_INITIAL:
        S = tl.load(initial_state + tile, mask=in_tile, other=0.0)
    if PACKED:
        begin = tl.load(cu_seqlens + n).to(tl.int64)
        length = (tl.load(cu_seqlens + n + 1).to(tl.int64) - begin).to(tl.int32)
    else:
        begin = n * T
        length = T
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head * K + row, mask=in_keys, other=0.0).to(tl.float32)

    for step in range(length):
        token = begin + step
        key_offset = (token * H + key_head) * K + row
        value_offset = (token * HV + head) * V + column
        q_t = tl.load(q + key_offset, mask=in_keys, other=0.0).to(tl.float32)
        k_t = tl.load(k + key_offset, mask=in_keys, other=0.0).to(tl.float32)
        g_t = tl.load(g + (token * HV + head) * K + row, mask=in_keys, other=0.0).to(tl.float32)
        v_t = tl.load(v + value_offset, mask=in_values, other=0.0).to(tl.float32)
        b_t = tl.sigmoid(tl.load(beta + token * HV + head).to(tl.float32))
        q_t *= tl.rsqrt(tl.sum(q_t * q_t, axis=0) + eps) * scale
        k_t *= tl.rsqrt(tl.sum(k_t * k_t, axis=0) + eps)
        logits = g_t + bias
        if BOUNDED:
            log_decay = gate_lower_bound * tl.sigmoid(rate * logits)
        else:
            log_decay = -rate * (tl.maximum(logits, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(logits))))
        S *= tl.exp(log_decay)[:, None]
        predicted = tl.sum(k_t[:, None] * S, axis=0)
        read = tl.sum(q_t[:, None] * S, axis=0)
        u = b_t * (v_t - predicted)
        S += k_t[:, None] * u[None, :]
        o_t = read + tl.sum(q_t * k_t, axis=0) * u
        tl.store(o + value_offset, o_t.to(o.dtype.element_ty), mask=in_values)

    if STORE_FINAL:
        tl.store(final_state + tile, S, mask=in_tile)


def launch_shape(key_width: int, value_width: int) -> tuple[int, int, int]:
    """Tile `(BK, BV)` and warps: about 8192 values for four warps, so that loads and stores of programs overlap."""
    block_k = next_power_of_2(key_width)
    block_v = min(next_power_of_2(value_width), max(16, min(64, 8192 // block_k)))
    return block_k, block_v, 4 if block_k * block_v > 2048 else 1


@on_its_device
def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_state: torch.Tensor | None,
    final_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    gate_lower_bound: float | None,
    scale: float,
) -> torch.Tensor:
    batch_size, total, num_key_heads, key_width = q.shape
    num_heads, value_width = v.shape[2:]
    packed = cu_seqlens is not None
    num_documents = batch_size if cu_seqlens is None else cu_seqlens.numel() - 1
    # Slack of a packed row belongs to no program.
    allocate = torch.zeros if packed else torch.empty
    o = allocate(v.shape, dtype=v.dtype, device=v.device)
    block_k, block_v, num_warps = launch_shape(key_width, value_width)
    programs = num_documents * num_heads * cdiv(value_width, block_v)
    if programs > 0:
        kda_recurrent_kernel[(programs,)](
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            g.contiguous(),
            beta.contiguous(),
            A_log.contiguous(),
            dt_bias.contiguous(),
            o,
            o if initial_state is None else initial_state.contiguous(),
            o if final_state is None else final_state,
            o if cu_seqlens is None else cu_seqlens.contiguous(),
            total,
            scale,
            0.0 if gate_lower_bound is None else gate_lower_bound,
            L2_EPS,
            H=num_key_heads,
            HV=num_heads,
            K=key_width,
            V=value_width,
            PACKED=packed,
            BOUNDED=gate_lower_bound is not None,
            HAS_INITIAL=initial_state is not None,
            STORE_FINAL=final_state is not None,
            BK=block_k,
            BV=block_v,
            num_warps=num_warps,
        )
    return o


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    gate_lower_bound: float | None,
    scale: float,
    output_final_state: bool,
) -> list[torch.Tensor]:
    final = [_new_state(k, v, cu_seqlens)] if output_final_state else []
    last = final[0] if final else None
    o = _launch(q, k, v, g, beta, A_log, dt_bias, initial_state, last, cu_seqlens, gate_lower_bound, scale)
    return [o, *final]


def _run_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    gate_lower_bound: float | None,
    scale: float,
) -> torch.Tensor:
    return _launch(q, k, v, g, beta, A_log, dt_bias, state, state, cu_seqlens, gate_lower_bound, scale)


# For `torch.compile`; eager calls do without the operators, which cost the host more than the launch.
kda_recurrent_op = torch.library.custom_op("deltalatent::kda_recurrent", _run, mutates_args=())
kda_recurrent_inplace_op = torch.library.custom_op(
    "deltalatent::kda_recurrent_", _run_inplace, mutates_args=("state",)
)


@kda_recurrent_op.register_fake
def _(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, gate_lower_bound, scale, output_final_state):
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    return [o, _new_state(k, v, cu_seqlens)] if output_final_state else [o]


@kda_recurrent_inplace_op.register_fake
def _(q, k, v, g, beta, A_log, dt_bias, state, cu_seqlens, gate_lower_bound, scale):
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)


def _new_state(k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    num_documents = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (num_documents, v.shape[2], k.shape[3], v.shape[3])
    return torch.empty(shape, dtype=torch.float32, device=v.device)


def recurrent_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    gate_lower_bound: float | None = -5.0,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    inplace_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi delta attention token by token in one launch; arguments and results as `kda_recurrent`, checked by it.

    The state must be float32, and contiguous if it is written in place. No gradient.

    Raises:
        ValueError: gradients are wanted, K above 256, or a state that is not contiguous in place.
        TypeError: float64 inputs, or a state that is not float32.
    """
    differentiable = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in differentiable):
        raise ValueError(
            "the Triton form of `kda_recurrent` has no gradient, got inputs that require one: "
            "call it under `torch.no_grad()`, or use impl='torch' or `kda_chunk`."
        )
    for name, tensor in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
        if tensor.dtype not in DTYPES:
            raise TypeError(f"`{name}` must be float32, float16 or bfloat16, got {tensor.dtype}: use impl='torch'.")
    if q.shape[3] > MAX_KEY_WIDTH:
        raise ValueError(f"the key width must be at most {MAX_KEY_WIDTH}, got {q.shape[3]}: use impl='torch'.")
    if initial_state is not None and initial_state.dtype != torch.float32:
        raise TypeError(f"`initial_state` must be float32, got {initial_state.dtype}: keep the state in float32.")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    tensors = (q, k, v, g, beta, A_log, dt_bias)
    compiling = torch.compiler.is_compiling()
    if inplace_state:
        if initial_state is None or not initial_state.is_contiguous():
            got = "None" if initial_state is None else f"strides {initial_state.stride()}"
            raise ValueError(f"`inplace_state` needs a contiguous `initial_state` to write to, got {got}.")
        run_inplace = kda_recurrent_inplace_op if compiling else _run_inplace
        return run_inplace(*tensors, initial_state, cu_seqlens, gate_lower_bound, scale), initial_state
    run = kda_recurrent_op if compiling else _run
    o, *final = run(*tensors, initial_state, cu_seqlens, gate_lower_bound, scale, output_final_state)
    return o, final[0] if final else None
