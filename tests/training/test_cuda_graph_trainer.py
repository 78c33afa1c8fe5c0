# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""`CudaGraphTrainer` trains as `Trainer` does: on a GPU with real graphs, elsewhere with a stand-in for them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments, default_data_collator

from deltalatent.training import CudaGraphTrainer, QuantileBalancingCallback, cuda_graph_trainer, lora_targets
from tests.testing_common import tiny_model

LENGTH = 24


def samples(count: int, lengths: tuple[int, ...] = (LENGTH,), **fields: Any) -> list[dict[str, Any]]:
    """Rows in pairs of one length, so that batches of two are rectangular."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for _, length in zip(range(count // 2), itertools.cycle(lengths), strict=False):
        for ids in torch.randint(3, 60, (2, length), generator=generator):
            rows.append({"input_ids": ids, "labels": ids} | {name: make(ids) for name, make in fields.items()})
    return rows


def train(
    kind: type[Trainer], model: nn.Module, folder: Path, data: list[dict[str, Any]], **arguments: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of all steps, and the weights at the end."""
    callbacks = arguments.pop("callbacks", [])
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "max_steps": 9,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
    }
    trainer = kind(
        model,
        TrainingArguments(**(defaults | arguments)),
        data_collator=default_data_collator,
        train_dataset=data,
        callbacks=callbacks,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def adapted(model: Any) -> nn.Module:
    """With LoRA on all linear maps and the experts; adapters begin as random numbers and zeros."""
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **lora_targets(model.config)))


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[nn.Module], list[int]]:
    """What a graph does, without one: recording computes nothing, a replay writes to the tensors of the recording."""
    monkeypatch.setattr(cuda_graph_trainer, "_check_arguments", lambda args: None)

    def install(model: nn.Module) -> list[int]:
        replays: list[int] = []
        numbers = itertools.count()
        parameters = list(model.parameters())

        def capture(step: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], None], Tensor, Any]:
            before = [None if p.grad is None else p.grad.clone() for p in parameters]
            loss = step()
            recorded = [p.grad for p in parameters]
            for old, gradient in zip(before, recorded, strict=True):
                if gradient is not None:
                    gradient.copy_(torch.full_like(gradient, float("nan")) if old is None else old)
            loss.fill_(float("nan"))
            number = next(numbers)

            def replay() -> None:
                replays.append(number)
                held = [p.grad for p in parameters]
                for p, old, gradient in zip(parameters, before, recorded, strict=True):
                    p.grad = None if old is None else gradient
                loss.copy_(step())
                for p, old, gradient, was in zip(parameters, before, recorded, held, strict=True):
                    if old is None and gradient is not None:
                        gradient.copy_(p.grad)
                    p.grad = was

            return replay, loss, pool

        monkeypatch.setattr(cuda_graph_trainer, "capture", capture)
        return replays

    return install


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("lengths", [(LENGTH,), (LENGTH, 10)], ids=["one-shape", "two-shapes"])
def test_losses_and_weights_are_those_of_the_trainer(
    without_gpu: Callable[[nn.Module], list[int]], tmp_path: Path, lengths: tuple[int, ...], accumulation: int
) -> None:
    """Of two shapes the micro-batches of one optimizer step come from different graphs, whose gradients meet."""
    data = samples(60, lengths)
    expected, weights = train(Trainer, tiny_model(), tmp_path, data, gradient_accumulation_steps=accumulation)
    model = tiny_model()
    replays = without_gpu(model)
    losses, state = train(CudaGraphTrainer, model, tmp_path, data, gradient_accumulation_steps=accumulation)
    assert losses == expected
    assert all(torch.equal(state[name], weights[name]) for name in weights)
    assert len(set(replays)) == len(lengths) * min(accumulation, 2), "graphs that were replayed"
    assert len(replays) >= 9 * accumulation - 2 * CudaGraphTrainer.warmup_steps - accumulation


def test_adapters_alone_get_gradients(without_gpu: Callable[[nn.Module], list[int]], tmp_path: Path) -> None:
    expected, weights = train(Trainer, adapted(tiny_model()), tmp_path, samples(40))
    model = adapted(tiny_model())
    replays = without_gpu(model)
    losses, state = train(CudaGraphTrainer, model, tmp_path, samples(40))
    assert len(replays) == 9 - CudaGraphTrainer.warmup_steps
    assert losses == expected
    assert all(torch.equal(state[name], weights[name]) for name in weights)


def test_a_mask_of_ones_is_left_out(without_gpu: Callable[[nn.Module], list[int]], tmp_path: Path) -> None:
    model = tiny_model()
    replays = without_gpu(model)
    losses, _ = train(CudaGraphTrainer, model, tmp_path, samples(40, attention_mask=torch.ones_like))
    assert len(replays) == 9 - CudaGraphTrainer.warmup_steps
    assert losses == train(Trainer, tiny_model(), tmp_path, samples(40))[0]


def test_what_depends_on_values_runs_eagerly_and_says_so_once(
    without_gpu: Callable[[nn.Module], list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def padded(ids: Tensor) -> Tensor:
        return (torch.arange(len(ids)) < len(ids) - 2).long()

    cuda_graph_trainer._explain_once.cache_clear()
    model = tiny_model()
    replays = without_gpu(model)
    data = samples(40, attention_mask=padded)
    with caplog.at_level(logging.WARNING, cuda_graph_trainer.__name__):
        losses, _ = train(CudaGraphTrainer, model, tmp_path, data)
    assert not replays
    assert losses == train(Trainer, tiny_model(), tmp_path, data)[0]
    [record] = [record for record in caplog.records if record.name == cuda_graph_trainer.__name__]
    assert "batches with `attention_mask` are trained on eagerly" in record.getMessage()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device": torch.device("cpu")}, "a CUDA GPU is needed, got device cpu"),
        ({"world_size": 2}, "one process is needed, got 2"),
        ({"n_gpu": 4}, "one GPU is needed, got 4 in one process: set CUDA_VISIBLE_DEVICES"),
        ({"fsdp": True}, "`fsdp` and `deepspeed` run collectives"),
        ({"torch_compile": True}, "`torch_compile` has graphs of its own"),
        ({"torch_empty_cache_steps": 5}, "`torch_empty_cache_steps` cannot give back memory"),
        ({"optim": "lomo"}, "`optim=lomo` steps during the backward pass"),
        ({"activation_checkpointing": True}, '"preserve_rng_state": False'),
        (
            {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}},
            '"preserve_rng_state": False',
        ),
    ],
)
def test_arguments_that_a_graph_cannot_hold(fields: dict[str, Any], message: str) -> None:
    possible = {
        "device": torch.device("cuda"),
        "world_size": 1,
        "n_gpu": 1,
        "fsdp": None,
        "deepspeed": None,
        "torch_compile": False,
        "torch_empty_cache_steps": None,
        "optim": "adamw_torch_fused",
        "activation_checkpointing": False,
        "activation_checkpointing_kwargs": None,
    }
    cuda_graph_trainer._check_arguments(SimpleNamespace(**possible))
    with pytest.raises(ValueError, match="`CudaGraphTrainer` cannot run with these arguments: ") as caught:
        cuda_graph_trainer._check_arguments(SimpleNamespace(**(possible | fields)))
    assert message in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_without_a_gpu_the_reason_is_given(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a CUDA GPU is needed, got device cpu"):
        train(CudaGraphTrainer, tiny_model(), tmp_path, samples(4))


def test_what_cannot_be_captured_names_the_cause(
    without_gpu: Callable[[nn.Module], list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(step: Callable[[], Tensor], pool: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    model = tiny_model()
    without_gpu(model)
    monkeypatch.setattr(cuda_graph_trainer, "capture", capture)
    with pytest.raises(RuntimeError, match=r"cannot be captured as a CUDA graph.*`\.item\(\)`") as caught:
        train(CudaGraphTrainer, model, tmp_path, samples(20))
    assert "when stream is capturing" in str(caught.value.__cause__)


CHECKPOINTING = {
    "activation_checkpointing": True,
    "activation_checkpointing_kwargs": {"use_reentrant": False, "preserve_rng_state": False},
}


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Losses of the graphs that were made."""
    made: list[Tensor] = []
    capture = cuda_graph_trainer.capture

    def counted(step: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], None], Tensor, Any]:
        replay, loss, pool = capture(step, pool)
        made.append(loss)
        return replay, loss, pool

    monkeypatch.setattr(cuda_graph_trainer, "capture", counted)
    return made


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("how", ["plain", "checkpointing", "adapters"])
def test_captured_training_is_eager_training(
    tmp_path: Path, captures: list[Tensor], how: str, accumulation: int
) -> None:
    """With clipping and balancing of experts, in float32: what may differ is the order of sums in attention."""
    runs = []
    for kind in (Trainer, CudaGraphTrainer):
        model: nn.Module = tiny_model()
        if how == "adapters":
            model = adapted(model)
        options = CHECKPOINTING if how == "checkpointing" else {}
        runs.append(
            train(
                kind,
                model,
                tmp_path,
                samples(60),
                callbacks=[QuantileBalancingCallback()],
                gradient_accumulation_steps=accumulation,
                **options,
            )
        )
    (expected, weights), (losses, state) = runs
    assert len(captures) == accumulation
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0)
    assert losses[-1] < losses[0]
    for name, tensor in weights.items():
        torch.testing.assert_close(
            state[name], tensor, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_captured_training_under_autocast(tmp_path: Path, captures: list[Tensor], precision: str) -> None:
    """fp16 with its loss scale, which changes between replays."""
    expected, _ = train(Trainer, tiny_model(), tmp_path, samples(60), **{precision: True})
    losses, _ = train(CudaGraphTrainer, tiny_model(), tmp_path, samples(60), **{precision: True})
    assert len(captures) == 1
    torch.testing.assert_close(losses, expected, rtol=2.0**-8, atol=0)
