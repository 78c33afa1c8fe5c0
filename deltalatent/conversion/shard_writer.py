# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""A safetensors file written tensor by tensor, so that memory does not grow with the size of a shard.

`safetensors.torch.save_file` wants all tensors of a file at once. The header only needs dtypes and shapes, which a
plan knows before the first tensor is read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from deltalatent.conversion.checkpoint_folder import DTYPES


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype (as in safetensors headers) and shape of a tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class ShardWriter:
    """Writes `specs` in their order; as a context manager it leaves either a whole file with the final name, or none.

    Attributes:
        sha256: Hexadecimal digest of the file, after the context was left.
        nbytes: Its size.
    """

    def __init__(self, file: Path, specs: Sequence[TensorSpec]) -> None:
        self.file = file
        self.specs = tuple(specs)
        self.sha256 = ""
        self.nbytes = 0
        self._hash = hashlib.sha256()
        self._written = 0
        self._partial = file.with_name(file.name + ".partial")

    def __enter__(self) -> ShardWriter:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for spec in self.specs:
            end = offset + spec.nbytes
            header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors start at a multiple of eight bytes
        self._opened = self._partial.open("wb")
        self._write_bytes(len(text).to_bytes(8, "little") + text)
        return self

    def write(self, tensor: Tensor) -> None:
        """The next tensor, exactly as its spec says (the plan and what it computes must agree)."""
        spec = self.specs[self._written]
        if tensor.dtype != DTYPES[spec.dtype] or tuple(tensor.shape) != spec.shape:
            raise RuntimeError(f"planned {spec}, got {tensor.dtype} {tuple(tensor.shape)}")
        self._written += 1
        if tensor.numel():
            self._write_bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                if self._written != len(self.specs):
                    raise RuntimeError(f"planned {len(self.specs)} tensors, got {self._written}")
                self._opened.flush()
                os.fsync(self._opened.fileno())
        finally:
            self._opened.close()
        if kind is None:
            os.replace(self._partial, self.file)
            self.sha256 = self._hash.hexdigest()

    def _write_bytes(self, content: bytes | memoryview) -> None:
        self._opened.write(content)
        self._hash.update(content)
        self.nbytes += len(content)
