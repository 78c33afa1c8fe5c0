# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts with images and videos to the inputs of the model: placeholders, order, chats, batches, videos, files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor
from transformers.utils import is_torchvision_available
from transformers.video_utils import VideoMetadata

from deltalatent import KimiK3ImageProcessor, KimiK3ImageProcessorPil, KimiK3Processor
from deltalatent.processing import video as video_module
from deltalatent.processing.processing_kimi_k3 import MEDIA_PAD, MEDIA_TOKENS
from deltalatent.processing.video import Sampling, open_video
from tests.vision.vision_testing import PATCH, tiny_multimodal_config, tiny_multimodal_model, tiny_tokenizer

IMAGE, VIDEO = "<|kimi_image_placeholder|>", "<|kimi_video_placeholder|>"


def image(height: int, width: int, level: int = 90) -> Image.Image:
    return Image.new("RGB", (width, height), (level, level, level))


def frames(count: int, height: int = 8, width: int = 8) -> np.ndarray:
    """uint8 [count, H, W, 3]; frame i has the level 10 i."""
    return np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None, None] * 10, (count, height, width, 3))


@pytest.fixture
def processor() -> KimiK3Processor:
    return KimiK3Processor(KimiK3ImageProcessor(patch_size=PATCH, sample_fps=2.0), tiny_tokenizer())


def levels(inputs: Any) -> list[float]:
    """The gray level of each item, from its first pixel."""
    sizes = inputs["grid_thws"].prod(dim=1).tolist()
    return [round(float((patches[0, 0, 0, 0] * 0.5 + 0.5) * 255)) for patches in inputs["pixel_values"].split(sizes)]


# ---- prompts --------------------------------------------------------------------------------------------------------


def test_an_image_becomes_its_size_and_one_placeholder_per_visual_token(processor: KimiK3Processor) -> None:
    inputs = processor(images=image(9, 20), text=f"See {IMAGE}!", return_tensors="pt")
    assert inputs["grid_thws"].tolist() == [[1, 4, 6]]
    expected = f"See <|media_begin|>image 20x9<|media_content|>{MEDIA_PAD * 6}<|media_end|>!"
    assert processor.decode(inputs["input_ids"][0]) == expected
    assert inputs["input_ids"].eq(processor.media_token_id).sum() == 6
    assert set(inputs) == {"input_ids", "attention_mask", "pixel_values", "grid_thws"}
    assert processor.model_input_names == ["pixel_values", "grid_thws", *processor.tokenizer.model_input_names]


def test_media_are_in_the_order_of_the_prompts(processor: KimiK3Processor) -> None:
    """Images and videos are passed apart; in the batch they lie as the prompts have them."""
    text = [f"{IMAGE}{VIDEO}{IMAGE}", "nothing", f"{VIDEO}{IMAGE}"]
    images = [[image(8, 8, 10), image(8, 16, 20)], [], [image(8, 8, 30)]]
    videos = [frames(1, 8, 8) + 40, frames(1, 8, 8) + 50]
    inputs = processor(images=images, text=text, videos=videos, padding=True, return_tensors="pt")
    assert levels(inputs) == [10, 40, 20, 50, 30]
    assert inputs["grid_thws"].tolist() == [[1, 2, 2], [1, 2, 2], [1, 2, 4], [1, 2, 2], [1, 2, 2]]
    assert inputs["input_ids"].eq(processor.media_token_id).sum(dim=1).tolist() == [4, 0, 2]
    assert inputs["attention_mask"][1, 0] == 0, "padding is on the left"
    assert inputs["attention_mask"].sum(dim=1)[1] == len("nothing")


def test_text_alone_and_images_alone(processor: KimiK3Processor) -> None:
    assert set(processor(text="only text")) == {"input_ids", "attention_mask"}
    assert set(processor(images=image(8, 8))) == {"pixel_values", "grid_thws"}


def test_settings_go_where_they_belong(processor: KimiK3Processor) -> None:
    inputs = processor(
        images=image(40, 40), text=IMAGE, in_patch_limit=16, padding="max_length", max_length=60, return_tensors="np"
    )
    assert inputs["grid_thws"].tolist() == [[1, 4, 4]]
    assert isinstance(inputs["input_ids"], np.ndarray) and inputs["input_ids"].shape == (1, 60)
    nested = processor(images=image(40, 40), text=IMAGE, images_kwargs={"in_patch_limit": 16})
    assert nested["grid_thws"].tolist() == [[1, 4, 4]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"text": f"a {IMAGE}"}, r"one <\|kimi_image_placeholder\|> for each of the images, got 1 \(\[1\] per"),
        ({"text": "a", "images": image(8, 8)}, r"images, got 0 \(\[0\] per prompt\) for 1: a chat template writes"),
        ({"text": [IMAGE, IMAGE * 2], "images": [image(8, 8)] * 2}, r"got 3 \(\[1, 2\] per prompt\) for 2"),
        ({"text": f"{VIDEO}"}, r"one <\|kimi_video_placeholder\|> for each of the videos, got 1"),
        ({"text": IMAGE, "images": image(8, 80), "truncation": True, "max_length": 12}, r"got .* for 10: truncation"),
        ({"text": f"{MEDIA_PAD}{IMAGE}", "images": image(8, 8)}, r"got 2 for 1: .* a prompt has some of its own"),
        ({"text": MEDIA_PAD}, r"got 1 for 0"),
        ({}, r"must be text, images or videos, got none"),
        ({"text": VIDEO, "videos": frames(2), "video_metadata": [{}, {}]}, r"one entry per video, got 2 for 1"),
    ],
)  # fmt: skip
def test_prompts_that_do_not_fit(processor: KimiK3Processor, call: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        processor(**call)


def test_tokenizer_without_the_placeholder() -> None:
    tokenizer = tiny_tokenizer()
    plain = type(tokenizer)(tokenizer_object=type(tokenizer.backend_tokenizer)(tokenizer.backend_tokenizer.model))
    with pytest.raises(ValueError, match=r"must have the special token <\|media_pad\|>, got none"):
        KimiK3Processor(KimiK3ImageProcessor(), plain)
    plain.add_tokens(list(MEDIA_TOKENS), special_tokens=True)
    assert KimiK3Processor(KimiK3ImageProcessor(), plain).media_token_id == plain.convert_tokens_to_ids(MEDIA_PAD)


# ---- chats ----------------------------------------------------------------------------------------------------------


def chat(*content: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def test_chat_with_image_parts(processor: KimiK3Processor, tmp_path: Path) -> None:
    """A path, an address of the OpenAI form, an image in memory; a batch with different numbers of images."""
    image(8, 8, 77).save(tmp_path / "a.png")
    first = chat(
        {"type": "image", "path": str(tmp_path / "a.png")},
        {"type": "text", "text": "and"},
        {"type": "image", "image": image(8, 16, 88)},
    )
    second = chat({"type": "text", "text": "Hello"})
    third = chat({"type": "image", "image": image(8, 8, 99)}, {"type": "text", "text": "?"})
    inputs = processor.apply_chat_template(
        [first, second, third],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True},
        thinking=False,
    )
    assert levels(inputs) == [77, 88, 99]
    assert inputs["input_ids"].eq(processor.media_token_id).sum(dim=1).tolist() == [3, 0, 1]
    rendered = processor.decode(inputs["input_ids"][2], skip_special_tokens=False).replace("[PAD]", "")
    assert rendered == (
        '<|open|>message role="user"<|sep|><|media_begin|>image 8x8<|media_content|><|media_pad|><|media_end|>?'
        '<|close|>message<|sep|><|end_of_msg|><|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
    )


def test_assistant_mask_behind_images(processor: KimiK3Processor) -> None:
    """Expansion moves everything behind an image; the mask marks the same words as before."""
    messages = chat({"type": "image", "image": image(8, 40)}, {"type": "text", "text": "What?"})
    messages.append({"role": "assistant", "content": [{"type": "text", "text": "Gray."}]})
    inputs = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, thinking=False
    )
    trained = [token for token, keep in zip(inputs["input_ids"][0], inputs["assistant_masks"][0], strict=True) if keep]
    assert processor.decode(trained) == "Gray.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"


def test_chat_with_a_video(processor: KimiK3Processor) -> None:
    inputs = processor.apply_chat_template(
        chat({"type": "video", "video": list(frames(6))}, {"type": "text", "text": "?"}),
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    assert inputs["grid_thws"].tolist() == [[4, 2, 2], [2, 2, 2]]
    clips = "".join(
        f"{time}<|media_begin|>video<|media_content|><|media_pad|><|media_end|>"
        for time in ("00:00:00.000", "00:00:02.000")
    )
    assert clips in processor.decode(inputs["input_ids"][0])


def test_processor_model_and_generate_together(processor: KimiK3Processor) -> None:
    """What the processor makes is what the model takes; the batch gives what each prompt gives alone."""
    model = tiny_multimodal_model(vocab_size=266).double()
    model.set_experts_implementation("batched_mm")
    model.config.media_placeholder_token_id = processor.media_token_id
    chats = [
        chat({"type": "image", "image": image(12, 20)}, {"type": "text", "text": "What is it?"}),
        chat({"type": "text", "text": "Hello"}),
        chat({"type": "video", "video": frames(5)}, {"type": "image", "image": image(8, 8)}),
    ]
    options: dict[str, Any] = {
        "tokenize": True, "add_generation_prompt": True, "return_dict": True, "return_tensors": "pt",
        "processor_kwargs": {"padding": True},
    }  # fmt: skip
    greedy: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    together = processor.apply_chat_template(chats, **options)
    written = model.generate(**together, **greedy)[:, together["input_ids"].shape[1] :]
    for i, one in enumerate(chats):
        alone = processor.apply_chat_template([one], **options)
        assert torch.equal(model.generate(**alone, **greedy)[0, alone["input_ids"].shape[1] :], written[i]), i
    assert len(processor.post_process_image_text_to_text(written)) == 3


# ---- videos ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "fps", "sampling", "expected"),
    [
        (10, 10.0, Sampling(2.0), [0, 9]),
        (10, 5.0, Sampling(2.0), [0, 3, 6, 9]),
        (3, 1.0, Sampling(8.0), [0, 1, 2]),
        (100, 10.0, Sampling(8.0, 3), [0, 50, 99]),
        (1, 30.0, Sampling(2.0), [0]),
        (5, 100.0, Sampling(2.0), [0]),
    ],
)
def test_sampling(total: int, fps: float, sampling: Sampling, expected: list[int]) -> None:
    assert sampling.choose(total, fps) == expected


def test_video_with_metadata(processor: KimiK3Processor) -> None:
    """Thirty frames at ten per second, two looked at per second; the second clip begins with the fifth."""
    inputs = processor(text=VIDEO, videos=frames(20), video_metadata=[{"fps": 10.0}], return_tensors="pt")
    assert inputs["grid_thws"].tolist() == [[4, 2, 2]]
    assert levels(inputs) == [0]
    chosen = ((inputs["pixel_values"][::4, 0, 0, 0] * 0.5 + 0.5) * 255).round().tolist()
    assert chosen == [0, 60, 130, 190]
    all_frames = processor(text=VIDEO, videos=frames(20), video_metadata=[{"fps": 10.0}], do_sample_frames=False)
    assert all_frames["grid_thws"].tolist() == [[4, 2, 2]] * 5
    text = processor.decode(all_frames["input_ids"][0])
    assert "00:00:01.600<|media_begin|>video" in text
    faster = processor(text=VIDEO, videos=frames(20), video_metadata=[{"fps": 10.0}], fps=4.0)
    assert faster["grid_thws"].tolist() == [[4, 2, 2]] * 2
    given = VideoMetadata(total_num_frames=300, fps=30.0, frames_indices=[0, 90, 180])
    late = processor(
        text=VIDEO, videos=frames(3), video_metadata=[given], do_sample_frames=False, temporal_merge_kernel_size=1
    )
    assert "00:00:06.000" in processor.decode(late["input_ids"][0])


def test_frames_share_a_budget() -> None:
    """The more frames, the fewer patches each; never none."""
    processor = KimiK3ImageProcessor(
        patch_size=PATCH, in_patch_limit_each_frame=64, in_patch_limit_video=128, sample_fps=1.0
    )
    few, many, most = (processor.clips(frames(count, 64, 64)) for count in (2, 8, 25))
    assert few[0].grid == (2, 8, 8)
    assert many[0].grid == (4, 4, 4) and len(many) == 2
    assert most[0].grid == (4, 2, 2)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("hh:mm:ss.fff", "01:02:03.450"), ("mm:ss.fff", "62:03.450"), ("mm:ss", "62:03")],
)
def test_timestamps(mode: str, expected: str) -> None:
    assert KimiK3ImageProcessor(timestamp_mode=mode).timestamp(3723.45) == expected


def test_animation(processor: KimiK3Processor, tmp_path: Path) -> None:
    """Pillow opens it; times follow from the durations of the frames."""
    pictures = [image(8, 8, level) for level in (10, 60, 110, 160, 210)]
    pictures[0].save(tmp_path / "a.gif", save_all=True, append_images=pictures[1:], duration=[500] * 5)
    inputs = processor(text=VIDEO, videos=str(tmp_path / "a.gif"), return_tensors="pt")
    assert inputs["grid_thws"].tolist() == [[4, 2, 2], [1, 2, 2]]
    assert "00:00:02.000<|media_begin|>video" in processor.decode(inputs["input_ids"][0])


def test_video_files_need_a_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"decoding a.mp4 needs one of .*torchcodec.* pip install av"):
        open_video("a.mp4", None, Sampling(2.0), 2.0)


def test_video_files_are_sampled_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_module.importlib.util, "find_spec", lambda name: object() if name == "av" else None)

    def load(file: str, backend: str, sample_indices_fn: Any) -> Any:
        assert (file, backend) == ("a.mp4", "pyav")
        metadata = VideoMetadata(total_num_frames=90, fps=30.0)
        metadata.frames_indices = sample_indices_fn(metadata=metadata)
        return frames(90)[metadata.frames_indices], metadata

    monkeypatch.setattr(video_module, "load_video", load)
    opened = open_video("a.mp4", None, Sampling(2.0), 2.0)
    assert len(opened.frames) == 6
    assert opened.timestamps[0] == 0 and opened.timestamps[-1] == pytest.approx(89 / 30)


@pytest.mark.parametrize(
    ("video", "metadata", "message"),
    [
        ([], None, r"at least one frame, got none"),
        (frames(0), None, r"at least one frame, got none"),
        (np.zeros((8, 8, 3), np.uint8), None, r"4 dimensions .* got shape \(8, 8, 3\)"),
        (frames(2), {"fps": -1.0}, r"`fps` must be positive, got -1"),
        (frames(2), {"frames_indices": [1]}, r"one index per frame, got 1 for 2 frames"),
        ([image(8, 8), image(8, 9)], None, r"frames of a video must have one size, got \(8, 8\) and \(8, 9\)"),
        (np.zeros((2, 8, 8, 7), np.uint8), None, r"1 to 4 channels"),
    ],
)
def test_bad_videos(video: Any, metadata: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KimiK3ImageProcessor(patch_size=PATCH).clips(video, metadata)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_save_and_load(processor: KimiK3Processor, tmp_path: Path) -> None:
    """With the model's config beside it or without, settings, tokenizer and template come back."""
    processor.save_pretrained(tmp_path)
    for with_config in (False, True):
        if with_config:
            tiny_multimodal_config().save_pretrained(tmp_path)
        again = AutoProcessor.from_pretrained(tmp_path)
        assert type(again) is KimiK3Processor
        assert isinstance(again.image_processor, KimiK3ImageProcessor)
        assert again.image_processor.to_dict() | {"processor_class": 0} == (
            processor.image_processor.to_dict() | {"processor_class": 0}
        )
        assert again.chat_template == processor.chat_template
        call: dict[str, Any] = {"images": image(9, 20), "text": f"See {IMAGE}", "return_tensors": "pt"}
        for name, tensor in processor(**call).items():
            assert torch.equal(again(**call)[name], tensor), name
    # Pillow resamples where torchvision is not installed.
    expected = KimiK3ImageProcessor if is_torchvision_available() else KimiK3ImageProcessorPil
    assert type(again.image_processor) is expected


def test_template_of_the_tokenizer_wins() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert KimiK3Processor(KimiK3ImageProcessor(), tokenizer).chat_template == tokenizer.chat_template
    assert KimiK3Processor(KimiK3ImageProcessor(), tokenizer, chat_template="x").chat_template == "x"


def test_tokens_of_images_without_pixels(processor: KimiK3Processor) -> None:
    """Servers plan with it."""
    planned = processor._get_num_multimodal_tokens(image_sizes=[(9, 20), (8, 8)])
    assert planned.num_image_tokens == [6, 1] and planned.num_image_patches == [24, 4]


def test_text_models_do_not_need_pillow() -> None:
    code = "import sys; sys.modules['PIL'] = None; import deltalatent; print(deltalatent.KimiK3ForCausalLM.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "KimiK3ForCausalLM", done.stderr
