# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints, full disks, killed processes: one clear error, the source as it was, no half target."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from deltalatent import KimiK3ForCausalLM
from deltalatent.__main__ import main
from deltalatent.conversion import convert, converter
from deltalatent.conversion.checkpoint_folder import CheckpointFolder, Piece
from deltalatent.conversion.shard_writer import ShardWriter
from tests.testing_common import GOLDEN

COMPOSITE, PACKED = GOLDEN / "multimodal", GOLDEN / "text_mxfp4"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The composite fixture in five files."""
    target = tmp_path_factory.mktemp("sharded") / "sharded"
    convert(COMPOSITE, target, max_shard_size="95KB")
    assert len(list(target.glob("*.safetensors"))) == 5
    return target


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def shard(folder: Path, number: int) -> Path:
    return folder / f"model-{number:05d}-of-00005.safetensors"


def edit_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def edit_tensors(file: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def first_name(file: Path) -> str:
    return min(load_file(file))


def truncate(folder: Path) -> None:
    file = shard(folder, 3)
    file.write_bytes(file.read_bytes()[:-50])


def replace_with(tensor: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        edit_tensors(shard(folder, 2), lambda tensors: tensors.update({min(tensors): tensor(tensors[min(tensors)])}))

    return change


def with_value(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[-1] = value
        return tensor

    return change


def twice_in_a_header(folder: Path) -> None:
    file = shard(folder, 2)
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].decode().strip()
    name = first_name(file)
    again = json.dumps({name: json.loads(header)[name]})[1:]
    header = f"{header[:-1]},{again}"
    header += " " * (-len(header) % 8)
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + content[8 + length :])


def twice_in_files(folder: Path) -> None:
    edit_tensors(shard(folder, 3), lambda tensors: tensors.update(dict([load_file(shard(folder, 2)).popitem()])))


def other_index(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / INDEX, lambda index: change(index["weight_map"]))


def other_config(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", lambda config: config["text_config"].update(fields))


NAME = "language_model.model.norm.weight"
DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated shard": (truncate, r"model-00003-of-00005.safetensors` must be a whole safetensors file"),
    "empty shard": (lambda folder: shard(folder, 3).write_bytes(b""), r"00003-of-00005.safetensors` must be a whole"),
    "missing shard": (lambda folder: shard(folder, 4).unlink(), r"00004-of-00005.safetensors` must be there"),
    "shard is text": (lambda folder: shard(folder, 1).write_text("<html>404</html>"), r"00001-of.* must be a whole"),
    "no index": (lambda folder: (folder / INDEX).unlink(), r"got no index but model-00001-of-00005.safetensors, "),
    "index is cut": (lambda folder: (folder / INDEX).write_text('{"weight_map": {'), r"must be readable JSON"),
    "index names a file elsewhere": (
        other_index(lambda names: names.update({NAME: "../model.safetensors"})),
        r"file names in the same folder",
    ),
    "index lacks a tensor": (other_index(lambda names: names.pop(NAME)), rf"but it has no entry for {NAME}"),
    "index lists too much": (
        other_index(lambda names: names.update({"extra": names[NAME]})),
        r"the files that it names do not hold extra",
    ),
    "index names the wrong file": (
        other_index(lambda names: names.update({NAME: "model-00001-of-00005.safetensors"})),
        rf"but another file than it says holds {NAME}",
    ),
    "interrupted save": (lambda folder: (folder / "save_in_progress").touch(), r"must have been saved to the end"),
    "stale shard beside": (
        lambda folder: shutil.copy(shard(folder, 1), folder / "model-00006-of-00006.safetensors"),
        r"must name every file .* got none for model-00006-of-00006.safetensors",
    ),
    "tensor in two files": (twice_in_files, r"must hold each tensor once, got "),
    "tensor twice in a header": (twice_in_a_header, r"must be a whole safetensors file, got: .*"),
    "NaN": (replace_with(with_value(float("nan"))), r"must be finite, got NaN or infinity in .*00002-of-00005"),
    "infinity": (replace_with(with_value(float("-inf"))), r"must be finite, got NaN or infinity in .*00002-of-00005"),
    "integers": (replace_with(lambda tensor: tensor.to(torch.int32)), r"of the dtypes BF16, F16, F32 .* \(I32\)"),
    "eight-bit floats": (
        replace_with(lambda tensor: tensor.to(torch.float8_e4m3fn)),
        r"must be of a dtype among .* got F8_E4M3",
    ),
    "another shape": (replace_with(lambda tensor: tensor[..., :-1].contiguous()), r"in the file, .* expected\)"),
    "tower of another depth": (
        lambda folder: edit_json(
            folder / "config.json", lambda config: config["vision_config"].update(vt_num_hidden_layers=4)
        ),
        r"must hold every tensor of its model, got none for vision_tower.encoder.blocks.3",
    ),
    "tower of another width": (
        lambda folder: edit_json(
            folder / "config.json", lambda config: config["vision_config"].update(vt_intermediate_size=65)
        ),
        r"vision_tower.encoder.blocks.0.mlp.fc0.weight \(\(64, 32\) in the file, \(65, 32\) expected",
    ),
    "tower gone": (
        lambda folder: edit_json(folder / "config.json", lambda config: config.update(vision_config=None)),
        r"exactly if its config has a `vision_config`, got 24 tensors and no",
    ),
    "config cut": (lambda folder: (folder / "config.json").write_text("{"), r"config.json` must be readable JSON"),
    "config is a list": (lambda folder: (folder / "config.json").write_text("[]"), r"must hold a JSON object"),
    "no config": (lambda folder: (folder / "config.json").unlink(), r"config.json` must be there"),
    "config of another architecture": (
        lambda folder: edit_json(folder / "config.json", lambda config: config.update(model_type="llama")),
        r"must have the `model_type` kimi_k3 .* got 'llama'",
    ),
    "config of a wider model": (
        other_config(intermediate_size=128),
        r"layers.0.mlp.down_proj.weight \(\(32, 64\) in the file, \(32, 128\) expected",
    ),
    "config of a deeper model": (
        other_config(num_hidden_layers=6, linear_attn_config={}),
        r"config.json` must be a valid configuration, got",
    ),
    "config with more experts": (other_config(num_experts=9), r"got none for .*experts.8.w1.weight"),
    "config with a million experts": (other_config(num_experts=10**6), r"must hold `num_experts`=1000000 per layer"),
    "config with fewer experts": (other_config(num_experts=7), r"got model.layers.1.*experts.7.w1.weight"),
    "config without depth mixing": (other_config(attn_res_block_size=None), r"no tensor but .* got model.*res_norm"),
    "words for numbers": (other_config(hidden_size="wide"), r"config.json` must be a valid configuration, got"),
    "other quantisation": (
        lambda folder: edit_json(
            folder / "config.json",
            lambda config: config.update(quantization_config={"quant_method": "fp8", "weight_block_size": [1, 1]}),
        ),
        r"must be plain or packed as MXFP4 .* got 'fp8'",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda name: name.replace(" ", "_"))
def test_damage_is_named_and_nothing_is_left(damage: str, sharded: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(sharded, tmp_path / "source"))
    change, pattern = DAMAGE[damage]
    change(source)
    before = content_of(source)
    with pytest.raises(ValueError, match=pattern):
        convert(source, tmp_path / "target", to="text" if "tower" not in damage else "same", max_shard_size="30KB")
    assert content_of(source) == before
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("experts", ["as-is", "bfloat16"])
@pytest.mark.parametrize(
    ("ending", "change", "pattern"),
    [
        ("w1.weight_scale", lambda t: torch.full_like(t, 255), r"w1.weight.* cannot be made from .*255"),
        ("w2.weight_scale", lambda t: None, r"got none for .*w2.weight_scale"),
        ("w2.weight_packed", lambda t: None, r"got none for .*w2.weight_packed"),
        ("w3.weight_packed", lambda t: t.to(torch.int8), r"packed ones: U8\), got .*w3.weight_packed \(I8\)"),
        (
            "w3.weight_packed",
            lambda t: t[:, :-1].contiguous(),
            r"w3.weight_packed \(\(32, 15\) in the file, \(32, 16\)",
        ),
    ],
)
def test_damaged_packed_experts(experts: Any, ending: str, change: Any, pattern: str, tmp_path: Path) -> None:
    source = Path(shutil.copytree(PACKED, tmp_path / "source"))
    name = f"model.layers.2.block_sparse_moe.experts.5.{ending}"

    def damage(tensors: dict[str, Tensor]) -> None:
        new = change(tensors.pop(name))
        tensors.update({} if new is None else {name: new})

    edit_tensors(source / "model.safetensors", damage)
    with pytest.raises(ValueError, match=pattern):
        convert(source, tmp_path / "target", experts=experts)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_plain_beside_packed_is_one_too_many(tmp_path: Path) -> None:
    source = Path(shutil.copytree(PACKED, tmp_path / "source"))
    name = "model.layers.2.block_sparse_moe.experts.5.w1.weight"
    edit_tensors(source / "model.safetensors", lambda tensors: tensors.update({name: torch.zeros(32, 32)}))
    with pytest.raises(ValueError, match=rf"no tensor but those of its model, got {name}_packed, {name}_scale"):
        convert(source, tmp_path / "target")


def test_file_that_shrinks_while_it_is_read(sharded: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(sharded, tmp_path / "source"))
    pieces = CheckpointFolder.open(source).tensors
    truncate(source)
    last = max((piece for piece in pieces.values() if piece.file == shard(source, 3)), key=lambda piece: piece.offset)
    with pytest.raises(ValueError, match=r"must stay as it is while it is read, got an end before byte"):
        last.read()


# ---- disks ----------------------------------------------------------------------------------------------------------


def test_full_disk_is_noticed_before_anything_is_written(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000))
    with pytest.raises(OSError, match=r"no space left for .*target`, which needs 0.000254 GB more") as raised:
        convert(sharded, tmp_path / "target", to="text")
    assert raised.value.errno == errno.ENOSPC
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("failing", ["write", "fsync", "config"])
def test_disk_that_fills_up_and_going_on_afterwards(
    failing: str, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole shards are kept, and the second run writes only the others."""
    before = content_of(sharded)
    full = OSError(errno.ENOSPC, "No space left on device")
    calls = 0

    def fail(original: Callable[..., Any], after: int) -> Callable[..., Any]:
        def function(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > after:
                raise full
            return original(*args)

        return function

    with monkeypatch.context() as patch:
        if failing == "write":
            patch.setattr(ShardWriter, "write", fail(ShardWriter.write, 150))
        elif failing == "fsync":
            patch.setattr(os, "fsync", fail(os.fsync, 5))
        else:
            patch.setattr(converter, "write_json", fail(converter.write_json, 1))
        with pytest.raises(OSError, match=r"no space left for .*run the same command again"):
            convert(sharded, tmp_path / "target", to="text", max_shard_size="30KB")
    assert not (tmp_path / "target").exists()
    work = tmp_path / "target.incomplete"
    whole = {path.name: path.stat().st_mtime_ns for path in work.glob("*.safetensors")}
    assert len(whole) >= 2
    with pytest.raises(ValueError, match="unfinished conversion from another source or with other options"):
        convert(sharded, tmp_path / "target", to="text", max_shard_size="40KB")
    report = convert(sharded, tmp_path / "target", to="text", max_shard_size="30KB")
    assert not work.exists()
    again = {name: (tmp_path / "target" / name).stat().st_mtime_ns for name in whole}
    # A shard that was whole but not yet in the journal is written again.
    assert sum(again[name] == whole[name] for name in whole) >= len(whole) - 1
    fresh = convert(sharded, tmp_path / "fresh", to="text", max_shard_size="30KB")
    assert report.files == fresh.files
    assert {name for name in content_of(tmp_path / "target")} == {name for name in content_of(tmp_path / "fresh")}
    assert content_of(sharded) == before


def test_interrupted_from_the_keyboard_and_going_on(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["convert", str(sharded), str(tmp_path / "target"), "--to=text", "--max-shard-size=30KB", "--quiet"]
    write, calls = ShardWriter.write, iter(range(151))

    def interrupted(writer: ShardWriter, tensor: Tensor) -> None:
        if next(calls) == 150:
            raise KeyboardInterrupt
        write(writer, tensor)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "write", interrupted)
        with pytest.raises(SystemExit) as stopped:
            main(command)
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "deltalatent convert: interrupted\n"
    assert not (tmp_path / "target").exists()
    work = tmp_path / "target.incomplete"
    whole = {path.name: path.stat().st_mtime_ns for path in work.glob("*.safetensors")}
    assert len(whole) >= 2
    main(command)
    assert not work.exists()
    assert {name: (tmp_path / "target" / name).stat().st_mtime_ns for name in whole} == whole
    fresh = convert(sharded, tmp_path / "fresh", to="text", max_shard_size="30KB")
    report = json.loads((tmp_path / "target" / converter.REPORT_NAME).read_text())
    assert report["files"] == fresh.files


def test_source_that_changed_is_not_continued(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(shutil.copytree(sharded, tmp_path / "source"))
    with monkeypatch.context() as patch:
        patch.setattr(converter, "write_json", lambda *args: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        with pytest.raises(OSError, match="broken"):
            convert(source, tmp_path / "target", to="text")
    os.utime(shard(source, 1))
    with pytest.raises(ValueError, match="unfinished conversion from another source"):
        convert(source, tmp_path / "target", to="text")


def test_two_at_once(sharded: Path, tmp_path: Path) -> None:
    from filelock import FileLock

    work = tmp_path / "target.incomplete"
    work.mkdir()
    with FileLock(work / converter.LOCK_NAME):
        with pytest.raises(ValueError, match="is being written by another process: wait for it"):
            convert(sharded, tmp_path / "target")
    convert(sharded, tmp_path / "target")
    assert not work.exists()


def test_folder_in_the_way(sharded: Path, tmp_path: Path) -> None:
    """A folder of that name with other things in it is not ours to write to, let alone to remove."""
    (tmp_path / "target.incomplete").mkdir()
    (tmp_path / "target.incomplete" / "thesis.txt").write_text("")
    with pytest.raises(ValueError, match="must be empty or hold a conversion's journal, got other files"):
        convert(sharded, tmp_path / "target")
    assert (tmp_path / "target.incomplete" / "thesis.txt").exists()


# ---- 200 shards -----------------------------------------------------------------------------------------------------

SHARD_BYTES = 200


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More than 200 shards; the model is small, the numbers of files and tensors are those of a large one."""
    folder = tmp_path_factory.mktemp("large")
    convert(PACKED, folder / "plain", experts="bfloat16")
    edit_tensors(folder / "plain" / "model.safetensors", lambda tensors: tensors.update(noisy(tensors)))
    report = convert(folder / "plain", folder / "large", max_shard_size=SHARD_BYTES)
    assert report.shards >= 200
    return folder / "large"


def noisy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts that packing changes."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(tensor.shape, generator=generator).bfloat16()
        for name, tensor in tensors.items()
        if ".experts." in name
    }


@dataclass
class Undisturbed:
    folder: Path
    report: converter.ConversionReport
    most_alive: int  # bytes of tensors read, at any moment


OPTIONS: dict[str, Any] = {"experts": "mxfp4", "max_shard_size": "200"}


@pytest.fixture(scope="module")
def undisturbed(large: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    alive = most = 0
    read = Piece.read

    def release(size: int) -> None:
        nonlocal alive
        alive -= size

    def counted(piece: Piece) -> Tensor:
        nonlocal alive, most
        tensor = read(piece)
        alive += tensor.nbytes
        most = max(most, alive)
        weakref.finalize(tensor, release, tensor.nbytes)
        return tensor

    target = tmp_path_factory.mktemp("undisturbed") / "target"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Piece, "read", counted)
        report = convert(large, target, **OPTIONS)
    return Undisturbed(target, report, most)


def test_memory_is_that_of_two_shards(large: Path, undisturbed: Undisturbed) -> None:
    """Of everything read from 200 shards; the embedding, larger than a shard should be, has one of its own."""
    assert undisturbed.report.shards >= 200
    assert undisturbed.most_alive <= 2 * max(file.stat().st_size for file in large.glob("*.safetensors"))
    assert undisturbed.most_alive < sum(file.stat().st_size for file in large.glob("*.safetensors")) / 10


WAITS_TO_BE_KILLED = """
import sys, time
from deltalatent.__main__ import main
from deltalatent.conversion import converter

begun, write_shard = [], converter._write_shard

def write_some(*arguments):
    begun.append(arguments)
    if len(begun) > 100:
        time.sleep(600)
    return write_shard(*arguments)

converter._write_shard = write_some
sys.exit(main(sys.argv[1:]))
"""
"""The command, which on a fast machine would have finished before anybody kills it."""


def test_killed_conversion_goes_on(large: Path, undisturbed: Undisturbed, tmp_path: Path) -> None:
    """SIGKILL in the middle; what was whole stays, the result is that of an undisturbed run."""
    before = {path.name: path.stat().st_mtime_ns for path in large.iterdir()}
    command = [sys.executable, "-c", WAITS_TO_BE_KILLED, "convert", str(large), str(tmp_path / "target")]
    command += ["--experts", OPTIONS["experts"], "--max-shard-size", OPTIONS["max_shard_size"]]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    journal = tmp_path / "target.incomplete" / converter.JOURNAL_NAME
    deadline = time.monotonic() + 300
    while process.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < 40):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    _, complaint = process.communicate()
    assert process.returncode == -signal.SIGKILL, complaint
    assert not (tmp_path / "target").exists()
    work = tmp_path / "target.incomplete"
    with journal.open("a") as opened:
        opened.write('{"file": "model-00')  # a line that the kill cut
    done = [json.loads(line)["file"] for line in journal.read_text().splitlines()[1:-1]]
    kept = {name: (work / name).stat().st_mtime_ns for name in done}
    (work / done[3]).write_bytes(b"")  # not what the journal says: made again

    report = convert(large, tmp_path / "target", **OPTIONS)
    assert report.shards > len(done) >= 39
    assert report.files == undisturbed.report.files
    assert report.packing_error == undisturbed.report.packing_error
    for name, stamp in kept.items():
        assert ((tmp_path / "target" / name).stat().st_mtime_ns == stamp) == (name != done[3])
    for name, entry in report.files.items():
        assert sha256((tmp_path / "target" / name).read_bytes()).hexdigest() == entry["sha256"]
    assert content_of(tmp_path / "target").keys() == content_of(undisturbed.folder).keys()
    assert {path.name: path.stat().st_mtime_ns for path in large.iterdir()} == before
    KimiK3ForCausalLM.from_pretrained(tmp_path / "target")


# ---- random damage --------------------------------------------------------------------------------------------------

offsets = st.floats(0, 1, exclude_max=True)
corruptions = st.one_of(
    st.tuples(st.just("flip"), st.integers(1, 5), offsets, st.integers(1, 255)),
    st.tuples(st.just("header"), st.integers(1, 5), offsets, st.integers(1, 255)),
    st.tuples(st.just("cut"), st.integers(1, 5), offsets),
    st.tuples(st.just("grow"), st.integers(1, 5), st.binary(min_size=1, max_size=20)),
    st.tuples(st.just("remove"), st.integers(0, 6)),
    st.tuples(st.just("swap"), st.integers(1, 5), st.integers(1, 5)),
    st.tuples(
        st.just("config"), offsets, st.one_of(st.none(), st.integers(-1, 10**9), st.text(max_size=3), st.booleans())
    ),
    st.tuples(st.just("text"), st.sampled_from(["config.json", INDEX]), offsets, st.integers(1, 255)),
    st.tuples(st.just("index"), offsets, st.sampled_from(["gone", "elsewhere", "renamed"])),
)


def corrupt(folder: Path, corruption: tuple[Any, ...]) -> None:
    kind, *details = corruption
    if kind in ("flip", "header", "text"):
        where, place, mask = details
        file = folder / where if kind == "text" else shard(folder, where)
        content = bytearray(file.read_bytes())
        end = 8 + int.from_bytes(content[:8], "little") if kind == "header" else len(content)
        content[int(place * end)] ^= mask
        file.write_bytes(content)
    elif kind == "cut":
        content = shard(folder, details[0]).read_bytes()
        shard(folder, details[0]).write_bytes(content[: int(details[1] * len(content))])
    elif kind == "grow":
        shard(folder, details[0]).write_bytes(shard(folder, details[0]).read_bytes() + details[1])
    elif kind == "remove":
        names = {0: "config.json", 6: INDEX}
        (folder / names.get(details[0], shard(folder, details[0] or 1).name)).unlink()
    elif kind == "swap":
        left, right = (shard(folder, number).read_bytes() for number in details)
        shard(folder, details[0]).write_bytes(right)
        shard(folder, details[1]).write_bytes(left)
    elif kind == "config":
        place, value = details

        def change(config: dict[str, Any]) -> None:
            parts = [
                config,
                config["text_config"],
                config["text_config"]["linear_attn_config"],
                config["vision_config"],
            ]
            fields = [(part, key) for part in parts for key in part]
            part, key = fields[int(place * len(fields))]
            part[key] = value

        edit_json(folder / "config.json", change)
    else:
        place, what = details

        def change_index(names: dict[str, str]) -> None:
            name = sorted(names)[int(place * len(names))]
            file = names.pop(name)
            if what == "elsewhere":
                names[name] = shard(folder, 1).name
            elif what == "renamed":
                names[name + "x"] = file

        other_index(change_index)(folder)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(corruption=corruptions, to=st.sampled_from(["same", "text"]))
def test_random_damage_is_refused_or_copied_as_it_is(
    corruption: tuple[Any, ...], to: Any, sharded: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A converted checkpoint holds, bit by bit, what the files held; otherwise there is an error and no target.

    What a flipped bit turns into another number cannot be noticed, so it must arrive as it is.
    """
    folder = tmp_path_factory.mktemp("fuzz")
    source = Path(shutil.copytree(sharded, folder / "source"))
    corrupt(source, corruption)
    before = content_of(source)
    try:
        convert(source, folder / "target", to=to)
    except ValueError as error:
        assert len(str(error)) > 40
        assert [path.name for path in folder.iterdir()] == ["source"]
    else:
        prefix = "language_model." if to == "text" else ""
        expected = {
            name.removeprefix(prefix): tensor
            for file in source.glob("*.safetensors")
            for name, tensor in load_file(file).items()
            if name.startswith(prefix)
        }
        actual = load_file(folder / "target" / "model.safetensors")
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(actual[name].view(torch.uint8), tensor.view(actual[name].shape).view(torch.uint8)), name
    assert content_of(source) == before
    shutil.rmtree(folder)
