# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Packing: the detector agrees with Transformers, splits round-trip, offsets are checked, indices match loops."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import find_packed_sequence_indices

from deltalatent.kernels.packing import (
    chunk_index,
    cu_seqlens_from_position_ids,
    document_index,
    document_starts,
    validate_cu_seqlens,
)

lengths_of_documents = st.lists(st.integers(1, 9), min_size=1, max_size=12)
lengths_with_empty = st.lists(st.integers(0, 9), min_size=1, max_size=12)


def positions(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def offsets(lengths: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


@given(lengths_of_documents)
def test_any_split_of_a_row_is_recovered(lengths):
    found = cu_seqlens_from_position_ids(positions(lengths)[None])
    if len(lengths) == 1:
        assert found is None
    else:
        assert found.dtype == torch.int32
        assert found.tolist() == offsets(lengths).tolist()


@given(st.integers(1, 4), st.integers(1, 12), st.data())
def test_rows_of_a_batch_are_flattened(batch_size, total, data):
    """Rows of one length, each cut at random places."""
    cuts = [data.draw(st.sets(st.integers(1, max(1, total - 1)))) for _ in range(batch_size)]
    rows = []
    for places in cuts:
        edges = [0, *sorted(place for place in places if place < total), total]
        rows.append([b - a for a, b in itertools.pairwise(edges)])
    found = cu_seqlens_from_position_ids(torch.stack([positions(row) for row in rows]))
    if all(len(row) == 1 for row in rows):
        assert found is None
    else:
        assert found.tolist() == offsets([length for row in rows for length in row]).tolist()


@given(st.lists(st.lists(st.integers(0, 5), min_size=7, max_size=7), min_size=1, max_size=3))
def test_agrees_with_transformers_on_any_positions(rows):
    position_ids = torch.tensor(rows)
    theirs = find_packed_sequence_indices(position_ids)
    ours = document_starts(position_ids)
    assert (cu_seqlens_from_position_ids(position_ids) is None) == (theirs is None)
    if theirs is not None:
        assert torch.equal(ours.long().cumsum(-1) - 1, theirs)


def test_a_continued_prompt_is_one_document():
    assert cu_seqlens_from_position_ids(torch.arange(17, 25)[None]) is None


@pytest.mark.parametrize("padding", [[1, 1, 1], [0, 0, 0]], ids=["padded-with-1", "padded-with-0"])
def test_the_mask_keeps_left_padding_from_reading_as_documents(padding):
    row = torch.tensor([[*padding, 0, 1, 2, 3]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    assert cu_seqlens_from_position_ids(row) is not None  # as Transformers, which therefore asks for no mask
    assert cu_seqlens_from_position_ids(row, mask) is None


def test_the_mask_keeps_boundaries_between_real_tokens():
    row = torch.tensor([[1, 1, 0, 1, 2, 0, 1, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0]])
    assert cu_seqlens_from_position_ids(row, mask).tolist() == [0, 5, 8]


def test_an_empty_row_has_nothing_packed():
    assert cu_seqlens_from_position_ids(torch.zeros(2, 0, dtype=torch.long)) is None


def test_detector_refuses_wrong_shapes():
    with pytest.raises(ValueError, match=r"shape \[B, T\], got \[3\]: add the batch axis"):
        document_starts(torch.arange(3))
    with pytest.raises(ValueError, match="`attention_mask` must have the shape"):
        document_starts(torch.zeros(1, 3), torch.ones(1, 4))


@pytest.mark.parametrize(
    ("cu_seqlens", "error", "message"),
    [
        (torch.tensor([0.0, 4.0]), TypeError, "int32 or int64 tensor, got torch.float32"),
        ([0, 4], TypeError, "got list"),
        (torch.tensor([[0, 4]]), ValueError, r"shape \[N\+1\]"),
        (torch.tensor([], dtype=torch.int32), ValueError, r"shape \[N\+1\]"),
        (torch.tensor([1, 4]), ValueError, "start at 0, got 1"),
        (torch.tensor([0, 3, 2]), ValueError, "must not decrease, got 3 then 2 at document 1"),
        (torch.tensor([0, 3, 6]), ValueError, "end at or before T=5, got 6"),
    ],
    ids=["float", "list", "two-axes", "no-entry", "no-zero", "decreasing", "beyond-end"],
)
def test_bad_offsets_are_refused(cu_seqlens, error, message):
    with pytest.raises(error, match=message):
        validate_cu_seqlens(cu_seqlens, 5)


def test_packing_needs_one_row():
    with pytest.raises(ValueError, match="needs inputs with batch size 1, got 2: flatten"):
        validate_cu_seqlens(torch.tensor([0, 5]), 5, batch_size=2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("values", [[0], [0, 5], [0, 0, 2, 2, 3]], ids=["no-document", "one", "empty-and-slack"])
def test_good_offsets_pass(values, dtype):
    validate_cu_seqlens(torch.tensor(values, dtype=dtype), 5)


def test_values_on_other_devices_are_read_only_for_debugging(monkeypatch):
    """The meta device stands for one whose values cannot be had for free: reading them fails."""
    cu_seqlens = torch.empty(3, dtype=torch.int32, device="meta")
    validate_cu_seqlens(cu_seqlens, 5)
    monkeypatch.setenv("DELTALATENT_DEBUG", "1")
    with pytest.raises((NotImplementedError, RuntimeError), match=r"(?i)meta"):
        validate_cu_seqlens(cu_seqlens, 5)


@given(lengths_with_empty, st.integers(0, 4))
def test_document_of_every_token(lengths, slack):
    expected = [n for n, length in enumerate(lengths) for _ in range(length)] + [len(lengths)] * slack
    for dtype in (torch.int32, torch.int64):
        assert document_index(offsets(lengths, dtype), len(expected)).tolist() == expected


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 4), st.integers(1, 5))
def test_chunks_of_every_document(lengths, slack, size):
    expected = [(n, c) for n, length in enumerate(lengths) for c in range(-(-length // size))]
    documents, chunks = chunk_index(offsets(lengths), sum(lengths) + slack, size)
    unused = documents.numel() - len(expected)
    assert unused >= 0
    assert documents.numel() == (sum(lengths) + slack) // size + len(lengths)
    assert list(zip(documents.tolist(), chunks.tolist(), strict=True)) == expected + [(-1, -1)] * unused
