# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The vision tower (MoonViT-V2) and the projector: patches of images and clips to visual tokens of the text model.

Sources: Kimi K3 report (arXiv 2607.24653), Kimi-VL (arXiv 2504.07491), golden README "Vision". Images have any size;
the patches of all items of a batch (images, or clips of a few frames) lie one after the other in one long axis, and
attention looks at one item at a time. The path of a patch: `KimiK3PatchEmbedding` -> `KimiK3VisionBlock`s ->
`merge_patches` -> `KimiK3Projector`.

Shapes: N patches of all items, M visual tokens of all items, C colour channels, P side of a patch in pixels, W width
of the tower, H heads, K channels of a head, D width of the text model. An item has t frames of h x w patches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils.output_capturing import capture_outputs

from deltalatent.configuration.configuration_kimi_k3 import KimiK3VisionConfig
from deltalatent.modeling.latent_attention import eager_attention_forward
from deltalatent.modeling.norms import KimiK3RMSNorm

COLOUR_CHANNELS = 3
ANGLE_BASE = 10000.0
"""Base of the frequencies of time vectors and rotary angles."""

RMS_NORM_EPS, LAYER_NORM_EPS = 2.0**-23, 1e-5
"""Epsilons of the tower's norms, whatever the dtype: the release's, and the predecessor's."""

T = TypeVar("T")
Grid = tuple[int, int, int]
"""t, h, w of an item."""


def runs(values: Iterable[T]) -> Iterator[tuple[T, int]]:
    """Equal neighbours together: `[a, a, b]` -> `(a, 2), (b, 1)`. Items of one shape are computed as one batch."""
    return ((value, len(list(group))) for value, group in groupby(values))


def number_of_patches(grid: Grid) -> int:
    return grid[0] * grid[1] * grid[2]


class KimiK3PatchProjection(nn.Conv2d):
    """A convolution whose kernel [W, C, P, P] covers one whole patch, computed as the matrix product that it is."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        """[N, C, P, P] -> [N, W]."""
        return F.linear(pixel_values.flatten(1), self.weight.flatten(1), self.bias)


class KimiK3PatchPositions(nn.Module):
    """Where a patch is: a learned table [rows, columns, W] in the plane, a fixed vector per frame in time.

    The table is resampled if an image has another grid (pixel centres at half integers, edges clamped, no
    antialiasing). Frames of a clip get sines and cosines of their number; a single frame gets none.
    """

    def __init__(self, config: KimiK3VisionConfig) -> None:
        super().__init__()
        self.mode = config.pos_emb_interpolation_mode
        rows, columns = config.init_pos_emb_height, config.init_pos_emb_width
        self.weight = nn.Parameter(torch.empty(rows, columns, config.vt_hidden_size))

    def forward(self, grids: list[Grid]) -> Tensor:
        """Vectors [N, W] of all patches, in the dtype of the table."""
        return torch.cat([self._of_item(grid).repeat(count, 1) for grid, count in runs(grids)])

    def _of_item(self, grid: Grid) -> Tensor:
        frames, rows, columns = grid
        table: Tensor = self.weight
        if (rows, columns) != table.shape[:2]:
            planes = table.permute(2, 0, 1)[None]
            table = F.interpolate(planes, (rows, columns), mode=self.mode, align_corners=False)[0].permute(1, 2, 0)
        in_plane = table.reshape(rows * columns, -1)
        if frames == 1:
            return in_plane
        in_time = time_vectors(frames, in_plane.shape[-1], in_plane.device).to(in_plane.dtype)
        return (in_time[:, None] + in_plane).flatten(0, 1)


def time_vectors(frames: int, width: int, device: torch.device) -> Tensor:
    """float32 [frames, width]: sines, then cosines, of `frame * 10000^(-2i / width)`."""
    half = width // 2
    frequencies = ANGLE_BASE ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    angles = torch.arange(frames, device=device, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class KimiK3PatchEmbedding(nn.Module):
    """Pixels of a patch, projected, plus its position."""

    def __init__(self, config: KimiK3VisionConfig) -> None:
        super().__init__()
        self.proj = KimiK3PatchProjection(
            COLOUR_CHANNELS,
            config.vt_hidden_size,
            kernel_size=config.patch_size,
            stride=config.patch_size,
            bias=config.patch_embed_proj_bias,
        )
        self.pos_emb = KimiK3PatchPositions(config)

    def forward(self, pixel_values: Tensor, grids: list[Grid]) -> Tensor:
        """[N, C, P, P] -> [N, W]."""
        return self.proj(pixel_values.to(self.proj.weight.dtype)) + self.pos_emb(grids)


def rotary_angles(grids: list[Grid], head_dim: int, device: torch.device) -> Tensor:
    r"""Angles float32 [N, K/2] by which pairs of channels turn; frames of a clip share them.

    .. math:: \theta_{2i} = x \cdot 10000^{-4i/K}, \quad \theta_{2i+1} = y \cdot 10000^{-4i/K}

    with x the column and y the row of the patch.
    """
    frequencies = ANGLE_BASE ** (-torch.arange(0, head_dim, 4, device=device, dtype=torch.float32) / head_dim)

    def of_item(grid: Grid) -> Tensor:
        _, rows, columns = grid
        x = torch.arange(columns, device=device)[:, None] * frequencies  # [w, K/4]
        y = torch.arange(rows, device=device)[:, None] * frequencies  # [h, K/4]
        shape = (rows, columns, -1)
        return torch.stack([x.expand(shape), y[:, None].expand(shape)], dim=-1).reshape(rows * columns, -1)

    return torch.cat([of_item(grid).repeat(grid[0] * count, 1) for grid, count in runs(grids)])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the channel pairs (2j, 2j+1) of x [N, H, K] by angles with these cosines and sines [N, 1, K/2]; in
    float32, returned in x's dtype."""
    even, odd = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return turned.flatten(-2).to(x.dtype)


class KimiK3VisionMLP(nn.Module):
    """Two layers with an activation between them."""

    def __init__(self, config: KimiK3VisionConfig) -> None:
        super().__init__()
        self.fc0 = nn.Linear(config.vt_hidden_size, config.vt_intermediate_size, bias=config.linear_bias)
        self.fc1 = nn.Linear(config.vt_intermediate_size, config.vt_hidden_size, bias=config.linear_bias)
        self.act_fn = ACT2FN[config.activation_func]

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.fc1(self.act_fn(self.fc0(hidden_states)))


def _norm(config: KimiK3VisionConfig) -> nn.Module:
    if config.norm_type == "layernorm":
        return nn.LayerNorm(config.vt_hidden_size, LAYER_NORM_EPS)
    return KimiK3RMSNorm(config.vt_hidden_size, RMS_NORM_EPS)


class KimiK3VisionBlock(GradientCheckpointingLayer):
    """Attention among the patches of an item (all its frames together), then an MLP; both see normalised input."""

    def __init__(self, config: KimiK3VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.num_heads = config.vt_num_attention_heads
        self.head_dim = config.qkv_hidden_size // config.vt_num_attention_heads
        self.norm0 = _norm(config)
        self.norm1 = _norm(config)
        self.wqkv = nn.Linear(config.vt_hidden_size, 3 * config.qkv_hidden_size, bias=config.attn_bias)
        self.wo = nn.Linear(config.qkv_hidden_size, config.vt_hidden_size, bias=config.attn_bias)
        self.mlp = KimiK3VisionMLP(config)

    def forward(self, hidden_states: Tensor, lengths: list[int], cos: Tensor, sin: Tensor) -> Tensor:
        """[N, W] -> [N, W].

        Args:
            hidden_states: Patches of all items.
            lengths: How many patches each item has.
            cos, sin: float32 [N, 1, K/2], of the rotary angles.
        """
        hidden_states = hidden_states + self._attend(self.norm0(hidden_states), lengths, cos, sin)
        return hidden_states + self.mlp(self.norm1(hidden_states))

    def _attend(self, hidden_states: Tensor, lengths: list[int], cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = self.wqkv(hidden_states).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)  # [N, H, K]
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        groups = list(runs(lengths))
        sections = [length * count for length, count in groups]
        outputs = []
        for (length, count), *parts in zip(groups, *(x.split(sections) for x in (query, key, value)), strict=True):
            # Items of one length are a batch: no mask, and no work on pairs of patches from different items.
            q, k, v = (x.reshape(count, length, self.num_heads, self.head_dim).transpose(1, 2) for x in parts)
            output, _ = attention(self, q, k, v, None, scaling=self.head_dim**-0.5, is_causal=False)
            outputs.append(output.reshape(count * length, -1))
        return self.wo(torch.cat(outputs) if len(outputs) > 1 else outputs[0])


class KimiK3VisionEncoder(nn.Module):
    """The blocks and the last norm."""

    def __init__(self, config: KimiK3VisionConfig) -> None:
        super().__init__()
        self.head_dim = config.qkv_hidden_size // config.vt_num_attention_heads
        self.blocks = nn.ModuleList([KimiK3VisionBlock(config) for _ in range(config.vt_num_hidden_layers)])
        self.final_layernorm = _norm(config)

    def forward(self, hidden_states: Tensor, grids: list[Grid]) -> Tensor:
        """[N, W] -> [N, W]."""
        angles = rotary_angles(grids, self.head_dim, hidden_states.device)[:, None]
        cos, sin = angles.cos(), angles.sin()
        lengths = [number_of_patches(grid) for grid in grids]
        for block in self.blocks:
            hidden_states = block(hidden_states, lengths, cos, sin)
        return self.final_layernorm(hidden_states)


def merge_patches(hidden_states: Tensor, grids: list[Grid], kernel: tuple[int, int]) -> Tensor:
    """Mean over frames, then each group of neighbouring patches side by side in one vector.

    Args:
        hidden_states: [N, W].
        grids: Of the items; h and w are multiples of the kernel.
        kernel: Rows and columns of a group.

    Returns:
        [M, rows * columns * W]; groups and the patches in a group are in row-major order.
    """
    rows, columns = kernel
    merged = []
    counted = list(runs(grids))
    sections = [number_of_patches(grid) * count for grid, count in counted]
    for ((frames, height, width), count), patches in zip(counted, hidden_states.split(sections), strict=True):
        patches = patches.view(count, frames, height // rows, rows, width // columns, columns, -1)
        patches = patches.mean(dim=1) if frames > 1 else patches[:, 0]
        patches = patches.transpose(2, 3)  # [items, h/rows, w/columns, rows, columns, W]
        merged.append(patches.flatten(3).flatten(0, 2))
    return torch.cat(merged)


class KimiK3VisionModel(PreTrainedModel):
    """The tower: patches of images and clips to one vector per patch, and to one per group of patches."""

    config: KimiK3VisionConfig
    config_class = KimiK3VisionConfig
    base_model_prefix = "vision_tower"
    main_input_name = "pixel_values"
    input_modalities = ["image", "video"]  # noqa: RUF012 - read by the base class
    supports_gradient_checkpointing = True
    _no_split_modules = ["KimiK3VisionBlock"]  # noqa: RUF012 - read by the base class
    _supports_sdpa = True
    _can_record_outputs = {"hidden_states": KimiK3VisionBlock}  # noqa: RUF012

    def __init__(self, config: KimiK3VisionConfig) -> None:
        super().__init__(config)
        self.patch_embed = KimiK3PatchEmbedding(config)
        self.encoder = KimiK3VisionEncoder(config)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.patch_embed

    def tokens_per_item(self, grid_thws: Tensor) -> list[int]:
        """How many visual tokens each item has; it does not depend on the number of frames."""
        rows, columns = self.config.merge_kernel_size
        return [(height // rows) * (width // columns) for _, height, width in grid_thws.tolist()]

    @capture_outputs
    def forward(self, pixel_values: Tensor, grid_thws: Tensor, **kwargs) -> BaseModelOutputWithPooling:
        """Features of images and clips.

        Args:
            pixel_values: Floating point [N, C, P, P], the patches of all items in order; in an item frame by frame,
                in a frame row by row. Normalised as the image processor does it.
            grid_thws: Integers [items, 3], frames, rows and columns of patches of each item. Rows and columns are
                multiples of `merge_kernel_size`; a clip has at most `init_pos_emb_time` frames.
            **kwargs: `output_hidden_states`.

        Returns:
            `last_hidden_state` [N, W] and `pooler_output` [M, merged width], one row per visual token; items in order.

        Raises:
            ValueError: Shapes and grids contradict each other, or a pixel value is NaN.
        """
        grids = self._checked_grids(pixel_values, grid_thws)
        hidden_states = self.encoder(self.patch_embed(pixel_values, grids), grids)
        merged = merge_patches(hidden_states, grids, cast(tuple[int, int], tuple(self.config.merge_kernel_size)))
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=merged)

    def _checked_grids(self, pixel_values: Tensor, grid_thws: Tensor) -> list[Grid]:
        config = self.config
        side = config.patch_size
        if pixel_values.ndim != 4 or pixel_values.shape[1:] != (COLOUR_CHANNELS, side, side):
            raise ValueError(
                f"`pixel_values` must have shape [patches, {COLOUR_CHANNELS}, {side}, {side}], got "
                f"{tuple(pixel_values.shape)}: pass what the image processor returns."
            )
        if not pixel_values.is_floating_point():
            raise TypeError(
                f"`pixel_values` must be floating point, got {pixel_values.dtype}: pass what the image processor "
                "returns."
            )
        if grid_thws is None or grid_thws.ndim != 2 or grid_thws.shape[1] != 3 or grid_thws.is_floating_point():
            got = None if grid_thws is None else f"{grid_thws.dtype} {tuple(grid_thws.shape)}"
            raise ValueError(
                f"`grid_thws` must be integers [items, 3] (frames, rows, columns of patches), got {got}: pass what "
                "the image processor returns with `pixel_values`."
            )
        grids: list[Grid] = [(t, h, w) for t, h, w in grid_thws.tolist()]
        rows, columns = config.merge_kernel_size
        for i, (t, h, w) in enumerate(grids):
            if not 1 <= t <= config.init_pos_emb_time:
                raise ValueError(
                    f"`grid_thws` must give each item 1 to `init_pos_emb_time`={config.init_pos_emb_time} frames, got "
                    f"{t} for item {i}: split a longer video into clips, as the processor does."
                )
            if h < 1 or w < 1 or h % rows or w % columns:
                raise ValueError(
                    f"`grid_thws` must have rows and columns that are positive multiples of {rows} and {columns}, got "
                    f"{h} x {w} for item {i}: pad the image, as the image processor does."
                )
        if (expected := sum(map(number_of_patches, grids))) != len(pixel_values) or not grids:
            raise ValueError(
                f"`pixel_values` must hold one patch per cell of `grid_thws`, got {len(pixel_values)} patches for "
                f"{expected} cells in {len(grids)} items: pass both as the image processor returned them."
            )
        # Reading the grids has already waited for the device, and NaN would spread over all tokens of the row.
        if bool(pixel_values.isnan().any()):
            items = [
                i for i, part in enumerate(pixel_values.split([*map(number_of_patches, grids)])) if part.isnan().any()
            ]
            raise ValueError(f"`pixel_values` must be numbers, got NaN in items {items}: look at the images' source.")
        return grids

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Normal projections and positions, unit norms."""
        super()._init_weights(module)
        if isinstance(module, KimiK3PatchPositions):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)


class KimiK3Projector(nn.Module):
    r"""Groups of patches to visual tokens of the text model.

    `patchmergerv2`: :math:`\mathrm{RMSNorm}(W_2\, \mathrm{act}(W_0\, x))`. `patchmerger`, the predecessor's:
    :math:`W_2\, \mathrm{act}(W_0\, \mathrm{LayerNorm}(x) + b_0) + b_2`, the norm over each patch of the group.
    """

    def __init__(self, config: KimiK3VisionConfig) -> None:
        super().__init__()
        self.patch_width = config.mm_hidden_size
        merged = config.mm_hidden_size * config.merge_kernel_size[0] * config.merge_kernel_size[1]
        self.is_predecessor = config.mm_projector_type == "patchmerger"
        if self.is_predecessor:
            self.pre_norm = nn.LayerNorm(config.mm_hidden_size, config.projector_ln_eps)
        self.proj = nn.Sequential(
            nn.Linear(merged, merged, bias=self.is_predecessor),
            ACT2FN[config.projector_hidden_act],
            nn.Linear(merged, config.text_hidden_size, bias=self.is_predecessor),
        )
        if not self.is_predecessor:
            self.post_norm = KimiK3RMSNorm(config.text_hidden_size, config.projector_ln_eps)

    def forward(self, merged: Tensor) -> Tensor:
        """[M, merged width] -> [M, D]."""
        if self.is_predecessor:
            return self.proj(self.pre_norm(merged.unflatten(-1, (-1, self.patch_width))).flatten(-2))
        return self.post_norm(self.proj(merged))


__all__ = ["KimiK3VisionModel"]
