# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""`generate` with a static cache replays its steps: on a GPU from real graphs, elsewhere from a stand-in for them."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import CompileConfig, StaticCache
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

from deltalatent.modeling import decoding_graph, latent_attention
from deltalatent.modeling.decoding_graph import GraphedDecoding
from deltalatent.modeling.modeling_kimi_k3 import KimiK3TextModel
from deltalatent.training import lora_targets
from tests.equivalence import ONE_KIND
from tests.modeling.test_launches import Copies
from tests.testing_common import assert_close, left_padded, random_ids, tiny_model
from tests.vision.vision_testing import prompt, random_media, tiny_multimodal_model

NEW = 8
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
STATIC = {"cache_implementation": "static"}


def tensors_of(cache: StaticCache) -> list[Tensor]:
    layers = [layer.__dict__.values() for layer in cache.layers]
    values = [value for layer in layers for value in layer]
    values += [inner for value in values if isinstance(value, dict) for inner in value.values()]
    return [value for value in values if isinstance(value, Tensor)]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What a graph does, without one: recording computes nothing, a replay writes to the tensors of the recording.

    The list has the number of the graph of each replay.
    """
    numbers: list[int] = []
    count = iter(range(1000))

    def record(step: Any, device: torch.device) -> tuple[Callable[[], None], Any]:
        cache = step.keywords["cache"]
        before = [tensor.clone() for tensor in tensors_of(cache)]
        output = step()
        for tensor, old in zip(tensors_of(cache), before, strict=True):
            tensor.copy_(old)
        recorded = flat(output)
        for tensor in recorded:
            tensor.fill_(float("nan"))
        number = next(count)

        def replay() -> None:
            numbers.append(number)
            for tensor, new in zip(recorded, flat(step()), strict=True):
                tensor.copy_(new)

        return replay, output

    monkeypatch.setattr(decoding_graph, "record", record)
    return numbers


def flat(output: Any) -> list[Tensor]:
    values = [value for value in output.values() if isinstance(value, Tensor | tuple)]
    return [tensor for value in values for tensor in (value if isinstance(value, tuple) else (value,))]


def graphed(model: Any) -> Any:
    """The model as on a GPU, where `generate` asks for a compiled call."""
    model._valid_auto_compile_criteria = lambda inputs, config: inputs["cache"].is_compileable
    model.get_compiled_call = lambda compile_config: GraphedDecoding(model.__call__)
    return model


def batch(model: Any, lengths: tuple[int, ...] = (9, 4)) -> dict[str, Tensor]:
    ids, mask = left_padded([random_ids(model.config, 1, length, seed=length)[0] for length in lengths])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("lengths", [(9,), (9, 4), (1, 1)], ids=str)
def test_tokens_are_those_of_eager_steps(replays: list[int], lengths: tuple[int, ...]) -> None:
    """The prompt and the first step run, the second is recorded, and it and all later ones are replayed."""
    model = tiny_model()
    inputs = batch(model, lengths)
    expected = model.generate(**inputs, **GREEDY)
    assert torch.equal(graphed(model).generate(**inputs, **GREEDY, **STATIC), expected)
    assert replays == [0] * (NEW - 2)


def test_every_call_has_a_graph_of_its_own(replays: list[int]) -> None:
    """A graph holds the addresses of one cache."""
    model = tiny_model()
    for number, lengths in enumerate([(9, 4), (5, 5)]):
        inputs = batch(model, lengths)
        expected = model.generate(**inputs, **GREEDY)
        assert torch.equal(graphed(model).generate(**inputs, **GREEDY, **STATIC), expected)
        assert replays == [number] * (NEW - 2)
        replays.clear()


def test_turns_of_a_conversation_on_one_cache(replays: list[int]) -> None:
    """A static cache that the user made with room for all of them."""
    model = tiny_model()
    conversation = random_ids(model.config, 1, 7)
    cache = StaticCache(model.config, 40)
    for turn in range(2):
        expected = model.generate(conversation, **GREEDY, use_cache=False)
        written = graphed(tiny_model()).generate(conversation, **GREEDY, cache=cache)
        assert torch.equal(written, expected)
        assert replays == [0] * (NEW - 2) + [1] * (NEW - 2) * turn
        conversation = torch.cat([written, random_ids(model.config, 1, 4, seed=turn)], 1)


@pytest.mark.parametrize("size", [1, 4])
def test_a_prompt_in_chunks(replays: list[int], size: int) -> None:
    """Chunks of one token are no steps while there is padding among them; longer ones never are."""
    model = tiny_model()
    inputs = batch(model)
    expected = model.generate(**inputs, **GREEDY)
    assert torch.equal(graphed(model).generate(**inputs, **GREEDY, **STATIC, prefill_chunk_size=size), expected)
    assert len(replays) >= NEW - 2


def test_what_a_step_returns_is_not_overwritten_by_the_next(replays: list[int]) -> None:
    model = tiny_model()
    more = {"return_dict_in_generate": True, "output_hidden_states": True, "output_logits": True}
    expected = model.generate(**batch(model), **GREEDY, **more)
    written = graphed(model).generate(**batch(model), **GREEDY, **STATIC, **more)
    assert replays
    for step in range(1, NEW):
        assert_close(written.logits[step], expected.logits[step])
        for one, other in zip(written.hidden_states[step], expected.hidden_states[step], strict=True):
            assert_close(one, other)


def test_sampling_draws_the_tokens_of_eager_steps(replays: list[int]) -> None:
    model = tiny_model()
    drawn = []
    for make in (lambda model: model, graphed):
        torch.manual_seed(5)
        options = GREEDY | {"do_sample": True, "num_return_sequences": 3}
        drawn.append(make(model).generate(**batch(model), **options, **STATIC))
    assert torch.equal(*drawn)
    assert replays


def with_images() -> tuple[Any, Any, dict[str, Tensor]]:
    """What generates, what is called for a step, and a batch of which one row has two images."""
    model = tiny_multimodal_model()
    return model, model, prompt([3, (1, 2, 8), 4, (1, 6, 2)], [5]) | random_media((1, 2, 8), (1, 6, 2))


def with_adapters() -> tuple[Any, Any, dict[str, Tensor]]:
    model = tiny_model()
    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **lora_targets(model.config))
    return get_peft_model(model, config).eval(), model, batch(model)


@pytest.mark.parametrize("make", [with_images, with_adapters])
def test_images_and_adapters(replays: list[int], make: Callable[[], tuple[Any, Any, dict[str, Tensor]]]) -> None:
    model, base, inputs = make()
    expected = model.generate(**inputs, **GREEDY)
    graphed(base)
    assert torch.equal(model.generate(**inputs, **GREEDY, **STATIC), expected)
    assert replays == [0] * (NEW - 2)


def test_adapters_of_latents_do_not_wait_in_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """They forbid the absorbed form, and the expanded one asked for the length of the cache."""
    model, base, inputs = with_adapters()
    token = inputs["input_ids"][:, -1:]
    cache = StaticCache(base.config, 16)
    with torch.no_grad():
        base(**inputs, cache=cache)
        other = copy.deepcopy(cache)
        masks = base.create_masks_for_generate(base.config, token[..., None], inputs["attention_mask"], cache)
        expected = model(input_ids=token, attention_mask=masks, cache=cache).logits
        monkeypatch.setattr(latent_attention, "_is_recording", lambda device: True)
        monkeypatch.setattr(
            KimiK3TextModel, "_check_token_ids", lambda self, ids: None
        )  # looks at them, on a CPU only
        with Copies() as copies:
            logits = model(input_ids=token, attention_mask=masks, cache=other).logits
    assert_close(logits, expected)
    assert not copies.calls["_local_scalar_dense"]


def test_another_shape_in_between(replays: list[int]) -> None:
    """The call of a model stays that of a model: whatever comes in between runs, and recording begins anew."""
    model = tiny_model()
    ids = random_ids(model.config, 2, 12)
    cache, other = StaticCache(model.config, 16), StaticCache(model.config, 16)
    call = GraphedDecoding(model)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        model(ids[:, :5], cache=cache)
        model(ids[:1, :5], cache=other)
        for t in range(5, 12):
            masks = {"full_attention": None, "linear_attention": None}
            if t == 9:
                call(input_ids=ids[:1, t : t + 1], attention_mask=masks, cache=other)
            logits = call(input_ids=ids[:, t : t + 1], attention_mask=masks, cache=cache).logits
            assert_close(logits[:, 0], expected[:, t], 5e-5)
    assert replays == [0, 0, 0, 1, 1]  # steps 6 to 8, 10 and 11


def test_the_graph_is_gone_after_the_call(replays: list[int]) -> None:
    model = tiny_model()
    calls: list[weakref.ref[GraphedDecoding]] = []

    def get(compile_config: CompileConfig | None) -> GraphedDecoding:
        call = GraphedDecoding(model.__call__)
        calls.append(weakref.ref(call))
        return call

    graphed(model).get_compiled_call = get
    model.generate(**batch(model), **GREEDY, **STATIC)
    gc.collect()
    assert replays and all(call() is None for call in calls)


def test_a_step_that_cannot_be_recorded_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[Any] = []

    def record(step: Any, device: torch.device) -> None:
        attempts.append(step)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(decoding_graph, "record", record)
    model = tiny_model()
    expected = model.generate(**batch(model), **GREEDY)
    with CaptureLogger(decoding_graph.logger) as captured:
        assert torch.equal(graphed(model).generate(**batch(model), **GREEDY, **STATIC), expected)
    assert len(attempts) == 1
    assert "decoding runs eagerly" in captured.out and "when stream is capturing" in captured.out


def test_who_gets_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    assert not isinstance(model.get_compiled_call(None), GraphedDecoding)  # a CPU
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert isinstance(model.get_compiled_call(None), GraphedDecoding)
    assert not isinstance(model.get_compiled_call(CompileConfig()), GraphedDecoding)  # asked for `torch.compile`

    spread, compiled, sharded = copy.deepcopy(model), copy.deepcopy(model), copy.deepcopy(model)
    spread.lm_head.to("meta")
    compiled.forward = torch.compile(compiled.forward, backend="eager")
    sharded._device_mesh = object()
    for other in (spread, compiled, sharded, tiny_model(**ONE_KIND["kda_only"])):
        with CaptureLogger(logging.get_logger("deltalatent.modeling.modeling_kimi_k3")) as captured:
            assert other.get_compiled_call(None) == other.__call__
        assert "decoding runs eagerly" in captured.out


def test_generate_asks_for_it_where_transformers_would_compile(replays: list[int]) -> None:
    """The names by which Transformers does: if they change, this fails, where a GPU would silently be slow."""
    model = tiny_model()
    expected = model.generate(**batch(model), **GREEDY)
    asked: list[Any] = []

    def get(compile_config: CompileConfig | None) -> GraphedDecoding:
        asked.append(compile_config)
        return GraphedDecoding(model.__call__)

    model.get_compiled_call = get
    everywhere = CompileConfig()
    everywhere._compile_all_devices = True
    options = {"compile_config": everywhere, **GREEDY}
    assert torch.equal(model.generate(**batch(model), **options, **STATIC), expected)
    assert asked == [everywhere] and replays
    model.generate(**batch(model), **options)
    model.generate(**batch(model), **options, **STATIC, disable_compile=True)
    assert len(asked) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_real_graphs(dtype: torch.dtype) -> None:
    """On a GPU the same kernels run in both ways, so that tokens and logits are the same to the bit."""
    model = tiny_model().to("cuda", dtype)
    inputs = {name: tensor.cuda() for name, tensor in batch(model, (9, 4, 1)).items()}
    more = {"return_dict_in_generate": True, "output_logits": True}
    eager = model.generate(**inputs, **GREEDY, **STATIC, **more, disable_compile=True)
    replayed = model.generate(**inputs, **GREEDY, **STATIC, **more)
    assert torch.equal(replayed.sequences, eager.sequences)
    assert torch.equal(torch.stack(replayed.logits), torch.stack(eager.logits))


@pytest.mark.gpu
@pytest.mark.parametrize("make", [with_images, with_adapters])
def test_real_graphs_of_images_and_adapters(make: Callable[[], tuple[Any, Any, dict[str, Tensor]]]) -> None:
    """In float32; with adapters, another kernel of PyTorch attends to the cache in a recording."""
    model, _, inputs = make()
    model.cuda()
    inputs = {name: tensor.cuda() for name, tensor in inputs.items()}
    more = {"return_dict_in_generate": True, "output_logits": True, **STATIC, **GREEDY}
    eager = model.generate(**inputs, **more, disable_compile=True)
    with CaptureLogger(decoding_graph.logger) as captured:
        decoding_graph.logger.warning_once.cache_clear()
        replayed = model.generate(**inputs, **more)
    assert not captured.out
    assert_close(torch.stack(replayed.logits), torch.stack(eager.logits))


@pytest.mark.gpu
@pytest.mark.parametrize("wait", [lambda x: x.sum().item(), lambda x: torch.cuda.synchronize()], ids=["item", "sync"])
def test_a_hook_that_waits_costs_the_graph_and_nothing_else(wait: Callable[[Tensor], Any]) -> None:
    """PyTorch 2.11 left random numbers and the stream as they were in the middle of a recording that broke."""
    model: Any = tiny_model().cuda()
    inputs = {name: tensor.cuda() for name, tensor in batch(model).items()}
    expected = model.generate(**inputs, **GREEDY)
    stream = torch.cuda.current_stream()
    hook = model.model.norm.register_forward_pre_hook(lambda module, args: wait(args[0]) and None)
    with CaptureLogger(decoding_graph.logger) as captured:
        decoding_graph.logger.warning_once.cache_clear()
        assert torch.equal(model.generate(**inputs, **GREEDY, **STATIC), expected)
    assert "decoding runs eagerly" in captured.out
    assert torch.cuda.current_stream() == stream
    drawn = GREEDY | {"do_sample": True}
    assert model.generate(**inputs, **drawn, **STATIC).shape == expected.shape
    hook.remove()
    assert torch.equal(model.generate(**inputs, **GREEDY, **STATIC), expected)
