# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole-number arithmetic of launches."""

import math
from types import SimpleNamespace

import pytest
import torch

from deltalatent.kernels.tiles import (
    AMD_SHARED_MEMORY,
    INTERPRETER_LIMITS,
    DeviceLimits,
    cdiv,
    device_limits,
    next_power_of_2,
)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 127, 128, 129, 2**40 - 1, 2**40 + 1])
def test_arithmetic(n):
    power = next_power_of_2(n)
    assert power >= n and power < 2 * n and power.bit_count() == 1
    for b in (1, 3, 16, 2**33):
        assert cdiv(n, b) == n // b + (n % b > 0)
    assert cdiv(0, 16) == 0
    assert cdiv(10, 16) == math.ceil(10 / 16)


def test_device_is_asked_once(monkeypatch):
    asked = []

    def properties(device):
        asked.append(device)
        if torch.version.hip is not None:
            return SimpleNamespace(multi_processor_count=304, major=9, minor=4)
        return SimpleNamespace(shared_memory_per_block_optin=166912, multi_processor_count=108, major=8, minor=0)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.version, "hip", None)
    device_limits.cache_clear()
    try:
        for _ in range(2):
            assert device_limits(torch.device("cuda", 7)) == DeviceLimits(166912, 108, (8, 0))
        monkeypatch.setattr(torch.version, "hip", "7.0")
        assert device_limits(torch.device("cuda", 6)) == DeviceLimits(AMD_SHARED_MEMORY, 304, (0, 0))
        assert device_limits(torch.device("cpu")) is INTERPRETER_LIMITS
    finally:
        device_limits.cache_clear()
    assert [device.index for device in asked] == [7, 6]
