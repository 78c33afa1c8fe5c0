# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Public function of absorbed latent attention."""

import torch

from deltalatent.kernels.dispatch import Obstacle, resolve_impl, triton_obstacle
from deltalatent.kernels.latent_attention.reference import latent_attention_reference
from deltalatent.kernels.latent_attention.validation import validate_latent_attention

TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TRITON_RANK = 512
TRITON_SHARED_WIDTH = 128


def latent_attention(
    query: torch.Tensor,
    shared_query: torch.Tensor,
    latent: torch.Tensor,
    shared_key: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    r"""Attention of a few query tokens on the latents themselves, for decoding with a cache of latents.

    Source: DeepSeek-V2 (arXiv 2405.04434, section 2.1.2), the form in which the up-projections of keys and values are
    absorbed into the query and the output. For head h and query token t, which stands at place `end - T + t`,

    .. math:: o_{t,h} = \sum_s \mathrm{softmax}_s\big(\mathrm{scale}\,
        (q_{t,h} \cdot c_s + q^S_{t,h} \cdot k^S_s)\big)\, c_s, \qquad s \le \mathrm{end} - T + t

    Neither keys nor values of heads are made; the workspace does not grow with S, except for T*H*N partial outputs of
    N <= 512 parts of the cache in the Triton form.

    Args:
        query: [B, T, H, R], own part of the query, projected into the latent; bf16, fp16, fp32 or fp64.
        shared_query: [B, T, H, Q], the part that meets the key part which all heads share; dtype of `query`.
        latent: [B, S, R], normalised latents of the cached tokens, the T new ones included; dtype of `query`.
        shared_key: [B, S, Q], shared key parts of the same tokens.
        scale: Factor on the scores.
        mask: bool [B or 1, T or 1, S], True at tokens that may be seen; None if causality is all. A token that it
            shows to no query of the row is not read: it may hold anything.
        end: int32 or int64 [B], [1] or [], how many of the S tokens a row has, the new ones included, S at most; what
            follows is not read. None: all S.
        impl: `"auto"`, `"triton"` (R up to 512, Q up to 128, no gradients) or `"torch"`.

    Returns:
        [B, T, H, R] in the dtype of `query`; zero for a query that sees nothing. Softmax and sums in float32 (float64
        for float64 inputs). Differentiable in the four tensors with `"torch"`.

    Raises:
        ValueError, TypeError: the arguments do not fit together; the message says what was expected.
    """
    validate_latent_attention(query, shared_query, latent, shared_key, mask, end)
    tensors = (query, shared_query, latent, shared_key)
    reasons = {"triton": _triton_obstacle(tensors), "torch": None}
    if resolve_impl("latent_attention", impl, device=query.device, reasons=reasons) == "triton":
        from deltalatent.kernels.latent_attention.triton_absorbed import absorbed_triton

        return absorbed_triton(*tensors, mask, end, scale)
    return latent_attention_reference(*tensors, scale=scale, mask=mask, end=end)


def _triton_obstacle(tensors: tuple[torch.Tensor, ...]) -> Obstacle | None:
    query, shared_query = tensors[:2]
    if query.dtype not in TRITON_DTYPES:
        return Obstacle(
            f"the Triton kernels take float32, float16 or bfloat16, got {query.dtype}: use 'torch'", TypeError
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return Obstacle("the Triton kernels have no gradient: call them under `torch.no_grad()`, or use 'torch'")
    if query.shape[3] > TRITON_RANK or shared_query.shape[3] > TRITON_SHARED_WIDTH:
        widths = f"R = {query.shape[3]} and Q = {shared_query.shape[3]}"
        return Obstacle(
            f"the Triton kernels take R up to {TRITON_RANK} and Q up to {TRITON_SHARED_WIDTH}, got {widths}: "
            "use 'torch'"
        )
    return triton_obstacle(query.device)
