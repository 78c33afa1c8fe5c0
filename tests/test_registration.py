# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What `import deltalatent` does to Transformers: the Auto classes know our models, and nothing else changes."""

from __future__ import annotations

import importlib
import json
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, KimiLinearConfig, KimiLinearForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import deltalatent
from deltalatent import (
    KimiK3Config,
    KimiK3ForCausalLM,
    KimiK3TextConfig,
    KimiK3TextModel,
    KimiK3VisionConfig,
    register,
)
from deltalatent.configuration.configuration_kimi_k3 import FIELDS_OF_THIS_ARCHITECTURE
from tests.testing_common import GOLDEN, linear_attn_config, tiny_config, tiny_model

OUR_TYPES = {"kimi_k3": KimiK3Config, "kimi_k3_text": KimiK3TextConfig, "kimi_k3_vision": KimiK3VisionConfig}


def run_in_fresh_process(code: str, *arguments: str) -> str:
    """Standard output of `code`; fails with its error output."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("model_type", OUR_TYPES)
def test_auto_config_knows_our_types(model_type: str) -> None:
    assert CONFIG_MAPPING[model_type] is OUR_TYPES[model_type]
    assert type(AutoConfig.for_model(model_type)) is OUR_TYPES[model_type]


def test_auto_models_know_our_config() -> None:
    config = tiny_config()
    assert type(AutoModel.from_config(config)) is KimiK3TextModel
    assert type(AutoModelForCausalLM.from_config(config)) is KimiK3ForCausalLM


@pytest.mark.parametrize("again", [register, lambda: importlib.reload(deltalatent)], ids=["register", "reload"])
def test_registering_again_changes_nothing(again: Callable[[], object]) -> None:
    before = dict(CONFIG_MAPPING._extra_content)
    conversions = repr(get_checkpoint_conversion_mapping("kimi_k3_text"))
    again()
    assert dict(CONFIG_MAPPING._extra_content) == before
    assert repr(get_checkpoint_conversion_mapping("kimi_k3_text")) == conversions
    assert type(AutoModelForCausalLM.from_config(tiny_config())) is KimiK3ForCausalLM


def test_import_alone_is_enough_and_light(tmp_path: Path) -> None:
    """In a fresh process: Auto classes work on our folders; no Triton, CUDA or optional package is imported, beyond
    what a model of Transformers brings (where Triton is installed, PyTorch's compiler imports it)."""
    tiny_model().save_pretrained(tmp_path)
    output = run_in_fresh_process(
        """
        import json, sys
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
        from transformers.models.kimi_linear import modeling_kimi_linear
        before = set(sys.modules)
        import deltalatent
        import torch
        optional = {"triton", "fla", "peft", "datasets", "liger_kernel", "compressed_tensors", "trl", "kernels"}
        imported = sorted(optional & (set(sys.modules) - before))
        cuda = torch.cuda.is_initialized()
        ours, released = sys.argv[1:]
        names = [type(AutoConfig.from_pretrained(ours)).__name__]
        names += [type(auto.from_pretrained(ours)).__name__ for auto in (AutoModel, AutoModelForCausalLM)]
        names += [type(AutoModelForCausalLM.from_pretrained(released)).__name__]
        print(json.dumps([imported, cuda, names]))
        """,
        str(tmp_path),
        str(GOLDEN / "text_long"),
    )
    imported, cuda, names = json.loads(output.splitlines()[-1])
    assert imported == []
    assert cuda is False
    assert names == ["KimiK3TextConfig", "KimiK3TextModel", "KimiK3ForCausalLM", "KimiK3ForCausalLM"]


def test_without_the_package_our_folders_are_refused(tmp_path: Path) -> None:
    """So the test above tests the import, and nobody gets another model by accident."""
    tiny_config().save_pretrained(tmp_path)
    output = run_in_fresh_process(
        """
        import sys
        from transformers import AutoConfig
        try:
            AutoConfig.from_pretrained(sys.argv[1])
        except ValueError as error:
            print("refused:", "kimi_k3_text" in str(error))
        """,
        str(tmp_path),
    )
    assert output.splitlines()[-1] == "refused: True"


# ---- `kimi_linear`, which belongs to Transformers -------------------------------------------------------------------


def test_predecessor_keeps_its_classes(tmp_path: Path) -> None:
    config = AutoConfig.for_model("kimi_linear", num_hidden_layers=2)
    assert type(config) is KimiLinearConfig
    assert config.num_hidden_layers == 2
    config.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is KimiLinearConfig
    assert AutoModelForCausalLM._model_mapping[KimiLinearConfig] is KimiLinearForCausalLM
    entry = CONFIG_MAPPING["kimi_linear"]
    assert type(entry()) is KimiLinearConfig
    assert entry.default_config_fields() == KimiLinearConfig.default_config_fields()


@pytest.mark.parametrize("field", FIELDS_OF_THIS_ARCHITECTURE)
def test_kimi_linear_folder_with_a_field_of_ours_is_ours(field: str, tmp_path: Path) -> None:
    file = {
        "model_type": "kimi_linear",
        "num_hidden_layers": 5,
        "linear_attn_config": linear_attn_config(gate_lower_bound=None, use_full_rank_gate=None),
    }
    for given, expected in ((None, KimiLinearConfig), (True, KimiK3TextConfig)):
        value = {"gate_lower_bound": -5.0, "attn_res_block_size": 2, "routed_expert_hidden_size": 8}.get(
            field.rpartition(".")[2], 4.0 if field == "activation_situ_beta" else True
        )
        if "." in field:
            file["linear_attn_config"][field.rpartition(".")[2]] = value if given else None
        else:
            file[field] = value if given else None
        (tmp_path / "config.json").write_text(json.dumps(file))
        assert type(AutoConfig.from_pretrained(tmp_path)) is expected


REMOTE_CODE = """
from transformers import PreTrainedConfig


class RemoteConfig(PreTrainedConfig):
    model_type = "kimi_linear"
    came_from = "remote code"
"""


@pytest.mark.parametrize(("trust", "came_from"), [(True, "remote code"), (False, None)])
def test_remote_code_of_a_predecessor_folder_counts_as_before(
    trust: bool, came_from: str | None, tmp_path: Path
) -> None:
    """Code in the folder, once trusted, wins over a built-in type; over one that a package registered it does not."""
    (tmp_path / "remote_config.py").write_text(REMOTE_CODE)
    file = {"model_type": "kimi_linear", "auto_map": {"AutoConfig": "remote_config.RemoteConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(file))
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=trust)
    assert getattr(config, "came_from", None) == came_from


def test_the_mapping_can_be_pickled() -> None:
    """Transformers provides for that; a class that pretends to live in another module must not break it."""
    copied = pickle.loads(pickle.dumps(CONFIG_MAPPING))
    assert copied["kimi_k3_text"] is KimiK3TextConfig
    assert copied["kimi_linear"] is CONFIG_MAPPING["kimi_linear"]


def test_public_names() -> None:
    assert len(set(deltalatent.__all__)) == len(deltalatent.__all__)
    for name in deltalatent.__all__:
        assert getattr(deltalatent, name).__doc__ or name == "SIZES"
