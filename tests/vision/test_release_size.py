# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The released vision size: names and shapes of every tensor, and what needs a GPU."""

from __future__ import annotations

import pytest
import torch

from deltalatent import (
    KimiK3Config,
    KimiK3ForConditionalGeneration,
    KimiK3VisionConfig,
    KimiK3VisionModel,
    size_config,
)
from deltalatent.modeling.vision_tower import Grid, KimiK3Projector
from tests.testing_common import randomize_, typical_error
from tests.vision.vision_testing import round_tower_to_bf16_


def released_vision_shapes() -> dict[str, tuple[int, ...]]:
    """The whole inventory: width 1024, attention 1536 (12 heads of 128), MLP 4096, 27 blocks, text width 7168."""
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (1024, 3, 14, 14),
        "vision_tower.patch_embed.pos_emb.weight": (64, 64, 1024),
        "vision_tower.encoder.final_layernorm.weight": (1024,),
        "mm_projector.proj.0.weight": (4096, 4096),
        "mm_projector.proj.2.weight": (7168, 4096),
        "mm_projector.post_norm.weight": (7168,),
    }
    block = {
        "norm0.weight": (1024,),
        "norm1.weight": (1024,),
        "wqkv.weight": (4608, 1024),
        "wo.weight": (1024, 1536),
        "mlp.fc0.weight": (4096, 1024),
        "mlp.fc1.weight": (1024, 4096),
    }
    for i in range(27):
        shapes |= {f"vision_tower.encoder.blocks.{i}.{name}": shape for name, shape in block.items()}
    return shapes


def test_inventory_of_the_release() -> None:
    """168 tensors, none of them a bias; on the meta device, with a text model of one layer."""
    config = KimiK3Config(
        text_config=size_config("release", num_hidden_layers=1, num_experts=None), vision_config=KimiK3VisionConfig()
    )
    with torch.device("meta"):
        model = KimiK3ForConditionalGeneration(config)
    ours = {name.removeprefix("model."): tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    vision = {name: shape for name, shape in ours.items() if not name.startswith(("language_model.", "lm_head."))}
    assert vision == released_vision_shapes()
    assert len(vision) == 168
    assert sum(torch.Size(shape).numel() for name, shape in vision.items() if "tower" in name) == 401_214_464


def visual_tokens(model: torch.nn.Module, *grids: Grid) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(sum(t * h * w for t, h, w in grids), 3, 14, 14, generator=generator)
    with torch.no_grad():
        output = model.vision_tower(pixels.cuda(), torch.tensor(grids))
        return model.mm_projector(output.pooler_output)


@pytest.mark.gpu
def test_largest_image_takes_less_than_four_gib() -> None:
    """3584 x 3584 pixels, 65536 patches, in bf16: weights, pixels and activations together."""
    config = KimiK3VisionConfig()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        tower = KimiK3VisionModel(config).to(torch.bfloat16).eval()
        projector = KimiK3Projector(config).to(torch.bfloat16)
    pixels = torch.randn(65536, 3, 14, 14, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        tokens = projector(tower(pixels, torch.tensor([[1, 256, 256]])).pooler_output)
    assert tokens.shape == (16384, 7168)
    assert bool(torch.isfinite(tokens).all())
    assert torch.cuda.max_memory_allocated() - before < 4 * 2**30


@pytest.mark.gpu
def test_bf16_at_released_size_is_as_good_as_rounding_allows() -> None:
    """A photograph's grid, a clip and a thin strip together; the band is that of the golden test."""
    config, holder = KimiK3VisionConfig(), torch.nn.Module()
    holder.model = torch.nn.Module()
    holder.model.vision_tower, holder.model.mm_projector = KimiK3VisionModel(config), KimiK3Projector(config)
    model = randomize_(holder.model).eval().cuda().bfloat16()
    grids = [(1, 32, 46), (4, 16, 22), (1, 2, 128)]
    half = visual_tokens(model, *grids)
    exact = visual_tokens(model.float(), *grids)  # the same weights
    round_tower_to_bf16_(holder)
    allowed = typical_error(visual_tokens(model, *grids), exact)
    error = typical_error(half, exact)
    print(f"bf16 error {error:.4f}, of rounding alone {allowed:.4f}, spread {exact.std().item():.4f}")
    assert 0 < error < 2 * allowed
    assert allowed < (10 * (config.vt_num_hidden_layers + 1)) ** 0.5 * 2**-9 * exact.std().item()
