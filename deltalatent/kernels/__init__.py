# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Operators of the hybrid delta-attention model, one folder per operator.

Import an operator from its folder, e.g. `from deltalatent.kernels.short_conv import short_convolution`. Nothing is
imported here, so that using one operator does not load the others, and nothing below imports Triton before it runs.
`accelerate` and `restore`, which put the operators into models that Transformers ships, are loaded on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltalatent.kernels.acceleration import accelerate, restore

__all__ = ["accelerate", "restore"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from deltalatent.kernels import acceleration

    return getattr(acceleration, name)
