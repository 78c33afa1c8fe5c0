# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""A `Trainer` that replays forward and backward pass from a CUDA graph: small models wait for Python otherwise.

A step of a small model is some two thousand kernels, and a host launches them more slowly than a GPU runs them. A CUDA
graph holds all of them, with the addresses of all their tensors, and is launched at once. What stays as it is: the
optimizer, clipping, the schedule, callbacks, evaluation and checkpoints, which `Trainer` runs between the passes.

The graph computes what the eager step computes, kernel by kernel. It needs batches of one shape; others run eagerly.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_utils import TrainOutput
from transformers.training_args import OptimizerNames, TrainingArguments

logger = logging.getLogger(__name__)

CAPTURABLE_INPUTS = {"input_ids", "labels", "shift_labels", "token_type_ids"}
"""Whatever their values, the model launches the same kernels. Masks, offsets and images decide about shapes."""


class CapturedStep(NamedTuple):
    """Forward and backward pass of one micro-batch.

    Attributes:
        replay: launches the passes over what `inputs` hold at that moment.
        inputs: arguments of the model, by name, and "num_items_in_batch"; copied to before each replay.
        loss: 0-d, written by each replay.
        gradients: pairs of a parameter and the tensor that a replay writes its gradient to, or adds it to.
    """

    replay: Callable[[], None]
    inputs: dict[str, Tensor]
    loss: Tensor
    gradients: list[tuple[nn.Parameter, Tensor]]


class CudaGraphTrainer(Trainer):
    """`Trainer` on one GPU whose forward and backward pass are replayed from CUDA graphs.

    The first `warmup_steps` micro-batches of a shape are trained on eagerly; then the step is captured, twice with
    gradient accumulation: the first micro-batch after `zero_grad` writes the gradients, the others add to them. The
    graphs share one pool of memory, which holds the activations of a step for good.

    Batches whose shapes or kernels depend on values (padding, packed documents, images) run eagerly, which is logged
    once. An `attention_mask` of ones says nothing and is left out; looking at it waits for the GPU, so better let
    the data set do without. `logging_nan_inf_filter=False` saves the other wait of each step.

    Raises:
        ValueError: the arguments ask for something that a graph cannot hold: several processes or GPUs, activation
            checkpointing that saves the state of the random numbers, `torch_compile`, `torch_empty_cache_steps`, or an
            optimizer that steps during the backward pass.
        RuntimeError: capturing fails, because the model or `compute_loss` waits for the GPU; the cause is chained.
    """

    warmup_steps = 3

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check_arguments(self.args)
        self._steps: dict[tuple[Any, ...], CapturedStep] = {}
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._pool: Any = None

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """See `Trainer.train`. The graphs and their memory are given back at the end."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self._steps.clear()
            self._seen.clear()
            self._pool = None

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Loss of a micro-batch, whose gradients are added to those of the parameters; see `Trainer.training_step`."""
        inputs = _without_mask_of_ones(self._prepare_inputs(inputs))
        obstacles = sorted(set(inputs) - CAPTURABLE_INPUTS)
        if obstacles:
            _explain_once(tuple(obstacles))
            return super().training_step(model, inputs, num_items_in_batch)
        if num_items_in_batch is not None:
            inputs["num_items_in_batch"] = torch.as_tensor(num_items_in_batch, device=self.args.device)

        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        first = all(parameter.grad is None for parameter in trained)
        shape = (self.current_gradient_accumulation_steps, *_signature(inputs))
        if (first, shape) not in self._steps:
            self._seen[shape] += 1
            # The first micro-batch is captured first: its gradients are the tensors that the others add to.
            if self._seen[shape] <= self.warmup_steps or not (first or (True, shape) in self._steps):
                return self._eager_step(model, inputs)
            self._steps[first, shape] = self._capture(model, inputs, trained)
        step = self._steps[first, shape]
        for name, tensor in step.inputs.items():
            tensor.copy_(inputs[name], non_blocking=True)
        for parameter, buffer in () if first else step.gradients:
            if parameter.grad is None:
                buffer.zero_()
            elif parameter.grad is not buffer:
                buffer.copy_(parameter.grad)
        if not model.training:
            model.train()
        step.replay()
        for parameter, buffer in step.gradients:
            parameter.grad = buffer
        return step.loss.clone()

    def _eager_step(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        batch = dict(inputs)
        num_items_in_batch = batch.pop("num_items_in_batch", None)
        return super().training_step(model, batch, num_items_in_batch)

    def _capture(self, model: nn.Module, inputs: dict[str, Tensor], trained: list[nn.Parameter]) -> CapturedStep:
        """Record a step without running it."""
        static = {name: tensor.clone() for name, tensor in inputs.items()}
        try:
            replay, loss, self._pool = capture(lambda: self._eager_step(model, static), self._pool)
        except RuntimeError as error:
            raise RuntimeError(
                "the forward and backward pass of this batch cannot be captured as a CUDA graph: they must not wait "
                "for the GPU, as `.item()` and shapes that depend on values do. Repair the cause that is chained to "
                "this message, or use `transformers.Trainer`."
            ) from error
        gradients = [(parameter, parameter.grad) for parameter in trained if parameter.grad is not None]
        return CapturedStep(replay, static, loss, gradients)


def capture(step: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], None], Tensor, Any]:
    """Record `step` as a CUDA graph.

    Args:
        step: what to record; a tensor that it returns is written by every replay.
        pool: memory of an earlier graph to take part in, or `None`.

    Returns:
        The replay, the result of `step`, and the memory of the graph.
    """
    graph = torch.cuda.CUDAGraph()
    # Threads of the data loader pin memory meanwhile, which would break a capture that watches all threads.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = step()
    return graph.replay, result, graph.pool()


def _signature(inputs: dict[str, Tensor]) -> tuple[Any, ...]:
    return tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in sorted(inputs.items()))


def _without_mask_of_ones(inputs: dict[str, Any]) -> dict[str, Any]:
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and bool(mask.all()):
        return {name: value for name, value in inputs.items() if name != "attention_mask"}
    return dict(inputs)


@functools.cache
def _explain_once(names: tuple[str, ...]) -> None:
    logger.warning(
        "batches with %s are trained on eagerly: shapes or kernels depend on their values, which a CUDA graph cannot "
        "hold. Batches of `input_ids` and `labels` of one shape, without padding, are replayed.",
        ", ".join(f"`{name}`" for name in names),
    )


def _check_arguments(args: TrainingArguments) -> None:
    """Raise ValueError for what a graph of one process cannot hold."""
    options = args.activation_checkpointing_kwargs
    preserve = options.get("preserve_rng_state", True) if isinstance(options, dict) else True
    obstacles = {
        f"a CUDA GPU is needed, got device {args.device}": args.device.type != "cuda",
        f"one process is needed, got {args.world_size}": args.world_size > 1,
        f"one GPU is needed, got {args.n_gpu} in one process: set CUDA_VISIBLE_DEVICES": args.n_gpu > 1,
        "`fsdp` and `deepspeed` run collectives of their own: leave them out": bool(args.fsdp or args.deepspeed),
        "`torch_compile` has graphs of its own: leave it out, or use `transformers.Trainer`": args.torch_compile,
        "`torch_empty_cache_steps` cannot give back memory of a graph: leave it out": (
            args.torch_empty_cache_steps is not None
        ),
        f"`optim={args.optim}` steps during the backward pass: use another optimizer": (
            args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO)
        ),
        "`activation_checkpointing` saves the state of the random numbers, which waits for the GPU: if no dropout is "
        'active, pass `activation_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False}`': (
            args.activation_checkpointing and preserve
        ),
    }
    found = [message for message, present in obstacles.items() if present]
    if found:
        raise ValueError(
            f"`CudaGraphTrainer` cannot run with these arguments: {'; '.join(found)}. `transformers.Trainer` has no "
            "such limits."
        )
