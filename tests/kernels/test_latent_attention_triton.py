# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The Triton form of absorbed latent attention against the float64 reference: widths, masks, lengths, graphs."""

import logging

import pytest
import torch

from deltalatent.kernels.latent_attention import latent_attention, latent_attention_reference
from tests.kernels.triton_testing import (
    DEVICE,
    HAS_TRITON,
    INTERPRETING,
    assert_as_exact_as_plain,
    needs_launches,
    needs_triton,
    run_under_interpreter,
)

if HAS_TRITON:
    from deltalatent.kernels.latent_attention import triton_absorbed
    from deltalatent.kernels.latent_attention.triton_absorbed import (
        HOPPER,
        LaunchShape,
        gluon_kernels,
        launch,
        launch_shape,
        num_splits,
    )


def random_case(B, T, H, S, R, Q, dtype=torch.float32):
    shapes = (B, T, H, R), (B, T, H, Q), (B, S, R), (B, S, Q)
    return [torch.randn(shape, dtype=torch.float32, device=DEVICE).to(dtype) for shape in shapes]


def check(tensors, mask=None, end=None, splits=None, shape=None, scale=0.2):
    actual = launch(*tensors, mask, end, scale, shape, splits)
    options = {"scale": scale, "mask": mask, "end": end}
    exact = latent_attention_reference(*(x.double() for x in tensors), **options)
    plain = latent_attention_reference(*tensors, **options)
    if tensors[0].dtype != torch.float32:
        # Softmax weights enter the second product in the dtype of the latents, as in any fused attention.
        plain = latent_attention_with_rounded_weights(*tensors, **options)
    assert_as_exact_as_plain(actual, exact, plain, "o")
    return actual


def latent_attention_with_rounded_weights(query, shared_query, latent, shared_key, *, scale, mask, end):
    (B, T), S = query.shape[:2], latent.shape[1]
    keys = torch.cat([latent, shared_key], -1).float()
    scores = torch.einsum("bthr,bsr->bths", torch.cat([query, shared_query], -1).float(), keys) * scale
    end = torch.full((B,), S, device=query.device) if end is None else end.view(-1).expand(B)
    last = end[:, None] - T + torch.arange(T, device=query.device)
    visible = torch.arange(S, device=query.device) <= last[..., None]
    if mask is not None:
        visible = visible & mask
    scores = scores.masked_fill(~visible[:, :, None], -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp().nan_to_num(0.0)
    total = weights.sum(-1, keepdim=True).clamp(min=1e-30)
    values = torch.where(visible.any(1)[..., None], latent, 0).float()
    return (torch.einsum("bths,bsr->bthr", weights.to(latent.dtype).float(), values) / total).to(query.dtype)


@needs_triton
@pytest.mark.parametrize("splits", [1, 3, 8], ids="N{}".format)
@pytest.mark.parametrize(
    ("B", "T", "H", "S", "R", "Q"),
    [(2, 1, 3, 37, 20, 12), (1, 2, 5, 16, 16, 16), (1, 4, 8, 50, 24, 8), (1, 1, 1, 1, 8, 4)],
    ids=["T1-H3-S37-R20", "T2-H5-S16-R16", "T4-H8-S50-R24", "one_token"],
)
def test_widths_and_splits(B, T, H, S, R, Q, splits):
    check(random_case(B, T, H, S, R, Q), splits=splits)


@needs_triton
@pytest.mark.parametrize("splits", [1, 3], ids="N{}".format)
@pytest.mark.parametrize("mask", [(2, 1), (1, 3), (2, 3), (1, 1)], ids=["rows", "queries", "both", "shared"])
def test_masks_and_lengths(mask, splits):
    tensors = random_case(2, 3, 2, 41, 20, 12)
    mask = torch.rand(*mask, 41, device=DEVICE) < 0.5
    mask[..., :2] = True
    for end in (None, torch.tensor([5, 38]), torch.tensor([17], dtype=torch.int32), torch.tensor(40)):
        check(tensors, mask, None if end is None else end.to(DEVICE), splits)


def poisoned(tensors, mask, end):
    """NaN in whatever no query sees: behind the end, and where a mask hides a token from all of them."""
    B, S = tensors[2].shape[:2]
    seen = torch.arange(S, device=DEVICE) < (S if end is None else end.view(-1, 1))
    if mask is not None:
        seen = seen & mask.any(1)
    return [*tensors[:2], *(x.masked_fill(~seen.expand(B, S)[..., None], torch.nan) for x in tensors[2:])]


@needs_triton
@pytest.mark.parametrize("mask", [None, (2, 1), (1, 1), (2, 2), (1, 2)], ids=["all", "rows", "one", "both", "queries"])
def test_what_no_query_sees_is_not_read(mask):
    tensors = random_case(2, 2, 3, 40, 16, 16)
    mask = None if mask is None else torch.rand(*mask, 40, device=DEVICE) < 0.5
    for end in (None, [9, 23], [0, 1]):
        end = None if end is None else torch.tensor(end, device=DEVICE)
        for splits in (1, 4):
            expected = check(tensors, mask, end, splits)
            assert torch.equal(launch(*poisoned(tensors, mask, end), mask, end, 0.2, None, splits), expected)


@needs_triton
@pytest.mark.parametrize("splits", [1, 4], ids="N{}".format)
def test_blind_queries_get_zero(splits):
    """A mask that hides everything from one, a row without tokens, and a token that stands before the first place."""
    tensors = random_case(3, 2, 1, 40, 16, 16)
    end = torch.tensor([9, 0, 1], device=DEVICE)
    mask = torch.ones(3, 2, 40, dtype=torch.bool, device=DEVICE)
    mask[0, 1] = False
    o = check(tensors, mask, end, splits)
    assert not o[0, 1].any()
    assert not o[1].any()
    assert not o[2, 0].any()
    assert o[0, 0].any()
    assert o[2, 1].any()


@needs_triton
def test_a_cache_without_tokens_and_an_end_beyond_it():
    assert not launch(*random_case(2, 1, 2, 0, 16, 16), None, None, 0.2).any()
    tensors = random_case(2, 2, 2, 20, 16, 16)
    expected = launch(*tensors, None, None, 0.2)
    assert torch.equal(launch(*tensors, None, torch.tensor(25, device=DEVICE), 0.2), expected)


@needs_triton
def test_rows_do_not_depend_on_each_other():
    tensors = random_case(3, 1, 2, 33, 16, 8)
    together = launch(*tensors, None, None, 0.3, None, 2)
    for b in range(3):
        alone = launch(*(x[b : b + 1] for x in tensors), None, None, 0.3, None, 2)
        assert torch.equal(together[b : b + 1], alone)


@needs_triton
def test_any_strides():
    query, shared_query, latent, shared_key = random_case(2, 3, 2, 33, 16, 8)
    expected = launch(query, shared_query, latent, shared_key, None, None, 0.3)
    cache = torch.cat([latent, shared_key], -1)  # latents and key parts in one buffer
    strided = launch(
        query.transpose(1, 2).contiguous().transpose(1, 2),
        shared_query.mT.contiguous().mT,  # not even the last axis is dense
        cache[..., :16],
        cache[..., 16:],
        None,
        None,
        0.3,
    )
    assert torch.equal(strided, expected)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype):
    if INTERPRETING and dtype == torch.bfloat16:
        pytest.skip("the interpreter has no bfloat16 products")
    for splits in (1, 3):
        check(random_case(2, 1, 4, 70, 16, 16, dtype), splits=splits)


@needs_triton
@pytest.mark.parametrize("scale", [0.0, 100.0], ids=["flat", "one_hot"])
def test_extreme_scores(scale):
    check(random_case(1, 1, 2, 30, 16, 16), scale=scale, splits=3)


@needs_triton
def test_no_rows_and_no_gradients():
    assert launch(*random_case(0, 1, 2, 5, 8, 4), None, None, 1.0).shape == (0, 1, 2, 8)
    tensors = random_case(1, 1, 2, 5, 8, 4)
    tensors[2].requires_grad_()
    with pytest.raises(ValueError, match=r"the Triton kernels have no gradient: call them under `torch.no_grad\(\)`"):
        latent_attention(*tensors, scale=1.0, impl="triton")
    with pytest.raises(ValueError, match="the Triton kernels take R up to 512"):
        latent_attention(*random_case(1, 1, 2, 5, 520, 4), scale=1.0, impl="triton")


@needs_triton
def test_operator_for_compiled_graphs_in_triton():
    tensors = random_case(1, 2, 2, 9, 16, 8)
    mask = torch.rand(1, 2, 9, device=DEVICE) < 0.7
    arguments = (*tensors, mask, torch.tensor(8, device=DEVICE), 0.3)
    torch.library.opcheck(triton_absorbed.latent_attention_op, arguments)


@pytest.mark.skipif(not HAS_TRITON, reason="the package `triton` is not installed")
@pytest.mark.parametrize("shared_memory", [227 * 1024, 163 * 1024, 99 * 1024], ids=["9.0", "8.0", "8.6"])
def test_tiles_fit_the_device(shared_memory):
    for vectors in (1, 8, 32, 96, 4 * 96):
        for width in (32, 288, 576, 640):
            for itemsize in (2, 4):
                shape = launch_shape(vectors, width, itemsize, shared_memory)
                assert (shape.BM + shape.BN * shape.num_stages) * width * itemsize < shared_memory
    with pytest.raises(ValueError, match="does not fit"):
        launch_shape(16, 4096, 4, 99 * 1024)


@pytest.mark.skipif(not HAS_TRITON, reason="the package `triton` is not installed")
def test_splits_fill_the_device_and_no_more():
    shape = LaunchShape(16, 64, 4, 2, programs=2)
    assert num_splits(8, 1, 1 << 20, shape, 132) == 264
    assert num_splits(96, 1, 1 << 20, shape, 132) == 44
    assert num_splits(8, 1, 300, shape, 132) == 5  # of 64 tokens at least
    assert num_splits(8, 500, 1 << 20, shape, 132) == 1


@needs_launches
def test_kernel_for_hopper_is_taken_where_it_can_run(monkeypatch, caplog):
    assert gluon_kernels((8, 0)) is None
    assert gluon_kernels((10, 0)) is None
    gluon = gluon_kernels((9, 0))
    tensors = random_case(2, 1, 32, 40, 512, 64, torch.bfloat16)
    assert gluon.takes(*tensors)
    together = torch.zeros(2, 40, 576, dtype=torch.bfloat16, device=DEVICE)
    assert gluon.takes(*tensors[:2], together[..., :512], together[..., 512:])
    askew = torch.zeros(2, 40, 577, dtype=torch.bfloat16, device=DEVICE)
    assert not gluon.takes(*tensors[:3], askew[..., :64])
    assert not gluon.takes(*tensors[:3], askew[:, :, 512:576])
    assert not gluon.takes(*(x.float() for x in tensors))
    assert not gluon.takes(*random_case(1, 1, 32, 40, 192, 32, torch.bfloat16))
    gluon_kernels.cache_clear()
    monkeypatch.setattr(triton_absorbed.triton, "__version__", "3.9.0")
    with caplog.at_level(logging.INFO):
        assert gluon_kernels((9, 0)) is None
    assert "the kernel for Hopper is written for Triton 3.6.x, found 3.9.0" in caplog.text
    gluon_kernels.cache_clear()


@needs_launches
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_products_of_the_kernel_for_hopper_run_in_the_background(monkeypatch, tmp_path, masked):
    """It fits the device, and `ptxas` has not put a wait behind every product, as it does where it sees a hazard."""
    from tests.kernels.test_compiled import build, record, run_latent_attention

    launches = record(monkeypatch, "sm90", lambda: run_latent_attention(masked=masked))
    (launch_of_split,) = (x for x in launches if x.kernel.fn.__name__ == "hopper_split_kernel")
    compiled, listing = build(launch_of_split, "sm90", tmp_path)
    assert listing.count("HGMMA") >= (512 + 64) // 16
    assert listing.count("WARPGROUP.DEPBAR") <= compiled.asm["ptx"].count("wgmma.wait_group")


def test_triton_tests_under_the_interpreter():
    run_under_interpreter(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("B", "T", "H", "S", "R", "Q"),
    [(1, 1, 96, 5000, 512, 64), (2, 1, 32, 777, 512, 64), (3, 2, 8, 1300, 192, 32), (2, 4, 8, 999, 256, 64)],
    ids=["H96-R512", "H32-R512", "small", "base"],
)
def test_released_widths(B, T, H, S, R, Q, dtype):
    tensors = random_case(B, T, H, S, R, Q, dtype)
    scale = (R + Q) ** -0.5
    check(tensors, scale=scale)
    mask = torch.rand(B, 1, S, device=DEVICE) < 0.7
    check(tensors, mask, torch.tensor(S - 100, device=DEVICE), scale=scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", [None, (2, 1), (2, 3)], ids=["all", "keys", "queries"])
@pytest.mark.parametrize(("S", "ends"), [(777, [130, 776]), (150, [3, 64])], ids=["S777", "S150"])
def test_kernel_for_hopper(S, ends, mask, dtype):
    """Tiles that are not full, of tokens and of query vectors, in one part and in several; always the same result."""
    if gluon_kernels(torch.cuda.get_device_capability()) is None:
        pytest.skip("needs a Hopper GPU and the version of Triton that the kernel is written for")
    tensors = random_case(2, 3, 24, S, 512, 64, dtype)
    scale = 576**-0.5
    if mask is not None:
        mask = torch.rand(*mask, S, device=DEVICE) < 0.7
    for splits in (1, 3):
        check(tensors, mask, None, splits, HOPPER, scale)
        end = torch.tensor(ends, device=DEVICE)
        expected = check(tensors, mask, end, splits, HOPPER, scale)
        for _ in range(10):
            assert torch.equal(launch(*poisoned(tensors, mask, end), mask, end, scale, HOPPER, splits), expected)
    for R, Q in ((256, 32), (128, 16)):
        check(random_case(1, 1, 64, S, R, Q, dtype), shape=HOPPER, scale=scale)


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "H"), [(1, 17), (5, 7), (1, 65)], ids=["T1-H17", "T5-H7", "T1-H65"])
def test_any_number_of_heads_on_hopper(T, H):
    if gluon_kernels(torch.cuda.get_device_capability()) is None:
        pytest.skip("needs a Hopper GPU and the version of Triton that the kernel is written for")
    for S in (5, 64, 400):  # one tile, and odd and even numbers of them
        for splits in (1, 2, None):
            check(random_case(2, T, H, S, 512, 64, torch.bfloat16), None, None, splits, HOPPER, 576**-0.5)


@pytest.mark.gpu
def test_gpu_addresses_past_32_bits():
    """Queries, shared queries and a mask whose tokens are more than 2^31 elements apart."""
    tensors = random_case(1, 3, 2, 40, 16, 16, torch.float16)
    mask = torch.rand(1, 3, 40, device=DEVICE) < 0.8
    expected = launch(*tensors, mask, None, 0.2)
    stride = 2**30 + 8
    room = torch.zeros(2 * stride + 64, dtype=torch.float16, device=DEVICE)

    def spread(x):
        view = room.as_strided(x.shape, (0, stride, 16, 1))
        view.copy_(x)
        return view

    query = spread(tensors[0])
    assert torch.equal(launch(query, *tensors[1:], mask, None, 0.2), expected)
    shared_query = spread(tensors[1])
    assert torch.equal(launch(tensors[0], shared_query, *tensors[2:], mask, None, 0.2), expected)
    far_mask = torch.zeros(2 * stride + 64, dtype=torch.bool, device=DEVICE).as_strided(mask.shape, (0, stride, 1))
    far_mask.copy_(mask)
    assert torch.equal(launch(*tensors, far_mask, None, 0.2), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 32], ids="H{}".format)
def test_gpu_rows_of_a_cache_past_32_bits(heads):
    """Five rows of a million tokens: the last one begins 2^31 elements after the first."""
    S = 2**20
    query, shared_query = random_case(5, 1, heads, 1, 512, 64, torch.bfloat16)[:2]
    cache = [torch.randn(5, S, width, dtype=torch.bfloat16, device=DEVICE) for width in (512, 64)]
    end = torch.tensor([3, 0, 70, 1000, S], device=DEVICE)
    together = launch(query, shared_query, *cache, None, end, 0.04, None, 4)
    for b in range(5):
        alone = launch(*(x[b : b + 1].clone() for x in (query, shared_query, *cache)), None, end[b], 0.04, None, 4)
        assert torch.equal(together[b : b + 1], alone)


@pytest.mark.gpu
def test_graph_follows_the_length_on_the_device():
    tensors = random_case(1, 1, 8, 4096, 192, 32, torch.bfloat16)
    end = torch.tensor(17, device=DEVICE)
    latent_attention(*tensors, scale=0.1, end=end)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = latent_attention(*tensors, scale=0.1, end=end)
    for length in (17, 1000, 4096):
        end.fill_(length)
        graph.replay()
        assert torch.equal(output, latent_attention(*tensors, scale=0.1, end=end))
        shorter = latent_attention(*tensors[:2], *(x[:, :length] for x in tensors[2:]), scale=0.1)
        torch.testing.assert_close(output, shorter, rtol=2**-6, atol=2**-8)
