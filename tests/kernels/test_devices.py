# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Kernels run where their tensors are: Triton launches on PyTorch's current device, which may be another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import deltalatent.kernels
from deltalatent.kernels import dispatch, tiles
from deltalatent.modeling.modeling_kimi_k3 import KimiK3TextModel
from tests.kernels.triton_testing import needs_launches
from tests.testing_common import random_ids, tiny_model


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[torch.device | None]]:
    """Operators whose kernels are launched, with the device that was made the current one around each launch."""
    from triton.runtime.jit import JITFunction

    current: list[torch.device | None] = [None]
    launched: dict[str, list[torch.device | None]] = {}

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        current.append(wanted)
        yield
        current.pop()

    def launch(kernel, grid):
        operator = kernel.fn.__module__.split(".")[-2]
        return lambda *args, **options: launched.setdefault(operator, []).append(current[-1])

    monkeypatch.setattr(JITFunction, "__getitem__", launch)
    monkeypatch.setattr(dispatch, "_probe_triton", lambda device: None)
    monkeypatch.setattr(tiles, "is_elsewhere", lambda device: True)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(KimiK3TextModel, "_check_token_ids", lambda self, ids: None)  # looks at values, on a CPU only
    return launched


@needs_launches
def test_every_operator_launches_on_the_device_of_its_tensors(launches: dict[str, list[torch.device | None]]) -> None:
    model = tiny_model().train()
    model.set_experts_implementation("deltalatent")
    ids = random_ids(model.config, 2, 40)
    model(ids, labels=ids).loss.backward()
    packed = torch.arange(40).remainder(13)[None]
    model(ids[:1], labels=ids[:1], position_ids=packed).loss.backward()
    model.eval()
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        for piece in (ids, ids[:, :1]):
            model(piece, cache=cache)
    operators = {file.parent.name for file in Path(deltalatent.kernels.__file__).parent.glob("*/triton_*.py")}
    assert set(launches) == operators
    assert {device for devices in launches.values() for device in devices} == {ids.device}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_on_the_second_gpu() -> None:
    """While the first is the current one: loss, gradients and tokens are those of the first, to the bit."""
    results = []
    for device in ("cuda:0", "cuda:1"):
        model = tiny_model().to(device)
        ids = random_ids(model.config, 2, 40).to(device)
        loss = model(ids, labels=ids).loss
        loss.backward()
        greedy = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        tokens = [model.generate(ids, **greedy, **kind) for kind in ({}, {"cache_implementation": "static"})]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([tensor.cpu() for tensor in (loss.detach(), *gradients, *tokens)])
        assert torch.cuda.current_device() == 0
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
