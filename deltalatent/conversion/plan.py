# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What a conversion will write, from the headers alone: steps, each a few tensors in and out, cut into shards."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deltalatent.conversion.checkpoint_folder import DTYPES, Piece
from deltalatent.conversion.layouts import EXPERT, LAYER, Kind, Source, stored_in_float32
from deltalatent.conversion.mxfp4 import GROUP_SIZE, NAN_SCALE, dequantize_mxfp4, quantize_mxfp4
from deltalatent.conversion.shard_writer import TensorSpec
from deltalatent.modeling.checkpoint_errors import SINGLE_NAME
from deltalatent.modeling.released_layout import RELEASED_MOE_NAME, TEXT_PREFIX

Experts = Literal["as-is", "bfloat16", "mxfp4"]

ROUTER = re.compile(rf"model\.layers\.(\d+)\.{RELEASED_MOE_NAME}\.gate\.(weight|e_score_correction_bias)")
PACKED = re.compile(r"(.*)_(packed|scale)")


@dataclass(frozen=True)
class Step:
    """`compute` makes the tensors of `outputs` from those of `pieces`; `packs` says whose error is worth reporting."""

    pieces: tuple[Piece, ...]
    outputs: tuple[TensorSpec, ...]
    compute: Callable[..., Sequence[Tensor]]
    packs: tuple[int, str] | None = None  # layer, matrix

    @property
    def nbytes(self) -> int:
        """Of what is written."""
        return sum(spec.nbytes for spec in self.outputs)


@dataclass(frozen=True)
class Shard:
    """A file and what makes it, large elements first so that each tensor is aligned."""

    name: str
    steps: tuple[Step, ...]

    @property
    def specs(self) -> list[TensorSpec]:
        """Its tensors in order."""
        return [spec for step in self.steps for spec in step.outputs]


@dataclass(frozen=True)
class Edits:
    """What happens to the tensors on the way.

    Attributes:
        kind: Whose names and shapes the target has.
        experts: How routed experts are stored.
        layers: How many layers stay.
        kept: The experts that stay, per layer in ascending order; `None` for all.
    """

    kind: Kind
    experts: Experts
    layers: int
    kept: dict[int, list[int]] | None


def plan_steps(source: Source, edits: Edits, vision: dict[str, Piece]) -> tuple[list[Step], dict[str, list[str]]]:
    """Steps in the order of the names, and the names that are left behind by reason.

    Raises:
        ValueError: Experts of this width cannot be packed.
    """
    prefix = TEXT_PREFIX if edits.kind == "composite" else ""
    dropped: dict[str, list[str]] = {"vision": [name for name in source.vision if name not in vision]}
    steps = []
    for name in source.text:
        layer = LAYER.fullmatch(name)
        if layer is not None and int(layer[1]) >= edits.layers:
            dropped.setdefault("layers", []).append(name)
            continue
        if name.endswith(".weight_scale"):
            continue  # comes with the codes
        target, kept = _renumbered(name, edits)
        if target is None:
            dropped.setdefault("experts", []).extend([name, *_scale_of(name)])
            continue
        steps.append(_step(source, name, prefix + target, edits, kept))
    steps += [_copy(piece, TensorSpec(name, piece.dtype, piece.shape)) for name, piece in vision.items()]
    return steps, {reason: names for reason, names in dropped.items() if names}


def cut_into_shards(steps: list[Step], max_bytes: int) -> list[Shard]:
    """Consecutive steps, up to `max_bytes` of tensors per file; a step beyond that has a file of its own."""
    groups: list[list[Step]] = [[]]
    size = 0
    for step in steps:
        if groups[-1] and size + step.nbytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(step)
        size += step.nbytes
    shards = []
    for number, group in enumerate(groups, start=1):
        name = SINGLE_NAME if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        group.sort(key=lambda step: -DTYPES[step.outputs[0].dtype].itemsize)
        shards.append(Shard(name, tuple(group)))
    return shards


def index_of(shards: list[Shard]) -> dict[str, object] | None:
    """The content of the index file, `None` for a single file."""
    if len(shards) == 1:
        return None
    weight_map = {spec.name: shard.name for shard in shards for spec in shard.specs}
    total = sum(step.nbytes for shard in shards for step in shard.steps)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _scale_of(name: str) -> Iterator[str]:
    if name.endswith(".weight_packed"):
        yield name.removesuffix("packed") + "scale"


def _renumbered(name: str, edits: Edits) -> tuple[str | None, list[int] | None]:
    """The name after expert pruning (`None` if its expert goes), and the rows that a router keeps."""
    if edits.kept is None:
        return name, None
    if router := ROUTER.fullmatch(name):
        return name, edits.kept[int(router[1])]
    packed = PACKED.fullmatch(name)
    expert = EXPERT.fullmatch(packed[1] if packed else name)
    if expert is None:
        return name, None
    kept = edits.kept[int(expert["number"])]
    index = int(expert["index"])
    place = bisect_left(kept, index)
    if place == len(kept) or kept[place] != index:
        return None, None
    start, end = expert.span("index")
    return f"{name[:start]}{place}{name[end:]}", None


def _step(source: Source, name: str, target: str, edits: Edits, kept: list[int] | None) -> Step:
    piece = source.text[name]
    if name.endswith(".weight_packed"):
        scale = source.text[name.removesuffix("packed") + "scale"]
        if edits.experts == "bfloat16":
            return _unpack(piece, scale, target.removesuffix("_packed"))
        return Step(
            (piece, scale),
            (
                TensorSpec(target, piece.dtype, piece.shape),
                TensorSpec(target.removesuffix("packed") + "scale", scale.dtype, scale.shape),
            ),
            _same_codes,
        )
    if edits.experts == "mxfp4" and (expert := EXPERT.fullmatch(name)):
        return _pack(piece, target, (int(expert["number"]), expert["which"]))
    if name.endswith(".A_log") and edits.kind == "predecessor":
        heads = source.config.linear_num_heads
        piece = piece.part(0, (1, 1, heads, 1))
    dtype = "F32" if stored_in_float32(name) else piece.dtype
    if kept is not None:
        rows = torch.tensor(kept)
        spec = TensorSpec(target, dtype, (len(kept), *piece.shape[1:]))
        return Step((piece,), (spec,), lambda tensor: (tensor.to(DTYPES[dtype])[rows],))
    return _copy(piece, TensorSpec(target, dtype, piece.shape))


def _copy(piece: Piece, spec: TensorSpec) -> Step:
    """Bit by bit; what the layout stores in float32 is widened if it was narrower, which loses nothing."""
    return Step((piece,), (spec,), lambda tensor: (tensor.to(DTYPES[spec.dtype]),))


def _same_codes(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    if scale.numel() and int(scale.max()) == NAN_SCALE:
        raise ValueError(f"scales must be below {NAN_SCALE}, which means NaN: the file is damaged")
    return packed, scale


def _unpack(packed: Piece, scale: Piece, target: str) -> Step:
    spec = TensorSpec(target, "BF16", (packed.shape[0], packed.shape[1] * 2))
    return Step((packed, scale), (spec,), lambda codes, scales: (dequantize_mxfp4(codes, scales, torch.bfloat16),))


def _pack(piece: Piece, target: str, packs: tuple[int, str]) -> Step:
    out, width = piece.shape
    if width % GROUP_SIZE:
        raise ValueError(
            f"`{target}` must have a multiple of {GROUP_SIZE} inputs to be packed, got {width}: leave experts as they "
            "are, or choose `moe_intermediate_size` and `routed_expert_hidden_size` so."
        )
    outputs = (
        TensorSpec(f"{target}_packed", "U8", (out, width // 2)),
        TensorSpec(f"{target}_scale", "U8", (out, width // GROUP_SIZE)),
    )
    return Step((piece,), outputs, quantize_mxfp4, packs)
