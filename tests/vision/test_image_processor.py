# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Images of every kind to patches; sizes, colours, backgrounds; files; what is refused."""

from __future__ import annotations

import base64
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor

from deltalatent import KimiK3ImageProcessor, KimiK3ImageProcessorPil
from deltalatent.processing.media import fitting_size, to_pixels
from tests.testing_common import GOLDEN
from tests.vision.vision_testing import tiny_multimodal_config

SMALL = {"patch_size": 4, "in_patch_limit": 64, "patch_limit_on_one_side": 16}
# The `media_proc_cfg` of the public release (its other entries are the defaults of this class too).
RELEASED = {
    "in_patch_limit": 65536,
    "patch_size": 14,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_kernel_size": 2,
    "fixed_output_tokens": None,
    "patch_limit_on_one_side": 512,
    "in_patch_limit_each_frame": 16384,
    "in_patch_limit_video": 655360,
    "sample_fps": 8.0,
    "max_num_frames_each_video": None,
    "temporal_merge_kernel_size": 4,
    "timestamp_mode": "hh:mm:ss.fff",
}


def picture(height: int, width: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A smooth random picture: noise enlarged."""
    bands = {"RGB": 3, "RGBA": 4, "L": 1, "LA": 2}[mode]
    noise = np.random.default_rng(seed).integers(0, 256, (8, 8, bands), dtype=np.uint8)
    image = Image.fromarray(noise[..., 0] if bands == 1 else noise, mode if bands == 1 else None)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def unpatched(inputs: Any) -> Tensor:
    """One image [3, H, W] put together from its patches, as bytes."""
    (_, rows, columns), patches = inputs["grid_thws"][0].tolist(), inputs["pixel_values"]
    side = patches.shape[-1]
    image = patches.view(rows, columns, 3, side, side).permute(2, 0, 3, 1, 4).reshape(3, rows * side, columns * side)
    return ((image * 0.5 + 0.5) * 255).round()


# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((224, 224), (16, 16)),
        ((225, 225), (18, 18)),
        ((1, 1), (2, 2)),
        ((768, 1024), (56, 74)),
        ((3584, 3584), (256, 256)),
        ((3000, 4000), (216, 286)),
        ((20000, 20000), (258, 258)),
        ((1, 100000), (2, 512)),
        ((100000, 3), (512, 2)),
        ((7, 500), (2, 36)),
    ],
)  # fmt: skip
def test_grids_at_the_released_settings(size: tuple[int, int], grid: tuple[int, int]) -> None:
    processor = KimiK3ImageProcessor()
    assert processor.get_number_of_image_patches(*size) == math.prod(grid)
    if max(size) <= 1024:
        inputs = processor(Image.new("RGB", size[::-1]))
        assert inputs["grid_thws"].tolist() == [[1, *grid]]
        assert inputs["pixel_values"].shape == (math.prod(grid), 3, 14, 14)


@settings(max_examples=200, deadline=None)
@given(height=st.integers(1, 30000), width=st.integers(1, 30000))
def test_any_size_keeps_to_the_limits(height: int, width: int) -> None:
    """Never enlarged, never empty, within the limits, proportions kept where there are pixels enough."""
    new_height, new_width = fitting_size(height, width, 14, 65536, 512)
    assert 1 <= new_height <= min(height, 7168) and 1 <= new_width <= min(width, 7168)
    assert math.ceil(new_height / 28) * math.ceil(new_width / 28) * 4 <= 1.04 * 65536
    if min(new_height, new_width) > 50:
        assert new_height / new_width == pytest.approx(height / width, rel=0.04)
    if (height // 14) * (width // 14) <= 65536 and max(height, width) <= 7168:
        assert (new_height, new_width) == (height, width)


def test_small_images_are_padded_not_enlarged() -> None:
    inputs = KimiK3ImageProcessor(**SMALL)(Image.new("RGB", (5, 3), (255, 0, 0)))
    image = unpatched(inputs)
    assert image.shape == (3, 8, 8)
    assert bool((image[0, :3, :5] == 255).all()) and image[0].sum() == 3 * 5 * 255
    assert not image[1:].any()


def test_patches_are_row_major() -> None:
    pixels = np.zeros((8, 16, 3), dtype=np.uint8)
    for row in range(2):
        for column in range(4):
            pixels[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = 10 * row + column
    inputs = KimiK3ImageProcessor(**SMALL)(pixels)
    means = ((inputs["pixel_values"].mean(dim=(1, 2, 3)) * 0.5 + 0.5) * 255).round().tolist()
    assert means == [0, 1, 2, 3, 10, 11, 12, 13]
    assert torch.equal(unpatched(inputs), torch.tensor(pixels).permute(2, 0, 1).float())


def test_batch_of_different_images() -> None:
    processor = KimiK3ImageProcessor(**SMALL)
    images = [picture(9, 20), picture(30, 40), picture(8, 8, "L")]
    together = processor([images[0], [images[1], images[2]]], return_tensors="np")
    alone = [processor(image) for image in images]
    assert isinstance(together["pixel_values"], np.ndarray)
    assert np.array_equal(together["grid_thws"], np.concatenate([one["grid_thws"] for one in alone]))
    assert np.array_equal(together["pixel_values"], np.concatenate([one["pixel_values"] for one in alone]))
    stacked = np.stack([np.asarray(picture(8, 8, seed=i)) for i in range(3)])
    assert processor(stacked)["grid_thws"].shape == (3, 3)


# ---- resampling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(60, 90), (101, 37), (200, 33)], ids=str)
def test_torch_resamples_as_pillow_does(size: tuple[int, int]) -> None:
    """Eight-bit arithmetic in both: no value differs by more than one level."""
    image = picture(*size)
    target = fitting_size(*size, 4, 64, 16)
    assert target != size
    expected = np.asarray(image.resize(target[::-1], Image.Resampling.BICUBIC)).astype(int)
    processors = {"torch": KimiK3ImageProcessor(**SMALL), "pil": KimiK3ImageProcessorPil(**SMALL)}
    for name, processor in processors.items():
        actual = unpatched(processor(image))[:, : target[0], : target[1]].permute(1, 2, 0).numpy()
        assert np.abs(actual - expected).max() <= (1 if name == "torch" else 0), name


def test_transparent_edges_do_not_bleed() -> None:
    """Colours count as much as they are opaque: what is behind full transparency has none."""
    image = Image.new("RGBA", (64, 64), (255, 0, 0, 0))
    image.paste((0, 0, 255, 255), (0, 0, 32, 64))
    for processor_class in (KimiK3ImageProcessor, KimiK3ImageProcessorPil):
        pixels = unpatched(processor_class(**SMALL, transparent_bg_config={"pattern": "black"})(image))
        assert pixels[0].max() <= 2, "no red"
        assert pixels[2, :, :14].min() >= 253


# ---- colours --------------------------------------------------------------------------------------------------------


def kinds_of_images() -> dict[str, Any]:
    """One orange picture in many forms, and what its pixels should be."""
    orange = (200, 120, 40)
    solid = Image.new("RGB", (12, 8), orange)
    array = np.asarray(solid)
    file = io.BytesIO()
    solid.save(file, "PNG")
    return {
        "RGB": solid,
        "RGBA": Image.new("RGBA", (12, 8), (*orange, 255)),
        "palette": solid.quantize(4),
        "CMYK": solid.convert("CMYK"),
        "array": array,
        "channels first": np.moveaxis(array, -1, 0),
        "four channels": np.dstack([array, np.full((8, 12), 255, np.uint8)]),
        "float array": array / 255,
        "tensor": torch.tensor(array).permute(2, 0, 1),
        "tensor, channels last": torch.tensor(array),
        "float tensor": torch.tensor(array).permute(2, 0, 1) / 255,
        "bytes": file.getvalue(),
        "base64": base64.b64encode(file.getvalue()).decode(),
        "data URL": "data:image/png;base64," + base64.b64encode(file.getvalue()).decode(),
    }


@pytest.mark.parametrize("kind", kinds_of_images())
def test_kinds_of_images(kind: str) -> None:
    image = unpatched(KimiK3ImageProcessor(**SMALL)(kinds_of_images()[kind]))
    assert image.shape == (3, 8, 16)
    expected = torch.tensor([200.0, 120.0, 40.0])[:, None, None]
    assert (image[:, :, :12] - expected).abs().max() <= (1 if kind == "CMYK" else 0)


def test_gray_images(tmp_path: Path) -> None:
    gray = picture(8, 16, "L")
    expected = torch.tensor(np.asarray(gray)).expand(3, -1, -1).float()
    deep = Image.fromarray(np.asarray(gray).astype(np.uint16) * 256 + 7)
    assert deep.mode == "I;16"
    forms = {
        "L": gray,
        "LA": Image.merge("LA", (gray, Image.new("L", gray.size, 255))),
        "16 bits": deep,
        "array": np.asarray(gray),
        "one channel": np.asarray(gray)[..., None],
        "two channels": np.dstack([np.asarray(gray), np.full((8, 16), 255, np.uint8)]),
        "tensor": torch.tensor(np.asarray(gray)),
    }
    for name, form in forms.items():
        assert torch.equal(unpatched(KimiK3ImageProcessor(**SMALL)(form)), expected), name
    ink = np.asarray(gray) > 127
    assert set(unpatched(KimiK3ImageProcessor(**SMALL)(ink)).unique().tolist()) == {0, 255}
    assert set(unpatched(KimiK3ImageProcessor(**SMALL)(Image.fromarray(ink))).unique().tolist()) == {0, 255}


def test_background_of_transparent_images() -> None:
    """The release's chessboard: squares of 8 pixels, light at the top left; other patterns; none."""
    clear = Image.new("RGBA", (32, 16), (10, 20, 30, 0))
    image = unpatched(KimiK3ImageProcessor(**SMALL)(clear))
    assert image[0, 0, :32:8].tolist() == [255, 180, 255, 180]
    assert image[0, 8, :32:8].tolist() == [180, 255, 180, 255]
    assert image[0, 7, 7] == 255 and torch.equal(image[0], image[2])
    for pattern, level in (("white", 255), ("gray", 128), ("black", 0)):
        plain = KimiK3ImageProcessor(**SMALL)(clear, transparent_bg_config={"pattern": pattern})
        assert bool((unpatched(plain) == level).all())
    dropped = unpatched(KimiK3ImageProcessor(**SMALL, transparent_bg_config=None)(clear))
    assert dropped[:, 0, 0].tolist() == [10, 20, 30]
    half = Image.new("RGBA", (8, 8), (100, 100, 100, 128))
    mixed = unpatched(KimiK3ImageProcessor(**SMALL)(half))[0, 0, 0].item()
    assert mixed == int(128 / 255 * 100 + (1 - 128 / 255) * 255)


@pytest.mark.parametrize("stage", ["before_resize", "after_resize"])
def test_stage_of_the_background(stage: str) -> None:
    """Squares are those of the original, or of what the model sees."""
    clear = Image.new("RGBA", (128, 128), (0, 0, 0, 0))
    image = unpatched(KimiK3ImageProcessor(**SMALL, transparent_bg_fill_stage=stage)(clear))
    assert image.shape == (3, 32, 32)
    light = (image[0, 0] > 217).int()
    assert light.diff().abs().sum().item() == (15 if stage == "before_resize" else 3)


def test_palette_with_a_transparent_colour() -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 255, 0, 0])
    image.info["transparency"] = 1
    assert unpatched(KimiK3ImageProcessor(**SMALL)(image))[:, 0, 0].tolist() == [255, 255, 255]


@pytest.mark.parametrize("from_file", [False, True])
def test_orientation_of_cameras(from_file: bool, tmp_path: Path) -> None:
    """Orientation 6: the camera was turned; what the sensor calls the left is the top."""
    image = Image.new("RGB", (16, 8))
    image.paste((255, 255, 255), (0, 0, 8, 8))
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "camera.png", exif=exif)
    source = tmp_path / "camera.png" if from_file else Image.open(tmp_path / "camera.png")
    upright = unpatched(KimiK3ImageProcessor(**SMALL)(source))
    assert upright.shape == (3, 16, 8)
    assert bool((upright[:, :8] == 255).all()) and not upright[:, 8:].any()


# ---- files of settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "expected"), [("pil", KimiK3ImageProcessorPil), ("torchvision", KimiK3ImageProcessor)]
)
def test_save_and_load(backend: str, expected: type, tmp_path: Path) -> None:
    processor = KimiK3ImageProcessor(**SMALL, transparent_bg_config=None, image_mean=[0.4, 0.5, 0.6])
    processor.save_pretrained(tmp_path)
    file = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert file["image_processor_type"] == "KimiK3ImageProcessor"
    assert file["media_proc_cfg"]["transparent_bg_config"] is None and file["media_proc_cfg"]["patch_size"] == 4
    again = AutoImageProcessor.from_pretrained(tmp_path, backend=backend)
    assert type(again) is expected
    assert again.to_dict() == processor.to_dict()
    image = picture(60, 50)
    difference = (again(image)["pixel_values"] - processor(image)["pixel_values"]).abs().max()
    assert difference == 0 if expected is KimiK3ImageProcessor else difference <= 2.01 / 255


def test_released_file_loads_verbatim(tmp_path: Path) -> None:
    """It names no class of ours, but the config of the folder does; its remote code is not needed."""
    released = {"auto_map": {"AutoImageProcessor": "kimi_k3_vision_processing.KimiK3VisionProcessor"}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(released | {"media_proc_cfg": RELEASED}))
    (tmp_path / "config.json").write_text((GOLDEN / "multimodal" / "config.json").read_text())
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="torchvision")
    assert type(processor) is KimiK3ImageProcessor
    written = json.loads(json.dumps(processor.to_dict()["media_proc_cfg"]))
    assert RELEASED.items() <= written.items()
    defaults = json.loads(json.dumps(KimiK3ImageProcessor().to_dict()["media_proc_cfg"]))
    assert written == defaults


def test_settings_of_a_call_are_not_kept() -> None:
    processor = KimiK3ImageProcessor(**SMALL)
    image = picture(40, 40)
    assert processor(image, in_patch_limit=16)["grid_thws"].tolist() == [[1, 4, 4]]
    assert processor(image)["grid_thws"].tolist() == [[1, 8, 8]]
    assert processor.get_number_of_image_patches(40, 40, {"in_patch_limit": 16}) == 16


def test_patches_fit_the_model() -> None:
    """Processor and tower agree about patches and groups."""
    vision = tiny_multimodal_config().vision_config
    inputs = KimiK3ImageProcessor(**SMALL)(picture(20, 33))
    assert inputs["pixel_values"].shape[1:] == (3, vision.patch_size, vision.patch_size)
    assert not inputs["grid_thws"][:, 1:].remainder(torch.tensor(vision.merge_kernel_size)).any()


# ---- what is refused ------------------------------------------------------------------------------------------------


def truncated() -> bytes:
    file = io.BytesIO()
    picture(64, 64).save(file, "PNG")
    return file.getvalue()[:-200]


BAD_IMAGES: dict[str, tuple[Any, str]] = {
    "corrupt bytes": (b"\x89PNG not really", r"must be decodable, got b'.x89PNG not really'"),
    "truncated": (truncated(), r"must be decodable"),
    "no file": ("/nowhere/photo.png", r"existing file, an address or base64, got /nowhere/photo.png"),
    "text": ("a photograph of a cat", r"existing file, an address or base64, got a photograph"),
    "base64 of nonsense": (base64.b64encode(b"nonsense").decode(), r"must be decodable"),
    "zero size": (Image.new("RGB", (0, 5)), r"must have pixels, got 5 x 0"),
    "empty array": (np.zeros((0, 4, 3), np.uint8), r"must have pixels, got 0 x 4"),
    "five channels": (np.zeros((8, 8, 5), np.uint8), r"1 to 4 channels, first or last, got shape \(8, 8, 5\)"),
    "one axis": (np.zeros(8, np.uint8), r"2 or 3 dimensions, got shape \(8,\)"),
    "integers": (np.zeros((8, 8, 3), np.int64), r"uint8, bool or floating point, got torch.int64"),
    "floats to 255": (np.full((8, 8, 3), 200.0), r"in \[0, 1\], got values from 200 to 200"),
    "negative": (torch.full((3, 8, 8), -1.0), r"in \[0, 1\], got values from -1 to -1"),
    "NaN": (np.full((8, 8, 3), np.nan), r"in \[0, 1\], got values from nan to nan"),
    "mode F": (Image.new("F", (8, 8)), r"Pillow mode 'F' whose range is unknown"),
    "None": (None, r"must be a path, an address, bytes, .* got NoneType"),
    "no images": ([], r"at least one image, got none"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_IMAGES)
def test_bad_images(kind: str) -> None:
    image, message = BAD_IMAGES[kind]
    with pytest.raises((ValueError, TypeError), match=message):
        KimiK3ImageProcessor()(image)


def test_a_damaged_image_that_was_opened_lazily() -> None:
    with pytest.raises(ValueError, match=r"damaged|decodable"):
        KimiK3ImageProcessor()(Image.open(io.BytesIO(truncated())))


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"patch_size": 0}, r"`patch_size` must be a positive number, got 0"),
        ({"in_patch_limit": -1}, r"`in_patch_limit` must be a positive number"),
        ({"sample_fps": True}, r"`sample_fps` must be a positive number"),
        ({"merge_kernel_size": [2, 0]}, r"`merge_kernel_size` must be positive"),
        ({"image_mean": [0.5]}, r"`image_mean` must have three numbers"),
        ({"image_std": [0.5, 0.0, 0.5]}, r"`image_std` must be positive"),
        ({"fixed_output_tokens": 64}, r"`fixed_output_tokens` must be null, got 64"),
        ({"timestamp_mode": "frames"}, r"`timestamp_mode` must be one of"),
        ({"transparent_bg_fill_stage": "never"}, r"`transparent_bg_fill_stage` must be one of"),
        ({"transparent_bg_config": {"pattern": "stripes"}}, r"pattern` must be one of .* got 'stripes'"),
    ],
)
def test_bad_settings(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KimiK3ImageProcessor(**settings_)
    with pytest.raises(ValueError, match=message):
        KimiK3ImageProcessor()(picture(8, 8), **settings_)


def test_unknown_settings_of_a_call() -> None:
    with pytest.raises(TypeError, match=r"settings must be among .* got \['do_resize'\]"):
        KimiK3ImageProcessor()(picture(8, 8), do_resize=False)


def test_channel_order_of_ambiguous_arrays() -> None:
    """Three by eight by four: arrays have their channels last, tensors first, where both are possible."""
    values = np.arange(3 * 8 * 4, dtype=np.uint8).reshape(3, 8, 4)
    assert to_pixels(values).shape == (4, 3, 8)
    assert to_pixels(torch.tensor(values)).shape == (3, 8, 4)
