# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The text model in plain PyTorch, layer by layer."""
