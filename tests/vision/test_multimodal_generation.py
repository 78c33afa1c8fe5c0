# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""`generate` with images writes what full recomputation of every prompt alone would write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from deltalatent import KimiK3ForConditionalGeneration
from tests.vision.vision_testing import PLACEHOLDER, Grid, item, prompt, random_media, tiny_multimodal_model

WIDE, TALL, SQUARE, CLIP = (1, 2, 8), (1, 6, 2), (1, 6, 6), (3, 4, 2)
NEW = 5
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}


@pytest.fixture
def model() -> KimiK3ForConditionalGeneration:
    """In float64, so that no rounding decides between two tokens."""
    model = tiny_multimodal_model().double()
    model.set_experts_implementation("batched_mm")  # torch has no grouped product in float64
    return model


@torch.no_grad()
def oracle(model: KimiK3ForConditionalGeneration, row: Tensor, media: dict[str, Tensor], new: int = NEW) -> Tensor:
    """The greedy continuation int64 [new] of a prompt, one full forward per token."""
    start = len(row)
    for _ in range(new):
        row = torch.cat([row, model(row[None], **media, use_cache=False).logits[0, -1:].argmax(-1)])
    return row[start:]


ROWS: list[list[int | Grid]] = [[3, WIDE, 4], [5], [1, CLIP, SQUARE, TALL, 2]]
ITEMS = (WIDE, CLIP, SQUARE, TALL)
OF_ROW = ([0], [], [1, 2, 3])


def expected_rows(model: KimiK3ForConditionalGeneration, batch: dict[str, Tensor], media: dict[str, Tensor]) -> Tensor:
    rows = []
    for i, indices in enumerate(OF_ROW):
        parts = [item(media, index) for index in indices]
        alone = {key: torch.cat([part[key] for part in parts]) for key in media} if parts else {}
        rows.append(oracle(model, batch["input_ids"][i][batch["attention_mask"][i].bool()], alone))
    return torch.stack(rows)


@pytest.mark.parametrize(
    "options",
    [{}, {"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}, {"prefill_chunk_size": 4}],
    ids=["dynamic", "recomputed", "static", "chunked"],
)
def test_batch_with_different_numbers_of_images(
    model: KimiK3ForConditionalGeneration, options: dict[str, Any]
) -> None:
    batch, media = prompt(*ROWS), random_media(*ITEMS)
    written = model.generate(**batch, **media, **GREEDY, **options)
    assert torch.equal(written[:, batch["input_ids"].shape[1] :], expected_rows(model, batch, media))


def test_beams_of_a_batch_keep_their_images(model: KimiK3ForConditionalGeneration) -> None:
    """Each row's beams, and the best sequences, are those of the row alone."""
    batch, media = prompt(*ROWS), random_media(*ITEMS)
    options = {
        "max_new_tokens": 3,
        "num_beams": 3,
        "num_return_sequences": 2,
        "do_sample": False,
        "eos_token_id": None,
    }
    written = model.generate(**batch, **media, **options)[:, batch["input_ids"].shape[1] :].view(3, 2, -1)
    for i, indices in enumerate(OF_ROW):
        parts = [item(media, index) for index in indices]
        alone = {key: torch.cat([part[key] for part in parts]) for key in media} if parts else {}
        row = batch["input_ids"][i][batch["attention_mask"][i].bool()][None]
        assert torch.equal(model.generate(row, **alone, **options)[:, row.shape[1] :], written[i]), f"row {i}"


def test_prompt_needs_logits_of_its_last_token_only(model: KimiK3ForConditionalGeneration) -> None:
    lengths: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, output: lengths.append(args[0].shape[1]))
    encoded: list[int] = []
    model.model.vision_tower.register_forward_hook(lambda module, args, output: encoded.append(len(args[0])))
    model.generate(**prompt([3, WIDE, 4]), **random_media(WIDE), **GREEDY)
    assert lengths == [1] * NEW
    assert encoded == [16], "the image is encoded once"


@pytest.mark.parametrize("second", ["all images", "new images", "no image"])
def test_turns_about_images_reuse_the_prefix(model: KimiK3ForConditionalGeneration, second: str) -> None:
    """A second question after a cached first turn: as if the whole conversation were one prompt.

    `generate` is given the whole conversation and the cache; images that are in the cache may be passed again.
    """
    first, media = prompt([3, WIDE, 4]), random_media(WIDE, TALL)
    cache = DynamicCache(config=model.config.get_text_config())
    answer = model.generate(**first, **item(media, 0), cache=cache, **GREEDY)
    seen = cache.get_seq_length()
    assert seen == answer.shape[1] - 1

    question: list[int | Grid] = [2, 3] if second == "no image" else [2, TALL, 3]
    ids = torch.cat([answer, prompt(question, seed=1)["input_ids"]], dim=1)
    whole = item(media, 0) if second == "no image" else media
    given = {"all images": media, "new images": item(media, 1), "no image": {}}[second]
    lengths: list[int] = []
    layer = model.model.language_model.layers[0]
    layer.register_forward_hook(lambda module, args, output: lengths.append(args[0].shape[1]))
    written = model.generate(ids, attention_mask=torch.ones_like(ids), **given, cache=cache, **GREEDY)
    assert lengths[0] == ids.shape[1] - seen, "only the new part is computed"
    assert torch.equal(written[0, ids.shape[1] :], oracle(model, ids[0], whole))


def test_second_turn_with_images_that_do_not_fit(model: KimiK3ForConditionalGeneration) -> None:
    first, media = prompt([3, WIDE, 4]), random_media(WIDE, TALL, SQUARE)
    cache = DynamicCache(config=model.config.get_text_config())
    answer = model.generate(**first, **item(media, 0), cache=cache, **GREEDY)
    ids = torch.cat([answer, prompt([2, TALL, 3], seed=1)["input_ids"]], dim=1)
    with pytest.raises(ValueError, match=r"got \[7\] placeholders per row \(7 in all\) for images of \[9\]"):
        model.generate(ids, attention_mask=torch.ones_like(ids), **item(media, 2), cache=cache, **GREEDY)


def test_text_only_prompts(model: KimiK3ForConditionalGeneration) -> None:
    batch = prompt([7], [4])
    written = model.generate(**batch, **GREEDY)
    for i in (0, 1):
        row = batch["input_ids"][i][batch["attention_mask"][i].bool()]
        assert torch.equal(written[i, batch["input_ids"].shape[1] :], oracle(model, row, {}))


def test_prompt_as_embeddings(model: KimiK3ForConditionalGeneration) -> None:
    """Visual tokens may be put among the embeddings by the caller; `generate` refused embeddings altogether."""
    batch, media = prompt([3, WIDE, 4]), random_media(WIDE)
    embeds = model.get_input_embeddings()(batch["input_ids"]).detach()
    embeds[batch["input_ids"] == PLACEHOLDER] = torch.cat(model.get_image_features(**media).pooler_output).detach()
    written = model.generate(inputs_embeds=embeds, attention_mask=batch["attention_mask"], **GREEDY)
    assert torch.equal(written[0], oracle(model, batch["input_ids"][0], media))
    with pytest.raises(ValueError, match="images need `input_ids` with their placeholders, got `inputs_embeds`"):
        model.generate(inputs_embeds=embeds, attention_mask=batch["attention_mask"], **media, **GREEDY)


@pytest.mark.parametrize("use_cache", [True, False])
def test_no_placeholder_is_written(model: KimiK3ForConditionalGeneration, use_cache: bool) -> None:
    """It would stand for an image that is not there: the next forward of the whole text raised."""

    def prefer_the_placeholder(module: nn.Module, args: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        logits = logits.clone()
        logits[..., PLACEHOLDER] = logits.max() + 1
        return logits

    batch, media = prompt([3, WIDE, 4]), random_media(WIDE)
    expected = model.generate(**batch, **media, **GREEDY)
    model.lm_head.register_forward_hook(prefer_the_placeholder)
    assert torch.equal(model.generate(**batch, **media, **GREEDY, use_cache=use_cache), expected)
    # What a caller suppresses is suppressed beside it.
    first = expected[0, batch["input_ids"].shape[1]].item()
    written = model.generate(**batch, **media, **GREEDY, use_cache=use_cache, suppress_tokens=[first])
    assert not {first, PLACEHOLDER} & set(written[0, batch["input_ids"].shape[1] :].tolist())


def test_continuous_batching_is_refused(model: KimiK3ForConditionalGeneration) -> None:
    with pytest.raises(ValueError, match="continuous batching needs a cache of keys and values in pages"):
        model.generate_batch([[5, 6, 7]])
