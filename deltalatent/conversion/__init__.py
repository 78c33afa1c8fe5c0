# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Between the released tensor layout and the model in memory, and from one folder to another."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltalatent.conversion.converter import ConversionReport, convert


def __getattr__(name: str) -> Any:
    """`convert` and its report, on first use: the models import this package while they are being defined."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from deltalatent.conversion import converter

    return getattr(converter, name)


__all__ = ["ConversionReport", "convert"]
