# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What every test starts from: the same random numbers, one thread, NaN in memory that nobody wrote."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def reproducible() -> Iterator[None]:
    """Seed all generators; fill `torch.empty` with NaN (integers: the largest), so that reading it gets noticed.

    Filling is part of PyTorch's deterministic mode; operators without a deterministic form only warn.
    """
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = filled
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.set_num_threads(threads)
    if "torch._dynamo" in sys.modules:
        # Graphs of earlier tests count against the recompilation limit, past which `compile` silently runs eagerly.
        torch._dynamo.reset()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, none is available"))
