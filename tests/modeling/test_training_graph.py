# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""A whole training step as one CUDA graph: the way around the host, which launches more slowly than a GPU computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.whole_model import capture
from deltalatent.configuration.sizes import size_config
from deltalatent.modeling.modeling_kimi_k3 import KimiK3ForCausalLM
from deltalatent.training import update_selection_bias
from tests.testing_common import assert_close

WARMUP = 3


def losses_and_model(
    batches: Tensor, prepare: Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
) -> tuple[list[float], KimiK3ForCausalLM]:
    """Losses of steps of AdamW with the balancing of experts; `prepare` may replace the step by another form of it."""
    torch.manual_seed(0)
    model = KimiK3ForCausalLM(size_config("tiny")).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)
    ids = batches[0].clone()

    def step() -> Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update_selection_bias(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = prepare(step)
    losses = []
    for batch in batches:
        ids.copy_(batch)
        losses.append(run().item())
    return losses, model


@pytest.mark.gpu
def test_a_captured_training_step_is_the_eager_one() -> None:
    """Losses of fresh batches, weights and selection bias; what differs is the order of some sums in attention."""
    batches = torch.randint(3, 256, (6, 2, 100), device="cuda")

    def eager(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        for _ in range(WARMUP):
            step()
        return step

    def captured(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        graph, loss = capture(step)

        def run() -> Tensor:
            graph.replay()
            return loss

        return run

    expected, reference = losses_and_model(batches, eager)
    losses, model = losses_and_model(batches, captured)
    assert expected[0] != expected[-1]
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0)
    weights = dict(model.state_dict())
    for name, tensor in reference.state_dict().items():
        assert_close(weights[name], tensor, 1e-3, name)
