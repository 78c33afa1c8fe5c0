# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The pages on training and LoRA: code runs, tables are computed, quoted messages are those of the code."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deltalatent
from deltalatent import KimiK3ForCausalLM, lora_targets, size_config
from deltalatent.configuration.sizes import count_parameters
from tests.testing_common import tiny_model

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {name: (DOCS / f"{name}.md").read_text() for name in ("training", "lora")}
PROSE = {name: re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE) for name, text in PAGES.items()}


def rows(page: str, first_header: str) -> list[list[str]]:
    """Cells of the table whose first header cell is given, without backticks."""
    table = re.search(rf"^\| {first_header}.*\n\|[-|]+\n((?:\|.*\n)+)", PAGES[page], re.MULTILINE)
    assert table is not None
    return [[cell.strip().strip("`") for cell in line.strip("|").split(" | ")] for line in table[1].splitlines()]


def code_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)


def test_recipe_runs(tmp_path: Path) -> None:
    (block,) = code_blocks("training")
    names: dict[str, Any] = {"output_dir": str(tmp_path)}
    exec(compile(block.replace("bf16=False", "use_cpu=True, disable_tqdm=True"), "training.md", "exec"), names)
    assert names["trainer"].state.global_step == 4
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-4"}


def test_lora_snippets_run(tmp_path: Path) -> None:
    names: dict[str, Any] = {"model": tiny_model(), "folder": str(tmp_path), "base": tiny_model()}
    for block in code_blocks("lora"):
        exec(compile(block, "lora.md", "exec"), names)


def messages() -> Iterator[list[str]]:
    """Every string of the package, in the pieces between what an f-string puts in; backticks left out."""
    for path in Path(deltalatent.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield [node.value.replace("`", "")]
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                yield "".join(parts).replace("`", "").split("\0")


def begins(pieces: list[str], message: str) -> bool:
    """Whether the message is the beginning of pieces with something between them, at least 25 characters of them."""
    rest, ours = message, 0
    for i, piece in enumerate(pieces):
        at = rest.find(piece) if i else (0 if rest.startswith(piece) else -1)
        if at < 0:
            # The quotation ends within this piece, which begins anywhere if something was put in before it.
            starts = range(len(rest) + 1) if i else [0]
            cut = [start for start in starts if piece.startswith(rest[start:])]
            return bool(cut) and ours + len(rest) - cut[0] >= 25
        rest, ours = rest[at + len(piece) :], ours + len(piece)
    return ours >= 25


def test_quoted_messages_are_those_of_the_code() -> None:
    quoted = [row[0] for row in rows("training", "message")]
    assert len(quoted) > 8
    known = list(messages())
    assert [message for message in quoted if not any(begins(pieces, message) for pieces in known)] == []


def test_the_check_of_messages_can_fail() -> None:
    pieces = ["x must be at least ", ", got too little of it: raise it"]
    assert begins(pieces, "x must be at least 7, got too little of it")
    assert not begins(pieces, "x must be at most 7, got too little of it")
    assert not begins(pieces, "x must be at least 7, got too much of it")
    assert not begins(["", ": "], "anything that anybody could write here: really anything")


def adapter_parameters(config: Any, experts: bool, rank: int = 16) -> int:
    with torch.device("meta"):
        model = KimiK3ForCausalLM(config)
    targets = lora_targets(config, experts=experts)
    count = sum(
        rank * (module.in_features + module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets["target_modules"]
    )
    for name, parameter in model.named_parameters():
        if name.endswith(tuple(targets["target_parameters"] or ["-"])):
            count += rank * parameter.shape[0] * (parameter.shape[1] + parameter.shape[2])
    return count


@pytest.mark.parametrize("row", rows("training", "size"), ids=lambda row: row[0])
def test_memory_table_is_computed(row: list[str]) -> None:
    size, parameters, active, *memory = row
    config = size_config(size)
    count = count_parameters(config)
    assert str(count) == f"{parameters} parameters, {active} active per token"
    expected = [16 * count.total]
    expected += [2 * count.total + 16 * adapter_parameters(config, experts) for experts in (False, True)]
    assert memory == [readable(size_in_bytes) for size_in_bytes in expected]


def readable(size: float) -> str:
    return f"{size / 1e12:.1f} TB" if size >= 1e12 else f"{size / 1e9:.2f} GB"


def test_loads_shown_are_those_of_the_run() -> None:
    """The table below the plot, from the JSON file beside it."""
    result = json.loads((DOCS / "balancing.json").read_text())
    header = re.search(r"^\| rule \| (.*) \|$", PAGES["training"], re.MULTILINE)
    assert header is not None
    steps = [int(step) for step in header[1].split(" | ")]
    assert [rule for rule, *_ in rows("training", "rule")] == ["quantile", "sign", "none"]
    for rule, *shown in rows("training", "rule"):
        violations = result["runs"][rule]["max_violation"]
        assert steps[-1] == len(violations) == result["flags"]["steps"]
        assert shown == [f"{violations[step - 1]:.2f}" for step in steps]
    dead = {rule: int(max(curves["dead"])) for rule, curves in result["runs"].items()}
    page = " ".join(PAGES["training"].split())
    assert f"up to {dead['none']} experts without balancing and {dead['sign']} under the sign rule" in page
    assert sum(result["runs"]["quantile"]["dead"]) == 1


def test_examples_exist_and_are_all_listed() -> None:
    named = set(re.findall(r"`examples/(\w+)\.py`", PAGES["training"]))
    scripts = {path.stem for path in (ROOT / "examples").glob("*.py") if "argparse" in path.read_text().lower()}
    about_other_things = {"generate", "train_vision", "train_distributed"}
    assert scripts - about_other_things <= named
    assert all((ROOT / "examples" / f"{name}.py").exists() for name in named)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#]+?)\)", PROSE[page])
    assert [target for target in targets if not target.startswith("http") and not (DOCS / target).exists()] == []


def test_figures_of_the_graphed_trainer_are_those_of_the_file() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "trainer-h200.json").read_text())["results"]
    ours = [result for result in results if result["variant"] == "ours" and not result["non_blocking"]]
    measured = {(result["size"], result["trainer"]): result for result in reversed(ours)}
    cells = {row[0].split("`")[0]: row[1:3] for row in rows("training", "whole steps")}
    assert len(cells) == 2
    for size, texts in cells.items():
        for text, trainer in zip(texts, ("Trainer", "CudaGraphTrainer"), strict=True):
            result = measured[size, trainer]
            milliseconds, tokens = re.fullmatch(r"([\d.]+) ms, (\d+) k tokens/s", text).groups()
            assert float(milliseconds) == pytest.approx(result["step_ms"], rel=0.005)
            assert int(tokens) == round(result["tokens_per_s"] / 1e3)
