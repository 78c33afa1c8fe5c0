# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Configuration: every relation with its message, and files that come back as they went."""

from __future__ import annotations

import copy
import json
import logging
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, KimiLinearConfig, LlamaConfig
from transformers.testing_utils import CaptureLogger

from deltalatent import KimiK3Config, KimiK3ForCausalLM, KimiK3TextConfig, KimiK3VisionConfig, size_config
from deltalatent.configuration.configuration_kimi_k3 import (
    FIELDS_OF_THIS_ARCHITECTURE,
    default_linear_attn_config,
    has_fields_of_this_architecture,
)
from tests.testing_common import GOLDEN, VARIANTS, linear_attn_config, tiny_config

ALL_FIXTURES = ("text_bf16layout", "text_leftpad", "text_long", "text_mxfp4", "multimodal")
TINY = {
    key: value
    for key, value in size_config("tiny").to_dict().items()
    if key not in ("model_type", "transformers_version", "_name_or_path")
}


@pytest.fixture
def transformers_log() -> Iterator[CaptureLogger]:
    """What Transformers logs during the test."""
    with CaptureLogger(logging.getLogger("transformers")) as captured:
        yield captured


def assert_silent(captured: CaptureLogger) -> None:
    assert captured.io.getvalue() == ""


def fixture_file(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name / "config.json").read_text())


def saved(config: Any, folder: Path) -> dict[str, Any]:
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def assert_contains(actual: dict[str, Any], expected: dict[str, Any], at: str = "") -> None:
    """Every key of `expected` is in `actual` with the same value and JSON type."""
    for key, value in expected.items():
        assert key in actual, f"lost {at}{key}"
        if isinstance(value, dict):
            assert_contains(actual[key], value, f"{at}{key}.")
        else:
            assert actual[key] == value and type(actual[key]) is type(value), f"{at}{key}: {actual[key]!r}"


# ---- released files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["own class", "AutoConfig"])
@pytest.mark.parametrize("name", ALL_FIXTURES)
def test_released_file_round_trips(name: str, through: str, tmp_path: Path, transformers_log: CaptureLogger) -> None:
    expected = fixture_file(name)
    own_class = KimiK3Config if "text_config" in expected else KimiK3TextConfig
    config = (own_class if through == "own class" else AutoConfig).from_pretrained(GOLDEN / name)
    assert type(config) is own_class
    written = saved(config, tmp_path)
    if own_class is KimiK3TextConfig:
        assert (expected.pop("model_type"), written["model_type"]) == ("kimi_linear", "kimi_k3_text")
    else:
        assert (written["model_type"], written["text_config"]["model_type"]) == ("kimi_k3", "kimi_linear")
    assert_contains(written, expected)

    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is own_class
    assert saved(again, tmp_path / "again") == written
    assert_silent(transformers_log)


def test_fixture_fields_are_understood_not_only_kept() -> None:
    """Every key of the released files is a field (so it is typed and documented), but for what all models have."""
    common = {"architectures", "model_type", "dtype", "quantization_config"}
    fields = set(KimiK3TextConfig.__dataclass_fields__)
    for name in ALL_FIXTURES:
        file = fixture_file(name)
        assert set(file.get("text_config", file)) - common - (set() if "text_config" not in file else fields) <= fields
        assert set(file.get("vision_config", ())) <= set(KimiK3VisionConfig.__dataclass_fields__)


def test_quantization_config_is_kept(tmp_path: Path) -> None:
    expected = fixture_file("text_mxfp4")["quantization_config"]
    config = KimiK3TextConfig.from_pretrained(GOLDEN / "text_mxfp4")
    assert config.quantization_config == expected
    assert saved(config, tmp_path)["quantization_config"] == expected


def test_unknown_keys_survive_at_every_level(tmp_path: Path) -> None:
    file = fixture_file("multimodal") | {"top_extra": {"a": [1, 2.5, None]}}
    file["text_config"] |= {"text_extra": "x"}
    file["text_config"]["linear_attn_config"] |= {"kda_extra": True}
    file["vision_config"] |= {"vision_extra": 3}
    (tmp_path / "config.json").write_text(json.dumps(file))
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.text_config.text_extra == "x"
    assert_contains(saved(config, tmp_path / "again"), file)


@pytest.mark.parametrize("model_class_file", ["text", "composite"])
def test_dtype_is_a_torch_dtype_in_memory_and_a_name_on_disk(model_class_file: str, tmp_path: Path) -> None:
    name = "text_long" if model_class_file == "text" else "multimodal"
    config = AutoConfig.from_pretrained(GOLDEN / name)
    assert config.dtype is torch.bfloat16
    assert config.get_text_config().dtype is torch.bfloat16
    assert saved(config, tmp_path)["dtype"] == "bfloat16"


def test_numbers_keep_their_json_form(tmp_path: Path) -> None:
    config = tiny_config(rms_norm_eps=1e-5, activation_situ_beta=4, rope_theta=10000.0, routed_scaling_factor=1)
    text = (tmp_path / "config.json", config.save_pretrained(tmp_path))[0].read_text()
    assert '"rms_norm_eps": 1e-05' in text
    assert '"activation_situ_beta": 4,' in text
    assert '"rope_theta": 10000.0' in text
    assert '"routed_scaling_factor": 1,' in text
    assert '"rope_scaling": null' in text


# ---- the predecessor's files ----------------------------------------------------------------------------------------

RELEASED_PREDECESSOR = {
    "model_type": "kimi_linear",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "model_max_length": 4096,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
    "linear_attn_config": {
        "kda_layers": [1],
        "full_attn_layers": [2],
        "num_heads": 2,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
    },
}


def test_predecessor_file_means_the_predecessor_architecture() -> None:
    config = KimiK3TextConfig.from_dict(dict(RELEASED_PREDECESSOR))
    assert config.hidden_act == "silu"
    assert config.attn_res_block_size is None
    assert config.routed_expert_hidden_size is None
    assert config.latent_moe_use_norm is False
    assert config.mla_use_output_gate is False
    assert config.gate_lower_bound is None
    assert config.use_full_rank_gate is False
    assert config.max_position_embeddings == 4096
    assert config.routed_scaling_factor == 2.446


def test_predecessor_saved_by_transformers_is_read(tmp_path: Path, transformers_log: CaptureLogger) -> None:
    """Transformers writes `layer_types`, `mlp_layer_types` and `linear_*` instead of `linear_attn_config`."""
    theirs = KimiLinearConfig(
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        linear_num_heads=3,
        linear_head_dim=8,
        linear_conv_kernel_dim=2,
        layer_types=["linear_attention", "full_attention"] * 2,
        mlp_layer_types=["dense", "dense", "sparse", "sparse"],
        num_local_experts=16,
        n_shared_experts=2,
        norm_topk_prob=False,
        max_position_embeddings=1234,
    )
    theirs.save_pretrained(tmp_path)
    ours = KimiK3TextConfig.from_pretrained(tmp_path)
    assert ours.layer_types == theirs.layer_types
    assert ours.mlp_layer_types == theirs.mlp_layer_types
    assert (ours.linear_num_heads, ours.linear_head_dim, ours.linear_conv_kernel_dim) == (3, 8, 2)
    assert (ours.num_experts, ours.num_shared_experts, ours.moe_renormalize) == (16, 2, False)
    assert ours.routed_scaling_factor == theirs.routed_scaling_factor
    assert ours.max_position_embeddings == 1234
    assert ours.gate_lower_bound is None and not ours.use_full_rank_gate
    assert_silent(transformers_log)


def test_predecessor_file_without_layers_raises() -> None:
    with pytest.raises(ValueError, match=r"must have `linear_attn_config`.*got neither: add"):
        KimiK3TextConfig.from_dict({"model_type": "kimi_linear", "num_hidden_layers": 2})


@pytest.mark.parametrize("field", FIELDS_OF_THIS_ARCHITECTURE)
def test_one_field_of_ours_makes_a_kimi_linear_file_ours(field: str) -> None:
    """Otherwise Transformers would build the predecessor and silently ignore the field."""
    file = copy.deepcopy(RELEASED_PREDECESSOR)
    assert not has_fields_of_this_architecture(file)
    sizes = {"attn_res_block_size": 2, "routed_expert_hidden_size": 16, "activation_situ_beta": 4.0}
    if field.startswith("linear_attn_config."):
        key = field.removeprefix("linear_attn_config.")
        file["linear_attn_config"][key] = -5.0 if key == "gate_lower_bound" else True
    else:
        file[field] = sizes.get(field, True)
    assert has_fields_of_this_architecture(file)


# ---- fields, aliases, derived values --------------------------------------------------------------------------------

ALIASES = {
    "num_local_experts": ("num_experts", 16),
    "n_routed_experts": ("num_experts", 16),
    "num_experts_per_tok": ("num_experts_per_token", 3),
    "n_shared_experts": ("num_shared_experts", 4),
    "norm_topk_prob": ("moe_renormalize", False),
    "n_group": ("num_expert_group", 2),
    "scoring_func": ("moe_router_activation_func", "sigmoid"),
    "model_max_length": ("max_position_embeddings", 777),
}


def test_every_alias_is_tested() -> None:
    assert {alias: name for alias, (name, _) in ALIASES.items()} == KimiK3TextConfig.attribute_map


@pytest.mark.parametrize("alias", ALIASES)
def test_alias_works_both_ways_and_is_saved_under_the_released_name(alias: str, tmp_path: Path) -> None:
    name, value = ALIASES[alias]
    config = tiny_config(**{alias: value})
    assert getattr(config, name) == getattr(config, alias) == value
    config = tiny_config()
    setattr(config, alias, value)
    assert getattr(config, name) == value
    written = saved(config, tmp_path)
    assert written[name] == value
    assert alias not in written


def test_file_with_two_values_for_one_field_raises() -> None:
    with pytest.raises(
        ValueError, match=r"`num_experts_per_tok` is another name of `num_experts_per_token`=2.*got 3: keep"
    ):
        KimiK3TextConfig.from_dict(TINY | {"num_experts_per_tok": 3})


def test_derived_layer_lists() -> None:
    config = tiny_config(
        num_hidden_layers=6,
        first_k_dense_replace=1,
        moe_layer_freq=2,
        linear_attn_config=linear_attn_config(kda_layers=[1, 3, 4, 6], full_attn_layers=[2, 5]),
    )
    kda, mla = "linear_attention", "full_attention"
    assert config.layer_types == [kda, mla, kda, kda, mla, kda]
    assert config.mlp_layer_types == ["dense", "dense", "sparse", "dense", "sparse", "dense"]
    assert tiny_config(num_experts=None).mlp_layer_types == ["dense"] * 5
    assert tiny_config(num_experts=0).mlp_layer_types == ["dense"] * 5


def test_default_layers_of_the_release() -> None:
    """Three KDA layers to one MLA layer, and the last layer is MLA whatever its number."""
    linear = KimiK3TextConfig().linear_attn_config
    assert linear["full_attn_layers"] == [*range(4, 93, 4), 93]
    assert len(linear["kda_layers"]) == 69
    assert default_linear_attn_config(3)["full_attn_layers"] == [3]


def test_derived_values_are_not_saved(tmp_path: Path) -> None:
    written = saved(tiny_config(kda_implementation="torch"), tmp_path)
    derived = {"layer_types", "mlp_layer_types", "qk_head_dim", "gate_lower_bound", "linear_num_heads"}
    assert not derived & set(written)
    assert not any("kda_implementation" in key for key in written)
    assert not any(key.startswith("_") for key in written)


def test_layer_types_build_the_lists_if_there_are_none() -> None:
    kinds = ["full_attention", "linear_attention"]
    config = KimiK3TextConfig(num_hidden_layers=2, layer_types=kinds)
    assert config.linear_attn_config["full_attn_layers"] == [1]
    assert config.layer_types == kinds


@pytest.mark.parametrize(
    ("name", "value"),
    [("layer_types", ["full_attention"] * 5), ("mlp_layer_types", ["sparse"] * 5), ("qk_head_dim", 3)],
)
def test_derived_value_that_contradicts_the_fields_raises(name: str, value: Any) -> None:
    agreeing = getattr(tiny_config(), name)
    assert getattr(tiny_config(**{name: agreeing}), name) == agreeing
    with pytest.raises(ValueError, match=f"`{name}` follows from other fields and must be .*: leave it out"):
        tiny_config(**{name: value})


def test_kda_implementation_is_a_setting_of_the_session(tmp_path: Path) -> None:
    config = tiny_config(kda_implementation="torch")
    assert config.kda_implementation == "torch"
    assert copy.deepcopy(config).kda_implementation == "torch"
    config.save_pretrained(tmp_path)
    assert KimiK3TextConfig.from_pretrained(tmp_path).kda_implementation == "auto"
    assert AutoConfig.from_pretrained(tmp_path, kda_implementation="torch").kda_implementation == "torch"
    with pytest.raises(ValueError, match=r"`kda_implementation` must be one of .*'cuda'"):
        config.kda_implementation = "cuda"


def test_the_callers_dictionary_is_not_shared() -> None:
    linear = linear_attn_config()
    config = tiny_config(linear_attn_config=linear)
    linear["kda_layers"].append(17)
    assert config.linear_attn_config["kda_layers"] == [1, 2, 3]


@pytest.mark.parametrize(
    "make", [tiny_config, lambda: KimiK3Config.from_pretrained(GOLDEN / "multimodal")], ids=["text", "composite"]
)
def test_pickle_and_deepcopy(make: Callable[[], Any]) -> None:
    config = make()
    for other in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert type(other) is type(config)
        assert other.to_dict() == config.to_dict()
    other.get_text_config().linear_attn_config["num_heads"] = 99
    assert config.get_text_config().linear_attn_config["num_heads"] != 99


# ---- errors ---------------------------------------------------------------------------------------------------------


def linear(**fields: Any) -> dict[str, Any]:
    return {"linear_attn_config": linear_attn_config(**fields)}


def linear_without(key: str) -> dict[str, Any]:
    return {"linear_attn_config": {k: v for k, v in linear_attn_config().items() if k != key}}


NAN = float("nan")
# What is wrong -> the fields, and a pattern with field, value and fix.
CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "layers overlap": (
        linear(kda_layers=[1, 2, 3, 4]),
        r"kda_layers` and `full_attn_layers` must name each layer once, got \[4\].*remove",
    ),
    "layer twice in one list": (linear(kda_layers=[1, 1, 2, 3]), r"each layer once, got \[1\].*remove"),
    "layers leave a gap": (
        linear(kda_layers=[1, 2]),
        r"layers 1 to `num_hidden_layers`=5, got no entry for \[3\]: add",
    ),
    "layers beyond the last": (linear(kda_layers=[1, 2, 3, 6]), r"`num_hidden_layers`=5, got \[6\]: remove"),
    "layers count from zero": (linear(kda_layers=[0, 1, 2, 3]), r"got \[0\]: remove them \(numbers are 1-based\)"),
    "fewer layers than listed": ({"num_hidden_layers": 3}, r"`num_hidden_layers`=3, got \[4, 5\]: remove"),
    "no kda_layers": (linear_without("kda_layers"), r"got none for \['kda_layers'\]: add"),
    "no full_attn_layers": (linear_without("full_attn_layers"), r"got none for \['full_attn_layers'\]: add"),
    "no heads": (linear_without("num_heads"), r"got none for \['num_heads'\]: add"),
    "layers as text": (linear(kda_layers=["1", "2", "3"]), r"kda_layers` must be a list of integers, got '1'"),
    "layers null": (linear(kda_layers=None), r"kda_layers` must be a list of layer numbers, got None"),
    "KDA heads text": (linear(num_heads="2"), r"num_heads` must be an integer, got '2'"),
    "KDA heads fraction": (linear(num_heads=2.5), r"num_heads` must be an integer, got 2.5"),
    "KDA heads bool": (linear(num_heads=True), r"num_heads` must be an integer, got True"),
    "KDA heads negative": (linear(num_heads=-1), r"num_heads` must be a positive integer, got -1: set"),
    "KDA head width zero": (linear(head_dim=0), r"head_dim` must be a positive integer, got 0: set"),
    "no taps": (linear(short_conv_kernel_size=0), r"short_conv_kernel_size` must be a positive integer, got 0"),
    "gate bound zero": (
        linear(gate_lower_bound=0),
        r"gate_lower_bound` must be in \[-5, 0\) or null, got 0: .*use null",
    ),
    "gate bound too low": (linear(gate_lower_bound=-5.001), r"must be in \[-5, 0\) or null, got -5.001"),
    "gate bound positive": (linear(gate_lower_bound=1.0), r"must be in \[-5, 0\) or null, got 1.0"),
    "gate bound NaN": (linear(gate_lower_bound=NAN), r"must be in \[-5, 0\) or null, got nan"),
    "gate bound text": (linear(gate_lower_bound="low"), r"gate_lower_bound` must be a number, got 'low'"),
    "gate rank text": (linear(use_full_rank_gate="yes"), r"use_full_rank_gate` must be true or false, got 'yes'"),
    "A_log shorter than heads": (
        {"kda_a_log_length": 1},
        r"`kda_a_log_length` must be at least .*\(2\), got 1: use null",
    ),
    "top-k above experts": (
        {"num_experts_per_token": 9},
        r"`num_experts_per_token` must be at most `num_experts`=8, got 9",
    ),
    "top-k zero": ({"num_experts_per_token": 0}, r"`num_experts_per_token` must be a positive integer, got 0"),
    "groups do not divide": (
        {"num_expert_group": 3},
        r"`num_expert_group` must divide `num_experts`=8, got 3: use a divisor",
    ),
    "no groups": ({"num_expert_group": 0}, r"`num_expert_group` must divide `num_experts`=8, got 0"),
    "more groups kept than there are": (
        {"num_expert_group": 2, "topk_group": 3},
        r"`topk_group` must be in \[1, .*=2\], got 3",
    ),
    "no group kept": ({"num_expert_group": 2, "topk_group": 0}, r"`topk_group` must be in .*got 0: choose"),
    "one expert per group": (
        {"num_expert_group": 8, "topk_group": 8},
        r"at least 2 experts in a group .*8 groups of 1: use fewer",
    ),
    "top-k above kept groups": (
        {"num_expert_group": 4, "topk_group": 1, "num_experts_per_token": 3},
        r"`num_experts_per_token` must be at most .*= 2, got 3: raise `topk_group`",
    ),
    "groups switched off": (
        {"num_expert_group": 2, "topk_group": 2, "use_grouped_topk": False},
        r"`use_grouped_topk` must be true with `num_expert_group`=2, got false: set",
    ),
    "negative experts": ({"num_experts": -3}, r"`num_experts` must be a positive integer, or null .*, got -3"),
    "negative shared experts": ({"num_shared_experts": -1}, r"`num_shared_experts` must be 0 or more, got -1: use 0"),
    "expert width zero": ({"moe_intermediate_size": 0}, r"`moe_intermediate_size` must be a positive integer, got 0"),
    "negative dense layers": (
        {"first_k_dense_replace": -1},
        r"`first_k_dense_replace` must be 0 or more, got -1: 0 makes",
    ),
    "sparse frequency zero": ({"moe_layer_freq": 0}, r"`moe_layer_freq` must be a positive integer, got 0"),
    "expert latent zero": (
        {"routed_expert_hidden_size": 0},
        r"`routed_expert_hidden_size` must be a positive integer or null .*, got 0",
    ),
    "query rank zero": ({"q_lora_rank": 0}, r"`q_lora_rank` must be a positive integer or null .*, got 0"),
    "latent negative": ({"kv_lora_rank": -1}, r"`kv_lora_rank` must be a positive integer, got -1"),
    "shared key part zero": ({"qk_rope_head_dim": 0}, r"`qk_rope_head_dim` must be a positive integer, got 0"),
    "block size zero": (
        {"attn_res_block_size": 0},
        r"`attn_res_block_size` must be a positive integer or null .*, got 0",
    ),
    "no layers": ({"num_hidden_layers": 0}, r"`num_hidden_layers` must be a positive integer, got 0"),
    "no vocabulary": ({"vocab_size": 0}, r"`vocab_size` must be a positive integer, got 0"),
    "no context": ({"max_position_embeddings": 0}, r"`max_position_embeddings` must be a positive integer, got 0"),
    "unknown activation": ({"hidden_act": "gelu"}, r"`hidden_act` must be one of \['situ', 'silu'\], got 'gelu'"),
    "soft cap zero": ({"activation_situ_beta": 0}, r"`activation_situ_beta` must be a positive soft cap, got 0"),
    "soft cap NaN": ({"activation_situ_linear_beta": NAN}, r"`activation_situ_linear_beta` must be .*got nan"),
    "soft cap infinite": (
        {"activation_situ_linear_beta": math.inf},
        r"`activation_situ_linear_beta` must be .*got inf",
    ),
    "unknown router": (
        {"moe_router_activation_func": "softmax"},
        r"`moe_router_activation_func` must be one of \['sigmoid'\], got 'softmax'",
    ),
    "unknown selection": ({"topk_method": "greedy"}, r"`topk_method` must be one of \['noaux_tc'\], got 'greedy'"),
    "scaling factor zero": (
        {"routed_scaling_factor": 0.0},
        r"`routed_scaling_factor` must be a positive number, got 0.0",
    ),
    "rotary attention": ({"mla_use_nope": False}, r"`mla_use_nope` must be true, got false: .*set"),
    "grouped-query attention": (
        {"num_key_value_heads": 1},
        r"`num_key_value_heads` must equal `num_attention_heads`=2, got 1: .*leave",
    ),
    "epsilon zero": ({"rms_norm_eps": 0.0}, r"`rms_norm_eps` must be a positive number, got 0.0"),
    "initial spread negative": (
        {"initializer_range": -1.0},
        r"`initializer_range` must be a positive number, got -1.0",
    ),
    "embedding spread zero": (
        {"embedding_initializer_range": 0.0},
        r"`embedding_initializer_range` must be a positive number or null, got 0.0: .*null takes",
    ),
    "dropout one": ({"attention_dropout": 1.0}, r"`attention_dropout` must be in \[0, 1\), got 1.0: use 0"),
    "unknown kernels": ({"kda_implementation": "cuda"}, r"`kda_implementation` must be one of .*got 'cuda'"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS, ids=lambda case: case.replace(" ", "_"))
def test_contradiction_names_field_value_and_fix(case: str) -> None:
    fields, pattern = CONTRADICTIONS[case]
    with pytest.raises(StrictDataclassClassValidationError, match=pattern) as caught:
        KimiK3TextConfig(**(TINY | fields))
    assert isinstance(caught.value.__cause__, ValueError | TypeError)


@pytest.mark.parametrize("validator", [name for name in vars(KimiK3TextConfig) if name.startswith("validate_")])
def test_every_validator_can_fail(validator: str) -> None:
    failed_in = set()
    for fields, _ in CONTRADICTIONS.values():
        with pytest.raises(StrictDataclassClassValidationError) as caught:
            KimiK3TextConfig(**(TINY | fields))
        failed_in.add(caught.value.args[0].split("'")[1] if "'" in caught.value.args[0] else str(caught.value))
    assert any(validator in text for text in failed_in)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "32"),
        ("hidden_size", 32.0),
        ("hidden_size", True),
        ("hidden_size", None),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", 1),
        ("tie_word_embeddings", 1),
        ("mla_use_output_gate", "true"),
        ("linear_attn_config", [1, 2]),
        ("rope_scaling", "yarn"),
        ("eos_token_id", "2"),
        ("hidden_act", None),
    ],
    ids=lambda value: repr(value),
)
def test_wrong_type_raises(field: str, value: Any) -> None:
    with pytest.raises(StrictDataclassFieldValidationError, match=field):
        KimiK3TextConfig(**(TINY | {field: value}))
    with pytest.raises(StrictDataclassFieldValidationError, match=field):
        setattr(tiny_config(), field, value)


def test_overrides_at_load_are_validated() -> None:
    folder = GOLDEN / "text_long"
    with pytest.raises(StrictDataclassClassValidationError, match=r"`num_hidden_layers`=3, got \[4, 5\]: remove"):
        KimiK3TextConfig.from_pretrained(folder, num_hidden_layers=3)
    with pytest.raises(StrictDataclassClassValidationError, match=r"`num_hidden_layers`=3, got \[4, 5\]: remove"):
        AutoConfig.from_pretrained(folder, num_hidden_layers=3)
    linear = KimiK3TextConfig.from_pretrained(folder).linear_attn_config | {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [],
    }
    config, unused = KimiK3TextConfig.from_pretrained(
        folder, num_hidden_layers=3, linear_attn_config=linear, nonsense=1, return_unused_kwargs=True
    )
    assert config.layer_types == ["linear_attention"] * 3
    assert unused == {"nonsense": 1}


def test_change_that_contradicts_is_not_saved(tmp_path: Path) -> None:
    config = tiny_config()
    config.num_experts_per_token = 100
    with pytest.raises(StrictDataclassClassValidationError, match=r"`num_experts_per_token` must be at most"):
        config.save_pretrained(tmp_path)


def test_folder_without_config_raises(tmp_path: Path) -> None:
    """Transformers alone would build the default configuration, here 2.8 T parameters."""
    with pytest.raises(OSError, match=r"must hold a config.json"):
        KimiK3TextConfig.from_pretrained(tmp_path)


# ---- composite ------------------------------------------------------------------------------------------------------


def test_composite_without_vision(tmp_path: Path) -> None:
    for config in (KimiK3Config(text_config=TINY), KimiK3Config(text_config=TINY, vision_config=None)):
        assert config.vision_config is None
        written = saved(config, tmp_path)
        assert written["vision_config"] is None
        again = AutoConfig.from_pretrained(tmp_path)
        assert again.vision_config is None
        assert saved(again, tmp_path / "again") == written


def test_composite_from_objects_and_dictionaries() -> None:
    text, vision = tiny_config(), KimiK3VisionConfig(vt_num_hidden_layers=2, text_hidden_size=TINY["hidden_size"])
    placeholder = {"media_placeholder_token_id": 250}
    from_objects = KimiK3Config(text_config=text, vision_config=vision, **placeholder)
    assert from_objects.text_config is text
    assert from_objects.get_text_config() is text
    assert from_objects.vision_config is vision
    from_dicts = KimiK3Config(text_config=text.to_dict(), vision_config=vision.to_dict(), **placeholder)
    assert type(from_dicts.text_config) is KimiK3TextConfig
    assert type(from_dicts.vision_config) is KimiK3VisionConfig
    assert from_dicts.to_dict() == from_objects.to_dict()
    assert from_objects.to_dict()["text_config"]["model_type"] == "kimi_linear"


def test_composite_defaults_are_the_release() -> None:
    assert KimiK3Config().text_config.to_dict() == KimiK3TextConfig().to_dict()
    assert KimiK3TextConfig().get_text_config() is not None


def test_composite_of_foreign_parts_raises() -> None:
    with pytest.raises(
        StrictDataclassClassValidationError, match=r"`text_config` must be a KimiK3TextConfig.*got a LlamaConfig"
    ):
        KimiK3Config(text_config=LlamaConfig())
    with pytest.raises(StrictDataclassClassValidationError, match=r"`vision_config` must be a KimiK3VisionConfig"):
        KimiK3Config(text_config=TINY, vision_config=LlamaConfig())


def test_composite_reports_errors_of_its_parts() -> None:
    with pytest.raises(StrictDataclassClassValidationError, match=r"`num_experts_per_token` must be at most"):
        KimiK3Config(text_config=TINY | {"num_experts_per_token": 9})
    with pytest.raises(StrictDataclassClassValidationError, match=r"`qkv_hidden_size` must be a multiple"):
        KimiK3Config(text_config=TINY, vision_config={"qkv_hidden_size": 50, "vt_num_attention_heads": 3})
    with pytest.raises(StrictDataclassClassValidationError, match=r"`patch_size` must be a positive integer"):
        KimiK3VisionConfig(patch_size=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"qkv_hidden_size": 18, "vt_num_attention_heads": 3},
            r"multiple of 4 \* `vt_num_attention_heads`=12, got 18",
        ),
        ({"vt_hidden_size": 31, "mm_hidden_size": 31}, r"`vt_hidden_size` must be even, got 31"),
        ({"vt_hidden_size": 32}, r"`mm_hidden_size` must equal `vt_hidden_size`=32, got 1024"),
        ({"merge_kernel_size": [2]}, r"two positive integers, got \[2\]"),
        ({"init_pos_emb_time": 0}, r"`init_pos_emb_time` must be a positive integer, got 0"),
        ({"projector_ln_eps": 0.0}, r"`projector_ln_eps` must be a positive number"),
        ({"norm_type": "groupnorm"}, r"`norm_type` must be one of \['rmsnorm', 'layernorm'\], got 'groupnorm'"),
        ({"merge_type": "concat"}, r"`merge_type` must be one of \['sd2_tpool'\]"),
        ({"mm_projector_type": "mlp"}, r"`mm_projector_type` must be one of"),
    ],
)
def test_vision_fields_out_of_range(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StrictDataclassClassValidationError, match=message):
        KimiK3VisionConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"`vision_config.text_hidden_size` must equal `text_config.hidden_size`=32, got 7168"),
        (
            {"text_hidden_size": 32},
            r"`media_placeholder_token_id` must be in \[0, `text_config.vocab_size`=256\), got 163",
        ),
    ],
)
def test_parts_of_a_composite_must_fit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StrictDataclassClassValidationError, match=message):
        KimiK3Config(text_config=TINY, vision_config=fields)


def test_vision_defaults_are_the_release() -> None:
    """Width 1024, twelve heads of 128: the attention is wider than the tower."""
    config = KimiK3VisionConfig()
    assert (config.vt_hidden_size, config.vt_intermediate_size, config.mm_hidden_size) == (1024, 4096, 1024)
    assert config.qkv_hidden_size == config.vt_num_attention_heads * 128


def test_kernel_choice_in_a_released_vision_part_is_not_a_demand(tmp_path: Path) -> None:
    file = fixture_file("multimodal")
    file["vision_config"] |= {"_attn_implementation": "flash_attention_2"}
    (tmp_path / "config.json").write_text(json.dumps(file))
    assert AutoConfig.from_pretrained(tmp_path).vision_config._attn_implementation is None


def test_text_part_of_a_composite_file(transformers_log: CaptureLogger) -> None:
    """The text class reads the nested part; the defaults of missing fields are this architecture's."""
    config = KimiK3TextConfig.from_pretrained(GOLDEN / "multimodal")
    assert config.to_dict() | {"_name_or_path": ""} == (
        KimiK3Config.from_pretrained(GOLDEN / "multimodal").text_config.to_dict()
        | {"transformers_version": config.to_dict()["transformers_version"]}
    )
    assert_silent(transformers_log)


def test_special_tokens() -> None:
    config = KimiK3Config.from_pretrained(GOLDEN / "multimodal")
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    assert config.get_text_config().eos_token_id == 2
    assert config.media_placeholder_token_id == 250
    assert tiny_config(eos_token_id=[2, 3]).eos_token_id == [2, 3]
    assert KimiK3TextConfig().pad_token_id is None


# ---- properties -----------------------------------------------------------------------------------------------------


@st.composite
def valid_fields(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a random tiny configuration that is valid by construction."""
    layers = draw(st.integers(1, 5))
    is_full = draw(st.lists(st.booleans(), min_size=layers, max_size=layers))
    heads = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    experts = groups * draw(st.integers(2, 3))
    topk_group = draw(st.integers(1, groups))
    size = st.integers(1, 12)
    optional_size = st.none() | size
    return {
        "vocab_size": draw(st.integers(3, 40)),
        "hidden_size": draw(size),
        "intermediate_size": draw(size),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "q_lora_rank": draw(optional_size),
        "kv_lora_rank": draw(size),
        "qk_nope_head_dim": draw(size),
        "qk_rope_head_dim": draw(size),
        "v_head_dim": draw(size),
        "mla_use_output_gate": draw(st.booleans()),
        "attn_res_block_size": draw(st.none() | st.integers(1, 6)),
        "hidden_act": draw(st.sampled_from(["situ", "silu"])),
        "activation_situ_beta": draw(st.floats(0.5, 30) | st.integers(1, 30)),
        "num_experts": draw(st.sampled_from([experts, experts, experts, None])),
        "num_experts_per_token": draw(st.integers(1, topk_group * experts // groups)),
        "num_expert_group": groups,
        "topk_group": topk_group,
        "num_shared_experts": draw(st.integers(0, 2)),
        "moe_intermediate_size": draw(size),
        "routed_expert_hidden_size": draw(optional_size),
        "latent_moe_use_norm": draw(st.booleans()),
        "moe_renormalize": draw(st.booleans()),
        "first_k_dense_replace": draw(st.integers(0, 6)),
        "moe_layer_freq": draw(st.integers(1, 3)),
        "rms_norm_eps": draw(st.floats(1e-8, 1e-2)),
        "tie_word_embeddings": draw(st.booleans()),
        "linear_attn_config": {
            "kda_layers": [i + 1 for i in range(layers) if not is_full[i]],
            "full_attn_layers": [i + 1 for i in range(layers) if is_full[i]],
            "num_heads": draw(st.integers(1, 3)),
            "head_dim": draw(size),
            "short_conv_kernel_size": draw(st.integers(2, 4)),
            "gate_lower_bound": draw(st.none() | st.floats(-5.0, -0.1)),
            "use_full_rank_gate": draw(st.booleans()),
        },
        "extra": draw(st.none() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)),
    }  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fields=valid_fields())
def test_any_valid_config_round_trips(fields: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    config = KimiK3TextConfig(**fields)
    for key, value in fields.items():
        assert getattr(config, key) == value
    for whole in (config, KimiK3Config(text_config=config)):
        again = AutoConfig.for_model(whole.model_type).from_dict(json.loads(whole.to_json_string()))
        assert again.to_dict() == whole.to_dict()
        assert again.get_text_config().layer_types == config.layer_types


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fields=valid_fields())
def test_any_valid_config_builds_and_runs(fields: dict[str, Any]) -> None:
    config = KimiK3TextConfig(**fields)
    model = KimiK3ForCausalLM(config).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[0, 1, 2, 1]])).logits
    assert logits.shape == (1, 4, config.vocab_size)
    assert logits.isfinite().all()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fields=valid_fields(), data=st.data())
def test_any_corruption_raises(fields: dict[str, Any], data: st.DataObject) -> None:
    linear, layers = fields["linear_attn_config"], fields["num_hidden_layers"]
    experts = fields["num_experts"] or 4
    kind = data.draw(
        st.sampled_from(["drop layer", "repeat layer", "extra layer", "bound", "top-k", "groups", "size", "type"])
    )
    lists = ("kda_layers", "full_attn_layers")
    if kind == "drop layer":
        name = data.draw(st.sampled_from([name for name in lists if linear[name]]))
        linear[name].remove(data.draw(st.sampled_from(linear[name])))
    elif kind == "repeat layer":
        linear[data.draw(st.sampled_from(lists))].append(data.draw(st.integers(1, layers)))
    elif kind == "extra layer":
        linear[data.draw(st.sampled_from(lists))].append(
            data.draw(st.integers(-3, 0) | st.integers(layers + 1, layers + 9))
        )
    elif kind == "bound":
        linear["gate_lower_bound"] = data.draw(
            st.floats(0) | st.floats(max_value=-5.0, exclude_max=True) | st.just(NAN)
        )
    elif kind == "top-k":
        fields |= {"num_experts": experts, "num_experts_per_token": experts + data.draw(st.integers(1, 5))}
    elif kind == "groups":
        fields |= {"num_experts": experts, "num_expert_group": experts + 1}
    else:
        name = data.draw(
            st.sampled_from(["vocab_size", "hidden_size", "kv_lora_rank", "v_head_dim", "num_attention_heads"])
        )
        wrong = (
            st.integers(max_value=0)
            if kind == "size"
            else st.text(max_size=3) | st.floats() | st.booleans() | st.none()
        )
        fields[name] = data.draw(wrong)
    with pytest.raises((StrictDataclassClassValidationError, StrictDataclassFieldValidationError)):
        KimiK3TextConfig(**fields)


@pytest.mark.parametrize("variant", VARIANTS)
def test_test_variants_round_trip_nested_and_alone(variant: str, tmp_path: Path) -> None:
    """A null that switches a mechanism off must not come back as the default, which switches it on."""
    config = tiny_config(variant)
    config.save_pretrained(tmp_path / "text")
    KimiK3Config(text_config=config).save_pretrained(tmp_path / "composite")
    alone = AutoConfig.from_pretrained(tmp_path / "text")
    nested = AutoConfig.from_pretrained(tmp_path / "composite").text_config
    for field in config.__dataclass_fields__.keys() - {"transformers_version"}:
        assert getattr(alone, field) == getattr(config, field)
        assert getattr(nested, field) == getattr(config, field)
