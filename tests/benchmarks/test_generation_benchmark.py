# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of `generate` runs with a toy model and writes what it measured."""

import json
from pathlib import Path

import pytest

from benchmarks import generation


def test_every_kind_of_cache_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "generation.json"
    report = generation.main(["--tiny", "--size", "small", "--rows", "1", "3", "--out", str(out)])
    assert json.loads(out.read_text()) == report
    names = {f"small.{rows}_rows.{kind}" for rows in (1, 3) for kind in generation.STEPS}
    assert set(report["results"]) == names
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
    for result in report["results"].values():
        assert set(result["call_s"]) == {"8", "10"} and min(result["call_s"].values()) > 0
        assert len(result["ms_per_token_each"]) == 3
