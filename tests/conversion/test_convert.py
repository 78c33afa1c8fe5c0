# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""`deltalatent convert`: every way from one folder to another, and what comes back is what went in."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shlex
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, KimiLinearForCausalLM

from deltalatent import KimiK3ForCausalLM
from deltalatent.__main__ import main
from deltalatent.conversion import convert
from deltalatent.conversion.export_remote_code import export_remote_code
from deltalatent.conversion.mxfp4 import dequantize_mxfp4
from tests.testing_common import (
    GOLDEN,
    TEXT_FIXTURES,
    VARIANTS,
    assert_close,
    golden,
    linear_attn_config,
    max_error,
    random_ids,
    tiny_model,
)

Tensors = dict[str, Tensor]
COMPOSITE, PACKED = GOLDEN / "multimodal", GOLDEN / "text_mxfp4"


def tensors_of(folder: Path) -> Tensors:
    return {
        name: tensor for file in sorted(folder.glob("model*.safetensors")) for name, tensor in load_file(file).items()
    }


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def assert_same(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


def text_part(tensors: Tensors) -> Tensors:
    prefix = "language_model."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def logits(folder: Path, ids: Tensor, model_class: Any = KimiK3ForCausalLM) -> Tensor:
    model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(ids).logits


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text part of the composite fixture."""
    target = tmp_path_factory.mktemp("text") / "text"
    convert(COMPOSITE, target, to="text")
    return target


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The MXFP4 fixture with its experts unpacked."""
    target = tmp_path_factory.mktemp("plain") / "plain"
    convert(PACKED, target, experts="bfloat16")
    return target


# ---- text and composite ---------------------------------------------------------------------------------------------


def test_text_part_is_extracted_bit_by_bit(text: Path) -> None:
    assert_same(tensors_of(text), text_part(tensors_of(COMPOSITE)))
    config = config_of(text)
    assert config["model_type"] == "kimi_k3_text" and config["architectures"] == ["KimiK3ForCausalLM"]
    assert type(AutoModelForCausalLM.from_pretrained(text)) is KimiK3ForCausalLM


@pytest.mark.parametrize("size", ["5GB", "20KB", 2000])
def test_composite_comes_back_with_its_tower(size: Any, text: Path, tmp_path: Path) -> None:
    report = convert(text, tmp_path / "back", to="composite", vision_from=COMPOSITE, max_shard_size=size)
    assert_same(tensors_of(tmp_path / "back"), tensors_of(COMPOSITE))
    assert config_of(tmp_path / "back") == config_of(COMPOSITE)
    assert report.notes == []
    files = list((tmp_path / "back").glob("*.safetensors"))
    assert len(files) == report.shards == {"5GB": 1, "20KB": 21}.get(size, report.shards)
    if report.shards > 1:
        index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
        for file in files:
            with safe_open(file, framework="pt") as opened:
                assert {name for name, shard in index["weight_map"].items() if shard == file.name} == set(
                    opened.keys()
                )
            whole = sum(tensor.nbytes for tensor in load_file(file).values())
            assert whole <= (20_000 if size == "20KB" else 2000) or len(load_file(file)) == 1


def test_composite_stays_a_composite(tmp_path: Path) -> None:
    convert(COMPOSITE, tmp_path / "same")
    assert_same(tensors_of(tmp_path / "same"), tensors_of(COMPOSITE))
    assert config_of(tmp_path / "same") == config_of(COMPOSITE)


def test_composite_without_tower_gets_one(text: Path, tmp_path: Path) -> None:
    """Also the settings of its image processor, which a text folder does not have."""
    donor = Path(shutil.copytree(COMPOSITE, tmp_path / "donor"))
    (donor / "preprocessor_config.json").write_text("{}")
    convert(text, tmp_path / "blind", to="composite")
    convert(tmp_path / "blind", tmp_path / "seeing", vision_from=donor)
    assert_same(tensors_of(tmp_path / "seeing"), tensors_of(COMPOSITE))
    assert config_of(tmp_path / "seeing") | {"ignore_index": -100} == config_of(COMPOSITE)
    assert (tmp_path / "seeing" / "preprocessor_config.json").exists()


@pytest.mark.parametrize("name", TEXT_FIXTURES)
def test_text_model_without_tower(name: str, tmp_path: Path) -> None:
    """Released text folders say `kimi_linear`; as a composite that is the nested type, and stays out of sight."""
    report = convert(GOLDEN / name, tmp_path / "composite", to="composite")
    config = config_of(tmp_path / "composite")
    assert config["model_type"] == "kimi_k3" and config["architectures"] == ["KimiK3ForConditionalGeneration"]
    assert config["vision_config"] is None and config["text_config"]["model_type"] == "kimi_linear"
    assert "vision" in report.notes[0]
    stored = tensors_of(GOLDEN / name)
    assert_same(text_part(tensors_of(tmp_path / "composite")), stored)
    convert(tmp_path / "composite", tmp_path / "text", to="text")
    assert_same(tensors_of(tmp_path / "text"), stored)
    case = golden(name)
    model = KimiK3ForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float32).eval()
    with torch.no_grad():
        actual = model(**case.inputs).logits
    assert max_error(actual[case.real], case["logits"][case.real]) < 1e-4


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_survives(variant: str, tmp_path: Path) -> None:
    """As `save_pretrained` writes it, and with the names in memory (`save_original_format=False`)."""
    model = tiny_model(variant)
    model.save_pretrained(tmp_path / "released")
    model.save_pretrained(tmp_path / "in memory", save_original_format=False)
    stored = tensors_of(tmp_path / "released")
    for source in ("released", "in memory"):
        convert(tmp_path / source, tmp_path / f"{source} to text", to="text", max_shard_size="30KB")
        assert_same(tensors_of(tmp_path / f"{source} to text"), stored)
    again = KimiK3ForCausalLM.from_pretrained(tmp_path / "in memory to text").eval()
    ids = random_ids(model.config)
    assert torch.equal(again(ids).logits, model(ids).logits)


# ---- MXFP4 ----------------------------------------------------------------------------------------------------------


def test_unpacking_is_exact_and_packing_restores_every_byte(plain: Path, tmp_path: Path) -> None:
    packed, unpacked = tensors_of(PACKED), tensors_of(plain)
    assert "quantization_config" not in config_of(plain)
    for name, tensor in packed.items():
        if name.endswith("_packed"):
            stem = name.removesuffix("_packed")
            assert torch.equal(unpacked[stem], dequantize_mxfp4(tensor, packed[f"{stem}_scale"]))
            assert unpacked[stem].dtype == torch.bfloat16
    convert(plain, tmp_path / "again", experts="mxfp4", max_shard_size="30KB")
    assert_same(tensors_of(tmp_path / "again"), packed)
    assert config_of(tmp_path / "again")["quantization_config"] == config_of(PACKED)["quantization_config"]


def test_error_table_of_packing(tmp_path: Path) -> None:
    """The sums of the report, over shards that part the experts of a layer, are those over whole layers."""
    fields = {"moe_intermediate_size": 32, "routed_expert_hidden_size": 64}
    model = tiny_model(**fields)
    model.save_pretrained(tmp_path / "plain")
    report = convert(tmp_path / "plain", tmp_path / "packed", experts="mxfp4", max_shard_size="9KB")
    before, after = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "packed")
    assert len(report.packing_error) == 4 * 3
    for row in report.packing_error:
        stem = f"model.layers.{row['layer']}.block_sparse_moe.experts"
        names = [f"{stem}.{i}.{row['matrix']}.weight" for i in range(8)]
        weight = torch.cat([before[name] for name in names]).double()
        unpacked = torch.cat(
            [dequantize_mxfp4(after[f"{n}_packed"], after[f"{n}_scale"], torch.float64) for n in names]
        )
        assert row["weights"] == weight.numel()
        assert math.isclose(row["error"], float((unpacked - weight).norm() / weight.norm()), abs_tol=1e-6)
        assert math.isclose(row["zeros"], float((unpacked == 0).double().mean()), abs_tol=1e-6)
        assert 0.05 < row["error"] < 0.2 and 0.1 < row["largest_error_in_group"] <= 0.2
    assert json.loads((tmp_path / "packed" / "conversion_report.json").read_text())["packing_error"]
    assert logits(tmp_path / "packed", random_ids(model.config)).isfinite().all()


def test_packed_composite_says_so_and_its_ignore_list_follows_the_names(plain: Path, tmp_path: Path) -> None:
    convert(plain, tmp_path / "composite", to="composite", experts="mxfp4")
    file = tmp_path / "composite" / "config.json"
    config = config_of(tmp_path / "composite")
    ignored = ["lm_head", "re:.*self_attn.*", "model.embed_tokens", "re:^model\\.norm", "re:lm_head.*"]
    config["quantization_config"]["ignore"] = [
        re_prefix + "language_model." + entry.removeprefix(re_prefix)
        for entry in ignored
        for re_prefix in ["re:^" if entry.startswith("re:^") else "re:" if entry.startswith("re:l") else ""]
    ]
    config["quantization_config"]["ignore"][1] = ignored[1]
    in_composite = config["quantization_config"]["ignore"]
    file.write_text(json.dumps(config))
    convert(tmp_path / "composite", tmp_path / "text", to="text")
    assert config_of(tmp_path / "text")["quantization_config"]["ignore"] == ignored
    convert(tmp_path / "text", tmp_path / "back", to="composite")
    assert config_of(tmp_path / "back")["quantization_config"]["ignore"] == in_composite
    assert_same(tensors_of(tmp_path / "text"), tensors_of(PACKED))


def test_widths_that_cannot_be_packed_are_named_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"experts\.0\.w1.* multiple of 32 inputs to be packed, got 24"):
        convert(COMPOSITE, tmp_path / "packed", experts="mxfp4")
    assert list(tmp_path.iterdir()) == []


# ---- the predecessor ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_memory", [False, True], ids=["released", "names in memory"])
def test_predecessor_and_back(
    in_memory: bool, predecessor: tuple[KimiLinearForCausalLM, Path], tmp_path: Path
) -> None:
    theirs, folder = predecessor
    if in_memory:
        folder = tmp_path / "in memory"
        theirs.save_pretrained(folder, save_original_format=False)
        assert any("experts.gate_up_proj" in name for name in tensors_of(folder))
    report = convert(folder, tmp_path / "ours", to="text")
    assert (report.source_kind, report.target_kind) == ("predecessor", "text")
    ids = torch.randint(3, 97, (2, 20))
    with torch.no_grad():
        expected = theirs(ids).logits
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "ours")) is KimiK3ForCausalLM
    assert_close(logits(tmp_path / "ours", ids), expected)

    convert(tmp_path / "ours", tmp_path / "back", to="predecessor", max_shard_size="40KB")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert type(back) is KimiLinearForCausalLM
    assert_same(back.state_dict(), theirs.state_dict())
    with torch.no_grad():
        assert torch.equal(back(ids).logits, expected)
    released = config_of(tmp_path / "back")["linear_attn_config"]
    assert released["full_attn_layers"] == [4] and released["num_heads"] == 3


def test_predecessor_as_released_by_its_authors(
    predecessor: tuple[KimiLinearForCausalLM, Path], tmp_path: Path
) -> None:
    """Their remote code stores taps and gated norms in bf16, layer lists in `linear_attn_config`, and code beside."""
    _, folder = predecessor
    convert(folder, tmp_path / "released")
    stored = tensors_of(tmp_path / "released")
    assert stored["model.layers.0.self_attn.A_log"].shape == (1, 1, 3, 1)
    narrow = {
        name: tensor if name.endswith(("A_log", "dt_bias", "correction_bias")) else tensor.bfloat16()
        for name, tensor in stored.items()
    }
    save_file(narrow, tmp_path / "released" / "model.safetensors")
    for name in ("modeling_kimi.py", "tokenization_kimi.py"):
        (tmp_path / "released" / name).write_text("")
    config = config_of(tmp_path / "released") | {"auto_map": {"AutoModelForCausalLM": "modeling_kimi.KimiLinear"}}
    (tmp_path / "released" / "config.json").write_text(json.dumps(config))
    convert(tmp_path / "released", tmp_path / "same")
    assert (tmp_path / "same" / "modeling_kimi.py").exists() and "auto_map" in config_of(tmp_path / "same")
    report = convert(tmp_path / "released", tmp_path / "ours", to="text")
    assert (tmp_path / "ours" / "tokenization_kimi.py").exists()
    assert report.not_copied == ["modeling_kimi.py"] and "auto_map" not in config_of(tmp_path / "ours")
    ours = tensors_of(tmp_path / "ours")
    for name, tensor in narrow.items():
        in_float32 = name.endswith(("conv1d.weight", "o_norm.weight", "A_log", "dt_bias", "correction_bias"))
        assert ours[name].dtype == (torch.float32 if in_float32 else torch.bfloat16), name
        assert torch.equal(ours[name].flatten(), tensor.float().flatten() if in_float32 else tensor.flatten()), name


def test_newer_mechanisms_do_not_fit_the_predecessor(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got attn_res_block_size=3, .*hidden_act='situ', gate_lower_bound=-5.0"):
        convert(COMPOSITE, tmp_path / "target", to="predecessor")


# ---- pruning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 3, 4])
def test_first_layers(layers: int, tmp_path: Path) -> None:
    report = convert(COMPOSITE, tmp_path / "pruned", to="text", layers=layers)
    config = config_of(tmp_path / "pruned")
    assert config["num_hidden_layers"] == layers
    assert report.tensors_left_out["layers"] == sum(
        name.startswith(tuple(f"language_model.model.layers.{i}." for i in range(layers, 5)))
        for name in tensors_of(COMPOSITE)
    )
    assert len(KimiK3ForCausalLM.from_pretrained(tmp_path / "pruned").model.layers) == layers


def test_pruned_layers_compute_what_they_did(tmp_path: Path) -> None:
    whole = tiny_model()
    whole.save_pretrained(tmp_path / "whole")
    convert(tmp_path / "whole", tmp_path / "pruned", layers=3)
    pruned = KimiK3ForCausalLM.from_pretrained(tmp_path / "pruned").eval()
    seen: list[Tensor] = []
    for model in (whole, pruned):
        model.model.layers[2].register_forward_hook(lambda module, args, output: seen.append(output[0]))
        with torch.no_grad():
            model(random_ids(whole.config))
    assert torch.equal(*seen)
    assert pruned.config.layer_types == whole.config.layer_types[:3]
    assert config_of(tmp_path / "pruned")["linear_attn_config"] == linear_attn_config(full_attn_layers=[])


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("form", ["mapping", "json", "safetensors"])
def test_most_used_experts_stay(form: str, packed: bool, plain: Path, tmp_path: Path) -> None:
    """Tokens that chose only experts that stay get what they did: ids renumbered, same weights, same output."""
    generator = torch.Generator().manual_seed(0)
    usage = {f"model.layers.{i}.mlp.gate": torch.randint(0, 50, (8,), generator=generator) for i in range(1, 5)}
    given: Any = usage
    if form == "json":
        given = tmp_path / "usage.json"
        given.write_text(json.dumps({str(i): counts.tolist() for i, counts in enumerate(usage.values(), start=1)}))
    elif form == "safetensors":
        given = tmp_path / "usage.safetensors"
        save_file(usage, given)
    source = PACKED if packed else plain
    report = convert(source, tmp_path / "pruned", keep_experts=3, usage=given)
    before, after = tensors_of(source), tensors_of(tmp_path / "pruned")
    assert config_of(tmp_path / "pruned")["num_experts"] == 3
    assert report.tensors_left_out == {"experts": 4 * 5 * 3 * (2 if packed else 1)}
    for layer, counts in enumerate(usage.values(), start=1):
        kept = sorted(sorted(range(8), key=lambda expert: (-int(counts[expert]), expert))[:3])
        assert report.experts[layer]["kept"] == kept
        assert math.isclose(
            report.experts[layer]["share_of_choices"], int(counts[kept].sum()) / int(counts.sum()), abs_tol=1e-6
        )
        moe = f"model.layers.{layer}.block_sparse_moe"
        for name in (f"{moe}.gate.weight", f"{moe}.gate.e_score_correction_bias"):
            assert torch.equal(after[name], before[name][kept]) and after[name].dtype == before[name].dtype
        for new, old in enumerate(kept):
            for ending in ("_packed", "_scale") if packed else ("",):
                for which in ("w1", "w2", "w3"):
                    name = f"{moe}.experts.{{}}.{which}.weight{ending}"
                    assert torch.equal(after[name.format(new)], before[name.format(old)])
    KimiK3ForCausalLM.from_pretrained(tmp_path / "pruned")


def test_pruned_router_chooses_as_before_among_those_that_stay(tmp_path: Path) -> None:
    whole = tiny_model()
    whole.save_pretrained(tmp_path / "whole")
    usage = {i: [9, 0, 8, 7, 0, 6, 0, 5] for i in range(1, 5)}  # experts 1, 4, 6 go
    convert(tmp_path / "whole", tmp_path / "pruned", keep_experts=5, usage=usage)
    pruned = KimiK3ForCausalLM.from_pretrained(tmp_path / "pruned").eval()
    kept = torch.tensor([0, 2, 3, 5, 7])
    x = torch.randn(2000, 32)
    for before, after in zip(whole.model.layers[1:], pruned.model.layers[1:], strict=True):
        with torch.no_grad():
            ids = before.mlp.gate(x).top_k_index
            stays = torch.isin(ids, kept).all(-1)
            assert 100 < int(stays.sum()) < 1900
            assert torch.equal(kept[after.mlp.gate(x[stays]).top_k_index].sort().values, ids[stays].sort().values)
            # batched by other tokens in between, so the order of sums may differ
            assert_close(after.mlp(x[None, stays])[0], before.mlp(x[None, stays])[0])


def test_groups_of_experts_keep_their_shares(tmp_path: Path) -> None:
    tiny_model("grouped_router").save_pretrained(tmp_path / "whole")  # 4 groups of 2
    usage = {i: [9, 8, 1, 2, 7, 6, 0, 0] for i in range(1, 5)}
    with pytest.raises(ValueError, match=r"multiple of `num_expert_group`=4, got 6"):
        convert(tmp_path / "whole", tmp_path / "pruned", keep_experts=6, usage=usage)
    with pytest.raises(ValueError, match=r"must be a valid configuration, got: .*at least 2 experts in a group"):
        convert(tmp_path / "whole", tmp_path / "pruned", keep_experts=4, usage=usage)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["whole"]


WRONG_PRUNING: dict[str, tuple[dict[str, Any], str]] = {
    "no usage": ({"keep_experts": 4}, "must be given together"),
    "fewer than a token visits": (
        {"keep_experts": 1, "usage": {}},
        r"between `num_experts_per_token`=2 and `num_experts`=8, .* got 1",
    ),
    "more than there are": ({"keep_experts": 9, "usage": {}}, r"got 9"),
    "layer without counts": (
        {"keep_experts": 4, "usage": {1: [1] * 8}},
        r"usage of layer 2 must be 8 counts.*got none",
    ),
    "too few counts": ({"keep_experts": 4, "usage": {i: [1] * 7 for i in range(5)}}, r"got shape \(7,\)"),
    "negative counts": ({"keep_experts": 4, "usage": {i: [-1] * 8 for i in range(5)}}, r"smallest -1"),
    "words": ({"keep_experts": 4, "usage": {1: ["many"] * 8}}, r"usage of layer 1 must be a list of numbers"),
    "strange key": ({"keep_experts": 4, "usage": {"gate": [1] * 8}}, r"layer numbers or names .* got 'gate'"),
    "two keys": ({"keep_experts": 4, "usage": {1: [1] * 8, "layers.1.mlp": [1] * 8}}, r"two for layer 1"),
    "no such file": ({"keep_experts": 4, "usage": "absent.json"}, r"`absent.json` must be a JSON or safetensors file"),
    "no layers": ({"layers": 0}, r"`layers` must be in 1 to `num_hidden_layers`=5, got 0"),
    "too many layers": ({"layers": 6}, r"got 6"),
}


@pytest.mark.parametrize("case", WRONG_PRUNING, ids=lambda name: name.replace(" ", "_"))
def test_pruning_that_cannot_be(case: str, tmp_path: Path) -> None:
    options, pattern = WRONG_PRUNING[case]
    with pytest.raises(ValueError, match=pattern):
        convert(COMPOSITE, tmp_path / "target", **options)
    assert list(tmp_path.iterdir()) == []


# ---- folders, report, command line ----------------------------------------------------------------------------------


def test_other_files_come_along(tmp_path: Path) -> None:
    source = Path(shutil.copytree(COMPOSITE, tmp_path / "source"))
    for name in ("tokenizer.json", "preprocessor_config.json", "LICENSE", "pytorch_model.bin"):
        (source / name).write_text(name)
    (source / "checkpoint-1").mkdir()
    report = convert(source, tmp_path / "text", to="text")
    assert (tmp_path / "text" / "tokenizer.json").read_text() == "tokenizer.json"
    assert (tmp_path / "text" / "LICENSE").exists()
    assert set(report.not_copied) == {
        "checkpoint-1",
        "expected.safetensors",
        "preprocessor_config.json",
        "pytorch_model.bin",
    }
    assert (tmp_path / "text").stat().st_mode == (tmp_path / "source").stat().st_mode


def test_code_of_another_layout_stays_behind(tmp_path: Path) -> None:
    """What computes; the code of a tokenizer is of no layout. In its own layout a folder keeps all of it."""
    source = tmp_path / "source"
    tiny_model().save_pretrained(source)
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "KimiK3Tokenizer"}')
    export_remote_code(source)
    code = {file.name for file in source.glob("*.py")}
    convert(source, tmp_path / "composite", to="composite")
    kept = {file.name for file in (tmp_path / "composite").glob("*.py")}
    assert kept == {name for name in code if name.startswith("processing_")} != set()
    assert "auto_map" not in config_of(tmp_path / "composite")
    convert(source, tmp_path / "shallow", layers=4)
    assert {file.name for file in (tmp_path / "shallow").glob("*.py")} == code
    assert config_of(tmp_path / "shallow")["auto_map"] == config_of(source)["auto_map"]


def test_report_has_the_checksum_of_every_file(tmp_path: Path) -> None:
    report = convert(COMPOSITE, tmp_path / "target", max_shard_size="50KB")
    saved = json.loads((tmp_path / "target" / "conversion_report.json").read_text())
    assert saved == json.loads(json.dumps(report.to_dict()))
    present = {path.name for path in (tmp_path / "target").iterdir()} - {"conversion_report.json"}
    assert saved["files"].keys() == present
    for name, entry in saved["files"].items():
        content = (tmp_path / "target" / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    stored = tensors_of(COMPOSITE)
    assert saved["tensors_written"] == saved["tensors_read"] == len(stored)
    assert saved["total_bytes"] == sum(tensor.nbytes for tensor in stored.values())
    assert saved["dtypes"] == {"BF16": 226, "F32": 22}


def test_dry_run_writes_nothing_and_says_the_same(tmp_path: Path) -> None:
    options: dict[str, Any] = {"to": "text", "layers": 4, "max_shard_size": "30KB"}
    planned = convert(COMPOSITE, tmp_path / "target", dry_run=True, **options)
    assert list(tmp_path.iterdir()) == []
    done = convert(COMPOSITE, tmp_path / "target", **options)
    without = {"dry_run", "files"}
    left, right = planned.to_dict(), done.to_dict()
    assert {k: v for k, v in left.items() if k not in without} == {k: v for k, v in right.items() if k not in without}


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "text"
    main(["convert", str(COMPOSITE), str(target), "--to", "text", "--layers", "4", "--json"])
    assert json.loads(capsys.readouterr().out) == json.loads((target / "conversion_report.json").read_text())
    with pytest.raises(SystemExit) as stopped:
        main(["convert", str(COMPOSITE), str(target), "--to", "text"])
    assert stopped.value.code == 1
    assert "`target` must not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["convert", "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    options = ("--to", "--experts", "--layers", "--keep-experts", "--usage", "--vision-from", "--dry-run", "--json")
    assert all(option in shown for option in options)


def test_command_line_expands_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `--vision-from=~/model`, which a shell leaves as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    main(["convert", str(COMPOSITE), "~/text", "--to=text", "--quiet"])
    main(["convert", "~/text", "~/back", "--to=composite", f"--vision-from={COMPOSITE}", "--quiet"])
    assert_same(tensors_of(tmp_path / "back"), tensors_of(COMPOSITE))
    main(["export-remote-code", "~/back"])
    assert (tmp_path / "back" / "modeling_multimodal.py").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert", "someone/model", "target"],
        ["convert", str(COMPOSITE), "target", "--to=composite", "--vision-from=someone/model"],
        ["export-serving", "someone/model", "target"],
        ["check-serving", "someone/model"],
        ["export-remote-code", "someone/model"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_command_line_says_how_to_get_a_model_of_the_hub(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if "--vision-from=someone/model" in arguments:
        convert(COMPOSITE, "text", to="text")
        arguments = ["convert", "text", *arguments[2:]]
    with pytest.raises(SystemExit):
        main(arguments)
    shown = capsys.readouterr().err
    assert "must be a folder, got `someone/model`" in shown and "`hf download`" in shown
    assert not (tmp_path / "target").exists()


def test_progress_bar_counts_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = convert(COMPOSITE, tmp_path / "target", progress=True)
    shown = capsys.readouterr().err
    assert "convert: 100%" in shown and f"{report.total_bytes / 1000:.0f}k/{report.total_bytes / 1000:.0f}k" in shown


WRONG_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown layout": ({"to": "onnx"}, r"`to` must be text, composite, predecessor or same, got 'onnx'"),
    "unknown packing": ({"experts": "int4"}, r"`experts` must be as-is, bfloat16 or mxfp4, got 'int4'"),
    "size in words": ({"max_shard_size": "large"}, r"`max_shard_size` must be a number of bytes .* got 'large'"),
    "size zero": ({"max_shard_size": 0}, r"got 0"),
    "tower for a composite": ({"vision_from": COMPOSITE}, r"`vision_from` must be given only when"),
}


@pytest.mark.parametrize("case", WRONG_CALLS, ids=lambda name: name.replace(" ", "_"))
def test_wrong_calls(case: str, tmp_path: Path) -> None:
    options, pattern = WRONG_CALLS[case]
    with pytest.raises(ValueError, match=pattern):
        convert(COMPOSITE, tmp_path / "target", **options)
    assert list(tmp_path.iterdir()) == []


def test_tower_of_another_width_or_none(text: Path, plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must project to `hidden_size`=64, got 32"):
        convert(plain, tmp_path / "target", to="composite", vision_from=COMPOSITE)
    with pytest.raises(ValueError, match=r"must be a composite checkpoint with a vision part"):
        convert(plain, tmp_path / "target", to="composite", vision_from=text)


def test_places(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`source` must be a folder"):
        convert(tmp_path / "absent", tmp_path / "target")
    source = Path(shutil.copytree(COMPOSITE, tmp_path / "source"))
    for target in (source, source / "inside", COMPOSITE):
        with pytest.raises(ValueError, match=r"must not (exist|be inside)"):
            convert(source, target)
    assert not (source / "inside").exists()


# ---- the page -------------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "conversion.md"


def run_command(line: str) -> None:
    program, *arguments = shlex.split(line)
    assert program == "deltalatent", line
    try:
        main(arguments)
    except SystemExit as stopped:
        assert stopped.code == 1


def test_page_runs_and_prints_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks share a namespace and a folder; a block of text is what the one before it prints, errors included."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(COMPOSITE, "damaged")
    Path("damaged/model.safetensors").write_bytes((COMPOSITE / "model.safetensors").read_bytes()[:-100])
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert {language for language, _ in blocks} == {"bash", "python", "text"}
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for language, code in blocks:
        if language == "text":
            assert re.sub(r"[0-9a-f]{64}", "CHECKSUM", printed).rstrip() == code.rstrip()
            continue
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            if language == "python":
                exec(compile(code, str(PAGE), "exec"), namespace)
            else:
                for line in code.splitlines():
                    run_command(line)
        printed = "\n".join(line for line in output.getvalue().splitlines() if "it/s]" not in line)
