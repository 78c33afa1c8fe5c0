# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What one decoded token costs the host: kernels that are launched, counted on the CPU with the launches left out.

An eager decode step is host time and nothing else (docs/performance.md), so that a further launch, copy or wait per
layer is a loss that no test of numbers sees.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from deltalatent.configuration.sizes import size_config
from deltalatent.kernels import dispatch
from deltalatent.modeling.modeling_kimi_k3 import KimiK3ForCausalLM, KimiK3TextModel
from tests.kernels.triton_testing import needs_launches


class Functions(TorchFunctionMode):
    """Counts what is called of PyTorch, by name; `__get__` is an attribute of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class Copies(TorchDispatchMode):
    """Counts copies, casts, and values that are read back, which wait for the device."""

    NAMES = ("_to_copy", "copy_", "clone", "_local_scalar_dense", "index", "nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if name in self.NAMES:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Names of Triton kernels, in place of their launches; tensors on the CPU count as those on a GPU do."""
    from triton.runtime.jit import JITFunction

    counted: Counter[str] = Counter()

    def launch(kernel, grid):
        return lambda *args, **options: counted.update([kernel.fn.__name__])

    monkeypatch.setattr(JITFunction, "__getitem__", launch)
    monkeypatch.setattr(dispatch, "_probe_triton", lambda device: None)
    monkeypatch.setattr(KimiK3TextModel, "_check_token_ids", lambda self, ids: None)  # looks at values, on a CPU only
    return counted


@needs_launches
@torch.no_grad()
def test_launches_of_a_decoded_token(launches: Counter[str]) -> None:
    """Exactly these; `router_logits`, which is a kernel of ours in bfloat16 on a GPU, is a linear layer here."""
    config = size_config("tiny")
    model = KimiK3ForCausalLM(config).eval()
    model.set_experts_implementation("deltalatent")
    cache = DynamicCache(config=config)
    model(input_ids=torch.tensor([[5, 6, 7]]), cache=cache)
    launches.clear()
    token = torch.tensor([[8]])
    with Copies() as copies, Functions() as functions:
        model(input_ids=token, cache=cache)

    layers = config.num_hidden_layers
    delta, latent = (config.layer_types.count(kind) for kind in ("linear_attention", "full_attention"))
    dense, sparse = (config.mlp_layer_types.count(kind) for kind in ("dense", "sparse"))
    assert min(delta, latent, dense, sparse) > 0 and config.num_shared_experts
    assert launches == {
        "attn_res_forward_kernel": 2 * layers + 1,
        "short_conv_update_kernel": delta,
        "kda_recurrent_kernel": delta,
        "gated_rms_norm_forward_kernel": delta,
        "absorbed_split_kernel": latent,
        "choose_kernel": sparse,
        "few_pairs_kernel": sparse,
        "product_kernel": 2 * sparse,
        "gated_unit_kernel": sparse,
        "combine_kernel": sparse,
        "situ_glu_forward_kernel": dense + sparse,
    }
    assert not copies.calls
    kernels = {name: functions.calls[name] for name in ("embedding", "linear", "rms_norm", "einsum", "cat", "sigmoid")}
    assert kernels == {
        "embedding": 1,
        # q, k, v, decay through a low rank, beta, gate, output; queries through a low rank, latent, gate, output;
        # gate, up and down; router, down, up, and shared experts; the head.
        "linear": 8 * delta + 5 * latent + 3 * dense + 6 * sparse + 1,
        "rms_norm": 2 * latent + sparse,
        "einsum": 2 * latent,
        "cat": 2 * latent,  # a dynamic cache
        "sigmoid": latent,
    }
    closed_blocks = sum(layer.closes_block for layer in model.model.layers)
    assert functions.calls["add"] == 2 * layers - closed_blocks + sparse
    assert functions.calls["mul"] == latent
