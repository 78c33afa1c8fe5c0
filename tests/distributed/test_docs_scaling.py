# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The page on several GPUs: its plan prints what is shown, its tables are what the code and the results say."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from deltalatent import size_config
from deltalatent.training import footprint

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scaling.md").read_text()


def rows(first_cell: str) -> list[list[str]]:
    """Cells of the table whose header begins so."""
    table = re.search(rf"^\| {re.escape(first_cell)} \|.*\n\|-.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()]


def test_the_plan_prints_what_is_shown() -> None:
    code, shown = re.search(
        r"^```python\n([^`]*footprint\(.*?)^```\n\n```text\n(.*?)^```", PAGE, re.DOTALL | re.M
    ).groups()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "scaling.md", "exec"), {})
    assert printed.getvalue() == shown


@pytest.mark.parametrize("row", rows("FSDP"), ids=lambda row: f"{row[0]}-{row[1]}")
def test_the_table_is_what_the_plan_says(row: list[str]) -> None:
    plan = footprint(size_config("release"), fsdp_size=int(row[0]), ep_size=int(row[1]), tokens=8192)
    figures = [plan.parameters, plan.optimizer, plan.held, plan.all_gather, plan.reduce_scatter, plan.all_to_all]
    shown = [f"{value / 2**30:.1f}" for value in figures[:3]] + [f"{value / 2**30:.0f}" for value in figures[3:]]
    assert row[2:] == shown
    assert f"{plan.flops:.3g}".replace("e+", "e") == "5.29e15"


def test_measured_differences_are_those_of_the_results() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "scaling-h200x2.json").read_text())["results"]
    sources = {
        "one GPU, bf16 against float32": ("small one adamw bfloat16", "against float32"),
        "EP 2 against one GPU": ("small ep adamw bfloat16", "against bfloat16"),
        "EP 2 against one GPU in float32": ("small ep adamw bfloat16", "against float32"),
        "FSDP 2 against one GPU": ("small fsdp adamw bfloat16", "against bfloat16"),
        "FSDP 2 against one GPU in float32": ("small fsdp adamw bfloat16", "against float32"),
    }
    for name, *shown in rows("`small` (160 M)"):
        key, against = sources[name]
        found = results[key][against]
        assert [float(value) for value in shown] == [float(f"{found[k]:.1e}") for k in ("loss", "norm", "gradients")]


def test_the_cost_of_fsdp2_is_that_of_the_results() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "scaling-h200.json").read_text())
    other = results["another machine"]["base alone speed"]
    sources = {
        "no": (results["results"]["base one speed"], {}),
        "over one GPU": (results["results"]["base alone speed"], other),
    }
    for tokens, fsdp2, *shown in rows("tokens per GPU"):
        cells: list[list[str]] = [[], [], [], []]
        for pattern, source in zip(("{}", "({})"), sources[fsdp2], strict=True):
            if found := source.get(f"{tokens} tokens per GPU"):
                figures = [f"{1e3 * found['step_s']:.0f}", f"{int(tokens) / found['step_s'] / 1e3:.0f} k", "", ""]
                if tokens == "16384":  # with more tokens the host is held up by a full queue
                    figures[2] = f"{1e3 * found['host_s']:.0f}"
                if "collectives" in found:
                    figures[3] = f"{100 * found['collectives']['idle']:.0f} %"
                for cell, figure in zip(cells, figures, strict=True):
                    cell += [pattern.format(figure)] if figure else []
        assert shown == [" ".join(cell) for cell in cells]
    one = results["results"]["base one speed"]
    muon, adamw = ([f"{1e3 * speed[f'{kind}_step_s']:.0f}" for speed in (one, other)] for kind in ("muon", "adamw"))
    text = " ".join(PAGE.split())
    assert f"takes {muon[0]} ms on one GPU and {muon[1]} ms over groups of FSDP2 on one GPU" in text
    assert f"fused AdamW {adamw[0]} and {adamw[1]} ms" in text
