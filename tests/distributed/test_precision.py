# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""FSDP2 in bf16: what stays float32, in memory, in the forward and in gradients."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deltalatent.modeling.precision import KeepFloat32
from deltalatent.training import keep_float32
from tests.distributed import jobs
from tests.distributed.launch import run_ranks

FLOAT32 = re.compile(r".*(A_log|dt_bias|conv1d\.weight|o_norm\.weight)")
ROUTER = re.compile(r".*mlp\.gate\.weight")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    jobs.make_model().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def observed(checkpoint: Path) -> dict[str, dict[str, Any]]:
    first, second = run_ranks(2, jobs.mixed_precision, checkpoint)
    assert first == second
    return first


def test_the_pattern_names_what_the_modules_declare() -> None:
    model = jobs.make_model()
    declared = {
        f"{name}.{tensor}"
        for name, module in model.named_modules()
        if isinstance(module, KeepFloat32)
        for tensor in module.float32_tensors
    }
    parameters = {name for name, _ in model.named_parameters()}
    assert {name for name in parameters if FLOAT32.fullmatch(name)} == declared & parameters


@pytest.mark.parametrize("way", ["bf16 weights", "bf16 compute", "accelerate"])
def test_float32_tensors_stay_float32(way: str, observed: dict[str, dict[str, Any]]) -> None:
    seen = observed[way]
    is_stored_in_bf16 = way == "bf16 weights"
    for name, stored in seen["stored"].items():
        # The router computes in float32; its weights are float32 unless the model's are stored in bf16.
        stays = bool(FLOAT32.fullmatch(name)) or (not is_stored_in_bf16 and bool(ROUTER.fullmatch(name)))
        assert stored == (torch.bfloat16 if is_stored_in_bf16 and not stays else torch.float32), name
        assert seen["used"][name] == (torch.float32 if stays else torch.bfloat16), name
        assert seen["gradient"][name] == stored, name


def test_losses_are_those_of_one_process_up_to_bf16(checkpoint: Path, observed: dict[str, dict[str, Any]]) -> None:
    """Within what one process deviates by in bf16, and twice that, from float32."""
    batch = jobs.make_batch(0)
    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = jobs.KimiK3ForCausalLM.from_pretrained(checkpoint, dtype=dtype).train()
        losses[dtype] = model(**batch, num_items_in_batch=(batch["labels"] != -100).sum()).loss.item()
    band = 2 * max(abs(losses[torch.bfloat16] - losses[torch.float32]), 2**-8 * losses[torch.float32])
    for way, seen in observed.items():
        assert abs(seen["loss"] - losses[torch.float32]) < band, way
        assert seen["loss"] != losses[torch.float32], way  # or it did not compute in bf16


def test_accelerate_trains_as_one_process_does(checkpoint: Path, tmp_path: Path) -> None:
    model = jobs.load(checkpoint)
    jobs.train(model, jobs.muon(model), steps=3)
    for found in run_ranks(2, jobs.train_sharded_by_accelerate, checkpoint, tmp_path):
        jobs.assert_weights_equal(found, jobs.weights(model))
    names = load_file(checkpoint / "model.safetensors").keys()
    assert load_file(tmp_path / "model.safetensors").keys() == names  # the released layout
    jobs.assert_weights_equal(jobs.weights(jobs.load(tmp_path)), jobs.weights(model))


def test_nothing_happens_without_fsdp() -> None:
    class Accelerator:
        is_fsdp2 = False

    model = jobs.make_model()
    assert keep_float32(Accelerator(), model) is model


@pytest.mark.parametrize(
    ("loading", "ranks", "message"),
    [(True, 2, "`cpu_ram_efficient_loading` must be off"), (False, 8, "must have a row for each of the 8 ranks")],
)
def test_what_accelerate_cannot_do_is_refused(loading: bool, ranks: int, message: str) -> None:
    class Plugin:
        cpu_ram_efficient_loading = loading

    class State:
        fsdp_plugin = Plugin()

    class Accelerator:
        is_fsdp2, torch_device_mesh, num_processes, mixed_precision, state = True, None, ranks, "no", State()

    with pytest.raises(ValueError, match=message):
        keep_float32(Accelerator(), jobs.make_model())
