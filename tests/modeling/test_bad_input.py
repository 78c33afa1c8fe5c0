# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Input that makes no sense is refused with a message that helps, or has a defined result; it never spreads.

Public report behind the NaN tests: S73 (one request with NaN poisons all later ones).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import DynamicCache, StaticCache

from deltalatent import KimiK3ForCausalLM, KimiK3TextModel
from tests.testing_common import assert_close, left_padded, random_ids, tiny_config, tiny_model

IDS = random_ids(tiny_config(), 2, 6)
NAN = float("nan")


def embeds(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.model.embed_tokens(ids).detach()


@pytest.mark.parametrize("token", [-1, -100, 256, 10**6])
def test_token_ids_out_of_range(token: int) -> None:
    ids = IDS.clone()
    ids[1, 2] = token
    with pytest.raises(ValueError, match=r"`input_ids` must be in \[0, vocab_size=256\), got values from .*tokenizer"):
        tiny_model()(ids)


@pytest.mark.parametrize("shape", [(0, 6), (2, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("kind", ["input_ids", "inputs_embeds"])
def test_empty_batch(kind: str, shape: tuple[int, int]) -> None:
    value = torch.zeros(shape, dtype=torch.long) if kind == "input_ids" else torch.zeros(*shape, 32)
    with pytest.raises(ValueError, match="at least one token, got shape"):
        tiny_model()(**{kind: value})


def test_both_or_neither_of_ids_and_embeddings() -> None:
    model = tiny_model()
    for arguments in ({}, {"input_ids": IDS, "inputs_embeds": embeds(model, IDS)}):
        with pytest.raises(ValueError, match="exactly one of `input_ids` and `inputs_embeds`"):
            model(**arguments)


@pytest.mark.parametrize("shape", [(6,), (2, 6, 1, 1)], ids=str)
def test_ids_of_a_wrong_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"`input_ids` must have shape \[B, T\]"):
        tiny_model()(torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("shape", [(6, 32), (2, 6, 31), (2, 6, 32, 1)], ids=str)
def test_embeddings_of_a_wrong_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"`inputs_embeds` must have shape \[B, T, hidden_size=32\]"):
        tiny_model()(inputs_embeds=torch.zeros(shape))


@pytest.mark.parametrize("shape", [(2, 5), (2, 7), (1, 6), (3, 6)], ids=str)
def test_mask_of_a_wrong_shape(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"`attention_mask` must have shape \(2, 6\) .*one entry per token"):
        tiny_model()(IDS, attention_mask=torch.ones(shape))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("length", [2, 6, 9], ids=["new_tokens_only", "cache_only", "too_long"])
def test_mask_must_cover_the_cache_too(length: int, cache: str) -> None:
    model = tiny_model()
    cache = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, 12)
    with torch.no_grad():
        model(IDS, cache=cache)
        with pytest.raises(
            ValueError, match=r"must have shape \(2, 8\) \(rows, tokens in the cache plus new tokens\)"
        ):
            model(IDS[:, :2], cache=cache, attention_mask=torch.ones(2, length))


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(torch.ones(2, 1, 6, 6, dtype=torch.bool).tril(), id="4d_bool"),
        pytest.param(torch.zeros(2, 1, 6, 6), id="4d_additive"),
        pytest.param(torch.ones(2, 6, 6), id="3d"),
        pytest.param(torch.ones(6), id="1d"),
    ],
)
def test_mask_that_is_no_padding_mask(mask: torch.Tensor) -> None:
    """KDA layers cannot follow an arbitrary mask; that the attention layers could must not hide it."""
    with pytest.raises(ValueError, match=r"`attention_mask` must have shape \[B, tokens\].*KDA layers cannot follow"):
        tiny_model()(IDS, attention_mask=mask)


@pytest.mark.parametrize("shape", [(6,), (2, 5), (3, 6), (2, 7)], ids=str)
def test_positions_of_a_wrong_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"`position_ids` must have shape"):
        tiny_model()(IDS, position_ids=torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize(
    ("offsets", "error", "message"),
    [
        pytest.param([1, 6], ValueError, "must start at 0, got 1", id="start"),
        pytest.param(
            [0], ValueError, r"at least one document, got 1 of them .*dispatch_batches", id="cut by accelerate"
        ),
        pytest.param([0, 4, 3, 6], ValueError, "must not decrease, got 4 then 3", id="decreasing"),
        pytest.param([0, 7], ValueError, "must end at or before T=6, got 7", id="beyond"),
        pytest.param([[0, 6]], ValueError, r"must have shape \[N\+1\]", id="shape"),
        pytest.param([0.0, 6.0], TypeError, "int32 or int64", id="dtype"),
    ],
)
def test_offsets_that_describe_no_packing(offsets: list, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tiny_model()(IDS[:1], cu_seq_lens_q=torch.tensor(offsets))


def test_offsets_need_a_single_row_without_padding() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="batch size 1, got 2"):
        model(IDS, cu_seq_lens_q=torch.tensor([0, 6]))
    with pytest.raises(ValueError, match="describe the batch twice"):
        model(IDS[:1], cu_seq_lens_q=torch.tensor([0, 6]), attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]))


@pytest.mark.parametrize("shape", [(2, 5), (12,), (3, 4)], ids=str)
def test_labels_of_a_wrong_shape(shape: tuple[int, ...]) -> None:
    """As many labels as tokens in another arrangement would give a loss that means nothing."""
    with pytest.raises(ValueError, match=r"`labels` must have shape \(2, 6\)"):
        tiny_model()(IDS, labels=torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_cache_that_was_made_for_no_model_or_another(static: bool) -> None:
    """`DynamicCache()` without a config cannot hold recurrent states; the error says how to make one that can."""
    model = tiny_model()
    other = tiny_config("ends_with_kda")
    with pytest.raises(ValueError, match=r"`cache` must have one layer .*config=model\.config"):
        model(IDS, cache=StaticCache(other, 9) if static else DynamicCache(config=other))
    with pytest.raises(ValueError, match=r"`cache` must have one layer .*config=model\.config"):
        model(IDS, cache=DynamicCache())


def test_cache_that_is_not_a_cache() -> None:
    with pytest.raises(TypeError, match=r"`cache` must be a `transformers.Cache`, got tuple"):
        tiny_model()(IDS, cache=((torch.zeros(1), torch.zeros(1)),))


def test_cache_of_another_batch_size() -> None:
    model = tiny_model()
    with torch.no_grad():
        cache = model(IDS, use_cache=True).cache
        with pytest.raises(ValueError, match=r"`initial_state` must have shape \[N, D, W-1\] = \[1, 32, 3\], got \[2"):
            model(IDS[:1], cache=cache)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_rows_of_nothing_but_padding(attention: str) -> None:
    """Their own result is finite and of no use; the other rows and all gradients are as without them."""
    model = tiny_model().train()
    model.set_attn_implementation(attention)
    mask = torch.tensor([[0] * 6, [1] * 6])
    labels = IDS.masked_fill(mask == 0, -100)
    padded = model(IDS, attention_mask=mask, labels=labels, skip_logits=False)
    alone = model(IDS[1:], labels=IDS[1:], skip_logits=False)
    assert padded.logits.isfinite().all()
    assert_close(padded.logits[1:], alone.logits, 5e-5)
    assert padded.loss.item() == pytest.approx(alone.loss.item(), rel=1e-6)
    padded.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


def test_batch_of_nothing_but_padding() -> None:
    model = tiny_model()
    with torch.no_grad():
        output = model(IDS, attention_mask=torch.zeros_like(IDS), use_cache=True)
        assert output.logits.isfinite().all()
        # It leaves no trace in the cache: what follows is as if it were the start.
        mask = torch.tensor([[0] * 6 + [1] * 6] * 2)
        continued = model(IDS, attention_mask=mask, cache=output.cache).logits
        assert_close(continued, model(IDS).logits, 5e-5)


@pytest.mark.parametrize("padded", [False, True], ids=["full_rows", "padded_rows"])
@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_nan_in_one_row_stays_in_that_row(experts: str, padded: bool) -> None:
    """S73: rows share the experts' matrix products, and padded rows share everything; NaN may not cross."""
    model = tiny_model()
    model.set_experts_implementation(experts)
    ids, mask = left_padded([IDS[0], IDS[1, :4] if padded else IDS[1]])
    clean = embeds(model, ids)
    poisoned = clean.clone()
    poisoned[0, 3] = NAN
    with torch.no_grad():
        expected = model(inputs_embeds=clean, attention_mask=mask).logits
        actual = model(inputs_embeds=poisoned, attention_mask=mask).logits
    assert actual[0, 3:].isnan().all(), "a NaN must be visible, not a plausible number"
    real = mask[1].bool()
    assert_close(actual[1, real], expected[1, real], 5e-5)


def test_nan_leaves_nothing_behind() -> None:
    """S73: neither in the model, for a fresh cache, nor in a cache that was reset."""
    model = tiny_model()
    poisoned = embeds(model, IDS)
    poisoned[0, 3] = NAN
    static = StaticCache(model.config, 12)
    with torch.no_grad():
        expected = model(IDS).logits
        for cache in (None, DynamicCache(config=model.config), static):
            assert model(inputs_embeds=poisoned, cache=cache).logits[0, 3:].isnan().all()
        assert torch.equal(model(IDS).logits, expected)
        assert_close(model(IDS, cache=DynamicCache(config=model.config)).logits, expected, 5e-5)
        static.reset()
        assert_close(model(IDS, cache=static).logits, expected, 5e-5)


def test_nan_in_one_row_of_a_growing_cache_stays_in_that_row() -> None:
    """S73: decoding goes on for the other rows."""
    model = tiny_model()
    poisoned = embeds(model, IDS)
    poisoned[0, 3] = NAN
    with torch.no_grad():
        cache = model(inputs_embeds=poisoned, use_cache=True).cache
        clean = model(IDS, use_cache=True).cache
        for token in range(3):
            actual = model(IDS[:, token : token + 1], cache=cache).logits
            expected = model(IDS[:, token : token + 1], cache=clean).logits
            assert actual[0].isnan().all()
            assert_close(actual[1], expected[1], 5e-5)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 2}], ids=["greedy", "sampling", "beams"])
def test_generating_from_nan_raises(options: dict[str, object]) -> None:
    """S73: rather than emitting some token for ever. The rows are named."""
    model = tiny_model()
    embeddings = torch.randn(2, 4, 32)
    embeddings[1, 2] = NAN
    with pytest.raises(ValueError, match=r"got NaN in rows .* after"):
        model.generate(inputs_embeds=embeddings, max_new_tokens=3, **options)


def test_generating_from_nan_goes_on_when_asked_to() -> None:
    model = tiny_model()
    tokens = model.generate(
        inputs_embeds=torch.full((1, 4, 32), NAN), max_new_tokens=3, min_new_tokens=3, remove_invalid_values=True
    )
    assert tokens.shape == (1, 3)


def test_training_step_with_nan_counts_nothing_for_balancing() -> None:
    model = tiny_model().train()
    model(inputs_embeds=torch.full((1, 6, 32), NAN))
    assert model.model.layers[1].mlp.gate.balance.tokens.item() == 0


def test_export_with_a_mask() -> None:
    """The number of real tokens is no constant of a graph."""
    arguments = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "use_cache": False}
    with pytest.raises(ValueError, match="an exported graph cannot find padding or packed documents"):
        torch.export.export(tiny_model(), (), arguments, strict=False)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_act", "relu", r"`hidden_act` must be one of \['situ', 'silu'\], got 'relu'"),
        ("num_hidden_layers", 3, r"must name the layers 1 to `num_hidden_layers`=3, got \[4, 5\]"),
        ("num_experts_per_token", 9, r"`num_experts_per_token` must be at most `num_experts`=8, got 9"),
    ],
)
def test_a_config_that_was_changed_into_nonsense_builds_no_model(field: str, value: Any, message: str) -> None:
    """Fields are checked when a config is made; one that was set later used to be ignored, or failed in a forward."""
    config = tiny_config()
    setattr(config, field, value)
    for build in (KimiK3ForCausalLM, KimiK3TextModel):
        with pytest.raises(StrictDataclassClassValidationError, match=message):
            build(config)
