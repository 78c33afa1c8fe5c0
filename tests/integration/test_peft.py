# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""LoRA on the fused experts and on projections: training, merging, saving, resuming, and what is refused.

Public reports behind these tests: S47 to S50.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

from deltalatent import KimiK3ForCausalLM, lora_targets
from deltalatent.training import (
    QuantileBalancingCallback,
    balanced_routers,
    check_checkpoint,
    freeze_selection_bias,
    load_selection_bias,
    save_selection_bias,
)
from tests.equivalence import ROUNDED
from tests.testing_common import assert_close, assert_gradients_close, load_golden_model, random_ids, tiny_model

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
# Twice as wide as the experts, so that swapped roles of A and B still have shapes that fit (S49).
CONFUSABLE = {"routed_expert_hidden_size": 32, "moe_intermediate_size": 16}


def lora_config(**fields: Any) -> LoraConfig:
    return LoraConfig(
        **({"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": [], "target_parameters": EXPERTS} | fields)
    )


def adapted(seed: int = 0, *, trained: bool = True, **fields: Any) -> PeftModel:
    """A tiny model with LoRA; `trained` fills the zero half of each adapter, which would otherwise do nothing."""
    torch.manual_seed(seed)
    model = get_peft_model(tiny_model(**CONFUSABLE), lora_config(**fields))
    if trained:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.3)
    return model.eval()


def adapter(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_parameters() if "lora_" in name}


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return random_ids(tiny_model().config, 2, 12)


TARGETS = {
    "experts": {},
    "projections": {"target_modules": PROJECTIONS, "target_parameters": None},
    "both": {"target_modules": PROJECTIONS},
}


@pytest.mark.parametrize("targets", TARGETS)
def test_adapters_reach_their_targets_and_only_they_train(targets: str, ids: Tensor) -> None:
    """S47: no module name finds the fused experts; `target_parameters` does."""
    base = tiny_model(**CONFUSABLE)
    with torch.no_grad():
        expected = base(ids).logits
    model = adapted(trained=False, **TARGETS[targets])
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trainable and all("lora_" in name for name in trainable)
    on_experts = [name for name in trainable if ".experts." in name]
    # A and B on both tensors of the four sparse layers.
    assert len(on_experts) == (0 if targets == "projections" else 2 * 2 * 4)
    with torch.no_grad():
        assert_close(model(ids).logits, expected, ROUNDED)  # B = 0

    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    for name, tensor in frozen.items():
        assert torch.equal(model.get_parameter(name), tensor), name


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_every_experts_backend_sees_the_adapter(experts: str, ids: Tensor) -> None:
    """One that read the bare parameter would silently train nothing."""
    model = adapted(**TARGETS["both"])
    reference = adapted(**TARGETS["both"])
    reference.get_base_model().set_experts_implementation("eager")
    model.get_base_model().set_experts_implementation(experts)
    found = []
    for one in (reference, model):
        loss = one(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append((loss, {name: p.grad for name, p in one.named_parameters() if p.grad is not None}))
    assert_close(found[1][0], found[0][0], ROUNDED)
    assert_gradients_close(found[1][1], found[0][1], rel=1e-3)
    assert all(gradient.any() for name, gradient in found[1][1].items() if "lora_" in name)


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("shard_size", ["5GB", "60KB"])
def test_merged_and_saved_model_is_the_adapted_model(
    tmp_path: Path, ids: Tensor, targets: str, shard_size: str
) -> None:
    """S49: a merge that drops the update, or a layout that swaps A and B, writes a plausible model."""
    model = adapted(**TARGETS[targets])
    with torch.no_grad():
        expected = model(ids).logits
        with model.disable_adapter():
            base = model(ids).logits
        assert (expected - base).abs().max() > 0.1
        merged = model.merge_and_unload()
        assert_close(merged(ids).logits, expected, ROUNDED)
        merged.save_pretrained(tmp_path, max_shard_size=shard_size)
        assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "60KB")
        loaded, info = KimiK3ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert_close(loaded.eval()(ids).logits, expected, ROUNDED)


@pytest.mark.parametrize("targets", TARGETS)
def test_saved_adapter_gives_the_same_numbers_on_a_reloaded_base(tmp_path: Path, ids: Tensor, targets: str) -> None:
    """S50: adapter names that resolve to nothing were skipped silently."""
    model = adapted(**TARGETS[targets])
    with torch.no_grad():
        expected = model(ids).logits
    tiny_model(**CONFUSABLE).save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    saved, loaded = adapter(model), adapter(again)
    assert saved.keys() == loaded.keys()
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor), name
    with torch.no_grad():
        assert_close(again(ids).logits, expected, ROUNDED)


def trainer(folder: Path, model: nn.Module, ids: Tensor, **arguments: Any) -> Trainer:
    rows = random_ids(tiny_model().config, 12, 9, seed=4)
    defaults = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    data = [{"input_ids": row, "labels": row} for row in rows]
    return Trainer(model, TrainingArguments(**(defaults | arguments)), train_dataset=data, eval_dataset=data)


def losses(run: Trainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def test_resumed_adapter_training_is_straight_training(tmp_path: Path, ids: Tensor) -> None:
    """S50: the loss jumped after resuming, because the experts' adapters began from nothing."""
    straight = trainer(tmp_path / "straight", adapted(trained=False, **TARGETS["both"]), ids)
    straight.train()
    part = trainer(
        tmp_path / "parts",
        adapted(trained=False, **TARGETS["both"]),
        ids,
        max_steps=3,
        save_strategy="steps",
        save_steps=3,
    )
    part.train()
    resumed = trainer(tmp_path / "parts", adapted(seed=5, trained=False, **TARGETS["both"]), ids)
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    assert losses(resumed)[-1] == losses(straight)[-1]
    expected, actual = adapter(straight.model), adapter(resumed.model)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def test_recomputation_under_lora(ids: Tensor) -> None:
    """Inputs of the checkpointed layers need no gradient here: the reentrant kind must be asked for explicitly."""
    found = []
    for recompute in (False, True):
        model = adapted(**TARGETS["both"]).train()
        freeze_selection_bias(model)
        if recompute:
            model.get_base_model().activation_checkpointing_enable({"use_reentrant": False})
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert_gradients_close(found[1], found[0])


def test_the_model_without_its_adapter_is_the_reference_of_preference_training(ids: Tensor) -> None:
    """S48: `target_parameters` allows one adapter per model; switched off it is the reference policy."""
    model = adapted(**TARGETS["both"])
    with torch.no_grad():
        base = tiny_model(**CONFUSABLE)(ids).logits
        on = model(ids).logits
        with model.disable_adapter():
            assert_close(model(ids).logits, base, ROUNDED)
        assert torch.equal(model(ids).logits, on)
    # Two steps of a preference loss: log-probability above the reference up for one text, down for another.
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    chosen, rejected = ids[:1], ids[1:]

    def score(text: Tensor) -> Tensor:
        return -model(input_ids=text, labels=text).loss

    margins = []
    for _ in range(3):
        with torch.no_grad(), model.disable_adapter():
            reference = score(chosen) - score(rejected)
        margin = score(chosen) - score(rejected) - reference
        margins.append(margin.item())
        optimizer.zero_grad()
        (-nn.functional.logsigmoid(margin)).backward()
        optimizer.step()
    assert margins[0] < margins[1] < margins[2]


def test_second_adapter_on_the_same_experts(ids: Tensor) -> None:
    """S48: preference trainers add a reference adapter; two on the same parameters must stay two."""
    model = adapted()
    with torch.no_grad():
        first = model(ids).logits
        base = tiny_model(**CONFUSABLE)(ids).logits
        model.add_adapter("reference", lora_config())
        assert torch.equal(model(ids).logits, first)
        model.set_adapter("reference")
        assert_close(model(ids).logits, base, ROUNDED)  # B = 0
        model.set_adapter("default")
        assert torch.equal(model(ids).logits, first)


def test_generation_with_an_adapter_is_that_of_the_merged_model(ids: Tensor) -> None:
    """Decoding moves `kv_b_proj` over to the query, by its weight: an adapter around it must not get lost."""
    model = adapted(**TARGETS["both"])
    greedy = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    written = model.generate(input_ids=ids, **greedy)
    assert torch.equal(written, model.merge_and_unload().generate(ids, **greedy))


def biases(model: nn.Module) -> Tensor:
    return torch.stack([router.e_score_correction_bias for _, router in balanced_routers(model)]).clone()


def with_second_adapter() -> PeftModel:
    """Adapters "default" and "second" on the same targets, both with an effect."""
    model = adapted(**TARGETS["both"])
    model.add_adapter("second", lora_config(**TARGETS["both"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B.second" in name:
                parameter.normal_(std=0.3)
    return model


def test_several_adapters_are_switched_saved_and_deleted_one_by_one(tmp_path: Path, ids: Tensor) -> None:
    model = with_second_adapter()
    with torch.no_grad():
        expected = {}
        for name in ("default", "second"):
            model.set_adapter(name)
            expected[name] = model(ids).logits
        assert (expected["default"] - expected["second"]).abs().max() > 0.1
        model.save_pretrained(tmp_path)

        again = PeftModel.from_pretrained(tiny_model(**CONFUSABLE), tmp_path)
        again.load_adapter(tmp_path / "second", "second")
        again.eval()
        for name in ("default", "second", "default"):
            again.set_adapter(name)
            assert_close(again(ids).logits, expected[name], ROUNDED, what=name)
        again.set_adapter("second")
        again.delete_adapter("default")
        assert_close(again(ids).logits, expected["second"], ROUNDED)


def test_two_active_adapters_are_merged_together_and_what_peft_cannot_do_is_refused(ids: Tensor) -> None:
    model = with_second_adapter()
    with torch.no_grad():
        alone = model(ids).logits
        with pytest.raises(ValueError, match=r"does not support targeting nn\.Parameter"):
            model.add_weighted_adapter(["default", "second"], [0.5, 0.5], "third", combination_type="linear")
        model.base_model.set_adapter(["default", "second"])
        expected = model(ids).logits
        assert (expected - alone).abs().max() > 0.1
        assert_close(model.merge_and_unload()(ids).logits, expected, ROUNDED)
    with pytest.raises(ValueError, match="does not support mixed adapter batches"):
        adapted()(ids, adapter_names=["default", "default"])


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_merged_is_adapted_on_every_backend_and_unmerging_gives_the_base_back(ids: Tensor, experts: str) -> None:
    model = adapted(**TARGETS["both"])
    model.get_base_model().set_experts_implementation(experts)
    base = {name: p.clone() for name, p in model.named_parameters() if "lora_" not in name}
    with torch.no_grad():
        expected = model(ids).logits
        model.merge_adapter()
        assert_close(model(ids).logits, expected, ROUNDED)
        merged = {name: p.clone() for name, p in model.named_parameters() if name in base}
        model.unmerge_adapter()
        assert_close(model(ids).logits, expected, ROUNDED)
    changed = {name for name, tensor in merged.items() if not torch.equal(tensor, base[name])}
    assert any(".experts." in name for name in changed) and any("q_proj" in name for name in changed)
    for name, tensor in base.items():
        now = model.get_parameter(name)
        # A sum and a difference, each rounded once, to half a unit in the last place of at most |sum|.
        largest = torch.maximum(tensor.abs(), merged[name].abs()).max().item()
        assert (now - tensor).abs().max().item() <= torch.finfo(torch.float32).eps * largest, name


def test_training_adapters_leaves_base_and_bias_alone_unless_balancing_is_asked_for(
    tmp_path: Path, ids: Tensor
) -> None:
    found = {}
    for balance in (False, True):
        model = adapted(trained=False, **TARGETS["both"])
        base = {name: p.clone() for name, p in model.named_parameters() if "lora_" not in name}
        before = biases(model)
        run = trainer(tmp_path / str(balance), model, ids)
        if balance:
            run.add_callback(QuantileBalancingCallback())
        run.train()
        assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in base.items())
        assert all(tensor.any() for name, tensor in adapter(model).items() if "lora_B" in name)
        found[balance] = torch.equal(biases(model), before)
    assert found == {False: True, True: False}


@pytest.mark.parametrize("save_strategy", ["steps", "best"])
def test_balanced_adapters_resume_and_reload_with_their_bias(tmp_path: Path, ids: Tensor, save_strategy: str) -> None:
    """PEFT saves trained weights only: without its bias an adapter would run with the routing of the base."""

    def run(folder: str, steps: int, seed: int = 0) -> Trainer:
        arguments: dict[str, Any] = {"save_strategy": save_strategy, "save_steps": 3}
        if save_strategy == "best":
            arguments |= {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "loss"}
        model = adapted(seed=seed, trained=False, **TARGETS["both"])
        made = trainer(tmp_path / folder, model, ids, max_steps=steps, per_device_train_batch_size=4, **arguments)
        made.add_callback(QuantileBalancingCallback())
        return made

    straight = run("straight", 4)
    straight.train()
    run("parts", 3).train()
    checkpoint = tmp_path / "parts" / "checkpoint-3"
    check_checkpoint(checkpoint)
    resumed = run("parts", 4, seed=5)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert torch.equal(biases(resumed.model), biases(straight.model))
    expected, actual = adapter(straight.model), adapter(resumed.model)
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())

    straight.save_model(str(tmp_path / "saved"))
    save_selection_bias(straight.model, tmp_path / "saved")
    again = PeftModel.from_pretrained(tiny_model(**CONFUSABLE), tmp_path / "saved")
    load_selection_bias(again, tmp_path / "saved")
    with torch.no_grad():
        assert_close(again.eval()(ids).logits, straight.model.eval()(ids).logits, ROUNDED)
    merged = straight.model.merge_and_unload()
    assert torch.equal(biases(merged), biases(again))

    (checkpoint / "selection_bias.safetensors").unlink()
    with pytest.raises(ValueError, match=r"checkpoint-3 must hold selection_bias\.safetensors, got no such file"):
        run("parts", 4).train(resume_from_checkpoint=str(checkpoint))


def test_bias_of_another_model_is_refused(tmp_path: Path) -> None:
    save_selection_bias(tiny_model(), tmp_path)
    with pytest.raises(ValueError, match=r"must hold the biases .* got .*\(8,\)"):
        load_selection_bias(tiny_model(num_experts=4), tmp_path)


def test_adapters_on_experts_that_were_loaded_from_mxfp4(ids: Tensor) -> None:
    """Packed experts are ordinary parameters once loaded: adapters train on them and merge into them."""
    base = load_golden_model("text_mxfp4")
    ids = random_ids(base.config)
    model = get_peft_model(base, LoraConfig(r=2, lora_alpha=4, **lora_targets(base.config)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    found = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        found.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert found[0] > found[1] > found[2]
    with torch.no_grad():
        expected = model(ids).logits
        assert_close(model.merge_and_unload()(ids).logits, expected, ROUNDED)


def test_adapters_on_4_bit_linear_maps(tmp_path: Path, ids: Tensor) -> None:
    """QLoRA with bitsandbytes: linear maps are packed, experts stay as loaded; the forward is that of the unpacked."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    # Quantisation blocks of 64 weights want rows that they divide.
    sizes = {"hidden_size": 64, "q_lora_rank": 32, "kv_lora_rank": 32, **CONFUSABLE}
    tiny_model(**sizes).save_pretrained(tmp_path)
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    packed = KimiK3ForCausalLM.from_pretrained(tmp_path, quantization_config=quantization, dtype=torch.float32).eval()
    unpacked = KimiK3ForCausalLM.from_pretrained(tmp_path).eval()
    layers = [name for name, module in packed.named_modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    assert {name.rpartition(".")[2] for name in layers} == set(lora_targets(packed.config)["target_modules"])
    with torch.no_grad():
        for name in layers:
            weight = packed.get_submodule(name).weight
            unpacked.get_submodule(name).weight.copy_(
                bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
            )
        assert_close(packed(ids).logits, unpacked(ids).logits, ROUNDED)
        greedy = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
        assert torch.equal(packed.generate(ids, **greedy), unpacked.generate(ids, **greedy))

    found = []
    for base in (unpacked, prepare_model_for_kbit_training(packed, use_gradient_checkpointing=False)):
        torch.manual_seed(0)
        model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, **lora_targets(base.config)))
        assert biases(model).dtype == torch.float32
        model(input_ids=ids, labels=ids).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert len(found[0]) == 2 * (len(layers) + 2 * 4)  # A and B; two parameters of four sparse layers
    assert_gradients_close(found[1], found[0])
