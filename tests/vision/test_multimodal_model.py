# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Images, clips and text in one batch: who sees whom, what trains, what is saved, and what is refused.

Public reports behind these tests: S69 (images of different sizes in one batch), S70 (grids with time), S71 (logits of
the whole prompt).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, AutoModelForImageTextToText, AutoModelForMultimodalLM

from deltalatent import KimiK3Config, KimiK3ForConditionalGeneration, KimiK3Model, KimiK3VisionModel, lora_targets
from deltalatent.modeling.multimodal import check_placeholders
from tests.equivalence import ROUNDED
from tests.testing_common import (
    assert_close,
    assert_gradients_close,
    gradients,
    randomize_,
    tiny_config,
    tiny_model,
)
from tests.vision.vision_testing import (
    PLACEHOLDER,
    item,
    prompt,
    random_media,
    tiny_multimodal_config,
    tiny_multimodal_model,
    tiny_vision_config,
)

WIDE, TALL, SQUARE, CLIP = (1, 2, 8), (1, 6, 2), (1, 6, 6), (3, 4, 2)


@pytest.fixture
def model() -> KimiK3ForConditionalGeneration:
    return tiny_multimodal_model()


def features(model: KimiK3ForConditionalGeneration, media: dict[str, Tensor]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return model.get_image_features(**media).pooler_output


# ---- who sees whom --------------------------------------------------------------------------------------------------


def test_an_item_is_computed_as_if_it_were_alone(model: KimiK3ForConditionalGeneration) -> None:
    """Whatever its neighbours are: other sizes, equal sizes side by side, clips."""
    media = random_media(WIDE, TALL, TALL, SQUARE, CLIP, WIDE)
    together = features(model, media)
    assert [len(tokens) for tokens in together] == [4, 3, 3, 9, 2, 4]
    for i, tokens in enumerate(together):
        assert_close(tokens, features(model, item(media, i))[0], what=f"item {i}")
    changed = dict(media, pixel_values=media["pixel_values"].clone())
    changed["pixel_values"][16 + 12 : 16 + 24] += 1  # all patches of item 2
    for i, (before, after) in enumerate(zip(together, features(model, changed), strict=True)):
        assert torch.equal(before, after) == (i != 2), f"item {i}"


def test_frames_of_a_clip_see_each_other_and_their_number(model: KimiK3ForConditionalGeneration) -> None:
    """Equal frames are no image: they have time vectors. The number of tokens does not depend on that of frames."""
    image = random_media((1, 4, 2))
    clips = [
        {"pixel_values": image["pixel_values"].repeat(t, 1, 1, 1), "grid_thws": torch.tensor([[t, 4, 2]])}
        for t in (1, 2, 4)
    ]
    (still,), (two,), (four,) = (features(model, clip) for clip in clips)
    assert torch.equal(still, features(model, image)[0])
    assert still.shape == two.shape == four.shape
    assert (still - two).abs().max() > 1e-2 < (two - four).abs().max()
    swapped = random_media((2, 4, 2))
    swapped["pixel_values"] = swapped["pixel_values"].roll(8, dims=0)
    assert (features(model, swapped)[0] - features(model, random_media((2, 4, 2)))[0]).abs().max() > 1e-2


def test_rows_with_different_numbers_of_images(model: KimiK3ForConditionalGeneration) -> None:
    """Each row of the batch as if it were alone; one has no image, one a clip and two images side by side."""
    rows: list[list[Any]] = [[3, WIDE, 4], [5], [1, CLIP, SQUARE, TALL, 2]]
    media = random_media(WIDE, CLIP, SQUARE, TALL)
    batch = prompt(*rows)
    with torch.no_grad():
        together = model(**batch, **media).logits
        for i, of_row in enumerate(([0], [], [1, 2, 3])):
            real = batch["attention_mask"][i].bool()
            parts = [item(media, index) for index in of_row]
            alone = {key: torch.cat([part[key] for part in parts]) for key in media} if parts else {}
            expected = model(batch["input_ids"][i][real][None], **alone).logits[0]
            assert_close(together[i][real], expected, ROUNDED, what=f"row {i}")


def test_visual_tokens_are_causal(model: KimiK3ForConditionalGeneration) -> None:
    batch = prompt([4, WIDE, 2, TALL, 3])
    media, other = random_media(WIDE, TALL), random_media(WIDE, TALL, seed=1)
    first = 4 + 4 + 2  # where the second image begins
    other["pixel_values"][:16] = media["pixel_values"][:16]
    with torch.no_grad():
        logits, changed = model(**batch, **media).logits, model(**batch, **other).logits
    assert_close(changed[:, :first], logits[:, :first])
    assert (logits[:, first:] - changed[:, first:]).abs().amax(dim=-1).min() > 1e-3


def test_text_alone_is_the_text_model() -> None:
    """The text part is the same class, and visual tokens enter by nothing but the embedding."""
    model = tiny_multimodal_model()
    text = tiny_model()
    text.model.load_state_dict(model.model.language_model.state_dict())
    text.lm_head.load_state_dict(model.lm_head.state_dict())
    batch = prompt([9], [4])
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, text(**batch).logits)
        media, with_image = random_media(WIDE), prompt([3, WIDE, 4])
        embeds = text.model.embed_tokens(with_image["input_ids"])
        embeds[0, 3:7] = features(model, media)[0]
        expected = text(inputs_embeds=embeds, attention_mask=with_image["attention_mask"]).logits
        assert torch.equal(model(**with_image, **media).logits, expected)
        encoded = {"image": model.get_image_features(**media)}
        assert torch.equal(model(**with_image, mm_encoder_outputs=encoded).logits, expected)
        assert torch.equal(model.model(**with_image, **media).last_hidden_state, text.model(
            inputs_embeds=embeds, attention_mask=with_image["attention_mask"]
        ).last_hidden_state)  # fmt: skip


@pytest.mark.parametrize("keep", [1, 3, torch.tensor([0, 5])], ids=str)
def test_logits_of_a_part_of_the_prompt(model: KimiK3ForConditionalGeneration, keep: Any) -> None:
    batch, media = prompt([3, WIDE, 4]), random_media(WIDE)
    with torch.no_grad():
        everything, part = model(**batch, **media).logits, model(**batch, **media, logits_to_keep=keep).logits
    assert_close(part, everything[:, -keep:] if isinstance(keep, int) else everything[:, keep])


def test_output_as_a_tuple_from_the_config(model: KimiK3ForConditionalGeneration) -> None:
    batch, media = prompt([3, WIDE, 4]), random_media(WIDE)
    expected = model(**batch, **media).logits
    model.config.return_dict = model.config.text_config.return_dict = False
    as_tuple = model(**batch, **media)
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[0], expected)


def test_model_without_a_tower() -> None:
    config = KimiK3Config(text_config=tiny_config(), vision_config=None)
    model = randomize_(KimiK3ForConditionalGeneration(config)).eval()
    assert not [name for name, _ in model.named_parameters() if "vision" in name or "projector" in name]
    ids = torch.tensor([[3, 250, 9]])  # no token is special here
    assert model(ids).logits.shape == (1, 3, 256)
    with pytest.raises(ValueError, match=r"need a vision tower, got a model with `vision_config` null"):
        model(ids, **random_media(WIDE))


# ---- training -------------------------------------------------------------------------------------------------------


def loss_of(model: Any, media: dict[str, Tensor]) -> Tensor:
    batch = prompt([3, WIDE, 4], [6], [2, TALL, 5])
    labels = batch["input_ids"].masked_fill((batch["attention_mask"] == 0) | (batch["input_ids"] == PLACEHOLDER), -100)
    return model(**batch, **media, labels=labels).loss


def test_frozen_tower_trains_the_rest_as_before(model: KimiK3ForConditionalGeneration) -> None:
    media = random_media(WIDE, TALL)
    everything = gradients(model.train(), loss_of(model, media))
    model.model.vision_tower.requires_grad_(False)
    rest = gradients(model, loss_of(model, media))
    assert {name for name in everything if "vision_tower" not in name} == rest.keys()
    assert any("mm_projector" in name for name in rest)
    assert_gradients_close(rest, {name: everything[name] for name in rest})


def test_every_parameter_gets_a_gradient_also_under_checkpointing(model: KimiK3ForConditionalGeneration) -> None:
    media = random_media(WIDE, TALL)
    plain = gradients(model.train(), loss_of(model, media))
    assert plain.keys() == dict(model.named_parameters()).keys()
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert_gradients_close(gradients(model, loss_of(model, media)), plain)


def test_loss_without_logits_is_the_loss_with_them(model: KimiK3ForConditionalGeneration) -> None:
    """In training logits are left out, as in the text model; `skip_logits=False` gives them."""
    batch, media = prompt([3, WIDE, 4], [6]), random_media(WIDE)
    labels = batch["input_ids"].masked_fill(batch["input_ids"] == PLACEHOLDER, -100)
    model.train()
    lean, full = (model(**batch, **media, labels=labels, skip_logits=skip) for skip in (True, False))
    assert lean.logits is None and full.logits.shape == (*labels.shape, 256)
    assert_close(lean.loss, full.loss)
    assert model(**batch, **media, labels=labels).logits is None


@pytest.mark.parametrize("parts", ["tower", "text", "both"])
def test_lora(model: KimiK3ForConditionalGeneration, parts: str) -> None:
    """Adapters on what is named and nowhere else; the merged model is the adapted one."""
    tower = ["wqkv", "wo", "fc0", "fc1", "mm_projector.proj.0", "mm_projector.proj.2"]
    text = lora_targets(model.config, experts=False)["target_modules"]
    targets = {"tower": tower, "text": text, "both": [*tower, *text]}[parts]
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=targets))
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert any("vision_tower" in name for name in trained) == (parts != "text")
    assert any("language_model" in name for name in trained) == (parts != "tower")
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    media, batch = random_media(WIDE, TALL), prompt([3, WIDE, 4], [2, TALL, 5])
    adapted.train()
    loss_of(adapted, media).backward()
    assert all(parameter.grad is not None for _, parameter in adapted.named_parameters() if parameter.requires_grad)
    adapted.eval()
    with torch.no_grad():
        expected = adapted(**batch, **media).logits
        assert_close(adapted.merge_and_unload()(**batch, **media).logits, expected, rel=ROUNDED)


def test_initial_weights() -> None:
    """Spreads as configured, norms one: an image is neither silent nor loud among text."""
    torch.manual_seed(0)
    fields = {"initializer_range": 0.1, "vt_hidden_size": 64, "mm_hidden_size": 64, "vt_intermediate_size": 128}
    config = tiny_multimodal_config(vision=fields)
    model = KimiK3ForConditionalGeneration(config)
    for name, parameter in model.model.vision_tower.named_parameters():
        if "norm" in name:
            assert bool((parameter == 1).all()), name
        else:
            assert parameter.std().item() == pytest.approx(0.1, rel=0.2), name
    assert bool((model.model.mm_projector.post_norm.weight == 1).all())
    tokens = features(model, random_media(SQUARE))[0]
    assert tokens.square().mean().item() == pytest.approx(1, rel=0.05)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_saved_under_released_names_and_loaded_by_every_class(
    model: KimiK3ForConditionalGeneration, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {name.split(".")[0] for name in stored} == {"language_model", "vision_tower", "mm_projector"}
    assert "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight" in stored
    assert {"language_model.lm_head.weight", "vision_tower.encoder.blocks.1.wqkv.weight"} <= stored.keys()

    batch, media = prompt([3, WIDE, 4]), random_media(WIDE)
    with torch.no_grad():
        expected = model(**batch, **media)
        hidden = model.model(**batch, **media).last_hidden_state
    for load in (KimiK3ForConditionalGeneration, AutoModelForImageTextToText, AutoModelForMultimodalLM):
        again, info = load.from_pretrained(tmp_path, output_loading_info=True)
        assert type(again) is KimiK3ForConditionalGeneration and not any(info.values())
        assert torch.equal(again.eval()(**batch, **media).logits, expected.logits)
    for load in (KimiK3Model, AutoModel):
        base, info = load.from_pretrained(tmp_path, output_loading_info=True)
        assert type(base) is KimiK3Model and not any(info.values())
        assert torch.equal(base.eval()(**batch, **media).last_hidden_state, hidden)
    # `Trainer` resumes in this way.
    fresh = KimiK3ForConditionalGeneration(model.config).eval()
    fresh.load_state_dict(stored)
    assert torch.equal(fresh(**batch, **media).logits, expected.logits)


def test_base_model_by_itself(model: KimiK3ForConditionalGeneration, tmp_path: Path) -> None:
    model.model.save_pretrained(tmp_path)
    again = KimiK3Model.from_pretrained(tmp_path)
    assert torch.equal(
        again.vision_tower.encoder.blocks[1].wo.weight, model.model.vision_tower.encoder.blocks[1].wo.weight
    )
    with_head = KimiK3ForConditionalGeneration.from_pretrained(tmp_path, allow_missing_keys=True)
    assert torch.equal(with_head.model.language_model.norm.weight, model.model.language_model.norm.weight)
    tower = AutoModel.from_config(tiny_vision_config())
    assert type(tower) is KimiK3VisionModel


def test_tied_embeddings(tmp_path: Path) -> None:
    model = tiny_multimodal_model(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    assert "language_model.lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    again = KimiK3ForConditionalGeneration.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.language_model.embed_tokens.weight


def test_half_precision_keeps_what_must_be_float32(model: KimiK3ForConditionalGeneration, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    half = KimiK3ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for candidate in (half, model.to(torch.bfloat16)):
        kda = candidate.model.language_model.layers[0].self_attn
        assert candidate.model.vision_tower.patch_embed.proj.weight.dtype == kda.q_proj.weight.dtype == torch.bfloat16
        assert kda.A_log.dtype == kda.dt_bias.dtype == torch.float32


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_placeholders_that_fit() -> None:
    check_placeholders([4, 0, 5], [4, 2, 3])
    check_placeholders([0, 9], [4, 2, 3])
    check_placeholders([0, 0], [])


@pytest.mark.parametrize(
    ("placeholders", "tokens", "message"),
    [
        ([3], [4], r"got \[3\] placeholders per row \(3 in all\) for images of \[4\] visual tokens \(4 in all\)"),
        ([4, 2], [4], r"got \[4, 2\] .* \(6 in all\) for images of \[4\]"),
        (
            [3, 3],
            [4, 2],
            r"each image in one row, got \[3, 3\] .* \(6 in all\) for images of \[4, 2\] .* \(6 in all\)",
        ),
        ([2], [], r"got \[2\] .* for images of \[\] visual tokens \(0 in all\)"),
        ([0], [4], r"got \[0\] .* for images of \[4\]"),
    ],
    ids=["too few", "too many", "across rows", "no image", "no placeholder"],
)
def test_placeholders_that_do_not_fit(placeholders: list[int], tokens: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_placeholders(placeholders, tokens)


def test_mismatches_reach_the_user(model: KimiK3ForConditionalGeneration) -> None:
    batch, media = prompt([3, WIDE, 4]), random_media(WIDE)
    mismatch = r"one placeholder per visual token, and each image in one row, got"
    for ids, given in (
        (prompt([7])["input_ids"], media),
        (batch["input_ids"], {}),
        (batch["input_ids"][:, 4:], media),
    ):
        with pytest.raises(ValueError, match=mismatch):
            model(ids, **given)
        with pytest.raises(ValueError, match=mismatch):
            model.generate(ids, **given, max_new_tokens=1)
    with pytest.raises(ValueError, match=r"images need `input_ids` with their placeholders, got `inputs_embeds`"):
        model(inputs_embeds=torch.zeros(1, 4, 32), **media)
    encoded = {"image": model.get_image_features(**media)}
    with pytest.raises(ValueError, match=r"two forms of one input, got both"):
        model(**batch, **media, mm_encoder_outputs=encoded)
    with pytest.raises(ValueError, match=r"got 8 placeholders for 4 visual tokens"):
        model(**prompt([3, WIDE, WIDE]), mm_encoder_outputs=encoded)


def broken(change: str) -> dict[str, Any]:
    media: dict[str, Any] = dict(random_media(WIDE, TALL))
    pixels, grids = media["pixel_values"], media["grid_thws"]
    changes: dict[str, dict[str, Any]] = {
        "nan": {"pixel_values": torch.where(torch.arange(28)[:, None, None, None] == 20, torch.nan, pixels)},
        "bytes": {"pixel_values": torch.zeros_like(pixels, dtype=torch.uint8)},
        "grayscale": {"pixel_values": pixels[:, :1]},
        "patch size": {"pixel_values": torch.zeros(28, 3, 14, 14)},
        "patch missing": {"pixel_values": pixels[1:]},
        "no grids": {"grid_thws": None},
        "two columns": {"grid_thws": grids[:, 1:]},
        "float grids": {"grid_thws": grids.float()},
        "no items": {"pixel_values": pixels[:0], "grid_thws": grids[:0]},
        "odd rows": {"grid_thws": torch.tensor([[1, 1, 16], [1, 6, 2]])},
        "zero size": {"grid_thws": torch.tensor([[1, 0, 8], [1, 6, 2]])},
        "no frames": {"grid_thws": torch.tensor([[0, 2, 8], [1, 6, 2]])},
        "long clip": {"grid_thws": torch.tensor([[5, 2, 8], [1, 6, 2]])},
    }
    return media | changes[change]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("nan", r"must be numbers, got NaN in items \[1\]"),
        ("bytes", r"must be floating point, got torch.uint8"),
        ("grayscale", r"must have shape \[patches, 3, 4, 4\], got \(28, 1, 4, 4\)"),
        ("patch size", r"must have shape \[patches, 3, 4, 4\], got \(28, 3, 14, 14\)"),
        ("patch missing", r"got 27 patches for 28 cells in 2 items"),
        ("no grids", r"must be integers \[items, 3\] .* got None"),
        ("two columns", r"must be integers \[items, 3\] .* got torch.int64 \(2, 2\)"),
        ("float grids", r"must be integers \[items, 3\] .* got torch.float32"),
        ("no items", r"got 0 patches for 0 cells in 0 items"),
        ("odd rows", r"positive multiples of 2 and 2, got 1 x 16 for item 0"),
        ("zero size", r"positive multiples of 2 and 2, got 0 x 8 for item 0"),
        ("no frames", r"1 to `init_pos_emb_time`=4 frames, got 0 for item 0"),
        ("long clip", r"1 to `init_pos_emb_time`=4 frames, got 5 for item 0: split a longer video"),
    ],
)
def test_broken_pixels_and_grids(model: KimiK3ForConditionalGeneration, change: str, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        model.get_image_features(**broken(change))
