# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Which tensors a checkpoint holds, whoever wrote it, under the names of the released text model.

Understood are the release (text or composite, experts plain or packed), the predecessor as released and as
Transformers writes it, and names in memory (`save_original_format=False`) of both. The tensors that must be there are
those of the model which the config describes, so that a config of another model, or a tensor too few, too many, of
another shape or dtype is noticed before anything is converted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError

from deltalatent.configuration.configuration_kimi_k3 import (
    KimiK3Config,
    KimiK3TextConfig,
    KimiK3VisionConfig,
    has_fields_of_this_architecture,
    read_kimi_linear,
)
from deltalatent.conversion.checkpoint_folder import CheckpointFolder, Piece
from deltalatent.conversion.mxfp4 import GROUP_SIZE
from deltalatent.modeling.checkpoint_errors import shortened
from deltalatent.modeling.modeling_kimi_k3 import KimiK3ForCausalLM
from deltalatent.modeling.released_layout import MOE_NAME, RELEASED_MOE_NAME, TEXT_PREFIX, VISION_PREFIXES
from deltalatent.modeling.vision_tower import KimiK3Projector, KimiK3VisionModel

Kind = Literal["text", "composite", "predecessor"]

PLAIN_DTYPES = ("BF16", "F16", "F32")

SHARED_FIELDS = ("dtype", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")
"""What a text model of its own needs to know, although it may stand in the outer part of a composite only."""

DAMAGED = "the checkpoint is damaged or belongs to another config"

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
EXPERT = re.compile(
    r"(?P<layer>model\.layers\.(?P<number>\d+)\.).*\.experts\.(?P<index>\d+)\.(?P<which>w[123])\.weight"
)


@dataclass(frozen=True)
class Source:
    """A checked checkpoint.

    Attributes:
        folder: Where it is.
        kind: What its config says that it is.
        fields: The text model's part of the config, in the words of `KimiK3TextConfig`.
        config: The same as an object.
        text: The text model's tensors by released name, without prefix; packed experts as two tensors each.
        vision: The other tensors of a composite checkpoint, by their names.
    """

    folder: CheckpointFolder
    kind: Kind
    fields: dict[str, Any]
    config: KimiK3TextConfig
    text: dict[str, Piece]
    vision: dict[str, Piece]


def read_source(folder: CheckpointFolder) -> Source:
    """Recognise and check a checkpoint.

    Raises:
        ValueError: The config is of another architecture or no valid one, or the tensors are not those of the model
            that it describes; they are named.
    """
    kind = kind_of(folder)
    fields, config = _text_config(folder, kind)
    names, vision = _split(folder, kind)
    if vision:
        check_vision(vision, folder)
    text: dict[str, Piece] = {}
    mlp_layer_types = config.mlp_layer_types
    for name, piece in names.items():
        for released, part in _released(name, piece, mlp_layer_types):
            if released in text:
                raise ValueError(
                    f"each tensor must be there once, got `{released}` under two names (one is `{name}`) in "
                    f"`{folder.folder}`: two saves were mixed; copy or save the checkpoint again."
                )
            text[released] = part
    return Source(folder, kind, fields, config, check_text(text, config, str(folder.folder)), vision)


def kind_of(folder: CheckpointFolder) -> Kind:
    """What the config says. Raises ValueError for other architectures."""
    model_type = folder.config.get("model_type")
    if isinstance(folder.config.get("text_config"), dict) and model_type == KimiK3Config.model_type:
        return "composite"
    if model_type == KimiK3TextConfig.model_type:
        return "text"
    if model_type == "kimi_linear":
        try:
            return "text" if has_fields_of_this_architecture(folder.config) else "predecessor"
        except (TypeError, ValueError, AttributeError) as error:
            raise _invalid_config(folder, error) from error
    raise ValueError(
        f"`{folder.folder / 'config.json'}` must have the `model_type` kimi_k3 (with a `text_config`), kimi_k3_text "
        f"or kimi_linear, got {model_type!r}: these weights belong to another architecture."
    )


def _text_config(folder: CheckpointFolder, kind: Kind) -> tuple[dict[str, Any], KimiK3TextConfig]:
    try:
        if kind == "composite":
            KimiK3Config.from_dict(folder.config)
            fields = {name: folder.config[name] for name in SHARED_FIELDS if name in folder.config}
            fields |= folder.config["text_config"] | {"model_type": KimiK3TextConfig.model_type}
        elif folder.config["model_type"] == "kimi_linear":
            fields = read_kimi_linear(folder.config)
        else:
            fields = dict(folder.config)
        return fields, KimiK3TextConfig.from_dict(fields)
    except (StrictDataclassError, TypeError, ValueError, AttributeError, KeyError, RecursionError) as error:
        raise _invalid_config(folder, error) from error


def _invalid_config(folder: CheckpointFolder, error: Exception) -> ValueError:
    cause = error.__cause__ or error
    return ValueError(f"`{folder.folder / 'config.json'}` must be a valid configuration, got: {cause}")


def _split(folder: CheckpointFolder, kind: Kind) -> tuple[dict[str, Piece], dict[str, Piece]]:
    """Text tensors, without prefix, and vision tensors."""
    if kind != "composite":
        return folder.tensors, {}
    text = {
        name.removeprefix(TEXT_PREFIX): piece for name, piece in folder.tensors.items() if name.startswith(TEXT_PREFIX)
    }
    vision = {name: piece for name, piece in folder.tensors.items() if name.startswith(VISION_PREFIXES)}
    unknown = [name for name in folder.tensors if not name.startswith((TEXT_PREFIX, *VISION_PREFIXES))]
    if unknown:
        raise ValueError(
            f"tensors of the composite checkpoint `{folder.folder}` must begin with {TEXT_PREFIX}, "
            f"{' or '.join(VISION_PREFIXES)}, got {shortened(unknown)}: the files belong to another config."
        )
    has_tower = folder.config.get("vision_config") is not None
    if has_tower != bool(vision):
        raise ValueError(
            f"`{folder.folder}` must have vision tensors exactly if its config has a `vision_config`, got "
            f"{len(vision)} tensors and {'a' if has_tower else 'no'} `vision_config`: the checkpoint is incomplete, "
            "or the files belong to another config."
        )
    return text, vision


def _released(name: str, piece: Piece, mlp_layer_types: list[str]) -> Iterator[tuple[str, Piece]]:
    """The released tensors that one stored tensor is made of, often just itself."""
    match = LAYER.fullmatch(name)
    if match is None or int(match[1]) >= len(mlp_layer_types):
        yield name, piece
        return
    layer, rest = f"model.layers.{match[1]}", match[2]
    rest = rest.replace("self_attn.forget_gate.", "self_attn.")
    mixer, _, inner = rest.partition(".")
    if mixer in (MOE_NAME, RELEASED_MOE_NAME):
        mixer = RELEASED_MOE_NAME if mlp_layer_types[int(match[1])] == "sparse" else MOE_NAME
        rest = f"{mixer}.{inner}"
    rows = piece.shape[0] if piece.shape else 0
    if rest == "self_attn.conv1d.weight" and rows % 3 == 0:  # three convolutions in one
        shape = (rows // 3, *piece.shape[1:])
        for i, which in enumerate("qkv"):
            yield f"{layer}.self_attn.{which}_conv1d.weight", piece.part(i * piece.numel // 3, shape)
    elif inner == "experts.gate_up_proj" and len(piece.shape) == 3 and piece.shape[1] % 2 == 0:
        shape, size = (piece.shape[1] // 2, piece.shape[2]), piece.shape[1] * piece.shape[2]
        for i in range(rows):
            yield f"{layer}.{mixer}.experts.{i}.w1.weight", piece.part(i * size, shape)
            yield f"{layer}.{mixer}.experts.{i}.w3.weight", piece.part(i * size + size // 2, shape)
    elif inner == "experts.down_proj" and len(piece.shape) == 3:
        for i in range(rows):
            start = i * piece.shape[1] * piece.shape[2]
            yield f"{layer}.{mixer}.experts.{i}.w2.weight", piece.part(start, piece.shape[1:])
    else:
        yield f"{layer}.{rest}", piece


def stored_in_float32(name: str) -> bool:
    """Whether the layout stores a tensor in float32, whatever the dtype of the model."""
    return not set(KimiK3ForCausalLM._keep_in_fp32_modules_strict).isdisjoint(name.split("."))


def text_inventory(config: KimiK3TextConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the text model as released (experts plain), from a model without memory.

    Raises:
        ValueError: The config asks for sizes beyond any memory.
    """
    with _on_meta():
        model = KimiK3ForCausalLM(config)
    kinds = config.mlp_layer_types
    return {
        name: part.shape
        for key, tensor in model.state_dict().items()
        for name, part in _released(key, Piece(Path(), 0, "F32", tuple(tensor.shape)), kinds)
    }


def check_text(text: dict[str, Piece], config: KimiK3TextConfig, where: str) -> dict[str, Piece]:
    """Compare with the inventory; returns the tensors in its order and shapes (which may differ in axes of length 1).

    Raises:
        ValueError: Tensors are missing, too many, of another shape or dtype; they are named.
    """
    layers = {int(match[1]) for name in text if (match := LAYER.fullmatch(name))}
    if layers != set(range(config.num_hidden_layers)):
        odd = sorted(layers ^ set(range(min(config.num_hidden_layers, max(layers, default=0) + 2))))
        raise ValueError(
            f"`{where}` must hold the layers 0 to {config.num_hidden_layers - 1} "
            f"(`num_hidden_layers`={config.num_hidden_layers}), got {len(layers)} layers, unlike for "
            f"{', '.join(map(str, odd[:8]))}: {DAMAGED}."
        )
    if (config.num_experts or 0) > len(text):
        raise ValueError(f"`{where}` must hold `num_experts`={config.num_experts} per layer, got fewer: {DAMAGED}.")

    found: dict[str, Piece] = {}
    missing, misshapen, mistyped = [], [], []
    seen: set[str] = set()
    for name, shape in text_inventory(config).items():
        parts = {name: shape}
        if name not in text:
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            if EXPERT.fullmatch(name) and (f"{name}_packed" in text or f"{name}_scale" in text):
                out, width = shape
                parts = {f"{name}_packed": (out, width // 2), f"{name}_scale": (out, width // GROUP_SIZE)}
        seen.update(parts)
        for part, wanted in parts.items():
            if (piece := text.get(part)) is None:
                missing.append(part)
            elif (fitting := _fitting_shape(part, piece.shape, wanted)) is None:
                misshapen.append(f"{part} ({piece.shape} in the file, {wanted} expected)")
            elif piece.dtype not in (PLAIN_DTYPES if part == name else ("U8",)):
                mistyped.append(f"{part} ({piece.dtype})")
            else:
                found[part] = piece.part(0, fitting)
    _refuse(where, missing, text.keys() - seen, misshapen, mistyped)
    return found


def check_vision(vision: dict[str, Piece], folder: CheckpointFolder) -> None:
    """Compare the vision part with what `vision_config` describes; raises ValueError as `check_text` does."""
    config = KimiK3VisionConfig.from_dict(folder.config["vision_config"])
    depth = config.vt_num_hidden_layers
    if depth > len(vision):  # building so many takes for ever
        raise ValueError(f"`{folder.folder}` must hold `vt_num_hidden_layers`={depth} blocks, got fewer: {DAMAGED}.")
    with _on_meta():
        parts = zip(VISION_PREFIXES, (KimiK3VisionModel(config), KimiK3Projector(config)), strict=True)
    inventory = {
        prefix + name: tuple(tensor.shape) for prefix, part in parts for name, tensor in part.state_dict().items()
    }
    _refuse(
        str(folder.folder),
        [name for name in inventory if name not in vision],
        vision.keys() - inventory.keys(),
        [
            f"{name} ({piece.shape} in the file, {inventory[name]} expected)"
            for name, piece in vision.items()
            if name in inventory and piece.shape != inventory[name]
        ],
        [f"{name} ({piece.dtype})" for name, piece in vision.items() if piece.dtype not in PLAIN_DTYPES],
    )


@contextmanager
def _on_meta() -> Iterator[None]:
    """Models built here have no memory; ValueError if their sizes are beyond any."""
    try:
        with torch.device("meta"):
            yield
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"the config must describe a model that can be built, got: {error}") from error


def _refuse(
    where: str, missing: Iterable[str], surplus: Iterable[str], misshapen: Iterable[str], mistyped: Iterable[str]
) -> None:
    for problem, names in (
        ("must hold every tensor of its model, got none for", missing),
        ("must hold no tensor but those of its model, got", surplus),
        ("must hold tensors of the shapes that its config asks for, got", misshapen),
        (f"must hold tensors of the dtypes {', '.join(PLAIN_DTYPES)} (packed ones: U8), got", mistyped),
    ):
        if names:
            raise ValueError(f"`{where}` {problem} {shortened(names)}: {DAMAGED}.")


def _fitting_shape(name: str, stored: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape in which a stored tensor is used, `None` if it does not fit. `A_log` may be padded to any length."""
    stored_sizes, wanted_sizes = ([n for n in shape if n != 1] for shape in (stored, wanted))
    if name.endswith(".A_log") and math.prod(stored) >= wanted[0] and len(stored_sizes) <= 1:
        return (math.prod(stored),)
    return wanted if stored_sizes == wanted_sizes else None
