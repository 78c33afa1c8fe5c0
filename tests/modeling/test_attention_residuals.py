# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention residuals in the model: who reads which streams, what a training step keeps."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from tests.testing_common import SavedBytes, assert_close, depth_mix, gradients, random_ids, tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_training_step_keeps_no_more_than_the_bank_over_plain_residuals(dtype: torch.dtype) -> None:
    """The mixes are never kept: at most the closed blocks are added to what a plain residual network keeps."""
    kept, closed_blocks = {}, 0
    for variant in ("default", "plain_residuals"):
        model = tiny_model(variant).to(dtype).train()
        ids = random_ids(model.config, 4, 64)
        with SavedBytes(list(model.parameters())) as saved:
            output = model(ids, labels=ids)
        assert output.loss.requires_grad
        kept[variant] = saved.total
        closed_blocks += sum(layer.closes_block for layer in model.model.layers)
    bank = closed_blocks * 4 * 64 * 32 * dtype.itemsize
    assert kept["default"] - kept["plain_residuals"] <= bank


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_streams_are_added_by_the_mixes(checkpointing: bool) -> None:
    """Each mix reads streams that the one before has passed on: autograd never adds two gradients of a stream."""
    model = tiny_model().train()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    ids = random_ids(model.config)
    nodes, seen, arriving = [model(ids, labels=ids).loss.grad_fn], set(), Counter()
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        for following, output in node.next_functions:
            if following is not None:
                nodes.append(following)
                if following.name() == "AttentionResidualFunctionBackward":
                    arriving[following, output] += 1
    mixes = 2 * model.config.num_hidden_layers + 1
    assert len({node for node, _ in arriving}) == mixes
    assert max(count for (_, output), count in arriving.items() if output == 0) > 1  # projections that share an input
    assert all(count == 1 for (_, output), count in arriving.items() if output > 0)
    assert sum(output > 0 for _, output in arriving) > mixes


def test_layers_mix_closed_blocks_and_the_running_sum() -> None:
    """Block size 2 over 5 layers, walked through by hand with the layers' own modules."""
    model = tiny_model().double()
    model.set_experts_implementation("eager")
    base = model.model
    ids = random_ids(model.config)

    def mix(norm: nn.Module, proj: nn.Module, sources: list[Tensor]) -> Tensor:
        return depth_mix(sources, norm.weight * proj.weight[0], norm.variance_epsilon)

    with torch.no_grad():
        running, closed = base.embed_tokens(ids), []
        mask = torch.full((19, 19), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        for i, layer in enumerate(base.layers):
            read = mix(layer.self_attention_res_norm, layer.self_attention_res_proj, [*closed, running])
            read = layer.input_layernorm(read)
            kind = model.config.layer_types[i]
            update = layer.self_attn(read) if kind == "linear_attention" else layer.self_attn(read, mask)[0]
            if i % 2 == 0:
                closed, running = [*closed, running], update
            else:
                running = running + update
            read = layer.post_attention_layernorm(mix(layer.mlp_res_norm, layer.mlp_res_proj, [*closed, running]))
            update = layer.mlp(read)
            running = running + (update[0] if isinstance(update, tuple) else update)
        assert len(closed) == 3
        read = mix(base.output_attn_res_norm, base.output_attn_res_proj, [*closed, running])
        assert_close(model(ids).logits, model.lm_head(base.norm(read)), 1e-12)


def test_plain_residuals_are_an_ordinary_network() -> None:
    model = tiny_model("plain_residuals").double()
    model.set_experts_implementation("eager")
    base = model.model
    ids = random_ids(model.config)
    with torch.no_grad():
        hidden = base.embed_tokens(ids)
        mask = torch.full((19, 19), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        for i, layer in enumerate(base.layers):
            read = layer.input_layernorm(hidden)
            kind = model.config.layer_types[i]
            hidden = hidden + (layer.self_attn(read) if kind == "linear_attention" else layer.self_attn(read, mask)[0])
            update = layer.mlp(layer.post_attention_layernorm(hidden))
            hidden = hidden + (update[0] if isinstance(update, tuple) else update)
        assert_close(model(ids).logits, model.lm_head(base.norm(hidden)), 1e-12)


@pytest.mark.parametrize("block_size", [1, 2, 3, 7])
def test_every_parameter_gets_a_gradient(block_size: int) -> None:
    """`DistributedDataParallel` waits for each of them, also for the query of layer 0, which has nothing to choose."""
    model = tiny_model(attn_res_block_size=block_size)
    ids = random_ids(model.config)
    grads = gradients(model, model(ids, labels=ids).loss)
    assert grads.keys() == dict(model.named_parameters()).keys()
    assert not grads["model.layers.0.self_attention_res_proj.weight"].any()
    for name, grad in grads.items():
        if name.endswith("res_proj.weight") and "layers.0.self_attention" not in name:
            assert grad.any(), name


def test_streams_keep_their_dtype_under_autocast() -> None:
    """As in a plain residual network: mixers compute in bf16, the sums stay float32."""
    model = tiny_model().train()
    ids = random_ids(model.config)
    streams: list[Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: streams.extend((*args, output[0])))
    with torch.autocast("cpu", torch.bfloat16):
        output = model(ids, labels=ids)
    assert {stream.dtype for stream in streams} == {torch.float32}
    grads = gradients(model, output.loss)
    assert grads.keys() == dict(model.named_parameters()).keys()
    assert all(grad.isfinite().all() for grad in grads.values())
    # A tenth of the loss is far more than bf16 mixers change, and far less than a wrong stream would.
    assert abs(output.loss.item() - model(ids, labels=ids).loss.item()) < 0.1 * output.loss.item()
