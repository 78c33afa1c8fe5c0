# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Configurations and ready-made sizes; imports no torch of its own."""
