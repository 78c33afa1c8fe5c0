# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps of `generate` on a static cache, replayed from a CUDA graph: decoding waits for Python otherwise.

A step of one token is some four hundred kernels, and a host launches them more slowly than a GPU runs them. A CUDA
graph holds all of them, with the addresses of weights, cache and inputs, and is launched at once. It computes what the
eager step computes, kernel by kernel; recording it takes as long as one eager step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.distributed.utils import is_dtensor
from transformers.modeling_outputs import ModelOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

logger = logging.get_logger(__name__)


def recording_obstacle(model: PreTrainedModel) -> str | None:
    """Why decoding steps of `model` cannot be recorded as a CUDA graph of one GPU; `None` if they can."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        return f"it is on {len(devices)} devices"
    if getattr(model, "_device_mesh", None) is not None or any(map(is_dtensor, model.parameters())):
        return "it is spread over processes"
    if model._compiled_call_impl is not None or hasattr(model.forward, "_torchdynamo_orig_callable"):
        return "it is compiled, which has graphs of its own"
    if "full_attention" not in model.config.get_text_config().layer_types:
        return "it has KDA layers only, for which the masks of `generate` grow"
    return None


class RecordedStep(NamedTuple):
    """One step of decoding.

    Attributes:
        replay: runs the step over what `inputs` hold at that moment.
        inputs: tensors that the step reads, by name; copied to before each replay.
        output: what the model returned; its tensors are written by each replay.
    """

    replay: Callable[[], None]
    inputs: dict[str, Tensor]
    output: ModelOutput


class GraphedDecoding:
    """The call of a model, for one `generate`: steps of one token on a static cache are replayed.

    The first step runs eagerly and compiles what must be compiled, the second is recorded. A call of another kind
    (several tokens, padding among the new tokens) runs eagerly whenever it comes, and so do all if recording fails,
    which is logged. The graph and its memory live as long as this object.
    """

    def __init__(self, model: Callable[..., ModelOutput]) -> None:
        self.model = model
        self._seen: list[tuple[Any, ...]] | None = None
        self._step: RecordedStep | None = None
        self._can_record = True

    def __call__(self, **inputs: Any) -> ModelOutput:
        """Output of the model for these arguments; its tensors belong to the caller."""
        if not (self._can_record and _is_decoding(inputs)):
            return self.model(**inputs)
        signature = list(_signature(inputs))
        if signature != self._seen:
            self._seen, self._step = signature, None
            return self.model(**inputs)
        if self._step is None:
            try:
                self._step = self._record(inputs)
            except RuntimeError as error:
                self._can_record = False
                logger.warning_once(
                    "decoding runs eagerly: its step could not be recorded as a CUDA graph, because something in it, "
                    f"e.g. a hook, waits for the GPU ({str(error).splitlines()[0]})."
                )
                return self.model(**inputs)
        for name, tensor in _tensors(inputs):
            self._step.inputs[name].copy_(tensor, non_blocking=True)
        self._step.replay()
        return type(self._step.output)({name: _cloned(value) for name, value in self._step.output.items()})

    def _record(self, inputs: dict[str, Any]) -> RecordedStep:
        """The step, recorded but not run."""
        static = _cloned(inputs)
        replay, output = record(functools.partial(self.model, **static), static["input_ids"].device)
        return RecordedStep(replay, dict(_tensors(static)), output)


def record(step: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """`step` as a CUDA graph of `device`: its replay, and its result, whose tensors every replay writes.

    Raises:
        RuntimeError: `step` waits for the GPU, or fails by itself. What comes later is not affected.
    """
    graph, stream, before = torch.cuda.CUDAGraph(), _recording_stream(device), torch.cuda.current_stream(device)
    # A streamer's thread may use the GPU meanwhile, which would break a recording that watches all threads.
    recording = functools.partial(torch.cuda.graph, stream=stream, capture_error_mode="thread_local")
    with torch.cuda.device(device):
        try:
            with recording(graph):
                output = step()
        except RuntimeError:
            # PyTorch stays on the stream of a broken recording, and in that of random numbers until one is whole.
            torch.cuda.set_stream(before)
            with recording(torch.cuda.CUDAGraph()):
                torch.zeros(1, device=device)
            raise
    return graph.replay, output


@functools.cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: libraries keep memory for every stream that they have met."""
    return torch.cuda.Stream(device)


def _is_decoding(inputs: dict[str, Any]) -> bool:
    """Whether these are one token per row behind a static cache, for which `generate` makes masks of one shape."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    is_token = isinstance(ids, Tensor) and ids.shape[1] == 1
    return is_token and isinstance(mask, dict) and mask["linear_attention"] is None


def _flat(inputs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in inputs.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", part) for inner, part in value.items())
        else:
            yield name, value


def _tensors(inputs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    return ((name, value) for name, value in _flat(inputs) if isinstance(value, Tensor))


def _signature(inputs: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Equal for calls that launch the same kernels on the same cache."""
    for name, value in _flat(inputs):
        yield (name, value.shape, value.dtype, value.device) if isinstance(value, Tensor) else (name, value)


def _cloned(value: Any) -> Any:
    """The same with tensors of its own; a cache stays what it is."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _cloned(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_cloned(part) for part in value)
    return value
