# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Packing: the detector agrees with Transformers, splits round-trip, offsets are checked, indices match loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import find_packed_sequence_indices

from deltalatent.kernels.packing import chunk_index, document_index, document_starts, validate_cu_seqlens

lengths_of_documents = st.lists(st.integers(1, 9), min_size=1, max_size=12)
lengths_with_empty = st.lists(st.integers(0, 9), min_size=1, max_size=12)


def positions(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def offsets(lengths: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


@given(st.lists(lengths_of_documents, min_size=1, max_size=4))
def test_any_split_of_rows_is_recovered(rows):
    """Rows of one length: each is filled up with another document."""
    total = max(map(sum, rows))
    rows = [[*row, total - sum(row)] if sum(row) < total else row for row in rows]
    starts = document_starts(torch.stack([positions(row) for row in rows]))
    expected = offsets([length for row in rows for length in row])[:-1]
    assert starts.flatten().nonzero().flatten().tolist() == expected.tolist()


@given(st.lists(st.lists(st.integers(0, 5), min_size=7, max_size=7), min_size=1, max_size=3))
def test_agrees_with_transformers_on_any_positions(rows):
    position_ids = torch.tensor(rows)
    theirs = find_packed_sequence_indices(position_ids)
    ours = document_starts(position_ids)
    assert (int(ours.sum()) == len(rows)) == (theirs is None)
    if theirs is not None:
        assert torch.equal(ours.long().cumsum(-1) - 1, theirs)


def test_a_continued_prompt_is_one_document():
    assert document_starts(torch.arange(17, 25)[None]).tolist() == [[True] + 7 * [False]]


def test_an_empty_row_has_no_document():
    assert document_starts(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0)


def test_detector_refuses_wrong_shapes():
    with pytest.raises(ValueError, match=r"shape \[B, T\], got \[3\]: add the batch axis"):
        document_starts(torch.arange(3))


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
    cu_seqlens, total = offsets(lengths), sum(lengths) + slack
    documents, first = chunk_index(cu_seqlens, total, size)
    assert documents.numel() == (total // size + len(lengths) if lengths else 0)
    positions = torch.arange(documents.numel()) - first[documents]
    used = len(expected)
    assert used <= documents.numel()
    assert list(zip(documents[:used].tolist(), positions[:used].tolist(), strict=True)) == expected
    unused, behind = documents[used:], positions[used:]
    assert (cu_seqlens[unused] + size * behind >= cu_seqlens[unused + 1]).all()
