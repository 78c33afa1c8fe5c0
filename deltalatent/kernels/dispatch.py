# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Choice of the implementation of an operator: `impl="auto" | "triton" | "torch" | ...`, never a silent fallback."""

import functools
import importlib.util
import logging
import os
from collections.abc import Mapping
from typing import NamedTuple

import torch

logger = logging.getLogger(__name__)

# Third-party implementations run only when they are asked for by name: their arithmetic is not ours.
EXPLICIT_ONLY = frozenset({"fla"})
MINIMUM_COMPUTE_CAPABILITY = (8, 0)

_announced: set[tuple[str, str]] = set()


class Obstacle(NamedTuple):
    """Why an implementation cannot run a call.

    Attributes:
        reason: clause that completes "... cannot run: {reason}", naming the fix.
        error: exception type that an explicit request for the implementation raises.
    """

    reason: str
    error: type[Exception] = ValueError


def resolve_impl(op: str, requested: str, *, device: torch.device, reasons: Mapping[str, Obstacle | None]) -> str:
    """Return the name of the implementation that runs a call of `op`.

    Args:
        op: name of the operator, for messages.
        requested: `"auto"` or a key of `reasons`.
        device: device of the operator's tensors.
        reasons: for every implementation what keeps it from running this call (`None`: nothing), best one first.

    Returns:
        `requested` itself, or for `"auto"` the first implementation without an obstacle. `auto` never picks a member
        of `EXPLICIT_ONLY`. Its choice is logged once per operator and implementation: as information, or as a warning
        when an accelerator is left to the plain PyTorch form.

    Raises:
        ValueError: unknown name, or an explicit name that cannot run this call.
        ImportError: an explicit name whose package is missing.
        RuntimeError: no implementation can run the call.
    """
    if requested != "auto":
        if requested not in reasons:
            names = ", ".join(repr(name) for name in ("auto", *reasons))
            raise ValueError(f"`impl` of {op} must be one of {names}, got {requested!r}.")
        obstacle = reasons[requested]
        if obstacle is not None:
            raise obstacle.error(f"{op} with impl={requested!r} cannot run: {obstacle.reason}.")
        return requested

    passed_over: list[str] = []
    for name, obstacle in reasons.items():
        if name in EXPLICIT_ONLY:
            continue
        if obstacle is None:
            _announce(op, name, device, passed_over)
            return name
        passed_over.append(f"{name}: {obstacle.reason}")
    raise RuntimeError(f"no implementation of {op} can run this call ({'; '.join(passed_over)}).")


def _announce(op: str, choice: str, device: torch.device, passed_over: list[str]) -> None:
    # Logging would break the graph under torch.compile; the eager call that comes first has logged already.
    if torch.compiler.is_compiling() or (op, choice) in _announced:
        return
    _announced.add((op, choice))
    why = f" ({'; '.join(passed_over)})" if passed_over else ""
    slow = choice == "torch" and device.type != "cpu"
    logger.log(logging.WARNING if slow else logging.INFO, "%s: auto chose %s on %s%s", op, choice, device.type, why)


@torch.compiler.assume_constant_result
def triton_obstacle(device: torch.device) -> Obstacle | None:
    """Say why Triton kernels cannot run on tensors of `device`; `None` if they can.

    They need the `triton` package and a GPU that PyTorch calls `cuda` (compute capability 8.0 or newer; AMD's builds
    of PyTorch use the same device name). With `TRITON_INTERPRET=1` in the environment they run on any device, slowly.
    """
    return _probe_triton(device)


@functools.cache
def _probe_triton(device: torch.device) -> Obstacle | None:
    if importlib.util.find_spec("triton") is None:
        return Obstacle("the package `triton` is not installed: `pip install deltalatent[kernels]`", ImportError)
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda":
        return Obstacle(f"Triton kernels need CUDA tensors, got tensors on {device.type!r}: move them, or use 'torch'")
    if torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < MINIMUM_COMPUTE_CAPABILITY:
            need, have = (".".join(map(str, pair)) for pair in (MINIMUM_COMPUTE_CAPABILITY, capability))
            return Obstacle(f"Triton kernels need compute capability {need}, this GPU has {have}: use 'torch'")
    return None
