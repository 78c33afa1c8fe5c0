# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""How released tensors become parameters, for Transformers' conversion engine.

Experts are fused into 3-D parameters and unpacked if they are packed, the MoE block is renamed, `A_log` loses its
padding; nothing else differs. The engine applies the reverse when it saves, so every class writes the released names.
"""

from __future__ import annotations

import re
from collections import defaultdict

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
)
from transformers.distributed.utils import is_dtensor

from deltalatent.configuration.configuration_kimi_k3 import KimiK3Config, KimiK3TextConfig
from deltalatent.conversion.mxfp4 import dequantize_mxfp4
from deltalatent.modeling.checkpoint_errors import shortened
from deltalatent.modeling.multimodal import KimiK3ForConditionalGeneration
from deltalatent.modeling.released_layout import MOE_NAME, RELEASED_MOE_NAME, TEXT_PREFIX


class NarrowDecay(ConversionOps):
    """`A_log` as stored (any length from the number of heads up, the rest is padding) -> one entry per head."""

    @torch.no_grad()
    def convert(
        self, input_dict, source_patterns, target_patterns, model=None, config=None, full_layer_name=None, **kwargs
    ):
        """Raises ValueError if the stored tensor is shorter than the number of heads."""
        stored = _only_tensor(input_dict)
        num_heads = config.get_text_config().linear_num_heads
        if stored.numel() < num_heads:
            raise ValueError(
                f"`{full_layer_name}` must have at least {num_heads} entries (one per head), got {stored.numel()}: "
                "the file is truncated or belongs to another config."
            )
        narrowed = stored.flatten()[:num_heads].clone()
        if model is not None and is_dtensor(parameter := model.get_parameter(full_layer_name)):
            whole = DTensor.from_local(narrowed, parameter.device_mesh, run_check=False)
            narrowed = whole.redistribute(placements=parameter.placements).to_local()
        return {target_patterns[0]: narrowed}

    @property
    def reverse_op(self) -> ConversionOps:
        return PadDecay()


class PadDecay(ConversionOps):
    """One entry per head -> zero-padded to `kda_a_log_length`, if the config says so."""

    @torch.no_grad()
    def convert(self, input_dict, source_patterns, target_patterns, config=None, **kwargs):
        decay = _only_tensor(input_dict)
        length = config.get_text_config().kda_a_log_length or decay.numel()
        return {target_patterns[0]: F.pad(decay, (0, length - decay.numel()))}

    @property
    def reverse_op(self) -> ConversionOps:
        return NarrowDecay()


class ExpertsConverter(WeightConverter):
    """Fuses the experts of a layer, after checking that the checkpoint holds each of them, and in one shape.

    The engine only stacks what it finds in the order of the numbers: without the check a file that lacks expert 3 and
    has one too many at the end would load, with experts in the wrong places.

    The tensors that are present decide whether a matrix was packed as MXFP4, each for itself. Packed ones take the
    place of the plain one that they stand for, so that patterns, operations and what is saved are those of plain ones.
    """

    __slots__ = ("dtype", "sources")
    dtype: torch.dtype  # of the parameter; set when something is packed

    KEY = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
    PACKED = re.compile(r"(.*\.experts\.\d+\.w[123]\.weight)(_packed|_scale)")

    def __init__(self, source_patterns, target_patterns, operations, **kwargs) -> None:
        super().__init__(source_patterns, target_patterns, operations, **kwargs)
        self.sources: dict[str, list[str]] = defaultdict(list)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Both tensors of a packed matrix go where the plain one would."""
        part = self.PACKED.fullmatch(source_key)
        renamed, pattern = super().rename_source_key(part[1] if part else source_key)
        return (source_key, None) if pattern is None else (renamed, pattern)

    def add_tensor(self, target_key, source_key, source_pattern, future) -> None:
        super().add_tensor(target_key, source_key, source_pattern, future)
        self.sources[source_pattern].append(source_key)

    def convert(self, layer_name, model=None, config=None, hf_quantizer=None, loading_info=None):
        """Raises ValueError if an expert is missing, supernumerary, half packed, or shaped unlike the others; it is
        named."""
        # The reverse, without `loading_info`, converts one fused parameter. Copies of this converter with other
        # patterns (PEFT makes them for adapters, quantizers for scales) collect other tensors than experts' weights.
        if loading_info is not None and all(pattern.endswith(".weight") for pattern in self.source_patterns):
            self._check_names(config.get_text_config().num_experts)
            packed = [name for names in self.sources.values() for name in names if self.PACKED.fullmatch(name)]
            if packed:
                parameter = model.get_parameter(layer_name)
                if is_dtensor(parameter):  # the engine would count scales as experts of their own
                    raise ValueError(
                        f"experts that are spread over devices must not be packed, got {shortened(packed)}: load the "
                        "model in one process, save it, and load what was saved."
                    )
                self.dtype = parameter.dtype
        return super().convert(layer_name, model, config, hf_quantizer, loading_info)

    def materialize_tensors(self) -> dict[str, list[Tensor]]:
        collected = super().materialize_tensors()
        for pattern, tensors in collected.items():
            names = self.sources[pattern]
            if len(tensors) != len(names):
                continue  # this rank holds some of the experts
            if any(self.PACKED.fullmatch(name) for name in names):
                names, tensors = self._unpacked(dict(zip(names, tensors, strict=True)))
                collected[pattern] = tensors
            for name, tensor in zip(names, tensors, strict=True):
                if tensor.shape != tensors[0].shape:
                    raise ValueError(
                        f"`{name}` must have the shape of `{names[0]}`, {tuple(tensors[0].shape)}, got "
                        f"{tuple(tensor.shape)}: the checkpoint is damaged or mixes files of two models."
                    )
        return collected

    def _unpacked(self, tensors: dict[str, Tensor]) -> tuple[list[str], list[Tensor]]:
        """The same with each packed pair decoded, under the name of the plain tensor, in the order of the experts."""
        plain = {}
        for name, tensor in tensors.items():
            part = self.PACKED.fullmatch(name)
            if part is None:
                plain[name] = tensor
            elif part[2] == "_packed":
                packed, scale = _as_bytes(name, tensor), _as_bytes(f"{part[1]}_scale", tensors[f"{part[1]}_scale"])
                try:
                    plain[part[1]] = dequantize_mxfp4(packed, scale, self.dtype)
                except ValueError as error:
                    raise ValueError(f"`{name}` cannot be decoded: {error}") from error
        return list(plain), list(plain.values())

    def _check_names(self, num_experts: int) -> None:
        present = [self.KEY.fullmatch(name) for names in self.sources.values() for name in names]
        prefix = next(match[1] for match in present if match)
        endings = [pattern.rpartition("*")[2] for pattern in self.source_patterns]  # .w1.weight and .w3.weight
        found = {match[0] for match in present if match}
        expected = set()
        for plain in (f"{prefix}{i}{ending}" for i in range(num_experts) for ending in endings):
            pair = {f"{plain}_packed", f"{plain}_scale"}
            expected |= pair if plain not in found and pair & found else {plain}
        for what, names in (("lacks", expected - found), ("has also", found - expected)):
            if names:
                raise ValueError(
                    f"the checkpoint must hold the experts 0 to {num_experts - 1} (`num_experts`={num_experts}) of "
                    f"each layer, but it {what} {shortened(names)}: the file is damaged or belongs to another config."
                )


class TextPartRenaming(WeightRenaming):
    """Names of the text model in a composite checkpoint -> those that it has alone.

    Saving puts nothing back: a model that was loaded from the text part is saved as a text model.
    """

    __slots__ = ()

    def reverse_transform(self) -> TextPartRenaming:
        return self  # our names never begin so


def _only_tensor(input_dict: dict[str, Tensor | list[Tensor]]) -> Tensor:
    (value,) = input_dict.values()
    return value[0] if isinstance(value, list) else value


def _as_bytes(name: str, tensor: Tensor) -> Tensor:
    """uint8 again; the engine casts everything to the dtype of the parameter, where bytes (up to 255) are exact."""
    as_bytes = tensor.to(torch.uint8)
    if not torch.equal(as_bytes.to(tensor.dtype), tensor):
        raise ValueError(
            f"`{name}` must hold bytes (uint8), got other numbers: the file is damaged or of another format."
        )
    return as_bytes


def released_to_ours() -> list[WeightConverter | WeightRenaming]:
    """A fresh list of transforms (the engine keeps state in them)."""
    return [
        TextPartRenaming(source_patterns=rf"^{re.escape(TEXT_PREFIX)}(.+)", target_patterns=r"\1"),
        WeightRenaming(
            source_patterns=rf"\.{RELEASED_MOE_NAME}\.",
            # Looked at when saving only: dense layers are called `mlp` in the release too.
            target_patterns=rf"\.{MOE_NAME}\.(?!gate_proj|up_proj|down_proj)",
        ),
        ExpertsConverter(
            source_patterns=[r"\.experts.*.w1.weight", r"\.experts.*.w3.weight"],
            target_patterns=r"\.experts.gate_up_proj",
            operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        ExpertsConverter(
            source_patterns=r"\.experts.*.w2.weight",
            target_patterns=r"\.experts.down_proj",
            operations=[MergeModulelist(dim=0)],
        ),
        WeightConverter(
            source_patterns="self_attn.A_log", target_patterns="self_attn.A_log", operations=[NarrowDecay()]
        ),
    ]


def released_parts_to_ours() -> list[WeightConverter | WeightRenaming]:
    """A fresh list of renamings of a composite checkpoint; those of its text part apply too, behind these."""
    return [
        WeightRenaming(source_patterns=f"^{re.escape(released)}", target_patterns=f"^{re.escape(ours)}")
        for released, ours in KimiK3ForConditionalGeneration.released_prefixes
    ]


def register() -> None:
    """Tell Transformers about the layouts; calling it again changes nothing."""
    register_checkpoint_conversion_mapping(KimiK3TextConfig.model_type, released_to_ours(), overwrite=True)
    register_checkpoint_conversion_mapping(KimiK3Config.model_type, released_parts_to_ours(), overwrite=True)
