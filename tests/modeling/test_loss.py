# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Head and loss: without logits in training, with the same numbers; logits wherever somebody may want them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from deltalatent.kernels.linear_cross_entropy import api
from tests.testing_common import assert_close, assert_gradients_close, gradients, random_ids, tiny_model


def labelled(model: nn.Module, length: int = 19) -> dict[str, Tensor]:
    """Token ids, and labels of which some are missing."""
    ids = random_ids(model.config, length=length)
    labels = ids.clone()
    labels[0, :7] = labels[1, 11] = -100
    return {"input_ids": ids, "labels": labels}


def compare(model: nn.Module, monkeypatch: pytest.MonkeyPatch, **inputs: Any) -> None:
    """Loss and gradients with and without logits, in chunks of three tokens."""
    monkeypatch.setattr(api, "CHUNK_LOGITS", 3 * model.config.vocab_size)
    skipping, whole = (model(**inputs, skip_logits=skip) for skip in (True, False))
    assert skipping.logits is None and whole.logits is not None
    assert_close(skipping.loss, whole.loss, 1e-6)
    assert_gradients_close(gradients(model, skipping.loss), gradients(model, whole.loss))


@pytest.mark.parametrize("variant", ["default", "dense"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_loss_without_logits_is_the_loss_with_logits(variant, tied, monkeypatch) -> None:
    model = tiny_model(variant, tie_word_embeddings=tied)
    compare(model, monkeypatch, **labelled(model))


@pytest.mark.parametrize("num_items", [50, torch.tensor(50)], ids=["int", "tensor"])
def test_sum_over_the_items_of_the_whole_step(num_items, monkeypatch) -> None:
    model = tiny_model("dense")
    inputs = labelled(model)
    compare(model, monkeypatch, **inputs, num_items_in_batch=num_items)
    targets = (inputs["labels"][:, 1:] != -100).sum()
    mean, total = (model(**inputs, num_items_in_batch=n, skip_logits=True).loss for n in (None, num_items))
    assert_close(total, mean * targets / 50, 1e-6)


def test_labels_that_are_shifted_already(monkeypatch) -> None:
    """What context-parallel training passes."""
    model = tiny_model("dense")
    inputs = labelled(model)
    shifted = nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    compare(model, monkeypatch, **inputs, shift_labels=shifted)
    losses = [model(**inputs, shift_labels=labels, skip_logits=True).loss for labels in (None, shifted)]
    assert_close(*losses, 1e-7)


def test_logits_to_keep_keeps_labels_too(monkeypatch) -> None:
    model = tiny_model("dense")
    inputs = labelled(model)
    inputs["labels"] = inputs["labels"][:, -5:]
    compare(model, monkeypatch, **inputs, logits_to_keep=5)


def test_who_gets_logits() -> None:
    model = tiny_model("dense")
    inputs = labelled(model)

    def has_logits(**options: Any) -> bool:
        return model(**inputs, **options).logits is not None

    assert has_logits(), "evaluation needs them"
    assert not has_logits(skip_logits=True)
    model.train()
    assert not has_logits()
    assert has_logits(skip_logits=False)
    with torch.no_grad():
        assert has_logits(), "no training step"
    del inputs["labels"]
    assert has_logits() and has_logits(skip_logits=True), "there is nothing else to return"
    inputs = labelled(model)
    model.skip_logits = False
    assert has_logits() and not has_logits(skip_logits=True)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that an operator returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


def test_a_training_step_never_has_logits_of_all_tokens(monkeypatch) -> None:
    """With a vocabulary that outweighs everything else, the largest tensor is the head's gradient."""
    model = tiny_model("dense", vocab_size=20_000, num_hidden_layers=2).train()
    inputs = labelled(model, length=64)
    monkeypatch.setattr(api, "CHUNK_LOGITS", 16 * 20_000)
    sizes = []
    for skip in (True, False):
        with LargestTensor() as largest:
            model(**inputs, skip_logits=skip).loss.backward()
        sizes.append(largest.numel)
    assert sizes == [20_000 * 32, 20_000 * 2 * 64]


def test_a_head_with_an_adapter_is_called(monkeypatch) -> None:
    model = tiny_model("dense")
    adapted = get_peft_model(model, LoraConfig(target_modules=["lm_head"], init_lora_weights=False))
    inputs = labelled(model)
    compare(adapted, monkeypatch, **inputs)
    with adapted.disable_adapter():
        base = adapted(**inputs, skip_logits=True).loss
    assert abs(adapted(**inputs, skip_logits=True).loss - base) > 1e-3


def test_hooks_of_the_head_run(monkeypatch) -> None:
    model = tiny_model("dense").train()
    model.lm_head.register_forward_hook(lambda module, args, output: 0 * output)
    assert_close(model(**labelled(model)).loss, torch.tensor(float(model.config.vocab_size)).log(), 1e-6)


def test_a_loss_of_your_own_gets_logits() -> None:
    model = tiny_model("dense").train()
    model.loss_function = lambda logits, labels, **kwargs: logits.square().mean()
    output = model(**labelled(model))
    assert output.logits is None
    assert_close(output.loss, model(labelled(model)["input_ids"]).logits.square().mean(), 1e-6)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_labels_of_another_shape_are_named(training: bool) -> None:
    model = tiny_model("dense").train(training)
    ids = random_ids(model.config)
    with pytest.raises(ValueError, match=r"`labels` must have shape \(2, 19\).*got \(2, 18\)"):
        model(ids, labels=ids[:, 1:])


def test_a_training_step_under_autocast_and_in_bf16() -> None:
    """The rounding of the logits is that of the head, whichever way the loss takes."""
    model = tiny_model("dense").train()
    inputs = labelled(model)
    with torch.autocast("cpu", torch.bfloat16):
        losses = [model(**inputs, skip_logits=skip).loss for skip in (True, False)]
    assert losses[0].dtype == torch.float32
    assert_close(*losses, 1e-5)
    model.to(torch.bfloat16)
    losses = [model(**inputs, skip_logits=skip).loss for skip in (True, False)]
    assert_close(*losses, 1e-5)


def test_a_sharded_head_is_gathered_for_the_loss(tmp_path: Path) -> None:
    """FSDP2 with the head as a group of its own: the weight exists only during calls of the module."""
    model = tiny_model("dense").train()
    inputs = labelled(model)
    expected = gradients(model, model(**inputs).loss)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        fully_shard(model.lm_head, mesh=mesh)
        fully_shard(model, mesh=mesh)
        output = model(**inputs)
        output.loss.backward()
        assert output.logits is None
        found = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    finally:
        torch.distributed.destroy_process_group()
    assert_gradients_close(found, expected)
