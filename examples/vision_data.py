# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Pictures for `train_vision.py`: words to read and photographs to name, from what Python packages carry.

A word of the documentation behind `help()` is drawn in one of matplotlib's fonts on a faded piece of a photograph; a
photograph is shown as a small piece of it. Held out are words (a tenth of all, never drawn in training) and the right
part of every photograph. The photographs are files of matplotlib, scikit-image and scikit-learn, which need not be
importable. Nothing is downloaded, and example number i is the same in every run.
"""

import hashlib
import importlib.util
import random
import re
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import matplotlib
from PIL import Image, ImageDraw, ImageFont
from torch.utils.data import Dataset

READ, NAME = "read", "name"
PHOTOGRAPHS = {
    "a cat": ("skimage", "data/chelsea.png"),
    "a cup of coffee": ("skimage", "data/coffee.png"),
    "a flower": ("sklearn", "datasets/images/flower.jpg"),
    "a horse": ("skimage", "data/horse.png"),
    "a motorcycle": ("skimage", "data/motorcycle_left.png"),
    "a retina": ("skimage", "data/retina.jpg"),
    "a rocket": ("skimage", "data/rocket.jpg"),
    "a temple": ("sklearn", "datasets/images/china.jpg"),
    "an admiral": ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
    "an astronaut": ("skimage", "data/astronaut.png"),
    "bricks": ("skimage", "data/brick.png"),
    "coins": ("skimage", "data/coins.png"),
    "galaxies": ("skimage", "data/hubble_deep_field.jpg"),
    "grass": ("skimage", "data/grass.png"),
    "gravel": ("skimage", "data/gravel.png"),
    "the moon": ("skimage", "data/moon.png"),
}
FONTS = ("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique", "cmtt10")
TRAINED_PART, HELD_OUT_PART = (0.0, 0.65), (0.7, 1.0)
SHORTEST_WORD, LONGEST_WORD = 3, 4
WORD_SIZE, PHOTOGRAPH_SIZE, PITCH = (64, 32), (48, 48), 16


class Example(NamedTuple):
    """A picture, what to do with it (`READ` or `NAME`), and the right answer."""

    image: Image.Image
    task: str
    answer: str


@cache
def photographs() -> dict[str, Image.Image]:
    """The photographs by name, at most 300 pixels high.

    Raises:
        ImportError: A package that carries one is not installed.
    """
    opened = {}
    for name, (package, file) in PHOTOGRAPHS.items():
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ImportError(
                f"Expected {package} for its photographs, found none: pip install 'deltalatent[photos]'."
            )
        image = Image.open(Path(spec.submodule_search_locations[0]) / file).convert("RGB")
        opened[name] = image.resize((round(300 * image.width / image.height), 300))
    return opened


@cache
def words() -> tuple[list[str], list[str]]:
    """Words of three and four letters, common and rare ones alike: to train on, and held out."""
    pattern = rf"\b[a-z]{{{SHORTEST_WORD},{LONGEST_WORD}}}\b"
    found = sorted({word for text in topics.values() for word in re.findall(pattern, text)})
    is_held_out = {word: hashlib.sha256(word.encode()).digest()[0] < 26 for word in found}
    return [word for word in found if not is_held_out[word]], [word for word in found if is_held_out[word]]


def piece(image: Image.Image, part: tuple[float, float], size: tuple[int, int], rng: random.Random) -> Image.Image:
    """A random rectangle of the columns `part` of an image, brought to this size."""
    height = rng.randint(90, 140)
    width = min(round(height * size[0] / size[1]), int((part[1] - part[0]) * image.width))
    left = rng.uniform(part[0] * image.width, part[1] * image.width - width)
    top = rng.uniform(0, image.height - height)
    return image.resize(size, box=(left, top, left + width, top + height))


def drawn(word: str, part: tuple[float, float], rng: random.Random) -> Image.Image:
    """A word, set like a typewriter's at one letter per `PITCH` pixels, on a faded piece of a photograph."""
    image = piece(rng.choice(list(photographs().values())), part, WORD_SIZE, rng)
    image = Image.blend(image, Image.new("RGB", image.size, "white"), 0.8)
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    font = ImageFont.truetype(str(folder / f"{rng.choice(FONTS)}.ttf"), rng.randint(22, 26))
    shade = rng.randint(0, 60)
    middle, baseline = rng.uniform(6.5, 9.5), rng.uniform(20, 24)
    for place, letter in enumerate(word):
        position = middle + place * PITCH, baseline
        ImageDraw.Draw(image).text(position, letter, font=font, fill=(shade, shade, shade), anchor="ms")
    return image


class Pictures(Dataset):
    """`length` examples, made when they are asked for: two words to read, then a photograph to name, and so on.

    Args:
        length: How many.
        held_out: Whether to take held-out words and parts of photographs.
        seed: Other examples for another seed.
    """

    def __init__(self, length: int, held_out: bool, seed: int = 0) -> None:
        self.length, self.held_out, self.seed = length, held_out, seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Example:
        rng = random.Random(f"{self.seed} {self.held_out} {index}")
        part = HELD_OUT_PART if self.held_out else TRAINED_PART
        if index % 3 == 2:
            name = rng.choice(list(PHOTOGRAPHS))
            image = piece(photographs()[name], part, PHOTOGRAPH_SIZE, rng)
            return Example(
                image if rng.random() < 0.5 else image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), NAME, name
            )
        word = rng.choice(words()[self.held_out])
        if not self.held_out and rng.random() < 0.5:  # single letters and such, so that none is told by the others
            letters = "".join(rng.sample(word, rng.randint(1, len(word))))
            word = word if letters in words()[1] else letters
        return Example(drawn(word, part, rng), READ, word)
