# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""`accelerate` against the models as Transformers ships them, and against runs of each document by itself."""

import copy
import inspect
import io
import pickle
import re
import sys
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from deltalatent.kernels import accelerate, restore
from tests.equivalence import ROUNDED
from tests.kernels.triton_testing import DEVICE, needs_triton
from tests.testing_common import assert_close, assert_gradients_close, gradients, randomize_, tiny_model

with pytest.MonkeyPatch.context() as patch:
    # "As shipped" is plain PyTorch; where flash-linear-attention is installed, these models give it CPU tensors, too.
    patch.setitem(sys.modules, "fla", None)
    from transformers.models.glm5_next import (
        Glm5NextConfig,
        Glm5NextForConditionalGeneration,
        Glm5NextTextConfig,
        Glm5NextVisionConfig,
    )
    from transformers.models.kimi_linear import KimiLinearConfig, KimiLinearForCausalLM

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 12,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
    "num_experts_per_tok": 2,
    "linear_head_dim": 16,
    "linear_num_heads": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def kimi_linear(**fields) -> KimiLinearForCausalLM:
    layer_types = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    config = KimiLinearConfig(
        num_local_experts=4,
        qk_rope_head_dim=4,
        **(COMMON | {"layer_types": layer_types} | fields),
    )
    return randomize_(KimiLinearForCausalLM(config)).eval()


def glm5_next(**fields) -> Glm5NextForConditionalGeneration:
    """A selection of 8 of the earlier tokens, shared by two layers, in a model whose vision part stands idle."""
    text = Glm5NextTextConfig(
        n_routed_experts=4,
        q_lora_rank=16,
        layer_types=["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
        indexer_types=["full", "full", "shared", "full"],
        index_topk=8,
        index_kpool=4,
        index_head_dim=8,
        index_n_heads=4,
        hc_mult=2,
        **(COMMON | fields),
    )
    vision = Glm5NextVisionConfig(
        depth=1, hidden_size=16, num_heads=2, out_hidden_size=32, intermediate_size=16, projection_intermediate_size=16
    )
    tokens = {name: 50 + i for i, name in enumerate(("image_token_id", "image_start_token_id", "image_end_token_id",
              "video_token_id", "video_start_token_id", "video_end_token_id"))}  # fmt: skip
    return randomize_(
        Glm5NextForConditionalGeneration(Glm5NextConfig(text_config=text, vision_config=vision, **tokens))
    ).eval()


MODELS = {
    "kimi_linear": kimi_linear,
    "kimi_linear_eager": lambda: kimi_linear(attn_implementation="eager"),
    "glm5_next": glm5_next,
    "glm5_next_softplus": lambda: glm5_next(linear_lower_bound=None),
}


VARIANTS = pytest.mark.parametrize("shipped", MODELS, indirect=True)


@pytest.fixture(params=["kimi_linear", "glm5_next"])
def shipped(request):
    return MODELS[request.param]()


@pytest.fixture
def ours(shipped):
    return accelerate(copy.deepcopy(shipped), impl="torch")


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(2, 50, shape)


def left_padded() -> dict[str, torch.Tensor]:
    mask = torch.ones(3, 21, dtype=torch.long)
    mask[0, :9] = mask[2, :1] = 0
    return {"input_ids": ids(3, 21) * mask, "attention_mask": mask}


def logits(model: nn.Module, **inputs) -> torch.Tensor:
    return model(**{"use_cache": False} | inputs).logits


@VARIANTS
@pytest.mark.parametrize("batch", ["plain", "left_padded"])
def test_outputs_and_gradients_are_those_of_the_model_as_shipped(shipped, ours, batch):
    inputs = {"input_ids": ids(2, 70)} if batch == "plain" else left_padded()
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    expected, actual = logits(shipped, **inputs)[real], logits(ours, **inputs)[real]
    assert_close(actual, expected, ROUNDED)
    direction = torch.randn_like(expected)
    assert_gradients_close(
        gradients(ours, (actual * direction).sum()), gradients(shipped, (expected * direction).sum())
    )


@VARIANTS
@torch.no_grad()
def test_cached_prefill_chunks_and_steps_are_those_of_the_model_as_shipped(shipped, ours):
    inputs = left_padded()
    text_config = shipped.config.get_text_config()
    results = []
    for model in (shipped, ours):
        cache, parts = DynamicCache(config=text_config), []
        for start, end in [(0, 12), (12, 14), (14, 15), (15, 20), (20, 21)]:
            mask = inputs["attention_mask"][:, :end]
            part = model(input_ids=inputs["input_ids"][:, start:end], attention_mask=mask, cache=cache, use_cache=True)
            parts.append(part.logits)
        results.append(torch.cat(parts, 1)[inputs["attention_mask"].bool()])
    assert_close(results[1], results[0], ROUNDED)


@torch.no_grad()
def test_a_cache_can_be_handed_over_between_the_two(shipped, ours):
    row = ids(2, 24)
    expected = logits(shipped, input_ids=row)[:, 17:]
    for first, second in [(shipped, ours), (ours, shipped)]:
        cache = DynamicCache(config=shipped.config.get_text_config())
        first(input_ids=row[:, :17], cache=cache, use_cache=True)
        actual = [second(input_ids=row[:, t : t + 1], cache=cache, use_cache=True).logits for t in (17, 18)]
        actual += [first(input_ids=row[:, 19:], cache=cache, use_cache=True).logits]
        assert_close(torch.cat(actual, 1), expected, ROUNDED)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
def test_generate_gives_the_same_tokens(shipped, ours, options):
    inputs = left_padded()
    expected, actual = (
        model.generate(**inputs, max_new_tokens=8, do_sample=False, **options) for model in (shipped, ours)
    )
    assert actual.tolist() == expected.tolist()


LENGTHS = (7, 1, 19, 16, 2)


def positions(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def offsets(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def alone(model: nn.Module, row: torch.Tensor, lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    """Logits [1, T, vocabulary] of the documents at the start of a row, each in a forward of its own."""
    documents = row[:, : sum(lengths)].split(lengths, 1)
    return torch.cat([logits(model, input_ids=document) for document in documents], 1)


PACKINGS = {
    "position_ids": lambda: {"position_ids": positions(*LENGTHS)},
    "offsets": lambda: {"cu_seq_lens_q": offsets(*LENGTHS)},
    "collator": lambda: {
        "position_ids": positions(*LENGTHS), "cu_seq_lens_q": offsets(*LENGTHS), "cu_seq_lens_k": offsets(*LENGTHS),
        "max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS),
    },
    "empty_document": lambda: {"cu_seq_lens_q": offsets(*LENGTHS[:2], 0, *LENGTHS[2:])},
}  # fmt: skip


@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_documents_equal_documents_alone(shipped, ours, packing):
    row = ids(1, sum(LENGTHS))
    expected = alone(shipped, row)
    output = ours(input_ids=row, **PACKINGS[packing]())  # by default, these models make a cache in any forward
    assert output.cache is None
    assert_close(output.logits, expected, ROUNDED)
    direction = torch.randn_like(expected)
    assert_gradients_close(
        gradients(ours, (output.logits * direction).sum()), gradients(shipped, (expected * direction).sum())
    )


@pytest.mark.parametrize("shipped", ["kimi_linear_eager", "glm5_next_softplus"], indirect=True)
@torch.no_grad()
def test_packed_documents_in_other_variants(shipped, ours):
    row = ids(1, sum(LENGTHS))
    packed = logits(ours, input_ids=row, position_ids=positions(*LENGTHS))
    assert_close(packed, alone(shipped, row), ROUNDED)


@torch.no_grad()
@pytest.mark.parametrize("packing", PACKINGS)
def test_as_shipped_documents_leak_into_one_another(shipped, packing):
    """The fault that `accelerate` removes: once this fails, Transformers has learnt to pack these models."""
    row = ids(1, sum(LENGTHS))
    packed, expected = logits(shipped, input_ids=row, **PACKINGS[packing]()), alone(shipped, row)
    assert_close(packed[:, : LENGTHS[0]], expected[:, : LENGTHS[0]], ROUNDED)
    with pytest.raises(AssertionError, match="error"):
        assert_close(packed, expected, rel=1e-2)


@torch.no_grad()
def test_tokens_beyond_the_last_offset_belong_to_no_document(shipped, ours):
    row = ids(1, 40)
    packed = logits(ours, input_ids=row, cu_seq_lens_q=offsets(7, 20))
    assert_close(packed[:, :27], alone(shipped, row, (7, 20)), ROUNDED)
    assert packed.isfinite().all()
    assert_close(logits(ours, input_ids=row, cu_seq_lens_q=offsets(40)), logits(shipped, input_ids=row), ROUNDED)


@torch.no_grad()
def test_packed_rows_with_padding(shipped, ours):
    """Documents of 5 and 11 tokens, padding, and one of 6; a second row with padding around a single document."""
    rows, mask = ids(2, 25), torch.ones(2, 25, dtype=torch.long)
    mask[0, 16:19] = mask[1, :4] = mask[1, 20:] = 0
    position_ids = torch.stack([positions(5, 11, 3, 6)[0], (mask[1].cumsum(0) - 1).clamp(min=0)])
    packed = logits(ours, input_ids=rows, attention_mask=mask, position_ids=position_ids)
    assert_close(packed[:1, :16], alone(shipped, rows[:1], (5, 11)), ROUNDED)
    assert_close(packed[:1, 19:], logits(shipped, input_ids=rows[:1, 19:]), ROUNDED)
    assert_close(packed[1:, 4:20], logits(shipped, input_ids=rows[1:, 4:20]), ROUNDED)


@torch.no_grad()
def test_padding_on_the_right_does_not_touch_the_state():
    """A prompt prefilled with padding behind it goes on as it does alone; as shipped, its state decays meanwhile.

    Latent attention without positions is right about padding anywhere; that of glm5_next expects it on the left.
    """
    shipped = kimi_linear()
    row, mask = ids(2, 13), torch.ones(2, 13, dtype=torch.long)
    mask[1, 7:12] = 0
    expected = logits(shipped, input_ids=row[1:, mask[1].bool()])[0, -1]
    results = []
    for model in (shipped, accelerate(copy.deepcopy(shipped), impl="torch")):
        cache = DynamicCache(config=shipped.config)
        model(input_ids=row[:, :12], attention_mask=mask[:, :12], cache=cache, use_cache=True)
        results.append(model(input_ids=row[:, 12:], attention_mask=mask, cache=cache, use_cache=True).logits[1, -1])
    assert_close(results[1], expected, ROUNDED)
    with pytest.raises(AssertionError, match="error"):
        assert_close(results[0], expected, rel=1e-2)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["modern", "reentrant"])
def test_gradient_checkpointing_changes_nothing(ours, use_reentrant):
    inputs = {"input_ids": ids(1, sum(LENGTHS)), "position_ids": positions(*LENGTHS)}
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            ours.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        ours.train()
        ours.zero_grad()
        ours(**inputs, labels=inputs["input_ids"]).loss.backward()
        results.append({n: p.grad.clone() for n, p in ours.named_parameters() if p.grad is not None})
    assert len(results[0]) > 50
    assert_gradients_close(results[1], results[0])


def test_restore_gives_back_the_model(shipped):
    before = [{**vars(module)} for module in shipped.modules()]
    inputs = left_padded()
    expected = logits(shipped, **inputs)
    assert accelerate(shipped, impl="torch") is shipped
    assert any("forward" in vars(module) for module in shipped.modules())
    accelerate(shipped)
    assert restore(shipped) is shipped and restore(shipped) is shipped
    assert [{**vars(module)}.keys() for module in shipped.modules()] == [names.keys() for names in before]
    assert torch.equal(logits(shipped, **inputs), expected)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch_save": lambda model: torch_save(model),
}


def torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", COPIES)
def test_copies_are_accelerated_and_independent(shipped, ours, way):
    inputs = {"input_ids": ids(1, sum(LENGTHS)), "position_ids": positions(*LENGTHS)}
    expected = logits(ours, **inputs)
    copied = COPIES[way](ours)
    assert torch.equal(logits(copied, **inputs), expected)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    restore(ours)
    assert torch.equal(logits(copied, **inputs), expected)


def test_what_is_saved_is_the_same(shipped, ours, tmp_path):
    assert ours.state_dict().keys() == shipped.state_dict().keys()
    ours.save_pretrained(tmp_path)
    loaded = type(shipped).from_pretrained(tmp_path).eval()
    row = ids(1, 20)
    assert torch.equal(logits(loaded, input_ids=row), logits(shipped, input_ids=row))


def test_signatures_stay(shipped, ours):
    for (_, before), (_, after) in zip(shipped.named_modules(), ours.named_modules(), strict=True):
        assert inspect.signature(after.forward) == inspect.signature(before.forward)


def test_adapters_inside_the_layers_take_part(shipped):
    """LoRA on projections that feed the gate, the convolution and the output, in a wrapper around the model."""
    targets = ["q_proj", "f_b_proj", "g_a_proj", "b_proj", "o_proj"]
    peft = get_peft_model(shipped, LoraConfig(target_modules=targets, init_lora_weights=False))
    row = ids(2, 20)
    expected = logits(peft, input_ids=row)
    direction = torch.randn_like(expected)
    expected_gradients = gradients(peft, (expected * direction).sum())
    assert accelerate(peft, impl="torch") is peft
    actual = logits(peft, input_ids=row)
    assert_close(actual, expected, ROUNDED)
    assert_gradients_close(gradients(peft, (actual * direction).sum()), expected_gradients)


@pytest.mark.parametrize("order", ["offloaded_first", "accelerated_first"])
def test_with_weights_offloaded(shipped, order):
    """Hooks of the package accelerate, which bring weights in when a module is called, are kept and kept informed."""
    row = ids(2, 10)
    expected = logits(shipped, input_ids=row)
    if order == "accelerated_first":
        accelerate(shipped, impl="torch")
    cpu_offload(shipped, execution_device=torch.device("cpu"))
    if order == "offloaded_first":
        accelerate(shipped, impl="torch")
    assert all(parameter.is_meta for parameter in shipped.parameters())
    actual = logits(shipped, input_ids=row)
    assert_close(actual, expected, ROUNDED)
    assert not torch.equal(actual, expected), "not a bit differs: the replaced forward did not run"
    assert torch.equal(logits(restore(shipped), input_ids=row), expected)


@torch.no_grad()
def test_a_step_of_decoding_compiles_into_one_graph():
    """Of one layer of each kind, which is what there is to trace."""
    layers = {"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense"] * 2}
    model = accelerate(kimi_linear(num_hidden_layers=2, **layers), impl="torch")
    row, results = ids(2, 10), []
    for step in (model, torch.compile(model.forward, backend="eager", fullgraph=True)):
        cache = StaticCache(config=model.config, max_cache_len=16)
        model(input_ids=row[:, :9], cache=cache, use_cache=True)
        results.append(step(input_ids=row[:, 9:], cache=cache, use_cache=True).logits)
    assert torch.equal(*results)


@torch.no_grad()
@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_low_precision_is_no_worse_than_as_shipped(how):
    """Root mean square error against float32, of a model without experts, whose choice rounding would change."""
    exact = kimi_linear(mlp_layer_types=["dense"] * 4)
    row = ids(4, 64)
    expected = logits(exact, input_ids=row)
    errors = {}
    for name, model in (("shipped", copy.deepcopy(exact)), ("ours", accelerate(copy.deepcopy(exact), impl="torch"))):
        if how == "bfloat16":
            model.to(torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            errors[name] = (logits(model, input_ids=row).float() - expected).square().mean().sqrt().item()
    assert errors["ours"] <= 1.25 * errors["shipped"]


@needs_triton
@pytest.mark.parametrize(
    ("make", "dtype"),
    [(glm5_next, torch.float32), (glm5_next, torch.bfloat16), (kimi_linear, torch.bfloat16)],
    ids=["glm5_next-fp32", "glm5_next-bf16", "kimi_linear-bf16"],
)
def test_triton_agrees_with_torch(make, dtype):
    """Packed forward and backward, cached prefill and a step of decoding on the kernels of the GPU."""
    model = make(linear_head_dim=32, mlp_layer_types=["dense"] * 4).to(DEVICE, dtype)
    row, inputs = ids(1, sum(LENGTHS)).to(DEVICE), {"position_ids": positions(*LENGTHS).to(DEVICE)}
    results = {}
    for impl in ("torch", "triton"):
        accelerate(model, impl=impl)
        cache = DynamicCache(config=model.config.get_text_config())
        packed = logits(model, input_ids=row, **inputs)
        with torch.no_grad():
            steps = [model(input_ids=part, cache=cache, use_cache=True).logits for part in row.split((39, 5, 1), 1)]
        results[impl] = packed, torch.cat(steps, 1), gradients(model, packed.float().square().mean())
    # In bf16 both round every linear map: 2^-9, some hundred of them one after another.
    tolerance = 1e-3 if dtype == torch.float32 else 0.1
    for actual, expected in zip(results["triton"][:2], results["torch"][:2], strict=True):
        assert_close(actual, expected, tolerance)
    if dtype == torch.float32:
        assert_gradients_close(results["triton"][2], results["torch"][2], rel=1e-2)


REFUSED_CALLS = {
    "cache": ({"cache": DynamicCache}, "cannot be cached, got a `cache`"),
    "attention_weights": ({"output_attentions": True}, "no attention weights over the row"),
    "square_mask": ({"attention_mask": torch.ones(1, 1, 45, 45)}, r"than a padding mask \[B, T\], got shape"),
    "padding_and_offsets": (
        {"attention_mask": torch.tensor([[0] + [1] * 44]), "cu_seq_lens_q": offsets(*LENGTHS)},
        "describe the batch twice",
    ),
    "positions_of_another_batch": ({"position_ids": positions(7, 3)}, r"must have shape \(1, 45\)"),
    "offsets_past_the_end": ({"cu_seq_lens_q": offsets(40, 20)}, "must end at or before T=45, got 60"),
}


@pytest.mark.parametrize("case", REFUSED_CALLS)
def test_packed_batches_that_cannot_be_run_are_refused(ours, case):
    arguments, message = REFUSED_CALLS[case]
    arguments = {name: value() if callable(value) else value for name, value in arguments.items()}
    with pytest.raises(ValueError, match=message):
        ours(**{"input_ids": ids(1, sum(LENGTHS)), "position_ids": positions(*LENGTHS)} | arguments)


def parent_of(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Of an attribute of a delta layer, "layers.<number>.<path>": the module that has it, and its name there."""
    _, number, inside = path.split(".", 2)
    parent, _, name = inside.rpartition(".")
    return model.model.layers[int(number)].self_attn.get_submodule(parent), name


def without(path: str):
    def change(model: nn.Module) -> None:
        parent, name = parent_of(model, path)
        delattr(parent, name)

    return change


def set_forward(model: nn.Module) -> None:
    model.model.layers[2].self_attn.o_norm.forward = lambda hidden_states, gate: hidden_states


def set_class(model: nn.Module) -> None:
    layer = model.model.layers[2].self_attn
    layer.__class__ = type(
        "Mine", (type(layer),), {"forward": lambda self, hidden_states, attention_mask, cache: None}
    )


def set_attribute(path: str, value: object):
    def change(model: nn.Module) -> None:
        parent, name = parent_of(model, path)
        setattr(parent, name, value)

    return change


UNFIT_MODELS = {
    "other_version": (without("layers.2.forget_gate.A_log"), r"lacks `forget_gate.A_log`.*>=5\.24,<6"),
    "other_activation": (set_attribute("layers.0.activation", "gelu"), "must be 'silu', got 'gelu'"),
    "other_gate": (set_attribute("layers.0.o_norm.activation", "silu"), "must be 'sigmoid'"),
    "convolution_bias": (
        set_attribute("layers.0.conv1d.bias", nn.Parameter(torch.ones(1))),
        "no bias",
    ),
    "replaced_forward": (set_forward, "RMSNormGated.forward` must be the one of its class"),
    "subclass": (set_class, "`Mine` must not define a `forward` of its own"),
}


@pytest.mark.parametrize("case", UNFIT_MODELS)
def test_models_that_do_not_fit_are_refused_and_left_alone(case):
    change, message = UNFIT_MODELS[case]
    model = kimi_linear()
    change(model)
    with pytest.raises(ValueError, match=message):
        accelerate(model)
    assert not any("forward" in vars(layer.self_attn) for layer in model.model.layers)


def test_models_without_such_layers_and_unknown_implementations_are_refused():
    with pytest.raises(ValueError, match=r"must contain a `KimiLinearModel`.*got KimiK3ForCausalLM without"):
        accelerate(tiny_model())
    with pytest.raises(ValueError, match="got KimiLinearDecoderLayer without"):
        accelerate(kimi_linear().model.layers[0])
    with pytest.raises(ValueError, match="`impl` must be one of 'auto', 'triton', 'torch', 'fla', got 'cuda'"):
        accelerate(kimi_linear(), impl="cuda")
    with pytest.raises((ImportError, ValueError), match="impl='triton' cannot run"):
        logits(accelerate(glm5_next(), impl="triton"), input_ids=ids(1, 4))


def test_example_of_the_documentation_runs(monkeypatch):
    page = (Path(__file__).parents[2] / "docs/accelerate.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: kimi_linear())
    variables = {"batch": {"input_ids": ids(1, 45), "position_ids": positions(*LENGTHS)}}
    exec(compile(example, "docs/accelerate.md", "exec"), variables)
    assert not any("forward" in vars(module) for module in variables["model"].modules())
    assert variables["loss"].isfinite()
