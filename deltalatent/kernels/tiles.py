# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What every launch asks for on the host: whole-number arithmetic of tiles, the device, and the room that it has.

Decoding launches a kernel every few microseconds, so these cost next to nothing. (`triton.cdiv` and
`triton.next_power_of_2` do the same, but since Triton 3.6 unwrap their arguments for the compiler on every call, at
ten times the price; PyTorch asks the driver for the properties of the device anew.)
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch

Launch = TypeVar("Launch", bound=Callable[..., Any])


def cdiv(a: int, b: int) -> int:
    """`a / b` rounded up, for b > 0."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, for n > 0."""
    return 1 << (n - 1).bit_length()


def is_elsewhere(device: torch.device) -> bool:
    """Whether `device` is a GPU other than PyTorch's current one."""
    return device.type == "cuda" and device.index != torch.cuda.current_device()


def on_its_device(launch: Launch) -> Launch:
    """Decorator: what `launch` launches runs on the device of its first argument, a tensor or a list of tensors.

    Triton launches on PyTorch's current device, which is the wrong one for a model on the second GPU.
    """

    @functools.wraps(launch)
    def launch_there(first: Any, *rest: Any, **options: Any) -> Any:
        device = first.device if isinstance(first, torch.Tensor) else first[0].device
        if not is_elsewhere(device):
            return launch(first, *rest, **options)
        with torch.cuda.device(device):
            return launch(first, *rest, **options)

    return cast(Launch, launch_there)


class DeviceLimits(NamedTuple):
    """What kernels must fit into.

    Attributes:
        shared_memory: Bytes that one program may use.
        processors: Multiprocessors; one where there is no GPU, so that nothing is split.
        capability: Compute capability of an NVIDIA GPU; (0, 0) elsewhere.
    """

    shared_memory: int
    processors: int
    capability: tuple[int, int]


AMD_SHARED_MEMORY = 64 * 1024
"""What every AMD GPU has for one program; PyTorch does not say how much more the newest have."""

INTERPRETER_LIMITS = DeviceLimits(227 * 1024, 1, (0, 0))
"""The interpreter knows no limits; these are the tiles of an H200."""


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    """Limits of the GPU; asked for once."""
    if device.type != "cuda":
        return INTERPRETER_LIMITS
    properties = torch.cuda.get_device_properties(device)
    processors = properties.multi_processor_count
    if torch.version.hip is not None:
        return DeviceLimits(AMD_SHARED_MEMORY, processors, (0, 0))
    shared_memory = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # not in PyTorch's stubs
    return DeviceLimits(shared_memory, processors, (properties.major, properties.minor))


def register_limit(registers: int) -> dict[str, int]:
    """Launch option that caps the registers per thread; AMD's compiler takes none."""
    return {"maxnreg": registers} if torch.version.hip is None else {}
