# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Who may import whom (table in CONTRIBUTING.md), what that requires, and what `import deltalatent` costs and leaves
alone."""

import ast
import importlib.metadata
import json
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "deltalatent").rglob("*.py"))

MAY_IMPORT = {  # room: rooms of ours it may use besides itself
    "configuration": set(),
    "kernels": set(),
    "modeling": {"configuration", "kernels"},
    "processing": {"configuration"},
    "conversion": {"configuration", "kernels", "modeling"},
    "training": {"configuration", "kernels", "modeling"},
    "evaluation": {"configuration", "kernels", "modeling", "conversion", "training"},
}
OUTSIDE_FORBIDDEN = {"kernels": {"transformers", "huggingface_hub"}}


class Import(NamedTuple):
    line: int
    name: str  # `from a.b import c` counts as a.b.c, which may be a module or something in it
    relative: bool
    at_import_time: bool  # neither in a function nor for type checkers only


def imports_of(source: str) -> Iterator[Import]:
    def walk(node: ast.AST, at_import_time: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            )
            if isinstance(child, ast.Import):
                yield from (Import(child.lineno, a.name, False, at_import_time) for a in child.names)
            elif isinstance(child, ast.ImportFrom):
                for alias in child.names:
                    name = f"{child.module or ''}.{alias.name}"
                    yield Import(child.lineno, name, child.level > 0, at_import_time)
            else:
                yield from walk(child, at_import_time and not deferred)

    return walk(ast.parse(source), True)


def is_triton_file(parts: list[str]) -> bool:
    """Whether the dotted name is, or is in, a file triton_*.py (a function may be called triton_something too)."""
    return any(
        part.startswith("triton_") and ROOT.joinpath(*parts[:end]).with_suffix(".py").exists()
        for end, part in enumerate(parts, start=1)
    )


def violations(path: Path, source: str) -> list[str]:
    """Rules that the file `path` (relative to the repository) breaks, one message each."""
    room = path.parts[1] if len(path.parts) > 2 else None
    found = []
    for line, name, relative, at_import_time in imports_of(source):
        parts = name.split(".")
        broken = None
        if relative:
            broken = "relative import: write the absolute name"
        elif parts[0] == "triton" and not path.name.startswith("triton_"):
            broken = "triton belongs in files named triton_*.py"
        elif parts[0] == "torch" and room == "configuration" and at_import_time:
            broken = "configuration must be importable without torch"
        elif parts[0] in OUTSIDE_FORBIDDEN.get(room, ()):
            broken = f"{room} must not use {parts[0]}"
        elif parts[0] == "deltalatent":
            target = parts[1]
            launches_triton = is_triton_file(parts)
            if launches_triton and room != "kernels":
                broken = "use the operation's public function instead"
            elif launches_triton and at_import_time and not path.name.startswith("triton_"):
                broken = "import triton_*.py files inside the function that launches them"
            elif room is not None and target not in MAY_IMPORT:
                broken = "the rooms must not import the package's front door"
            elif room is not None and target != room and target not in MAY_IMPORT[room]:
                broken = f"{room} must not import {target}"
            elif room not in {None, "kernels"} and target == "kernels" and len(parts) > 4:
                broken = "import from deltalatent.kernels.<operation>, not from the files inside"
        if broken:
            found.append(f"{path}:{line}: {name}: {broken}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_keep_their_direction(path):
    assert violations(path.relative_to(ROOT), path.read_text()) == []


def test_every_room_has_a_rule():
    rooms = {path.relative_to(ROOT).parts[1] for path in SOURCES if path.parent != ROOT / "deltalatent"}
    assert rooms <= MAY_IMPORT.keys()


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        ("deltalatent/modeling/a.py", "from . import b", "relative import"),
        ("deltalatent/kernels/kda/api.py", "def f():\n    import triton.language as tl", "triton belongs in"),
        ("deltalatent/configuration/a.py", "import torch", "importable without torch"),
        ("deltalatent/kernels/kda/api.py", "from transformers import PreTrainedModel", "must not use transformers"),
        ("deltalatent/kernels/kda/api.py", "import deltalatent.modeling", "kernels must not import modeling"),
        ("deltalatent/configuration/a.py", "from deltalatent.kernels import kda", "configuration must not import"),
        ("deltalatent/modeling/a.py", "from deltalatent import conversion", "modeling must not import conversion"),
        ("deltalatent/modeling/a.py", "from deltalatent import KimiK3TextConfig", "front door"),
        ("deltalatent/modeling/a.py", "from deltalatent.kernels.kda import triton_fwd", "public function instead"),
        ("deltalatent/modeling/a.py", "from deltalatent.kernels.kda.reference import f", "not from the files inside"),
        ("deltalatent/kernels/kda/autograd.py", "from deltalatent.kernels.kda import triton_fwd", "inside the"),
        ("deltalatent/kernels/kda/api.py", "try:\n    import triton\nexcept ImportError:\n    pass", "triton belongs"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_found(path, source, message):
    (found,) = violations(Path(path), source)
    assert message in found and found.startswith(path)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("deltalatent/configuration/a.py", "def f():\n    import torch"),
        ("deltalatent/configuration/a.py", "if TYPE_CHECKING:\n    import torch"),
        ("deltalatent/kernels/kda/triton_fwd.py", "import triton"),
        ("deltalatent/kernels/kda/autograd.py", "def f():\n    from deltalatent.kernels.kda import triton_fwd"),
        ("deltalatent/modeling/a.py", "from deltalatent.kernels.kda import kda_chunk"),
        ("deltalatent/modeling/a.py", "from deltalatent.kernels.packing import document_index"),
        ("deltalatent/kernels/kda/api.py", "from deltalatent.kernels.dispatch import triton_obstacle"),
        ("deltalatent/__init__.py", "from deltalatent.conversion import mapping"),
    ],
)
def test_a_kept_rule_is_not_reported(path, source):
    assert violations(Path(path), source) == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_use_public_names_and_stay_short(path):
    source = path.read_text()
    private = [i.name for i in imports_of(source) if any(part.startswith("_") for part in i.name.split("."))]
    rooms = [i.name for i in imports_of(source) if i.name.startswith("deltalatent.") and len(i.name.split(".")) > 3]
    assert private == rooms == []
    assert len(source.splitlines()) <= 150


PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCAL = {path.stem for path in (ROOT / "examples").glob("*.py")} | {"benchmarks", "deltalatent"}
ONLY_ASKED_FOR = {"fla"}
"""Implementations of others that run where they are installed and asked for by name."""


distributions = cache(importlib.metadata.packages_distributions)  # import name -> names of distributions


def requirements(*extras: str) -> set[str]:
    """Names of the distributions that the package requires, with these extras (and those that they contain)."""
    lines = [
        *PYPROJECT["dependencies"],
        *(line for extra in extras for line in PYPROJECT["optional-dependencies"][extra]),
    ]
    parsed = [Requirement(line) for line in lines]
    inner = {extra for requirement in parsed if requirement.name == PYPROJECT["name"] for extra in requirement.extras}
    names = {canonicalize_name(requirement.name) for requirement in parsed}
    return names | (requirements(*inner) if inner else set())


def undeclared(path: Path, source: str) -> set[str]:
    """Packages of others that a file imports and `pyproject.toml` does not require: for good where every import of the
    package needs them, in some extra otherwise."""
    optional = path.name.startswith("triton_") or path.parts[:2] == ("deltalatent", "training")
    found = set()
    for _, name, relative, at_import_time in imports_of(source):
        package = name.split(".")[0]
        if relative or package in sys.stdlib_module_names | LOCAL | ONLY_ASKED_FOR:
            continue
        always = path.parts[0] == "deltalatent" and at_import_time and not optional
        declared = requirements(*([] if always else PYPROJECT["optional-dependencies"]))
        if declared.isdisjoint(map(canonicalize_name, distributions().get(package, [package]))):
            found.add(package)
    return found


@pytest.mark.parametrize("folder", ["deltalatent", "examples", "benchmarks"])
def test_whatever_is_imported_is_required(folder):
    files = {path.relative_to(ROOT): path.read_text() for path in (ROOT / folder).rglob("*.py")}
    missing = {str(path): names for path, source in files.items() if (names := undeclared(path, source))}
    assert missing == {}


@pytest.mark.parametrize(
    ("path", "source", "packages"),
    [
        ("deltalatent/modeling/a.py", "import peft", {"peft"}),
        ("deltalatent/modeling/a.py", "def f():\n    import peft", set()),
        ("deltalatent/training/a.py", "import peft", set()),
        ("deltalatent/processing/a.py", "from PIL import Image", {"PIL"}),
        ("deltalatent/kernels/kda/triton_fwd.py", "import triton", set()),
        ("examples/a.py", "import peft\nimport pandas", {"pandas"}),
        ("benchmarks/a.py", "from benchmarks.registry import OPS\nimport fla", set()),
    ],
)
def test_what_is_not_required_is_found(path, source, packages):
    assert undeclared(Path(path), source) == packages


def test_tested_versions_are_named_for_every_requirement():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(Requirement(line).name) for line in lines if not line.startswith("#")}
    assert requirements(*PYPROJECT["optional-dependencies"]) - {PYPROJECT["name"]} <= pinned


def in_new_process(code: str) -> Any:
    """Runs code whose last line of output is JSON; returns what it says."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_import_needs_neither_triton_nor_cuda():
    """Everything but the Triton files themselves imports where Triton does not exist."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in SOURCES
        if not path.name.startswith("triton_")
    ]
    state = in_new_process(f"""
        import importlib, json, sys
        sys.modules["triton"] = None  # importing it now raises
        for name in {modules}:
            importlib.import_module(name)
        import torch
        print(json.dumps({{"cuda": torch.cuda.is_initialized()}}))
    """)
    assert state == {"cuda": False}


def test_import_adds_little_to_transformers():
    """Processor time of our import beside that of a model class of Transformers in the same process, best of three.

    `import transformers` alone loads nothing; the model that it ships of the same family loads what every model needs.
    Half of ours is Transformers' table of tensor layouts, built when the first layout is registered; the rest
    registers operators for `torch.compile`.
    """
    shares = [
        in_new_process("""
            import json, time
            start = time.process_time()
            from transformers import AutoModelForCausalLM, KimiLinearForCausalLM
            theirs = time.process_time()
            import deltalatent
            print(json.dumps((time.process_time() - theirs) / (theirs - start)))
        """)
        for _ in range(3)
    ]
    assert min(shares) <= 0.15, shares
