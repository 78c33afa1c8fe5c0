# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""A virtual environment that holds Transformers, torch and what these two require, and nothing else but what is asked
for."""

from __future__ import annotations

import importlib.metadata
import subprocess
import venv
from pathlib import Path

from packaging.requirements import Requirement

LEFT_OUT = frozenset({"triton"})
"""Requirements of torch that it runs without."""


def required_distributions(*roots: str) -> set[str]:
    """The installed distributions that `roots` require, directly or not, extras aside, and these themselves."""
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found or name in LEFT_OUT - {*roots}:
            continue
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # a requirement that this platform does not have
            continue
        found.add(name)
        for line in requirements:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


def make_bare_environment(folder: Path, *others: str) -> Path:
    """Create the environment, with the distributions `others` too, by linking to installed files; returns its Python.

    Nothing is downloaded.
    """
    venv.create(folder, symlinks=True, with_pip=False)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    for name in required_distributions("torch", "transformers", *others):
        distribution = importlib.metadata.distribution(name)
        entries = {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}
        for entry in entries:
            source, link = Path(str(distribution.locate_file(entry))), site_packages / entry
            if source.exists() and not link.exists():
                link.symlink_to(source)
    return folder / "bin" / "python"


def run_python(python: Path, script: str, *arguments: object, workspace: Path, **environment: str) -> str:
    """Run a script in a new process, with an empty cache of remote code in `workspace`; returns what it prints."""
    run = subprocess.run(
        [str(python), "-c", script, *map(str, arguments)],
        env={"HF_MODULES_CACHE": str(workspace / "modules"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        | environment,
        cwd=workspace,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout
