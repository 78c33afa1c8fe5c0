# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""How the model attends to latents: without masks, in blocks behind a cache, absorbed, and with adapters on top."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, StaticCache

from deltalatent.kernels.latent_attention import document_groups
from deltalatent.kernels.sequence_layout import sequence_layout
from deltalatent.modeling import latent_attention, modeling_kimi_k3
from tests.equivalence import EXACT, exact_model
from tests.testing_common import assert_close, assert_gradients_close, gradients, left_padded, random_ids, tiny_model


@pytest.fixture
def no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a mask of T * S entries is made")

    monkeypatch.setattr(modeling_kimi_k3, "create_causal_mask", refuse)


@pytest.mark.usefixtures("no_masks")
def test_sdpa_makes_no_mask() -> None:
    model = tiny_model()
    ids, mask = left_padded([random_ids(model.config, 1, length, seed=length)[0] for length in (4, 9)])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]] * 2)
    model(ids)
    model(ids, attention_mask=mask)
    model(ids, position_ids=positions)
    model(ids, position_ids=positions, attention_mask=mask)
    with torch.no_grad():
        for cache in (DynamicCache(config=model.config), StaticCache(model.config, 20)):
            for piece, end in ((ids[:, :5], 5), (ids[:, 5:6], 6), (ids[:, 6:], 9)):
                model(piece, attention_mask=mask[:, :end], cache=cache)
    model.generate(ids, attention_mask=mask, max_new_tokens=2)
    with pytest.raises(AssertionError, match="a mask of"):
        model.set_attn_implementation("eager")
        model(ids)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("padded", [False, True], ids=["full_rows", "padded_rows"])
@pytest.mark.parametrize("absorb", [False, True], ids=["blocks", "absorbed"])
def test_any_piece_of_any_form_behind_a_cache(
    absorb: bool, padded: bool, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of five cached tokens at a time, or none at all, instead of one product with all of them."""
    monkeypatch.setattr(latent_attention, "SMALLEST_BLOCK", 5)
    monkeypatch.setattr(latent_attention.KimiK3LatentAttention, "_absorbing_is_cheaper", lambda *_: absorb)
    model = exact_model()
    rows = [random_ids(model.config, 1, length, seed=length)[0] for length in (24, 17 if padded else 24)]
    ids, mask = left_padded(rows)
    cache = kind(config=model.config) if kind is DynamicCache else kind(model.config, 30)
    logits, start = [], 0
    with torch.no_grad():
        for length in (9, 3, 1, 11):
            piece = slice(start, start + length)
            start += length
            logits.append(model(ids[:, piece], attention_mask=mask[:, :start] if padded else None, cache=cache).logits)
        for i, row in enumerate(rows):
            expected = model(row[None], use_cache=False).logits[0]
            assert_close(torch.cat(logits, 1)[i, mask[i].bool()], expected, EXACT)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("form", ["absorbed", "blocks", "gradients"])
def test_what_is_hidden_or_not_yet_written_may_be_anything(
    form: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached padding, and places of a preallocated cache behind its last token: weight 0, also of NaN."""
    monkeypatch.setattr(latent_attention.KimiK3LatentAttention, "_absorbing_is_cheaper", lambda *_: form == "absorbed")
    model = exact_model("mla_only")
    ids, mask = left_padded([random_ids(model.config, 1, length, seed=length)[0] for length in (9, 4)])
    results = []
    for garbage in (False, True):
        cache = kind(config=model.config) if kind is DynamicCache else kind(model.config, 12)
        with torch.set_grad_enabled(form == "gradients"):
            model(ids[:, :6], attention_mask=mask[:, :6], cache=cache)
            if garbage:
                for layer in cache.layers:
                    for x in (layer.keys, layer.values):
                        x.detach()[1, :, :5] = torch.nan
                        x.detach()[:, :, 6:] = torch.nan
            pieces = [model(ids[:, a:b], attention_mask=mask[:, :b], cache=cache).logits for a, b in ((6, 7), (7, 9))]
        results.append(torch.cat(pieces, dim=1))
    assert torch.equal(*results)
    if form == "gradients" and kind is DynamicCache:
        assert all(x.isfinite().all() for x in gradients(model, results[1].sum()).values())


@pytest.mark.parametrize("heads", [1, 3], ids="H{}".format)
@pytest.mark.parametrize("form", ["absorbed", "blocks", "gradients"])
def test_odd_heads_and_a_row_of_nothing_but_padding(form: str, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_attention.KimiK3LatentAttention, "_absorbing_is_cheaper", lambda *_: form == "absorbed")
    model = exact_model("mla_only", num_attention_heads=heads, num_key_value_heads=heads)
    ids = random_ids(model.config, 3, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1] = 0
    cache = DynamicCache(config=model.config)
    with torch.set_grad_enabled(form == "gradients"):
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        cuts = ((0, 6), (6, 7), (7, 9))
        pieces = [model(ids[:, a:b], attention_mask=mask[:, :b], cache=cache).logits for a, b in cuts]
    logits = torch.cat(pieces, dim=1)
    assert logits.isfinite().all()
    assert_close(logits[mask.bool()], expected[mask.bool()], EXACT)
    if form == "gradients":
        weights = torch.randn_like(logits) * mask[..., None]
        of_pieces, of_whole = (gradients(model, (x * weights).sum()) for x in (logits, expected))
        assert_gradients_close(of_pieces, of_whole, rel=1e-6)


def test_blocks_are_as_long_as_the_piece_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_attention, "SMALLEST_BLOCK", 4)
    monkeypatch.setattr(latent_attention.KimiK3LatentAttention, "_absorbing_is_cheaper", lambda *_: False)
    model = tiny_model()
    made = []
    layer = next(m for m in model.modules() if isinstance(m, latent_attention.KimiK3LatentAttention))
    layer.kv_b_proj.register_forward_hook(lambda _, args, __: made.append(args[0].shape[1]))
    cache = DynamicCache(config=model.config)
    ids = random_ids(model.config, 1, 40)
    with torch.no_grad():
        for start, end in ((0, 26), (26, 32), (32, 33)):
            model(ids[:, start:end], cache=cache)
    assert made == [26, 6, 6, 6, 6, 2, 6, 4, 4, 4, 4, 4, 4, 4, 4, 1]


def test_gradients_pass_through_a_cache() -> None:
    """As with a trained prefix in a cache: a forward in two pieces has the gradients of one."""
    model = exact_model("mla_only")
    ids = random_ids(model.config, 2, 12)
    weights = torch.randn(2, 12, model.config.vocab_size)
    expected = gradients(model, (model(ids, use_cache=False).logits * weights).sum())
    for cut in (11, 4):
        cache = DynamicCache(config=model.config)
        logits = [model(piece, cache=cache).logits for piece in (ids[:, :cut], ids[:, cut:])]
        assert_gradients_close(gradients(model, (torch.cat(logits, 1) * weights).sum()), expected, rel=1e-6)


@pytest.mark.parametrize("padded", [False, True], ids=["full_rows", "padded_rows"])
def test_weights_that_are_not_the_whole_projection_are_called(padded: bool) -> None:
    """An adapter on `kv_b_proj` computes more than its weight holds: nothing is absorbed then, also in a graph."""

    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = exact_model()
    for layer in model.modules():
        if isinstance(layer, latent_attention.KimiK3LatentAttention):
            layer.kv_b_proj.__class__ = Doubled
            assert not layer._absorbing_is_cheaper(1, 1000)
    ids = random_ids(model.config, 2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 1 - int(padded)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        for cache in (DynamicCache(config=model.config), StaticCache(model.config, 12)):
            pieces = [
                model(ids[:, a:b], attention_mask=mask[:, :b], cache=cache).logits for a, b in ((0, 6), (6, 7), (7, 9))
            ]
            assert_close(torch.cat(pieces, 1)[mask.bool()], expected[mask.bool()], EXACT)


def test_documents_compile_into_one_graph_with_the_same_gradients() -> None:
    model = exact_model()
    layer = next(x for x in model.modules() if isinstance(x, latent_attention.KimiK3LatentAttention))
    offsets = torch.tensor([0, 20, 37], dtype=torch.int32)
    view = latent_attention.CausalView(groups=document_groups(sequence_layout(1, 40, cu_seqlens=offsets)))
    x = torch.randn(1, 40, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    outputs = [run(x, view)[0] for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True))]
    assert torch.equal(*outputs)
    leaves = [x, *layer.parameters()]
    for eager, compiled in zip(*(torch.autograd.grad(y.sin().sum(), leaves) for y in outputs), strict=True):
        assert_close(compiled, eager, EXACT)


def test_attention_weights_need_the_eager_function(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    latent_attention.logger.addHandler(caplog.handler)
    try:
        latent_attention.logger.warning_once.cache_clear()
        model(random_ids(model.config), output_attentions=True)
    finally:
        latent_attention.logger.removeHandler(caplog.handler)
    assert 'use `model.set_attn_implementation("eager")`' in caplog.text


@pytest.mark.gpu
def test_decoding_and_prefill_on_a_gpu_are_one_pass() -> None:
    """bf16: the kernels of training, of prefill behind a cache and of decoding, against one pass in float32."""
    model = tiny_model().cuda()
    ids, mask = left_padded([random_ids(model.config, 1, length, seed=length)[0] for length in (300, 222)])
    ids, mask = ids.cuda(), mask.cuda()
    real = mask.bool()
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits[real]
        model = model.to(torch.bfloat16)
        whole = model(ids, attention_mask=mask, use_cache=False).logits[real].float()
        error = (whole - expected).norm() / expected.norm()
        for cache in (DynamicCache(config=model.config), StaticCache(model.config, 320)):
            cuts = ((0, 256), (256, 257), (257, 260), (260, 300))
            pieces = [model(ids[:, a:b], attention_mask=mask[:, :b], cache=cache).logits for a, b in cuts]
            assert (torch.cat(pieces, 1)[real].float() - expected).norm() / expected.norm() <= 2 * error
