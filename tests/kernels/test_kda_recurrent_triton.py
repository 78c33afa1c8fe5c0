# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The Triton decode step of KDA against the float64 recurrence: gates, packing, states in place, CUDA graphs."""

import itertools

import pytest
import torch

from deltalatent.kernels.kda.reference import kda_recurrent_reference
from tests.kernels.test_kda_triton import unwritten_memory_is_nan
from tests.kernels.triton_testing import (
    DEVICE,
    HAS_TRITON,
    assert_as_exact_as_plain,
    needs_triton,
    run_under_interpreter,
)

if HAS_TRITON:
    from deltalatent.kernels.kda.triton_recurrent import recurrent_triton

OFFSETS = [0, 0, 3, 4, 4, 7]


def random_case(batch_size, total, key_heads, value_heads, key_width, value_width, documents, dtype=torch.float32):
    """Inputs of one call by name, and a state; gates between hardly any decay and the bound."""

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, dtype=dtype, device=DEVICE)

    inputs = {
        "q": normal(batch_size, total, key_heads, key_width),
        "k": normal(batch_size, total, key_heads, key_width),
        "v": normal(batch_size, total, value_heads, value_width),
        "g": 3 * normal(batch_size, total, value_heads, key_width),
        "beta": 2 * normal(batch_size, total, value_heads),
        "A_log": normal(value_heads, dtype=torch.float32),
        "dt_bias": normal(value_heads * key_width, dtype=torch.float32),
    }
    return inputs, normal(documents, value_heads, key_width, value_width, dtype=torch.float32)


def check(inputs, state, offsets=None, **options):
    options["cu_seqlens"] = None if offsets is None else torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    options["output_final_state"] = True
    exact_inputs = {name: tensor.double() for name, tensor in inputs.items()}
    exact_state = None if state is None else state.double()
    actual = recurrent_triton(**inputs, initial_state=state, **options)
    plain = kda_recurrent_reference(**inputs, initial_state=state, **options)
    exact = kda_recurrent_reference(**exact_inputs, initial_state=exact_state, **options)
    for name, *triple in zip(("o", "final_state"), actual, exact, plain, strict=True):
        assert_as_exact_as_plain(*triple, name)
    return actual


@needs_triton
@pytest.mark.parametrize("bound", [-5.0, None], ids=["bounded", "softplus"])
@pytest.mark.parametrize("continued", [False, True], ids=["fresh", "continued"])
def test_one_token_per_row(bound, continued):
    inputs, state = random_case(2, 1, 2, 2, 16, 16, documents=2)
    check(inputs, state if continued else None, gate_lower_bound=bound)


@needs_triton
@pytest.mark.parametrize(
    ("key_heads", "value_heads", "key_width", "value_width"),
    [(1, 2, 12, 40), (2, 4, 32, 8), (1, 1, 60, 100)],
    ids=["HV2-K12-V40", "HV4-K32-V8", "K60-V100"],
)
def test_head_shapes(key_heads, value_heads, key_width, value_width):
    inputs, state = random_case(1, 3, key_heads, value_heads, key_width, value_width, documents=1)
    check(inputs, state)


@needs_triton
def test_packed_documents():
    inputs, state = random_case(1, 9, 1, 2, 16, 24, documents=len(OFFSETS) - 1)
    o, final_state = check(inputs, state, OFFSETS)
    assert not o[:, OFFSETS[-1] :].any()
    per_token = ("q", "k", "v", "g", "beta")
    for n, (start, end) in enumerate(itertools.pairwise(OFFSETS)):
        if start == end:
            assert torch.equal(final_state[n], state[n])
            continue
        alone = {name: tensor[:, start:end] if name in per_token else tensor for name, tensor in inputs.items()}
        o_alone, final_alone = recurrent_triton(**alone, initial_state=state[n : n + 1], output_final_state=True)
        assert torch.equal(o[:, start:end], o_alone)
        assert torch.equal(final_state[n : n + 1], final_alone)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype):
    inputs, state = random_case(2, 2, 1, 1, 16, 16, documents=2, dtype=dtype)
    o, final_state = check(inputs, state, scale=0.3)
    assert o.dtype == dtype
    assert final_state.dtype == torch.float32


@needs_triton
@pytest.mark.parametrize("logit", [-60.0, 60.0], ids=["no-decay", "all-at-the-bound"])
def test_extreme_gates(logit):
    inputs, state = random_case(1, 4, 1, 1, 16, 16, documents=1)
    inputs["g"].fill_(logit)
    inputs["beta"].fill_(10.0)
    check(inputs, state)
    check(inputs, state, gate_lower_bound=None)


@needs_triton
def test_state_in_place_and_only_on_demand():
    inputs, state = random_case(2, 1, 1, 2, 16, 16, documents=2)
    kept = state.clone()
    o, none = recurrent_triton(**inputs, initial_state=kept)
    assert none is None
    assert torch.equal(kept, state)
    expected_o, expected_state = recurrent_triton(**inputs, initial_state=state, output_final_state=True)
    inplace_o, returned = recurrent_triton(**inputs, initial_state=kept, inplace_state=True)
    assert returned is kept
    assert torch.equal(kept, expected_state)
    assert torch.equal(inplace_o, expected_o)
    assert torch.equal(o, expected_o)


@needs_triton
def test_unwritten_memory_does_not_reach_results():
    inputs, state = random_case(1, OFFSETS[-1] + 2, 1, 2, 20, 24, documents=len(OFFSETS) - 1)
    options = {"cu_seqlens": torch.tensor(OFFSETS, device=DEVICE), "output_final_state": True}
    expected = recurrent_triton(**inputs, initial_state=state, **options)
    with unwritten_memory_is_nan():
        actual = recurrent_triton(**inputs, initial_state=state, **options)
    assert all(map(torch.equal, actual, expected))


@needs_triton
def test_non_contiguous_inputs():
    inputs, state = random_case(3, 2, 2, 2, 16, 16, documents=3)
    strided = {
        name: tensor.transpose(0, 1).contiguous().transpose(0, 1) if tensor.dim() > 2 else tensor
        for name, tensor in inputs.items()
    }
    o, _ = recurrent_triton(**inputs, initial_state=state)
    assert torch.equal(recurrent_triton(**strided, initial_state=state)[0], o)


@needs_triton
def test_no_documents():
    inputs, state = random_case(0, 1, 1, 1, 16, 16, documents=0)
    o, final_state = recurrent_triton(**inputs, initial_state=state, output_final_state=True)
    assert o.shape == (0, 1, 1, 16)
    assert final_state.shape == (0, 1, 16, 16)


@needs_triton
def test_messages():
    inputs, state = random_case(1, 1, 1, 1, 16, 16, documents=1)
    needy = inputs | {"v": inputs["v"].clone().requires_grad_()}
    with pytest.raises(ValueError, match=r"has no gradient.*`torch.no_grad\(\)`"):
        recurrent_triton(**needy)
    with torch.no_grad():
        recurrent_triton(**needy)
    with pytest.raises(TypeError, match="`q` must be float32, float16 or bfloat16, got torch"):
        recurrent_triton(**(inputs | {"q": inputs["q"].double()}))
    with pytest.raises(TypeError, match="`initial_state` must be float32, got torch"):
        recurrent_triton(**inputs, initial_state=state.bfloat16())
    with pytest.raises(ValueError, match="needs a contiguous `initial_state` to write to, got None"):
        recurrent_triton(**inputs, inplace_state=True)
    with pytest.raises(ValueError, match="needs a contiguous `initial_state` to write to, got strides"):
        recurrent_triton(**inputs, initial_state=state.transpose(2, 3), inplace_state=True)
    wide, _ = random_case(1, 1, 1, 1, 260, 16, documents=1)
    with pytest.raises(ValueError, match="key width must be at most 256, got 260"):
        recurrent_triton(**wide)


@needs_triton
def test_operators_are_registered_consistently():
    inputs, state = random_case(1, 2, 1, 1, 16, 16, documents=1)
    ops = torch.ops.deltalatent
    torch.library.opcheck(ops.kda_recurrent, (*inputs.values(), state, None, -5.0, 0.25, True))
    torch.library.opcheck(ops.kda_recurrent_, (*inputs.values(), state.clone(), None, -5.0, 0.25))


@needs_triton
def test_under_compile():
    inputs, state = random_case(1, 1, 1, 1, 16, 16, documents=1)
    kept = state.clone()

    def run(state, **inputs):
        return recurrent_triton(**inputs, initial_state=state, inplace_state=True)[0]

    expected = run(state, **inputs)
    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(kept, **inputs), expected)
    assert torch.equal(kept, state)


def test_kernels_under_the_interpreter():
    run_under_interpreter(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("bound", [-5.0, None], ids=["bounded", "softplus"])
@pytest.mark.parametrize(
    ("batch_size", "key_heads", "value_heads", "key_width", "value_width"),
    [(64, 8, 8, 128, 128), (5, 2, 6, 64, 256), (3, 4, 4, 256, 100), (300, 1, 2, 96, 48)],
    ids=["B64-K128-V128", "B5-K64-V256", "B3-K256-V100", "B300-K96-V48"],
)
def test_gpu_shapes(batch_size, key_heads, value_heads, key_width, value_width, bound):
    for dtype, total in ((torch.bfloat16, 1), (torch.float32, 4)):
        inputs, state = random_case(
            batch_size, total, key_heads, value_heads, key_width, value_width, batch_size, dtype=dtype
        )
        check(inputs, state, gate_lower_bound=bound)


@pytest.mark.gpu
def test_gpu_under_a_cuda_graph():
    inputs, state = random_case(8, 1, 4, 4, 128, 128, documents=8, dtype=torch.bfloat16)
    expected_state = state.clone()
    recurrent_triton(**inputs, initial_state=state.clone(), inplace_state=True)  # compile before capturing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = recurrent_triton(**inputs, initial_state=state, inplace_state=True)
    for _ in range(3):
        graph.replay()
        expected, _ = recurrent_triton(**inputs, initial_state=expected_state, inplace_state=True)
        assert torch.equal(o, expected)
        assert torch.equal(state, expected_state)
