# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantile balancing in training: Trainer callback, optimizer hook, ranks, wrappers, logs, resuming, refusals."""

from __future__ import annotations

import copy
import re
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainerCallback, TrainingArguments

from deltalatent import KimiK3ForCausalLM, size_config
from deltalatent.modeling.quantile_balancing import QuantileHistogram
from deltalatent.training import (
    QuantileBalancingCallback,
    balanced_routers,
    balancing,
    freeze_selection_bias,
    register_quantile_balancing,
    update_selection_bias,
)
from tests.testing_common import left_padded, random_ids, tiny_config, tiny_model

NUM_LAYERS, NUM_EXPERTS, TOP_K, WIDTH, TOKENS = 2, 8, 2, 6, 16
LOG_KEYS = {f"expert_load/{key}" for key in ("max_violation", "max_violation_worst", "cv", "dead")}


class Router(nn.Module):
    """The least that the balancing side asks of a router."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH))
        self.register_buffer("e_score_correction_bias", torch.zeros(NUM_EXPERTS))
        self.balance = QuantileHistogram(NUM_EXPERTS, TOP_K)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = torch.sigmoid(x.float() @ self.weight.float().T)
        values, ids = (scores + self.e_score_correction_bias).topk(TOP_K + 1, dim=-1)
        return scores, values[:, TOP_K], ids[:, :TOP_K]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts = nn.Parameter(0.3 * torch.randn(NUM_EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scores, cutoff, selected = self.router(x)
        mixed = (scores.gather(1, selected)[..., None] * self.experts[selected]).sum(dim=1)
        return x + torch.tanh(mixed).to(x.dtype), scores, cutoff, selected


class StandIn(nn.Module):
    """Two routed layers on random token vectors; collects as the real model does, outside recomputation.

    ``seen`` keeps the bias of the first router at every forward of its layer, recomputation included, and
    ``collected`` the scores and biases of every micro-batch of the first layer.
    """

    def __init__(self, *, recompute: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.recompute = recompute
        self.seen: list[Tensor] = []
        self.collected: list[tuple[Tensor, Tensor]] = []
        first = self.layers[0].router
        first.register_forward_hook(lambda *_: self.seen.append(first.e_score_correction_bias.clone()))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden, target = x.flatten(0, -2), labels.flatten(0, -2)
        for index, layer in enumerate(self.layers):
            if self.recompute and self.training:
                hidden, scores, cutoff, selected = checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden, scores, cutoff, selected = layer(hidden)
            if self.training and torch.is_grad_enabled():
                bias = layer.router.e_score_correction_bias
                layer.router.balance.add(scores.detach(), cutoff.detach(), bias, None, selected)
                if index == 0:
                    self.collected.append((scores.detach(), bias.clone()))
        return {"loss": (hidden - target).square().mean(), "logits": hidden}


def make_data(size: int = 12, *, skew: float = 1.0, seed: int = 1) -> list[dict[str, Tensor]]:
    """Samples of TOKENS vectors that share a direction, so that the experts begin unbalanced."""
    rng = torch.Generator().manual_seed(seed)
    x = skew * torch.randn(WIDTH, generator=rng) + torch.randn(size, TOKENS, WIDTH, generator=rng)
    return [{"x": sample, "labels": 0.1 * sample} for sample in x]


def make_trainer(path: Path, model: nn.Module, *, callbacks=(), data=None, **arguments) -> Trainer:
    defaults = {
        "output_dir": str(path),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "max_steps": 4,
        "learning_rate": 0.05,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    return Trainer(
        model,
        TrainingArguments(**(defaults | arguments)),
        train_dataset=data or make_data(),
        eval_dataset=make_data(8, skew=9, seed=5),
        callbacks=list(callbacks),
    )


def biases(model: nn.Module) -> Tensor:
    return torch.stack([router.e_score_correction_bias for _, router in balanced_routers(model)]).clone()


# Trainer


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recomputed"])
def test_trainer_updates_once_per_step_from_all_micro_batches(tmp_path: Path, recompute: bool) -> None:
    model = StandIn(recompute=recompute)
    make_trainer(tmp_path, model, callbacks=[QuantileBalancingCallback()]).train()
    assert len(model.collected) == 12  # 4 updates of 3 micro-batches
    assert len(model.seen) == (24 if recompute else 12)  # the layer did run again in the backward

    bias = torch.zeros(NUM_EXPERTS)
    forwards_per_step = len(model.seen) // 4
    for step in range(4):
        # One bias for every forward of the step, recomputation included: it changes after the last backward only.
        for seen in model.seen[step * forwards_per_step : (step + 1) * forwards_per_step]:
            assert torch.equal(seen, bias)
        scores = torch.cat([scores for scores, _ in model.collected[3 * step : 3 * step + 3]])
        joined = QuantileHistogram(NUM_EXPERTS, TOP_K)
        joined.add(scores, (scores + bias).topk(TOP_K + 1, dim=1).values[:, TOP_K], bias)
        expected = joined.next_bias(bias)
        assert not torch.equal(expected, bias)
        bias = expected
    assert torch.equal(model.layers[0].router.e_score_correction_bias, bias)
    assert all(router.balance.tokens == 0 for _, router in balanced_routers(model))


def test_evaluation_leaves_the_bias_and_the_statistics_alone(tmp_path: Path) -> None:
    plain, evaluated = StandIn(), StandIn()
    make_trainer(tmp_path / "plain", plain, callbacks=[QuantileBalancingCallback()]).train()
    trainer = make_trainer(
        tmp_path / "eval", evaluated, callbacks=[QuantileBalancingCallback()], eval_strategy="steps", eval_steps=1
    )
    trainer.train()
    assert torch.equal(biases(evaluated), biases(plain))
    assert not torch.equal(biases(plain), torch.zeros(NUM_LAYERS, NUM_EXPERTS))
    trainer.evaluate()
    assert torch.equal(biases(evaluated), biases(plain))


def test_without_the_callback_nothing_changes(tmp_path: Path) -> None:
    model = StandIn()
    make_trainer(tmp_path, model).train()
    assert torch.equal(biases(model), torch.zeros(NUM_LAYERS, NUM_EXPERTS))


def test_logs_carry_the_expert_load_of_training_only(tmp_path: Path) -> None:
    callback = QuantileBalancingCallback()
    trainer = make_trainer(
        tmp_path, StandIn(), callbacks=[callback], eval_strategy="steps", eval_steps=1, logging_steps=2
    )
    trainer.train()
    train_logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(train_logs) == 2
    for entry in train_logs:
        assert LOG_KEYS <= entry.keys()
        assert entry["expert_load/max_violation_worst"] >= entry["expert_load/max_violation"] >= 0
    for entry in trainer.state.log_history:
        assert "loss" in entry or not LOG_KEYS & entry.keys()


def test_log_figures_are_the_mean_over_the_window(tmp_path: Path) -> None:
    class Keep(TrainerCallback):
        def __init__(self) -> None:
            self.summaries: list[Tensor] = []

        def on_optimizer_step(self, args, state, control, **kwargs) -> None:
            self.summaries.append(callback.last_report.summary())

    callback, keep = QuantileBalancingCallback(), Keep()
    trainer = make_trainer(tmp_path, StandIn(), callbacks=[callback, keep], logging_steps=2)
    trainer.train()
    expected = torch.stack(keep.summaries).view(2, 2, 4).mean(dim=1)
    logged = [[entry[key] for key in callback._LOG_KEYS] for entry in trainer.state.log_history if "loss" in entry]
    torch.testing.assert_close(torch.tensor(logged), expected)


def test_installed_in_front_of_reporting_integrations(tmp_path: Path) -> None:
    class Reporter(TrainerCallback):
        def __init__(self) -> None:
            self.logged: list[dict[str, float]] = []

        def on_log(self, args, state, control, logs=None, **kwargs) -> None:
            self.logged.append(dict(logs))

    reporter = Reporter()
    trainer = make_trainer(tmp_path, StandIn(), callbacks=[reporter], max_steps=1)
    callback = QuantileBalancingCallback()
    assert callback.install(trainer) is callback
    assert callback.install(trainer) is callback  # moves, does not add twice
    assert trainer.callback_handler.callbacks.count(callback) == 1
    trainer.train()
    assert LOG_KEYS <= reporter.logged[0].keys()


def test_saved_and_resumed_training_is_uninterrupted_training(tmp_path: Path) -> None:
    whole, first, resumed = StandIn(), StandIn(), StandIn(seed=7)
    arguments = {"lr_scheduler_type": "constant"}
    make_trainer(tmp_path / "whole", whole, callbacks=[QuantileBalancingCallback()], **arguments).train()
    make_trainer(
        tmp_path / "parts",
        first,
        callbacks=[QuantileBalancingCallback()],
        save_strategy="steps",
        save_steps=2,
        **arguments,
    ).train()
    trainer = make_trainer(tmp_path / "parts", resumed, callbacks=[QuantileBalancingCallback()], **arguments)
    trainer.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    assert len(resumed.collected) == 6
    assert torch.equal(biases(resumed), biases(whole))
    assert torch.equal(biases(first), biases(whole))


def test_statistics_from_before_training_are_dropped(tmp_path: Path) -> None:
    fresh, stale = StandIn(), StandIn()
    sample = make_data(4, skew=9, seed=5)[0]
    stale.train()(**sample)  # a look at the loss, say
    for name, model in (("fresh", fresh), ("stale", stale)):
        make_trainer(tmp_path / name, model, callbacks=[QuantileBalancingCallback()], max_steps=1).train()
    assert torch.equal(biases(stale), biases(fresh))


def test_callback_refuses_a_dense_model_and_data_parallel(tmp_path: Path) -> None:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": (self.linear(x) - labels).square().mean()}

    with pytest.raises(ValueError, match="got Dense with none"):
        make_trainer(tmp_path, Dense(), callbacks=[QuantileBalancingCallback()]).train()
    with pytest.raises(ValueError, match="over 2 GPUs: start the script with `torchrun`"):
        QuantileBalancingCallback().on_train_begin(SimpleNamespace(n_gpu=2), None, None, model=StandIn())


# Loops without a Trainer


def train_loop(model: nn.Module, data, *, accumulate: int = 3, reports: list | None = None, ema=None) -> None:
    """Plain SGD over micro-batches of two samples."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    on_report = None if reports is None else reports.append
    handle = register_quantile_balancing(model, optimizer, ema=ema, on_report=on_report)
    for step, start in enumerate(range(0, len(data), 2)):
        batch = {key: torch.stack([sample[key] for sample in data[start : start + 2]]) for key in data[0]}
        (model(**batch)["loss"] / accumulate).backward()
        if (step + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    handle.remove()


def test_optimizer_hook_is_the_callback(tmp_path: Path) -> None:
    hooked, called = StandIn(), StandIn()
    reports: list = []
    data = make_data()
    train_loop(hooked, data, reports=reports)
    assert len(reports) == 2
    trainer = make_trainer(
        tmp_path,
        called,
        callbacks=[QuantileBalancingCallback()],
        data=data,
        max_steps=2,
        max_grad_norm=0,
        lr_scheduler_type="constant",
        optim="sgd",
        train_sampling_strategy="sequential",
    )
    trainer.train()
    assert torch.equal(biases(hooked), biases(called))


def test_removed_hook_does_nothing() -> None:
    model = StandIn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    register_quantile_balancing(model, optimizer).remove()
    model(**make_data(1)[0])["loss"].backward()
    optimizer.step()
    assert torch.equal(biases(model), torch.zeros(NUM_LAYERS, NUM_EXPERTS))


def test_a_second_update_in_a_step_changes_nothing() -> None:
    model = StandIn()
    model(**make_data(1)[0])
    first = update_selection_bias(model)
    after = biases(model)
    second = update_selection_bias(model, ema=0.9)
    assert torch.equal(biases(model), after)
    assert first.tokens.tolist() == [TOKENS] * NUM_LAYERS
    assert second.tokens.tolist() == [0] * NUM_LAYERS
    assert second.summary().isnan().all()


def test_report_counts_what_was_selected() -> None:
    model = StandIn()
    model.layers[1].router.balance.enabled = False  # a layer without a token
    model(**make_data(1)[0])
    scores, bias = model.collected[0]
    report = update_selection_bias(model)
    loads = torch.bincount((scores + bias).topk(TOP_K, dim=1).indices.reshape(-1), minlength=NUM_EXPERTS)
    relative = loads / loads.float().mean()
    assert report.names == ("layers.0.router", "layers.1.router")
    assert torch.equal(report.loads[0], loads)
    assert report.tokens.tolist() == [TOKENS, 0]
    figures = {
        "max_violation": relative.max().item() - 1,
        "cv": relative.std(correction=0).item(),
        "dead": float((loads == 0).sum()),
    }
    assert report.per_layer()["layers.0.router"] == pytest.approx(figures)
    assert all(value != value for value in report.per_layer()["layers.1.router"].values())  # NaN
    worst_is_mean = [figures["max_violation"], figures["max_violation"], figures["cv"], figures["dead"]]
    torch.testing.assert_close(report.summary(), torch.tensor(worst_is_mean))
    assert torch.equal(model.layers[1].router.e_score_correction_bias, torch.zeros(NUM_EXPERTS))


def test_loads_become_even_over_the_steps() -> None:
    model = StandIn()
    data = make_data(40)
    reports: list = []
    for _ in range(10):
        train_loop(model, data, accumulate=20, reports=reports)
    violations = [report.summary()[1].item() for report in reports]
    assert violations[0] > 1
    assert violations[-1] < 0.1  # though the weights move: 16 of 160 tokens per expert


def counted_routers(top_ks: tuple[int, ...]) -> nn.ModuleList:
    """Routers, each under a bias of its own, that have counted a batch; with 0 chosen experts, no token."""
    torch.manual_seed(3)
    routers = nn.ModuleList(Router() for _ in top_ks)
    for router, top_k in zip(routers, top_ks, strict=True):
        bias = router.e_score_correction_bias.uniform_(-0.1, 0.1)
        router.balance = QuantileHistogram(NUM_EXPERTS, top_k or TOP_K)
        scores = torch.rand(50 if top_k else 0, NUM_EXPERTS)
        chosen = (scores + bias).topk((top_k or TOP_K) + 1, dim=1)
        router.balance.add(scores, chosen.values[:, -1], bias, None, chosen.indices[:, :-1])
    return routers


@pytest.mark.parametrize("at_once", [1, balancing.COUNTS_AT_ONCE], ids=["one by one", "together"])
@pytest.mark.parametrize("ema", [None, 0.25])
def test_layers_updated_together_get_what_each_gets_alone(
    monkeypatch: pytest.MonkeyPatch, at_once: int, ema: float | None
) -> None:
    monkeypatch.setattr(balancing, "COUNTS_AT_ONCE", at_once)
    top_ks = (2, 2, 3, 0, 2)  # neighbours alike, neighbours that are not, one that has counted nothing
    routers = counted_routers(top_ks)
    alone = copy.deepcopy(routers)
    report = update_selection_bias(routers, ema=ema)
    assert report.tokens.tolist() == [50, 50, 50, 0, 50]
    for index, (router, other) in enumerate(zip(routers, alone, strict=True)):
        old, loads = other.e_score_correction_bias.clone(), other.balance.loads.long()
        estimate = other.balance.next_bias(old)
        expected = estimate if ema is None else torch.lerp(estimate, old, ema)
        torch.testing.assert_close(router.e_score_correction_bias, expected, rtol=0, atol=1e-7)  # the mean's order
        assert torch.equal(router.e_score_correction_bias, old) == (top_ks[index] == 0)
        assert torch.equal(report.loads[index], loads)
        single = update_selection_bias(other)
        for name in ("max_violation", "coefficient_of_variation", "dead_experts"):
            torch.testing.assert_close(getattr(report, name)[index], getattr(single, name)[0], equal_nan=True)
        assert router.balance.tokens == router.balance.counts.sum() == 0


def test_a_further_layer_costs_an_update_two_launches() -> None:
    """An update waits in every step outside of the CUDA graph of `CudaGraphTrainer`: its bias, and its counts to 0."""

    class Kernels(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += not func.is_view
            return func(*args, **(kwargs or {}))

    counts = []
    for layers in (3, 7):
        routers = counted_routers((2,) * layers)
        with Kernels() as kernels:
            update_selection_bias(routers)
        counts.append(kernels.count)
    assert counts[1] - counts[0] == 4 * 2


def test_ema_keeps_a_share_of_the_old_bias() -> None:
    plain, averaged = StandIn(), StandIn()
    sample = make_data(1)[0]
    old = torch.linspace(-0.2, 0.2, NUM_EXPERTS)
    for model in (plain, averaged):
        for _, router in balanced_routers(model):
            router.e_score_correction_bias.copy_(old)
        model(**sample)
    update_selection_bias(plain)
    update_selection_bias(averaged, ema=0.75)
    torch.testing.assert_close(biases(averaged), 0.75 * old + 0.25 * biases(plain), rtol=0, atol=1e-7)


@pytest.mark.parametrize("ema", [-0.1, 1.0, 1.5])
def test_ema_outside_its_range_is_refused_at_once(ema: float) -> None:
    model = StandIn()
    with pytest.raises(ValueError, match=r"`ema`.* must lie in \[0, 1\)"):
        update_selection_bias(model, ema=ema)
    with pytest.raises(ValueError, match="`ema`"):
        QuantileBalancingCallback(ema=ema)
    with pytest.raises(ValueError, match="`ema`"):
        register_quantile_balancing(model, torch.optim.SGD(model.parameters(), lr=0.1), ema=ema)


def test_a_frozen_bias_stays_and_can_be_released() -> None:
    model = StandIn()
    model(**make_data(1)[0])
    freeze_selection_bias(model)
    model(**make_data(1)[0])
    update_selection_bias(model)
    assert torch.equal(biases(model), torch.zeros(NUM_LAYERS, NUM_EXPERTS))
    freeze_selection_bias(model, frozen=False)
    model(**make_data(1)[0])
    update_selection_bias(model)
    assert not torch.equal(biases(model), torch.zeros(NUM_LAYERS, NUM_EXPERTS))


def test_balancing_what_is_frozen_is_refused(tmp_path: Path) -> None:
    """It would train for days without balancing and without the reminder."""
    model = StandIn()
    freeze_selection_bias(model)
    with pytest.raises(ValueError, match="selection bias may change, got 2 frozen ones: leave quantile balancing out"):
        make_trainer(tmp_path, model, callbacks=[QuantileBalancingCallback()]).train()
    with pytest.raises(ValueError, match="got 2 frozen ones"):
        register_quantile_balancing(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_bias_cast_to_bf16_is_refused() -> None:
    model = StandIn()
    model.layers[0].router.to(torch.bfloat16)
    with pytest.raises(TypeError, match="keep `e_score_correction_bias` in float32"):
        update_selection_bias(model)


def test_copies_of_a_model_balance_on_their_own() -> None:
    model = StandIn()
    model(**make_data(1)[0])
    duplicate = copy.deepcopy(model)
    update_selection_bias(model)
    assert duplicate.layers[0].router.balance.tokens == TOKENS
    update_selection_bias(duplicate)
    assert torch.equal(biases(duplicate), biases(model))


def test_a_model_without_routers_gives_an_empty_report() -> None:
    report = update_selection_bias(nn.Linear(2, 2))
    assert report.names == ()
    assert report.per_layer() == {}


# The real model

CHECKPOINTING = {
    "plain": None,
    "recomputed": {"use_reentrant": False},
    "recomputed_reentrant": {"use_reentrant": True},
}


def training_model(checkpointing: str = "plain", **arguments) -> KimiK3ForCausalLM:
    model = tiny_model("default", **arguments).train()
    if CHECKPOINTING[checkpointing] is not None:
        model.activation_checkpointing_enable(CHECKPOINTING[checkpointing])
    return model


def text_data(size: int = 12) -> list[dict[str, Tensor]]:
    config = tiny_config()
    rows = [random_ids(config, 1, 9 + i % 4, seed=i)[0] for i in range(size)]
    ids, mask = left_padded(rows)
    labels = ids.masked_fill(mask == 0, -100)
    return [{"input_ids": ids[i], "attention_mask": mask[i], "labels": labels[i]} for i in range(size)]


def stack(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_model_counts_every_real_token_once(checkpointing: str) -> None:
    model, batch = training_model(checkpointing), stack(text_data(4))
    routers = [router for _, router in balanced_routers(model)]
    model(**batch).loss.backward()
    real = int(batch["attention_mask"].sum())
    assert real < batch["attention_mask"].numel()
    assert len(routers) == len(model.model.layers) - model.config.first_k_dense_replace > 1
    for router in routers:
        assert router.balance.tokens == real
        assert router.balance.loads.sum() == real * router.top_k
        assert router.balance.counts.sum() == real * router.num_experts


def test_model_collects_in_training_with_gradients_only() -> None:
    model, batch = training_model(), stack(text_data(4))
    with torch.no_grad():
        model(**batch)
    with torch.inference_mode():
        model(**batch)
    model.eval()
    model(**batch)
    model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=2)
    before = biases(model)
    assert update_selection_bias(model).tokens.tolist() == [0] * len(before)
    assert torch.equal(biases(model), before)


def test_model_trains_to_the_same_bias_with_and_without_recomputation(tmp_path: Path) -> None:
    found = {}
    for checkpointing, arguments in CHECKPOINTING.items():
        model = training_model(checkpointing)
        recompute = (
            {}
            if arguments is None
            else {"activation_checkpointing": True, "activation_checkpointing_kwargs": arguments}
        )
        make_trainer(
            tmp_path / checkpointing,
            model,
            callbacks=[QuantileBalancingCallback()],
            data=text_data(),
            max_steps=2,
            **recompute,
        ).train()
        found[checkpointing] = biases(model)
        assert not torch.equal(found[checkpointing], biases(training_model()))
    assert torch.equal(found["recomputed"], found["plain"])
    assert torch.equal(found["recomputed_reentrant"], found["plain"])


def test_model_with_tied_experts_recomputes_the_same_choice() -> None:
    gradients = {}
    for checkpointing in ("plain", "recomputed"):
        model = training_model(checkpointing)
        for _, router in balanced_routers(model):
            with torch.no_grad():
                router.weight[1::2] = router.weight[::2]  # every expert ties with its neighbour
                router.e_score_correction_bias.zero_()
        data = text_data(6)
        for start in range(0, 6, 2):
            model(**stack(data[start : start + 2])).loss.backward()
        gradients[checkpointing] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients["plain"].keys() == gradients["recomputed"].keys()
    for name, expected in gradients["plain"].items():
        torch.testing.assert_close(gradients["recomputed"][name], expected, msg=name)


def test_model_in_bf16_keeps_every_digit_of_its_bias_through_save_and_load(tmp_path: Path) -> None:
    model = training_model().to(torch.bfloat16)
    for _, router in balanced_routers(model):
        router.e_score_correction_bias.fill_(7.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    register_quantile_balancing(model, optimizer, ema=0.999)  # steps of about 1e-4
    model(**stack(text_data(4))).loss.backward()
    optimizer.step()
    updated = biases(model)
    assert updated.dtype == torch.float32
    assert (updated != 7.0).all()
    assert (updated != updated.bfloat16().float()).any()
    model.save_pretrained(tmp_path)
    loaded = KimiK3ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(biases(loaded), updated)


def test_model_balances_through_trainer(tmp_path: Path) -> None:
    """On the same tokens every step, an unbalanced model becomes balanced, and the logs say so."""
    trainer = make_trainer(
        tmp_path,
        training_model(),
        callbacks=[QuantileBalancingCallback()],
        data=text_data(24),
        max_steps=8,
        gradient_accumulation_steps=1,
        per_device_train_batch_size=24,
        learning_rate=1e-5,
    )
    trainer.train()
    violations = [entry["expert_load/max_violation"] for entry in trainer.state.log_history if "loss" in entry]
    assert violations[0] > 0.5
    assert violations[-1] < 0.1


def test_whole_model_with_896_experts_is_balanced_within_ten_steps() -> None:
    """Every layer, from random weights, on the same tokens at every step; 73 of them are an expert's share."""
    torch.manual_seed(0)
    width = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 16, "routed_expert_hidden_size": 16}
    experts = {"num_experts": 896, "num_experts_per_token": 16}
    model = KimiK3ForCausalLM(size_config("nano", vocab_size=256, num_hidden_layers=3, **width, **experts)).train()
    ids = random_ids(model.config, 16, 256)
    violations = []
    for _ in range(11):
        model.model(ids)
        violations.append(update_selection_bias(model).max_violation)
    assert (violations[0] > 2).all()
    assert (violations[10] < 0.1).all()


def test_documented_examples_run(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "quantile_balancing.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    model, train_dataset = training_model(), text_data(4)
    names = {
        "model": model,
        "args": TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True),
        "train_dataset": train_dataset,
        "batch": stack(train_dataset),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
    }
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    assert abs(names["bias"].mean()) < 1e-6


# Several processes: one start of two gloo ranks (most of the time is importing) does the jobs of all tests


def share(data, rank: int):
    """Every second pair of samples, so that the micro-batches of the two ranks join to those of one process."""
    return [sample for start in range(2 * rank, len(data), 4) for sample in data[start : start + 2]]


def join_ranks(rank: int, path: Path) -> None:
    calls = []
    all_reduce = dist.all_reduce

    def counted(tensor, *args, **kwargs):
        calls.append(tensor.dtype)
        return all_reduce(tensor, *args, **kwargs)

    model = StandIn()
    for sample in share(make_data(), rank):
        model(**sample)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counted)
        report = update_selection_bias(model)
    assert calls == [torch.int32]  # all layers at once
    assert report.tokens.tolist() == [12 * TOKENS] * NUM_LAYERS
    torch.save(biases(model), path / f"joined-{rank}.pt")


def one_rank_idle(rank: int, path: Path) -> None:
    model = StandIn()
    if rank == 0:  # rank 1 has no statistics and no memory for them either
        model(**make_data()[0])
    assert update_selection_bias(model).tokens.tolist() == [TOKENS] * NUM_LAYERS
    torch.save(biases(model), path / f"idle-{rank}.pt")


def separate_groups(rank: int, path: Path) -> None:
    groups = [dist.new_group([0]), dist.new_group([1])]  # as for pipeline stages
    model = StandIn()
    model(**make_data()[rank])
    assert update_selection_bias(model, process_group=groups[rank]).tokens.tolist() == [TOKENS] * NUM_LAYERS
    model.config = SimpleNamespace(distributed_config=SimpleNamespace(pp_size=2))
    with pytest.raises(ValueError, match="pp_size=2 pipeline stages"):
        update_selection_bias(model)
    torch.save(biases(model), path / f"separate-{rank}.pt")


def train_ddp(rank: int, path: Path) -> None:
    model = DistributedDataParallel(StandIn())
    train_loop(model, share(make_data(24), rank), accumulate=3)
    assert [name for name, _ in balanced_routers(model)] == ["module.layers.0.router", "module.layers.1.router"]
    torch.save(biases(model), path / f"ddp-{rank}.pt")


def train_fsdp(rank: int, path: Path) -> None:
    model = StandIn()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    for _, router in balanced_routers(model):
        router.e_score_correction_bias.fill_(7.0)
    train_loop(model, share(make_data(24), rank), accumulate=3)
    torch.save(biases(model), path / f"fsdp-{rank}.pt")


JOBS = (join_ranks, one_rank_idle, separate_groups, train_ddp, train_fsdp)


def start_rank(rank: int, port: int, path: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        for job in JOBS:
            job(rank, path)
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory):
    """Runs all JOBS; returns ``load(job name) -> [biases of rank 0, of rank 1]``."""
    path = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(start_rank, args=(port, path), nprocs=2)
    return lambda name: [torch.load(path / f"{name}-{rank}.pt") for rank in range(2)]


def test_two_ranks_are_one_process_on_the_joined_batch(two_ranks) -> None:
    model = StandIn()
    for sample in make_data():
        model(**sample)
    update_selection_bias(model)
    assert all(torch.equal(rank, biases(model)) for rank in two_ranks("joined"))


def test_a_rank_without_a_batch_takes_part(two_ranks) -> None:
    model = StandIn()
    model(**make_data()[0])
    update_selection_bias(model)
    assert all(torch.equal(rank, biases(model)) for rank in two_ranks("idle"))


def test_groups_are_kept_apart(two_ranks) -> None:
    for rank, found in enumerate(two_ranks("separate")):
        model = StandIn()
        model(**make_data()[rank])
        update_selection_bias(model)
        assert torch.equal(found, biases(model))


def test_data_parallel_training_is_one_process_training(two_ranks) -> None:
    first, second = two_ranks("ddp")
    assert torch.equal(first, second)
    model = StandIn()
    train_loop(model, make_data(24), accumulate=6)
    # Averaged gradients round differently, so after the first step a value may fall into the next bin (< 2.5e-3 wide).
    torch.testing.assert_close(first, biases(model), rtol=0, atol=2 * 2.5e-3)


def test_sharded_bf16_training_keeps_a_float32_bias(two_ranks) -> None:
    first, second = two_ranks("fsdp")
    assert first.dtype == torch.float32
    assert torch.equal(first, second)
    assert (first != first.bfloat16().float()).any()  # more digits than bf16 could hold
