# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Padding, wherever it stands, changes nothing: every row gives what it gives alone.

Public reports behind these tests: S05 (results depend on the batch), S15 (left padding bleeds through the short
convolution), S16 (right padding).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deltalatent.training import balanced_routers
from tests.equivalence import EXACT, ONE_KIND, ROUNDED, exact_model
from tests.testing_common import (
    VARIANTS,
    assert_close,
    assert_gradients_close,
    gradients,
    left_padded,
    random_ids,
    tiny_model,
)

LENGTH = 19


def spread(row: Tensor, real: list[int]) -> tuple[Tensor, Tensor]:
    """Put the tokens of `row` where `real` is 1 -> `input_ids` and `attention_mask`, int64 [1, T].

    Padding gets an ordinary token, so that nothing depends on the embedding of a padding token being zero.
    """
    mask = torch.tensor([real])
    ids = torch.full_like(mask, 7)
    ids[mask.bool()] = row
    return ids, mask


PLACES = {
    "left_1": [0] + [1] * LENGTH,
    "left_3": [0] * 3 + [1] * LENGTH,
    "left_9": [0] * 9 + [1] * LENGTH,
    "left_33": [0] * 33 + [1] * LENGTH,
    "right_1": [1] * LENGTH + [0],
    "right_9": [1] * LENGTH + [0] * 9,
    "middle": [1] * 6 + [0] * 5 + [1] * (LENGTH - 6),
    "both_ends_and_middle": [0, 0] + [1] * 2 + [0] * 2 + [1] * (LENGTH - 2) + [0] * 3,
    "every_second": [0, 1] * LENGTH,
}
POSITIONS = {
    "none": lambda mask: None,
    "of_the_row": lambda mask: torch.arange(mask.shape[1])[None],
    "counted_pads_0": lambda mask: (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0),
    "counted_pads_1": lambda mask: (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1),
}


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("place", PLACES)
def test_padding_changes_no_logit(place: str, positions: str) -> None:
    model = exact_model()
    row = random_ids(model.config, 1, LENGTH)
    ids, mask = spread(row[0], PLACES[place])
    with torch.no_grad():
        expected = model(row).logits
        padded = model(ids, attention_mask=mask, position_ids=POSITIONS[positions](mask)).logits
    assert_close(padded[mask.bool()], expected[0], EXACT)


@pytest.mark.parametrize(
    ("variant", "attention"), [*((name, "sdpa") for name in [*VARIANTS, *ONE_KIND]), ("default", "eager")]
)
def test_batch_of_different_lengths_is_every_row_alone(variant: str, attention: str) -> None:
    model = exact_model(variant)
    model.set_attn_implementation(attention)
    rows = [random_ids(model.config, 1, length, seed=length)[0] for length in (1, 2, 3, 4, 11, 34)]
    ids, mask = left_padded(rows)
    with torch.no_grad():
        padded = model(ids, attention_mask=mask).logits
        for i, row in enumerate(rows):
            assert_close(padded[i, mask[i].bool()], model(row[None]).logits[0], EXACT, what=f"row {i}")


@pytest.mark.parametrize("place", ["left_9", "right_9", "middle"])
def test_padding_changes_no_logit_in_float32(place: str) -> None:
    """With the default experts backend, which float64 does not have."""
    model = tiny_model()
    row = random_ids(model.config, 1, LENGTH)
    ids, mask = spread(row[0], PLACES[place])
    with torch.no_grad():
        assert_close(model(ids, attention_mask=mask).logits[mask.bool()], model(row).logits[0], ROUNDED)


@pytest.mark.parametrize("place", ["left_9", "right_9", "middle"])
@pytest.mark.parametrize("variant", ["default", "softplus_gate", "predecessor"])
def test_padding_changes_no_gradient_and_gets_none(variant: str, place: str) -> None:
    model = exact_model(variant).train()
    row = random_ids(model.config, 1, LENGTH)
    ids, mask = spread(row[0], PLACES[place])
    # One target per token, put beside the token whatever stands between: a shift over the padded row would differ.
    targets = random_ids(model.config, 1, LENGTH, seed=1)[0]

    def run(ids: Tensor, mask: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        embeds = model.model.embed_tokens(ids).requires_grad_()
        logits = model(inputs_embeds=embeds, attention_mask=mask).logits[mask.bool()]
        loss = torch.nn.functional.cross_entropy(logits, targets)
        (of_embeds,) = torch.autograd.grad(loss, embeds, retain_graph=True)
        return gradients(model, loss), of_embeds

    expected, expected_embeds = run(row, torch.ones_like(row))
    actual, actual_embeds = run(ids, mask)
    assert_gradients_close(actual, expected, rel=1e-6)  # gradients of the float32 parameters are float32
    assert_close(actual_embeds[mask.bool()], expected_embeds[0], EXACT)
    assert not actual_embeds[~mask.bool()].any()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=12, max_size=12).filter(any), min_size=1, max_size=3))
def test_any_mask_is_the_row_without_its_holes(masks: list[list[bool]]) -> None:
    model = exact_model()
    mask = torch.tensor(masks).long()
    ids = random_ids(model.config, *mask.shape)
    with torch.no_grad():
        padded = model(ids, attention_mask=mask).logits
        for i, real in enumerate(mask.bool()):
            assert_close(padded[i, real], model(ids[i : i + 1, real]).logits[0], EXACT, what=f"row {i}")


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32], ids=str)
def test_mask_may_have_any_dtype(dtype: torch.dtype) -> None:
    model = tiny_model()
    ids, mask = spread(random_ids(model.config, 1, LENGTH)[0], PLACES["left_3"])
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits[:, 3:]
        assert torch.equal(model(ids, attention_mask=mask.to(dtype)).logits[:, 3:], expected)


def test_mask_of_ones_is_no_mask() -> None:
    model = exact_model()
    ids = random_ids(model.config)
    with torch.no_grad():
        assert_close(model(ids, attention_mask=torch.ones_like(ids)).logits, model(ids).logits, EXACT)


@pytest.mark.parametrize("copies", [4, 8])
def test_a_row_does_not_depend_on_how_often_it_is_in_the_batch(copies: int) -> None:
    """S05: one sample repeated gave other outputs than the sample alone, and worse training."""
    model = tiny_model()
    row = random_ids(model.config, 1, 40)
    alone = model(row, labels=row)
    together = model(row.expand(copies, -1), labels=row.expand(copies, -1))
    for i in range(copies):
        assert torch.equal(together.logits[i], together.logits[0]), f"row {i} differs from row 0"
    # Only the blocking of matrix products may differ.
    assert_close(together.logits[:1], alone.logits, ROUNDED)
    assert_gradients_close(gradients(model, together.loss), gradients(model, alone.loss))


def test_rows_do_not_see_each_other() -> None:
    model = exact_model()
    rows = [random_ids(model.config, 1, length, seed=length)[0] for length in (5, 12)]
    ids, mask = left_padded(rows)
    other, _ = left_padded([random_ids(model.config, 1, 5, seed=99)[0], rows[1]])
    with torch.no_grad():
        assert_close(model(ids, attention_mask=mask).logits[1], model(other, attention_mask=mask).logits[1], EXACT)


def test_padding_tokens_themselves_do_not_matter() -> None:
    model = tiny_model()
    ids, mask = spread(random_ids(model.config, 1, LENGTH)[0], PLACES["both_ends_and_middle"])
    other = torch.where(mask.bool(), ids, 200)
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask).logits, model(other, attention_mask=mask).logits)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30], ids=str)
def test_garbage_in_the_embeddings_of_padding_stays_there(poison: float) -> None:
    """A mask gives padding weight 0, but 0 * NaN is NaN: uninitialised embeddings at padding must not spread."""
    model = tiny_model().train()
    ids, mask = spread(random_ids(model.config, 1, LENGTH)[0], PLACES["both_ends_and_middle"])
    real = mask.bool()
    embeds = model.model.embed_tokens(ids).detach()
    clean = model(inputs_embeds=embeds, attention_mask=mask).logits
    poisoned = model(inputs_embeds=embeds.masked_fill(~real[..., None], poison), attention_mask=mask).logits
    assert torch.equal(poisoned, clean)
    expected, actual = (gradients(model, logits[real].square().sum()) for logits in (clean, poisoned))
    for name, gradient in expected.items():
        assert torch.equal(actual[name], gradient), name


def test_balancing_counts_no_padding() -> None:
    model = tiny_model().train()
    rows = [random_ids(model.config, 1, length, seed=length)[0] for length in (3, 8, 13)]
    ids, mask = left_padded(rows)
    model(ids, attention_mask=mask)
    padded = {
        name: (router.balance.tokens.item(), router.balance.counts.clone()) for name, router in balanced_routers(model)
    }
    for _, router in balanced_routers(model):
        router.balance.reset()
    for row in rows:
        model(row[None])
    for name, router in balanced_routers(model):
        tokens, counts = padded[name]
        assert tokens == 3 + 8 + 13
        # A required bias on the edge of a bin may fall to either side of it.
        assert (counts - router.balance.counts).abs().sum() <= 0.01 * counts.sum()
