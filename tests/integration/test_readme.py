# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What the README tells a newcomer to type works, and what it shows is what is printed."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import train_quickstart
from tests.integration.quickstart_run import run_quickstart

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PYTHON_BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
PARAGRAPHS = re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def after_quickstart(tmp_path_factory) -> tuple[Path, dict]:
    """A folder as `make quickstart` leaves it, but for a tiny model, and the summary of that run."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copy(ROOT / "README.md", folder)
    summary = run_quickstart(folder / "runs/quickstart", "--max_steps", "2", "--save_strategy", "no")
    return folder, summary


def test_there_are_two_python_examples_of_about_ten_lines():
    assert len(PYTHON_BLOCKS) == 2
    assert all(len(block.splitlines()) <= 20 for block in PYTHON_BLOCKS)


@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=["generate", "trainer"])
def test_python_example_runs(block, after_quickstart, monkeypatch):
    monkeypatch.chdir(after_quickstart[0])
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})


def test_make_commands_exist():
    commands = set(re.findall(r"make ([a-z]+)", README))
    assert {"quickstart", "test"} <= commands
    for target in commands:
        # --dry-run still fails when there is no rule for the target.
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


def test_shown_summary_has_what_the_script_prints(after_quickstart):
    """Every figure that the run prints is in the README's copy of the output, in the same order."""
    (shown,) = re.findall(r"^```text\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    keys = re.findall(r"^([a-z_0-9/]+) {2,}\S", shown, re.MULTILINE)
    assert keys == [key for key in after_quickstart[1] if key != "continuations"]


def test_flags_in_shell_examples_exist(capsys):
    with pytest.raises(SystemExit):
        train_quickstart.main(["--help"])
    known = set(re.findall(r"--[a-z_0-9]+", capsys.readouterr().out))
    shell = " ".join(re.findall(r"^```(?:bash|sh|)\n(.*?)^```", README, re.DOTALL | re.MULTILINE))
    used = set(re.findall(r"--[a-z_0-9]+", shell))
    assert used <= known


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+?)\)", PARAGRAPHS)
    local = [target for target in targets if not target.startswith("http")]
    assert local
    assert [target for target in local if not (ROOT / target).exists()] == []


def test_readme_fits_two_screens():
    assert len(README.splitlines()) <= 130
