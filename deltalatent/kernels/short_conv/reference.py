# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch form of the short convolution: readable, differentiable, any floating dtype.

Alphabet: B rows, T tokens, D channels, W taps, N documents.
"""

import torch
from torch.nn import functional as F

from deltalatent.kernels.packing import document_index


def short_convolution_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = "silu",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Causal depthwise convolution of one stream; see `short_convolution` for the equation.

    Args:
        x: [B, T, D], any floating dtype.
        weight: [D, 1, W], last tap multiplies the current token.
        initial_state: [N, D, W-1], the inputs before each document, oldest first; `None` means zeros.
        cu_seqlens: [N+1] document offsets of a packed row (then B = 1), or `None` (then N = B).
        output_final_state: whether to return the last W-1 inputs of each document.
        activation: `"silu"` or `None`.

    Returns:
        `y` [B, T, D] in the dtype of `x`, and the final state [N, D, W-1] in the dtype of `x` or `None`.
        The sum is accumulated in float32 (float64 for float64 inputs).
    """
    batch_size, total, channels = x.shape
    history = weight.shape[-1] - 1
    if cu_seqlens is None:
        if initial_state is None:
            initial_state = x.new_zeros(batch_size, channels, history)
        padded = torch.cat([initial_state.to(x.dtype).transpose(1, 2), x], dim=1)  # [B, W-1+T, D]
        y = _convolve(padded, weight, activation).to(x.dtype)
        return y, padded[:, total:].transpose(1, 2).contiguous() if output_final_state else None

    # Packed: lay the documents out behind one another, each with W-1 rows of its own history before it, so that one
    # ordinary convolution cannot see across a boundary. Slack becomes a further document without values.
    num_documents = cu_seqlens.numel() - 1
    document = document_index(cu_seqlens, total)  # [T]
    row = torch.arange(total, device=x.device) + (document + 1) * history  # of each token, [T]
    taps = torch.arange(history, device=x.device)
    shift = torch.arange(num_documents, device=x.device)[:, None] * history  # [N, 1]
    starts, ends = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()  # [N, 1]

    tokens = x[0].masked_fill((document == num_documents)[:, None], 0)  # [T, D]
    padded = x.new_zeros(total + (num_documents + 1) * history, channels).index_copy(0, row, tokens)
    if initial_state is not None:
        rows = (starts + shift + taps).flatten()
        padded = padded.index_copy(0, rows, initial_state.to(x.dtype).transpose(1, 2).reshape(-1, channels))
    y = _convolve(padded, weight, activation).index_select(0, row - history)[None].to(x.dtype)
    if not output_final_state:
        return y, None
    # The W-1 rows before the end of each document; a document shorter than that reaches into its own history.
    final = padded.index_select(0, (ends + shift + taps).flatten())
    return y, final.view(num_documents, history, channels).transpose(1, 2).contiguous()


def _convolve(padded: torch.Tensor, weight: torch.Tensor, activation: str | None) -> torch.Tensor:
    """[..., W-1+T, D] -> [..., T, D] in the accumulation dtype, oldest tap first."""
    dtype = torch.promote_types(padded.dtype, torch.float32)
    width = weight.shape[-1]
    total = padded.shape[-2] - (width - 1)
    padded, taps = padded.to(dtype), weight[:, 0].to(dtype).unbind(-1)
    # One multiply-add per tap keeps the layout: no transposes, and faster forward + backward than `F.conv1d` on a CPU.
    y = padded.narrow(-2, 0, total) * taps[0]
    for j in range(1, width):
        y = torch.addcmul(y, padded.narrow(-2, j, total), taps[j])
    return F.silu(y) if activation == "silu" else y
