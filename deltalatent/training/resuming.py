# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint of a Trainer a killed run can go on from.

A process that is killed while it writes `checkpoint-N` leaves part of it. `Trainer.train(resume_from_checkpoint=True)`
takes the folder with the largest number whatever is in it: it fails if the weights are cut short, and if they are
whole but the rest is missing it goes on with them, a new optimizer and step 0, without a word. The Trainer writes
`trainer_state.json` last; here every file is looked at as well, because deleting old checkpoints can be interrupted
too. Only headers and ends of files are read, so checking takes no time at any size.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

from transformers.utils import logging

from deltalatent.modeling.checkpoint_errors import UNFINISHED_NAME
from deltalatent.training.balancing import SELECTION_BIAS_FILE

__all__ = ["check_checkpoint", "last_complete_checkpoint"]

logger = logging.get_logger(__name__)

WEIGHTS = ("model.safetensors", "adapter_model.safetensors", "*/adapter_model.safetensors")
WEIGHTS_INDEX = "model.safetensors.index.json"
# Written by Transformers, and by accelerate for FSDP: whole in one file, or sharded in a folder.
FSDP_WEIGHTS = ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_0")
OPTIMIZER = ("optimizer.pt", "optimizer.bin", "optimizer_0")
SCHEDULER = ("scheduler.pt",)
RNG_STATES = ("rng_state*.pth",)
TRAINER_STATE = "trainer_state.json"


def last_complete_checkpoint(output_dir: str | Path) -> str | None:
    """The newest checkpoint that training can go on from exactly as if it had not been interrupted.

    Made for `trainer.train(resume_from_checkpoint=last_complete_checkpoint(args.output_dir))`, which starts anew where
    there is nothing to go on from. A newer checkpoint that is passed over is named in a warning.

    Args:
        output_dir: Of the Trainer; holds `checkpoint-N` folders, or does not exist yet.

    Returns:
        Path of the whole checkpoint with the largest number, `None` if there is none.
    """
    found = []
    for folder in Path(output_dir).glob("checkpoint-*"):
        number = folder.name.removeprefix("checkpoint-")
        if folder.is_dir() and number.isdecimal():
            found.append((int(number), folder))
    for _, folder in sorted(found, reverse=True):
        if not (faults := _faults(folder)):
            return str(folder)
        logger.warning(f"The checkpoint {folder} is not whole and is passed over: {'; '.join(faults)}.")
    return None


def check_checkpoint(folder: str | Path) -> None:
    """Make sure that a Trainer's checkpoint is whole.

    Weights (of a model or of adapters, in one file, in shards, or as FSDP writes them), optimizer, scheduler, random
    states, and the Trainer's own state, which must be of the step that the folder is named after.

    Raises:
        ValueError: Something is missing or cut short; the message says what.
    """
    if faults := _faults(Path(folder)):
        raise ValueError(
            f"the checkpoint {folder} must be whole to go on from it, got: {'; '.join(faults)}: take an earlier one "
            "(`last_complete_checkpoint(output_dir)` finds it), or load its weights with `from_pretrained`."
        )


def _faults(folder: Path) -> list[str]:
    """What keeps a Trainer from going on from a folder, in words; empty if nothing does."""
    if not folder.is_dir():
        return [f"{folder} is no folder"]
    return [
        *_weights_faults(folder),
        *_archive_faults(folder, f"optimizer ({OPTIMIZER[0]})", OPTIMIZER),
        *_archive_faults(folder, f"scheduler ({SCHEDULER[0]})", SCHEDULER),
        *_archive_faults(folder, f"random states ({RNG_STATES[0]})", RNG_STATES),
        *_state_faults(folder),
    ]


def _weights_faults(folder: Path) -> Iterator[str]:
    if (folder / UNFINISHED_NAME).exists():
        yield f"saving the model was interrupted ({UNFINISHED_NAME} is there)"
    files = [path for pattern in WEIGHTS for path in sorted(folder.glob(pattern))]
    index = folder / WEIGHTS_INDEX
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        except (ValueError, KeyError):
            yield f"{index.name} is cut short"
            return
        files += [folder / name for name in sorted(shards)]
    if not files:
        yield from _archive_faults(folder, f"weights ({WEIGHTS[0]}, {WEIGHTS[1]}, ...)", FSDP_WEIGHTS)
    for path in [*files, *folder.glob(SELECTION_BIAS_FILE)]:
        if not path.is_file():
            yield f"{path.name} is missing"
        elif not _is_whole_safetensors(path):
            yield f"{path.name} is cut short"


def _archive_faults(folder: Path, what: str, patterns: tuple[str, ...]) -> Iterator[str]:
    """Files of `torch.save` end with a directory of their parts; distributed checkpoints get `.metadata` at last."""
    paths = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    if not paths:
        yield f"no {what}"
    for path in paths:
        is_whole = (path / ".metadata").is_file() if path.is_dir() else zipfile.is_zipfile(path)
        if not is_whole:
            yield f"{path.name} is cut short"


def _state_faults(folder: Path) -> Iterator[str]:
    path = folder / TRAINER_STATE
    if not path.is_file():
        yield f"{path.name}, which is written last, is missing"
        return
    try:
        step = json.loads(path.read_text("utf-8"))["global_step"]
    except (ValueError, KeyError):
        yield f"{path.name} is cut short"
        return
    if folder.name.startswith("checkpoint-") and folder.name != f"checkpoint-{step}":
        yield f"{path.name} is of step {step}"


def _is_whole_safetensors(path: Path) -> bool:
    """Whether a file is as long as its header says: 8 bytes of header length, header, tensors."""
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            return False
        (length,) = struct.unpack("<Q", start)
        header = file.read(min(length, path.stat().st_size))
    try:
        tensors = [value for name, value in json.loads(header).items() if name != "__metadata__"]
    except ValueError:
        return False
    return path.stat().st_size == 8 + length + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
