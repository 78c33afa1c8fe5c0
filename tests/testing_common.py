# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What the model tests share: tiny configurations, models in which everything matters, golden numbers, comparisons."""

from __future__ import annotations

import json
import math
import re
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from deltalatent import KimiK3ForCausalLM, KimiK3TextConfig, size_config
from deltalatent.modeling.latent_moe import KimiK3TopKRouter, RouterOutput
from deltalatent.modeling.modeling_kimi_k3 import KimiK3DecoderLayer
from deltalatent.modeling.norms import KimiK3RMSNorm

GOLDEN = Path(__file__).parent / "data" / "golden"
TEXT_FIXTURES = ("text_bf16layout", "text_leftpad", "text_long")


def linear_attn_config(**fields: Any) -> dict[str, Any]:
    """The KDA block of the `tiny` size (layers 1 to 3 of 5), with other fields."""
    return {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4, 5],
        "num_heads": 2,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    } | fields


# Fields of the `tiny` size that differ; each variant switches one mechanism, the last is the predecessor architecture.
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "softplus_gate": {"linear_attn_config": linear_attn_config(gate_lower_bound=None)},
    "low_rank_gate": {"linear_attn_config": linear_attn_config(use_full_rank_gate=False)},
    "uneven_heads": {"linear_attn_config": linear_attn_config(num_heads=3, head_dim=8), "v_head_dim": 12},
    "ends_with_kda": {"linear_attn_config": linear_attn_config(kda_layers=[1, 2, 4, 5], full_attn_layers=[3])},
    "plain_residuals": {"attn_res_block_size": None},
    "no_latent_moe": {"routed_expert_hidden_size": None, "num_shared_experts": 0},
    "no_latent_norm": {"latent_moe_use_norm": False, "moe_renormalize": False},
    "silu": {"hidden_act": "silu"},
    "grouped_router": {
        "num_expert_group": 4,
        "topk_group": 2,
        "num_experts_per_token": 3,
        "routed_scaling_factor": 2.5,
    },
    "all_experts": {"num_experts": 4, "num_experts_per_token": 4},
    "dense": {"num_experts": None},
    "tied_embeddings": {"tie_word_embeddings": True},
    "full_rank_query": {"q_lora_rank": None, "mla_use_output_gate": False},
    "predecessor": {
        "linear_attn_config": linear_attn_config(gate_lower_bound=None, use_full_rank_gate=False),
        "attn_res_block_size": None,
        "routed_expert_hidden_size": None,
        "latent_moe_use_norm": False,
        "hidden_act": "silu",
        "q_lora_rank": None,
        "mla_use_output_gate": False,
    },
}
SPARSE_VARIANTS = tuple(name for name in VARIANTS if name != "dense")


def tiny_config(variant: str = "default", **overrides: Any) -> KimiK3TextConfig:
    """A fresh configuration of toy size: `VARIANTS[variant]`, then `overrides`."""
    return size_config("tiny", **(VARIANTS[variant] | overrides))


@torch.no_grad()
def randomize_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter and buffer a value that matters, in place, and return the model.

    Initial values hide faults: pseudo-queries and the selection bias are zero, norm weights are one, A is zero.
    Matrices are normal with fan-in scaling, so that activations and logits are of order 1.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.dtype)

    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(0.1 * normal(tensor))
        elif name.endswith("A_log"):
            tensor.copy_(0.3 * normal(tensor))
        elif name.endswith("dt_bias"):
            tensor.copy_(normal(tensor) - 2)  # forgets slowly, with some fast channels
        elif re.search(r"norm[01]?\.weight$", name):
            tensor.copy_(1 + 0.2 * normal(tensor))
        elif name.endswith("res_proj.weight"):
            tensor.copy_(0.3 * normal(tensor))
        elif name.endswith("embed_tokens.weight"):
            tensor.copy_(normal(tensor))
        elif "conv1d" in name:
            tensor.copy_(0.5 * normal(tensor))
        else:
            fan_in = tensor[0].numel() if tensor.ndim == 4 else tensor.shape[-1]  # a convolution, or a matrix
            tensor.copy_(normal(tensor) / math.sqrt(fan_in))
    return model


def tiny_model(
    variant: str = "default", *, model_class: type[nn.Module] = KimiK3ForCausalLM, seed: int = 0, **overrides: Any
) -> Any:
    """A float32 model of `tiny_config(variant, **overrides)` in eval mode, with `randomize_`d weights."""
    return randomize_(model_class(tiny_config(variant, **overrides)), seed).eval()


def random_ids(config: KimiK3TextConfig, batch_size: int = 2, length: int = 19, seed: int = 0) -> Tensor:
    """int64 [batch_size, length], none of them a special token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, config.vocab_size, (batch_size, length), generator=generator)


def left_padded(rows: list[Tensor], pad_token_id: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of different length -> `input_ids` and `attention_mask`, int64 [B, longest]."""
    length = max(len(row) for row in rows)
    ids = torch.full((len(rows), length), pad_token_id)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, length - len(row) :] = row
        mask[i, length - len(row) :] = 1
    return ids, mask


def max_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference, in float64."""
    return (actual.detach().double() - expected.detach().double()).abs().max().item()


def assert_close(actual: Tensor, expected: Tensor, rel: float = 1e-5, what: str = "tensor") -> None:
    """Every element within `rel` of the largest element of `expected`; shapes equal, no NaN on either side.

    Same arithmetic in another order differs by a few float32 roundings (6e-8 each) of the largest terms; the default
    leaves room for about a hundred of them, one order of magnitude below anything that a wrong formula would give.
    """
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if expected.numel() == 0:
        return
    scale = max(expected.detach().abs().max().item(), 1e-12)
    error = max_error(actual, expected)
    assert error <= rel * scale, f"{what}: error {error:.3e} > {rel:g} * {scale:.3e}"


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Gradient of `loss` for every parameter that has one, by name; the parameters' own `.grad` is left alone."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(loss, [parameter for _, parameter in named], allow_unused=True)
    return {name: grad for (name, _), grad in zip(named, grads, strict=True) if grad is not None}


def assert_gradients_close(
    actual: dict[str, Tensor], expected: dict[str, Tensor], rel: float = 1e-4, floor: float = 1e-6
) -> None:
    """The same parameters have gradients, each within `rel` of its own largest element.

    No scale is taken smaller than `floor / rel` times the largest gradient of the model: where a gradient is almost
    zero, it is the rounding of larger terms that cancel.
    """
    assert actual.keys() == expected.keys()
    largest = max(grad.abs().max().item() for grad in expected.values())
    for name, grad in expected.items():
        scale = max(grad.abs().max().item(), floor * largest / rel)
        error = max_error(actual[name], grad)
        assert error <= rel * scale, f"gradient of {name}: error {error:.3e} > {rel:g} * {scale:.3e}"


def depth_mix(
    sources: Iterable[Tensor],
    query: Tensor,
    eps: float,
    key_weight: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> Tensor:
    """Depth mixing as it is defined: stack, score, softmax, average (golden README, "Depth mixing"), then a norm."""
    stack = torch.stack(list(sources))  # [S, ..., D]
    normed = stack / (stack.square().mean(-1, keepdim=True) + eps).sqrt()
    weights = torch.softmax(normed @ (query if key_weight is None else query * key_weight), dim=0)
    mixed = (weights[..., None] * stack).sum(0)
    if norm_weight is None:
        return mixed
    return mixed / (mixed.square().mean(-1, keepdim=True) + norm_eps).sqrt() * norm_weight


class SavedBytes:
    """Bytes of different storages that autograd keeps for backward: saved inside the context, alive when asked."""

    def __init__(self, known: list[Tensor]) -> None:
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        # Weak, because what a discarded branch of the graph saved is freed, and its address may serve again.
        self.saved: list[weakref.ref[Tensor]] = []

    def __enter__(self) -> SavedBytes:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        self._hooks.__exit__(*args)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.saved.append(weakref.ref(tensor))
        return tensor

    @property
    def total(self) -> int:
        storages = [tensor.untyped_storage() for ref in self.saved if (tensor := ref()) is not None]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(size for pointer, size in sizes.items() if pointer not in self.known)


@dataclass(frozen=True)
class Golden:
    """One golden fixture: `config` and `meta` parsed, `expected` tensors by name (shared: do not write to them)."""

    folder: Path
    config: dict[str, Any]
    meta: dict[str, Any]
    expected: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.expected[name]

    @property
    def inputs(self) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask`, int64 [B, T]."""
        return {"input_ids": self["input_ids"], "attention_mask": self["attention_mask"]}

    @property
    def real(self) -> Tensor:
        """bool [B, T], True at tokens that count; everything else in `expected` is zero or -1 there."""
        return self["attention_mask"].bool()

    def per_layer(self, kind: str, name: str) -> dict[int, Tensor]:
        """Tensors `<kind>.<layer>.<name>` by 0-based layer."""
        found = {}
        for key, tensor in self.expected.items():
            head, _, rest = key.partition(".")
            layer, _, tail = rest.partition(".")
            if head == kind and tail == name:
                found[int(layer)] = tensor
        return found


@cache
def golden(name: str) -> Golden:
    """The fixture `tests/data/golden/<name>`."""
    folder = GOLDEN / name
    return Golden(
        folder,
        json.loads((folder / "config.json").read_text()),
        json.loads((folder / "meta.json").read_text()),
        load_file(folder / "expected.safetensors"),
    )


def load_golden_model(name: str, model_class: Callable[..., Any] = KimiK3ForCausalLM, **kwargs: Any) -> Any:
    """The fixture's checkpoint through `from_pretrained`, float32 unless `dtype` says otherwise, in eval mode."""
    return model_class.from_pretrained(GOLDEN / name, **({"dtype": torch.float32} | kwargs)).eval()


def round_to_bf16_(model: nn.Module) -> nn.Module:
    """Let linear maps of a float32 model round what they take, and they, norms and layers what they return, to bf16.

    That much rounding every bf16 model does: its error is the scale against which a real one is measured.
    """

    def rounded(output: Any) -> Any:
        if isinstance(output, Tensor):
            return output.to(torch.bfloat16).to(output.dtype)
        return (rounded(output[0]), *output[1:])

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda module, args: tuple(rounded(arg) for arg in args))
        if isinstance(module, nn.Linear | KimiK3RMSNorm | KimiK3DecoderLayer):
            module.register_forward_hook(lambda module, args, output: rounded(output))
    return model


def follow_routing_(leader: nn.Module, *followers: nn.Module) -> None:
    """From now on let tokens of `followers` visit the experts that they visited in the last forward of `leader`.

    Rounding now and then sends a token to other experts, and this one and all later ones far off; that says nothing
    about arithmetic, so comparisons in low precision keep the experts and test the choice on its own.
    """
    for first, *others in zip(*(_routers(model) for model in (leader, *followers)), strict=True):
        first.register_forward_hook(lambda module, args, output: setattr(module, "last_output", output))
        for follower in others:
            follower.register_forward_hook(lambda module, args, output, first=first: _as_in(first, module, output))


def _as_in(leader: KimiK3TopKRouter, router: KimiK3TopKRouter, output: RouterOutput) -> RouterOutput:
    """What `router` says, except for the experts and the cutoff, which are those of `leader.last_output`."""
    weights = output.scores.gather(1, leader.last_output.top_k_index)
    if router.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return output._replace(
        top_k_index=leader.last_output.top_k_index,
        top_k_weights=weights * router.routed_scaling_factor,
        cutoff=leader.last_output.cutoff,
    )


def _routers(model: nn.Module) -> list[KimiK3TopKRouter]:
    return [module for module in model.modules() if isinstance(module, KimiK3TopKRouter)]


def typical_error(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over the last axis, then the median over tokens [..., D], in float64.

    The median, because a read-out is normalised however tiny it is: some tokens are far off for good reason.
    """
    return (actual.detach().double() - expected.detach().double()).square().mean(-1).sqrt().median().item()
