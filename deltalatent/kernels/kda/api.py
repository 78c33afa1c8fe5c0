# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Public entry points of Kimi delta attention; the alphabet is that of `reference.py`."""

from __future__ import annotations

import torch

from deltalatent.kernels.dispatch import resolve_impl
from deltalatent.kernels.kda.reference import kda_chunk_reference, kda_recurrent_reference
from deltalatent.kernels.kda.validation import validate_kda_inputs

# Fastest of 16, 32 and 64 on a CPU at the head sizes of small models; the result does not depend on it.
TORCH_CHUNK_SIZE = 32


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
            g = -exp(A_log) * softplus(g + dt_bias).
        scale: factor on the normalised query, default K**-0.5.
        initial_state: [N, HV, K, V] fp32, zeros when None. N = B, or the number of documents when packed.
        cu_seqlens: [N+1] int32 or int64 offsets of documents packed into one row (B = 1). Documents may be
            empty; rows from `cu_seqlens[-1]` on belong to no document.
        output_final_state: also return the state after the last token of every document.
        chunk_size: tokens per chunk, a multiple of 16; None lets the implementation choose.
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
    resolve_impl("kda_chunk", impl, device=q.device, reasons={"torch": None})
    return kda_chunk_reference(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        gate_lower_bound=gate_lower_bound,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        output_final_state=output_final_state,
        chunk_size=chunk_size or TORCH_CHUNK_SIZE,
    )


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
    resolve_impl("kda_recurrent", impl, device=q.device, reasons={"torch": None})
    o, final_state = kda_recurrent_reference(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        gate_lower_bound=gate_lower_bound,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        output_final_state=output_final_state or inplace_state,
    )
    if inplace_state:
        with torch.no_grad():
            initial_state.copy_(final_state)
        final_state = initial_state
    return o, final_state
