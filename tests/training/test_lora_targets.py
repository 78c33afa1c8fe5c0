# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Default LoRA targets: every name finds something, together they find what they should and nothing else.

That adapters on such targets train, merge, save and generate is tested in tests/integration/test_peft.py.
"""

from __future__ import annotations

import re

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig

import deltalatent
from deltalatent import KimiK3Config, KimiK3ForCausalLM, KimiK3TextConfig, lora_targets, size_config
from deltalatent.training import parameter_groups
from tests.equivalence import ONE_KIND, ROUNDED
from tests.testing_common import VARIANTS, assert_close, random_ids, tiny_config, tiny_model

CONFIGS = {name: {} for name in VARIANTS} | ONE_KIND


def config_of(name: str) -> KimiK3TextConfig:
    return tiny_config(**ONE_KIND[name]) if name in ONE_KIND else tiny_config(name)


def adapted(model: nn.Module, *, experts: bool = True) -> PeftModel:
    return get_peft_model(model, LoraConfig(r=2, lora_alpha=4, **lora_targets(model.config, experts=experts)))


def adapted_names(model: PeftModel) -> set[str]:
    """Modules with an adapter by module, and experts parameters with an adapter, under their names in the base."""
    found = set()
    for name, module in model.get_base_model().named_modules():
        if hasattr(module, "lora_A") and len(module.lora_A):
            base = re.sub(r"\.base_layer", "", name)
            parameter = getattr(module, "parameter_name", None)
            found.add(base if parameter is None else f"{base}.{parameter}")
    return found


@pytest.mark.parametrize("experts", [True, False], ids=["experts", "no_experts"])
@pytest.mark.parametrize("name", CONFIGS)
def test_targets_are_all_linear_maps_but_the_head_and_the_experts_if_asked(name: str, experts: bool) -> None:
    with torch.device("meta"):
        model = KimiK3ForCausalLM(config_of(name))
    expected = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    if experts:
        expected |= {name for name, _ in model.named_parameters() if ".experts." in name}
    assert adapted_names(adapted(model, experts=experts)) == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_no_target_is_without_effect_and_lists_are_sorted(name: str) -> None:
    """PEFT is silent about a name that finds nothing as long as another one does."""
    config = config_of(name)
    with torch.device("meta"):
        model = KimiK3ForCausalLM(config)
    targets = lora_targets(config)
    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters()]
    for target in targets["target_modules"]:
        assert any(name.endswith(f".{target}") for name in modules), target
    for target in targets["target_parameters"] or []:
        assert any(name.endswith(f".{target}") for name in parameters), target
    assert targets["target_modules"] == sorted(set(targets["target_modules"]))
    assert (targets["target_parameters"] is None) == (not config.num_experts)


def test_only_adapters_train_and_the_loss_falls() -> None:
    model = tiny_model()
    ids = random_ids(model.config, 2, 12)
    with torch.no_grad():
        expected = model(ids).logits
    model = adapted(model)
    with torch.no_grad():
        assert_close(model(ids).logits, expected, ROUNDED)  # B = 0
    groups = parameter_groups(model, weight_decay=0.0)
    assert all(group["algorithm"] == "adamw" for group in groups)
    adapters = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    assert sum(len(group["params"]) for group in groups) == len(adapters)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    losses = []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[0] > losses[1] > losses[2] > losses[3]
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, before[name]) == ("lora_" not in name), name


def test_a_composite_config_is_read_like_its_text_part() -> None:
    text = tiny_config("predecessor")
    assert lora_targets(KimiK3Config(text_config=text.to_dict(), vision_config=None)) == lora_targets(text)


def test_other_configs_are_refused() -> None:
    with pytest.raises(TypeError, match="must be a KimiK3TextConfig or KimiK3Config, got LlamaConfig"):
        lora_targets(LlamaConfig())


def test_unknown_names_of_the_package_are_unknown() -> None:
    """`lora_targets` is looked up on first use; the lookup must not swallow spelling mistakes."""
    with pytest.raises(AttributeError, match="module 'deltalatent' has no attribute 'lora_target'"):
        deltalatent.lora_target  # noqa: B018


def test_number_of_expert_weights_is_the_documented_one() -> None:
    """E r (2 Z + 3 I) per layer."""
    config = size_config("nano")
    with torch.device("meta"):
        model = adapted(KimiK3ForCausalLM(config))
    found = sum(
        p.numel() for name, p in model.named_parameters() if "lora_" in name and "layers.3.mlp.experts" in name
    )
    width, latent = config.moe_intermediate_size, config.routed_expert_hidden_size
    assert found == config.num_experts * 2 * (2 * latent + 3 * width)
