# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts with images and videos to the inputs of the multimodal model.

In a prompt an image is `<|kimi_image_placeholder|>` and a video `<|kimi_video_placeholder|>`; chat templates write
them. Here they become, with one `<|media_pad|>` per visual token,

    <|media_begin|>image {width}x{height}<|media_content|><|media_pad|>...<|media_end|>
    {time}<|media_begin|>video<|media_content|><|media_pad|>...<|media_end|>      for each clip of a video

as in the public Kimi K3 and Kimi K2.5 releases.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from transformers.feature_extraction_utils import BatchFeature
from transformers.processing_utils import MultiModalData, ProcessorMixin

from deltalatent.processing.chat_template import CHAT_TEMPLATE, IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER
from deltalatent.processing.image_processing_kimi_k3 import Media, batch
from deltalatent.processing.media import flatten, open_image

MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_PAD, MEDIA_END = (
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_pad|>",
    "<|media_end|>",
)
MEDIA_TOKENS = (MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_PAD, MEDIA_END)
"""Special tokens around media; a tokenizer trained for images needs them."""


class KimiK3Processor(ProcessorMixin):
    """A tokenizer and an image processor: text, images and videos to `input_ids`, `pixel_values` and `grid_thws`.

    Args:
        image_processor (`KimiK3ImageProcessor`): Makes patches of images, and of videos too.
        tokenizer: Has `MEDIA_TOKENS` as special tokens; its padding side should be left for generation.
        chat_template (`str`, *optional*): Default: that of the tokenizer, else the release's.

    Raises:
        ValueError: The tokenizer does not know `<|media_pad|>`.
    """

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None) -> None:
        template = chat_template or getattr(tokenizer, "chat_template", None) or CHAT_TEMPLATE
        super().__init__(image_processor, tokenizer, chat_template=template)
        self.image_token, self.video_token = IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER
        self.media_token_id = self.tokenizer.convert_tokens_to_ids(MEDIA_PAD)
        if self.media_token_id is None or self.media_token_id == self.tokenizer.unk_token_id:
            raise ValueError(
                f"the tokenizer must have the special token {MEDIA_PAD}, got none: "
                "`tokenizer.add_tokens(list(MEDIA_TOKENS), special_tokens=True)` adds it; then resize the embeddings."
            )
        # What Transformers and servers look for.
        self.image_token_id = self.video_token_id = self.media_token_id

    def __call__(self, images: Any = None, text: Any = None, videos: Any = None, **kwargs) -> BatchFeature:
        """Inputs of the model.

        Args:
            images: In the order of their placeholders, row after row; each as in `media.open_image`. May be nested.
            text: A prompt or a list of prompts; `None` for the images alone.
            videos: As `images`; each a file, a list of frames or an array, as in `video.open_video`. Several videos
                are a list of such.
            **kwargs: Arguments of the tokenizer (`padding=True`, `return_tensors="pt"`), settings of the image
                processor, and of videos `video_metadata` (one per video) and `do_sample_frames`.

        Returns:
            `input_ids` and `attention_mask` [B, T] and, if there are media, `pixel_values` and `grid_thws`; media in
            the order of the prompt.

        Raises:
            ValueError: The numbers of placeholders and media differ, truncation cuts through an image, a prompt has
                `<|media_pad|>` of its own, or there is nothing at all.
            TypeError: A prompt is no string.
        """
        texts = None if text is None else _list_of_prompts(text)
        opened_images = [] if images is None else [open_image(image) for image in flatten(images)]
        opened_videos = [] if videos is None else _list_of_videos(videos)
        settings = self._merge_kwargs(
            tokenizer_init_kwargs=self.tokenizer.init_kwargs,
            **kwargs,
        )
        self._check_counts(texts, len(opened_images), len(opened_videos))

        image_settings, video_settings = settings["images_kwargs"], settings["videos_kwargs"]
        return_tensors = settings["text_kwargs"].pop("return_tensors", None)
        image_settings.pop("return_tensors", None)
        device = image_settings.pop("device", None)
        images_of = self.image_processor.configured(**image_settings)
        encoded_images = [images_of.image(image, device) for image in opened_images]
        encoded_videos = self._encode_videos(opened_videos, device, image_settings | video_settings)

        data: dict[str, Any] = {}
        media = [*encoded_images, *(clip for clips in encoded_videos for clip in clips)]
        if texts is not None:
            with_offsets = settings.get("return_text_replacement_offsets", False)
            settings["text_kwargs"].pop("return_text_replacement_offsets", None)
            settings["text_kwargs"].pop("return_mm_token_type_ids", None)
            media = list(self._in_order(texts, encoded_images, encoded_videos))
            expanded, offsets = self.get_text_with_replacements(
                list(texts),
                [self.image_prompt(item) for item in encoded_images],
                [self.video_prompt(clips) for clips in encoded_videos],
            )
            data |= self.tokenizer(expanded, **settings["text_kwargs"])
            self._check_expanded(data["input_ids"], sum(self.image_processor.tokens_of(item) for item in media))
            if with_offsets:
                data["text_replacement_offsets"] = offsets
        if media:
            data |= batch(media)
        return BatchFeature(data, tensor_type=return_tensors, skip_tensor_conversion=self.skip_tensor_conversion)

    def image_prompt(self, image: Media) -> str:
        """What stands for an image: its original size, and a placeholder per visual token."""
        height, width = image.size
        return f"{MEDIA_BEGIN}image {width}x{height}{MEDIA_CONTENT}{self._pads(image)}{MEDIA_END}"

    def video_prompt(self, clips: Sequence[Media]) -> str:
        """What stands for a video: for each clip its time, and a placeholder per visual token."""
        return "".join(
            f"{self.image_processor.timestamp(clip.timestamp or 0.0)}"
            f"{MEDIA_BEGIN}video{MEDIA_CONTENT}{self._pads(clip)}{MEDIA_END}"
            for clip in clips
        )

    def post_process_image_text_to_text(self, generated_outputs: Any, skip_special_tokens: bool = True, **kwargs):
        """Token ids to strings; the name is the one that Transformers' pipelines call."""
        return self.tokenizer.batch_decode(generated_outputs, skip_special_tokens=skip_special_tokens, **kwargs)

    def _pads(self, media: Media) -> str:
        return MEDIA_PAD * self.image_processor.tokens_of(media)

    def _encode_videos(self, videos: Sequence[Any], device: Any, settings: dict[str, Any]) -> list[list[Media]]:
        settings = {
            name: value for name, value in settings.items() if name not in ("return_tensors", "return_metadata")
        }
        metadata = settings.pop("video_metadata", None)
        sample = settings.pop("do_sample_frames", None)
        if (fps := settings.pop("fps", None)) is not None:
            settings["sample_fps"] = fps
        known = [None] * len(videos) if metadata is None else metadata if isinstance(metadata, list) else [metadata]
        if len(known) != len(videos):
            raise ValueError(f"`video_metadata` must have one entry per video, got {len(known)} for {len(videos)}.")
        processor = self.image_processor.configured(**settings)
        return [
            processor.clips(video, about, do_sample_frames=sample is not False, device=device)
            for video, about in zip(videos, known, strict=True)
        ]

    def _in_order(
        self, texts: Sequence[str], images: Sequence[Media], videos: Sequence[Sequence[Media]]
    ) -> Iterator[Media]:
        """All items in the order in which the prompts have them."""
        remaining_images, remaining_videos = iter(images), iter(videos)
        for match in re.finditer(f"{re.escape(self.image_token)}|{re.escape(self.video_token)}", "\n".join(texts)):
            if match.group() == self.image_token:
                yield next(remaining_images)
            else:
                yield from next(remaining_videos)

    def _check_counts(self, texts: Sequence[str] | None, images: int, videos: int) -> None:
        if texts is None:
            if not images + videos:
                raise ValueError("there must be text, images or videos, got none: pass at least one of them.")
            return
        for what, token, count in (("images", self.image_token, images), ("videos", self.video_token, videos)):
            found = [text.count(token) for text in texts]
            if sum(found) != count:
                raise ValueError(
                    f"the prompts must have one {token} for each of the {what}, got {sum(found)} ({found} per prompt) "
                    f"for {count}: a chat template writes them where the messages have `{what[:-1]}` parts."
                )

    def _check_expanded(self, input_ids: Any, expected: int) -> None:
        rows = [list(row) for row in input_ids]
        found = sum(row.count(self.media_token_id) for row in rows)
        if found != expected:
            raise ValueError(
                f"the prompts must have one {MEDIA_PAD} per visual token, got {found} for {expected}: truncation has "
                "cut through an image (raise `max_length` or lower `in_patch_limit`), or a prompt has some of its own."
            )

    def _get_num_multimodal_tokens(self, image_sizes: Any = None, **kwargs) -> MultiModalData:
        """Visual tokens of images of these sizes (height, width); servers plan with it."""
        if image_sizes is None:
            return MultiModalData()
        rows, columns = self.image_processor.merge_rows_and_columns
        patches = [self.image_processor.get_number_of_image_patches(*size) for size in image_sizes]
        return MultiModalData(
            num_image_tokens=[count // (rows * columns) for count in patches], num_image_patches=patches
        )


def _list_of_prompts(text: Any) -> list[str]:
    if isinstance(text, str):
        return [text]
    texts = list(text) if isinstance(text, Iterable) and not isinstance(text, Mapping) else [text]
    if not texts:
        raise ValueError("`text` must have at least one prompt, got an empty list: leave it out for images alone.")
    if wrong := [type(prompt).__name__ for prompt in texts if not isinstance(prompt, str)]:
        raise TypeError(
            f"`text` must be a prompt or a list of prompts, got {wrong[0]} among {len(texts)}: pass strings, and a "
            "conversation to `apply_chat_template`."
        )
    return texts


def _list_of_videos(videos: Any) -> list[Any]:
    """A list of videos: of one, of several, or nested by row as chat templates collect them."""
    if not isinstance(videos, list | tuple):
        return list(videos) if getattr(videos, "ndim", 0) == 5 else [videos]
    if videos and all(_is_frame(video) for video in videos):
        return [videos]
    flat: list[Any] = []
    for video in videos:
        is_row = isinstance(video, list | tuple) and not (video and all(_is_frame(frame) for frame in video))
        flat.extend(_list_of_videos(video) if is_row else [video])
    return flat


def _is_frame(value: Any) -> bool:
    """A single image in memory (a string may be a whole video)."""
    return hasattr(value, "getbands") or (isinstance(value, np.ndarray | Tensor) and value.ndim <= 3)


__all__ = ["KimiK3Processor"]
