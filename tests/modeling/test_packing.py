# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Packed documents give what each gives alone, however the packing is described; nothing crosses a boundary.

Public reports behind these tests: S08 to S14.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening

from deltalatent.kernels.kda import kda_chunk
from deltalatent.kernels.sequence_layout import sequence_layout
from deltalatent.kernels.short_conv import short_convolution
from deltalatent.training import balanced_routers
from tests.equivalence import EXACT, ONE_KIND, exact_model
from tests.testing_common import (
    VARIANTS,
    assert_close,
    assert_gradients_close,
    gradients,
    max_error,
    random_ids,
    tiny_model,
)

LENGTHS = {
    "7_1_12": [7, 1, 12],
    "ones": [1] * 6,
    "1_1_5": [1, 1, 5],
    "5_1": [5, 1],
    "33_2_31": [33, 2, 31],
    "one_document": [9],
}


def documents(lengths: list[int], vocab_size: int = 256) -> list[Tensor]:
    """One document int64 [T] per length."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, vocab_size, (length,), generator=generator) for length in lengths]


def offsets(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def restarting(lengths: list[int]) -> Tensor:
    """int64 [1, T]."""
    return torch.cat([torch.arange(length) for length in lengths])[None]


DESCRIPTIONS = {
    "position_ids": lambda lengths: {"position_ids": restarting(lengths)},
    "cu_seq_lens_q": lambda lengths: {"cu_seq_lens_q": offsets(lengths)},
    "cu_seq_lens_q_int64": lambda lengths: {"cu_seq_lens_q": offsets(lengths, torch.int64)},
    "both": lambda lengths: {"position_ids": restarting(lengths), "cu_seq_lens_q": offsets(lengths)},
    "with_mask_of_ones": lambda lengths: {
        "position_ids": restarting(lengths),
        "attention_mask": torch.ones(1, sum(lengths), dtype=torch.long),
    },
}


def apart(model: Any, rows: list[Tensor]) -> Tensor:
    """Logits [sum T, vocab] of every document alone."""
    return torch.cat([model(row[None]).logits[0] for row in rows])


@pytest.mark.parametrize("description", DESCRIPTIONS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_packed_is_apart(lengths: list[int], description: str) -> None:
    """S08, S13, S14: boundaries from restarting positions or from offsets, also of documents of one token."""
    model = exact_model()
    rows = documents(lengths)
    with torch.no_grad():
        packed = model(torch.cat(rows)[None], **DESCRIPTIONS[description](lengths)).logits[0]
        assert_close(packed, apart(model, rows), EXACT)


@pytest.mark.parametrize(
    ("variant", "attention", "lengths"),
    [
        *((name, "sdpa", "7_1_12") for name in [*VARIANTS, *ONE_KIND]),
        ("default", "eager", "7_1_12"),
        ("default", "sdpa", "1_1_5"),
        ("default", "eager", "1_1_5"),
    ],
)
def test_packed_is_apart_in_logits_and_gradients(variant: str, attention: str, lengths: str) -> None:
    """S11: through the whole model; a layer that gets no boundaries shows here, whatever the operators can do."""
    lengths = LENGTHS[lengths]
    model = exact_model(variant).train()
    model.set_attn_implementation(attention)
    rows = documents(lengths)
    weights = torch.randn(sum(lengths), model.config.vocab_size)
    expected = apart(model, rows)
    actual = model(torch.cat(rows)[None], position_ids=restarting(lengths)).logits[0]
    assert_close(actual, expected, EXACT)
    # Gradients of parameters that are always float32 are rounded to float32.
    assert_gradients_close(
        gradients(model, (actual * weights).sum()), gradients(model, (expected * weights).sum()), rel=1e-6
    )


def test_packed_is_apart_in_float32_with_recomputation() -> None:
    """The default experts backend, and boundaries that reach the second forward of activation checkpointing."""
    lengths = [7, 1, 12]
    model = tiny_model().train()
    rows = documents(lengths)
    plain = model(torch.cat(rows)[None], position_ids=restarting(lengths)).logits[0]
    assert_close(plain, apart(model, rows), 5e-5)
    expected = gradients(model, plain.square().sum())
    model.activation_checkpointing_enable()
    again = model(torch.cat(rows)[None], position_ids=restarting(lengths)).logits[0]
    assert_gradients_close(gradients(model, again.square().sum()), expected)


@pytest.mark.parametrize("variant", ["default", *ONE_KIND])
def test_nothing_of_a_document_reaches_the_next(variant: str) -> None:
    """S09, S10: change every token of the first document; not even the first tokens of the second may move."""
    lengths = [7, 5, 8]
    model = exact_model(variant)
    rows = documents(lengths)
    changed = [random_ids(model.config, 1, 7, seed=5)[0], *rows[1:]]
    with torch.no_grad():
        before, after = (
            model(torch.cat(r)[None], position_ids=restarting(lengths)).logits[0] for r in (rows, changed)
        )
    assert max_error(before[:7], after[:7]) > 0.1
    assert_close(before[7:], after[7:], EXACT)


def test_convolution_alone_keeps_documents_apart() -> None:
    """S09, S10: a leak of the last taps is invisible beside a correct recurrence unless looked at alone."""
    x, weight = torch.randn(1, 12, 8), torch.randn(8, 1, 4)
    cu_seqlens = offsets([5, 7])
    expected, _ = short_convolution(x[:, 5:], weight)
    for first in (x[:, :5], torch.full((1, 5, 8), 1e20)):
        y, _ = short_convolution(torch.cat([first, x[:, 5:]], 1), weight, cu_seqlens=cu_seqlens)
        # The same sums, but PyTorch may vectorise the longer row differently.
        assert_close(y[:, 5:], expected, 1e-6)


def test_recurrence_alone_keeps_documents_apart() -> None:
    """S09: the state, without a convolution in front of it."""
    q, k, v, g = (torch.randn(1, 12, 2, 8, dtype=torch.float64) for _ in range(4))
    beta, A_log, dt_bias = torch.randn(1, 12, 2, dtype=torch.float64), torch.zeros(2), torch.zeros(16)
    expected, _ = kda_chunk(q[:, 5:], k[:, 5:], v[:, 5:], g[:, 5:], beta[:, 5:], A_log, dt_bias)
    for scale in (1.0, 1e6):
        first = torch.cat([v[:, :5] * scale, v[:, 5:]], 1)
        o, _ = kda_chunk(q, k, first, g, beta, A_log, dt_bias, cu_seqlens=offsets([5, 7]))
        assert_close(o[:, 5:], expected, EXACT)


def test_one_document_described_as_packed_is_not_packed() -> None:
    """S13: two boundaries around everything are no packing."""
    model = exact_model()
    ids = random_ids(model.config, 1, 9)
    with torch.no_grad():
        assert_close(model(ids, cu_seq_lens_q=torch.tensor([0, 9])).logits, model(ids).logits, EXACT)
    layout = sequence_layout(1, 9, position_ids=torch.arange(9)[None] + 17)
    assert layout is None


def test_empty_documents_change_nothing() -> None:
    model = exact_model()
    ids = torch.cat(documents([4, 5]))[None]
    with torch.no_grad():
        expected = model(ids, cu_seq_lens_q=torch.tensor([0, 4, 9])).logits
        actual = model(ids, cu_seq_lens_q=torch.tensor([0, 0, 4, 4, 4, 9, 9])).logits
    assert_close(actual, expected, EXACT)


@pytest.mark.parametrize("poison", [None, float("nan")], ids=["finite", "nan"])
def test_slack_gets_no_gradient_and_gives_none(poison: float | None) -> None:
    """S12: 20 real and 12 slack tokens; the gradients are those of the row without slack."""
    model = exact_model().train()
    lengths = [13, 7]
    ids = torch.cat(documents(lengths))[None]
    targets = random_ids(model.config, 1, 20, seed=3)[0]

    def run(slack: int) -> tuple[dict[str, Tensor], Tensor]:
        embeds = model.model.embed_tokens(ids).detach()
        extra = torch.randn(1, slack, embeds.shape[-1], dtype=embeds.dtype)
        if poison is not None:
            extra.fill_(poison)
        embeds = torch.cat([embeds, extra], 1).requires_grad_()
        logits = model(inputs_embeds=embeds, cu_seq_lens_q=offsets(lengths)).logits[0, :20]
        loss = torch.nn.functional.cross_entropy(logits, targets)
        (of_embeds,) = torch.autograd.grad(loss, embeds, retain_graph=True)
        return gradients(model, loss), of_embeds

    expected, expected_embeds = run(0)
    actual, actual_embeds = run(12)
    assert_gradients_close(actual, expected, rel=1e-6)
    assert_close(actual_embeds[:, :20], expected_embeds, EXACT)
    assert not actual_embeds[:, 20:].any()


def test_rows_may_be_packed_differently() -> None:
    model = exact_model()
    packings = [[5, 9], [14], [1, 1, 12]]
    rows = [documents(lengths) for lengths in packings]
    ids = torch.stack([torch.cat(row) for row in rows])
    positions = torch.cat([restarting(lengths) for lengths in packings])
    with torch.no_grad():
        packed = model(ids, position_ids=positions).logits
        for i, row in enumerate(rows):
            assert_close(packed[i], apart(model, row), EXACT, what=f"row {i}")


PADDED_AND_PACKED = {
    # positions of real tokens; None is padding
    "padding_at_the_end": [0, 1, 2, 0, 1, 0, None, None],
    "padding_in_front": [None, None, 0, 1, 2, 0, 1, 0],
    "padding_between": [0, 1, None, None, 0, 1, 2, 0],
    "padding_inside_a_document": [0, 1, None, 2, 3, 0, None, 1],
    "single_tokens_apart": [0, None, 0, None, 0, 1, 2, 3],
}


@pytest.mark.parametrize("padding_position", [0, 1])
@pytest.mark.parametrize("row", PADDED_AND_PACKED.values(), ids=PADDED_AND_PACKED)
def test_packed_and_padded_rows(row: list[int | None], padding_position: int) -> None:
    model = exact_model()
    mask = torch.tensor([[position is not None for position in row]])
    positions = torch.tensor([[padding_position if position is None else position for position in row]])
    positions = positions.to([torch.int64, torch.int32][padding_position])
    ids = random_ids(model.config, 1, len(row))
    real = ids[mask]
    starts = [i for i, position in enumerate(positions[mask].tolist()) if position == 0]
    lengths = [end - start for start, end in zip(starts, [*starts[1:], len(real)], strict=True)]
    with torch.no_grad():
        packed = model(ids, attention_mask=mask.long(), position_ids=positions).logits[mask]
        assert_close(packed, apart(model, list(real.split(lengths))), EXACT)


@pytest.mark.parametrize(
    "flags", [{}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}], ids=["positions", "all"]
)
def test_batches_of_the_padding_free_collator(flags: dict[str, bool]) -> None:
    """S08: what `DataCollatorWithFlattening` makes goes in as it is, and its loss is that of the documents."""
    model = exact_model()
    rows = documents([7, 2, 12])
    batch = DataCollatorWithFlattening(return_tensors="pt", **flags)([{"input_ids": row.tolist()} for row in rows])
    with torch.no_grad():
        loss = model(**batch).loss
        losses = [model(row[None], labels=row[None]).loss * (len(row) - 1) for row in rows]
    assert_close(loss, sum(losses) / sum(len(row) - 1 for row in rows), 1e-6)  # a float32 loss


def test_packed_documents_make_no_cache_and_refuse_one() -> None:
    model = tiny_model()
    ids = random_ids(model.config, 1, 8)
    with torch.no_grad():
        assert model(ids, position_ids=restarting([3, 5]), use_cache=True).cache is None
        cache = model(ids, use_cache=True).cache
        for packing in ({"position_ids": restarting([3, 5])}, {"cu_seq_lens_q": offsets([3, 5])}):
            with pytest.raises(ValueError, match=r"packed documents .* cannot be cached"):
                model(ids, cache=cache, **packing)
    assert cache.get_seq_length() == 8


def test_balancing_counts_documents_and_no_slack() -> None:
    model = tiny_model().train()
    model(random_ids(model.config, 1, 16), cu_seq_lens_q=offsets([4, 1, 6]))
    assert {router.balance.tokens.item() for _, router in balanced_routers(model)} == {11}
    for _, router in balanced_routers(model):
        router.balance.reset()
    model(random_ids(model.config, 1, 16), position_ids=restarting([4, 12]))
    assert {router.balance.tokens.item() for _, router in balanced_routers(model)} == {16}
