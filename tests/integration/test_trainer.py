# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""`transformers.Trainer` on the real model: accumulation, resuming from sharded files, best model, repeatability.

Public reports behind these tests: S33, S37, S52. That balancing statistics survive evaluation, accumulation and
recomputation (S33 to S35) is tested in tests/training too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments, default_data_collator

from deltalatent import KimiK3ForCausalLM
from deltalatent.training import (
    BalanceReport,
    QuantileBalancingCallback,
    last_complete_checkpoint,
    register_quantile_balancing,
)
from tests.equivalence import exact_model
from tests.testing_common import (
    assert_close,
    assert_gradients_close,
    gradients,
    left_padded,
    linear_attn_config,
    random_ids,
    tiny_config,
    tiny_model,
)


def samples(count: int = 16, seed: int = 0) -> list[dict[str, Any]]:
    """Documents of 5 to 12 tokens over a few ids, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        row = torch.randint(3, 19, (5 + i % 8,), generator=generator).tolist()
        rows.append({"input_ids": row, "labels": row})
    return rows


def pad(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    ids, mask = left_padded([torch.tensor(sample["input_ids"]) for sample in batch])
    # The first token of a row has no predictor, or one that is padding.
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask.cumsum(1) <= 1, -100)}


def trainer(
    folder: Path, model: nn.Module, *, collator: Any = pad, data: Dataset | list | None = None, **arguments: Any
) -> Trainer:
    defaults = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
    }
    return Trainer(
        model,
        TrainingArguments(**(defaults | arguments)),
        data_collator=collator,
        train_dataset=data or samples(),
        eval_dataset=samples(8, seed=9),
        callbacks=[QuantileBalancingCallback()],
    )


def fresh_model(seed: int = 1) -> KimiK3ForCausalLM:
    torch.manual_seed(seed)
    return KimiK3ForCausalLM(tiny_config(initializer_range=0.1))


def state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, selection biases included."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_state(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


def losses(run: Trainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def test_training_learns_and_repeats_bit_for_bit(tmp_path: Path) -> None:
    runs, states = [], []
    for name in ("one", "two"):
        run = trainer(tmp_path / name, fresh_model(), max_steps=12)
        run.train()
        runs.append(losses(run))
        states.append(state(run.model))
    assert runs[0] == runs[1]
    assert_same_state(states[1], states[0])
    assert sum(runs[0][-3:]) < 0.8 * sum(runs[0][:3])


@pytest.mark.parametrize(
    ("accumulation", "collator"),
    [
        pytest.param(2, pad, id="2_padded_batches"),
        pytest.param(4, pad, id="4_padded_batches"),
        pytest.param(1, DataCollatorWithFlattening(return_tensors="pt"), id="1_packed_batch"),
        pytest.param(4, DataCollatorWithFlattening(return_tensors="pt"), id="4_packed_batches"),
    ],
)
def test_a_step_is_the_same_however_its_documents_are_batched(
    tmp_path: Path, accumulation: int, collator: Any
) -> None:
    """S08, S37: documents of different lengths, so that a mean of means would differ; balancing sees it whole."""
    found = []
    for steps, collate in ((1, pad), (accumulation, collator)):
        run = trainer(
            tmp_path / str(len(found)),
            exact_model().train(),
            collator=collate,
            max_steps=1,
            per_device_train_batch_size=8 // steps,
            gradient_accumulation_steps=steps,
            optim="sgd",
            learning_rate=1.0,
            max_grad_norm=0.0,
        )
        run.train()
        found.append((losses(run)[0], state(run.model)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)  # losses are float32
    before = state(exact_model())
    expected, actual = ({name: new[name] - before[name] for name in new} for _, new in found)
    for name in [name for name in before if name.endswith("e_score_correction_bias")]:
        bias, expected_bias = actual.pop(name), expected.pop(name)
        assert expected_bias.abs().max() > 1e-3
        # A required bias on the edge of one of 1000 bins over a range of about 2.5 may fall to either side of it.
        assert (bias - expected_bias).abs().max() < 2 * 2.5 / 1000
    assert_gradients_close(actual, expected, rel=1e-6)


@pytest.mark.parametrize("shard_size", ["5GB", "100KB"])
def test_resumed_training_is_straight_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_size: str
) -> None:
    """S52: resuming read per-expert files into fused experts without conversion, and trained on from noise."""
    save = KimiK3ForCausalLM.save_pretrained
    monkeypatch.setattr(
        KimiK3ForCausalLM,
        "save_pretrained",
        lambda self, *args, **kwargs: save(self, *args, **(kwargs | {"max_shard_size": shard_size})),
    )
    straight = trainer(tmp_path / "straight", fresh_model())
    straight.train()
    trainer(tmp_path / "parts", fresh_model(), max_steps=2, save_strategy="steps", save_steps=2).train()
    checkpoint = tmp_path / "parts" / "checkpoint-2"
    assert (len(list(checkpoint.glob("*.safetensors"))) > 1) == (shard_size == "100KB")
    resumed = trainer(tmp_path / "parts", fresh_model(seed=8))
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert_same_state(state(resumed.model), state(straight.model))
    assert losses(resumed)[-2:] == losses(straight)[-2:]


@pytest.mark.parametrize("schedule", ["linear", "constant"])
def test_resuming_a_finished_run_changes_nothing(tmp_path: Path, schedule: str) -> None:
    """The Trainer takes one more step, which has a learning rate unless the schedule ends at zero."""
    arguments = {"max_steps": 3, "lr_scheduler_type": schedule, "save_strategy": "steps", "save_steps": 3}
    run = trainer(tmp_path, fresh_model(), **arguments)
    run.train()
    resumed = trainer(tmp_path, fresh_model(seed=8), **arguments)
    resumed.train(resume_from_checkpoint=last_complete_checkpoint(tmp_path))
    assert resumed.state.global_step == 4
    assert_same_state(state(resumed.model), state(run.model))
    for (name, parameter), own in zip(run.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(resumed.optimizer.state[own]["exp_avg"], run.optimizer.state[parameter]["exp_avg"]), name


@pytest.mark.parametrize("shard_size", ["5GB", "100KB"])
def test_best_model_at_the_end_is_the_saved_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_size: str
) -> None:
    """S52: the same fault in `load_best_model_at_end`."""
    save = KimiK3ForCausalLM.save_pretrained
    monkeypatch.setattr(
        KimiK3ForCausalLM,
        "save_pretrained",
        lambda self, *args, **kwargs: save(self, *args, **(kwargs | {"max_shard_size": shard_size})),
    )
    run = trainer(
        tmp_path,
        fresh_model(),
        learning_rate=0.3,  # far too large: the model gets worse, so that the best one is not the last
        max_steps=4,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
    )
    run.train()
    evaluated = {entry["step"]: entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry}
    best = min(evaluated, key=evaluated.get)
    assert best < 4
    assert run.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    expected = KimiK3ForCausalLM.from_pretrained(tmp_path / f"checkpoint-{best}")
    assert_same_state(state(run.model), state(expected))
    assert run.evaluate()["eval_loss"] == pytest.approx(evaluated[best], rel=1e-6)


def test_checkpoints_have_the_released_layout(tmp_path: Path) -> None:
    run = trainer(tmp_path, fresh_model(), max_steps=1, save_strategy="steps", save_steps=1)
    run.train()
    saved = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert "model.layers.1.block_sparse_moe.experts.0.w1.weight" in saved
    bias = saved["model.layers.1.block_sparse_moe.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32
    assert bias.any()
    config = json.loads((tmp_path / "checkpoint-1" / "config.json").read_text())
    assert config["architectures"] == ["KimiK3ForCausalLM"]
    assert_same_state(state(KimiK3ForCausalLM.from_pretrained(tmp_path / "checkpoint-1")), state(run.model))


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_recomputation_trains_to_the_same_weights(tmp_path: Path, use_reentrant: bool) -> None:
    found = []
    for recompute in (False, True):
        run = trainer(
            tmp_path / str(recompute),
            tiny_model().train(),
            max_steps=2,
            gradient_accumulation_steps=2,
            optim="sgd",
            learning_rate=0.1,
            activation_checkpointing=recompute,
            activation_checkpointing_kwargs={"use_reentrant": use_reentrant} if recompute else None,
        )
        run.train()
        found.append((losses(run), state(run.model)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for name, tensor in found[0][1].items():
        assert_close(found[1][1][name], tensor, 1e-5, what=name)


def test_evaluation_between_steps_changes_nothing(tmp_path: Path) -> None:
    """S33: an evaluation on skewed data moved the next training bias."""
    found = []
    for evaluate in (False, True):
        run = trainer(
            tmp_path / str(evaluate), fresh_model(), eval_strategy="steps" if evaluate else "no", eval_steps=1
        )
        run.train()
        found.append(state(run.model))
    assert_same_state(found[1], found[0])


def test_bf16_training_keeps_float32_weights_and_follows_the_float32_run(tmp_path: Path) -> None:
    """`bf16=True` is autocast: products in bf16; weights, moments and the selection bias stay float32."""
    found = {}
    for bf16 in (False, True):
        run = trainer(tmp_path / str(bf16), fresh_model(), bf16=bf16, max_steps=8)
        run.train()
        assert {tensor.dtype for tensor in state(run.model).values()} == {torch.float32}
        moments = [value for entry in run.optimizer.state.values() for value in entry.values()]
        assert {moment.dtype for moment in moments} == {torch.float32}
        found[bf16] = losses(run)
    assert found[True] != found[False]
    # The first losses are those of the same weights: products rounded to 2^-9, averaged over some 70 logits per token.
    assert found[True][0] == pytest.approx(found[False][0], rel=2**-9)
    # Later ones are of weights that have parted, on one batch each: what is compared is the mean over a few.
    late = {bf16: sum(values[-4:]) / 4 for bf16, values in found.items()}
    assert abs(late[True] - late[False]) < 0.2 * (found[False][0] - late[False])


@pytest.mark.slow
def test_compiled_training_is_eager_training(tmp_path: Path) -> None:
    """Forward and backward are captured by Dynamo and AOTAutograd; that Inductor's code is right is its own affair."""
    found = []
    for arguments in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        model = tiny_model(linear_attn_config=linear_attn_config(kda_layers=[1], full_attn_layers=[2]),
                           num_hidden_layers=2).train()  # fmt: skip
        run = trainer(
            tmp_path / str(len(found)), model, optim="sgd", learning_rate=0.1, max_steps=3,
            data=[{"input_ids": row, "labels": row} for row in random_ids(model.config, 6, 16).tolist()],
            collator=default_data_collator, **arguments,
        )  # fmt: skip
        run.train()
        found.append((losses(run), state(run.model)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    for name, tensor in found[0][1].items():
        # One bin of the histogram, where rounding moved a score over its edge.
        tolerance = 2.5e-3 / tensor.abs().max().item() if name.endswith("e_score_correction_bias") else 1e-4
        assert_close(found[1][1][name], tensor, tolerance, what=name)


def test_accelerate_loop_is_the_trainer(tmp_path: Path) -> None:
    """Accumulation, clipping and balancing written by hand, in the terms of accelerate."""
    run = trainer(
        tmp_path, fresh_model(), max_steps=3, gradient_accumulation_steps=2, train_sampling_strategy="sequential",
        learning_rate=0.1, optim="sgd", max_grad_norm=1.0,
    )  # fmt: skip
    run.train()

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = fresh_model().train()
    loader = DataLoader(samples(12), batch_size=2, collate_fn=pad)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    reports: list[BalanceReport] = []
    register_quantile_balancing(model, optimizer, on_report=reports.append)
    batches = list(loader)
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        targets = sum((batch["labels"] != -100).sum() for batch in (first, second))
        for batch in (first, second):
            accelerator.gradient_state._set_sync_gradients(batch is second)
            # `num_items_in_batch` makes both losses sums over one number; accelerate divides by the micro-batches.
            loss = model(**batch, num_items_in_batch=targets).loss * accelerator.gradient_accumulation_steps
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert len(reports) == 3  # one for each real step
    expected = state(run.model)
    for name, tensor in state(model).items():
        assert_close(tensor, expected[name], 1e-5, what=name)


def smoothed_loss(model: nn.Module, rows: list[dict[str, Any]], epsilon: float) -> Tensor:
    """Of the next tokens, from each row alone, in float64."""
    found = []
    for row in rows:
        with torch.no_grad():
            scores = model(torch.tensor([row["input_ids"]])).logits[0, :-1].double().log_softmax(-1)
        targets = torch.tensor(row["labels"][1:])
        right = scores[torch.arange(len(targets)), targets]
        found.append(-(1 - epsilon) * right - epsilon * scores.mean(-1))
    return torch.cat(found).mean()


@pytest.mark.parametrize("how", ["label_smoothing_factor", "compute_loss_func"])
def test_losses_of_the_trainer_are_those_of_the_next_tokens(tmp_path: Path, how: str) -> None:
    """Labels are shifted by class name: of a model that it does not know, the Trainer smooths the wrong ones."""

    def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        total = nn.functional.cross_entropy(logits, targets, label_smoothing=0.2, reduction="sum")
        return total / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)

    model = tiny_model()
    rows = samples(8)
    expected = smoothed_loss(model, rows, 0.2).item()
    arguments: dict[str, Any] = {"label_smoothing_factor": 0.2} if how == "label_smoothing_factor" else {}
    run = trainer(tmp_path, model, data=rows, max_steps=1, gradient_accumulation_steps=4, **arguments)
    if how == "compute_loss_func":
        run.compute_loss_func = own_loss
    run.train()
    assert losses(run)[0] == pytest.approx(expected, rel=1e-5)


def test_prediction_gives_logits_and_nothing_else(tmp_path: Path) -> None:
    """Neither a cache nor router scores get among them; metrics see the inputs and the loss of every row."""
    rows = samples(6)
    model = tiny_model()
    run = trainer(tmp_path, model, include_for_metrics=["inputs", "loss"], per_device_eval_batch_size=len(rows))
    seen = []
    run.compute_metrics = lambda found: seen.append((found.inputs.shape, found.losses.shape)) or {"rows": len(rows)}
    found = run.predict(rows)
    longest = max(len(row["input_ids"]) for row in rows)
    assert found.predictions.shape == (len(rows), longest, model.config.vocab_size)
    assert seen == [((len(rows), longest), (len(rows),))]
    assert found.metrics["test_rows"] == len(rows)
    with torch.no_grad():
        alone = model(torch.tensor([rows[0]["input_ids"]])).logits[0]
    assert_close(torch.tensor(found.predictions[0, -len(alone) :]), alone, 1e-5)


def test_streamed_documents_are_packed_like_any_others(tmp_path: Path) -> None:
    """By positions; offsets get through accelerate only if it leaves the batches of a stream alone."""
    rows = samples()
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
    positions = DataCollatorWithFlattening(return_tensors="pt")
    offsets = DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=True, return_seq_idx=True)
    untouched = {"accelerator_config": {"dispatch_batches": False}}
    found = []
    for data, collator, arguments in ((rows, positions, {}), (stream, positions, {}), (stream, offsets, untouched)):
        run = trainer(
            tmp_path / str(len(found)),
            fresh_model(),
            collator=collator,
            data=data,
            gradient_accumulation_steps=2,
            train_sampling_strategy="sequential",
            **arguments,
        )
        run.train()
        found.append((losses(run), state(run.model)))
    for streamed in found[1:]:
        assert streamed[0] == found[0][0]
        assert_same_state(streamed[1], found[0][1])


def test_noise_on_embeddings_reaches_training_only(tmp_path: Path) -> None:
    """NEFTune hooks the module of the embedding."""
    runs = {alpha: trainer(tmp_path / str(alpha), tiny_model(), neftune_noise_alpha=alpha) for alpha in (None, 5.0)}
    for run in runs.values():
        run.train()
    assert losses(runs[5.0])[0] != losses(runs[None])[0]
    model = runs[5.0].model.train()
    ids = random_ids(model.config)
    assert torch.equal(model.model.embed_tokens(ids), model.model.embed_tokens.weight[ids])


def test_there_is_no_auxiliary_loss(tmp_path: Path) -> None:
    """S37: what does not exist cannot scale with ranks and accumulation; the loss is the cross entropy alone."""
    model = tiny_model().train()
    ids = random_ids(model.config)
    with_router_logits = model(ids, labels=ids, output_router_logits=True, skip_logits=False)
    logits = with_router_logits.logits[:, :-1].flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    assert_close(with_router_logits.loss, expected, 1e-6)
    assert_gradients_close(
        gradients(model, with_router_logits.loss),
        gradients(model, model(ids, labels=ids, skip_logits=False).loss),
        rel=1e-6,
    )
