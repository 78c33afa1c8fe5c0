# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Faults reported by users of models of this kind, at the level of the whole model; those that no other file tests."""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from tests.equivalence import EXACT, ONE_KIND, exact_model
from tests.testing_common import (
    assert_close,
    assert_gradients_close,
    gradients,
    linear_attn_config,
    random_ids,
    tiny_model,
)


@torch.no_grad()
def set_decay(model: nn.Module, *, A_log: float, dt_bias: float) -> nn.Module:
    """Give the channels of all KDA layers about the same decay per token, in place; gate logits are about N(0, 1)."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.fill_(A_log)
        elif name.endswith("dt_bias"):
            parameter.fill_(dt_bias)
    return model


@pytest.mark.parametrize("length", [64, 65, 130])
def test_gradients_are_finite_where_every_gate_forgets_all_it_can(length: int) -> None:
    """S01: decay exponentiated for pairs of the future too is infinite, and masking it makes NaN in the backward."""
    losses, grads = [], []
    for model in (tiny_model(), exact_model()):
        set_decay(model.train(), A_log=1.0, dt_bias=4.0)
        ids = random_ids(model.config, 1, length)
        loss = model(ids, labels=ids).loss
        losses.append(loss)
        grads.append(gradients(model, loss))
    assert all(gradient.isfinite().all() for gradient in grads[0].values())
    assert_close(losses[0], losses[1], 1e-5)
    # Float32 against float64: up to 1e-5 of the activations, amplified on the way back through five layers.
    assert_gradients_close(grads[0], grads[1], rel=1e-3)


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("decay", ["none", "strong", "beyond_float32"])
def test_chunks_and_single_steps_agree_at_every_decay(gate: str, decay: str) -> None:
    """S02, S03: a form made for the bounded gate overflows silently with the unbounded one."""
    bound = -5.0 if gate == "bounded" else None
    model = exact_model(linear_attn_config=linear_attn_config(gate_lower_bound=bound))
    A_log, dt_bias = {"none": (0.0, -30.0), "strong": (1.0, 3.0), "beyond_float32": (4.0, 20.0)}[decay]
    set_decay(model, A_log=A_log, dt_bias=dt_bias)
    ids = random_ids(model.config, 1, 40)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        chunks = model(ids, use_cache=False).logits
        steps = torch.cat([model(ids[:, t : t + 1], cache=cache).logits for t in range(40)], 1)
    assert chunks.isfinite().all()
    assert_close(steps, chunks, EXACT)
    single = tiny_model(linear_attn_config=linear_attn_config(gate_lower_bound=bound)).train()
    set_decay(single, A_log=A_log, dt_bias=dt_bias)
    loss = single(ids, labels=ids).loss
    assert all(gradient.isfinite().all() for gradient in gradients(single, loss).values())


@pytest.mark.parametrize("precision", ["bf16", "autocast"])
def test_a_long_memory_survives_half_precision(precision: str) -> None:
    """S41: a decay that followed the dtype of the model lost what it should keep for thousands of tokens."""
    length = 2000
    with torch.no_grad():
        model = set_decay(tiny_model(), A_log=0.0, dt_bias=-8.0)  # forgets about 0.2 % per token
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())  # both models have the same weights
        ids = random_ids(model.config, 1, length)
        expected, cache = DynamicCache(config=model.config), DynamicCache(config=model.config)
        model.model.layers[0](model.model.embed_tokens(ids), cache=expected)
        if precision == "bf16":
            model = model.to(torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
            model.model.layers[0](model.model.embed_tokens(ids), cache=cache)
    actual, wanted = cache.get_recurrent_state(0), expected.get_recurrent_state(0)
    assert actual.dtype == torch.float32
    # Inputs are rounded to 8 bits (0.2 % in the mean), independently from token to token, so their errors average out.
    assert (actual - wanted).norm() < 0.01 * wanted.norm()


def test_mixed_precision_trains_float32_weights() -> None:
    """S42: training silently ran on bf16 weights, in which small updates vanish."""
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        accelerator = Accelerator(mixed_precision="bf16", cpu=True)
        model = tiny_model().train()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        ids = random_ids(model.config)
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.copy_(1e-4 * parameter.abs() + 1e-7)
        optimizer.step()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                assert (parameter != before[name]).float().mean() > 0.99, name
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("cuts", [[2], [1, 3, 4]], ids=["2_stages", "4_stages"])
def test_stages_that_pass_blocks_between_them_have_the_gradients_of_one_device(cuts: list[int]) -> None:
    """S44: block states kept per stage were backpropagated through twice."""
    model = exact_model().train()
    micro_batches = [random_ids(model.config, 2, 9, seed=seed) for seed in (0, 1)]
    expected = gradients(model, sum(model(ids, labels=ids).loss for ids in micro_batches))
    bounds = [0, *cuts, model.config.num_hidden_layers]
    for ids in micro_batches:
        boundaries = []
        streams: tuple[Tensor, ...] = (model.model.embed_tokens(ids),)  # running sum, then closed blocks
        for first, last in pairwise(bounds):
            if first:
                received = tuple(stream.detach().requires_grad_() for stream in streams)
                boundaries.append((streams, received))
                streams = received
            for layer in model.model.layers[first:last]:
                hidden, *blocks = streams
                hidden, _, *blocks = layer(hidden, *blocks)
                streams = (hidden, *blocks)
        hidden, *blocks = streams
        logits = model.lm_head(model.model._mix_for_output(*blocks, hidden)[0])
        model.loss_function(logits=logits, labels=ids, vocab_size=model.config.vocab_size).backward()
        for sent, received in reversed(boundaries):
            torch.autograd.backward(sent, [stream.grad for stream in received])
    actual = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert_gradients_close(actual, expected, rel=1e-6)


class LiveBytes(TorchDispatchMode):
    """Peak of the bytes in tensors that were made under this mode and are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.live:
                    self.live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return result


@pytest.mark.parametrize("gradient", [False, True], ids=["inference", "training"])
def test_memory_of_a_long_sequence_grows_linearly(gradient: bool) -> None:
    """S46: memory was said to jump in long prefills, in KDA or the attention residuals."""
    model = tiny_model(num_experts=None, **ONE_KIND["kda_only"]).train(gradient)
    peaks = []
    for length in (512, 1024, 2048):
        ids = random_ids(model.config, 1, length)
        with torch.set_grad_enabled(gradient), LiveBytes() as memory:
            model(ids, logits_to_keep=1, use_cache=False)
        peaks.append(memory.peak)
    for shorter, longer in pairwise(peaks):
        assert 1.8 < longer / shorter < 2.1


def test_memory_of_a_prefill_in_chunks_does_not_follow_its_length() -> None:
    """S46: what is left is the cache, a latent per token and MLA layer."""
    model = tiny_model(num_experts=None)
    width = model.config.kv_lora_rank + model.config.qk_rope_head_dim
    peaks = []
    for length in (512, 1024):
        ids = random_ids(model.config, 1, length)
        cache = DynamicCache(config=model.config)
        with torch.no_grad(), LiveBytes() as memory:
            for start in range(0, length, 64):
                model(ids[:, start : start + 64], cache=cache, logits_to_keep=1)
        peaks.append(memory.peak)
    whole = LiveBytes()
    with torch.no_grad(), whole:
        model(random_ids(model.config, 1, 1024), logits_to_keep=1, use_cache=False)
    cached = 512 * 2 * width * 4
    # One chunk against all tokens in view: keys and values of the layer at work (up to 4096 tokens of them) and its
    # scores, beside the cache; not the streams and projections of all tokens.
    assert peaks[1] < 2.1 * peaks[0]
    assert peaks[1] > cached
    assert peaks[1] < whole.peak - 1024 * model.config.intermediate_size * 4
