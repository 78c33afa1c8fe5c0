# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/vision.md: every field with its default, figures as they were measured, and chance as it is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from deltalatent import KimiK3VisionConfig
from vision_data import NAME, READ, Example, Image
from vision_prompts import figures

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "vision.md").read_text()


def rows_of(header: str) -> list[list[str]]:
    """Cells of the table that begins with this cell, without its two header lines."""
    table = re.search(rf"^\| {header} \|.*\n(?:\|.*\n)+", PAGE, re.MULTILINE)
    assert table is not None, header
    return [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in table[0].splitlines()[2:]]


def test_every_field_of_the_tower_is_described_with_its_default() -> None:
    described = {row[0].strip("`"): row[1].strip("`") for row in rows_of("field")}
    fields = KimiK3VisionConfig.__dataclass_fields__
    own = [name for name in KimiK3VisionConfig.__annotations__ if name in fields]
    assert described == {name: repr(fields[name].default).replace("'", '"') for name in own}


def test_costs_are_those_that_were_measured() -> None:
    report: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "vision_tower-h200.json").read_text())
    shown = {name: numbers for name, *numbers in rows_of("inference")}
    assert shown.keys() == report["inference"].keys()
    for name, record in report["inference"].items():
        assert shown[name] == [
            str(record["patches"]),
            str(record["visual_tokens"]),
            f"{record['ms']:.1f}",
            f"{record['peak_gib']:.2f}",
            f"{record['tflops_per_s']:.0f}",
        ]
    trained = {name: numbers for name, *numbers in rows_of("training")}
    for name, record in report["training"].items():
        assert trained[name] == [str(record["patches"]), f"{record['ms']:.0f}", f"{record['peak_gib']:.2f}"]
    assert report["inference"]["3584 x 3584"]["peak_gib"] < 4


def test_chance_is_that_of_the_example() -> None:
    image = Image.new("RGB", (1, 1))
    by_chance = figures([Example(image, READ, "for"), Example(image, NAME, "coins")], ["", ""])
    keys = ("photographs_by_chance", "words_by_chance", "letters_by_chance")
    rows = rows_of("held out")
    assert [row[2] for row in rows] == [f"{100 * by_chance[key]:.0f} %" for key in keys]
    for _, right, chance in rows:
        assert float(right.split()[0]) > 5 * float(chance.split()[0])
