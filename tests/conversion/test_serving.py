# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The contract with servers: what is exported keeps it, what cannot keep it is refused with the field's name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from deltalatent import size_config
from deltalatent.__main__ import main
from deltalatent.conversion.serving import check_serving, export_serving, serving_obstacles
from tests.testing_common import GOLDEN, linear_attn_config, tiny_config, tiny_model


def write_tokenizer(folder: Path) -> None:
    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    tiny_model().to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def exported(source, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "exported"
    export_serving(source, folder)
    return folder


def test_exported_folder_has_the_released_form(source, exported):
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["KimiK3ForConditionalGeneration"]
    assert config["model_type"] == "kimi_k3"
    assert config["text_config"]["model_type"] == "kimi_linear"
    stored, before = load_file(exported / "model.safetensors"), load_file(source / "model.safetensors")
    assert stored.keys() == {f"language_model.{name}" for name in before}
    for name, tensor in before.items():
        exactly = stored[f"language_model.{name}"]
        assert exactly.dtype == tensor.dtype
        assert torch.equal(exactly, tensor)
    assert (exported / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    check_serving(exported)


def test_packed_experts_are_accepted(source, tmp_path):
    folder = tmp_path / "source"
    fields = {"moe_intermediate_size": 32, "routed_expert_hidden_size": 32}  # groups of 32 share a scale
    tiny_model(**fields).save_pretrained(folder)
    write_tokenizer(folder)
    export_serving(folder, tmp_path / "packed", experts="mxfp4")
    with safe_open(tmp_path / "packed" / "model.safetensors", "pt") as file:
        packed = [name for name in file.keys() if name.endswith("_packed")]
    assert packed
    assert all(".block_sparse_moe.experts." in name for name in packed)
    check_serving(tmp_path / "packed")


@pytest.mark.parametrize("size", ["tiny", "nano", "small", "base", "release"])
def test_ready_made_sizes_can_be_served(size):
    assert serving_obstacles(size_config(size)) == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_act": "silu"}, "hidden_act='silu'"),
        ({"attn_res_block_size": None}, "attn_res_block_size=None"),
        ({"num_expert_group": 2, "topk_group": 1}, "num_expert_group=2"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ({"linear_attn_config": linear_attn_config(use_full_rank_gate=False)}, "use_full_rank_gate=False"),
        ({"linear_attn_config": linear_attn_config(num_heads=4)}, "linear_attn_config.num_heads=4"),
        (
            {"linear_attn_config": linear_attn_config(kda_layers=[1, 2, 3, 4, 5], full_attn_layers=[])},
            "linear_attn_config (must name layers of both kinds",
        ),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_servers_cannot_represent_is_named(fields, named, tmp_path):
    obstacles = serving_obstacles(tiny_config(**fields))
    assert any(obstacle.startswith(named) for obstacle in obstacles), obstacles
    folder = tmp_path / "source"
    tiny_model(**fields).save_pretrained(folder)
    write_tokenizer(folder)
    with pytest.raises(ValueError, match="must be a model that servers can represent") as error:
        export_serving(folder, tmp_path / "target")
    assert named in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_released_composite_passes(tmp_path):
    shutil.copytree(GOLDEN / "multimodal", tmp_path / "released", copy_function=shutil.copyfile)
    write_tokenizer(tmp_path / "released")
    checked = check_serving(tmp_path / "released")
    assert checked.vision


def test_a_text_folder_is_not_what_servers_read(source):
    with pytest.raises(ValueError, match="`model_type` must be 'kimi_k3'"):
        check_serving(source)


def test_float32_tensors_must_be_float32(exported, tmp_path):
    shutil.copytree(exported, tmp_path / "cast")
    tensors = load_file(exported / "model.safetensors")
    name = "language_model.model.layers.0.self_attn.A_log"
    save_file(tensors | {name: tensors[name].bfloat16()}, tmp_path / "cast" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"must be float32, got another dtype for .*layers\.0\.self_attn\.A_log"):
        check_serving(tmp_path / "cast")


def test_tokenizer_is_part_of_the_contract(source, exported, tmp_path):
    shutil.copytree(exported, tmp_path / "none")
    (tmp_path / "none" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"no tokenizer\.json: save the tokenizer"):
        check_serving(tmp_path / "none")
    (tmp_path / "none" / "tiktoken.model").touch()
    check_serving(tmp_path / "none")

    shutil.copytree(exported, tmp_path / "larger")
    content = json.loads((exported / "tokenizer.json").read_text())
    content["added_tokens"] = [{"id": 256, "content": "<|x|>"}]
    (tmp_path / "larger" / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="ids below vocab_size=256, got 256"):
        check_serving(tmp_path / "larger")

    shutil.copytree(exported, tmp_path / "words")
    Tokenizer(models.WordLevel({"a": 0}, "a")).save(str(tmp_path / "words" / "tokenizer.json"))
    with pytest.raises(ValueError, match="must hold a byte-level BPE, got a WordLevel model"):
        check_serving(tmp_path / "words")


def test_command_line(source, tmp_path, capsys):
    main(["export-serving", str(source), str(tmp_path / "out"), "--quiet"])
    assert "(composite)" in capsys.readouterr().out
    main(["check-serving", str(tmp_path / "out")])
    assert "as servers read" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["check-serving", str(source)])
    assert stopped.value.code == 1
    assert "must be a folder that servers read" in capsys.readouterr().err


def test_command_line_of_remote_code(source, tmp_path, capsys):
    shutil.copytree(source, tmp_path / "model")
    main(["export-remote-code", str(tmp_path / "model")])
    assert "source files, and `auto_map` in config.json" in capsys.readouterr().out
    assert "auto_map" in json.loads((tmp_path / "model" / "config.json").read_text())
