# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether autocast is on, and arithmetic that it must leave alone."""

from contextlib import AbstractContextManager, nullcontext

import torch


def is_autocasting(device: torch.device) -> bool:
    """Whether autocast is on for `device`; never on "meta", which alone of the devices in use knows no autocast.

    `torch.amp.is_autocast_available` would say so for all devices, but PyTorch 2.11 cannot trace it.
    """
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def float32_autocast_disabled(device: torch.device) -> AbstractContextManager:
    """Context in which autocast does not touch float32 arithmetic on `device`."""
    return torch.autocast(device_type=device.type, enabled=False) if is_autocasting(device) else nullcontext()
