# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""From what people call an image or a video to bytes of pixels: opening, turning upright, colours, sizes, resampling.

Pixels are uint8 tensors [C, H, W] with C = 3 (red, green, blue) or 4 (and opacity). Rules of sizes and of transparency
as in the public Kimi K3 release. Pillow decodes; it is imported when an image is opened.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.image_utils import load_image

if TYPE_CHECKING:
    from PIL.Image import Image

SINGLE_CHANNEL, WITH_ALPHA = 1, (2, 4)
CHANNELS = (1, 2, 3, 4)
"""Gray, gray and opacity, colours, colours and opacity."""


def flatten(images: Any) -> Iterator[Any]:
    """Single images of nested lists, and of arrays with a batch axis."""
    if isinstance(images, list | tuple):
        for image in images:
            yield from flatten(image)
    elif isinstance(images, np.ndarray | Tensor) and images.ndim > 3:
        for image in images:
            yield from flatten(image)
    else:
        yield images


def open_image(source: Any) -> Any:
    """An image in memory, upright.

    Args:
        source: A path, an http(s) address, the bytes of a file, base64 (also as a data URL), a Pillow image, an array
            or a tensor; the last two are returned as they are.

    Raises:
        ValueError: Pillow cannot decode it.
        TypeError: It is none of these.
    """
    from PIL import Image, ImageOps

    if isinstance(source, np.ndarray | Tensor):
        return source
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        return load_image(source)
    if isinstance(source, str | Path | bytes):
        source = _decode(source, Image)
    if not isinstance(source, Image.Image):
        raise TypeError(
            "an image must be a path, an address, bytes, a Pillow image, an array or a tensor, got "
            f"{type(source).__name__}: open it first."
        )
    try:
        return ImageOps.exif_transpose(source)
    except (OSError, SyntaxError) as error:  # lazily decoded, and cut short
        raise ValueError(
            f"an image must be decodable, got one that is damaged ({error}): copy the file again."
        ) from error


def _decode(source: str | Path | bytes, pillow: Any) -> Image:
    shown = f"{source[:60]!r}" if isinstance(source, bytes) else str(source)[:200]
    if isinstance(source, bytes):
        file: Any = io.BytesIO(source)
    elif _is_file(source):
        file = source
    else:
        try:
            file = io.BytesIO(base64.b64decode(str(source).rpartition(",")[2], validate=True))
        except (binascii.Error, ValueError):
            raise ValueError(
                f"an image must be an existing file, an address or base64, got {shown}: check it."
            ) from None
    try:
        image = pillow.open(file)
        image.load()
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise ValueError(
            f"an image must be decodable, got {shown} ({error}): copy the file again or convert it."
        ) from error
    return image


def _is_file(source: str | Path) -> bool:
    try:
        return Path(source).is_file()
    except (OSError, ValueError):  # base64 is longer than a name may be
        return False


def to_pixels(image: Any) -> Tensor:
    """uint8 [3, H, W], or [4, H, W] if the image has an opacity.

    Args:
        image: A Pillow image of any mode; or an array [H, W] or [H, W, C] or a tensor [H, W] or [C, H, W] (either
            layout is recognised in both) with C of 1 to 4, uint8 or bool, or floating point in [0, 1].

    Raises:
        ValueError: It has no pixel, another number of channels, or values out of range.
        TypeError: It has another dtype.
    """
    if not isinstance(image, np.ndarray | Tensor):
        return _pixels_of_pillow(image)
    values = torch.from_numpy(np.array(image)) if isinstance(image, np.ndarray) else image
    if values.ndim == 2:
        values = values[None]
    elif values.ndim == 3:
        first, last = values.shape[0] in CHANNELS, values.shape[-1] in CHANNELS
        if last and not (first and isinstance(image, Tensor)):
            values = values.permute(2, 0, 1)
        elif not first:
            raise ValueError(
                f"an image must have 1 to 4 channels, first or last, got shape {tuple(image.shape)}: choose three."
            )
    else:
        raise ValueError(f"an image must have 2 or 3 dimensions, got shape {tuple(image.shape)}: pass one image.")
    _refuse_empty(values.shape[1], values.shape[2])
    values = _to_bytes(values)
    if values.shape[0] == SINGLE_CHANNEL:
        return values.expand(3, -1, -1).contiguous()
    if values.shape[0] == WITH_ALPHA[0]:
        return values[[0, 0, 0, 1]]
    return values.contiguous()


def _to_bytes(values: Tensor) -> Tensor:
    if values.dtype == torch.uint8:
        return values
    if values.dtype == torch.bool:
        return values.to(torch.uint8) * 255
    if not values.is_floating_point():
        raise TypeError(
            f"pixels must be uint8, bool or floating point, got {values.dtype}: scale them to 0...255 and convert."
        )
    low, high = (value.item() for value in values.aminmax())
    if not 0 <= low <= high <= 1:  # False for NaN too
        raise ValueError(
            f"floating-point pixels must be in [0, 1], got values from {low:g} to {high:g}: scale them, or pass uint8."
        )
    return (values * 255).round().to(torch.uint8)


def _pixels_of_pillow(image: Image) -> Tensor:
    _refuse_empty(image.height, image.width)
    mode = image.mode
    if mode.startswith("I;16"):
        return torch.from_numpy((np.asarray(image) >> 8).astype(np.uint8)).expand(3, -1, -1).contiguous()
    if mode in ("I", "F"):
        raise ValueError(
            f"an image must have 8 or 16 bits per channel, got Pillow mode {mode!r} whose range is unknown: scale it "
            "to 0...255 and convert it to mode 'L'."
        )
    has_alpha = "transparency" in image.info or mode in ("RGBA", "LA", "PA", "La", "RGBa")
    converted = image.convert("RGBA" if has_alpha else "RGB")
    return torch.from_numpy(np.array(converted)).permute(2, 0, 1).contiguous()


def _refuse_empty(height: int, width: int) -> None:
    if height < 1 or width < 1:
        raise ValueError(f"an image must have pixels, got {height} x {width}: leave it out.")


def size_of(image: Any) -> tuple[int, int]:
    """Height and width of what `open_image` returned."""
    if isinstance(image, np.ndarray | Tensor):
        return tuple(to_pixels(image).shape[1:])  # type: ignore[return-value]
    return image.height, image.width


def fitting_size(
    height: int, width: int, patch_size: int, max_patches: int, max_patches_on_a_side: int
) -> tuple[int, int]:
    r"""The size to which an image is shrunk; it is never enlarged, and never without pixels.

    .. math:: s = \min\Big(1, \sqrt{\frac{\text{max\_patches}}{\max(1, \lfloor w/p \rfloor)
        \max(1, \lfloor h/p \rfloor)}}, \frac{S p}{w}, \frac{S p}{h}\Big)

    with p the side of a patch and S the largest number of patches on a side; then rounded down. The rule is the
    release's: counted in whole patches and then padded, an image can exceed `max_patches` by up to four percent.
    """
    patches = max(1, width // patch_size) * max(1, height // patch_size)
    limit = max_patches_on_a_side * patch_size
    scale = min(1.0, math.sqrt(max_patches / patches), limit / width, limit / height)
    return min(max(1, int(height * scale)), limit), min(max(1, int(width * scale)), limit)


def resize_with_torch(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Bicubic with antialiasing, [C, H, W] to [C, *size]; colours weighted with their opacity, as in Pillow.

    On a CPU it shrinks to within one level of Pillow; on other devices, which compute in floating point, within ten.
    """
    if tuple(pixels.shape[1:]) == size:
        return pixels
    if pixels.shape[0] == 3:
        return _interpolate(pixels, size)
    colours, opacity = pixels[:3], pixels[3:]
    weighted = (colours.to(torch.int32) * opacity + 127) // 255
    resized = _interpolate(torch.cat([weighted.to(torch.uint8), opacity]), size).to(torch.int32)
    colours = (resized[:3] * 255 // resized[3:].clamp(min=1)).clamp(max=255)
    return torch.cat([colours, resized[3:]]).to(torch.uint8)


def _interpolate(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    if pixels.device.type == "cpu":
        return F.interpolate(pixels[None], size, mode="bicubic", antialias=True)[0]
    resized = F.interpolate(pixels[None].float(), size, mode="bicubic", antialias=True)[0]
    return resized.clamp(0, 255).round().to(torch.uint8)


def resize_with_pillow(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Bicubic, [C, H, W] to [C, *size], as released processors do it."""
    from PIL import Image

    image = Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy())
    resized = image.resize((size[1], size[0]), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1).contiguous().to(pixels.device)


def without_transparency(pixels: Tensor, background: Callable[[int, int], Tensor] | None) -> Tensor:
    """[4, H, W] on a background to [3, H, W]; without one the opacity is dropped. [3, H, W] is returned as it is."""
    if pixels.shape[0] == 3 or background is None:
        return pixels[:3]
    opacity = pixels[3:].float() / 255
    behind = background(pixels.shape[1], pixels.shape[2]).to(pixels.device)
    return (opacity * pixels[:3] + (1 - opacity) * behind).to(torch.uint8)


def chessboard(height: int, width: int, square: int, light: int, dark: int, light_first: bool) -> Tensor:
    """uint8 [H, W] with squares of two grays; `light_first` says which is at the top left."""
    rows, columns = torch.arange(height) // square, torch.arange(width) // square
    is_odd = (rows[:, None] + columns) % 2 == 1
    first, second = (light, dark) if light_first else (dark, light)
    return torch.where(is_odd, second, first).to(torch.uint8)
