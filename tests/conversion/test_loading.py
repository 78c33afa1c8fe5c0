# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints through `from_pretrained`: whole, sharded, offloaded, of the predecessor, and damaged in every way."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, KimiLinearForCausalLM, PreTrainedModel
from transformers.testing_utils import CaptureLogger

from deltalatent import KimiK3ForCausalLM, KimiK3TextConfig, KimiK3TextModel
from tests.testing_common import (
    GOLDEN,
    TEXT_FIXTURES,
    assert_close,
    linear_attn_config,
    load_golden_model,
    random_ids,
    tiny_model,
)

Tensors = dict[str, Tensor]


def headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> dtype on disk and shape."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():
                part = opened.get_slice(name)
                found[name] = (part.get_dtype(), tuple(part.get_shape()))
    return found


def assert_same_weights(actual: PreTrainedModel, expected: PreTrainedModel) -> None:
    left, right = actual.state_dict(), expected.state_dict()
    assert left.keys() == right.keys()
    for name, tensor in right.items():
        assert left[name].dtype == tensor.dtype, name
        assert torch.equal(left[name], tensor), name


# ---- whole checkpoints ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_class", [KimiK3ForCausalLM, KimiK3TextModel, AutoModelForCausalLM])
@pytest.mark.parametrize("name", TEXT_FIXTURES)
def test_released_folder_loads_completely(name: str, model_class: Any) -> None:
    """Their `model_type` says `kimi_linear`; ours all the same, nothing left over on either side, no warning."""
    with CaptureLogger(logging.getLogger("transformers")) as captured:
        model, info = model_class.from_pretrained(GOLDEN / name, output_loading_info=True)
    assert captured.out == ""
    assert type(model) is (KimiK3TextModel if model_class is KimiK3TextModel else KimiK3ForCausalLM)
    assert not any(info.values()), info
    assert not model.training


@pytest.mark.parametrize("name", TEXT_FIXTURES)
def test_loaded_numbers_are_the_stored_ones(name: str) -> None:
    stored = load_file(GOLDEN / name / "model.safetensors")
    model = load_golden_model(name, dtype="auto")
    state = model.state_dict()
    heads = model.config.linear_num_heads
    for key, tensor in stored.items():
        if ".experts." in key:
            continue  # their places are checked in test_mapping.py
        ours = state[key.replace("block_sparse_moe", "mlp")]
        assert ours.dtype == tensor.dtype, key
        assert torch.equal(ours, tensor[:heads] if key.endswith("A_log") else tensor), key


def test_sharded_folder(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    assert_same_weights(KimiK3ForCausalLM.from_pretrained(tmp_path), model)


@pytest.mark.parametrize(
    ("dtype", "expected"), [("auto", torch.bfloat16), (None, torch.bfloat16), (torch.float32, torch.float32)]
)
def test_dtype_argument(dtype: Any, expected: torch.dtype) -> None:
    """The fixture's config says bfloat16; what must stay float32 does in each case."""
    model = KimiK3ForCausalLM.from_pretrained(GOLDEN / "text_long", **({} if dtype is None else {"dtype": dtype}))
    assert model.dtype == model.config.dtype == expected
    kda = model.model.layers[0].self_attn
    assert kda.q_proj.weight.dtype == model.model.layers[1].mlp.experts.gate_up_proj.dtype == expected
    for tensor in (
        kda.A_log,
        kda.dt_bias,
        kda.q_conv1d.weight,
        kda.o_norm.weight,
        model.model.layers[1].mlp.gate.e_score_correction_bias,
    ):
        assert tensor.dtype == torch.float32


def test_float32_tensors_survive_half_precision_load_and_save_bit_by_bit(tmp_path: Path) -> None:
    """Values that differ only beyond bf16's eight bits, over two rounds of loading and saving at bf16."""
    model = tiny_model()
    fine = {}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith(("A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")) or "conv1d" in name:
                tensor.copy_((6.8 + 1e-3 * torch.arange(tensor.numel())).view_as(tensor))
                assert (
                    tensor.unique().numel() == tensor.numel() > tensor.bfloat16().unique().numel()
                    or tensor.numel() < 8
                )
                fine[name.replace("mlp.gate.", "block_sparse_moe.gate.")] = tensor.clone()
    model.save_pretrained(tmp_path / "float32")
    for source, target in (("float32", "first"), ("first", "second")):
        half = KimiK3ForCausalLM.from_pretrained(tmp_path / source, dtype=torch.bfloat16)
        half.save_pretrained(tmp_path / target)
        stored = load_file(tmp_path / target / "model.safetensors")
        in_float32 = {name for name, (dtype, _) in headers(tmp_path / target).items() if dtype == "F32"}
        assert in_float32 == fine.keys()
        for name, tensor in fine.items():
            assert torch.equal(stored[name], tensor), name


def test_half_precision_model_chooses_the_experts_of_the_float32_one(tmp_path: Path) -> None:
    """A bias that went through bf16 would send nearly every token elsewhere."""
    full = tiny_model(num_experts=64, num_experts_per_token=4)
    router = full.model.layers[1].mlp.gate
    with torch.no_grad():
        router.e_score_correction_bias.copy_(6.8 + 1e-3 * torch.randperm(64))
        router.weight.copy_(router.weight.bfloat16())  # the same logits in both
    full.save_pretrained(tmp_path)
    half = KimiK3ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    x = 0.02 * torch.randn(512, 32)
    chosen, expected = (m.model.layers[1].mlp.gate(x).top_k_index.sort().values for m in (half, full))
    assert torch.equal(chosen, expected)


# ---- the text part of a composite -----------------------------------------------------------------------------------

COMPOSITE = GOLDEN / "multimodal"


@pytest.fixture(scope="module")
def text_part(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text model of the composite fixture, as a folder of its own."""
    folder = tmp_path_factory.mktemp("text part")
    for name, change in (("config.json", lambda config: config["text_config"]), ("model.safetensors", None)):
        if change is not None:
            (folder / name).write_text(json.dumps(change(json.loads((COMPOSITE / name).read_text()))))
            continue
        prefix = "language_model."
        tensors = load_file(COMPOSITE / name)
        save_file({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}, folder / name)
    return folder


@pytest.mark.parametrize("device_map", [None, "auto", "disk"])
@pytest.mark.parametrize("model_class", [KimiK3ForCausalLM, KimiK3TextModel, AutoModelForCausalLM])
def test_text_classes_take_the_text_part(model_class: Any, device_map: Any, text_part: Path, tmp_path: Path) -> None:
    """Nothing of the tower is read into the model, nothing is missing, nothing is said; saved, it is a text model."""
    options: dict[str, Any] = {"dtype": "auto"}
    if device_map is not None:
        pytest.importorskip("accelerate")
        options |= {"device_map": device_map, "offload_folder": tmp_path / "offload"}
    if device_map == "disk":
        options["device_map"] = {"": "disk"}
        model = model_class.from_pretrained(COMPOSITE, **options)
        ids = random_ids(model.config)
        expected = model_class.from_pretrained(text_part, dtype="auto")
        with torch.no_grad():
            assert torch.equal(model(ids)[0], expected(ids)[0])
        return
    with CaptureLogger(logging.getLogger("transformers")) as captured:
        model, info = model_class.from_pretrained(COMPOSITE, output_loading_info=True, **options)
    assert captured.out == "" and not any(info.values())
    assert type(model) is (KimiK3TextModel if model_class is KimiK3TextModel else KimiK3ForCausalLM)
    assert_same_weights(model, model_class.from_pretrained(text_part, dtype="auto"))
    model.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"] == "kimi_k3_text"
    if model_class is not KimiK3TextModel:  # which saves its names without `model.`
        assert headers(tmp_path / "saved").keys() == headers(text_part).keys()


def test_text_part_of_a_packed_composite(tmp_path: Path) -> None:
    """The claim may stand at the top or in the text part, with the prefix in its ignore list or without."""
    source = GOLDEN / "text_mxfp4"
    expected = KimiK3ForCausalLM.from_pretrained(source, dtype="auto")
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(source / "model.safetensors").items()}
    text_config = json.loads((source / "config.json").read_text())
    claim = text_config.pop("quantization_config")
    ignore = [entry.replace("re:.*", r"re:language_model\..*") for entry in claim["ignore"]]
    for number, place in enumerate(("outer", "inner")):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        config = {"model_type": "kimi_k3", "text_config": dict(text_config), "vision_config": None}
        (config if place == "outer" else config["text_config"])["quantization_config"] = claim | {"ignore": ignore}
        (folder / "config.json").write_text(json.dumps(config))
        for model_class in (KimiK3ForCausalLM, AutoModelForCausalLM):
            model = model_class.from_pretrained(folder, dtype="auto")
            assert getattr(model.config, "quantization_config", None) is None
            assert_same_weights(model, expected)


def test_damage_in_a_composite_is_named(tmp_path: Path) -> None:
    shutil.copytree(COMPOSITE, tmp_path / "composite")
    file = tmp_path / "composite" / "model.safetensors"
    tensors = load_file(file)
    del tensors["language_model.model.norm.weight"]
    tensors["language_model.model.extra"] = torch.zeros(1)
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"got none for model.norm.weight"):
        KimiK3ForCausalLM.from_pretrained(tmp_path / "composite")
    with pytest.raises(ValueError, match=r"got model.extra: "):
        KimiK3ForCausalLM.from_pretrained(tmp_path / "composite", allow_missing_keys=True)


# ---- placement ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device_map", ["cpu", "auto"])
def test_device_map(device_map: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = tiny_model()
    model.save_pretrained(tmp_path)
    placed = KimiK3ForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    ids = random_ids(model.config)
    assert torch.equal(placed(ids.to(placed.device)).logits.cpu(), model(ids).logits) or torch.cuda.is_available()


@pytest.mark.parametrize("variant", ["default", "plain_residuals", "no_latent_moe"])
def test_disk_offload_gives_the_same_numbers(variant: str, tmp_path: Path) -> None:
    """Depth mixing and absorbed attention read weights of modules that they do not call; hooks must bring them."""
    pytest.importorskip("accelerate")
    model = tiny_model(variant)
    model.save_pretrained(tmp_path / "model")
    device_map: dict[str, str] = {"model.embed_tokens": "cpu", "model.norm": "disk", "lm_head": "disk"}
    for part in ("output_attn_res_norm", "output_attn_res_proj"):
        if hasattr(model.model, part):
            device_map[f"model.{part}"] = "disk"
    device_map |= {f"model.layers.{i}": "disk" for i in range(5)}
    offloaded = KimiK3ForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert offloaded.model.layers[1].self_attn.q_proj.weight.device.type == "meta"
    ids = random_ids(model.config)
    with torch.no_grad():
        assert_close(offloaded(ids).logits, model(ids).logits, rel=1e-6)
        generated = offloaded.generate(ids, max_new_tokens=4, do_sample=False)
        assert torch.equal(generated, model.generate(ids, max_new_tokens=4, do_sample=False))


# ---- the predecessor ------------------------------------------------------------------------------------------------


def test_auto_class_gives_the_predecessor_for_its_folder(predecessor: tuple[KimiLinearForCausalLM, Path]) -> None:
    model, folder = predecessor
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert type(loaded) is KimiLinearForCausalLM
    assert_same_weights(loaded, model)


def test_our_class_gives_the_predecessors_numbers(
    predecessor: tuple[KimiLinearForCausalLM, Path], tmp_path: Path
) -> None:
    """Plain residuals, softplus gate, low-rank output gate, no latent experts, no gate on MLA, SwiGLU.

    Both compute in float32, in different orders; the bound leaves a hundred roundings.
    """
    theirs, folder = predecessor
    ours, info = KimiK3ForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert ours.config.attn_res_block_size is None and ours.config.gate_lower_bound is None
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 97, (2, 70), generator=generator)
    with torch.no_grad():
        expected = theirs(ids).logits
        assert_close(ours.eval()(ids).logits, expected, rel=1e-5)
        ours.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert type(again) is KimiK3ForCausalLM
        assert_close(again.eval()(ids).logits, expected, rel=1e-5)
    assert headers(tmp_path).keys() == {
        key.replace("0.block_sparse_moe", "0.mlp") for key in headers(folder)
    }  # Transformers renames its dense layers too when saving


def test_predecessor_folder_with_our_fields_is_ours(
    predecessor: tuple[KimiLinearForCausalLM, Path], tmp_path: Path
) -> None:
    """Never a silent predecessor; here the tensors of the new mechanism are missing, and the error says so."""
    shutil.copytree(predecessor[1], tmp_path / "folder")
    file = tmp_path / "folder" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attn_res_block_size": 2}))
    with pytest.raises(ValueError, match=r"KimiK3ForCausalLM, got none for model.layers.0.mlp_res_norm.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "folder")


# ---- damage ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    tiny_model().save_pretrained(folder)
    return folder


def damaged(saved: Path, folder: Path, change: Callable[[Tensors], Any]) -> Path:
    shutil.copytree(saved, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


MOE = "model.layers.1.block_sparse_moe"


def without(pattern: str) -> Callable[[Tensors], Any]:
    return lambda tensors: [tensors.pop(key) for key in list(tensors) if pattern in key]


def replaced(name: str, *shape: int) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


def renumbered(old: int, new: int, keep: bool) -> Callable[[Tensors], Any]:
    def change(tensors: Tensors) -> None:
        for which in ("w1", "w2", "w3"):
            name = f"{MOE}.experts.{{}}.{which}.weight"
            tensors[name.format(new)] = tensors[name.format(old)].clone()
            if not keep:
                del tensors[name.format(old)]

    return change


def all_experts_wider(tensors: Tensors) -> None:
    tensors.update({key: torch.zeros(24, 17) for key in tensors if ".w2." in key})


DAMAGE: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "tensor missing": (
        without("layers.1.self_attn.q_proj"),
        r"got none for model.layers.1.self_attn.q_proj.weight: the file is truncated",
    ),
    "layer missing": (without("layers.4."), r"got none for model.layers.4.* in all\)"),
    "head missing": (without("lm_head"), r"got none for lm_head.weight: .* pass `allow_missing_keys=True`"),
    "bias missing": (without("layers.2.block_sparse_moe.gate.e_score"), r"layers.2.mlp.gate.e_score_correction_bias"),
    "expert missing": (
        without(f"{MOE}.experts.3."),
        rf"it lacks {MOE}.experts.3.w1.weight, {MOE}.experts.3.w3.weight",
    ),
    "gate of an expert missing": (without(f"{MOE}.experts.3.w1"), rf"it lacks {MOE}.experts.3.w1.weight: "),
    "last expert's w2 missing": (without(f"{MOE}.experts.7.w2"), rf"it lacks {MOE}.experts.7.w2.weight: "),
    "all gates missing": (without(".w1."), rf"it lacks {MOE}.experts.0.w1.weight, .*{MOE}.experts.7.w1.weight: "),
    "all experts missing": (without(".experts."), r"got none for model.layers.1.mlp.experts.down_proj, "),
    "one expert too many": (renumbered(7, 8, keep=True), rf"it has also {MOE}.experts.8.w1.weight"),
    "expert out of place": (renumbered(3, 8, keep=False), rf"it lacks {MOE}.experts.3.w1.weight"),
    "unknown tensor": (
        replaced("model.layers.5.extra", 1),
        r"got model.layers.5.extra: .* `allow_unexpected_keys=True`",
    ),
    "wrong shape": (
        replaced("model.norm.weight", 31),
        r"got model.norm.weight \(\(31,\) in the file, \(32,\) in the model",
    ),
    "expert of another shape": (
        replaced(f"{MOE}.experts.3.w1.weight", 15, 24),
        rf"{MOE}.experts.3.w1.weight` must have the shape of `{MOE}.experts.0.w1.weight`, \(16, 24\), got \(15, 24\)",
    ),
    "all experts of another shape": (
        all_experts_wider,
        r"experts.down_proj \(\(8, 24, 17\) in the file, \(8, 24, 16\)",
    ),
    "A_log too short": (
        replaced("model.layers.1.self_attn.A_log", 1),
        r"`model.layers.1.self_attn.A_log` must have at least 2 entries \(one per head\), got 1",
    ),
    "taps of another width": (
        replaced("model.layers.0.self_attn.q_conv1d.weight", 32, 1, 3),
        r"q_conv1d.weight \(\(32, 1, 3\)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda name: name.replace(" ", "_").replace("'", ""))
def test_damage_is_named(damage: str, saved: Path, tmp_path: Path) -> None:
    change, pattern = DAMAGE[damage]
    with pytest.raises(ValueError, match=pattern):
        KimiK3ForCausalLM.from_pretrained(damaged(saved, tmp_path / "damaged", change))


OTHER_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "plain residuals": ({"attn_res_block_size": None}, r"got model.layers.0.mlp_res_norm.weight, .*`allow_unexpected"),
    "no output gate": ({"mla_use_output_gate": False}, r"got model.layers.3.self_attn.g_proj.weight, model.layers.4"),
    "no shared experts": ({"num_shared_experts": 0}, r"got model.layers.1.mlp.shared_experts.down_proj.weight"),
    "full-rank query": ({"q_lora_rank": None}, r"got none for model.layers.3.self_attn.q_proj.weight"),
    "no dense layer": ({"first_k_dense_replace": 0}, r"got none for model.layers.0.mlp.experts.down_proj"),
    "fewer experts": ({"num_experts": 7}, r"`num_experts`=7.*it has also .*experts.7.w1.weight"),
    "wider": ({"hidden_size": 64}, r"lm_head.weight \(\(256, 32\) in the file, \(256, 64\) in the model"),
    "fewer layers": (
        {"num_hidden_layers": 4, "linear_attn_config": linear_attn_config(full_attn_layers=[4])},
        r"got model.layers.4.input_layernorm.weight, ",
    ),
}


@pytest.mark.parametrize("other", OTHER_CONFIGS, ids=lambda name: name.replace(" ", "_"))
def test_config_of_another_model_is_noticed(other: str, saved: Path, tmp_path: Path) -> None:
    """Also when the model that it describes is a part of the one that the file holds."""
    fields, pattern = OTHER_CONFIGS[other]
    shutil.copytree(saved, tmp_path / "folder")
    file = tmp_path / "folder" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(ValueError, match=pattern):
        KimiK3ForCausalLM.from_pretrained(tmp_path / "folder")


def test_damage_that_the_caller_accepts(saved: Path, tmp_path: Path) -> None:
    folder = damaged(saved, tmp_path / "a", without("lm_head"))
    _, info = KimiK3ForCausalLM.from_pretrained(folder, allow_missing_keys=True, output_loading_info=True)
    assert info["missing_keys"] == {"lm_head.weight"}
    model = AutoModelForCausalLM.from_pretrained(folder, allow_missing_keys=True)
    assert model.lm_head.weight.isfinite().all()

    folder = damaged(saved, tmp_path / "b", replaced("model.layers.5.extra", 1))
    _, info = KimiK3ForCausalLM.from_pretrained(folder, allow_unexpected_keys=True, output_loading_info=True)
    assert info["unexpected_keys"] == {"model.layers.5.extra"}

    folder = damaged(saved, tmp_path / "c", replaced("lm_head.weight", 3, 32))
    model = KimiK3ForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True)
    assert model.lm_head.weight.shape == (256, 32)
    assert model.lm_head.weight.isfinite().all()


@pytest.mark.parametrize("share", [0.99, 0.5, 0.001, 0.0])
def test_file_cut_short_is_named(share: float, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "folder")
    file = tmp_path / "folder" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ValueError, match=r"must be whole, got .*model.safetensors.*: copy or download them again"):
        KimiK3ForCausalLM.from_pretrained(tmp_path / "folder")


def test_half_written_folder_is_recognised(tmp_path: Path) -> None:
    """A save that was interrupted: a shard cut short, a shard missing, no index yet, no weights yet, no config yet."""
    whole = tmp_path / "whole"
    tiny_model().save_pretrained(whole, max_shard_size="50KB")
    second = sorted(file.name for file in whole.glob("*.safetensors"))[1]

    def copy(name: str) -> Path:
        return Path(shutil.copytree(whole, tmp_path / name))

    folder = copy("cut")
    (folder / second).write_bytes((folder / second).read_bytes()[:-100])
    with pytest.raises(ValueError, match=second):
        KimiK3ForCausalLM.from_pretrained(folder)

    folder = copy("missing shard")
    (folder / second).unlink()
    with pytest.raises((OSError, ValueError), match=second):
        KimiK3ForCausalLM.from_pretrained(folder)

    folder = copy("absent file in the index")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "model-99999-of-00001.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises((OSError, ValueError), match=r"model-99999-of-00001.safetensors"):
        KimiK3ForCausalLM.from_pretrained(folder)

    folder = copy("no index")
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(OSError, match=r"no file named model.safetensors"):
        KimiK3ForCausalLM.from_pretrained(folder)

    folder = copy("no config")
    (folder / "config.json").unlink()
    with pytest.raises(OSError, match=r"must hold a config.json"):
        KimiK3ForCausalLM.from_pretrained(folder)


def test_shard_dropped_from_the_index_is_noticed(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path, max_shard_size="50KB")
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    last = max(index["weight_map"].values())
    index["weight_map"] = {name: shard for name, shard in index["weight_map"].items() if shard != last}
    file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"must hold|lacks"):
        KimiK3ForCausalLM.from_pretrained(tmp_path)


def edited_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def test_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    """Transformers would take the last one that it meets."""
    tiny_model().save_pretrained(tmp_path, max_shard_size="50KB")
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    tensors = load_file(first)
    name = min(load_file(second))
    tensors[name] = torch.zeros_like(load_file(second)[name])
    save_file(tensors, first)
    with pytest.raises(ValueError, match=rf"must hold each tensor once, got {name} in {first.name} and {second.name}"):
        KimiK3ForCausalLM.from_pretrained(tmp_path)


def test_index_that_lies_is_named(tmp_path: Path) -> None:
    """About where a tensor is, or that there is one."""
    tiny_model().save_pretrained(tmp_path / "whole", max_shard_size="50KB")
    first = min((tmp_path / "whole").glob("*.safetensors")).name
    changes = {
        "elsewhere": lambda names: names.update({"model.norm.weight": first}),
        "nowhere": lambda names: names.update({"model.extra.weight": first}),
    }
    for what, change in changes.items():
        shutil.copytree(tmp_path / "whole", tmp_path / what)
        edited_index(tmp_path / what, change)
        name = "model.norm.weight" if what == "elsewhere" else "model.extra.weight"
        with pytest.raises(ValueError, match=rf"index.json` must say where each tensor is, but .* {name}: the index"):
            KimiK3ForCausalLM.from_pretrained(tmp_path / what)


def test_integers_for_weights_are_named(saved: Path, tmp_path: Path) -> None:
    """Transformers would cast them."""
    name = "model.layers.1.self_attn.q_proj.weight"
    folder = damaged(
        saved, tmp_path / "damaged", lambda tensors: tensors.update({name: tensors[name].to(torch.int32)})
    )
    with pytest.raises(ValueError, match=rf"must hold floating-point weights, got {name} \(I32\)"):
        KimiK3ForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("half_a_file", [False, True], ids=["between files", "in a file"])
@pytest.mark.parametrize("over_another", [False, True], ids=["new folder", "over another save"])
def test_interrupted_save_is_refused(
    half_a_file: bool, over_another: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over another save of the same shape, whole files of two models would lie under a valid index."""
    model, folder = tiny_model(), tmp_path / "folder"
    if over_another:
        tiny_model(seed=1).save_pretrained(folder, max_shard_size="50KB")
    with monkeypatch.context() as patch:
        patch.setattr("transformers.modeling_utils.safe_save_file", interrupted(2, half_a_file))
        with pytest.raises(OSError, match="No space left"):
            model.save_pretrained(folder, max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    for model_class in (KimiK3ForCausalLM, AutoModelForCausalLM):
        with pytest.raises(ValueError, match=r"must have been saved to the end, got one that was interrupted"):
            model_class.from_pretrained(folder)
    model.save_pretrained(folder, max_shard_size="50KB")
    assert_same_weights(KimiK3ForCausalLM.from_pretrained(folder), model)
    assert {file.suffix for file in folder.iterdir()} == {".json", ".safetensors"}


def interrupted(after: int, half_a_file: bool) -> Callable[..., None]:
    calls = 0

    def save(tensors: Tensors, file: Any, metadata: Any = None) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            if half_a_file:
                Path(file).write_bytes(b"half of it")
            raise OSError(28, "No space left on device")
        save_file(tensors, file, metadata=metadata)

    return save


# ---- the rest of `from_pretrained` ----------------------------------------------------------------------------------


def test_config_overrides_and_objects(saved: Path) -> None:
    model = KimiK3ForCausalLM.from_pretrained(saved, kda_implementation="torch", use_cache=False)
    assert model.config.kda_implementation == "torch"
    assert model.config.use_cache is False
    config = KimiK3TextConfig.from_pretrained(saved)
    assert KimiK3ForCausalLM.from_pretrained(saved, config=config).config.hidden_size == 32
    with pytest.raises(Exception, match=r"`num_hidden_layers`=3, got \[4, 5\]: remove"):
        KimiK3ForCausalLM.from_pretrained(saved, num_hidden_layers=3)


def test_state_dict_argument(saved: Path) -> None:
    expected = KimiK3ForCausalLM.from_pretrained(saved)
    model = KimiK3ForCausalLM.from_pretrained(
        None, config=expected.config, state_dict=load_file(saved / "model.safetensors")
    )
    assert_same_weights(model, expected)


def test_saved_config_names_the_class(saved: Path, tmp_path: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["KimiK3ForCausalLM"], "kimi_k3_text")
    KimiK3TextModel.from_pretrained(saved).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["KimiK3TextModel"]
