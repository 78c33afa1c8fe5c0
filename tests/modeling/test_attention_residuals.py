# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Depth mixing of block attention residuals: the definition, its gradient, what it keeps for backward, its wiring."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from deltalatent.kernels.attn_res import attention_residual_mix
from tests.testing_common import assert_close, gradients, max_error, random_ids, tiny_model

EPS = 1e-3
SOURCES = [1, 2, 5, 9]


def definition(sources: list[Tensor], query: Tensor, eps: float) -> Tensor:
    """Stack, score, softmax, average (golden README, "Depth mixing")."""
    stack = torch.stack(sources)  # [S, ..., D]
    normed = stack / (stack.square().mean(-1, keepdim=True) + eps).sqrt()
    weights = torch.softmax(normed @ query, dim=0)
    return (weights[..., None] * stack).sum(0)


def random_inputs(count: int, width: int = 12, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    sources = [(0.3 + i) * torch.randn(2, 3, width, dtype=dtype) for i in range(count)]
    return [s.requires_grad_() for s in sources], torch.randn(width, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("count", SOURCES, ids=lambda n: f"S{n}")
def test_mix_is_its_definition(count: int) -> None:
    sources, query = random_inputs(count)
    output, expected = attention_residual_mix(sources, query, EPS), definition(sources, query, EPS)
    assert_close(output, expected, 1e-14)
    weight = torch.randn_like(output)
    actual = torch.autograd.grad((output * weight).sum(), [query, *sources])
    for i, (a, e) in enumerate(
        zip(actual, torch.autograd.grad((expected * weight).sum(), [query, *sources]), strict=True)
    ):
        # Of one source the query's gradient is zero, and the definition's is rounding.
        assert max_error(a, e) < 1e-13 * max(1.0, e.abs().max().item()), f"gradient {i}"


@pytest.mark.parametrize("count", SOURCES, ids=lambda n: f"S{n}")
def test_gradient_against_finite_differences(count: int) -> None:
    """S43."""
    sources, query = random_inputs(count, width=5)
    assert torch.autograd.gradcheck(lambda q, *s: attention_residual_mix(s, q, EPS), (query, *sources))


def test_gradient_reaches_only_what_needs_it() -> None:
    sources, query = random_inputs(3)
    sources[1] = sources[1].detach()
    attention_residual_mix(sources, query, EPS).sum().backward()
    assert sources[1].grad is None
    assert sources[0].grad is not None and sources[2].grad is not None and query.grad is not None


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_rounds_once(dtype: torch.dtype, scale: float) -> None:
    """Scores and average are float32 inside: half a unit in the last place, plus the float32 error of the scores."""
    sources = [(scale * torch.randn(4, 6, 64)).to(dtype) for _ in range(5)]
    query = torch.randn(64)
    output = attention_residual_mix(sources, query, 1e-5)
    assert output.dtype == dtype
    expected = definition([s.double() for s in sources], query.double(), 1e-5)
    largest = torch.stack(sources).double().abs().amax(0)
    # A score is a sum of 64 products, each of size 1: float32 leaves 64 * 6e-8 of it at the very worst.
    bound = torch.finfo(dtype).eps / 2 * 1.01 * expected.abs() + 64 * 6e-8 * 4 * largest
    assert ((output.double() - expected).abs() <= bound).all()


def test_large_scores_do_not_overflow() -> None:
    sources = [torch.randn(2, 3, 8) for _ in range(4)]
    for factor in (1e3, -1e3):
        query = (factor * torch.randn(8)).requires_grad_()
        output = attention_residual_mix(sources, query, 1e-5)
        assert torch.isfinite(output).all()
        assert_close(output, definition([s.double() for s in sources], query.double(), 1e-5), 1e-3)
        output.sum().backward()
        assert torch.isfinite(query.grad).all()


def test_zero_query_is_the_plain_average() -> None:
    """S43: what a new model does."""
    sources, query = random_inputs(4)
    assert_close(attention_residual_mix(sources, torch.zeros_like(query), EPS), torch.stack(sources).mean(0), 1e-14)


def test_one_source_is_returned_as_it_is() -> None:
    sources, query = random_inputs(1)
    output = attention_residual_mix(sources, query, EPS)
    assert torch.equal(output, sources[0])
    grads = torch.autograd.grad(output.sum(), [query, sources[0]])
    assert not grads[0].any() and torch.equal(grads[1], torch.ones_like(sources[0]))


class SavedBytes:
    """Bytes of different storages that autograd keeps for backward: saved inside the context, alive when asked."""

    def __init__(self, known: list[Tensor]) -> None:
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        # Weak, because what a discarded branch of the graph saved is freed, and its address may serve again.
        self.saved: list[weakref.ref[Tensor]] = []

    def __enter__(self) -> SavedBytes:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        self._hooks.__exit__(*args)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.saved.append(weakref.ref(tensor))
        return tensor

    @property
    def total(self) -> int:
        storages = [tensor.untyped_storage() for ref in self.saved if (tensor := ref()) is not None]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(size for pointer, size in sizes.items() if pointer not in self.known)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_is_kept_but_the_inputs(dtype: torch.dtype) -> None:
    """S43, S45: the definition keeps the stack and float32 copies of it."""
    sources = [torch.randn(4, 16, 32, dtype=dtype, requires_grad=True) for _ in range(6)]
    query = torch.randn(32, requires_grad=True)
    with SavedBytes([*sources, query]) as saved:
        attention_residual_mix(sources, query, EPS)
    assert saved.total == 0
    with SavedBytes([*sources, query]) as saved:
        definition([s.float() for s in sources], query, EPS)
    assert saved.total > 6 * 4 * 16 * 32 * 4, "the measurement sees nothing"


def test_a_model_keeps_no_more_than_one_vector_per_mix() -> None:
    """Each norm keeps its input, a mix of its own where a plain network has the running sum; a mix keeps nothing."""
    saved_bytes = {}
    for variant in ("default", "plain_residuals"):
        model = tiny_model(variant).train()
        ids = random_ids(model.config, 4, 64)
        with SavedBytes(list(model.parameters())) as saved:
            output = model(ids, labels=ids)
        assert output.loss.requires_grad
        saved_bytes[variant] = saved.total
    mixes = 2 * model.config.num_hidden_layers + 1
    stream, query = 4 * 64 * 32 * 4, 32 * 4
    assert saved_bytes["default"] - saved_bytes["plain_residuals"] <= mixes * (stream + query)


@pytest.mark.parametrize(
    ("sources", "query", "message"),
    [
        ([], torch.zeros(4), "at least one tensor"),
        ([torch.zeros(2, 4), torch.zeros(3, 4)], torch.zeros(4), r"one shape, got \(2, 4\) at 0 and \(3, 4\) at 1"),
        ([torch.zeros(2, 4)], torch.zeros(1, 4), r"must have shape \(4,\), got \(1, 4\)"),
    ],
    ids=["no_source", "shapes_differ", "query_is_a_matrix"],
)
def test_bad_arguments_are_named(sources: list[Tensor], query: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_residual_mix(sources, query, EPS)


# ---- wiring ---------------------------------------------------------------------------------------------------------


def test_layers_mix_closed_blocks_and_the_running_sum() -> None:
    """Block size 2 over 5 layers, walked through by hand with the layers' own modules."""
    model = tiny_model().double()
    model.set_experts_implementation("eager")
    base = model.model
    ids = random_ids(model.config)

    def mix(norm: nn.Module, proj: nn.Module, sources: list[Tensor]) -> Tensor:
        return definition(sources, norm.weight * proj.weight[0], norm.variance_epsilon)

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
