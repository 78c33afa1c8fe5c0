# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
r"""Muon for the matrices of the layers, head by head and expert by expert, and AdamW for everything else.

Muon replaces the gradient of a matrix by (nearly) the closest matrix with orthonormal rows or columns:

.. math::
    M \leftarrow \mu M + (1 - \mu) G, \quad
    W \leftarrow (1 - \eta\lambda) W - \eta \rho \sqrt{\max(R, C)}\; \mathrm{NS}(\mu M + (1 - \mu) G)

for W [R, C]. NS is :func:`newton_schulz`; the root makes the root mean square of an update about rho = 0.2, which is
what AdamW's updates have, so that both share one learning rate eta. What counts as one matrix matters: NS couples all
its rows. Each head of a query, key or value projection is a matrix of its own ("per-head Muon"), so is each expert,
and so is each of several projections that share a tensor.

Sources: Muon (Jordan et al., 2024), Muon is Scalable for LLM Training (arXiv 2502.16982: the factor rho and weight
decay), Kimi K2 (arXiv 2507.20534), Kimi K3 report (arXiv 2607.24653, section 2.5: per-head Muon), AdamW (arXiv
1711.05101).
Sharded parameters (`DTensor`): where a rank holds whole matrices (its experts, its heads), it orthogonalises them by
itself; others are gathered, orthogonalised on every rank and cut up again ("Distributed Muon", arXiv 2502.16982). All
that is element-wise happens on the shards.
Shapes: R rows, C columns, N matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.adamw import adamw

from deltalatent.modeling.delta_attention import KimiK3DeltaAttention, KimiK3ShortConvolution
from deltalatent.modeling.latent_attention import KimiK3LatentAttention
from deltalatent.modeling.latent_moe import KimiK3Experts, KimiK3MLP, KimiK3SparseMoE
from deltalatent.modeling.modeling_kimi_k3 import KimiK3PseudoQuery
from deltalatent.modeling.vision_tower import KimiK3Projector, KimiK3VisionBlock, KimiK3VisionMLP

__all__ = ["MuonAdamW", "newton_schulz", "parameter_groups"]

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of Muon's authors, and of `torch.optim.Muon`: five steps take singular values in [0.003, 1] to [0.68, 1.21]."""

NS_DTYPES = (torch.bfloat16, torch.float32, torch.float64)

MIN_NORM = 1e-7
"""Matrices of a smaller Frobenius norm are not brought up to norm 1, so that nothing becomes of nothing."""

BATCH_ELEMENTS = 2**26
"""Elements of the matrices that are orthogonalised at once; it bounds the temporary memory of a step."""

MuonOptions = tuple[str, tuple[int, ...] | None, float, DeviceMesh | None]
"""What parameters of one group share: algorithm, row blocks, weight decay, and the mesh they are spread over."""


def newton_schulz(
    matrices: Tensor,
    *,
    steps: int = 5,
    coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    r"""Replace the singular values of each matrix by values near 1, without a decomposition.

    .. math::
        X_0 = G / \lVert G \rVert_F, \quad X_{i+1} = a X_i + (b A + c A^2) X_i, \quad A = X_i X_i^\top

    A singular value s of G / ||G||_F becomes f(f(...f(s))) with f(s) = a s + b s^3 + c s^5; singular vectors stay. The
    default coefficients approach 1 fast and then stay around it; (15/8, -10/8, 3/8) converge to the polar factor.
    Source: Muon (Jordan et al., 2024).

    Args:
        matrices: [..., R, C], floating point; leading axes are separate matrices. Zeros give zeros.
        steps: Number of iterations, 0 or more.
        coefficients: (a, b, c).
        dtype: Of the products; the norm is taken in the dtype of `matrices`.

    Returns:
        [..., R, C], `dtype`.

    Raises:
        ValueError: `matrices` has fewer than two axes.
    """
    if matrices.ndim < 2:
        raise ValueError(f"`matrices` must have shape [..., R, C], got {tuple(matrices.shape)}: pass matrices.")
    a, b, c = coefficients
    norm = torch.linalg.matrix_norm(matrices, keepdim=True).clamp(min=MIN_NORM)
    x = (matrices / norm).to(dtype).reshape(-1, *matrices.shape[-2:])  # [N, R, C]
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:  # the smaller Gram matrix
        x = x.mT
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    if is_tall:
        x = x.mT
    return x.reshape(matrices.shape)


def parameter_groups(model: nn.Module, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    """Groups for :class:`MuonAdamW`: what Muon steps, as which matrices, and what is decayed.

    Muon takes the linear maps of the token and channel mixers, of the vision tower and its projector, and the experts;
    AdamW embedding, head, router, and all that is no matrix. Not decayed: norms, biases, the decay parameters `A_log`
    and `dt_bias`, short convolutions and pseudo-queries. The selection bias of the routers is a buffer and belongs to
    no optimizer. A parameter of a module that is not ours (an adapter, a head of your own) goes to AdamW and is
    decayed if it has two or more axes.

    The groups suit any optimizer that wants the same rule for weight decay: `torch.optim.AdamW(
    parameter_groups(model))` carries the other entries along and ignores them.

    Args:
        model: A model of this package, also inside a wrapper (`DistributedDataParallel`, PEFT).
        weight_decay: Rate of the decayed groups, per step and unit of learning rate, 0 or more.

    Returns:
        Dictionaries with `params`; `weight_decay`; `algorithm`, `"muon"` or `"adamw"`; and `row_blocks`, the heights
        of the matrices that lie below each other in a parameter, a pattern that repeats over all its rows, or `None`
        for one matrix. Each trainable parameter is in exactly one group, frozen ones in none. Parameters are without
        names, which checkpoints would keep per group: a sharded model has other groups on another number of ranks.

    Raises:
        ValueError: `weight_decay` is negative or not finite, or the model has no trainable parameter.
    """
    _require("weight_decay", weight_decay, 0 <= weight_decay < math.inf, "a finite number >= 0")
    matrices = dict(_matrices(model))
    vectors = {
        parameter
        for module in model.modules()
        if isinstance(module, KimiK3ShortConvolution | KimiK3PseudoQuery)
        for parameter in module.parameters()
    }
    groups: dict[MuonOptions, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        # Optimizers of PyTorch step a group with one kernel, which cannot span meshes (experts, everything else).
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        if parameter in matrices:
            key: MuonOptions = ("muon", matrices[parameter], weight_decay, mesh)
        else:
            is_decayed = parameter.ndim > 1 and parameter not in vectors
            key = ("adamw", None, weight_decay if is_decayed else 0.0, mesh)
        groups.setdefault(key, []).append(parameter)
    if not groups:
        raise ValueError(
            f"expected a model with trainable parameters, got {type(model).__name__} with none: set `requires_grad`."
        )
    return [
        {"params": parameters, "algorithm": algorithm, "row_blocks": row_blocks, "weight_decay": rate}
        for (algorithm, row_blocks, rate, _), parameters in groups.items()
    ]


def _matrices(model: nn.Module) -> Iterator[tuple[Tensor, tuple[int, ...] | None]]:
    """What Muon steps, and the row blocks where a parameter is more than one matrix."""
    for module in model.modules():
        blocks: dict[str, tuple[int, ...]] = {}
        if isinstance(module, KimiK3DeltaAttention):
            blocks = dict.fromkeys(("q_proj", "k_proj", "v_proj"), (module.head_dim,))
        elif isinstance(module, KimiK3LatentAttention):
            blocks = dict.fromkeys(("q_proj", "q_b_proj"), (module.qk_head_dim,))
            blocks["kv_b_proj"] = (module.qk_nope_head_dim, module.v_head_dim)
            blocks["kv_a_proj_with_mqa"] = (module.kv_lora_rank, module.qk_rope_head_dim)
        elif isinstance(module, KimiK3Experts):
            yield module.gate_up_proj, (module.intermediate_dim, module.intermediate_dim)
            yield module.down_proj, None
        elif isinstance(module, KimiK3VisionBlock):
            blocks = {"wqkv": (module.head_dim,)}
        elif not isinstance(module, KimiK3MLP | KimiK3SparseMoE | KimiK3VisionMLP | KimiK3Projector):
            continue
        children = module.proj if isinstance(module, KimiK3Projector) else module
        for name, child in children.named_children():
            if isinstance(child, nn.Linear):
                yield child.weight, blocks.get(name)


class MuonAdamW(torch.optim.Optimizer):
    """One optimizer over the groups of :func:`parameter_groups`, each stepped by its own algorithm.

    On a parameter that is a single matrix, Muon's step is that of `torch.optim.Muon(..., adjust_lr_fn=
    "match_rms_adamw")`, which takes neither heads nor 3-D experts; groups of AdamW are stepped by PyTorch's own.
    Parameters in half precision are computed in float32 and rounded once; their state is kept, saved and loaded as
    float32. Keep the parameters themselves in float32 (with bf16 autocast) if you can: an update below 1/512 of a
    bf16 weight is lost in rounding. Schedulers, `Trainer(optimizers=(optimizer, None))`, gradient scalers and
    checkpoints treat it like any other optimizer. A matrix needs one value of state per element, AdamW two. Parameters
    may be sharded (FSDP2, expert or tensor parallelism): every rank must call `step`, and all have gradients for the
    same parameters.

    Args:
        params: Groups from :func:`parameter_groups`, or of the same form.
        lr: Learning rate of all groups, in AdamW's units.
        momentum: mu, in [0, 1), of Muon.
        nesterov: Whether Muon looks one gradient ahead (the formula above) or orthogonalises M.
        ns_steps, ns_coefficients, ns_dtype: See :func:`newton_schulz`. Without `ns_dtype` it is bfloat16, and float32
            on a CPU, where products in bfloat16 may take ten times as long.
        update_rms: rho, root mean square of an update of Muon at learning rate 1.
        betas: Of AdamW, each in [0, 1).
        eps: Of AdamW, 0 or more.

    Raises:
        ValueError: An option is out of range; a group says no algorithm or row blocks that do not fit; at `step`, a
            gradient is sparse.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
        ns_dtype: torch.dtype | None = None,
        update_rms: float = 0.2,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        _require("lr", lr, 0 <= lr < math.inf, "a finite number >= 0")
        _require("momentum", momentum, 0 <= momentum < 1, "in [0, 1)")
        _require("ns_steps", ns_steps, ns_steps >= 1, "at least 1")
        _require("ns_coefficients", ns_coefficients, len(ns_coefficients) == 3, "three numbers (a, b, c)")
        _require("ns_dtype", ns_dtype, ns_dtype in (None, *NS_DTYPES), f"None or one of {NS_DTYPES}")
        _require("update_rms", update_rms, 0 < update_rms < math.inf, "a finite number > 0")
        _require("betas", betas, len(betas) == 2 and all(0 <= beta < 1 for beta in betas), "two numbers in [0, 1)")
        _require("eps", eps, 0 <= eps < math.inf, "a finite number >= 0")
        defaults = {
            "lr": lr,
            "weight_decay": 0.0,
            "row_blocks": None,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "ns_coefficients": tuple(ns_coefficients),
            "ns_dtype": ns_dtype,
            "update_rms": update_rms,
            "betas": tuple(betas),
            "eps": eps,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in `torch.optim.Optimizer`; the group must say its `algorithm`. Raises ValueError if it does not fit."""
        algorithm = param_group.get("algorithm") if isinstance(param_group, dict) else None
        if algorithm not in ("muon", "adamw"):
            raise ValueError(
                f'`algorithm` of a parameter group must be "muon" or "adamw", got {algorithm!r}: pass '
                "`parameter_groups(model)` instead of `model.parameters()`."
            )
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if algorithm == "muon":
            for parameter in group["params"]:
                _check_matrix(parameter, group["row_blocks"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; returns what `closure`, if given, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            grads = [_gradient(parameter) for parameter in parameters]
            if any(grad.is_sparse for grad in grads):
                raise ValueError("gradients must be dense, got a sparse one: use `nn.Embedding(sparse=False)`.")
            if group["algorithm"] == "adamw":
                self._adamw_step(parameters, grads, group)
                continue
            for parameter, grad in zip(parameters, grads, strict=True):
                self._muon_step(parameter, grad, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in `torch.optim.Optimizer`. Raises ValueError if the groups were made for another model."""
        kinds = [
            [(group["algorithm"], group["row_blocks"]) for group in groups]
            for groups in (self.param_groups, state_dict["param_groups"])
        ]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"the groups of the state must be {kinds[0]} (algorithm, row blocks), got {kinds[1]}: load the state "
                "of an optimizer over the same model."
            )
        super().load_state_dict(state_dict)
        # PyTorch casts state to the dtype of the parameter; ours is wider for half precision.
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for i, parameter in zip(saved, own, strict=True):
            for key, value in state_dict["state"].get(i, {}).items():
                if key != "step":
                    dtype = _state_dtype(parameter)
                    self.state[parameter][key] = value.to(device=parameter.device, dtype=dtype, copy=True)

    def _muon_step(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=_state_dtype(parameter))
        tensors = (_local(parameter), grad, _local(state["momentum_buffer"]))
        if isinstance(parameter, DTensor) and not _holds_whole_matrices(parameter, group["row_blocks"]):
            self._gathered_step(parameter, *tensors, group)
            return
        for stack in zip(*(_split(tensor, group["row_blocks"]) for tensor in tensors), strict=True):
            for weight, new, buffer in zip(*(_batches(tensor) for tensor in stack), strict=True):
                update = self._orthogonalise(self._look_ahead(new, buffer, group), group)
                self._descend(weight, update, group)

    def _gathered_step(
        self, parameter: DTensor, weight: Tensor, new: Tensor, buffer: Tensor, group: dict[str, Any]
    ) -> None:
        """Step of matrices that lie on several ranks; `weight`, `new` and `buffer` are this rank's part."""
        mesh, placements = parameter.device_mesh, parameter.placements
        direction = DTensor.from_local(
            self._look_ahead(new, buffer, group),
            mesh,
            placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        ).full_tensor()
        for stack in _split(direction, group["row_blocks"]):
            for matrices in _batches(stack):
                matrices.copy_(self._orthogonalise(matrices, group))
        update = DTensor.from_local(direction, mesh, [Replicate()] * mesh.ndim, run_check=False)
        self._descend(weight, update.redistribute(placements=placements).to_local(), group)

    @staticmethod
    def _look_ahead(new: Tensor, buffer: Tensor, group: dict[str, Any]) -> Tensor:
        """Take a gradient into the momentum; what is to be orthogonalised."""
        new = new.to(buffer.dtype)
        buffer.lerp_(new, 1 - group["momentum"])
        return new.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer

    @staticmethod
    def _orthogonalise(matrices: Tensor, group: dict[str, Any]) -> Tensor:
        """[..., R, C] -> the same, singular values near sqrt(max(R, C))."""
        dtype = group["ns_dtype"] or (torch.float32 if matrices.device.type == "cpu" else torch.bfloat16)
        update = newton_schulz(matrices, steps=group["ns_steps"], coefficients=group["ns_coefficients"], dtype=dtype)
        return update.to(matrices.dtype).mul_(math.sqrt(max(matrices.shape[-2:])))

    @staticmethod
    def _descend(weight: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        lr = float(group["lr"])
        wide = weight.to(update.dtype)
        wide.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr * group["update_rms"])
        if wide.dtype != weight.dtype:
            weight.copy_(wide)

    def _adamw_step(self, parameters: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        for state, parameter in zip(states, parameters, strict=True):
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter, dtype=_state_dtype(parameter))
                state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=_state_dtype(parameter))
        # Element-wise, so shards are stepped as ordinary tensors.
        weights = [_local(parameter) for parameter in parameters]
        wide = [weight.to(_state_dtype(weight)) for weight in weights]
        beta1, beta2 = group["betas"]
        adamw(
            wide,
            [grad.to(tensor.dtype) for grad, tensor in zip(grads, wide, strict=True)],
            [_local(state["exp_avg"]) for state in states],
            [_local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for weight, tensor in zip(weights, wide, strict=True):
            if tensor.dtype != weight.dtype:
                weight.copy_(tensor)


def _split(tensor: Tensor, row_blocks: tuple[int, ...] | None) -> list[Tensor]:
    """Views [N, ..., R, C] of a parameter or what has its shape, one per block of the pattern."""
    if row_blocks is None:
        return [tensor if tensor.ndim == 3 else tensor[None]]
    return list(tensor.unflatten(-2, (-1, sum(row_blocks))).split(row_blocks, dim=-2))


def _batches(stack: Tensor) -> tuple[Tensor, ...]:
    """Views of [N, ..., R, C] along the first axis, of at most `BATCH_ELEMENTS` elements if a matrix has no more."""
    return stack.split(max(1, BATCH_ELEMENTS // max(1, stack.shape[1:].numel())))


def _local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory with it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gradient(parameter: Tensor) -> Tensor:
    """This rank's part of the gradient, cut as the parameter is."""
    grad = parameter.grad
    assert grad is not None  # for type checkers; the caller has looked
    if isinstance(parameter, DTensor) and isinstance(grad, DTensor):
        grad = grad.redistribute(placements=parameter.placements)
    return _local(grad)


def _holds_whole_matrices(parameter: DTensor, row_blocks: tuple[int, ...] | None) -> bool:
    """Whether no matrix of the parameter lies on two ranks; the answer is the same on all of them."""
    cuts = [
        (placement, parameter.device_mesh.size(axis))
        for axis, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and parameter.device_mesh.size(axis) > 1
    ]
    if parameter.ndim == 3:
        return all(getattr(placement, "dim", None) == 0 for placement, _ in cuts)
    if not cuts:
        return True
    parts = math.prod(size for _, size in cuts)
    is_cut_in_rows = all(type(placement) is Shard and placement.dim == 0 for placement, _ in cuts)
    return row_blocks is not None and is_cut_in_rows and parameter.shape[0] % (parts * sum(row_blocks)) == 0


def _state_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _check_matrix(parameter: Tensor, row_blocks: tuple[int, ...] | None) -> None:
    shape = tuple(parameter.shape)
    if parameter.ndim not in (2, 3):
        raise ValueError(
            f'parameters of a "muon" group must have shape [R, C] or [E, R, C], got {shape}: put others into an '
            '"adamw" group, as `parameter_groups` does; make the groups before anything flattens parameters.'
        )
    if row_blocks is not None and (min(row_blocks) < 1 or shape[-2] % sum(row_blocks)):
        raise ValueError(
            f"`row_blocks` must be positive and their sum divide the rows of {shape}, got {row_blocks}: use `None` "
            "for one matrix."
        )


def _require(name: str, value: object, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise ValueError(f"`{name}` must be {expected}, got {value!r}: correct the argument.")
