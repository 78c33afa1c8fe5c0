# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""A whole training step as one CUDA graph: the way around the host, which launches more slowly than a GPU computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltalatent.configuration.sizes import size_config
from deltalatent.modeling.modeling_kimi_k3 import KimiK3ForCausalLM
from deltalatent.training import update_selection_bias
from tests.documentation import BLOCK
from tests.testing_common import assert_close

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


def new_model() -> KimiK3ForCausalLM:
    torch.manual_seed(0)
    return KimiK3ForCausalLM(size_config("tiny")).cuda().train()


def eager_loss(model: KimiK3ForCausalLM, batches: Tensor) -> Tensor:
    """Loss of the last of some steps as on the page: AdamW, clipping, balancing of experts."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update_selection_bias(model)
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


@pytest.mark.gpu
def test_the_graph_of_the_documentation_is_the_eager_step() -> None:
    """Loss, weights and selection bias; what differs is the order of some sums in attention."""
    (code,) = (code for _, code in BLOCK.findall(PAGE.read_text()) if "CUDAGraph" in code)
    batches = torch.randint(3, 256, (9, 2, 100), device="cuda")
    model, reference = new_model(), new_model()
    names = {"model": model, "first_batches": batches[:3], "batches": batches[3:]}
    exec(code, names)
    expected = eager_loss(reference, batches)
    assert_close(names["loss"], expected, 1e-4)
    assert expected != eager_loss(new_model(), batches[:8])
    weights = model.state_dict()
    for name, tensor in reference.state_dict().items():
        assert_close(weights[name], tensor, 1e-3, name)
