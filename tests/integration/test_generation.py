# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""`generate` writes what full recomputation of every prompt alone would write, whatever the batch, cache and search.

Public reports behind these tests: S16, S19, S20, S21, S23, S71.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

from tests.documentation import run_blocks
from tests.equivalence import EXACT, ONE_KIND, exact_model, greedy_oracle
from tests.testing_common import assert_close, left_padded, random_ids, tiny_model

NEW = 6
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
PROMPT_LENGTHS = (13, 9, 1, 4)
VARIANTS = ["default", "softplus_gate", "ends_with_kda", "predecessor", *ONE_KIND]


def prompts(model: Any, lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[Tensor]:
    return [random_ids(model.config, 1, length, seed=length)[0] for length in lengths]


def expected_continuations(model: Any, rows: list[Tensor]) -> Tensor:
    """int64 [B, NEW]."""
    return torch.stack([greedy_oracle(model, row, NEW)[len(row) :] for row in rows])


@cache
def expected_of(variant: str, lengths: tuple[int, ...] = PROMPT_LENGTHS) -> Tensor:
    """`expected_continuations` of the exact model, once for all tests."""
    model = exact_model(variant)
    return expected_continuations(model, prompts(model, lengths))


@pytest.mark.parametrize("variant", VARIANTS)
def test_batch_of_prompts_of_different_lengths(variant: str) -> None:
    model = exact_model(variant)
    ids, mask = left_padded(prompts(model))
    for kind in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        written = model.generate(ids, attention_mask=mask, **GREEDY, **kind)
        assert torch.equal(written[:, ids.shape[1] :], expected_of(variant)), kind


def test_batch_of_prompts_in_float32() -> None:
    """The default experts backend, and no float64 to break a tie: seeds with clear winners."""
    model = tiny_model()
    rows = prompts(model)
    ids, mask = left_padded(rows)
    written = model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(written[:, ids.shape[1] :], expected_continuations(model, rows))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("variant", "chunk_size"), [("default", 1), ("default", 4), ("default", 12), ("default", 64), ("mla_only", 1)]
)
def test_chunked_prefill(variant: str, chunk_size: int, kind: str) -> None:
    """Also where a chunk is all padding for some row, and a static cache that is allocated before the first chunk."""
    model = exact_model(variant)
    ids, mask = left_padded(prompts(model))
    written = model.generate(
        ids, attention_mask=mask, **GREEDY, prefill_chunk_size=chunk_size, cache_implementation=kind
    )
    assert torch.equal(written[:, ids.shape[1] :], expected_of(variant))


def test_chunked_prefill_needs_a_layer_that_counts_tokens() -> None:
    """Transformers cuts the mask by the length of the cache, which a cache of KDA layers alone does not know."""
    model = tiny_model(**ONE_KIND["kda_only"])
    with pytest.raises(ValueError, match="can only be called on Attention layers"):
        model.generate(prompts(model)[0][None], **GREEDY, prefill_chunk_size=4)


def test_static_cache_again_with_another_prompt() -> None:
    """S21: nothing of the first call is left for the second, which reuses its size."""
    model = exact_model()
    for lengths in ((13, 9), (4, 7), (13, 2)):
        ids, mask = left_padded(prompts(model, lengths))
        written = model.generate(ids, attention_mask=mask, **GREEDY, cache_implementation="static", max_cache_len=40)
        assert torch.equal(written[:, ids.shape[1] :], expected_of("default", lengths))


def test_prompt_as_embeddings() -> None:
    model = exact_model()
    ids, mask = left_padded(prompts(model))
    embeds = model.model.embed_tokens(ids).detach()
    for kind in ("dynamic", "static"):
        written = model.generate(inputs_embeds=embeds, attention_mask=mask, **GREEDY, cache_implementation=kind)
        assert torch.equal(written, expected_of("default"))


def test_a_finished_row_leaves_the_others_alone() -> None:
    model = exact_model()
    ids, mask = left_padded(prompts(model))
    expected = expected_of("default")
    eos = expected[1, 1].item()
    written = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=eos, pad_token_id=0
    )
    for row, tokens in zip(expected.tolist(), written[:, ids.shape[1] :].tolist(), strict=True):
        end = row.index(eos) + 1 if eos in row else len(row)
        assert tokens == row[:end] + [0] * (len(tokens) - end)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_beam_search(kind: str) -> None:
    """S20: every state follows its beam, also for padded prompts."""
    model = exact_model()
    rows = prompts(model, (9, 4))
    ids, mask = left_padded(rows)
    beams = {
        "max_new_tokens": NEW, "num_beams": 3, "num_return_sequences": 3, "do_sample": False, "eos_token_id": None,
        "return_dict_in_generate": True, "output_scores": True,
    }  # fmt: skip
    written = model.generate(ids, attention_mask=mask, **beams, cache_implementation=kind)
    for i, row in enumerate(rows):
        alone = model.generate(row[None], **beams, use_cache=False)
        mine = slice(3 * i, 3 * i + 3)
        assert torch.equal(written.sequences[mine, ids.shape[1] :], alone.sequences[:, len(row) :])
        # Scores are sums of float32 log-probabilities.
        assert_close(written.sequences_scores[mine], alone.sequences_scores, 1e-6)
    assert len({tuple(sequence) for sequence in written.sequences.tolist()}) == 6


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_sampling_several_sequences(kind: str) -> None:
    """The same seed draws the same tokens with and without a cache."""
    model = exact_model()
    ids, mask = left_padded(prompts(model, (9, 4)))
    drawn = []
    for kwargs in ({"cache_implementation": kind}, {"use_cache": False}):
        torch.manual_seed(5)
        drawn.append(
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=NEW,
                do_sample=True,
                num_return_sequences=4,
                eos_token_id=None,
                **kwargs,
            )
        )
    assert torch.equal(*drawn)
    assert len({tuple(sequence) for sequence in drawn[0].tolist()}) == 8


@pytest.mark.parametrize("new_tokens_only", [False, True], ids=["whole_conversation", "new_tokens_only"])
def test_conversation_of_three_turns(new_tokens_only: bool) -> None:
    """S23: the cache of a turn continues in the next, given the whole conversation or the mask of it."""
    model = exact_model()
    conversation = prompts(model, (7,))[0]
    past = None
    for turn in range(3):
        expected = greedy_oracle(model, conversation, NEW)
        seen = 0 if past is None else past.get_seq_length()
        ids = conversation[None, seen:] if new_tokens_only else conversation[None]
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(conversation)[None],
            cache=past,
            **GREEDY,
            return_dict_in_generate=True,
        )
        assert torch.equal(written.sequences[0, -NEW:], expected[-NEW:]), f"turn {turn}"
        past = written.cache
        assert past.get_seq_length() == len(expected) - 1  # the last token was written, not read
        conversation = torch.cat([expected, random_ids(model.config, 1, 3 + turn, seed=turn)[0]])


@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "recomputed"])
def test_conversations_of_a_batch(use_cache: bool) -> None:
    """Padding in the middle: the prompts of both turns have different lengths."""
    model = exact_model()
    first = prompts(model, (7, 3))
    second = [random_ids(model.config, 1, length, seed=40 + length)[0] for length in (2, 5)]
    ids, mask = left_padded(first)
    turn = model.generate(ids, attention_mask=mask, **GREEDY, return_dict_in_generate=True)
    more, more_mask = left_padded(second)
    written = model.generate(
        torch.cat([turn.sequences, more], 1),
        attention_mask=torch.cat([mask, torch.ones(2, NEW, dtype=torch.long), more_mask], 1),
        **GREEDY,
        **({"cache": turn.cache} if use_cache else {"use_cache": False}),
    )
    for i, row in enumerate(first):
        conversation = torch.cat([greedy_oracle(model, row, NEW), second[i]])
        assert torch.equal(written[i, -NEW:], greedy_oracle(model, conversation, NEW)[-NEW:]), f"row {i}"


def test_guidance_runs_a_second_cache() -> None:
    model = exact_model()
    row = prompts(model, (9,))[0][None]
    guided = [
        model.generate(row, **GREEDY, guidance_scale=1.5, negative_prompt_ids=row[:, -2:], **kind)
        for kind in ({}, {"use_cache": False})
    ]
    assert torch.equal(*guided)
    assert not torch.equal(guided[0], model.generate(row, **GREEDY))


def test_logits_of_the_prompt_are_made_for_its_last_token_only() -> None:
    """S71: a float32 [T, vocab_size] of a long prompt does not fit into memory."""
    model = tiny_model()
    lengths = []
    model.lm_head.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    row = prompts(model, (13,))[0][None]
    for kwargs in ({}, {"use_cache": False}, {"prefill_chunk_size": 5}, {"cache_implementation": "static"}):
        model.generate(row, **GREEDY, **kwargs)
    model.generate(row, max_new_tokens=NEW, num_beams=2, do_sample=False)
    assert set(lengths) == {1}


@pytest.mark.parametrize(
    "drafts",
    [
        pytest.param({"prompt_lookup_num_tokens": 3}, id="prompt_lookup"),
        pytest.param({"assistant_early_exit": 2}, id="early_exit"),
        pytest.param({"assistant_model": None}, id="assistant"),
    ],
)
def test_draft_decoding_is_refused(drafts: dict[str, Any]) -> None:
    """S19: a recurrent state cannot be rolled back to before a rejected token."""
    model = tiny_model()
    if "assistant_model" in drafts:
        drafts = {"assistant_model": tiny_model(seed=1)}
    with pytest.raises(ValueError, match="not supported with stateful models, such as KimiK3ForCausalLM"):
        model.generate(prompts(model, (9,))[0][None], **GREEDY, **drafts)


def test_drafting_for_another_model_is_refused() -> None:
    """The assistant's own cache is rolled back, too; it used to raise about the shape of a state."""
    model = tiny_model()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    main = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, **sizes)).eval()
    with pytest.raises(ValueError, match="neither checks drafts nor writes them for another"):
        main.generate(prompts(model, (9,))[0][None], **GREEDY, assistant_model=model)


@pytest.mark.parametrize("variant", ["default", "mla_only"])
def test_continuous_batching_is_refused(variant: str) -> None:
    """Its cache has pages of keys and values; without this it failed somewhere inside."""
    model = tiny_model(**ONE_KIND.get(variant, {}))
    row = prompts(model, (9,))[0]
    with pytest.raises(ValueError, match="continuous batching needs a cache of keys and values in pages, got KimiK3"):
        model.generate_batch([row.tolist()])
    with pytest.raises(ValueError, match="call `generate` with prompts padded on the left"):
        model.generate(row[None], **GREEDY, cache_implementation="paged")


def test_right_padded_prompts_are_warned_about() -> None:
    """S16: the token after padding is not the token after the prompt; Transformers' warning must reach the user."""
    model = tiny_model()
    ids, mask = (tensor.flip(1) for tensor in left_padded(prompts(model, (9, 6))))
    with CaptureLogger(logging.get_logger("transformers.generation.utils")) as captured:
        model.generate(ids, attention_mask=mask, **GREEDY)
    assert "right-padding was detected" in captured.out


def test_output_of_every_step_is_that_of_the_full_forward() -> None:
    """Logits, hidden states and attentions of a step are those of the same token in one forward of the whole text."""
    model = exact_model()
    model.set_attn_implementation("eager")
    row = prompts(model, (9,))[0][None]
    written = model.generate(
        row,
        **GREEDY,
        return_dict_in_generate=True,
        output_logits=True,
        output_hidden_states=True,
        output_attentions=True,
    )
    with torch.no_grad():
        whole = model(written.sequences, output_hidden_states=True, output_attentions=True, use_cache=False)
    for step in range(1, NEW):
        t = 8 + step
        assert_close(written.logits[step][0], whole.logits[0, t].float(), 1e-6)  # `generate` keeps float32 logits
        for layer, hidden in enumerate(written.hidden_states[step]):
            assert_close(hidden[0, 0], whole.hidden_states[layer][0, t], EXACT)
        for layer, weights in enumerate(written.attentions[step]):
            assert_close(weights[0, :, 0], whole.attentions[layer][0, :, t, : t + 1], EXACT)


def test_evaluation_and_generation_gather_no_balancing_statistics() -> None:
    model = tiny_model()
    model.generate(prompts(model, (9,))[0][None], **GREEDY)
    assert all(layer.mlp.gate.balance._flat is None for layer in model.model.layers[1:])


def test_the_page_on_generation() -> None:
    assert run_blocks(Path(__file__).parents[2] / "docs" / "generation.md") == {"python", "text"}
