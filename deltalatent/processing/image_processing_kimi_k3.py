# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Images and videos to patches: `pixel_values` and `grid_thws` of the multimodal model.

An image keeps its proportions: it is shrunk if it has too many patches, padded at the right and at the bottom to whole
groups of patches, normalised and cut. A video is sampled and cut into clips of a few frames, each of which becomes one
item with a time stamp. Settings have the names of the `media_proc_cfg` of released folders, which load verbatim and
are written back in the same form. (Kimi K3 report, arXiv 2607.24653; sizes and backgrounds as in the public release.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature
from transformers.processing_utils import ImagesKwargs
from transformers.utils import TensorType

from deltalatent.processing.media import (
    chessboard,
    fitting_size,
    flatten,
    open_image,
    resize_with_pillow,
    resize_with_torch,
    size_of,
    to_pixels,
    without_transparency,
)
from deltalatent.processing.video import Sampling, Video, open_video

MEDIA_CONFIG = "media_proc_cfg"
PLAIN_BACKGROUNDS = {"white": 255, "black": 0, "gray": 128}
FILL_STAGES = ("before_resize", "after_resize")
TIMESTAMP_MODES = ("hh:mm:ss.fff", "mm:ss.fff", "mm:ss")


class KimiK3ImagesKwargs(ImagesKwargs, total=False):
    """Settings that a call may override; described at :class:`KimiK3ImageProcessor`."""

    patch_size: int
    merge_kernel_size: int | list[int] | tuple[int, int]
    in_patch_limit: int
    patch_limit_on_one_side: int
    in_patch_limit_each_frame: int | None
    in_patch_limit_video: int | None
    sample_fps: float | int
    max_num_frames_each_video: int | None
    temporal_merge_kernel_size: int
    timestamp_mode: str
    fixed_output_tokens: int | None
    transparent_bg_config: dict[str, Any] | None
    transparent_bg_fill_stage: str


SETTINGS = (
    *KimiK3ImagesKwargs.__annotations__.keys() - ImagesKwargs.__annotations__.keys(),
    "image_mean",
    "image_std",
)


@dataclass(frozen=True)
class Media:
    """One item: an image, or a clip of a video.

    Attributes:
        patches: float32 [t * h * w, 3, P, P].
        grid: t, h, w: frames, rows and columns of patches.
        size: Height and width of the original in pixels.
        timestamp: Of a clip, when it begins, in seconds.
    """

    patches: Tensor
    grid: tuple[int, int, int]
    size: tuple[int, int]
    timestamp: float | None = None


class KimiK3ImageProcessor(BaseImageProcessor):
    """Images and videos to patches, with PyTorch; the defaults are the release's.

    Args:
        patch_size (`int`): Side of a patch in pixels.
        merge_kernel_size (`int` or `list[int]`): Rows and columns of patches in a visual token.
        image_mean, image_std (`list[float]`): Of the channels, for values in [0, 1].
        in_patch_limit (`int`): Patches that an image may have; 65536 are 3584 x 3584 pixels, 16384 visual tokens.
        patch_limit_on_one_side (`int`): Patches on a side.
        in_patch_limit_each_frame, in_patch_limit_video (`int`, *optional*): Patches of a frame, and of all sampled
            frames of a video together; `None` for `in_patch_limit`, and for no limit.
        sample_fps (`float`): Frames per second that are taken from a video.
        max_num_frames_each_video (`int`, *optional*): How many frames are taken at most.
        temporal_merge_kernel_size (`int`): Frames of a clip.
        timestamp_mode (`str`): `"hh:mm:ss.fff"`, `"mm:ss.fff"` or `"mm:ss"`.
        transparent_bg_config (`dict`, *optional*): What transparent images are laid on: `pattern` (`"chessboard"`,
            `"white"`, `"gray"`, `"black"`) and, of a chessboard, `chessboard_square_size`,
            `chessboard_square_on_top_left` (whether the light square is there), `chessboard_white_value`,
            `chessboard_gray_value`. `None` drops the opacity.
        transparent_bg_fill_stage (`str`): `"after_resize"` or `"before_resize"`.
        fixed_output_tokens: Must be `None`.

    Raises:
        ValueError, TypeError: A setting is unknown, has the wrong type or is out of range.
    """

    model_input_names = ["pixel_values", "grid_thws"]  # noqa: RUF012 - read by the base class
    valid_kwargs = KimiK3ImagesKwargs

    patch_size = 14
    merge_kernel_size: int | Sequence[int] = 2
    image_mean = (0.5, 0.5, 0.5)
    image_std = (0.5, 0.5, 0.5)
    in_patch_limit = 65536
    patch_limit_on_one_side = 512
    in_patch_limit_each_frame: int | None = 16384
    in_patch_limit_video: int | None = 655360
    sample_fps: float = 8.0
    max_num_frames_each_video: int | None = None
    temporal_merge_kernel_size = 4
    timestamp_mode = "hh:mm:ss.fff"
    transparent_bg_config: Mapping[str, Any] | None = {
        "pattern": "chessboard",
        "chessboard_square_size": 8,
        "chessboard_square_on_top_left": True,
        "chessboard_white_value": 255,
        "chessboard_gray_value": 180,
    }
    transparent_bg_fill_stage = "after_resize"
    fixed_output_tokens: int | None = None

    def __init__(self, **kwargs) -> None:
        kwargs |= kwargs.pop(MEDIA_CONFIG, None) or {}
        kwargs.pop("image_processor_type", None)
        super().__init__(**kwargs)
        self._set_attributes(**kwargs)
        # `_set_attributes` takes the class's value for None, but None may be meant.
        for name in SETTINGS:
            if name in kwargs and kwargs[name] is None:
                setattr(self, name, None)
        self._check_settings()

    @property
    def backend(self) -> str:
        """What resamples."""
        return "torch"

    @property
    def merge_rows_and_columns(self) -> tuple[int, int]:
        kernel = self.merge_kernel_size
        return (kernel, kernel) if isinstance(kernel, int) else (kernel[0], kernel[1])

    def to_dict(self) -> dict[str, Any]:
        """As released folders have it: the settings under `media_proc_cfg`."""
        output = super().to_dict()
        output[MEDIA_CONFIG] = {name: getattr(self, name) for name in sorted(SETTINGS)}
        output["image_processor_type"] = KimiK3ImageProcessor.__name__
        return {name: value for name, value in output.items() if name not in SETTINGS}

    # ---- images and videos to items ---------------------------------------------------------------------------------

    def fetch_images(self, image_url_or_urls: Any) -> Any:
        """Opens and turns upright what is a path, an address or bytes, also in nested lists."""
        if isinstance(image_url_or_urls, list | tuple):
            return [self.fetch_images(image) for image in image_url_or_urls]
        return open_image(image_url_or_urls)

    def preprocess(self, images: Any, *args, return_tensors: str | TensorType | None = None, **kwargs) -> BatchFeature:
        """Patches of images.

        Args:
            images: One image or a list, each as in `media.open_image`.
            return_tensors: `"pt"` or `None` for tensors, `"np"` for arrays.
            **kwargs: Settings for this call, and `device`, where to resample.

        Returns:
            `pixel_values` float32 [N, 3, P, P] and `grid_thws` int64 [images, 3].

        Raises:
            ValueError, TypeError: An image or a setting is of no use; the message says which.
        """
        device = kwargs.pop("device", None)
        processor = self.configured(**kwargs)
        return batch([processor.image(image, device) for image in flatten(images)], return_tensors)

    def configured(self, **settings: Any) -> KimiK3ImageProcessor:
        """A processor that differs in these settings; itself if there are none."""
        settings = {name: value for name, value in settings.items() if name in SETTINGS or value is not None}
        if unknown := sorted(settings.keys() - SETTINGS):
            raise TypeError(f"settings must be among {sorted(SETTINGS)}, got {unknown}: sizes follow from the limits.")
        if not settings:
            return self
        return type(self)(**{name: getattr(self, name) for name in SETTINGS} | settings)

    def image(self, image: Any, device: torch.device | str | None = None) -> Media:
        """One image."""
        image = open_image(image)
        pixels = to_pixels(image)
        original = (pixels.shape[1], pixels.shape[2])
        size = fitting_size(*original, self.patch_size, self.in_patch_limit, self.patch_limit_on_one_side)
        patches, grid = self._cut(self._resized(pixels.to(device), size)[None])
        return Media(patches, grid, original)

    def clips(
        self, video: Any, metadata: Any = None, do_sample_frames: bool = True, device: torch.device | str | None = None
    ) -> list[Media]:
        """The clips of one video, in order.

        Args:
            video: As in `video.open_video`.
            metadata: As there.
            do_sample_frames: Whether to take `sample_fps` frames per second, or all.
        """
        sampling = Sampling(self.sample_fps, self.max_num_frames_each_video) if do_sample_frames else None
        return self._clips(open_video(video, metadata, sampling, default_fps=self.sample_fps), device)

    def _clips(self, video: Video, device: torch.device | str | None) -> list[Media]:
        limit = self.in_patch_limit_each_frame or self.in_patch_limit
        if self.in_patch_limit_video is not None:
            limit = max(1, min(limit, round(self.in_patch_limit_video / len(video.frames))))
        original = size_of(video.frames[0])
        size = fitting_size(*original, self.patch_size, limit, self.patch_limit_on_one_side)
        clips = []
        for start in range(0, len(video.frames), self.temporal_merge_kernel_size):
            frames = []
            for frame in video.frames[start : start + self.temporal_merge_kernel_size]:
                pixels = to_pixels(frame)
                if tuple(pixels.shape[1:]) != original:
                    raise ValueError(
                        f"the frames of a video must have one size, got {original} and {tuple(pixels.shape[1:])}: "
                        "resize them, or pass them as images."
                    )
                frames.append(self._resized(pixels.to(device), size))
            patches, grid = self._cut(torch.stack(frames))
            clips.append(Media(patches, grid, original, video.timestamps[start]))
        return clips

    def timestamp(self, seconds: float) -> str:
        """A time in `timestamp_mode`; what is smaller than its last digit is cut off."""
        milliseconds = int(seconds * 1000 + 0.5)
        minutes, rest = divmod(milliseconds, 60_000)
        if self.timestamp_mode == "hh:mm:ss.fff":
            return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}.{rest % 1000:03d}"
        if self.timestamp_mode == "mm:ss.fff":
            return f"{minutes:02d}:{rest // 1000:02d}.{rest % 1000:03d}"
        return f"{minutes:02d}:{rest // 1000:02d}"

    def tokens_of(self, media: Media) -> int:
        """How many visual tokens an item becomes."""
        rows, columns = self.merge_rows_and_columns
        return (media.grid[1] // rows) * (media.grid[2] // columns)

    def get_number_of_image_patches(self, height: int, width: int, images_kwargs: dict | None = None) -> int:
        """Patches of an image of this size; the name is the one that servers call."""
        processor = self.configured(**(images_kwargs or {}))
        size = fitting_size(
            height, width, processor.patch_size, processor.in_patch_limit, processor.patch_limit_on_one_side
        )
        rows, columns = processor._padded(size)
        return rows * columns // processor.patch_size**2

    # ---- pixels -----------------------------------------------------------------------------------------------------

    def resize(self, pixels: Tensor, size: tuple[int, int]) -> Tensor:
        """uint8 [C, H, W] to [C, *size]."""
        return resize_with_torch(pixels, size)

    def _resized(self, pixels: Tensor, size: tuple[int, int]) -> Tensor:
        """uint8 [C, H, W] to [3, *size], without transparency."""
        if self.transparent_bg_fill_stage == "before_resize":
            pixels = without_transparency(pixels, self._background)
        if tuple(pixels.shape[1:]) != size:
            pixels = self.resize(pixels, size)
        return without_transparency(pixels, self._background if self.transparent_bg_config is not None else None)

    def _background(self, height: int, width: int) -> Tensor:
        config = self.transparent_bg_config or {}
        if config.get("pattern") != "chessboard":
            return torch.tensor(PLAIN_BACKGROUNDS[config.get("pattern", "black")], dtype=torch.uint8)
        return chessboard(
            height,
            width,
            square=config.get("chessboard_square_size", 16),
            light=config.get("chessboard_white_value", 255),
            dark=config.get("chessboard_gray_value", 200),
            light_first=config.get("chessboard_square_on_top_left", True),
        )

    def _padded(self, size: tuple[int, int]) -> tuple[int, int]:
        """The size in pixels after padding to whole groups of patches."""
        rows, columns = (count * self.patch_size for count in self.merge_rows_and_columns)
        return -(-size[0] // rows) * rows, -(-size[1] // columns) * columns

    def _cut(self, frames: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
        """uint8 [t, 3, H, W] to normalised patches [t * h * w, 3, P, P] and their grid."""
        count, channels, height, width = frames.shape
        padded_height, padded_width = self._padded((height, width))
        side = self.patch_size
        frames = torch.nn.functional.pad(frames, (0, padded_width - width, 0, padded_height - height))
        grid = (count, padded_height // side, padded_width // side)
        patches = frames.view(count, channels, grid[1], side, grid[2], side).permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
        mean, std = (torch.tensor(x, device=frames.device).view(-1, 1, 1) for x in (self.image_mean, self.image_std))
        return (patches.float() / 255 - mean) / std, grid

    def _check_settings(self) -> None:
        numbers = [
            "patch_size",
            "in_patch_limit",
            "patch_limit_on_one_side",
            "temporal_merge_kernel_size",
            "sample_fps",
        ]
        optional = ["in_patch_limit_each_frame", "in_patch_limit_video", "max_num_frames_each_video"]
        for name in numbers + [name for name in optional if getattr(self, name) is not None]:
            value = getattr(self, name)
            kinds = (int, float) if name == "sample_fps" else (int,)
            if not isinstance(value, kinds) or isinstance(value, bool) or value <= 0:
                raise ValueError(f"`{name}` must be a positive number, got {value!r}: the release's is a good start.")
        if min(self.merge_rows_and_columns) < 1:
            raise ValueError(f"`merge_kernel_size` must be positive, got {self.merge_kernel_size}: the release has 2.")
        for name in ("image_mean", "image_std"):
            if len(getattr(self, name)) != 3:
                raise ValueError(f"`{name}` must have three numbers, got {getattr(self, name)}: one per colour.")
        if min(self.image_std) <= 0:
            raise ValueError(f"`image_std` must be positive, got {self.image_std}: the release has 0.5.")
        if self.fixed_output_tokens is not None:
            raise ValueError(
                f"`fixed_output_tokens` must be null, got {self.fixed_output_tokens}: sizes follow from the limits."
            )
        choices: dict[str, tuple[Any, Sequence[Any]]] = {
            "timestamp_mode": (self.timestamp_mode, TIMESTAMP_MODES),
            "transparent_bg_fill_stage": (self.transparent_bg_fill_stage, FILL_STAGES),
        }
        if self.transparent_bg_config is not None:
            pattern = self.transparent_bg_config.get("pattern", "black")
            choices["transparent_bg_config.pattern"] = (pattern, ("chessboard", *PLAIN_BACKGROUNDS))
        for name, (value, known) in choices.items():
            if value not in known:
                raise ValueError(f"`{name}` must be one of {list(known)}, got {value!r}: choose one of these.")


class KimiK3ImageProcessorPil(KimiK3ImageProcessor):
    """As `KimiK3ImageProcessor`, but Pillow resamples: to the last bit what released processors give, on a CPU."""

    @property
    def backend(self) -> str:
        return "pil"

    def resize(self, pixels: Tensor, size: tuple[int, int]) -> Tensor:
        return resize_with_pillow(pixels, size)


def batch(media: Sequence[Media], return_tensors: str | TensorType | None = None) -> BatchFeature:
    """Items to the inputs of the model.

    Raises:
        ValueError: There are none.
    """
    if not media:
        raise ValueError("there must be at least one image, got none: leave `images` out for text alone.")
    data = {
        "pixel_values": torch.cat([item.patches for item in media]),
        "grid_thws": torch.tensor([item.grid for item in media]),
    }
    return BatchFeature(data, tensor_type=return_tensors)


__all__ = ["KimiK3ImageProcessor", "KimiK3ImageProcessorPil"]
