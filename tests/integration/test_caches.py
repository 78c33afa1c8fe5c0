# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""However a sequence is cut, copied, reordered or stored, the numbers are those of one forward without a cache.

Public reports behind these tests: S17, S18, S19, S21 to S26, S28, S29.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, QuantizedCache, StaticCache

from tests.equivalence import EXACT, ONE_KIND, ROUNDED, exact_model, state_tensors
from tests.testing_common import (
    VARIANTS,
    assert_close,
    assert_gradients_close,
    gradients,
    left_padded,
    linear_attn_config,
    random_ids,
    tiny_model,
)

LENGTH = 20
CUTS = {
    "whole": [20],
    "12+8": [12, 8],
    "12+1+7": [12, 1, 7],
    "token_by_token": [1] * 20,
    "3+17": [3, 17],  # shorter than the convolution
    "2+1+17": [2, 1, 17],
    "19+1": [19, 1],
}
CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(model.config, max_cache_len=33),
}


@torch.no_grad()
def feed(model: Any, ids: Tensor, cut: list[int], cache: Cache, mask: Tensor | None = None) -> Tensor:
    """Logits of `ids`, fed in pieces of these lengths on top of `cache`."""
    logits, start = [], 0
    past = int(cache.get_seq_length()) if not all(cache.is_linear) else 0
    for length in cut:
        piece = ids[:, start : start + length]
        start += length
        seen = None if mask is None else mask[:, : past + start]
        logits.append(model(piece, cache=cache, attention_mask=seen).logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_every_cut_gives_the_logits_and_the_states_of_one_pass(cut: list[int], kind: str) -> None:
    """S17: several new tokens on top of a filled cache used to start from an empty state."""
    model = exact_model()
    ids = random_ids(model.config, 2, LENGTH)
    whole, cache = DynamicCache(config=model.config), CACHES[kind](model)
    with torch.no_grad():
        assert_close(feed(model, ids, cut, cache), model(ids, use_cache=False).logits, EXACT)
        model(ids, cache=whole)
    expected = state_tensors(whole)
    actual = state_tensors(cache)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, EXACT, what=name)


@pytest.mark.parametrize("variant", [*VARIANTS, *ONE_KIND])
def test_cuts_of_every_variant(variant: str) -> None:
    model = exact_model(variant)
    ids = random_ids(model.config, 2, LENGTH)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    for kind, make in CACHES.items():
        assert_close(feed(model, ids, [12, 1, 1, 6], make(model)), expected, EXACT, what=kind)


@pytest.mark.parametrize("kind", CACHES)
def test_cuts_in_float32(kind: str) -> None:
    """With the default experts backend, which float64 does not have."""
    model = tiny_model()
    ids = random_ids(model.config, 2, LENGTH)
    with torch.no_grad():
        expected = model(ids).logits
    for cut in ([12, 8], [1] * 20):
        assert_close(feed(model, ids, cut, CACHES[kind](model)), expected, ROUNDED)


@pytest.mark.parametrize("length", [2, 5, 16, 17, 31, 32, 33, 63, 64, 65, 129])
def test_prefill_and_one_step_is_the_full_forward(length: int) -> None:
    """S18: around the edges of chunks and tiles."""
    model = exact_model()
    ids = random_ids(model.config, 1, length)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    assert_close(feed(model, ids, [length - 1, 1], DynamicCache(config=model.config)), expected, EXACT)


@pytest.mark.parametrize("size", [20, 21, 64, 500])
def test_static_cache_may_be_larger_than_the_sequence(size: int) -> None:
    """The unwritten end is no context, also where latent attention runs on the latents and no mask is given."""
    model = exact_model()
    ids = random_ids(model.config, 2, LENGTH)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    for cut in ([20], [2, 18], [19, 1]):
        assert_close(feed(model, ids, cut, StaticCache(model.config, size)), expected, EXACT)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("cut", [[17], [1] * 17, [5, 1, 11], [2, 2, 13]], ids=str)
def test_padded_rows_may_be_cut_anywhere(cut: list[int], kind: str) -> None:
    """Also where a piece is nothing but padding for some row."""
    model = exact_model()
    rows = [random_ids(model.config, 1, length, seed=length)[0] for length in (17, 9, 1)]
    ids, mask = left_padded(rows)
    logits = feed(model, ids, cut, CACHES[kind](model), mask)
    with torch.no_grad():
        for i, row in enumerate(rows):
            assert_close(
                logits[i, mask[i].bool()], model(row[None], use_cache=False).logits[0], EXACT, what=f"row {i}"
            )


@pytest.mark.parametrize("kind", CACHES)
def test_second_turn_of_a_batch_of_different_lengths(kind: str) -> None:
    """Padding in the middle: both turns of a row have their own length, and the second is padded on either side."""
    model = exact_model()
    first = [random_ids(model.config, 1, length, seed=length)[0] for length in (7, 3)]
    second = [random_ids(model.config, 1, length, seed=length)[0] for length in (2, 5)]
    ids, mask = left_padded(first)
    more, left = left_padded(second)
    for turn, turn_mask in ((more, left), (more.flip(1), left.flip(1))):
        cache = CACHES[kind](model)
        feed(model, ids, [7], cache, mask)
        logits = feed(model, turn, [5], cache, torch.cat([mask, turn_mask], 1))
        with torch.no_grad():
            for i, row in enumerate(first):
                real = turn_mask[i].bool()
                alone = model(torch.cat([row, turn[i, real]])[None], use_cache=False).logits[0]
                assert_close(logits[i, real], alone[len(row) :], EXACT, what=f"row {i}")


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("order", [[2, 0, 1], [1, 1, 1], [0, 2, 2]], ids=str)
def test_every_state_follows_the_beam(order: list[int], kind: str) -> None:
    """S20: three windows, the recurrent state and the latents, for a permutation and for repeats."""
    model = exact_model()
    ids, step = random_ids(model.config, 3, 9), random_ids(model.config, 3, 2, seed=1)
    cache = CACHES[kind](model)
    feed(model, ids, [9], cache)
    before = {name: tensor.clone() for name, tensor in state_tensors(cache).items()}
    cache.reorder_cache(torch.tensor(order))
    for name, tensor in state_tensors(cache).items():
        assert torch.equal(tensor, before[name][order]), name
    with torch.no_grad():
        expected = model(torch.cat([ids[order], step], 1), use_cache=False).logits[:, 9:]
    assert_close(feed(model, step, [1, 1], cache), expected, EXACT)


@pytest.mark.parametrize("kind", CACHES)
def test_reordering_a_cache_that_is_still_empty(kind: str) -> None:
    """S22: a state that is not there yet must not take the size or the content of another batch."""
    model = exact_model()
    ids = random_ids(model.config, 3, 9)
    cache = CACHES[kind](model)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    with torch.no_grad():
        assert_close(feed(model, ids, [9], cache), model(ids, use_cache=False).logits, EXACT)


@pytest.mark.parametrize("filled", [False, True], ids=["empty", "filled"])
def test_repeating_and_selecting_rows_is_refused_before_anything_changed(filled: bool) -> None:
    """S22: Transformers' linear layers cannot; a cache of which half were repeated would be worse."""
    model = exact_model()
    ids = random_ids(model.config, 2, 9)
    cache = DynamicCache(config=model.config)
    if filled:
        feed(model, ids[:, :4], [4], cache)
    for change in (lambda: cache.batch_repeat_interleave(2), lambda: cache.batch_select_indices(torch.tensor([0]))):
        with pytest.raises(AttributeError, match="LinearAttentionLayer"):
            change()
    rest = ids[:, 4:] if filled else ids
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    assert_close(feed(model, rest, [rest.shape[1]], cache), expected[:, -rest.shape[1] :], EXACT)


def torch_save(cache: Cache) -> Cache:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(
    "copied",
    [
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(lambda cache: pickle.loads(pickle.dumps(cache)), id="pickle"),
        pytest.param(torch_save, id="torch_save"),
    ],
)
def test_copies_carry_all_states_and_share_none(copied: Any, kind: str) -> None:
    """S23, S24: a stored prefix continues with two different suffixes, and stays what it was."""
    model = exact_model()
    ids = random_ids(model.config, 2, 9)
    suffixes = [random_ids(model.config, 2, length, seed=length) for length in (5, 3)]
    prefix = CACHES[kind](model)
    feed(model, ids, [9], prefix)
    before = {name: tensor.clone() for name, tensor in state_tensors(prefix).items()}
    assert len(before) == 3 * 4 + 2 * 2  # three windows and a state per KDA layer, two tensors per MLA layer
    for suffix in suffixes:
        branch = copied(prefix)
        assert state_tensors(branch).keys() == before.keys()
        with torch.no_grad():
            expected = model(torch.cat([ids, suffix], 1), use_cache=False).logits[:, 9:]
        assert_close(feed(model, suffix, [1, suffix.shape[1] - 1], branch), expected, EXACT)
        for name, tensor in state_tensors(prefix).items():
            assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("padded", [False, True], ids=["full_rows", "padded_rows"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_garbage_in_unused_pages_does_not_reach_the_output(attention: str, padded: bool) -> None:
    """S25: a mask gives it weight 0, but 0 * NaN is NaN."""
    model = exact_model()
    model.set_attn_implementation(attention)
    ids = random_ids(model.config, 2, LENGTH)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4] = 0
    cache = StaticCache(model.config, 33)
    head = feed(model, ids[:, :9], [9], cache, mask)
    for layer, is_linear in zip(cache.layers, cache.is_linear, strict=True):
        if not is_linear:
            layer.keys[:, :, 9:] = float("nan")
            layer.values[:, :, 9:] = float("nan")
    tail = feed(model, ids[:, 9:], [1, 4, 6], cache, mask)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits
    real = mask.bool()
    assert_close(torch.cat([head, tail], 1)[real], expected[real], EXACT)


@pytest.mark.parametrize("kind", CACHES)
def test_length_counts_tokens_once(kind: str) -> None:
    """S26: layer 0 is linear and counts nothing; the length of the cache is that of its attention layers."""
    model = tiny_model()
    assert model.config.layer_types[0] == "linear_attention"
    ids = random_ids(model.config, 2, 10)
    cache = CACHES[kind](model)
    assert cache.get_seq_length() == 0
    feed(model, ids[:, :9], [9], cache)
    assert cache.get_seq_length() == 9
    lengths = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda *_: lengths.append(int(cache.get_seq_length())))
    feed(model, ids[:, 9:], [1], cache)
    assert lengths == [9, 9, 9, 9, 10]  # the first attention layer is the fourth
    assert cache.get_seq_length() == 10
    with pytest.raises(ValueError, match="does not track sequence length"):
        cache.get_seq_length(1)


def test_static_cache_answers_all_questions_before_use() -> None:
    """S21: mixed caches raised in `is_initialized`, and gave linear layers the shapes of attention heads."""
    model = exact_model()
    cache = StaticCache(model.config, 33)
    assert not cache.is_initialized
    assert cache.is_compileable
    assert cache.get_max_length() == 33
    assert cache.is_linear == [True, True, True, False, False]
    # Both parts of a latent would get one width; only linear layers can go through this and must pass untouched.
    cache.early_initialization(2, 1, model.config.kv_lora_rank, model.dtype, model.device)
    assert cache.is_initialized
    assert all(cache.layers[i].conv_states[0] is None for i in range(3))


@pytest.mark.parametrize("kind", CACHES)
def test_a_reset_cache_is_a_fresh_one(kind: str) -> None:
    model = exact_model()
    ids = random_ids(model.config, 2, 9)
    cache = CACHES[kind](model)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    for _ in range(2):
        assert_close(feed(model, ids, [5, 4], cache), expected, EXACT)
        cache.reset()
        assert cache.get_seq_length() == 0


def test_states_are_float32_and_the_rest_has_the_dtype_of_the_model() -> None:
    model = tiny_model().to(torch.bfloat16)
    cache = DynamicCache(config=model.config)
    feed(model, random_ids(model.config, 2, 9), [8, 1], cache)
    for name, tensor in state_tensors(cache).items():
        assert tensor.dtype == (torch.float32 if name.endswith("state") else torch.bfloat16), name


def test_rolling_back_is_refused() -> None:
    """S19: rejected draft tokens stayed in the recurrent state."""
    model = tiny_model()
    ids = random_ids(model.config, 2, 9)
    cache = DynamicCache(config=model.config)
    feed(model, ids, [9], cache)
    assert not cache.is_croppable
    with pytest.raises(RuntimeError, match="does not track past states"):
        cache.crop(-2)
    # Recording restores windows but no recurrent state.
    recording = DynamicCache(config=model.config)
    recording.activate_past_recording()
    with pytest.raises(ValueError, match="`cache` must not record the past"):
        feed(model, ids, [9], recording)


@pytest.mark.parametrize("backend", ["quanto", "hqq", "fp8"])
def test_quantised_cache_is_refused(backend: str) -> None:
    """S29: by name, not by an AttributeError somewhere inside."""
    model = tiny_model()
    with pytest.raises(
        ValueError, match=r"only supported for models with only full attention layers.*linear_attention"
    ):
        QuantizedCache(backend, model.config)
    with pytest.raises(ValueError, match="only supported for models with only full attention layers"):
        model.generate(
            random_ids(model.config),
            max_new_tokens=2,
            cache_implementation="quantized",
            cache_config={"backend": backend},
        )


@pytest.mark.skipif(
    bool(torch.tensor(1e3).to(torch.float8_e4m3fn).isnan()),
    reason="the scale is that of the first tokens, and this PyTorch makes NaN of later ones that are larger",
)
def test_quantised_latents_of_a_model_without_kda() -> None:
    """S29: latents may be quantised; 3 mantissa bits are 6 % per element at most, and the layers' errors add up."""
    model = tiny_model(num_experts=None, **ONE_KIND["mla_only"])
    ids = random_ids(model.config, 2, LENGTH)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    actual = feed(model, ids, [12, 1, 7], QuantizedCache("fp8", model.config))
    error = (actual - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert 1e-4 < error < model.config.num_hidden_layers * 0.06


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_training_with_recomputation_leaves_a_given_cache_alone(use_reentrant: bool) -> None:
    """S28: recomputation must not write a cache twice; asking for one in training makes none."""
    model = tiny_model().train()
    ids = random_ids(model.config, 2, 9)
    plain = model(ids, labels=ids, use_cache=True)
    assert plain.cache is None
    expected = gradients(model, plain.loss)
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    for cache in (None, DynamicCache(config=model.config)):
        output = model(ids, labels=ids, use_cache=True, cache=cache)
        assert_close(output.loss, plain.loss)
        model.zero_grad()
        output.loss.backward()
        actual = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert_gradients_close(actual, expected)
        if cache is not None:
            assert cache.get_seq_length() == 0
            assert not cache.has_previous_state()


def test_one_decoding_step_is_one_graph() -> None:
    """A static cache has static addresses: the step compiles without a graph break, and once for all steps."""
    # A layer of each kind is what there is to trace.
    layers = linear_attn_config(kda_layers=[1], full_attn_layers=[2])
    model = tiny_model(num_hidden_layers=2, linear_attn_config=layers)
    model.set_experts_implementation("batched_mm")
    ids = random_ids(model.config, 2, 12)
    cache = StaticCache(model.config, 33)
    prefill = feed(model, ids[:, :8], [8], cache)
    graphs = 0

    def backend(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    step = torch.compile(model.forward, backend=backend, fullgraph=True)
    logits = [prefill]
    with torch.no_grad():
        for t in range(8, 12):
            masks = model.create_masks_for_generate(
                model.config, torch.empty(2, 1, 0), None, cache, position_ids=torch.tensor([[t]])
            )
            logits.append(step(ids[:, t : t + 1], attention_mask=masks, cache=cache).logits)
        expected = model(ids, use_cache=False).logits
    assert_close(torch.cat(logits, 1), expected, ROUNDED)
    assert graphs == 1
