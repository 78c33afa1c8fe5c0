# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""A folder with its own code loads where only torch and Transformers are, and computes the very same numbers."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto import modeling_auto

from deltalatent import (
    KimiK3Config,
    KimiK3ForCausalLM,
    KimiK3ForConditionalGeneration,
    KimiK3ForSequenceClassification,
    KimiK3TextConfig,
)
from deltalatent.conversion.export_remote_code import (
    COMPOSITE_CLASSES,
    TEXT_CLASSES,
    export_remote_code,
    flat_name,
)
from tests.bare_environment import make_bare_environment, run_python
from tests.testing_common import GOLDEN, golden, tiny_model

INPUTS = {"input_ids": torch.arange(20).view(2, 10)}

ROOT = Path(__file__).parents[2]

READER = """
import importlib.util, json, sys
import torch
from safetensors.torch import load_file, save_file
import transformers

for package in ("deltalatent", "triton", "accelerate", "peft"):
    if importlib.util.find_spec(package) is not None:
        sys.exit(f"the environment must not have {package}")

auto_class, source, target, numbers = sys.argv[1:]
model = getattr(transformers, auto_class).from_pretrained(source, trust_remote_code=True).eval()
inputs = load_file(numbers)
with torch.no_grad():
    logits = model(**inputs).logits
tokens = model.generate(**inputs, max_new_tokens=4, do_sample=False)
model.save_pretrained(target)
save_file({"logits": logits, "tokens": tokens}, numbers)
print(json.dumps({"class": type(model).__name__, "module": type(model).__module__}))
"""


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory) -> Path:
    return make_bare_environment(tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    return folder


@pytest.fixture
def exported(saved, tmp_path) -> Path:
    folder = tmp_path / "exported"
    shutil.copytree(saved, folder)
    export_remote_code(folder)
    return folder


def numbers_of(model, inputs: dict[str, torch.Tensor] = INPUTS) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        logits = model.eval()(**inputs).logits
    return {"logits": logits, "tokens": model.generate(**inputs, max_new_tokens=4, do_sample=False)}


def read_without_package(
    python: Path,
    folder: Path,
    workspace: Path,
    auto_class: str = "AutoModelForCausalLM",
    inputs: dict[str, torch.Tensor] = INPUTS,
) -> tuple[Path, dict[str, torch.Tensor], dict]:
    """Load, compute and save in the other environment, from an empty module cache."""
    target, numbers = workspace / "saved_again", workspace / "numbers.safetensors"
    save_file(inputs, numbers)
    printed = run_python(python, READER, auto_class, folder, target, numbers, workspace=workspace)
    return target, load_file(numbers), json.loads(printed.splitlines()[-1])


def test_loads_without_the_package_bit_equal_and_again_after_a_save(exported, bare_python, tmp_path):
    expected = numbers_of(KimiK3ForCausalLM.from_pretrained(exported))
    folder = exported
    for round_trip in ("first", "second"):
        (workspace := tmp_path / round_trip).mkdir()
        folder, numbers, loaded = read_without_package(bare_python, folder, workspace)
        assert loaded["class"] == "KimiK3ForCausalLM"
        assert loaded["module"].startswith("transformers_modules.")
        torch.testing.assert_close(numbers, expected, rtol=0, atol=0)
        # What that environment saved is an ordinary folder of this package too.
        torch.testing.assert_close(numbers_of(KimiK3ForCausalLM.from_pretrained(folder)), expected, rtol=0, atol=0)


@pytest.mark.parametrize("fixture", ["text_bf16layout", "text_mxfp4"])
def test_released_layouts_load_without_the_package(fixture, bare_python, tmp_path):
    folder = tmp_path / fixture
    shutil.copytree(GOLDEN / fixture, folder, copy_function=shutil.copyfile)
    expected = numbers_of(KimiK3ForCausalLM.from_pretrained(folder))
    export_remote_code(folder)
    _, numbers, _ = read_without_package(bare_python, folder, tmp_path)
    torch.testing.assert_close(numbers, expected, rtol=0, atol=0)


def test_reward_model_loads_without_the_package(bare_python, tmp_path):
    folder = tmp_path / "reward"
    model = tiny_model(model_class=KimiK3ForSequenceClassification, num_labels=1).eval()
    model.save_pretrained(folder)
    export_remote_code(folder)
    script = """
import sys
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
save_file({"logits": model(**load_file(sys.argv[2])).logits.detach()}, sys.argv[2])
"""
    save_file(INPUTS, numbers := tmp_path / "numbers.safetensors")
    run_python(bare_python, script, folder, numbers, workspace=tmp_path)
    assert torch.equal(load_file(numbers)["logits"], model(**INPUTS).logits)


def test_composite_loads_without_the_package(bare_python, tmp_path):
    folder = tmp_path / "composite"
    shutil.copytree(GOLDEN / "multimodal", folder, copy_function=shutil.copyfile)
    case = golden("multimodal")
    inputs = {name: case[name] for name in ("input_ids", "attention_mask", "pixel_values", "grid_thws")}
    expected = numbers_of(KimiK3ForConditionalGeneration.from_pretrained(folder), inputs)
    export_remote_code(folder)
    auto_class = "AutoModelForImageTextToText"
    target, numbers, loaded = read_without_package(bare_python, folder, tmp_path, auto_class, inputs)
    assert loaded["class"] == "KimiK3ForConditionalGeneration"
    torch.testing.assert_close(numbers, expected, rtol=0, atol=0)
    again = numbers_of(KimiK3ForConditionalGeneration.from_pretrained(target), inputs)
    torch.testing.assert_close(again, expected, rtol=0, atol=0)


def test_the_package_still_loads_the_folder(saved, exported):
    plain, model = (KimiK3ForCausalLM.from_pretrained(folder) for folder in (saved, exported))
    torch.testing.assert_close(numbers_of(model), numbers_of(plain), rtol=0, atol=0)


def test_package_wins_once_it_is_imported(exported, tmp_path):
    script = """
import sys, torch
from transformers import AutoModelForCausalLM

def load():
    return AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()

first = load()
import deltalatent
second = load()
assert [type(model).__module__.split(".")[0] for model in (first, second)] == ["transformers_modules", "deltalatent"]
with torch.no_grad():
    a, b, c = (model(torch.arange(20).view(2, 10)).logits for model in (first, second, first))
assert torch.equal(a, b) and torch.equal(a, c)
"""
    run_python(Path(sys.executable), script, exported, workspace=tmp_path, PYTHONPATH=str(ROOT))


def test_weights_stay_and_export_can_be_repeated(saved, exported):
    first = {file.name: file.read_bytes() for file in exported.iterdir()}
    export_remote_code(exported)
    assert {file.name: file.read_bytes() for file in exported.iterdir()} == first
    assert first["model.safetensors"] == (saved / "model.safetensors").read_bytes()
    assert not [name for name in first if name.endswith(".incomplete")]


def test_triton_kernels_are_included(exported):
    names = {file.name for file in exported.glob("*.py")}
    assert {"kernels_kda_triton_fwd.py", "kernels_kda_triton_bwd.py", "kernels_kda_triton_recurrent.py"} <= names


@pytest.mark.parametrize(
    ("config_class", "exported", "left_out"),
    [
        (KimiK3TextConfig, TEXT_CLASSES, set()),
        # The text part of a composite: Transformers wants a class with the configuration that the folder has.
        (KimiK3Config, COMPOSITE_CLASSES, {"AutoModelForCausalLM"}),
    ],
)
def test_every_auto_class_that_knows_the_models_finds_code(config_class, exported, left_out):
    auto_classes = [x for x in vars(modeling_auto).values() if isinstance(x, type) and getattr(x, "_model_mapping", 0)]
    registered = {
        auto.__name__: auto._model_mapping._extra_content[config_class].__name__
        for auto in auto_classes
        if config_class in auto._model_mapping._extra_content and auto.__name__ not in left_out
    }
    assert {auto: name for auto, (_, name) in exported.items() if auto != "AutoConfig"} == registered


def test_every_import_is_flat(exported):
    for file in exported.glob("*.py"):
        text = file.read_text()
        compile(text, file.name, "exec")
        assert "\nfrom deltalatent" not in text, file.name


def test_flat_name_keeps_files_apart():
    assert flat_name("deltalatent.kernels.kda.api") == "kernels_kda_api"
    assert flat_name("deltalatent.kernels.kda") == "kernels_kda"
    assert flat_name("deltalatent.modeling.modeling_kimi_k3") == "modeling_kimi_k3"
    assert flat_name("deltalatent.configuration.configuration_kimi_k3") == "configuration_kimi_k3"


def test_refuses_a_folder_without_config(tmp_path):
    with pytest.raises(ValueError, match=r"must hold a `config\.json`, got none"):
        export_remote_code(tmp_path)
    assert not list(tmp_path.iterdir())


def test_refuses_another_model(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="got 'llama'"):
        export_remote_code(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
