# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""`convert`: one checkpoint folder into another, tensor by tensor.

Order of events: everything that headers and config can tell is checked; the whole target is planned; shards are
written to `TARGET.incomplete`, each under a temporary name until it is whole and then entered in a journal; the
written folder is checked as a source would be; it gets its final name. A killed conversion goes on after the last
whole shard when the same command runs again.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from filelock import FileLock, Timeout
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from tqdm.auto import tqdm

from deltalatent.configuration.configuration_kimi_k3 import KimiK3TextConfig
from deltalatent.conversion.checkpoint_folder import CheckpointFolder, Piece, check_is_folder
from deltalatent.conversion.config_files import (
    fewer_experts,
    first_layers,
    obstacles_to_predecessor,
    target_config,
)
from deltalatent.conversion.expert_usage import Usage, choose_experts, load_usage
from deltalatent.conversion.layouts import Kind, Source, read_source
from deltalatent.conversion.packing_error import PackingError
from deltalatent.conversion.plan import Edits, Experts, Shard, Step, cut_into_shards, index_of, plan_steps
from deltalatent.conversion.shard_writer import ShardWriter
from deltalatent.modeling.checkpoint_errors import INDEX_NAME
from deltalatent.modeling.packed_checkpoints import is_mxfp4

REPORT_NAME = "conversion_report.json"
JOURNAL_NAME, LOCK_NAME = "conversion_journal.jsonl", ".conversion.lock"

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")
CODE_FILES = ("modeling_*.py", "configuration_*.py", "kernels_*.py", "conversion_*.py", "operator_namespace.py")
"""Of a folder's own code, what computes; what reads text and pictures stays with the tokenizer."""

VISION_FIELDS = ("vision_config", "media_placeholder_token_id")
VISION_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
WRITTEN_FILES = ("config.json", REPORT_NAME, JOURNAL_NAME, LOCK_NAME)


@dataclass
class ConversionReport:
    """What was done; `to_dict` is what `conversion_report.json` holds.

    Attributes:
        source, target: The folders as given.
        dry_run: Whether nothing was written.
        options: Of the conversion.
        source_kind, target_kind: `"text"`, `"composite"` or `"predecessor"`.
        tensors_read, tensors_written: How many.
        tensors_left_out: Reason (`"vision"`, `"layers"`, `"experts"`) -> how many.
        dtypes: Of what is written, name in the headers -> how many tensors.
        parameters: Numbers that are written, selection biases aside; packed ones are counted one by one.
        total_bytes: Of all tensors written.
        files: Name -> `bytes` and `sha256` of each file written, weights first (empty after a dry run).
        not_copied: Names in the source folder that were left there (weights in other formats, folders).
        packing_error: One row per layer and matrix packed as MXFP4.
        experts: Per pruned layer, the experts kept and the share of all choices that went to them.
        notes: What the user should know.
    """

    source: str
    target: str
    dry_run: bool
    options: dict[str, Any]
    source_kind: Kind
    target_kind: Kind
    tensors_read: int
    tensors_written: int
    tensors_left_out: dict[str, int]
    dtypes: dict[str, int]
    parameters: int
    total_bytes: int
    shards: int
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    not_copied: list[str] = field(default_factory=list)
    packing_error: list[dict[str, Any]] = field(default_factory=list)
    experts: dict[int, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        try:
            version = importlib.metadata.version("deltalatent")
        except importlib.metadata.PackageNotFoundError:
            version = "not installed, from a source tree"
        return {"deltalatent": version} | self.__dict__


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: Kind | Literal["same"] = "same",
    experts: Experts = "as-is",
    layers: int | None = None,
    keep_experts: int | None = None,
    usage: str | Path | Usage | None = None,
    vision_from: str | Path | None = None,
    max_shard_size: int | str = "5GB",
    dry_run: bool = False,
    progress: bool = False,
) -> ConversionReport:
    """Convert a checkpoint folder; the source is only read, the target appears when it is complete.

    Tensors that need no arithmetic are copied bit by bit. Memory is that of a few tensors, whatever the size.

    Args:
        source: Folder in any layout of `docs/conversion.md`.
        target: Folder to be made.
        to: Layout of the target: `"text"` (text model alone), `"composite"` (text model behind `language_model.`,
            next to a vision part if there is one), `"predecessor"` (`kimi_linear`), or `"same"` as the source.
        experts: `"mxfp4"` packs the routed experts to four bits, `"bfloat16"` unpacks those that are packed.
        layers: Keep the first so many layers.
        keep_experts: Keep so many experts per layer, those that `usage` says were chosen most.
        usage: Counts per layer, or a file of them (`load_usage`).
        vision_from: Composite folder whose vision part completes a text model (for `to="composite"`).
        max_shard_size: Bytes per file, as a number or like `"5GB"`.
        dry_run: Check and plan only.
        progress: Show a progress bar.

    Returns:
        The report, which is also in the target as `conversion_report.json`.

    Raises:
        ValueError: The source is damaged, incomplete or of another architecture, holds NaN or infinity, cannot be
            what is asked for, or the target exists. What is wrong is named; there is no target then.
        OSError: The disk is full or fails. `TARGET.incomplete` keeps the shards that are whole.
    """
    source_folder, target_folder = Path(source), Path(target)
    _check_places(source_folder, target_folder)
    if (keep_experts is None) != (usage is None):
        raise ValueError("`keep_experts` and `usage` must be given together, got one of them: add the other.")
    if to not in ("same", *get_args(Kind)):
        raise ValueError(f"`to` must be text, composite, predecessor or same, got {to!r}: choose one of these.")
    if experts not in get_args(Experts):
        raise ValueError(f"`experts` must be as-is, bfloat16 or mxfp4, got {experts!r}: choose one of these.")
    checked = read_source(CheckpointFolder.open(source_folder))
    kind: Kind = checked.kind if to == "same" else to
    vision, outer = _vision_part(checked, kind, vision_from)
    fields, config, kept, expert_report = _edited_config(checked, layers, keep_experts, usage)
    if kind == "predecessor" and (obstacles := obstacles_to_predecessor(config)):
        raise ValueError(
            f"the predecessor's layout must not have mechanisms that came later, got {', '.join(obstacles)}: convert "
            'to "text" or "composite".'
        )
    _check_quantization(checked)
    edits = Edits(kind, experts, config.num_hidden_layers, kept)
    steps, left_out = plan_steps(checked, edits, vision)
    shards = cut_into_shards(steps, _bytes(max_shard_size))
    specs = [spec for shard in shards for spec in shard.specs]
    is_packed = any(spec.name.endswith(".weight_packed") for spec in specs)
    copied, not_copied = _other_files(checked, kind, vision_from)
    report = ConversionReport(
        source=str(source),
        target=str(target),
        dry_run=dry_run,
        options={
            "to": to,
            "experts": experts,
            "layers": layers,
            "keep_experts": keep_experts,
            "vision_from": None if vision_from is None else str(vision_from),
            "max_shard_size": max_shard_size,
        },
        source_kind=checked.kind,
        target_kind=kind,
        tensors_read=len(checked.folder.tensors),
        tensors_written=len(specs),
        tensors_left_out={reason: len(names) for reason, names in left_out.items()},
        dtypes=dict(sorted(Counter(spec.dtype for spec in specs).items())),
        parameters=sum(
            math.prod(spec.shape) * (2 if spec.name.endswith("_packed") else 1)
            for spec in specs
            if not spec.name.endswith(("_scale", "e_score_correction_bias"))
        ),
        total_bytes=sum(spec.nbytes for spec in specs),
        shards=len(shards),
        not_copied=not_copied,
        experts=expert_report,
        notes=_notes(kind, outer),
    )
    if dry_run:
        return report
    written = {
        "config.json": target_config(checked, fields, kind, is_packed, outer),
        INDEX_NAME: index_of(shards),
    }
    job = _Job(target_folder, shards, _fingerprint(steps, report.options, kept, written))
    with job.folder_in_progress() as work:
        entries = job.entries(work)
        try:
            job.write_shards(work, entries, report, progress)
            for name, content in written.items():
                if content is not None:
                    write_json(work / name, content)
                    report.files[name] = _described(work / name)
            for file in copied:
                shutil.copyfile(file, work / file.name)
                report.files[file.name] = _described(work / file.name)
            read_source(CheckpointFolder.open(work))
        except ValueError:
            shutil.rmtree(work)  # the source must change, so nothing in it can be used again
            raise
        write_json(work / REPORT_NAME, report.to_dict())
        job.finish(work)
    return report


# ---- what is asked for ----------------------------------------------------------------------------------------------


def _check_places(source: Path, target: Path) -> None:
    check_is_folder(source, "source")
    if target.exists() or target.is_symlink():
        raise ValueError(f"`target` must not exist, got `{target}`: nothing is overwritten; choose another name.")
    if source.resolve() in target.resolve().parents:
        raise ValueError(f"`target` must not be inside `source`, got `{target}`: choose another place.")


def _bytes(size: int | str) -> int:
    text = str(size).strip().upper().removesuffix("B").strip()
    number, unit = text.rstrip("KMGT"), text[len(text.rstrip("KMGT")) :]
    try:
        result = int(float(number) * UNITS.get(f"{unit}B", 1))
    except (ValueError, OverflowError):
        result = 0
    if result < 1 or len(unit) > 1:
        raise ValueError(f'`max_shard_size` must be a number of bytes or like "5GB", got {size!r}: correct it.')
    return result


def _vision_part(
    source: Source, kind: Kind, vision_from: str | Path | None
) -> tuple[dict[str, Piece], dict[str, Any] | None]:
    """Vision tensors of the target, and the config that describes them."""
    if vision_from is not None and (kind != "composite" or source.vision):
        raise ValueError(
            f"`vision_from` must be given only when a text model becomes a composite, got it for {source.kind} with "
            f"{len(source.vision)} vision tensors -> {kind}: leave it out."
        )
    if kind != "composite":
        return {}, None
    if vision_from is None:
        return source.vision, source.folder.config if source.kind == "composite" else None
    donor = read_source(CheckpointFolder.open(vision_from))
    if not donor.vision:
        raise ValueError(f"`vision_from` must be a composite checkpoint with a vision part, got `{vision_from}`.")
    width = donor.folder.config["vision_config"].get("text_hidden_size", donor.config.hidden_size)
    if width != source.config.hidden_size:
        raise ValueError(
            f"the vision part must project to `hidden_size`={source.config.hidden_size}, got {width} in "
            f"`{vision_from}`: take the tower of a model of this width."
        )
    if source.kind == "composite":
        theirs = {key: donor.folder.config[key] for key in VISION_FIELDS if key in donor.folder.config}
        return donor.vision, source.folder.config | theirs
    return donor.vision, donor.folder.config


def _edited_config(
    source: Source, layers: int | None, keep_experts: int | None, usage: str | Path | Usage | None
) -> tuple[dict[str, Any], KimiK3TextConfig, dict[int, list[int]] | None, dict[int, dict[str, Any]]]:
    """Fields and config of the target's text model, the experts kept, and what the report says of them."""
    fields, config, kept, report = source.fields, source.config, None, {}
    if layers is not None:
        if not 1 <= layers <= config.num_hidden_layers:
            raise ValueError(
                f"`layers` must be in 1 to `num_hidden_layers`={config.num_hidden_layers}, got {layers}: keep some."
            )
        fields = first_layers(fields, config, layers)
    if keep_experts is not None and usage is not None:
        counts = load_usage(usage)
        kept = choose_experts(config, counts, keep_experts)
        kept = {layer: chosen for layer, chosen in kept.items() if layer < fields.get("num_hidden_layers", layer + 1)}
        for layer, chosen in kept.items():
            total = float(counts[layer].sum())
            share = float(counts[layer][chosen].sum()) / total if total else 0.0
            report[layer] = {"kept": chosen, "share_of_choices": round(share, 6)}
        fields = fewer_experts(fields, keep_experts)
    try:
        return fields, KimiK3TextConfig.from_dict(fields), kept, report
    except StrictDataclassError as error:
        raise ValueError(
            f"what is asked for must be a valid configuration, got: {error.__cause__ or error}"
        ) from error


def _check_quantization(source: Source) -> None:
    claim = source.fields.get("quantization_config") or source.folder.config.get("quantization_config")
    if claim is not None and not is_mxfp4(claim):
        raise ValueError(
            f"`{source.folder.folder}` must be plain or packed as MXFP4 (compressed-tensors, mxfp4-pack-quantized), "
            f"got {claim.get('quant_method')!r}, {claim.get('format')!r}: use the checkpoint before it was quantised."
        )


def _other_files(source: Source, kind: Kind, vision_from: str | Path | None) -> tuple[list[Path], list[str]]:
    """Tokenizer, templates, licence and so on, which are copied; and names of what is not."""
    copied: list[Path] = []
    left: list[Path] = []
    for file in sorted(source.folder.folder.iterdir()):
        if file.name in WRITTEN_FILES or file.name in source.folder.files or file.name == INDEX_NAME:
            continue
        is_weights = any(file.match(pattern) for pattern in WEIGHT_FILES)
        # Of another layout: classes for that one, and what turns pictures into patches for a vision part.
        is_strange = any(file.match(pattern) for pattern in CODE_FILES)
        is_strange = kind != source.kind and (is_strange or (file.name in VISION_FILES and kind == "text"))
        (left if is_weights or is_strange or not file.is_file() else copied).append(file)
    if vision_from is not None:
        theirs = [Path(vision_from, name) for name in VISION_FILES if name not in {file.name for file in copied}]
        copied += [file for file in theirs if file.is_file()]
    return copied, [file.name for file in left]


def _notes(kind: Kind, outer: dict[str, Any] | None) -> list[str]:
    if kind == "composite" and (outer or {}).get("vision_config") is None:
        return [
            "no vision part: `vision_config` is null; a server that insists on a vision tower needs one "
            "(`--vision-from FOLDER`)"
        ]
    return []


# ---- writing --------------------------------------------------------------------------------------------------------


def _fingerprint(steps: list[Step], *decisions: Any) -> str:
    """Of everything that decides what the shards hold: a journal of another conversion must not be continued."""
    files = sorted({piece.file for step in steps for piece in step.pieces})
    stamps = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return hashlib.sha256(json.dumps([stamps, decisions], sort_keys=True).encode()).hexdigest()


class _Job:
    """The writing of one target: its temporary folder, and the journal in it."""

    def __init__(self, target: Path, shards: list[Shard], fingerprint: str) -> None:
        self.target = target
        self.shards = shards
        self.fingerprint = fingerprint

    @contextmanager
    def folder_in_progress(self) -> Iterator[Path]:
        """`TARGET.incomplete`, new or of an interrupted conversion, locked against a second process."""
        work = self.target.with_name(self.target.name + ".incomplete")
        work.mkdir(parents=True, exist_ok=True)
        lock = FileLock(work / LOCK_NAME)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(f"`{work}` is being written by another process: wait for it.") from error
        try:
            yield work
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OSError(
                error.errno,
                f"no space left for `{self.target}`, which needs {self._bytes_to_come(work) / 1e9:.3g} GB more: make "
                f"room and run the same command again, it continues with what `{work}` holds",
            ) from error
        finally:
            lock.release()

    def entries(self, work: Path) -> dict[str, dict[str, Any]]:
        """Journal entries of shards that are whole; starts the journal if there is none."""
        file = work / JOURNAL_NAME
        lines = file.read_text().splitlines() if file.exists() else []
        if not lines:
            if any(path.name not in (LOCK_NAME, JOURNAL_NAME) for path in work.iterdir()):
                raise ValueError(f"`{work}` must be empty or hold a conversion's journal, got other files: remove it.")
            file.write_text(json.dumps({"conversion": self.fingerprint}) + "\n")
            return {}
        try:
            first, *rest = [json.loads(line) for line in lines[:-1]]
            with suppress(ValueError):  # the line that was being written when the process ended
                rest.append(json.loads(lines[-1]))
        except ValueError:
            first, rest = {}, []
        if first.get("conversion") != self.fingerprint:
            raise ValueError(
                f"`{work}` holds an unfinished conversion from another source or with other options: finish that one "
                "with the same command, or remove the folder."
            )
        sizes = {path.name: path.stat().st_size for path in work.iterdir()}
        return {entry["file"]: entry for entry in rest if sizes.get(entry["file"]) == entry["bytes"]}

    def write_shards(
        self, work: Path, entries: dict[str, dict[str, Any]], report: ConversionReport, progress: bool
    ) -> None:
        """All shards without an entry; fills in what the report says of files and packing."""
        self._check_space(work)
        errors: dict[tuple[int, str], PackingError] = {}
        with (
            tqdm(total=report.total_bytes, unit="B", unit_scale=True, disable=not progress, desc="convert") as bar,
            (work / JOURNAL_NAME).open("a") as journal,
        ):
            for shard in self.shards:
                entry = entries.get(shard.name)
                if entry is None:
                    entry = _write_shard(work, shard, bar)
                    journal.write(json.dumps(entry) + "\n")
                    journal.flush()  # lost in a power cut, the shard is made again
                else:
                    bar.update(sum(step.nbytes for step in shard.steps))
                report.files[shard.name] = {"bytes": entry["bytes"], "sha256": entry["sha256"]}
                for layer, matrix, *sums in entry["packing"]:
                    errors.setdefault((layer, matrix), PackingError()).add(PackingError(*sums))
        report.packing_error = [errors[key].row(*key) for key in sorted(errors)]

    def finish(self, work: Path) -> None:
        """Give the folder its final name; from here on it is complete."""
        for file in work.iterdir():
            if file.suffix != ".safetensors":  # those are on the disk already
                _flush(file)
        if self.target.exists():
            raise ValueError(
                f"`target` must not exist, got `{self.target}`, which was made meanwhile: `{work}` is done."
            )
        _flush(work)
        os.rename(work, self.target)
        for name in (JOURNAL_NAME, LOCK_NAME):
            (self.target / name).unlink(missing_ok=True)

    def _bytes_to_come(self, work: Path) -> int:
        sizes = {shard.name: sum(step.nbytes for step in shard.steps) for shard in self.shards}
        return sum(size for name, size in sizes.items() if not (work / name).exists())

    def _check_space(self, work: Path) -> None:
        if self._bytes_to_come(work) > shutil.disk_usage(work).free:
            raise OSError(errno.ENOSPC, "not enough space")


def _write_shard(work: Path, shard: Shard, bar: tqdm) -> dict[str, Any]:
    """One file; returns its entry for the journal."""
    errors: dict[tuple[int, str], PackingError] = {}
    with ShardWriter(work / shard.name, shard.specs) as writer:
        for step in shard.steps:
            inputs = [piece.read() for piece in step.pieces]
            outputs = _computed(step, inputs)
            if step.packs is not None:
                errors.setdefault(step.packs, PackingError()).add(PackingError.of(*inputs, *outputs))
            for tensor in outputs:
                writer.write(tensor)
            bar.update(step.nbytes)
    packing = [[*key, *astuple(error)] for key, error in errors.items()]
    return {"file": shard.name, "bytes": writer.nbytes, "sha256": writer.sha256, "packing": packing}


def _computed(step: Step, inputs: list[Tensor]) -> Sequence[Tensor]:
    """What the step makes of tensors; raises ValueError, naming the tensor, if one holds NaN or infinity."""
    name, file = step.outputs[0].name, step.pieces[0].file
    for tensor in inputs:
        if tensor.is_floating_point() and tensor.numel() and not all(map(math.isfinite, _extremes(tensor))):
            raise ValueError(
                f"`{name}` must be finite, got NaN or infinity in `{file}`: look for what spoilt it, or use a clean "
                "copy of the checkpoint."
            )
    try:
        return step.compute(*inputs)
    except ValueError as error:
        raise ValueError(f"`{name}` cannot be made from `{file}`: {error}") from error


def _extremes(tensor: Tensor) -> tuple[float, float]:
    smallest, largest = tensor.aminmax()  # NaN if there is one
    return smallest.item(), largest.item()


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Indented, with a line feed at the end, as Transformers writes its files."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _described(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def _flush(path: Path) -> None:
    """To the disk, so that a name never outlives the content after a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
