# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Arithmetic that autocast must leave alone."""

from contextlib import AbstractContextManager, nullcontext

import torch


def float32_autocast_disabled(device: torch.device) -> AbstractContextManager:
    """Context in which autocast does not touch float32 arithmetic on `device`."""
    kind = device.type
    # Of the devices in use only "meta" knows no autocast. PyTorch 2.11 cannot trace `torch.amp.is_autocast_available`.
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(device_type=kind, enabled=False)
