# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Public entry points of Kimi delta attention; the alphabet is that of `reference.py`."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

from deltalatent.kernels.dispatch import Obstacle, resolve_impl, triton_obstacle
from deltalatent.kernels.kda import autograd
from deltalatent.kernels.kda.reference import kda_chunk_reference, kda_recurrent_reference
from deltalatent.kernels.kda.validation import TRITON_LOWER_BOUND, validate_kda_inputs

# Fastest of 16, 32 and 64 on a CPU at the head sizes of small models; the result does not depend on it.
TORCH_CHUNK_SIZE = 32

TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TRITON_MAX_WIDTH = 256


def kda_chunk(
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
    cu_seqlens: torch.Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi delta attention over whole sequences, for training and prefill.

    Source: Kimi Linear (arXiv 2510.26692), eq. 1; lower-bounded gate: Kimi K3 report (arXiv 2607.24653). Per token and
    head

        S <- diag(exp(g)) S;   S <- S + b k (v - S^T k)^T;   o = scale * S^T q

    with q, k divided by sqrt(|.|^2 + 1e-6), b = sigmoid(beta) and
    g = gate_lower_bound * sigmoid(exp(A_log) * (g + dt_bias)).

    Args:
        q, k: [B, T, H, K] before L2 normalisation, bf16, fp16, fp32 or fp64.
        v: [B, T, HV, V]; HV is a multiple of H, value head h uses key head h // (HV // H).
        g: [B, T, HV, K] gate logits, before `dt_bias` and `A_log`.
        beta: [B, T, HV] write-strength logits, before the sigmoid.
        A_log: [HV], fp32. dt_bias: [HV*K] or [HV, K], fp32.
        gate_lower_bound: lower bound of the log decay of one token (natural log, < 0); None selects the unbounded gate
            g = -exp(A_log) * softplus(g + dt_bias). Triton takes that for `v` in bf16 or fp16 only: it counts decays
            below e^-10 = 4.5e-5 as that, an error below the rounding of these dtypes but not below that of fp32.
        scale: factor on the normalised query, default K**-0.5.
        initial_state: [N, HV, K, V] fp32, zeros when None. N = B, or the number of documents when packed.
        cu_seqlens: [N+1] int32 or int64 offsets of documents packed into one row (B = 1). Documents may be
            empty; rows from `cu_seqlens[-1]` on belong to no document.
        output_final_state: also return the state after the last token of every document.
        chunk_size: tokens per chunk of the torch form, a multiple of 16; None lets the implementation choose.
        impl: "auto", "triton", "torch" or "fla". "auto" takes Triton for CUDA tensors where it can run.

    Returns:
        o [B, T, HV, V] in the dtype of `v`; rows of no document are zero. Final states [N, HV, K, V] fp32, or None;
        the state of an empty document is its initial state.

    Differentiable in all floating point tensors; gradients of rows of no document are zero. State and accumulation
    are fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError, TypeError: the arguments do not fit together; the message says what was expected.
        ImportError: `impl` names a package that is not installed.
    """
    validate_kda_inputs(q, k, v, g, beta, A_log, dt_bias, gate_lower_bound, initial_state, cu_seqlens)
    reasons = {
        "triton": _chunk_triton_obstacle(q, k, v, g, beta, gate_lower_bound, chunk_size),
        "torch": None,
        "fla": _fla_obstacle(gate_lower_bound),
    }
    chosen = resolve_impl("kda_chunk", impl, device=q.device, reasons=reasons)
    tensors = (q, k, v, g, beta, A_log, dt_bias)
    if chosen == "triton":
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return autograd.kda_chunk((*tensors, initial_state, cu_seqlens), gate_lower_bound, scale, output_final_state)
    options: dict[str, Any] = {
        "gate_lower_bound": gate_lower_bound,
        "scale": scale,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
        "output_final_state": output_final_state,
    }
    if chosen == "fla":
        return _run_fla("chunk_kda", tensors, **options)
    return kda_chunk_reference(*tensors, **options, chunk_size=chunk_size or TORCH_CHUNK_SIZE)


def kda_recurrent(
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
    cu_seqlens: torch.Tensor | None = None,
    output_final_state: bool = False,
    inplace_state: bool = False,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi delta attention one token after the other, for decoding one to a few tokens.

    The function computed is that of `kda_chunk`, and so are the arguments, results and errors, except:

    Args:
        inplace_state: write the final states into `initial_state` (which is then required and returned as the final
            state whatever `output_final_state` says). Not differentiable.
        impl: "triton" is for inference only; "torch" is differentiable.
    """
    validate_kda_inputs(q, k, v, g, beta, A_log, dt_bias, gate_lower_bound, initial_state, cu_seqlens)
    if inplace_state and initial_state is None:
        raise ValueError("`inplace_state=True` needs an `initial_state` to write to, got None.")
    tensors = (q, k, v, g, beta, A_log, dt_bias)
    reasons = {
        "triton": _recurrent_triton_obstacle(tensors, initial_state, inplace_state),
        "torch": None,
        "fla": _fla_obstacle(gate_lower_bound),
    }
    chosen = resolve_impl("kda_recurrent", impl, device=q.device, reasons=reasons)
    options: dict[str, Any] = {
        "gate_lower_bound": gate_lower_bound,
        "scale": scale,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
    }
    if chosen == "triton":
        from deltalatent.kernels.kda.triton_recurrent import recurrent_triton

        return recurrent_triton(
            *tensors, **options, output_final_state=output_final_state, inplace_state=inplace_state
        )
    options["output_final_state"] = output_final_state or inplace_state
    if chosen == "fla":
        o, final_state = _run_fla("fused_recurrent_kda", tensors, **options)
    else:
        o, final_state = kda_recurrent_reference(*tensors, **options)
    if inplace_state and initial_state is not None and final_state is not None:
        with torch.no_grad():
            initial_state.copy_(final_state)
        final_state = initial_state
    return o, final_state


def _chunk_triton_obstacle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    gate_lower_bound: float | None,
    chunk_size: int | None,
) -> Obstacle | None:
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
        if x.dtype not in TRITON_DTYPES:
            reason = f"the Triton kernels take float32, float16 or bfloat16, got {x.dtype} for `{name}`: use 'torch'"
            return Obstacle(reason, TypeError)
    if gate_lower_bound is None and v.dtype == torch.float32:
        return Obstacle(
            "the Triton kernels cut the unbounded gate off at a decay of e^-10 per token, an error that bfloat16 and"
            " float16 hide but float32 would show, got torch.float32 for `v`: use 'torch', or a lower precision"
        )
    if gate_lower_bound is not None and gate_lower_bound < TRITON_LOWER_BOUND:
        return Obstacle(
            "the Triton kernels factor the decay of a tile and would overflow unless `gate_lower_bound` is at least"
            f" {TRITON_LOWER_BOUND}, got {gate_lower_bound}: use 'torch', which is safe for any gate"
        )
    if max(q.shape[3], v.shape[3]) > TRITON_MAX_WIDTH:
        widths = f"K = {q.shape[3]} and V = {v.shape[3]}"
        return Obstacle(f"the Triton kernels take widths up to {TRITON_MAX_WIDTH}, got {widths}: use 'torch'")
    if chunk_size is not None:
        return Obstacle(
            f"the Triton kernels choose the chunk size themselves, got {chunk_size}: pass None, or 'torch'"
        )
    return triton_obstacle(q.device)


def _recurrent_triton_obstacle(
    tensors: tuple[torch.Tensor, ...], initial_state: torch.Tensor | None, inplace_state: bool
) -> Obstacle | None:
    q, v, g = tensors[0], tensors[2], tensors[3]
    for x in tensors[:5]:
        if x.dtype not in TRITON_DTYPES:
            return Obstacle(
                f"the Triton kernel takes float32, float16 or bfloat16, got {x.dtype}: use 'torch'", TypeError
            )
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, initial_state) if x is not None):
        return Obstacle("the Triton kernel has no gradient: call it under `torch.no_grad()`, or use 'torch'")
    if q.shape[3] > TRITON_MAX_WIDTH:
        return Obstacle(f"the Triton kernel takes K up to {TRITON_MAX_WIDTH}, got {g.shape[3]}: use 'torch'")
    if initial_state is not None and initial_state.dtype != torch.float32:
        return Obstacle(f"the state must be float32, got {initial_state.dtype}: keep it in float32", TypeError)
    if inplace_state and initial_state is not None and not initial_state.is_contiguous():
        return Obstacle("an in-place state must be contiguous: pass `.contiguous()`, or use 'torch'")
    return triton_obstacle(v.device)


@torch.compiler.assume_constant_result
def _has_fla() -> bool:
    return _find_fla()


@functools.cache
def _find_fla() -> bool:
    return importlib.util.find_spec("fla") is not None


def _fla_obstacle(gate_lower_bound: float | None) -> Obstacle | None:
    if not _has_fla():
        return Obstacle(
            "the package `flash-linear-attention` is not installed: install it, or use 'auto'", ImportError
        )
    if gate_lower_bound is not None and gate_lower_bound < -5.0:
        return Obstacle(f"flash-linear-attention takes gate bounds from -5 on, got {gate_lower_bound}: use 'auto'")
    return None


def _run_fla(
    name: str,
    tensors: tuple[torch.Tensor, ...],
    gate_lower_bound: float | None,
    scale: float | None,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    output_final_state: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The operator `name` of flash-linear-attention; its rows of no document are undefined and set to zero here."""
    from fla.ops import kda

    q, k, v, g, beta, A_log, dt_bias = tensors
    safe = {"safe_gate": gate_lower_bound is not None} if name == "chunk_kda" else {}
    o, final_state = getattr(kda, name)(
        q,
        k,
        v,
        g,
        beta,
        A_log=A_log.flatten(),
        dt_bias=dt_bias.flatten(),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=gate_lower_bound,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(),
        **safe,
    )
    if cu_seqlens is not None:
        slack = torch.arange(o.shape[1], device=o.device) >= cu_seqlens[-1]
        o = o.masked_fill(slack[None, :, None, None], 0.0)
    return o, final_state
