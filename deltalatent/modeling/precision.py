# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensors that stay float32 whatever dtype the model is cast to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class KeepFloat32(nn.Module):
    """Module whose tensors named in `float32_tensors` survive `.to(torch.bfloat16)`, `.half()` and their like.

    Decay parameters, short-convolution taps, the norm of the read-out and the selection bias lose meaning in half
    precision (updates vanish, experts change), and a later cast back cannot restore them. Device moves, and casts of
    everything else, work as usual. Declaring the tensors is the module's own job; loading at a half-precision dtype is
    covered by `_keep_in_fp32_modules_strict` of the model class.
    """

    float32_tensors: tuple[str, ...] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True):
        tensors = [tensor for name in self.float32_tensors if (tensor := getattr(self, name, None)) is not None]
        kept = {id(tensor) for tensor in (*tensors, *(tensor.grad for tensor in tensors if tensor.is_leaf))}

        def apply_but_keep(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            if id(tensor) not in kept or result.dtype.itemsize >= torch.float32.itemsize:
                return result
            return tensor.to(device=result.device)

        # `recurse` would hand the same function to the children, whose own lists it does not know.
        if recurse:
            for child in self.children():
                child._apply(fn)
        return super()._apply(apply_but_keep, recurse=False)
