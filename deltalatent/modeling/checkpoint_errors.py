# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a checkpoint, in an exception that names the tensor or the file.

Transformers logs a table of what it could not load and then raises "see the table", or does not raise at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

UNFINISHED_NAME = "save_in_progress"
"""File that is in a folder while a model is being saved into it."""

INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"

NOT_WEIGHTS = ("BOOL", "I16", "I32", "I64")
"""Dtypes, as in headers, of which no parameter of these models is, quantised or not."""


def shortened(names: Iterable[str], limit: int = 8) -> str:
    """`a, b, c, ... (12 in all)`, in natural order."""
    ordered = sorted(names, key=lambda name: [part.zfill(8) if part.isdigit() else part for part in name.split(".")])
    return ", ".join(ordered[:limit]) + (f", ... ({len(ordered)} in all)" if len(ordered) > limit else "")


def check_conversion(loading_info: Any, checkpoint: str, ignore_mismatched_sizes: bool) -> None:
    """Raise if a tensor of the checkpoint could not be turned into a parameter.

    Args:
        loading_info: `LoadStateDictInfo` of Transformers.
        checkpoint: Where the tensors came from.
        ignore_mismatched_sizes: Accept tensors of another shape, whose parameters stay as initialised.

    Raises:
        ValueError: A conversion failed, or a shape does not fit; the tensors are named.
    """
    if loading_info.conversion_errors:
        name, text = next(iter(loading_info.conversion_errors.items()))
        # The text is a traceback, the exception's message, and a line about the operation.
        reason = text.strip().splitlines()[-2:][0]
        raise ValueError(f"`{name}` cannot be built from the checkpoint {checkpoint}: {reason}")
    if loading_info.mismatched_keys and not ignore_mismatched_sizes:
        shown = shortened(
            f"{name} ({tuple(found)} in the file, {tuple(expected)} in the model)"
            for name, found, expected in loading_info.mismatched_keys
        )
        raise ValueError(
            f"tensors of the checkpoint {checkpoint} must have the shapes that the config asks for, got {shown}: use "
            "the config of these weights, or pass `ignore_mismatched_sizes=True` to initialise them at random."
        )


@contextmanager
def unfinished_save(folder: str | Path) -> Iterator[None]:
    """While files are written, and if that is interrupted, the folder holds one by which `check_files` knows.

    Over an earlier save an interrupted one leaves files of both, each of them whole.
    """
    folder = Path(folder)
    if folder.is_file():
        yield  # Transformers refuses it
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / UNFINISHED_NAME).touch()
    yield
    (folder / UNFINISHED_NAME).unlink()


def check_save_finished(folder: Path) -> None:
    """Raise ValueError if a save into the folder was interrupted."""
    if (folder / UNFINISHED_NAME).exists():
        raise ValueError(
            f"the checkpoint {folder} must have been saved to the end, got one that was interrupted "
            f"({UNFINISHED_NAME} is in it): save it again, or use an earlier one."
        )


def check_files(folder: str | Path) -> None:
    """Raise for what Transformers would not notice in a folder of safetensors files, or nothing if there are none.

    It takes the last of two tensors of one name, reads files whatever the index says of them, and casts integers.

    Raises:
        ValueError: The save was interrupted, a tensor is in two files, the index names another place than that of a
            tensor, or weights are integers; tensors and files are named.
        SafetensorError: A file cannot be opened.
    """
    folder = Path(folder)
    check_save_finished(folder)
    if (folder / SINGLE_NAME).is_file():
        weight_map, files = None, [SINGLE_NAME]
    else:
        weight_map = read_weight_map(folder)
        files = list(dict.fromkeys((weight_map or {}).values()))
    places: dict[str, str] = {}
    for file in files:
        if not (folder / file).is_file():
            return  # Transformers says which
        with safe_open(folder / file, framework="pt") as opened:
            names = list(opened.keys())
            dtypes = {name: opened.get_slice(name).get_dtype() for name in names if name.endswith(".weight")}
        add_places(places, names, folder / file)
        if integers := [f"{name} ({dtype})" for name, dtype in dtypes.items() if dtype in NOT_WEIGHTS]:
            raise ValueError(
                f"the checkpoint {folder} must hold floating-point weights, got {shortened(integers)}: the file is "
                "damaged or of another format."
            )
    if weight_map is not None:
        check_index(folder, weight_map, places)


def read_json(file: Path, fix: str) -> dict[str, Any]:
    """A JSON object. Raises ValueError, with the advice `fix`, if the file is missing or holds something else."""
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(f"`{file}` must be there, found none: {fix}.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"`{file}` must be readable JSON, got: {error}; {fix}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"`{file}` must hold a JSON object, got a {type(content).__name__}: {fix}.")
    return content


def read_weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file name from a folder's index, `None` without one. Raises ValueError if it is no such thing."""
    index = folder / INDEX_NAME
    if not index.exists():
        return None
    weight_map = read_json(index, "copy the index again").get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else [None]
    if not all(isinstance(name, str) for name in names) or any(Path(name).name != name for name in set(names)):
        raise ValueError(
            f"`{index}` must have a `weight_map` of tensor names to file names in the same folder, got "
            f"{str(weight_map)[:80]}: copy the index again."
        )
    return weight_map


def add_places(places: dict[str, str], names: Iterable[str], file: Path) -> None:
    """Note in `places` (tensor name -> file name) what a file holds. Raises ValueError for a tensor in two files."""
    for name in names:
        if name in places:
            raise ValueError(
                f"the files of the checkpoint {file.parent} must hold each tensor once, got {name} in {places[name]} "
                f"and {file.name}: two saves were mixed; copy or save it again."
            )
        places[name] = file.name


def check_index(folder: Path, weight_map: dict[str, str], places: dict[str, str]) -> None:
    """Raise ValueError if the index of a folder says anything else than where its tensors are."""
    elsewhere = [name for name, file in places.items() if weight_map.get(name, file) != file]
    for what, names in (
        ("but the files that it names do not hold", weight_map.keys() - places.keys()),
        ("but it has no entry for", places.keys() - weight_map.keys()),
        ("but another file than it says holds", elsewhere),
    ):
        if names:
            raise ValueError(
                f"`{folder / INDEX_NAME}` must say where each tensor is, {what} {shortened(names)}: the index or the "
                "files were changed; copy or save the checkpoint again."
            )


def unreadable_files(folder: str | Path) -> dict[str, str]:
    """The safetensors files in a folder that cannot be opened, with the reason of each."""
    reasons = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            reasons[file.name] = str(error)
    return reasons
