# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention on keys and values of heads, wider keys than values: which kernel of PyTorch runs, and over what.

For 192-wide keys and 128-wide values, training runs four times slower on any other kernel than cuDNN's or
FlashAttention's, and those take no mask. Without one, everything that a mask would say must be said by the shapes.

B rows, H heads, T query tokens, S key tokens, E key width, V value width.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad, scaled_dot_product_attention

logger = logging.getLogger(__name__)

FAST = (SDPBackend.CUDNN_ATTENTION.value, SDPBackend.FLASH_ATTENTION.value)
SCORES_PER_BLOCK = 1 << 24
"""Scores held at a time where no fused kernel gives a log-sum-exp."""

_warned: set[str] = set()


def causal_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float, dropout: float = 0.0) -> Tensor:
    """Causal softmax attention of T tokens among themselves, memory linear in T.

    Values are padded to the width of keys where only that lets a fused kernel run: on a CPU, and on GPUs without the
    cuDNN kernel. CUDA training that ends up in PyTorch's memory-efficient or plain kernel, several times slower, says
    so once in a warning.

    Args:
        query, key: [B, H, T, E]. value: [B, H, T, V]. Any strides, one floating dtype.
        scale: Factor on the scores.
        dropout: Probability.

    Returns:
        [B, H, T, V]. Differentiable.
    """
    width = value.shape[-1]
    if _wants_equal_widths(query, key, value, dropout):
        value = pad(value, (0, key.shape[-1] - width))
    return scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, scale=scale)[..., :width]


def _wants_equal_widths(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    narrower = value.shape[-1] < key.shape[-1]
    if query.device.type == "cpu":
        return narrower
    if query.device.type != "cuda" or torch.compiler.is_compiling() or _kernel(query, key, value, dropout) in FAST:
        return False
    if narrower and _kernel(query, key, key, dropout) in FAST:
        return True
    if query.requires_grad:
        _warn_slow(query, value)
    return False


def _kernel(query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, is_causal: bool = True) -> int:
    """Number of the kernel (`SDPBackend`) that PyTorch would run."""
    return torch._fused_sdp_choice(query, key, value, None, dropout, is_causal)


def _warn_slow(query: Tensor, value: Tensor) -> None:
    if query.dtype not in (torch.float16, torch.bfloat16):
        cause = f"{query.dtype} has no fast kernel: train in bfloat16, or under autocast"
    else:
        cause = (
            f"neither cuDNN nor FlashAttention takes widths {query.shape[-1]} and {value.shape[-1]} on this GPU, or "
            "they are switched off (`torch.backends.cuda.enable_cudnn_sdp`, `enable_flash_sdp`)"
        )
    if cause not in _warned:
        _warned.add(cause)
        logger.warning("latent attention trains with a slow kernel of PyTorch: %s", cause)


def keys_and_values(per_head: Tensor, shared_key: Tensor, own_width: int) -> tuple[Tensor, Tensor]:
    """Keys of heads, of which the last Q values are the same for all of them, and values.

    Args:
        per_head: [B, S, H, P + V], own parts of the keys, and values.
        shared_key: [B, S, Q]. own_width: P.

    Returns:
        Keys [B, S, H, P + Q], and values [B, S, H, V], a view. Differentiable.
    """
    return _KeysAndValues.apply(per_head, shared_key, own_width)


class _KeysAndValues(torch.autograd.Function):
    """What concatenating and splitting would do; the gradient of the split is put together the same way.

    PyTorch concatenates strided parts at a fifth of the memory bandwidth of an H200, once each way: a sixth of a
    layer's forward over 8 x 1024 tokens, and an eighth of both passes.
    """

    @staticmethod
    def forward(ctx, per_head: Tensor, shared_key: Tensor, own_width: int) -> tuple[Tensor, Tensor]:
        ctx.own_width = own_width
        own_key, value = per_head[..., :own_width], per_head[..., own_width:]
        return _side_by_side(own_key, shared_key.unsqueeze(-2)), value

    @staticmethod
    def backward(ctx, grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor, Tensor, None]:
        own, shared = grad_key[..., : ctx.own_width], grad_key[..., ctx.own_width :]
        return _side_by_side(own, grad_value), shared.sum(-2), None


def _side_by_side(left: Tensor, right: Tensor) -> Tensor:
    """[..., H, x] and [..., H or 1, y] -> [..., H, x + y]."""
    if torch.is_grad_enabled():  # in a backward that is differentiated itself
        return torch.cat([left, right.expand(*left.shape[:-1], -1)], dim=-1)
    both = left.new_empty(*left.shape[:-1], left.shape[-1] + right.shape[-1])
    for part, source in ((both[..., : left.shape[-1]], left), (both[..., left.shape[-1] :], right)):
        # Strided rows are copied an element at a time: let an element be 16 bytes. Compilers make their own copies.
        if not torch.compiler.is_compiling() and _has_rows_of_16_bytes(part, source):
            part, source = part.view(torch.complex128), source.view(torch.complex128)
        part.copy_(source)
    return both


def _has_rows_of_16_bytes(*tensors: Tensor) -> bool:
    step = 16 // tensors[0].element_size()
    return len({x.dtype for x in tensors}) == 1 and all(
        x.stride(-1) == 1 and all(n % step == 0 for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
        for x in tensors
    )


class KeyBlock(NamedTuple):
    """Some of the tokens in view, with keys and values of heads.

    Attributes:
        key: [B, H, S, E]. value: [B, H, S, V].
        mask: bool [B or 1, 1, T or 1, S], True at tokens that may be seen; `None`: all.
        is_causal: Query t sees the first t + 1 tokens of the block; needs S = T and no mask.
    """

    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    is_causal: bool = False


def blockwise_attention(query: Tensor, blocks: Iterable[KeyBlock], *, scale: float) -> Tensor:
    """Softmax attention over blocks of keys that need not exist at the same time, as for prefill behind a cache.

    Blocks are attended to one by one, and the results joined by their log-sum-exp (Milakov and Gimelshein,
    arXiv 1805.02867). With a generator as `blocks`, the workspace is one block and the float32 result. No gradient.

    Args:
        query: [B, H, T, E].
        blocks: The parts, together all that the queries see, in any order.
        scale: Factor on the scores.

    Returns:
        [B, H, T, V] in the dtype of `query`; zero for queries that see nothing.
    """
    joined = top = None
    for block in blocks:
        output, lse = _partial(query, block, scale)  # lse [B, H, T]
        del block  # before the next one is made
        output = output.to(lse.dtype)
        if joined is None or top is None:
            joined, top = output, lse
            continue
        new_top = torch.logaddexp(top, lse)
        finite_top = new_top.masked_fill(new_top == -torch.inf, 0)
        joined = joined.mul_(torch.exp(top - finite_top)[..., None]).addcmul_(
            output, torch.exp(lse - finite_top)[..., None]
        )
        top = new_top
    if joined is None:
        raise ValueError("`blocks` must hold at least one block of keys, got none.")
    return joined.to(query.dtype)


def _partial(query: Tensor, block: KeyBlock, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention over one block [B, H, T, V], and the log-sum-exp of its scores [B, H, T], float32 or wider."""
    key, value, mask, is_causal = block
    width = value.shape[-1]
    if query.device.type == "cuda" and mask is None:
        padded = value
        kernel = _kernel(query, key, value, is_causal=is_causal)
        if kernel not in FAST and width < key.shape[-1]:
            padded = pad(value, (0, key.shape[-1] - width))
            kernel = _kernel(query, key, padded, is_causal=is_causal)
        if kernel == SDPBackend.CUDNN_ATTENTION.value:
            output, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
                query, key, padded, None, True, 0.0, is_causal, scale=scale
            )[:2]
            return output[..., :width], lse.view(query.shape[:3])
        if kernel == SDPBackend.FLASH_ATTENTION.value:
            output, lse = torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, padded, 0.0, is_causal, scale=scale
            )[:2]
            return output[..., :width], lse[..., : query.shape[2]]
    return _plain_partial(query, block, scale)


def _plain_partial(query: Tensor, block: KeyBlock, scale: float) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch, over as many query tokens at a time as a bounded matrix of scores allows."""
    key, value, mask, is_causal = block
    dtype = torch.promote_types(query.dtype, torch.float32)
    batch_size, num_heads, length, _ = query.shape
    tokens = key.shape[2]
    step = max(1, SCORES_PER_BLOCK // max(1, batch_size * num_heads * tokens))
    outputs, sums = [], []
    for start in range(0, length, step):
        part = query[:, :, start : start + step]
        scores = (part @ key.transpose(2, 3)).to(dtype) * scale
        if is_causal:
            token = torch.arange(start, start + part.shape[2], device=query.device)[:, None]
            scores = scores.masked_fill(torch.arange(tokens, device=query.device) > token, -torch.inf)
        if mask is not None:
            visible = mask if mask.shape[2] == 1 else mask[:, :, start : start + step]
            scores = scores.masked_fill(~visible, -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])
        outputs.append(weights.to(value.dtype) @ value)
        sums.append(lse)
    return torch.cat(outputs, dim=2), torch.cat(sums, dim=2)
