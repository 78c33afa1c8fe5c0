# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Muon per head and per expert beside AdamW: what goes where, what a step does, resuming, the Trainer.

Oracles: singular value decompositions in float64, PyTorch's own `Muon` and `AdamW`, and the optimizer itself on each
head or expert as a matrix of its own.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from deltalatent import KimiK3ForCausalLM
from deltalatent.training import MuonAdamW, QuantileBalancingCallback, newton_schulz, parameter_groups
from tests.convergence.test_mini_training import new_model, text, unigram_entropy
from tests.equivalence import ROUNDED
from tests.testing_common import VARIANTS, assert_close, random_ids, tiny_config, tiny_model
from tests.vision.vision_testing import tiny_multimodal_model

CONVERGENT = (15 / 8, -10 / 8, 3 / 8)  # fixed point 1, of third order
EXACT = 1e-12  # relative, between two evaluations in float64

# Last two parts of a parameter's name. Everything that is not here must be stepped by AdamW.
MUON = {
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.g_proj",
    "self_attn.g_a_proj", "self_attn.g_b_proj", "self_attn.f_a_proj", "self_attn.f_b_proj", "self_attn.b_proj",
    "self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    "shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj",
    "mlp.routed_expert_down_proj", "mlp.routed_expert_up_proj", "experts.gate_up_proj", "experts.down_proj",
}  # fmt: skip
DECAYED_BY_ADAMW = {"model.embed_tokens", "lm_head", "mlp.gate"}


def kind(name: str) -> str:
    return ".".join(name.removesuffix(".weight").split(".")[-2:])


def matrix(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def run(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], value: Tensor, grads: list[Tensor]) -> Tensor:
    """The parameter after one step per gradient."""
    weight = nn.Parameter(value.clone())
    optimizer = make([weight])
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    return weight.detach()


def muon(row_blocks: tuple[int, ...] | None = None, **options: Any) -> Callable[..., MuonAdamW]:
    group = {"algorithm": "muon", "row_blocks": row_blocks, "weight_decay": 0.1}
    options = {"lr": 0.02, "ns_dtype": torch.float64} | options
    return lambda params: MuonAdamW([{"params": params, **group}], **options)


# Groups


def named_parameters(model: nn.Module, group: dict[str, Any]) -> list[tuple[str, nn.Parameter]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [(names[parameter], parameter) for parameter in group["params"]]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_is_in_the_group_where_it_belongs_and_in_no_other(variant: str) -> None:
    model = tiny_model(variant)
    groups = parameter_groups(model, weight_decay=0.1)
    named = [(name, tensor, group) for group in groups for name, tensor in named_parameters(model, group)]
    assert sorted(name for name, _, _ in named) == sorted(name for name, _ in model.named_parameters())
    assert len({id(tensor) for _, tensor, _ in named}) == len(named)
    for name, tensor, group in named:
        is_matrix = kind(name) in MUON
        assert group["algorithm"] == ("muon" if is_matrix else "adamw"), name
        assert group["weight_decay"] == (0.1 if is_matrix or kind(name) in DECAYED_BY_ADAMW else 0.0), name
        assert tensor.ndim > 1 or group["weight_decay"] == 0.0, name


def test_heads_experts_and_projections_that_share_a_tensor_are_separate_matrices() -> None:
    """KDA: 3 heads of 8. MLA: 2 heads, key part 16 and shared part 8, values 12, latent 24. Experts: width 16."""
    model = tiny_model("uneven_heads")
    blocks = {
        kind(name): group["row_blocks"]
        for group in parameter_groups(model)
        for name, _ in named_parameters(model, group)
    }
    expected = {
        "self_attn.q_proj": (8,),
        "self_attn.k_proj": (8,),
        "self_attn.v_proj": (8,),
        "self_attn.q_b_proj": (24,),
        "self_attn.kv_b_proj": (16, 12),
        "self_attn.kv_a_proj_with_mqa": (24, 8),
        "experts.gate_up_proj": (16, 16),
    }
    assert {name: rows for name, rows in blocks.items() if rows is not None} == expected
    model = tiny_model("full_rank_query")
    queries = parameter_groups(model)
    rows = {name: group["row_blocks"] for group in queries for name, _ in named_parameters(model, group)}
    assert rows["model.layers.3.self_attn.q_proj.weight"] == (24,)  # MLA
    assert rows["model.layers.0.self_attn.q_proj.weight"] == (16,)  # KDA


def test_frozen_parameters_are_left_out_and_foreign_ones_go_to_adamw() -> None:
    model = tiny_model()
    model.value_head = nn.Linear(32, 4)
    model.lm_head.requires_grad_(False)
    found = {
        name: (group["algorithm"], group["weight_decay"])
        for group in parameter_groups(model, 0.3)
        for name, _ in named_parameters(model, group)
    }
    assert found["value_head.weight"] == ("adamw", 0.3)
    assert found["value_head.bias"] == ("adamw", 0.0)
    assert "lm_head.weight" not in found
    with pytest.raises(ValueError, match="trainable parameters, got KimiK3ForCausalLM with none"):
        parameter_groups(model.requires_grad_(False))


def test_the_groups_serve_other_optimizers() -> None:
    optimizer = torch.optim.AdamW(parameter_groups(tiny_model(), 0.2), lr=1e-3)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.2, 0.0}


# Newton-Schulz


SHAPES = [(16, 16), (5, 40), (40, 5), (1, 7)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_newton_schulz_moves_singular_values_by_the_polynomial(shape: tuple[int, int]) -> None:
    grads = matrix(3, 2, *shape)
    u, s, vh = torch.linalg.svd(grads, full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    expected = u * s[..., None, :] @ vh
    assert_close(newton_schulz(grads, dtype=torch.float64), expected, EXACT)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_newton_schulz_with_convergent_coefficients_finds_the_polar_factor(shape: tuple[int, int]) -> None:
    u, _, vh = torch.linalg.svd(matrix(*shape), full_matrices=False)
    # The smallest singular value grows by 15/8 per step at first, then the error is cubed.
    found = newton_schulz(matrix(*shape), steps=30, coefficients=CONVERGENT, dtype=torch.float64)
    assert_close(found, u @ vh, 1e-10)


def test_default_coefficients_leave_singular_values_near_one() -> None:
    """What the docstring promises of [0.003, 1]; the smallest of these is checked to be in that range."""
    grads = matrix(24, 40)
    singular = torch.linalg.svdvals(grads)
    assert (singular / singular.square().sum().sqrt()).min() > 0.003
    after = torch.linalg.svdvals(newton_schulz(grads, dtype=torch.float64))
    assert 0.68 <= after.min() and after.max() <= 1.21


def test_newton_schulz_of_zeros_is_zero_and_does_not_touch_other_matrices() -> None:
    """An expert without a token has a zero gradient."""
    grads = torch.stack((torch.zeros(4, 6), matrix(4, 6, dtype=torch.float32)))
    found = newton_schulz(grads, dtype=torch.float32)
    assert not found[0].any()
    assert_close(found[1], newton_schulz(grads[1], dtype=torch.float32), ROUNDED)


# Steps


GRADS = [matrix(24, 10, seed=seed) for seed in (1, 2, 3)]


@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "plain_momentum"])
@pytest.mark.parametrize("shape", [(24, 10), (10, 24)], ids=["tall", "wide"])
def test_a_whole_matrix_is_stepped_as_by_the_muon_of_pytorch(shape: tuple[int, int], nesterov: bool) -> None:
    """Which always works in bf16: its distance from our float64 run is the scale for our own bf16 run."""
    value = matrix(*shape).float()
    grads = [grad.reshape(shape).float() for grad in GRADS]
    exact = run(muon(nesterov=nesterov), value.double(), [grad.double() for grad in grads])
    theirs = run(
        lambda params: torch.optim.Muon(
            params, lr=0.02, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn="match_rms_adamw"
        ),
        value,
        grads,
    )
    ours = run(muon(nesterov=nesterov, ns_dtype=torch.bfloat16), value, grads)
    update = (exact - value).abs().max()
    error = (theirs - exact).abs().max()
    assert error < 0.1 * update
    assert (ours - exact).abs().max() <= 2 * error
    single = run(muon(nesterov=nesterov, ns_dtype=torch.float32), value, grads)
    assert_close(single - value, exact - value, ROUNDED)


@pytest.mark.parametrize(
    ("shape", "row_blocks"),
    [
        pytest.param((24, 10), (8,), id="three_heads"),
        pytest.param((24, 10), (5, 7), id="two_heads_of_keys_and_values"),
        pytest.param((24, 10), (20, 4), id="latent_and_shared_key"),
        pytest.param((4, 6, 10), None, id="four_experts"),
        pytest.param((4, 6, 10), (3, 3), id="gates_and_ups_of_four_experts"),
    ],
)
@pytest.mark.parametrize("batch_elements", [2**26, 130], ids=["one_batch", "several_batches"])
def test_a_step_is_that_of_each_block_as_its_own_matrix(
    shape: tuple[int, ...], row_blocks: tuple[int, ...] | None, batch_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blocks(tensor: Tensor) -> list[Tensor]:
        matrices = list(tensor) if tensor.ndim == 3 else [tensor]
        if row_blocks is None:
            return matrices
        heights = row_blocks * (shape[-2] // sum(row_blocks))
        return [block for one in matrices for block in one.split(heights)]

    monkeypatch.setattr("deltalatent.training.optimizer.BATCH_ELEMENTS", batch_elements)
    value, grads = matrix(*shape), [grad.reshape(shape) for grad in GRADS]
    together = blocks(run(muon(row_blocks), value, grads))
    for i, block in enumerate(blocks(value)):
        alone = run(muon(), block, [blocks(grad)[i] for grad in grads])
        assert_close(together[i], alone, EXACT)
    columns = shape[-1]
    coupled = run(muon(), value.reshape(-1, columns), [grad.reshape(-1, columns) for grad in grads])
    assert (torch.cat(together) - coupled).abs().max() > 1e-3  # the split matters


def test_heads_with_small_gradients_move_as_much_as_others() -> None:
    """Why the report splits heads: as one matrix, the loud head has the update nearly to itself."""
    grad = matrix(16, 32)
    grad[8:] *= 1e-3
    rms = {
        rows: [
            block.square().mean().sqrt().item() / 0.02
            for block in run(muon(rows), torch.zeros(16, 32).double(), [grad]).split(8)
        ]
        for rows in ((8,), None)
    }
    # rho times singular values in [0.68, 1.21]
    assert all(0.2 * 0.68 <= value <= 0.2 * 1.21 for value in rms[(8,)])
    assert rms[None][1] < 0.5 * rms[None][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_other_parameters_are_stepped_as_by_adamw_of_pytorch(dtype: torch.dtype) -> None:
    options = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-6}
    groups = {"algorithm": "adamw", "weight_decay": 0.1}
    value, grads = matrix(24, 10, dtype=dtype), [grad.to(dtype) for grad in GRADS]
    ours = run(lambda params: MuonAdamW([{"params": params, **groups}], **options), value, grads)
    theirs = run(lambda params: torch.optim.AdamW(params, weight_decay=0.1, **options), value, grads)
    assert torch.equal(ours, theirs)


# Half precision, resuming, training


def train(model: KimiK3ForCausalLM, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        ids = random_ids(model.config, 2, 12, seed=step)
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_a_bf16_parameter_is_the_rounded_float32_one(algorithm: str) -> None:
    """After one step to half an ulp; later it may be as far off as its own roundings added up."""
    group = {"algorithm": algorithm, "row_blocks": (8,), "weight_decay": 0.1}
    value = matrix(24, 10, dtype=torch.bfloat16)
    grads = [grad.bfloat16() for grad in GRADS]

    def make(params: list[nn.Parameter]) -> MuonAdamW:
        return MuonAdamW([{"params": params, **group}], lr=0.02, ns_dtype=torch.float32)

    wide = [grad.float() for grad in grads]
    assert torch.equal(run(make, value, grads[:1]), run(make, value.float(), wide[:1]).bfloat16())
    error = (run(make, value, grads).float() - run(make, value.float(), wide)).abs()
    assert (error <= len(grads) * 2**-8 * value.float().abs().clamp(min=0.1)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_run_resumed_from_its_state_is_the_straight_run_to_the_bit(dtype: torch.dtype) -> None:
    def start(seed: int) -> tuple[KimiK3ForCausalLM, MuonAdamW]:
        model = tiny_model(seed=seed).to(dtype).train()
        return model, MuonAdamW(parameter_groups(model), lr=0.01, momentum=0.9)

    model, optimizer = start(0)
    train(model, optimizer, 2)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    straight = train(model, optimizer, 2, first=2)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed_model, resumed = start(7)
    train(resumed_model, resumed, 1)  # leaves a state behind that must be replaced
    resumed_model.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    floats = [value.dtype for state in resumed.state.values() for value in state.values()]
    assert set(floats) == {torch.float32}
    assert train(resumed_model, resumed, 2, first=2) == straight
    for name, tensor in model.state_dict().items():
        assert torch.equal(resumed_model.state_dict()[name], tensor), name


def test_learns_real_text_in_twenty_five_steps() -> None:
    """Below the entropy of the bytes' frequencies, which no guessing reaches."""
    model = new_model()
    optimizer = MuonAdamW(parameter_groups(model, weight_decay=0.0), lr=2e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    assert {group["lr"] for group in optimizer.param_groups} == {2e-2 / 5}
    data, generator = text(), torch.Generator().manual_seed(1)
    losses = []
    for _ in range(25):
        starts = torch.randint(0, len(data) - 64, (8,), generator=generator)
        ids = torch.stack([data[start : start + 64] for start in starts.tolist()])
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    assert {group["lr"] for group in optimizer.param_groups} == {2e-2}
    assert losses[0] > math.log(256)
    assert sum(losses[-5:]) / 5 < unigram_entropy()


def test_the_trainer_takes_it_schedules_it_and_resumes_it(tmp_path: Path) -> None:
    rows = random_ids(tiny_config(), 12, 9, seed=4)

    def trainer(folder: str, seed: int = 0, **arguments: Any) -> Trainer:
        model = tiny_model(seed=seed)
        defaults = {"max_steps": 3, "lr_scheduler_type": "linear", "logging_steps": 1, "save_strategy": "no"}
        fixed = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "per_device_train_batch_size": 2}
        return Trainer(
            model,
            TrainingArguments(str(tmp_path / folder), **(defaults | arguments), **fixed),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            optimizers=(MuonAdamW(parameter_groups(model), lr=0.01), None),
            callbacks=[QuantileBalancingCallback()],
        )

    def logs(run: Trainer) -> list[tuple[float, float]]:
        return [(entry["loss"], entry["learning_rate"]) for entry in run.state.log_history if "loss" in entry]

    straight = trainer("straight", save_strategy="steps", save_steps=2)
    straight.train()
    rates = [rate for _, rate in logs(straight)]
    assert rates[0] == 0.01 and rates[0] > rates[1] > rates[2] > 0
    assert len({group["lr"] for group in straight.optimizer.param_groups}) == 1
    resumed = trainer("resumed", seed=5)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))
    assert logs(resumed)[-1] == logs(straight)[-1]
    for (name, expected), actual in zip(straight.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(actual, expected), name


def test_parameters_without_gradient_stay() -> None:
    weight = nn.Parameter(matrix(24, 10))
    bias = nn.Parameter(matrix(24))
    optimizer = MuonAdamW(
        [{"params": [weight], "algorithm": "muon"}, {"params": [bias], "algorithm": "adamw", "weight_decay": 0.1}]
    )
    assert optimizer.step(lambda: 7.0) == 7.0
    assert torch.equal(weight, matrix(24, 10)) and torch.equal(bias, matrix(24))
    assert not optimizer.state


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "`lr` must be a finite number >= 0, got -1.0"),
        ({"momentum": 1.0}, "`momentum` must be in"),
        ({"ns_steps": 0}, "`ns_steps` must be at least 1"),
        ({"ns_coefficients": (1.0, 2.0)}, "`ns_coefficients` must be three numbers"),
        ({"ns_dtype": torch.float16}, "`ns_dtype` must be None or one of"),
        ({"update_rms": 0.0}, "`update_rms` must be a finite number > 0"),
        ({"betas": (0.9, 1.0)}, "`betas` must be two numbers in"),
        ({"eps": -1e-8}, "`eps` must be a finite number >= 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MuonAdamW(parameter_groups(tiny_model()), **options)


def test_groups_that_do_not_fit_are_refused() -> None:
    weight = nn.Parameter(matrix(24, 10))
    with pytest.raises(ValueError, match=r"got None: pass `parameter_groups\(model\)` instead"):
        MuonAdamW(tiny_model().parameters())
    with pytest.raises(ValueError, match='must be "muon" or "adamw", got \'sgd\''):
        MuonAdamW([{"params": [weight], "algorithm": "sgd"}])
    with pytest.raises(ValueError, match=r"their sum divide the rows of \(24, 10\), got \(5, 4\)"):
        MuonAdamW([{"params": [weight], "algorithm": "muon", "row_blocks": (5, 4)}])
    with pytest.raises(ValueError, match=r"shape \[R, C\] or \[E, R, C\], got \(240,\)"):
        MuonAdamW([{"params": [nn.Parameter(weight.detach().flatten())], "algorithm": "muon"}])
    with pytest.raises(ValueError, match=r"`weight_decay` must be a finite number >= 0, got -0\.1"):
        parameter_groups(tiny_model(), weight_decay=-0.1)
    with pytest.raises(ValueError, match=r"`matrices` must have shape \[..., R, C\], got \(24,\)"):
        newton_schulz(matrix(24))


def test_a_state_of_other_groups_is_refused() -> None:
    saved = MuonAdamW(parameter_groups(tiny_model())).state_dict()
    with pytest.raises(ValueError, match="load the state of an optimizer over the same model"):
        MuonAdamW(parameter_groups(tiny_model("uneven_heads"))).load_state_dict(saved)


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(8, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="gradients must be dense"):
        MuonAdamW([{"params": embedding.parameters(), "algorithm": "adamw"}]).step()


def test_documented_examples_run(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "optimizer.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    model = tiny_model()
    ids = random_ids(model.config)
    names = {
        "model": model,
        "batch": {"input_ids": ids, "labels": ids},
        "args": TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True),
        "train_dataset": [{"input_ids": row, "labels": row} for row in ids],
    }
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)


def test_maps_of_the_tower_and_the_projector_are_matrices_too() -> None:
    model = tiny_multimodal_model()
    groups = parameter_groups(model)
    rows = {
        id(weight): group["row_blocks"]
        for group in groups
        for weight in group["params"]
        if group["algorithm"] == "muon"
    }
    seen = 0
    for part in (model.model.vision_tower, model.model.mm_projector):
        for name, module in part.named_modules():
            if isinstance(module, torch.nn.Linear):
                head = model.config.vision_config.qkv_hidden_size // model.config.vision_config.vt_num_attention_heads
                assert rows[id(module.weight)] == ((head,) if name.endswith("wqkv") else None), name
                seen += 1
    assert seen >= 6


def test_products_are_float32_on_a_cpu_unless_told_otherwise() -> None:
    start = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    found = []
    for options in ({}, {"ns_dtype": torch.float32}, {"ns_dtype": torch.bfloat16}):
        weight = nn.Parameter(start.clone())
        weight.grad = start.sin()
        MuonAdamW([{"params": [weight], "algorithm": "muon"}], **options).step()
        found.append(weight.detach())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
