# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Operators of the hybrid delta-attention model, one folder per operator.

Import an operator from its folder, e.g. `from deltalatent.kernels.short_conv import short_convolution`. Nothing is
imported here, so that using one operator does not load the others, and nothing below imports Triton before it runs.
"""
