# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""`config.json` of a converted checkpoint: the published fields, unknown ones included, with what the conversion
changed."""

from __future__ import annotations

import copy
import re
from typing import Any

from deltalatent.configuration.configuration_kimi_k3 import KimiK3Config, KimiK3TextConfig
from deltalatent.conversion.layouts import SHARED_FIELDS, Kind, Source
from deltalatent.conversion.mxfp4 import QUANTIZATION_CONFIG
from deltalatent.modeling.packed_checkpoints import is_mxfp4
from deltalatent.modeling.released_layout import TEXT_PREFIX

ARCHITECTURES: dict[Kind, str] = {
    "text": "KimiK3ForCausalLM",
    "composite": "KimiK3ForConditionalGeneration",
    "predecessor": "KimiLinearForCausalLM",
}

EXPERT_COUNTS = (
    "num_experts",
    *(alias for alias, name in KimiK3TextConfig.attribute_map.items() if name == "num_experts"),
)

# Fields that a file of the predecessor must not have: they would make it one of this architecture.
NEWER_FIELDS = (
    "attn_res_block_size",
    "routed_expert_hidden_size",
    "latent_moe_use_norm",
    "mla_use_output_gate",
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "kda_a_log_length",
    "embedding_initializer_range",
)


def first_layers(fields: dict[str, Any], config: KimiK3TextConfig, layers: int) -> dict[str, Any]:
    """Fields of the text model of the first `layers` layers."""
    linear: dict[str, Any] = copy.deepcopy(config.linear_attn_config)  # type: ignore[arg-type]
    for key in ("kda_layers", "full_attn_layers"):
        linear[key] = [number for number in linear[key] if number <= layers]
    changed = {"num_hidden_layers": layers, "linear_attn_config": linear}
    changed |= {key: fields[key][:layers] for key in ("layer_types", "mlp_layer_types") if fields.get(key)}
    return fields | changed


def fewer_experts(fields: dict[str, Any], experts: int) -> dict[str, Any]:
    """Fields of a text model with `experts` experts per layer, under whatever names the file has."""
    return fields | {key: experts for key in EXPERT_COUNTS if key in fields or key == "num_experts"}


def obstacles_to_predecessor(config: KimiK3TextConfig) -> list[str]:
    """Fields, with their values, of mechanisms that the predecessor does not have."""
    wanted = {
        "attn_res_block_size": None,
        "routed_expert_hidden_size": None,
        "mla_use_output_gate": False,
        "hidden_act": "silu",
        "gate_lower_bound": None,
        "use_full_rank_gate": False,
        "q_lora_rank": None,
        "moe_layer_freq": 1,
    }
    found = [f"{name}={getattr(config, name)!r}" for name, value in wanted.items() if getattr(config, name) != value]
    return found if config.num_experts else [*found, f"num_experts={config.num_experts!r}"]


def target_config(
    source: Source, fields: dict[str, Any], kind: Kind, packed: bool, vision: dict[str, Any] | None
) -> dict[str, Any]:
    """The file to be written.

    Args:
        source: What is converted.
        fields: Of its text model, with what was changed.
        kind: Of the target.
        packed: Whether experts are packed as MXFP4.
        vision: The `config.json` from which the outer part of a composite is taken, `None` if there is none.
    """
    raw = source.folder.config
    same_kind = kind == source.kind
    fields = {key: value for key, value in fields.items() if key not in ("model_type", "architectures", "auto_map")}
    quantization = fields.pop("quantization_config", None)
    in_text_part = quantization is not None
    quantization = quantization or raw.get("quantization_config")
    quantization = (quantization if is_mxfp4(quantization) else copy.deepcopy(QUANTIZATION_CONFIG)) if packed else None
    if quantization is not None and "composite" in (kind, source.kind) and not same_kind:
        quantization = _with_prefix(quantization) if kind == "composite" else _without_prefix(quantization)
    claim = {} if quantization is None else {"quantization_config": quantization}
    custom_code = {"auto_map": raw["auto_map"]} if same_kind and "auto_map" in raw else {}
    head = {"architectures": [ARCHITECTURES[kind]]}

    if kind == "text":
        return head | {"model_type": KimiK3TextConfig.model_type} | custom_code | fields | claim
    if kind == "predecessor":
        return head | {"model_type": "kimi_linear"} | custom_code | _in_released_words(fields) | claim
    text_config = {"model_type": "kimi_linear"} | fields
    if source.kind == "composite":
        outer, given = dict(vision or raw), raw["text_config"]
        # What `fields` took over from the outer part stays there.
        text_config = {key: value for key, value in text_config.items() if key in given or key not in SHARED_FIELDS}
        text_config |= {key: given[key] for key in ("architectures", "auto_map") if key in given}
    else:
        outer = {key: value for key, value in (vision or {}).items() if key != "auto_map"}
        outer |= head | {key: fields[key] for key in SHARED_FIELDS if key in fields}
    for key in ("text_config", "quantization_config"):
        outer.pop(key, None)
    outer = head | {"model_type": KimiK3Config.model_type} | outer
    outer |= {"vision_config": outer.get("vision_config")} | {"text_config": text_config}
    if in_text_part and source.kind == "composite":
        text_config |= claim
    else:
        outer |= claim
    return outer


def _in_released_words(fields: dict[str, Any]) -> dict[str, Any]:
    """Of the predecessor: names as its released code reads them, none of the fields that came later."""
    names = {alias: name for alias, name in KimiK3TextConfig.attribute_map.items() if alias != "model_max_length"}
    fields = {names.get(key, key): value for key, value in fields.items() if key not in NEWER_FIELDS}
    later = ("gate_lower_bound", "use_full_rank_gate")
    linear = {key: value for key, value in fields["linear_attn_config"].items() if key not in later}
    return fields | {"linear_attn_config": linear, "mla_use_nope": True}


def _with_prefix(quantization: dict[str, Any]) -> dict[str, Any]:
    """Entries of the `ignore` list that begin with a module of the text model, under its name in a composite."""
    return _renamed_ignores(
        quantization, lambda entry: re.sub(r"^(re:\^?)?(?=model\b|lm_head\b)", rf"\g<0>{TEXT_PREFIX}", entry)
    )


def _without_prefix(quantization: dict[str, Any]) -> dict[str, Any]:
    return _renamed_ignores(quantization, lambda entry: re.sub(r"^(re:\^?)?language_model\\?\.", r"\1", entry))


def _renamed_ignores(quantization: dict[str, Any], rename: Any) -> dict[str, Any]:
    ignore = quantization.get("ignore")
    if not isinstance(ignore, list):
        return quantization
    return quantization | {"ignore": [rename(entry) if isinstance(entry, str) else entry for entry in ignore]}
