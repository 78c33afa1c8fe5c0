# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What lies in a folder of safetensors files: every tensor with its place on disk, checked before any is read.

Tensors are read with plain file operations, not through a memory map: a file that shrinks meanwhile is then an error
and not a signal that ends the process, and memory is what is asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deltalatent.modeling.checkpoint_errors import (
    INDEX_NAME,
    SINGLE_NAME,
    add_places,
    check_index,
    check_save_finished,
    read_json,
    read_weight_map,
    shortened,
)

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of dtypes in safetensors headers."""


@dataclass(frozen=True)
class Piece:
    """A tensor on disk, or a contiguous part of one: `shape` elements of `dtype` from byte `offset` of `file` on."""

    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.numel * DTYPES[self.dtype].itemsize

    def part(self, start: int, shape: tuple[int, ...]) -> Piece:
        """`shape` elements from element `start` on, in row-major order; the caller knows that they are there."""
        return Piece(self.file, self.offset + start * DTYPES[self.dtype].itemsize, self.dtype, shape)

    def read(self) -> Tensor:
        """The tensor. Raises ValueError if the file has become shorter since its header was read."""
        content = bytearray(self.nbytes)
        with self.file.open("rb") as file:
            file.seek(self.offset)
            if file.readinto(content) != len(content):
                raise ValueError(
                    f"`{self.file}` must stay as it is while it is read, got an end before byte "
                    f"{self.offset + len(content)}: something else writes to it; start again when that is over."
                )
        if not content:
            return torch.empty(self.shape, dtype=DTYPES[self.dtype])
        return torch.frombuffer(content, dtype=DTYPES[self.dtype]).view(self.shape)


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder with a `config.json` and safetensors files; `tensors` by name, in the order of the files."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Piece]
    files: tuple[str, ...]

    @classmethod
    def open(cls, folder: str | Path) -> CheckpointFolder:
        """Read the config and all headers.

        Raises:
            ValueError: There is no such folder; the save was interrupted; a file is missing, cut short or no JSON; the
                index lies; a tensor is there twice, or of a dtype that no checkpoint of these models has. File and
                tensor are named.
        """
        folder = Path(folder)
        check_is_folder(folder, "checkpoint")
        check_save_finished(folder)
        config = read_json(folder / "config.json", "copy the file of the model that the weights belong to")
        weight_map = read_weight_map(folder)
        files = tuple(dict.fromkeys(weight_map.values())) if weight_map is not None else (SINGLE_NAME,)
        _refuse_leftovers(folder, files)
        tensors: dict[str, Piece] = {}
        places: dict[str, str] = {}
        for file in files:
            found = read_header(folder / file)
            add_places(places, found, folder / file)
            tensors |= found
        if weight_map is not None:
            check_index(folder, weight_map, places)
        return cls(folder, config, tensors, files)


def check_is_folder(folder: Path, what: str) -> None:
    """Raise ValueError, which calls it `what`, for anything but a folder, such as the name of a model on the Hub."""
    if not folder.is_dir():
        raise ValueError(
            f"`{what}` must be a folder, got `{folder}`: pass the one that holds config.json (of a model on the Hub, "
            "what `hf download` prints)."
        )


def read_header(file: Path) -> dict[str, Piece]:
    """The tensors of one safetensors file.

    Raises:
        ValueError: The file is missing, cut short, no safetensors file, names a tensor twice, or has another dtype.
    """
    try:
        with safe_open(file, framework="pt"):
            pass  # sizes, offsets and the file's length are consistent, or this raises
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            pairs = json.loads(opened.read(length), object_pairs_hook=_without_duplicates)
    except FileNotFoundError as error:
        raise ValueError(
            f"`{file}` must be there, found none: the checkpoint is incomplete; copy or download it again."
        ) from error
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"`{file}` must be a whole safetensors file, got: {error}; copy or download it again."
        ) from error
    tensors = {}
    for name, entry in pairs.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(
                f"`{name}` in `{file}` must be of a dtype among {', '.join(DTYPES)}, got {entry['dtype']}: this "
                "quantisation is not supported; use the checkpoint before it was quantised."
            )
        tensors[name] = Piece(file, 8 + length + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))
    return tensors


def _without_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"`{name}` twice in the header")
        result[name] = value
    return result


def _refuse_leftovers(folder: Path, files: tuple[str, ...]) -> None:
    """Shards that no index names are of an interrupted or of another save; other tools' files do not matter."""
    leftovers = sorted({file.name for file in folder.glob("model*.safetensors")} - set(files))
    if not leftovers:
        return
    if INDEX_NAME in {file.name for file in folder.iterdir()}:
        wrong = f"`{folder / INDEX_NAME}` must name every file `model*.safetensors`, got none for"
    else:
        wrong = f"`{folder}` must hold `{SINGLE_NAME}` alone, or `{INDEX_NAME}`, got no index but"
    raise ValueError(
        f"{wrong} {shortened(leftovers)}: a save was interrupted, or two were mixed; copy or save it again."
    )
