# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Applying quantile balancing: once per optimizer step, from the Trainer or from a training loop of one's own.

The forward of a model in training collects (:class:`~deltalatent.modeling.quantile_balancing.QuantileHistogram`);
nothing changes until :func:`update_selection_bias` joins the ranks, writes the next selection bias and clears the
histograms. It runs after the last backward of a step and before the optimizer moves the weights. No backward is
outstanding then, so the bias that selected in a forward is also the one that activation recomputation sees.

Source: Kimi K3 technical report (arXiv 2607.24653), Stable LatentMoE.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from deltalatent.modeling.quantile_balancing import QuantileHistogram, next_biases, reduce_histograms

__all__ = [
    "BalanceReport",
    "BalancedRouter",
    "QuantileBalancingCallback",
    "balanced_routers",
    "freeze_selection_bias",
    "load_selection_bias",
    "register_quantile_balancing",
    "save_selection_bias",
    "update_selection_bias",
]


class BalancedRouter(Protocol):
    """What a router module must have to be balanced.

    Attributes:
        balance: the histogram that the training forward fills.
        e_score_correction_bias: the selection bias, float32 [E], added to the scores for the selection only.
    """

    balance: QuantileHistogram
    e_score_correction_bias: Tensor


SELECTION_BIAS_FILE = "selection_bias.safetensors"
BIAS_NAME = "e_score_correction_bias"

COUNTS_AT_ONCE = 2**24
"""Counts of histograms that are read at once: all layers of a small model, 18 layers of 896 experts (300 MB)."""


@dataclass(frozen=True)
class BalanceReport:
    """Expert load of one optimizer step, over all ranks, under the bias that was in force during that step.

    The tensors stay on the device, so that a step which nobody reports does not wait for it. Load means the number of
    counted tokens that selected an expert; its mean is ``tokens * K / E``. All figures of a layer that counted no
    token are NaN.

    Attributes:
        names: module names of the routers, in module order, L of them.
        tokens: counted tokens, int64 [L].
        loads: one int64 [E] per layer.
        max_violation: ``max_e load_e / mean - 1``, float32 [L]; 0 is perfect balance.
        coefficient_of_variation: standard deviation of the load over its mean, float32 [L].
        dead_experts: experts that no token selected, float32 [L] (whole numbers or NaN).
    """

    names: tuple[str, ...]
    tokens: Tensor
    loads: tuple[Tensor, ...]
    max_violation: Tensor
    coefficient_of_variation: Tensor
    dead_experts: Tensor

    def summary(self) -> Tensor:
        """Over layers: mean and largest max violation, mean coefficient of variation, sum of dead experts.

        A float32 tensor [4]. Layers without a counted token are left out; NaN if there is no other.
        """
        seen = self.tokens > 0
        largest = torch.where(seen, self.max_violation, -torch.inf).amax()
        dead = torch.where(seen, self.dead_experts, 0.0).sum()
        return torch.stack(
            (
                self.max_violation.nanmean(),
                torch.where(seen.any(), largest, torch.nan),
                self.coefficient_of_variation.nanmean(),
                torch.where(seen.any(), dead, torch.nan),
            )
        )

    def per_layer(self) -> dict[str, dict[str, float]]:
        """The three figures of every router by its name, as Python numbers (waits for the device)."""
        figures = torch.stack((self.max_violation, self.coefficient_of_variation, self.dead_experts), dim=1).tolist()
        return {
            name: {"max_violation": violation, "cv": variation, "dead": dead}
            for name, (violation, variation, dead) in zip(self.names, figures, strict=True)
        }


def balanced_routers(model: nn.Module) -> list[tuple[str, BalancedRouter]]:
    """Names and modules of the routers of ``model`` that quantile balancing drives, in module order.

    A router is a module whose ``balance`` is a :class:`QuantileHistogram`, see :class:`BalancedRouter`. Wrappers (DDP,
    ``torch.compile``, PEFT) may be around the model.
    """
    return [
        (name, cast(BalancedRouter, module))
        for name, module in model.named_modules()
        if isinstance(getattr(module, "balance", None), QuantileHistogram)
    ]


def freeze_selection_bias(model: nn.Module, frozen: bool = True) -> None:
    """Stop (or with ``frozen=False`` resume) collecting statistics, so that the selection bias stays as it is.

    For fine-tuning that must not change the balance of a released model: no work per forward, and no reminder that
    nothing reads the statistics. What was collected so far is dropped. The switch is not saved with the model.
    """
    for _, router in balanced_routers(model):
        router.balance.enabled = not frozen
        router.balance.reset()


def save_selection_bias(model: nn.Module, folder: str | Path) -> None:
    """Write the selection bias of every router to `selection_bias.safetensors` in a folder, which is made if need be.

    For adapters: a model that is saved whole carries its bias, the files of PEFT hold trained weights only. An adapter
    that was trained while balancing moved the bias gives its numbers with that bias.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    biases = {name: router.e_score_correction_bias.detach().cpu() for name, router in _named_biases(model).items()}
    save_file(biases, folder / SELECTION_BIAS_FILE, metadata={"format": "pt"})


@torch.no_grad()
def load_selection_bias(model: nn.Module, folder: str | Path) -> None:
    """Read what :func:`save_selection_bias` wrote into the routers of a model, with or without adapters.

    Raises:
        ValueError: There is no such file in the folder, or it is of a model with other routers.
    """
    path = Path(folder) / SELECTION_BIAS_FILE
    if not path.is_file():
        raise ValueError(
            f"{folder} must hold {SELECTION_BIAS_FILE}, got no such file: write it with `save_selection_bias(model, "
            "folder)` beside the adapter."
        )
    biases, routers = load_file(path), _named_biases(model)
    expected = {name: tuple(router.e_score_correction_bias.shape) for name, router in routers.items()}
    if (found := {name: tuple(bias.shape) for name, bias in biases.items()}) != expected:
        raise ValueError(
            f"{path} must hold the biases {expected} of this model, got {found}: load it into the model that it was "
            "saved from."
        )
    for name, router in routers.items():
        router.e_score_correction_bias.copy_(biases[name])


def _named_biases(model: nn.Module) -> dict[str, BalancedRouter]:
    """Routers by the name of their bias in the model without wrappers (adapters, DDP, compilation)."""
    wrappers = re.compile(r"^(module\.|_orig_mod\.|base_model\.model\.)+")
    return {f"{wrappers.sub('', name)}.{BIAS_NAME}": router for name, router in balanced_routers(model)}


@torch.no_grad()
def update_selection_bias(
    model: nn.Module, *, process_group: dist.ProcessGroup | None = None, ema: float | None = None
) -> BalanceReport:
    """Write the next selection bias of every router from the statistics of this step, and clear the statistics.

    Collective: in a distributed run every rank of the group must call it, also one that had no batch. The histograms
        of all layers are summed in one all-reduce of integers, so all ranks write the same bias, that of one process
        with the joined batch. A layer without a counted token keeps its bias; a second call in a step therefore
        changes nothing. Call it between the last backward of a step and the first forward of the next.

    Args:
        model: any module; routers are found by :func:`balanced_routers`. Without routers the report is empty.
        process_group: ranks whose batches make up the step. ``None``: all ranks. That is right as long as each token
            is held by the same number of ranks (data, expert, context and tensor parallelism in any mix), because
            multiplying all counts by one number does not move a quantile. Pipeline stages hold different layers: pass
            the ranks of this stage.
        ema: share of the old bias in the new one, in [0, 1): ``ema * old + (1 - ema) * estimate``. ``None`` is 0, the
            report's rule; it smooths the estimate when a step has few tokens per expert.

    Returns:
        The load of the step just counted. Nothing here waits for the device.

    Raises:
        ValueError: if ``ema`` is outside [0, 1), or the model is split into pipeline stages and no group is given.
        TypeError: if a selection bias is not float32 (or float64).
    """
    _check_ema(ema)
    routers = balanced_routers(model)
    if not routers:
        empty = torch.empty(0)
        return BalanceReport((), empty.long(), (), empty, empty, empty)
    if _is_distributed(process_group):
        if process_group is None:
            _refuse_pipeline_stages(model)
        reduce_histograms(
            [router.balance for _, router in routers],
            [router.e_score_correction_bias.device for _, router in routers],
            process_group,
        )

    device = routers[0][1].e_score_correction_bias.device
    all_tokens: list[Tensor] = []
    all_loads: list[Tensor] = []
    figures: list[Tensor] = []
    for batch in _batches([router for _, router in routers]):
        histograms = [router.balance for router in batch]
        bias = torch.stack([router.e_score_correction_bias for router in batch])  # [layers, E]
        estimate = next_biases(histograms, bias)  # the bias itself where no token was counted
        tokens = torch.stack([histogram.tokens for histogram in histograms]).long()
        loads = torch.stack([histogram.loads for histogram in histograms]).long()
        new = estimate if ema is None else torch.lerp(estimate, bias, ema)
        for router, new_bias in zip(batch, new.unbind(), strict=True):
            router.e_score_correction_bias.copy_(new_bias)
            router.balance.reset()
        all_tokens.append(tokens.to(device))
        all_loads += loads.unbind()
        figures.append(_load_figures(loads, tokens, histograms[0].top_k).to(device))
    violation, variation, dead = torch.cat(figures).unbind(dim=1)
    names = tuple(name for name, _ in routers)
    return BalanceReport(names, torch.cat(all_tokens), tuple(all_loads), violation, variation, dead)


def register_quantile_balancing(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    process_group: dist.ProcessGroup | None = None,
    ema: float | None = None,
    on_report: Callable[[BalanceReport], Any] | None = None,
) -> RemovableHandle:
    """Balance the routers of ``model`` before every ``optimizer.step()``; for training loops without a Trainer.

    With several optimizers register on one of them. An optimizer that accelerate prepared may be passed, too: only
    steps that it does not hold back count. If an fp16 gradient scaler skips a step, the statistics wait for the next
    one. Arguments as in :func:`update_selection_bias`; statistics collected earlier are dropped.

    Args:
        on_report: called with the :class:`BalanceReport` of each step.

    Returns:
        A handle; ``handle.remove()`` ends it.

    Raises:
        ValueError: if the model has no router or only frozen ones, or ``ema`` is outside [0, 1).
    """
    _check_ema(ema)
    _start(model)

    def before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        report = update_selection_bias(model, process_group=process_group, ema=ema)
        if on_report is not None:
            on_report(report)

    # accelerate's wrapper is an `Optimizer` that calls no hooks; the one inside it does.
    return getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(before_step)


class QuantileBalancingCallback(TrainerCallback):
    """Quantile balancing for :class:`transformers.Trainer`: ``Trainer(..., callbacks=[QuantileBalancingCallback()])``.

    Works at ``on_pre_optimizer_step``: once per update, after all micro-batches of gradient accumulation. Evaluation
    leaves the bias alone, because a model in eval mode collects nothing. The bias is an ordinary buffer of the model,
    so checkpoints carry it and resuming needs nothing else. Checkpoints of adapters do not: there the callback adds
    `selection_bias.safetensors`, and reads it when training resumes from `output_dir`. The step that the Trainer takes
    beyond `max_steps` when a finished run is resumed is left without effect.

    Adds to the Trainer's training logs (means over the steps since the last log):

    - ``expert_load/max_violation``: ``max load / mean load - 1``, mean over layers;
    - ``expert_load/max_violation_worst``: the same of the worst layer;
    - ``expert_load/cv``: standard deviation of the load over its mean, mean over layers;
    - ``expert_load/dead``: experts that no token of the step selected, all layers together.

    They appear in ``trainer.state.log_history`` and the progress bar. Reporting integrations (TensorBoard, ...) are
    called before a user's callbacks; :meth:`install` puts this callback in front of them.

    Args:
        ema: see :func:`update_selection_bias`.
        process_group: see :func:`update_selection_bias`; ``None``, all ranks, fits everything the Trainer launches.

    Attributes:
        last_report: :class:`BalanceReport` of the latest step, ``None`` before the first.

    Raises:
        ValueError: at construction if ``ema`` is outside [0, 1); when training begins if the model has no router or
            only frozen ones, if the Trainer would use ``nn.DataParallel``, or if adapters resume from a checkpoint
            without their bias.
    """

    _LOG_KEYS = tuple(f"expert_load/{key}" for key in ("max_violation", "max_violation_worst", "cv", "dead"))

    def __init__(self, *, ema: float | None = None, process_group: dist.ProcessGroup | None = None) -> None:
        _check_ema(ema)
        self.ema = ema
        self.process_group = process_group
        self.last_report: BalanceReport | None = None
        self._window: Tensor | None = None  # [2, 4]: sums and counts of the summaries since the last log

    def install(self, trainer: Any) -> QuantileBalancingCallback:
        """Add this callback to ``trainer`` in front of its reporting integrations, and return it."""
        callbacks = trainer.callback_handler.callbacks
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)
        return self

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.n_gpu > 1:
            raise ValueError(
                f"quantile balancing needs one process per GPU, got `nn.DataParallel` over {args.n_gpu} GPUs: start "
                "the script with `torchrun` or `accelerate launch`, or set CUDA_VISIBLE_DEVICES to one GPU."
            )
        _start(kwargs["model"])
        self.last_report = None
        self._window = None
        if state.global_step > 0 and _saves_adapters_only(kwargs["model"]):
            load_selection_bias(kwargs["model"], _checkpoint_folder(args, state))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if 0 < state.max_steps <= state.global_step:
            # Resumed when all steps are done, within an epoch, the Trainer takes one more: neither statistics nor
            # gradients of it must change the model.
            _start(kwargs["model"])
            kwargs["optimizer"].zero_grad()
            return
        self.last_report = update_selection_bias(kwargs["model"], process_group=self.process_group, ema=self.ema)
        summary = self.last_report.summary()
        entry = torch.stack((summary.nan_to_num(0.0), summary.isfinite().to(summary.dtype)))
        self._window = entry if self._window is None else self._window + entry

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # Before the Trainer writes its checkpoint: one that is whole has the bias, at whatever moment a run is killed.
        if control.should_save and args.should_save and _saves_adapters_only(kwargs["model"]):
            save_selection_bias(kwargs["model"], _checkpoint_folder(args, state))

    on_epoch_end = on_step_end

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # The Trainer decides on `save_strategy="best"` after the last event before it saves.
        folder = _checkpoint_folder(args, state)
        is_there = (folder / SELECTION_BIAS_FILE).is_file()
        if not is_there and args.should_save and _saves_adapters_only(kwargs["model"]):
            save_selection_bias(kwargs["model"], folder)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # Evaluation and the end-of-training summary log here too; only a training log has a "loss".
        if logs is None or "loss" not in logs or self._window is None:
            return
        sums, counts = self._window.tolist()
        self._window = None
        figures = {
            key: total / count for key, total, count in zip(self._LOG_KEYS, sums, counts, strict=True) if count > 0
        }
        logs.update(figures)
        # The Trainer copied `logs` into the history before it called the callbacks.
        if state.log_history:
            state.log_history[-1].update(figures)


def _start(model: nn.Module) -> None:
    """Refuse a model without routers to balance; drop what earlier forwards left; declare that statistics are read.

    Their memory is taken here, so that a compiled forward finds it in place and is compiled once.
    """
    routers = balanced_routers(model)
    if not routers:
        raise ValueError(
            f"expected a model with routers to balance, got {type(model).__name__} with none: leave quantile "
            "balancing out for a dense model."
        )
    if not any(router.balance.enabled for _, router in routers):
        raise ValueError(
            f"expected routers whose selection bias may change, got {len(routers)} frozen ones: leave quantile "
            "balancing out, or call `freeze_selection_bias(model, frozen=False)`."
        )
    for _, router in routers:
        router.balance.allocate(router.e_score_correction_bias.device)
        router.balance.reset()
        router.balance.has_reader = True


def _saves_adapters_only(model: nn.Module) -> bool:
    """Whether `save_pretrained` writes adapters instead of the model: PEFT's wrapper, or `model.add_adapter`."""
    return hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False)


def _checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _check_ema(ema: float | None) -> None:
    if ema is not None and not 0.0 <= ema < 1.0:
        raise ValueError(f"`ema`, the share of the old bias, must lie in [0, 1), got {ema}: use None for no average.")


def _is_distributed(group: dist.ProcessGroup | None) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def _refuse_pipeline_stages(model: nn.Module) -> None:
    distributed_config = getattr(getattr(model, "config", None), "distributed_config", None)
    stages = getattr(distributed_config, "pp_size", 1)
    if stages > 1:
        raise ValueError(
            f"the model is split into pp_size={stages} pipeline stages, which hold different routers: pass "
            "`process_group`, the ranks of this stage."
        )


def _batches(routers: list[BalancedRouter]) -> Iterator[list[BalancedRouter]]:
    """The routers in order, neighbours that are alike together, so that a GPU has few kernels to run for them."""

    def kind(router: BalancedRouter) -> tuple[Any, ...]:
        bias, histogram = router.e_score_correction_bias, router.balance
        return bias.device, bias.dtype, histogram.num_experts, histogram.top_k, histogram.num_bins

    for (*_, num_experts, _, num_bins), group in itertools.groupby(routers, kind):
        alike = list(group)
        size = max(1, COUNTS_AT_ONCE // (num_experts * num_bins))
        yield from (alike[start : start + size] for start in range(0, len(alike), size))


def _load_figures(loads: Tensor, tokens: Tensor, top_k: int) -> Tensor:
    """Max violation, coefficient of variation and dead experts, float32 [layers, 3]; NaN without tokens.

    Loads are int64 [layers, E], tokens int64 [layers].
    """
    relative = loads.to(torch.float32) * loads.shape[1] / (tokens * top_k)[:, None]
    dead = torch.where(tokens > 0, (loads == 0).sum(dim=1).to(torch.float32), torch.nan)
    return torch.stack((relative.amax(dim=1) - 1, relative.std(dim=1, correction=0), dead), dim=1)
