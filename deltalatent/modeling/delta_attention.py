# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention (KDA): a linear-attention layer whose state forgets per channel and writes by the delta rule.

Sources: Kimi Linear (arXiv 2510.26692), Kimi K3 report (arXiv 2607.24653), golden README "KDA layers".
Shapes: B rows, T tokens, D model width, H heads, K head width, W taps, N sequences, L real tokens.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.integrations.accelerate import force_accelerate_hooks

from deltalatent.configuration.configuration_kimi_k3 import KimiK3TextConfig
from deltalatent.kernels.autocast import float32_autocast_disabled
from deltalatent.kernels.kda import kda_chunk, kda_recurrent
from deltalatent.kernels.sequence_layout import SequenceLayout
from deltalatent.kernels.short_conv import short_convolution
from deltalatent.modeling.norms import KimiK3GatedRMSNorm
from deltalatent.modeling.precision import KeepFloat32


class KimiK3ShortConvolution(KeepFloat32):
    """Taps [channels, 1, W] of one causal depthwise convolution, float32; the layer runs all three in one call."""

    float32_tensors = ("weight",)

    def __init__(self, channels: int, kernel_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size, dtype=torch.float32))


class KimiK3DeltaAttention(KeepFloat32):
    r"""One KDA layer.

    .. math::
        q, k, v &= \mathrm{SiLU}(\mathrm{conv}(W_{q,k,v}\, x)) \\
        g &= g_{min}\, \sigma(e^{A} (W_{f_b} W_{f_a} x + b_{dt})), \quad \beta = \sigma(W_b\, x) \\
        o &= \mathrm{KDA}(q, k, v, g, \beta) \\
        y &= W_o\, (\mathrm{RMSNorm}(o) \cdot \sigma(W_g\, x))

    The cache keeps, per layer, the last W - 1 inputs of each of the three convolutions and the float32 state
    [B, H, K, K]; nothing in it grows with the sequence.
    """

    float32_tensors = ("A_log", "dt_bias")

    def __init__(self, config: KimiK3TextConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.linear_num_heads
        self.head_dim = config.linear_head_dim
        self.conv_kernel_size = config.linear_conv_kernel_dim
        self.gate_lower_bound = config.gate_lower_bound
        self.has_full_rank_gate = config.use_full_rank_gate
        self.num_conv_states = config.number_of_conv_states
        inner = self.num_heads * self.head_dim

        self.q_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.q_conv1d = KimiK3ShortConvolution(inner, self.conv_kernel_size)
        self.k_conv1d = KimiK3ShortConvolution(inner, self.conv_kernel_size)
        self.v_conv1d = KimiK3ShortConvolution(inner, self.conv_kernel_size)

        self.f_a_proj = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.head_dim, inner, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(inner, dtype=torch.float32))
        self.b_proj = nn.Linear(config.hidden_size, self.num_heads, bias=False)

        if self.has_full_rank_gate:
            self.g_proj = nn.Linear(config.hidden_size, inner, bias=False)
        else:
            self.g_a_proj = nn.Linear(config.hidden_size, self.head_dim, bias=False)
            self.g_b_proj = nn.Linear(self.head_dim, inner, bias=False)
        self.o_norm = KimiK3GatedRMSNorm(self.head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)

    @force_accelerate_hooks(["q_conv1d", "k_conv1d", "v_conv1d"])
    def forward(
        self,
        hidden_states: Tensor,
        cache: Cache | None = None,
        layout: SequenceLayout | None = None,
    ) -> Tensor:
        """[B, T, D] -> [B, T, D].

        Args:
            hidden_states: Normalised input of the layer.
            cache: Continued if it has a state for this layer, and updated. Not with packed documents.
            layout: Where the sequences are, if rows are padded or packed; padding gives zeros.
        """
        if self.A_log.dtype.itemsize < torch.float32.itemsize:
            raise TypeError(
                f"`A_log` must be float32, got {self.A_log.dtype}: for FSDP2 with mixed precision call "
                "`deltalatent.training.keep_float32(accelerator, model)` before `accelerator.prepare`; assign no "
                "state dict in half precision."
            )
        if layout is not None:
            hidden_states = layout.gather(hidden_states)  # [1, L, D]
        cu_seqlens = None if layout is None else layout.cu_seqlens
        heads = (*hidden_states.shape[:2], self.num_heads, self.head_dim)
        impl = self.config.kda_implementation
        impl_around = "auto" if impl == "fla" else impl  # what surrounds the recurrence has no third-party form

        projected = (self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states))
        decay = self.f_b_proj(self.f_a_proj(hidden_states)).view(heads)
        beta = self.b_proj(hidden_states)
        gate = self.g_proj(hidden_states) if self.has_full_rank_gate else self.g_b_proj(self.g_a_proj(hidden_states))

        windows, state = self._read(cache)
        one_token = state is not None and layout is None and heads[1] == 1
        # Decoding writes the cache's own tensors, once; autograd must not see that.
        in_place = one_token and not torch.is_grad_enabled()
        with float32_autocast_disabled(hidden_states.device):
            (q, k, v), new_windows = short_convolution(
                projected,
                (self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight),
                initial_state=windows,
                cu_seqlens=cu_seqlens,
                output_final_state=cache is not None,
                inplace_state=in_place,
                impl=impl_around,
            )
            attend = partial(kda_recurrent, inplace_state=in_place) if one_token else kda_chunk
            output, state = attend(
                q.view(heads),
                k.view(heads),
                v.view(heads),
                decay,
                beta,
                self.A_log,
                self.dt_bias,
                gate_lower_bound=self.gate_lower_bound,
                initial_state=state,
                cu_seqlens=cu_seqlens,
                output_final_state=cache is not None,
                impl=impl,
            )
            if cache is not None and not in_place:
                self._write(cache, cast(tuple[Tensor, ...], new_windows), cast(Tensor, state))
            output = self.o_norm(output, gate.view(heads), impl=impl_around)

        output = self.o_proj(output.flatten(2))
        return output if layout is None else layout.scatter(output)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        # Released files store A_log zero-padded to a fixed length, the predecessor's as [1, 1, heads, 1].
        key = prefix + "A_log"
        if key in state_dict and state_dict[key].numel() >= self.num_heads:
            state_dict[key] = state_dict[key].flatten()[: self.num_heads]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _read(self, cache: Cache | None) -> tuple[tuple[Tensor, ...] | None, Tensor | None]:
        """The three convolution windows [B, H*K, W-1] and the state [B, H, K, K], `None` before the first token."""
        if cache is None:
            return None, None
        state = cache.get_recurrent_state(self.layer_idx)
        if state is None:
            return None, None
        windows = tuple(cache.get_conv_state(self.layer_idx, i) for i in range(self.num_conv_states))
        return cast(tuple[Tensor, ...], windows), state

    def _write(self, cache: Cache, windows: tuple[Tensor, ...], state: Tensor) -> None:
        # The cache keeps the last W - 1 of (old, new) columns, which is the new window. Its buffers are written in
        # place, so they cannot be part of a graph.
        for i, window in enumerate(windows):
            cache.update_conv_state(
                window.detach(), self.layer_idx, state_idx=i, conv_kernel_size=self.conv_kernel_size - 1
            )
        cache.update_recurrent_state(state.detach(), self.layer_idx)
