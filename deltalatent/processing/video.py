# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Videos as frames with times: opening files and lists of frames, and choosing which frames to look at."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers.video_utils import VideoMetadata, load_video

from deltalatent.processing.media import open_image

DECODERS = {"torchcodec": "torchcodec", "av": "pyav", "decord": "decord", "cv2": "opencv"}
"""Packages that decode video files, and what Transformers calls them."""

ANIMATIONS = (".gif", ".webp", ".png", ".apng", ".avif")
"""Files of several frames that Pillow opens."""


@dataclass(frozen=True)
class Video:
    """Frames, each as in `media.to_pixels`, and their times in seconds from the beginning."""

    frames: Sequence[Any]
    timestamps: Sequence[float]
    fps: float


@dataclass(frozen=True)
class Sampling:
    """How many frames to look at: so many per second, and at most so many of a video."""

    fps: float
    max_frames: int | None = None

    def choose(self, total: int, fps: float) -> list[int]:
        """Indices of evenly spaced frames, first and last among them, of `total` frames at `fps` per second."""
        count = max(round(total * min(self.fps, fps) / fps), 1)
        if self.max_frames is not None:
            count = min(count, self.max_frames)
        return np.linspace(0, total - 1, count).round().astype(int).tolist()


def open_video(
    source: Any,
    metadata: VideoMetadata | Mapping[str, Any] | None,
    sampling: Sampling | None,
    default_fps: float,
) -> Video:
    """A video in memory.

    Args:
        source: A path or address of a file; a list of frames, each as in `media.open_image`; or an array or tensor of
            frames, [frames, H, W, C] or [frames, C, H, W]. Animated images need Pillow only, other files one of the
            packages in `DECODERS`.
        metadata: Of frames: `fps`, how many there were per second; `frames_indices`, which of them these are (default:
            all). Ignored for files, which know it.
        sampling: Which frames to take, `None` for all.
        default_fps: Frames per second of frames without metadata.

    Raises:
        ValueError: There is no frame, or the metadata does not fit.
        ImportError: Nothing installed decodes the file.
    """
    if isinstance(source, str | Path):
        return _open_file(source, sampling)
    if isinstance(source, np.ndarray | Tensor) and source.ndim != 4:
        raise ValueError(
            f"a video must have 4 dimensions (frames and those of an image), got shape {tuple(source.shape)}: pass an "
            "image under `images`."
        )
    frames = [open_image(frame) for frame in source]
    known = dict(metadata) if metadata is not None else {}
    fps = known.get("fps") or default_fps
    indices = known.get("frames_indices")
    return _sampled(_checked(frames, range(len(frames)) if indices is None else indices, fps), sampling)


def _sampled(video: Video, sampling: Sampling | None) -> Video:
    if sampling is None:
        return video
    chosen = sampling.choose(len(video.frames), video.fps)
    return Video([video.frames[i] for i in chosen], [video.timestamps[i] for i in chosen], video.fps)


def _checked(frames: Sequence[Any], indices: Sequence[int], fps: float) -> Video:
    if not frames:
        raise ValueError("a video must have at least one frame, got none: leave it out.")
    if len(indices) != len(frames):
        raise ValueError(
            f"`frames_indices` must name one index per frame, got {len(indices)} for {len(frames)} frames: pass those "
            "of the frames."
        )
    if not fps > 0:
        raise ValueError(f"`fps` must be positive, got {fps}: pass the frames per second of the video.")
    return Video(frames, [index / fps for index in indices], float(fps))


def _open_file(source: str | Path, sampling: Sampling | None) -> Video:
    if Path(source).suffix.lower() in ANIMATIONS:
        return _sampled(_open_animation(source), sampling)
    decoder = next((name for package, name in DECODERS.items() if importlib.util.find_spec(package)), None)
    if decoder is None:
        raise ImportError(
            f"decoding {source} needs one of {list(DECODERS)}, got none: pip install av, or pass the frames as a list."
        )

    def indices(metadata: VideoMetadata, **kwargs) -> np.ndarray:
        if not metadata.fps:
            raise ValueError(f"{source} must say how many frames it has per second, got {metadata.fps}: pass frames.")
        total = metadata.total_num_frames
        return np.arange(total) if sampling is None else np.array(sampling.choose(total, metadata.fps))

    file: Any = str(source)
    frames, metadata = load_video(file, backend=decoder, sample_indices_fn=indices)
    return _checked(list(frames), list(metadata.frames_indices), metadata.fps)


def _open_animation(source: str | Path) -> Video:
    """Frames of an animated image; their durations may differ."""
    from PIL import Image, ImageSequence

    frames, starts, clock = [], [], 0.0
    with Image.open(source) as animation:
        for frame in ImageSequence.Iterator(animation):
            frames.append(frame.copy())
            starts.append(clock)
            clock += float(frame.info.get("duration") or 100) / 1000
    return Video(frames, starts, len(frames) / clock)
