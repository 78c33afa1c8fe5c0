# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""A toy model learns real text in fifty steps, and does so again to the bit."""

from __future__ import annotations

import inspect
import math
import textwrap
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from deltalatent import KimiK3ForCausalLM, size_config
from deltalatent.training import register_quantile_balancing

STEPS, ROWS, LENGTH = 50, 8, 64


@dataclass
class Run:
    """What a training run leaves behind; everything in it is exact."""

    losses: list[float]
    parameters: dict[str, Tensor]


def text() -> Tensor:
    """Bytes of a module of the standard library, int64."""
    return torch.tensor(list(inspect.getsource(textwrap).encode()))


def new_model() -> KimiK3ForCausalLM:
    """Five layers, both kinds of attention, eight experts; a little wider than `tiny`."""
    torch.manual_seed(0)
    fields = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "routed_expert_hidden_size": 32,
        "moe_intermediate_size": 32,
    }
    return KimiK3ForCausalLM(size_config("tiny", initializer_range=0.06, **fields)).train()


def train(steps: int) -> Run:
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    register_quantile_balancing(model, optimizer)
    data, generator = text(), torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        starts = torch.randint(0, len(data) - LENGTH, (ROWS,), generator=generator)
        ids = torch.stack([data[start : start + LENGTH] for start in starts.tolist()])
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, (step + 1) / 5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses, {name: tensor.clone() for name, tensor in model.state_dict().items()})


@pytest.fixture(scope="module")
def run() -> Run:
    return train(STEPS)


def unigram_entropy() -> float:
    """Loss of the best model that knows how frequent each byte is, and nothing else, in nats."""
    share = torch.bincount(text()).double() / len(text())
    return -torch.xlogy(share, share).sum().item()


def test_loss_falls_well_below_a_unigram_model(run: Run) -> None:
    """From worse than uniform over the 256 bytes to half a nat below the frequencies of the bytes."""
    assert run.losses[0] > math.log(256)
    assert sum(run.losses[-5:]) / 5 < unigram_entropy() - 0.5


def test_a_run_repeats_bit_for_bit(run: Run) -> None:
    """A loss depends on every parameter that the steps before it have written."""
    steps = 12
    assert train(steps).losses == run.losses[:steps]


def test_every_parameter_learns(run: Run) -> None:
    """All but the query of layer 0, which has nothing to choose from; the selection bias by balancing."""
    initial = new_model().state_dict()
    for name, tensor in run.parameters.items():
        assert torch.isfinite(tensor).all(), name
        assert torch.equal(tensor, initial[name]) == ("layers.0.self_attention_res" in name), name
