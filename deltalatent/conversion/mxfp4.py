# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""MXFP4: four-bit floats with one power-of-two scale per 32 inputs, as released files pack their routed experts.

Source: OCP Microscaling Formats (MX) Specification v1.0: E2M1 elements, E8M0 scales, conversion from scalar formats
(section 6.3). The order of the nibbles is that of compressed-tensors' `mxfp4-pack-quantized`. Plain tensor operations,
on any device.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

GROUP_SIZE = 32
"""Neighbouring inputs that share a scale."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the codes 0 to 7; the fourth bit of a code is the sign."""

SCALE_BIAS = 127
"""A scale byte b means 2^(b - 127), except 255."""

NAN_SCALE = 255
"""A scale byte that means NaN."""

ZERO_GROUP_SCALE = SCALE_BIAS
"""What `quantize_mxfp4` writes for a group of zeros, whose scale could be any: 2^0."""

LARGEST_SCALE = 252
"""Of what `quantize_mxfp4` writes: with a larger one, the codes for 4 or 6 are beyond the range of float32."""

QUANTIZATION_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "format": "mxfp4-pack-quantized",
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "group",
                "group_size": GROUP_SIZE,
                "symmetric": True,
                "dynamic": False,
                "actorder": None,
                "block_structure": None,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "zp_dtype": "torch.uint8",
            },
        }
    },
}
"""What a released `config.json` says of such files. Plain tensors that no pattern of `ignore` names exist, too."""

# A magnitude beyond the middle of two codes gets the larger one. In the middle, the one with an even mantissa bit.
_UP_BEYOND, _UP_FROM = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)


def dequantize_mxfp4(weight_packed: Tensor, weight_scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Weights from packed codes: w[o, i] = E2M1(code[o, i]) * 2^(scale[o, i // 32] - 127).

    Exact in bfloat16, float32 and float64; float16 rounds what lies below its normal range (2^-14). No gradients.

    Args:
        weight_packed: uint8 [..., O, I/2], two codes a byte, the even input in the low nibble; I a multiple of 32.
        weight_scale: uint8 [..., O, I/32], exponents with bias 127.
        dtype: Floating dtype of the result.

    Returns:
        [..., O, I] of dtype `dtype`.

    Raises:
        TypeError: A tensor is not uint8, or `dtype` not a floating dtype of at least 16 bits.
        ValueError: The shapes do not belong together, a scale is NaN (255), or a weight is too large for `dtype`.
    """
    for name, tensor in (("weight_packed", weight_packed), ("weight_scale", weight_scale)):
        if tensor.dtype != torch.uint8:
            raise TypeError(f"`{name}` must be uint8, got {tensor.dtype}: pass the bytes as the file stores them.")
    if dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise TypeError(f"`dtype` must be bfloat16, float16, float32 or float64, got {dtype}: convert afterwards.")
    half = weight_packed.shape[-1] if weight_packed.ndim else 0
    expected = (*weight_packed.shape[:-1], half * 2 // GROUP_SIZE)
    if half * 2 % GROUP_SIZE or tuple(weight_scale.shape) != expected:
        raise ValueError(
            f"`weight_scale` must have one byte per {GROUP_SIZE} codes ({GROUP_SIZE // 2} bytes) of `weight_packed`, "
            f"got shapes {tuple(weight_scale.shape)} and {tuple(weight_packed.shape)}: the file is damaged, or packed "
            "in another format."
        )
    largest_scale = int(weight_scale.max()) if weight_scale.numel() else 0
    if largest_scale == NAN_SCALE:
        raise ValueError(
            f"`weight_scale` must be below {NAN_SCALE}, which means NaN, got {NAN_SCALE}: the file is damaged."
        )

    # bfloat16 has the range of float32, where a product of a code and a power of two is exact.
    inner = torch.float64 if dtype == torch.float64 else torch.float32
    values = F.embedding(weight_packed.int(), _byte_values(weight_packed.device, inner))  # [..., O, I/2, 2]
    scales = _scale_values(weight_scale.device, inner)[weight_scale.int()]
    weight = (values.view(*expected, GROUP_SIZE) * scales[..., None]).to(dtype).flatten(-2)
    # Only a scale whose largest code overflows can have made an infinity; looking at the weights takes a pass.
    if E2M1_VALUES[-1] * 2.0 ** (largest_scale - SCALE_BIAS) > torch.finfo(dtype).max and bool(weight.isinf().any()):
        raise ValueError(
            f"weights must be within the range of `dtype`={dtype}, got some with the scale "
            f"2^{largest_scale - SCALE_BIAS}: use a dtype of more range, or the file is damaged."
        )
    return weight


def quantize_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Packed codes from weights: each group's scale from its largest magnitude m, then the nearest code.

    The scale is the power of two that brings m into [3.5, 7), where the MX specification (6.3) has [4, 8): weights
    saturate at 6 scales, and up to 7 that is also the nearest code. Ties go to the code with an even mantissa bit. No
    error exceeds m/5 if m is in [2^-125, 7 * 2^125). Weights that `dequantize_mxfp4` returned in that range are fixed
    points, whatever their codes were. No gradients.

    Args:
        weight: [..., O, I] of a floating dtype, finite; I a multiple of 32. A magnitude up to 2^-129 becomes 0, and
            one beyond 6 * 2^125 (2.55e38) saturates, so that bfloat16 can hold what comes back.

    Returns:
        `weight_packed` uint8 [..., O, I/2] and `weight_scale` uint8 [..., O, I/32], at most 252; as `dequantize_mxfp4`
        takes them. The scale of a group of zeros is 2^0.

    Raises:
        TypeError: `weight` is not of a floating dtype.
        ValueError: I is not a multiple of 32, or a weight is NaN or infinite.
    """
    if not weight.is_floating_point():
        raise TypeError(f"`weight` must be of a floating dtype, got {weight.dtype}: pass the weights themselves.")
    if weight.ndim == 0 or weight.shape[-1] % GROUP_SIZE or not weight.shape[-1]:
        raise ValueError(
            f"the last axis of `weight` must be a multiple of {GROUP_SIZE} inputs, got shape {tuple(weight.shape)}: "
            "leave this tensor as it is, or choose a model of another width."
        )
    inner = torch.float64 if weight.dtype == torch.float64 else torch.float32
    groups = weight.detach().to(inner).unflatten(-1, (-1, GROUP_SIZE))  # [..., O, I/32, 32]
    magnitudes = groups.abs()
    largest = magnitudes.amax(dim=-1)
    if not bool(largest.isfinite().all()):  # NaN in a group makes its largest magnitude NaN
        raise ValueError("`weight` must be finite, got NaN or infinity: look for what spoilt it, or use a clean copy.")

    # m = mantissa * 2^exponent with the mantissa in [7/16, 7/8), of subnormal numbers too; 3.5 is 7/16 * 2^3.
    mantissa, exponent = largest.frexp()
    exponent = exponent + (mantissa >= 0.875)
    scale = (exponent - 3 + SCALE_BIAS).clamp(0, LARGEST_SCALE).masked_fill(largest == 0, ZERO_GROUP_SCALE)
    # 2^(127 - b) is the scale value of the byte 254 - b.
    magnitudes = magnitudes * _scale_values(weight.device, inner)[254 - scale][..., None]
    code = groups.signbit().to(torch.uint8) << 3
    for middle in _UP_BEYOND:
        code += magnitudes > middle
    for middle in _UP_FROM:
        code += magnitudes >= middle
    code = code.flatten(-2)
    return code[..., ::2] | code[..., 1::2] << 4, scale.to(torch.uint8)


@cache
def _byte_values(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[256, 2], the values of the low and of the high nibble of each byte."""
    signed = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=dtype, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack((signed[byte & 15], signed[byte >> 4]), dim=-1)


@cache
def _scale_values(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[255], 2^(b - 127) for each byte b but 255; from Python, whose powers of two are exact."""
    return torch.tensor([2.0 ** (byte - SCALE_BIAS) for byte in range(255)], dtype=dtype, device=device)
