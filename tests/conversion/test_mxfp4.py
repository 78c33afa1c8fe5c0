# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""MXFP4: each code against a decoder in plain Python, and packed checkpoints through `from_pretrained`."""

from __future__ import annotations

import copy
import json
import logging
import re
import shutil
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.testing_utils import CaptureLogger

from deltalatent import KimiK3ForCausalLM, KimiK3TextConfig, KimiK3TextModel
from deltalatent.conversion import mapping
from deltalatent.conversion.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from tests.documentation import run_blocks
from tests.modeling.test_golden import GRADIENT, HIDDEN, LOGITS, LOSS, Recorder, at_real, released_gradient
from tests.testing_common import (
    GOLDEN,
    Golden,
    follow_routing_,
    golden,
    load_golden_model,
    max_error,
    random_ids,
    round_to_bf16_,
    tiny_model,
    typical_error,
)

Tensors = dict[str, Tensor]

DOC = Path(__file__).parents[2] / "docs" / "mxfp4.md"
FIXTURE = GOLDEN / "text_mxfp4"
QUANTIZATION_CONFIG = json.loads((FIXTURE / "config.json").read_text())["quantization_config"]

# ---- an independent reading of the format, in exact arithmetic ------------------------------------------------------


def code_value(code: int) -> Fraction:
    """E2M1 from its bits: sign, two exponent bits with bias 1, one mantissa bit; exponent 0 is subnormal."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    magnitude = Fraction(mantissa, 2) if exponent == 0 else Fraction(2 + mantissa, 2) * 2 ** (exponent - 1)
    return -magnitude if sign else magnitude


def power_of_two(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def decoded(packed: list[int], scales: list[int]) -> list[Fraction]:
    """One row: weights of its bytes, without the sign of zeros."""
    weights = []
    for byte in packed:
        for code in (byte % 16, byte // 16):
            weights.append(code_value(code) * power_of_two(scales[len(weights) // 32] - 127))
    return weights


def nearest(weights: list[float]) -> list[Fraction]:
    """What a group of 32 becomes: the scale from the largest, then the closest code of all, ties to the even one.

    The scale brings the largest weight into [3.5, 7), except that the largest weights of float32 saturate.
    """
    exact = [Fraction(weight) for weight in weights]
    largest = max(abs(weight) for weight in exact)
    exponent = -127
    while 7 * power_of_two(exponent) <= largest and exponent < 125:
        exponent += 1
    scale = power_of_two(exponent)
    result = []
    for weight in exact:
        code = min(range(8), key=lambda code: (abs(abs(weight) - code_value(code) * scale), code % 2))
        result.append(code_value(code) * scale * (-1 if weight < 0 else 1))
    return result


def fractions(tensor: Tensor) -> list[Fraction]:
    return [Fraction(value) for value in tensor.double().flatten().tolist()]


@cache
def every_byte_with_every_scale() -> Tensor:
    """float64 [255, 512], exact."""
    rows = [[float(value) for value in decoded(list(range(256)), [scale] * 16)] for scale in range(255)]
    return torch.tensor(rows, dtype=torch.float64)


@cache
def experts_of_the_fixture() -> dict[str, Tensor]:
    """Name of the plain tensor -> float64 [out, in], exact."""
    stored = load_file(FIXTURE / "model.safetensors")
    found = {}
    for name in stored:
        if name.endswith("_packed"):
            plain = name.removesuffix("_packed")
            pairs = zip(stored[name].tolist(), stored[f"{plain}_scale"].tolist(), strict=True)
            rows = [[float(value) for value in decoded(*row)] for row in pairs]
            found[plain] = torch.tensor(rows, dtype=torch.float64)
    return found


# ---- decoding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "largest_scale"),
    [
        pytest.param(torch.float64, 254, id="float64"),
        pytest.param(torch.float32, 252, id="float32"),
        pytest.param(torch.bfloat16, 252, id="bfloat16"),
        pytest.param(torch.float16, 140, id="float16"),
    ],
)
def test_every_byte_with_every_scale(dtype: torch.dtype, largest_scale: int) -> None:
    """All 256 x 255 pairs whose largest code the dtype can hold; exact but for float16 below its range."""
    packed = torch.arange(256, dtype=torch.uint8).expand(largest_scale + 1, 256)
    scales = torch.arange(largest_scale + 1, dtype=torch.uint8)[:, None].expand(-1, 16)
    weight = dequantize_mxfp4(packed, scales, dtype)
    assert weight.dtype == dtype and weight.shape == (largest_scale + 1, 512)
    expected = every_byte_with_every_scale()[: largest_scale + 1]
    if dtype == torch.float16:
        expected = expected.half().double()
    assert torch.equal(weight.double(), expected)
    codes = torch.tensor([[byte % 16, byte // 16] for byte in range(256)]).flatten()
    assert torch.equal(weight.signbit(), (codes >= 8).expand_as(weight)), "zeros have a sign too"


@pytest.mark.parametrize(
    ("dtype", "scale", "code"),
    [(torch.bfloat16, 253, 6), (torch.float32, 254, 12), (torch.float16, 141, 7), (torch.float16, 254, 1)],
    ids=str,
)
def test_weights_beyond_the_dtype_raise(dtype: torch.dtype, scale: int, code: int) -> None:
    packed = torch.zeros(2, 16, dtype=torch.uint8)
    scales = torch.tensor([[127], [scale]], dtype=torch.uint8)
    assert not dequantize_mxfp4(packed, scales, dtype).any(), "the scale alone does no harm"
    packed[1, 3] = code
    with pytest.raises(ValueError, match=rf"within the range of `dtype`={dtype}, got some with the scale 2\^"):
        dequantize_mxfp4(packed, scales, dtype)


def test_leading_axes_and_strides() -> None:
    packed = torch.randint(0, 256, (3, 2, 5, 48), dtype=torch.uint8)
    scales = torch.randint(100, 150, (3, 2, 5, 3), dtype=torch.uint8)
    weight = dequantize_mxfp4(packed, scales)
    assert weight.dtype == torch.bfloat16 and weight.shape == (3, 2, 5, 96)
    assert torch.equal(weight[2, 1], dequantize_mxfp4(packed[2, 1], scales[2, 1]))
    swapped = dequantize_mxfp4(packed.transpose(0, 2), scales.transpose(0, 2))
    assert torch.equal(swapped, weight.transpose(0, 2))
    assert dequantize_mxfp4(packed[:0], scales[:0]).shape == (0, 2, 5, 96)


@pytest.mark.parametrize(
    ("packed", "scale"),
    [((4, 16), (4, 2)), ((4, 16), (3, 1)), ((4, 24), (4, 1)), ((4, 8), (4, 0)), ((4, 16), (4,)), ((), ())],
    ids=str,
)
def test_shapes_that_do_not_belong_together_raise(packed: tuple[int, ...], scale: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"`weight_scale` must have one byte per 32 codes .* got shapes \(.*damaged"):
        dequantize_mxfp4(torch.zeros(packed, dtype=torch.uint8), torch.zeros(scale, dtype=torch.uint8))


def test_other_arguments_that_cannot_be_decoded_raise() -> None:
    packed, scale = torch.zeros(4, 16, dtype=torch.uint8), torch.full((4, 1), 127, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"`weight_packed` must be uint8, got torch.int8: pass the bytes"):
        dequantize_mxfp4(packed.view(torch.int8), scale)
    with pytest.raises(TypeError, match=r"`weight_scale` must be uint8, got torch.float32: pass the bytes"):
        dequantize_mxfp4(packed, scale.float())
    with pytest.raises(TypeError, match=r"`dtype` must be bfloat16, float16, float32 or float64, got torch.int32"):
        dequantize_mxfp4(packed, scale, torch.int32)
    scale[2] = 255
    with pytest.raises(ValueError, match=r"must be below 255, which means NaN, got 255"):
        dequantize_mxfp4(packed, scale)


# ---- encoding -------------------------------------------------------------------------------------------------------

float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
groups = st.one_of(
    st.lists(float32, min_size=32, max_size=32),  # of any size, mostly one that dwarfs the others
    st.builds(  # of comparable size, ties among them
        lambda numbers, exponent: [number * 2.0**exponent / 8 for number in numbers],
        st.lists(st.integers(-64, 64), min_size=32, max_size=32),
        st.integers(-146, 120),
    ),
)


@settings(max_examples=100, deadline=None)
@given(groups)
def test_each_weight_becomes_the_nearest_code(weights: list[float]) -> None:
    tensor = torch.tensor([weights])
    packed, scale = quantize_mxfp4(tensor)
    assert packed.dtype == scale.dtype == torch.uint8
    assert packed.shape == (1, 16) and scale.shape == (1, 1)
    expected = nearest(tensor[0].tolist())
    assert decoded(packed[0].tolist(), scale[0].tolist()) == expected
    assert fractions(dequantize_mxfp4(packed, scale, torch.float32)) == expected
    assert torch.equal(dequantize_mxfp4(packed, scale, torch.float32).signbit(), tensor.signbit())


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=48, max_size=48), st.lists(st.integers(0, 252), min_size=3, max_size=3))
def test_values_on_the_grid_are_fixed_points(codes: bytes, scales: list[int]) -> None:
    packed, scale = torch.tensor([list(codes)], dtype=torch.uint8), torch.tensor([scales], dtype=torch.uint8)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        weight = dequantize_mxfp4(packed, scale, dtype)
        again = dequantize_mxfp4(*quantize_mxfp4(weight), dtype)
        assert torch.equal(again, weight)
        assert torch.equal(again.signbit(), weight.signbit())


@pytest.mark.parametrize("scale", [-120, -3, 0, 125])
@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (0.25, 0.0),
        (0.75, 1.0),
        (1.25, 1.0),
        (1.75, 2.0),
        (2.5, 2.0),
        (3.5, 4.0),
        (5.0, 4.0),
        (0.2500001, 0.5),
        (0.7499999, 0.5),
        (5.000001, 6.0),
        (6.999999, 6.0),
    ],
)
def test_ties_go_to_the_even_code_and_large_weights_saturate(weight: float, expected: float, scale: int) -> None:
    group = torch.zeros(32)
    group[0], group[5], group[6] = 4.0, weight, -weight  # 4 alone sets the same scale as a larger weight
    result = dequantize_mxfp4(*quantize_mxfp4(group * 2.0**scale), torch.float32) / 2.0**scale
    assert result[5].item() == expected
    assert result[6].item() == -expected


def test_zeros_and_the_ends_of_the_range() -> None:
    packed, scale = quantize_mxfp4(torch.zeros(2, 64))
    assert not packed.any() and (scale == 127).all()
    tiny = torch.zeros(4, 32)
    tiny[:, 0] = torch.tensor([2.0**-149, 2.0**-129, 1.5 * 2.0**-129, 2.0**-128])
    assert dequantize_mxfp4(*quantize_mxfp4(tiny))[:, 0].tolist() == [0.0, 0.0, 2.0**-128, 2.0**-128]
    for largest, dtype in ((3.4e38, torch.float32), (3.38e38, torch.bfloat16), (1e300, torch.float64)):
        weight = torch.full((1, 32), largest, dtype=dtype)
        assert (dequantize_mxfp4(*quantize_mxfp4(weight)) == 6 * 2.0**125).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_no_error_exceeds_a_fifth_of_the_largest_in_the_group(dtype: torch.dtype) -> None:
    weight = (torch.randn(64, 256, dtype=torch.float64) * torch.randn(64, 1, dtype=torch.float64).exp()).to(dtype)
    packed, scale = quantize_mxfp4(weight)
    error = (dequantize_mxfp4(packed, scale, torch.float64) - weight.double()).abs().unflatten(-1, (-1, 32))
    largest = weight.double().abs().unflatten(-1, (-1, 32)).amax(-1, keepdim=True)
    assert (error <= largest / 5).all()
    assert (error > largest / 6).any(), "the bound is not far from what happens"
    again = quantize_mxfp4(weight.T.contiguous().T)
    assert torch.equal(again[0], packed) and torch.equal(again[1], scale)
    assert torch.equal(quantize_mxfp4(weight[None, 3:5])[0], packed[None, 3:5])


def test_weights_that_cannot_be_encoded_raise() -> None:
    for shape in ((4, 40), (4, 16), (4, 0), ()):
        with pytest.raises(ValueError, match=r"last axis of `weight` must be a multiple of 32 inputs, got shape"):
            quantize_mxfp4(torch.zeros(shape))
    with pytest.raises(TypeError, match=r"`weight` must be of a floating dtype, got torch.uint8"):
        quantize_mxfp4(torch.zeros(4, 32, dtype=torch.uint8))
    for spoilt in (float("nan"), float("inf"), -float("inf")):
        weight = torch.ones(4, 64)
        weight[2, 40] = spoilt
        with pytest.raises(ValueError, match=r"`weight` must be finite, got NaN or infinity"):
            quantize_mxfp4(weight)


# ---- the golden checkpoint ------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def without_compressed_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the package is installed: importing it fails."""
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)


@pytest.fixture(scope="module")
def case() -> Golden:
    return golden("text_mxfp4")


@pytest.mark.parametrize("experts", [None, "eager", "batched_mm"])
def test_golden_forward(case: Golden, experts: str | None) -> None:
    model = load_golden_model("text_mxfp4", experts_implementation=experts)
    recorded = Recorder(model)
    with torch.no_grad():
        output = model(**case.inputs, labels=case["labels"], output_hidden_states=True)
    for i, expected in case.per_layer("layer", "prefix_sum").items():
        assert at_real(case, recorded.prefix_sums[i], expected) < HIDDEN, f"layer {i}"
    assert at_real(case, output.hidden_states[-1], case["final_hidden"]) < HIDDEN
    assert at_real(case, output.logits, case["logits"]) < LOGITS
    assert abs(output.loss.item() - case["loss"].item()) < LOSS
    assert recorded.routing.keys() == {1, 2, 3, 4}
    for i, (ids, weights) in recorded.routing.items():
        real = case.real.flatten()
        assert torch.equal(ids[real], case[f"router.{i}.topk_ids"].flatten(0, 1)[real]), f"experts of layer {i}"
        assert max_error(weights[real], case[f"router.{i}.topk_weights"].flatten(0, 1)[real]) < HIDDEN


def test_golden_gradients(case: Golden) -> None:
    """The unpacked model trains like any other: also its experts have gradients."""
    model = load_golden_model("text_mxfp4")
    model(**case.inputs, labels=case["labels"]).loss.backward()
    names = [name.removeprefix("grad.") for name in case.expected if name.startswith("grad.")]
    assert len(names) == 49
    for name in names:
        actual, expected = released_gradient(model, name), case["grad." + name]
        expected = expected[: actual.shape[0]]  # stored padding of `A_log`
        assert max_error(actual, expected) < GRADIENT * expected.abs().max().item(), name
    for layer in model.model.layers[1:]:
        assert layer.mlp.experts.gate_up_proj.grad.any() and layer.mlp.experts.down_proj.grad.any()


def test_golden_greedy_continuation(case: Golden) -> None:
    model = load_golden_model("text_mxfp4")
    model.generation_config = GenerationConfig(pad_token_id=0)
    expected = case["greedy_tokens"]
    output = model.generate(**case.inputs, max_new_tokens=expected.shape[1], do_sample=False)
    assert torch.equal(output[:, case["input_ids"].shape[1] :], expected)


def test_golden_in_bf16_is_as_good_as_rounding_allows(case: Golden) -> None:
    """As in test_golden.py: no more than twice the error of the float32 model whose layers round."""
    exact, half = load_golden_model("text_mxfp4"), load_golden_model("text_mxfp4", dtype=torch.bfloat16)
    rounded = round_to_bf16_(load_golden_model("text_mxfp4"))
    follow_routing_(exact, half, rounded)
    with torch.no_grad():
        exact(**case.inputs)
        logits, reference = half(**case.inputs).logits, rounded(**case.inputs).logits
    expected = case["logits"][case.real]
    allowed = typical_error(reference[case.real], expected)
    assert 0 < typical_error(logits[case.real], expected) < 2 * allowed


@pytest.mark.parametrize("dtype", ["auto", torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("model_class", [KimiK3ForCausalLM, KimiK3TextModel, AutoModelForCausalLM])
def test_every_class_unpacks_every_expert_exactly(model_class: Any, dtype: Any) -> None:
    with CaptureLogger(logging.getLogger("transformers")) as captured:
        model, info = model_class.from_pretrained(FIXTURE, dtype=dtype, output_loading_info=True)
    assert captured.out == ""
    assert not any(info.values()), info
    expected = experts_of_the_fixture()
    assert len(expected) == 4 * 8 * 3
    for number, layer in enumerate(getattr(model, "model", model).layers):
        if number == 0:
            continue
        experts = layer.mlp.experts
        assert experts.gate_up_proj.dtype == (torch.bfloat16 if dtype == "auto" else dtype)
        for i in range(8):
            gate, up = experts.gate_up_proj[i].chunk(2)
            for which, weight in (("w1", gate), ("w3", up), ("w2", experts.down_proj[i])):
                name = f"model.layers.{number}.block_sparse_moe.experts.{i}.{which}.weight"
                assert torch.equal(weight.double(), expected[name]), name


def test_saved_folder_is_an_ordinary_bf16_one(tmp_path: Path) -> None:
    """Plain names, no claim to be packed, every tensor as it was; and it loads by itself."""
    model = AutoModelForCausalLM.from_pretrained(FIXTURE)
    assert model.dtype == torch.bfloat16
    assert not hasattr(model.config, "quantization_config")
    assert not getattr(model, "is_quantized", False) and getattr(model, "hf_quantizer", None) is None
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())

    packed, plain = load_file(FIXTURE / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert plain.keys() == {re.sub(r"weight_(packed|scale)$", "weight", name) for name in packed}
    assert not any(tensor.dtype == torch.uint8 for tensor in plain.values())
    for name, tensor in packed.items():
        if name in plain:
            heads = plain[name].shape[0]
            assert torch.equal(plain[name], tensor[:heads] if name.endswith("A_log") else tensor), name
        elif name.endswith("_packed"):
            original = name.removesuffix("_packed")
            assert torch.equal(plain[original].double(), experts_of_the_fixture()[original]), name
    assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path), model)


# ---- what the config says, and what the files hold ------------------------------------------------------------------


def assert_same_weights(actual: Any, expected: Any) -> None:
    assert actual.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(actual.state_dict()[name], tensor), name


@pytest.fixture(scope="module")
def expected_model() -> Any:
    return KimiK3ForCausalLM.from_pretrained(FIXTURE)


def changed(
    folder: Path, change: Callable[[Tensors], Any] = lambda tensors: None, config: dict[str, Any] | None = None
) -> Path:
    """A copy of the fixture with other tensors and fields of the config; `None` as a value removes a field."""
    folder.mkdir()
    fields = json.loads((FIXTURE / "config.json").read_text()) | (config or {})
    fields = {name: value for name, value in fields.items() if value is not None or name not in (config or {})}
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = load_file(FIXTURE / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def unpack(pattern: str) -> Callable[[Tensors], None]:
    """Replaces the packed matrices whose names match by plain ones in bf16."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("_packed") and re.search(pattern, name)]:
            plain = name.removesuffix("_packed")
            tensors[plain] = dequantize_mxfp4(tensors.pop(name), tensors.pop(f"{plain}_scale"))

    return change


IGNORE_LISTS = {
    "as released": QUANTIZATION_CONFIG["ignore"],
    "with prefix": [
        "re:language_model.*self_attn.*",
        "language_model.lm_head",
        "re:.*language_model.*shared_experts.*",
    ],
    "names modules": ["lm_head", "model.layers.1.block_sparse_moe.gate"],
    "names the experts": ["re:.*experts.*"],
    "empty": [],
    "absent": None,
}


@pytest.mark.parametrize("name", IGNORE_LISTS, ids=lambda name: name.replace(" ", "_"))
def test_ignore_list_does_not_matter(name: str, expected_model: Any, tmp_path: Path) -> None:
    """The tensors that are present decide."""
    config = {key: value for key, value in QUANTIZATION_CONFIG.items() if key != "ignore"}
    if IGNORE_LISTS[name] is not None:
        config["ignore"] = IGNORE_LISTS[name]
    folder = changed(tmp_path / "folder", config={"quantization_config": config})
    assert_same_weights(KimiK3ForCausalLM.from_pretrained(folder), expected_model)


def test_packed_experts_without_a_claim_load(expected_model: Any, tmp_path: Path) -> None:
    folder = changed(tmp_path / "folder", config={"quantization_config": None})
    assert_same_weights(AutoModelForCausalLM.from_pretrained(folder), expected_model)


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(".", id="all_plain"),
        pytest.param(r"layers\.[13]\.", id="some_layers"),
        pytest.param(r"experts\.[0367]\.", id="some_experts,_the_first_plain"),
        pytest.param(r"experts\.[1245]\.", id="some_experts,_the_first_packed"),
        pytest.param(r"\.w1\.", id="gates_plain,_the_rest_packed"),
        pytest.param(r"experts\.([02]\.w[12]|1\.w3|7)", id="any_mixture"),
    ],
)
def test_plain_and_packed_matrices_may_be_mixed(pattern: str, expected_model: Any, tmp_path: Path) -> None:
    folder = changed(tmp_path / "folder", unpack(pattern))
    model, info = KimiK3ForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert_same_weights(model, expected_model)
    model.save_pretrained(tmp_path / "saved")
    names = load_file(tmp_path / "saved" / "model.safetensors").keys()
    assert not any(name.endswith(("_packed", "_scale")) for name in names)
    assert_same_weights(KimiK3ForCausalLM.from_pretrained(tmp_path / "saved"), expected_model)


@pytest.fixture(scope="module")
def thirteen_experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model whose experts are on the grid, and its packed folder in shards that part each pair of tensors."""
    folder = tmp_path_factory.mktemp("thirteen")
    model = tiny_model(num_experts=13, moe_intermediate_size=32, routed_expert_hidden_size=64)
    model.config.quantization_config = copy.deepcopy(QUANTIZATION_CONFIG)
    model.config.save_pretrained(folder)
    del model.config.quantization_config
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                weight.copy_(dequantize_mxfp4(*quantize_mxfp4(weight), torch.float32))
    model.save_pretrained(folder / "plain")
    shards: list[Tensors] = [{}, {}, {}]
    for i, (name, tensor) in enumerate(load_file(folder / "plain" / "model.safetensors").items()):
        if ".experts." in name and "shared" not in name:
            shards[i % 2][f"{name}_packed"], shards[2][f"{name}_scale"] = quantize_mxfp4(tensor)
        else:
            shards[i % 3][name] = tensor
    shutil.rmtree(folder / "plain")
    weight_map = {}
    for i, tensors in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-00003.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return model, folder


@pytest.mark.parametrize("device_map", [None, "cpu", "disk"])
def test_shards_that_part_the_pairs_and_more_than_ten_experts(
    thirteen_experts: tuple[Any, Path], device_map: str | None, tmp_path: Path
) -> None:
    expected, folder = thirteen_experts
    if device_map != "disk":
        assert_same_weights(KimiK3ForCausalLM.from_pretrained(folder, device_map=device_map), expected)
        return
    pytest.importorskip("accelerate")
    placement = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu", "model.layers": "disk"}
    placement |= {"model.output_attn_res_norm": "cpu", "model.output_attn_res_proj": "cpu"}
    model = KimiK3ForCausalLM.from_pretrained(folder, device_map=placement, offload_folder=tmp_path)
    assert model.model.layers[1].mlp.experts.down_proj.device.type == "meta"
    ids = random_ids(model.config)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)


def test_config_objects_and_overrides(expected_model: Any) -> None:
    config = KimiK3TextConfig.from_pretrained(FIXTURE)
    model = KimiK3ForCausalLM.from_pretrained(FIXTURE, config=config)
    assert_same_weights(model, expected_model)
    assert not hasattr(model.config, "quantization_config")
    assert config.quantization_config == QUANTIZATION_CONFIG, "the caller's object is untouched"

    model = KimiK3ForCausalLM.from_pretrained(
        FIXTURE,
        use_cache=False,
        kda_implementation="torch",
        rms_norm_eps=1e-3,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    assert model.config.use_cache is False and model.config.rms_norm_eps == 1e-3
    assert model.config.kda_implementation == "torch"
    assert model.dtype == model.config.dtype == torch.float32
    assert model.config._attn_implementation == model.config._experts_implementation == "eager"
    with pytest.raises(TypeError, match="no_such_argument"):
        KimiK3ForCausalLM.from_pretrained(FIXTURE, no_such_argument=1)


def test_config_in_another_place(expected_model: Any, tmp_path: Path) -> None:
    changed(tmp_path / "weights")
    assert_same_weights(KimiK3ForCausalLM.from_pretrained(tmp_path, subfolder="weights"), expected_model)
    (tmp_path / "config").mkdir()
    shutil.move(tmp_path / "weights" / "config.json", tmp_path / "config")
    model = KimiK3TextModel.from_pretrained(
        tmp_path / "weights", config=tmp_path / "config", allow_unexpected_keys=True
    )
    assert_same_weights(model, expected_model.model)
    with pytest.raises(OSError, match=r"must hold a config.json"):
        KimiK3ForCausalLM.from_pretrained(tmp_path / "weights")


def test_other_packing_is_left_to_transformers(tmp_path: Path) -> None:
    folder = changed(
        tmp_path / "folder", config={"quantization_config": QUANTIZATION_CONFIG | {"format": "pack-quantized"}}
    )
    with pytest.raises(ImportError, match=r"compressed.tensors"):
        KimiK3ForCausalLM.from_pretrained(folder)


# ---- damage ---------------------------------------------------------------------------------------------------------

MOE = "model.layers.2.block_sparse_moe"
W1 = f"{MOE}.experts.3.w1.weight"
W2 = f"{MOE}.experts.3.w2.weight"


def drop(*names: str) -> Callable[[Tensors], None]:
    return lambda tensors: [tensors.pop(name) for name in names] and None


def put(name: str, value: Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: value})


def drop_all(ending: str) -> Callable[[Tensors], None]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith(ending)] and None


def bytes_of(*shape: int, value: int = 120) -> Tensor:
    return torch.full(shape, value, dtype=torch.uint8)


DAMAGE: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "scale missing": (drop(f"{W1}_scale"), rf"it lacks {W1}_scale: "),
    "codes missing": (drop(f"{W2}_packed"), rf"it lacks {W2}_packed: "),
    "both missing": (drop(f"{W1}_packed", f"{W1}_scale"), rf"it lacks {W1}: "),
    "all scales missing": (drop_all("_scale"), r"it lacks .*experts.0.w1.weight_scale, .*\(16 in all\)"),
    "packed and plain": (put(W1, torch.zeros(32, 32)), rf"it has also {W1}_packed, {W1}_scale: "),
    "scale beside plain": (
        lambda tensors: (unpack(W1)(tensors), put(f"{W1}_scale", bytes_of(32, 1))(tensors)) and None,
        rf"it has also {W1}_scale: ",
    ),
    "one expert too many": (
        lambda tensors: (
            (
                put(f"{MOE}.experts.8.w2.weight_packed", bytes_of(32, 16))(tensors),
                put(f"{MOE}.experts.8.w2.weight_scale", bytes_of(32, 1))(tensors),
            )
            and None
        ),
        rf"it has also {MOE}.experts.8.w2.weight_packed, {MOE}.experts.8.w2.weight_scale: ",
    ),
    "groups of 16": (
        put(f"{W1}_scale", bytes_of(32, 2)),
        rf"`{W1}_packed` cannot be decoded: .* got shapes \(32, 2\) and \(32, 16\)",
    ),
    "a row short": (put(f"{W2}_packed", bytes_of(31, 16)), rf"`{W2}_packed` cannot be decoded: .*\(31, 16\)"),
    "another width": (
        lambda tensors: (
            (
                put(f"{W1}_packed", bytes_of(32, 32))(tensors),
                put(f"{W1}_scale", bytes_of(32, 2))(tensors),
            )
            and None
        ),
        rf"`{W1}` must have the shape of `{MOE}.experts.0.w1.weight`, \(32, 32\), got \(32, 64\)",
    ),
    "scale is NaN": (put(f"{W1}_scale", bytes_of(32, 1, value=255)), rf"`{W1}_packed` cannot be decoded: .*NaN"),
    "scale too large": (
        lambda tensors: (
            (
                put(f"{W1}_scale", bytes_of(32, 1, value=254))(tensors),
                put(f"{W1}_packed", bytes_of(32, 16, value=0x77))(tensors),
            )
            and None
        ),
        rf"`{W1}_packed` cannot be decoded: .*within the range of `dtype`=torch.bfloat16",
    ),
    "scale as floats": (
        put(f"{W1}_scale", torch.full((32, 1), 0.03125)),
        rf"`{W1}_scale` must hold bytes \(uint8\), got other numbers",
    ),
    "codes as integers": (
        put(f"{W1}_packed", torch.full((32, 16), -7, dtype=torch.int32)),
        rf"`{W1}_packed` must hold bytes",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda name: name.replace(" ", "_"))
def test_damage_is_named(damage: str, tmp_path: Path) -> None:
    change, pattern = DAMAGE[damage]
    with pytest.raises(ValueError, match=pattern):
        KimiK3ForCausalLM.from_pretrained(changed(tmp_path / "damaged", change))


def test_range_of_float16_is_named(tmp_path: Path) -> None:
    folder = changed(tmp_path / "large", put(f"{W1}_scale", bytes_of(32, 1, value=145)))
    assert KimiK3ForCausalLM.from_pretrained(folder).model.layers[2].mlp.experts.gate_up_proj.isfinite().all()
    with pytest.raises(ValueError, match=rf"`{W1}_packed` cannot be decoded: .*torch.float16, got some with .*2\^18"):
        KimiK3ForCausalLM.from_pretrained(folder, dtype=torch.float16)


def test_packed_experts_are_not_spread_over_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "is_dtensor", lambda tensor: True)
    with pytest.raises(ValueError, match=r"spread over devices must not be packed, got .*experts.0.w1.weight_packed"):
        KimiK3ForCausalLM.from_pretrained(FIXTURE)


# ---- the page -------------------------------------------------------------------------------------------------------


def test_snippets_of_the_page_run_and_print_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks share a namespace and a folder `packed`; a block of text is what the one before it prints."""
    shutil.copytree(FIXTURE, tmp_path / "packed")
    monkeypatch.chdir(tmp_path)
    assert run_blocks(DOC) == {"python", "text"}
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
