# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Our operators in the delta-attention models that Transformers ships: `kimi_linear` and the text part of `glm5_next`.

Both are Kimi delta attention (Kimi Linear, arXiv 2510.26692) beside latent attention. As shipped, the delta layers let
padding decay their state and run straight through the documents of a packed row. `accelerate` gives the layers of one
model instance another `forward`; parameters, modules and their names stay, and `restore` takes it back.

Nothing here imports Transformers: a model that is handed in has loaded it.

Shapes: B rows of T tokens, D model width, N sequences, L real tokens, W taps, H heads, K head width.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from deltalatent.kernels.autocast import float32_autocast_disabled
from deltalatent.kernels.gated_rms_norm import gated_rms_norm
from deltalatent.kernels.kda import kda_chunk, kda_recurrent
from deltalatent.kernels.latent_attention import DocumentGroups, document_groups
from deltalatent.kernels.sequence_layout import SequenceLayout, sequence_layout
from deltalatent.kernels.short_conv import short_convolution

IMPLEMENTATIONS = ("auto", "triton", "torch", "fla")

Model = TypeVar("Model", bound=nn.Module)


class _Family(NamedTuple):
    """Names of the classes that one modeling file of Transformers calls its base model and its two kinds of layers."""

    base: str
    delta: str
    attention: str
    selects_tokens: bool  # whether an indexer selects which tokens the latent attention sees


FAMILIES = {
    "transformers.models.kimi_linear.modeling_kimi_linear": _Family(
        "KimiLinearModel", "KimiLinearDeltaAttention", "KimiLinearAttention", False
    ),
    "transformers.models.glm5_next.modeling_glm5_next": _Family(
        "Glm5NextTextModel", "Glm5NextTextLinearAttention", "Glm5NextTextAttention", True
    ),
}

# What the replacements use of the modules they run for: attributes, and arguments of the `forward` they stand in for.
DELTA_ATTRIBUTES = (
    "q_proj", "k_proj", "v_proj", "conv1d.weight", "b_proj", "g_a_proj", "g_b_proj", "o_proj", "head_dim", "layer_idx",
    "conv_kernel_size", "activation", "forget_gate.f_a_proj", "forget_gate.f_b_proj", "forget_gate.A_log",
    "forget_gate.dt_bias", "o_norm.weight", "o_norm.variance_epsilon", "o_norm.activation",
)  # fmt: skip
BASE_ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "cache", "inputs_embeds", "use_cache")
LAYER_ARGUMENTS = ("hidden_states", "attention_mask", "cache")
PACKING_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def accelerate(model: Model, *, impl: str = "auto") -> Model:
    """Make a `kimi_linear` or `glm5_next` model of Transformers run on the operators of this package, in place.

    The delta-attention layers use `short_convolution`, `kda_chunk` (one cached token: `kda_recurrent`) and
    `gated_rms_norm`: the function computed, per token and head, is that of `kda_chunk`, with the softplus gate
    (`kimi_linear`) or the gate bounded by `linear_lower_bound` (`glm5_next`). Outputs and gradients are those of the
    model as shipped, up to rounding, except where that one errs:

    - Padding [B, T] (`attention_mask`) enters neither convolution nor state, wherever it stands. As shipped, only
      padding on the left leaves the state alone. The layer's output at padding is zero.
    - Packed documents, given by `cu_seq_lens_q` [N+1] (B = 1) or by `position_ids` [B, T] that restart, give what they
      give in rows of their own, in the latent-attention layers too: these run over the documents one by one, those
      of similar length together. No cache is made for a packed batch.

    Parameters, state dict, dtypes, gradient checkpointing and the contents of the cache are untouched, so a model can
    be saved, copied, pickled, and accelerated or restored at any time. A second call replaces `impl`.

    Args:
        model: the model or anything that contains it (a PEFT or parallel wrapper).
        impl: "auto", "triton", "torch" or "fla" for the recurrence, as in `kda_chunk`; convolution and norm, which
            have no "fla" form, then choose by themselves. A name that cannot run raises at the first call; with the
            softplus gate in float32 that is "triton" for prefill and training, where "auto" takes "torch".

    Returns:
        `model` itself.

    Raises:
        ValueError: no such layer in `model`, another release of Transformers than ours are written for, an option of
            the layers that the operators lack, layers whose `forward` somebody else replaced, or an unknown `impl`.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"`impl` must be one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {impl!r}.")
    replacements: list[_Replacement] = []
    for module in model.modules():
        family = _family_of(module)
        if family is None:
            continue
        if _is_called(module, family.base):
            _require(module, (), BASE_ARGUMENTS)
            replacements.append(_Replacement(module, _base_forward, impl))
        elif _is_called(module, family.attention):
            _require(module, (), LAYER_ARGUMENTS)
            replacements.append(_Replacement(module, _attention_forward, impl))
        elif _is_called(module, family.delta):
            _require(module, DELTA_ATTRIBUTES, LAYER_ARGUMENTS)
            _check_options(module)
            replacements.append(_Replacement(module, _delta_forward, impl))
            replacements.append(_Replacement(module.get_submodule("o_norm"), _gated_norm_forward, impl))
    if not {_base_forward, _delta_forward} <= {replacement.run for replacement in replacements}:
        names = " or ".join(f"`{family.base}` with `{family.delta}` layers" for family in FAMILIES.values())
        raise ValueError(
            f"`model` must contain a {names} of Transformers, got {type(model).__name__} without: pass a "
            "`kimi_linear` or `glm5_next` model; those of this package run on its operators anyway."
        )
    for replacement in replacements:
        replacement.check_place()
    for replacement in replacements:
        replacement.install()
    return model


def restore(model: Model) -> Model:
    """Undo `accelerate`, in place; a model that is not accelerated stays as it is.

    Args:
        model: what was given to `accelerate`, or contains it.

    Returns:
        `model` itself.
    """
    for module in model.modules():
        if isinstance(vars(module).get("forward"), _Replacement):
            del module.forward
        elif isinstance(vars(module).get("_old_forward"), _Replacement):
            vars(module)["_old_forward"] = MethodType(type(module).forward, module)
    return model


class _Replacement:
    """The `forward` of one module instance, an ordinary attribute of it that copies and pickles along."""

    def __init__(self, module: nn.Module, run: Callable[..., Any], impl: str) -> None:
        self.module = module
        self.run = run
        self.impl = impl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.module, self.impl, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        # Who looks up which arguments the model takes shall find those of the original.
        return inspect.signature(MethodType(type(self.module).forward, self.module))

    @property
    def place(self) -> str:
        # Hooks of the package accelerate (offloading, device maps) sit in `forward` and call what they found there.
        return "_old_forward" if "_old_forward" in vars(self.module) else "forward"

    def check_place(self) -> None:
        if _family_of(self.module) is not None and type(self.module).forward.__module__ not in FAMILIES:
            raise ValueError(
                f"`{type(self.module).__name__}` must not define a `forward` of its own, got one from "
                f"{type(self.module).forward.__module__}: `accelerate` replaces that of Transformers' class."
            )
        found = vars(self.module).get(self.place)
        if found is None or isinstance(found, _Replacement):
            return
        if getattr(found, "__func__", None) is not type(self.module).forward:
            raise ValueError(
                f"`{type(self.module).__name__}.forward` must be the one of its class, got {found!r} on the instance: "
                "undo that replacement first (for example load the model without `use_kernels`)."
            )

    def install(self) -> None:
        setattr(self.module, self.place, self)


def _family_of(module: nn.Module) -> _Family | None:
    return next((FAMILIES[cls.__module__] for cls in type(module).__mro__ if cls.__module__ in FAMILIES), None)


def _is_called(module: nn.Module, name: str) -> bool:
    """Whether the module is of the class of Transformers called `name`."""
    return any(cls.__name__ == name and cls.__module__ in FAMILIES for cls in type(module).__mro__)


def _require(module: nn.Module, attributes: tuple[str, ...], arguments: tuple[str, ...]) -> None:
    missing = [f"`{path}`" for path in attributes if not _has(module, path)]
    parameters = inspect.signature(type(module).forward).parameters
    missing += [f"the argument `{name}`" for name in arguments if name not in parameters]
    if missing:
        version = getattr(sys.modules.get("transformers"), "__version__", "unknown")
        raise ValueError(
            f"`{type(module).__name__}` of Transformers {version} lacks {', '.join(missing)}: `accelerate` is written "
            "for transformers>=5.24,<6."
        )


def _has(module: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(module, name):
            return False
        module = getattr(module, name)
    return True


def _check_options(module: Any) -> None:
    name = type(module).__name__
    if module.activation not in ("silu", "swish"):
        got = module.activation
        raise ValueError(f"`hidden_act` of {name} must be 'silu', got {got!r}: leave the model as it is.")
    if module.o_norm.activation != "sigmoid":
        got = module.o_norm.activation
        raise ValueError(f"the output gate of {name} must be 'sigmoid', got {got!r}: leave the model as it is.")
    if module.conv1d.bias is not None:
        raise ValueError(f"the convolution of {name} must have no bias, got one: leave the model as it is.")


class _Sequences(NamedTuple):
    """Where the sequences of a batch are, and the documents of a packed batch; empty if every row is one sequence."""

    layout: SequenceLayout | None = None
    groups: DocumentGroups | None = None

    @property
    def cu_seqlens(self) -> Tensor | None:
        """Offsets of the sequences, `None` if every row is one."""
        return None if self.layout is None else self.layout.cu_seqlens

    def gather(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [1, L, D], or `x` itself if every row is one sequence."""
        return x if self.layout is None else self.layout.gather(x)

    def scatter(self, x: Tensor) -> Tensor:
        """[1, L, D] -> [B, T, D] with zeros at padding; the inverse of `gather`."""
        return x if self.layout is None else self.layout.scatter(x)


EACH_ROW = _Sequences()


def _find_sequences(
    tokens: Tensor, mask: Tensor | None, position_ids: Tensor | None, cu_seqlens: Tensor | None
) -> _Sequences:
    """Find the sequences of a batch `tokens` [B, T, ...]; waits for the device, once per forward of the model."""
    mask, position_ids, cu_seqlens = (
        None if x is None else x.to(tokens.device) for x in (mask, position_ids, cu_seqlens)
    )
    batch_size, length = tokens.shape[:2]
    layout = sequence_layout(batch_size, length, attention_mask=mask, position_ids=position_ids, cu_seqlens=cu_seqlens)
    if layout is None or not layout.is_packed:
        return _Sequences(layout)
    groups = document_groups(layout)
    if groups.tokens is None and groups.shapes == ((1, length),):
        return EACH_ROW
    return _Sequences(layout, groups)


def _base_forward(module: nn.Module, impl: str, *args: Any, **kwargs: Any) -> Any:
    """The base model's own forward, after finding the sequences, which reach the layers as a keyword argument."""
    kwargs |= dict(zip(BASE_ARGUMENTS, args, strict=False))
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    mask, position_ids, cu_seqlens = (kwargs.get(n) for n in ("attention_mask", "position_ids", "cu_seq_lens_q"))
    padding = mask.get("linear_attention") if isinstance(mask, dict) else mask
    tokens = kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    sequences = EACH_ROW
    # A single new token is never padding, as Transformers has it.
    if tokens is not None and tokens.shape[1] > 1 and any(x is not None for x in (padding, position_ids, cu_seqlens)):
        padding = padding[:, -tokens.shape[1] :] if padding is not None and padding.ndim == 2 else None
        sequences = _find_sequences(tokens, padding, position_ids, cu_seqlens)
    if sequences.groups is not None:
        _check_packed(module, kwargs, cache)
        # The layers keep the documents apart themselves: nobody needs the [T, T] masks made without this.
        masks = dict.fromkeys(("full_attention", "indexed_attention", "linear_attention"))
        kwargs |= {"attention_mask": masks, "use_cache": False}
    return type(module).forward(module, **kwargs, sequences=sequences)


def _check_packed(module: nn.Module, kwargs: dict[str, Any], cache: Any) -> None:
    documents = "packed documents (restarting `position_ids` or `cu_seq_lens_q`)"
    if cache is not None:
        raise ValueError(
            f"{documents} cannot be cached, got a `cache`: pass one document per row to continue it, or no cache."
        )
    mask = kwargs.get("attention_mask")
    if isinstance(mask, dict) or (mask is not None and mask.ndim != 2):
        got = "a dict of masks" if isinstance(mask, dict) else f"shape {tuple(mask.shape)}"
        raise ValueError(
            f"{documents} take no other `attention_mask` than a padding mask [B, T], got {got}: pass None, the "
            "documents are kept apart without it."
        )
    if kwargs.get("output_attentions") or getattr(module.config, "output_attentions", False):
        raise ValueError(
            f"{documents} have no attention weights over the row, got `output_attentions=True`: pass one document per "
            "row to see them."
        )


def _attention_forward(
    module: nn.Module,
    impl: str,
    hidden_states: Tensor,
    attention_mask: Any = None,
    cache: Any = None,
    sequences: _Sequences = EACH_ROW,
    **kwargs: Any,
) -> Any:
    """Latent attention: the module's own forward, over each document of a packed batch."""
    original = type(module).forward
    groups = sequences.groups
    if groups is None:
        return original(module, hidden_states, attention_mask=attention_mask, cache=cache, **kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name not in PACKING_ARGUMENTS}
    selections = kwargs.pop("prev_topk_indices", None) or (None,) * len(groups.shapes)
    family = cast(_Family, _family_of(module))
    results = []
    for documents, selection in zip(groups.split(groups.gather(hidden_states)), selections, strict=True):
        device, length = documents.device, documents.shape[1]  # documents [n, l, D]
        kwargs["position_ids"] = torch.arange(length, device=device)[None]
        if family.selects_tokens:
            kwargs["prev_topk_indices"] = selection
            mask = torch.ones(documents.shape[:2], dtype=torch.bool, device=device)
        else:
            modeling = sys.modules[original.__module__]
            mask = modeling.create_causal_mask(module.config, documents, attention_mask=None, cache=None)
        results.append(original(module, documents, attention_mask=mask, cache=None, **kwargs))
    output = groups.scatter(torch.cat([result[0].flatten(0, 1) for result in results])[None])
    if not family.selects_tokens:
        return output, None
    chosen = tuple(result[2] for result in results)
    return output, None, None if chosen[0] is None else chosen


def _delta_forward(
    module: Any,
    impl: str,
    hidden_states: Tensor,
    cache: Any = None,
    attention_mask: Tensor | None = None,
    sequences: _Sequences | None = None,
    **kwargs: Any,
) -> Tensor:
    """One delta-attention layer, [B, T, D] -> [B, T, D]. Called on its own, it knows of padding only."""
    shape = hidden_states.shape
    if sequences is None:
        sequences = EACH_ROW
        if attention_mask is not None and shape[1] > 1:
            sequences = _find_sequences(hidden_states, attention_mask, None, None)
    x = sequences.gather(hidden_states)
    heads = (*x.shape[:2], -1, module.head_dim)
    gate_module, taps = module.forget_gate, module.conv_kernel_size

    with _weights_present(module.conv1d, gate_module):
        projected = (module.q_proj(x), module.k_proj(x), module.v_proj(x))  # each [1, L, H*K] or [B, T, H*K]
        widths = [stream.shape[2] for stream in projected]
        decay = gate_module.f_b_proj(gate_module.f_a_proj(x)).view(heads)
        beta = module.b_proj(x)
        gate = module.g_b_proj(module.g_a_proj(x)).view(heads)

        conv_state: Any = None
        state: Any = None
        windows: Any = None
        if cache is not None:
            conv_state = cache.get_conv_state(module.layer_idx)  # [B, 3*H*K, W]; the oldest column is never read
            state = cache.get_recurrent_state(module.layer_idx)
        one_token = state is not None and sequences.cu_seqlens is None and shape[1] == 1
        # Decoding writes the cache's own tensors, once; autograd must not see that.
        in_place = one_token and not torch.is_grad_enabled()
        if state is not None:
            windows = conv_state.narrow(2, conv_state.shape[2] - taps + 1, taps - 1).split(widths, 1)
            if torch.is_grad_enabled():
                windows, state = tuple(window.clone() for window in windows), state.clone()

        with float32_autocast_disabled(x.device):
            new_windows: Any  # a tensor for each stream
            (q, k, v), new_windows = short_convolution(
                projected,
                module.conv1d.weight.split(widths, 0),
                initial_state=windows,
                cu_seqlens=sequences.cu_seqlens,
                output_final_state=cache is not None,
                impl=_beside(impl),
            )
            attend, options = (kda_recurrent, {"inplace_state": in_place}) if one_token else (kda_chunk, {})
            output, state = attend(
                q.view(heads),
                k.view(heads),
                v.view(heads),
                decay,
                beta,
                gate_module.A_log.flatten().float(),
                gate_module.dt_bias.float(),
                gate_lower_bound=getattr(gate_module, "safe_gate_lower_bound", None),
                initial_state=state,
                cu_seqlens=sequences.cu_seqlens,
                output_final_state=cache is not None,
                impl=impl,
                **options,
            )
    if in_place:
        for window, new_window in zip(windows, new_windows, strict=True):
            window.copy_(new_window)
    elif cache is not None:
        # The cache keeps the last W columns of what it has and gets, and its buffers cannot be part of a graph.
        columns = nn.functional.pad(torch.cat(new_windows, 1).detach(), (1, 0))
        cache.update_conv_state(columns, module.layer_idx, conv_kernel_size=taps)
        cache.update_recurrent_state(state.detach(), module.layer_idx)

    output = module.o_proj(module.o_norm(output, gate).flatten(2))
    return sequences.scatter(output)


def _gated_norm_forward(module: Any, impl: str, hidden_states: Tensor, gate: Tensor) -> Tensor:
    return gated_rms_norm(hidden_states, gate, module.weight, module.variance_epsilon, impl=_beside(impl))


def _beside(impl: str) -> str:
    """Implementation of what surrounds the recurrence, which has no third-party form."""
    return "auto" if impl == "fla" else impl


@contextmanager
def _weights_present(*modules: Any) -> Iterator[None]:
    """Fire the hooks of the package accelerate (offloading) around direct use of the weights of `modules`."""
    hooked = [(module, module._hf_hook) for module in modules if hasattr(module, "_hf_hook")]
    for module, hook in hooked:
        hook.pre_forward(module)
    yield
    for module, hook in reversed(hooked):
        hook.post_forward(module, ())
