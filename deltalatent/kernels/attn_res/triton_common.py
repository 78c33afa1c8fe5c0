# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What the Triton kernels of depth mixing share.

The sources are separate tensors. A kernel takes a tuple of pointers, padded to one of few lengths so that few kernels
are compiled.
"""

import torch
import triton
import triton.language as tl

# Lengths to which the tuple of sources is padded; the released model has up to 9.
SOURCE_COUNTS = (4, 9, 16)


@triton.jit
def load_vector(pointer, column, D):
    return tl.load(pointer + column, mask=column < D, other=0.0).to(tl.float32)


@triton.jit
def load_query(query, key_weight, column, D):
    """The vector that scores are products with, [BD]."""
    w = load_vector(query, column, D)
    if key_weight is not None:
        w *= load_vector(key_weight, column, D)
    return w


@triton.jit
def inverse_rms(square, D, eps):
    """From a sum of squares; rounded correctly, because a score multiplies its error."""
    return tl.div_rn(1.0, tl.sqrt_rn(square / D + eps))


def padded(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The tensors, and the first of them again and again up to one of the lengths."""
    length = next(count for count in SOURCE_COUNTS if count >= len(tensors))
    return (*tensors, *(tensors[:1] * (length - len(tensors))))
