# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Causal depthwise short convolution with activation, for one or several streams."""

from deltalatent.kernels.short_conv.api import short_convolution
from deltalatent.kernels.short_conv.reference import short_convolution_reference

__all__ = ["short_convolution", "short_convolution_reference"]
