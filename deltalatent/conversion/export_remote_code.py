# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Puts the source beside the weights, so that Transformers alone can load the model, its processor and tokenizer.

`AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` then needs torch and transformers, nothing else
(a processor of images: Pillow). Transformers copies such code as flat files that import each other as
`from .name import ...`; so every module of the package that is needed becomes one file, named after its place
(`kernels/kda/api.py` -> `kernels_kda_api.py`). Imports are rewritten, and operators get a namespace per loaded copy:
PyTorch has one table of operators, in which copies of several folders, or a folder's and the installed package's,
would take each other's place. Nothing else is changed.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deltalatent.conversion.checkpoint_folder import check_is_folder
from deltalatent.modeling.checkpoint_errors import read_json
from deltalatent.modeling.whole_files import write_whole

PACKAGE = "deltalatent"
ROOT = Path(__file__).resolve().parents[1]
ALWAYS_THERE = sys.stdlib_module_names | {"torch", "transformers", "huggingface_hub", "safetensors", "numpy"}
"""What may be imported without further ado: Python, and what Transformers itself needs."""

CONFIGURATION = f"{PACKAGE}.configuration.configuration_kimi_k3"
TEXT_MODEL = f"{PACKAGE}.modeling.modeling_kimi_k3"
CLASSIFIER = f"{PACKAGE}.modeling.sequence_classification"
MULTIMODAL_MODEL = f"{PACKAGE}.modeling.multimodal"
LAYOUT = f"{PACKAGE}.conversion.mapping"
IMAGE_PROCESSOR = f"{PACKAGE}.processing.image_processing_kimi_k3"
PROCESSOR = f"{PACKAGE}.processing.processing_kimi_k3"
TOKENIZER = f"{PACKAGE}.processing.tokenization_kimi_k3"
EPILOGUE = """

# The tensors on disk are named as released, one expert at a time: Transformers must know how they come together.
from .{layout} import register as _register_layout  # noqa: E402

_register_layout()
"""

NAMESPACE_MODULE = "operator_namespace"
NAMESPACE_SOURCE = f'''# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the operators of this copy of the code are registered: several copies may be in one process."""

import hashlib

OPERATORS = "{PACKAGE}_" + hashlib.sha256(__package__.encode()).hexdigest()[:16]
'''
OPERATOR_NAME = re.compile(rf'"{PACKAGE}::(\w+)"')

Reference = tuple[str, str]
"""Module and class."""

TEXT_CLASSES: dict[str, Reference] = {
    "AutoConfig": (CONFIGURATION, "KimiK3TextConfig"),
    "AutoModel": (TEXT_MODEL, "KimiK3TextModel"),
    "AutoModelForCausalLM": (TEXT_MODEL, "KimiK3ForCausalLM"),
    "AutoModelForSequenceClassification": (CLASSIFIER, "KimiK3ForSequenceClassification"),
}
COMPOSITE_CLASSES: dict[str, Reference] = {
    "AutoConfig": (CONFIGURATION, "KimiK3Config"),
    "AutoModel": (MULTIMODAL_MODEL, "KimiK3Model"),
    "AutoModelForImageTextToText": (MULTIMODAL_MODEL, "KimiK3ForConditionalGeneration"),
    "AutoModelForMultimodalLM": (MULTIMODAL_MODEL, "KimiK3ForConditionalGeneration"),
}
"""Auto class -> module and class, of a text model and of one with vision."""

PROCESSOR_CLASS: Reference = (PROCESSOR, "KimiK3Processor")
IMAGE_PROCESSOR_CLASSES: dict[str, Reference] = {
    "torchvision": (IMAGE_PROCESSOR, "KimiK3ImageProcessor"),
    "pil": (IMAGE_PROCESSOR, "KimiK3ImageProcessorPil"),
}
"""What resamples, by Transformers' name for it -> module and class."""

TOKENIZER_CLASS: Reference = (TOKENIZER, "KimiK3Tokenizer")
TOKENIZER_NAMES = ("KimiK3Tokenizer", "TikTokenTokenizer")
"""`tokenizer_class` of folders whose tokenizer needs this package's class; others are Transformers' own."""


def export_remote_code(folder: str | os.PathLike) -> list[Path]:
    """Make a saved model loadable with `trust_remote_code=True` where this package is not installed.

    Writes the source files into the folder and `auto_map` into its `config.json`, and into the files that describe its
    processor and tokenizer where these need code; everything else stays as it is. Files appear whole (written under
    another name, then renamed), `config.json` last. Doing it again brings the code up to date.

    Args:
        folder: What `save_pretrained` of a model wrote.

    Returns:
        The files written, `config.json` last.

    Raises:
        ValueError: There is no such folder, it holds no model of this package, or a file in it is no JSON object.
    """
    folder = Path(folder)
    check_is_folder(folder, "folder")
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ValueError(f"{folder} must hold a `config.json`, got none: pass a folder that `save_pretrained` wrote.")
    config = read_json(config_file, "pass a folder that `save_pretrained` wrote")
    classes = _model_classes(config, config_file)
    entries = {module for module, _ in classes.values()}
    contents = _processing_files(folder, entries) if classes is COMPOSITE_CLASSES else {}
    contents |= _tokenizer_file(folder, entries)
    contents[config_file] = config | {"auto_map": {auto: _flat(reference) for auto, reference in classes.items()}}

    sources = {flat_name(module): source for module, source in _flat_sources(entries).items()}
    sources[NAMESPACE_MODULE] = NAMESPACE_SOURCE
    written = [write_whole(folder / f"{name}.py", source) for name, source in sources.items()]
    for file, content in contents.items():
        written.append(write_whole(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n"))
    return written


def flat_name(module: str) -> str:
    """`deltalatent.kernels.kda.api` -> `kernels_kda_api`; the file name alone where it begins with the room's name."""
    parts = module.split(".")[1:]
    if parts[-1].startswith(f"{parts[0].removesuffix('s')}_"):
        return parts[-1]
    return "_".join(parts)


def _model_classes(config: dict[str, Any], config_file: Path) -> dict[str, Reference]:
    model_type = config.get("model_type")
    if model_type in ("kimi_k3_text", "kimi_linear"):
        return TEXT_CLASSES
    if model_type == "kimi_k3":
        return COMPOSITE_CLASSES
    known = "kimi_k3, kimi_k3_text or kimi_linear"
    raise ValueError(f"`model_type` of {config_file} must be {known}, got {model_type!r}: pass such a folder.")


def _processing_files(folder: Path, entries: set[str]) -> dict[Path, dict[str, Any]]:
    """The files that describe a processor of images, with `auto_map`; the modules that they name go to `entries`."""
    images = {backend: _flat(reference) for backend, reference in IMAGE_PROCESSOR_CLASSES.items()}
    of_images = {"auto_map": {"AutoProcessor": _flat(PROCESSOR_CLASS), "AutoImageProcessor": images}}
    contents = {}
    if (file := folder / "processor_config.json").is_file():  # as Transformers saves it, all in one
        content = read_json(file, "save the processor again") | {"auto_map": {"AutoProcessor": _flat(PROCESSOR_CLASS)}}
        if "image_processor" in content:
            content["image_processor"] = content["image_processor"] | of_images
        contents[file] = content
    if (file := folder / "preprocessor_config.json").is_file():  # as released
        contents[file] = read_json(file, "save the processor again") | of_images
    if contents:
        entries |= {PROCESSOR, IMAGE_PROCESSOR}
    return contents


def _tokenizer_file(folder: Path, entries: set[str]) -> dict[Path, dict[str, Any]]:
    """The file that describes a tokenizer of this package, with `auto_map`; none if it is another one."""
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    content = read_json(file, "save the tokenizer again")
    if content.get("tokenizer_class") not in TOKENIZER_NAMES:
        return {}
    entries.add(TOKENIZER)
    return {file: content | {"auto_map": {"AutoTokenizer": [None, _flat(TOKENIZER_CLASS)]}}}


def _flat(reference: Reference) -> str:
    module, name = reference
    return f"{flat_name(module)}.{name}"


def _flat_sources(entries: set[str]) -> dict[str, str]:
    """Rewritten source by module name, of the entries and of everything of this package that they import."""
    sources: dict[str, str] = {}
    waiting = [*sorted(entries), LAYOUT]
    while waiting:
        module = waiting.pop()
        if module in sources:
            continue
        sources[module], needed = _flatten(module)
        waiting += needed
    # At the end of what Transformers imports, where all that the layout needs has been defined.
    for module in entries & {TEXT_MODEL, MULTIMODAL_MODEL}:
        sources[module] += EPILOGUE.format(layout=flat_name(LAYOUT))
    return sources


def _flatten(module: str) -> tuple[str, list[str]]:
    """The source of one module with flat imports and its own operators, and the modules that it imports."""
    path = _source_file(module)
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    needed: list[str] = []
    imports = sorted(_imports(ast.parse(text)), key=lambda node: node.lineno)
    # From the last to the first, so that line numbers stay true.
    for node in reversed(imports):
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            imported = str(node.module)
            modules = {alias: f"{imported}.{alias.name}" for alias in node.names}
            modules = {alias: module for alias, module in modules.items() if _is_module(module)}
            needed += modules.values()
            if len(modules) < len(node.names):
                needed.append(imported)
            if modules:
                lines[first:last] = _rewritten(node, imported, modules)
            else:
                lines[first] = lines[first].replace(imported, f".{flat_name(imported)}", 1)
        elif not _is_always_there(node):
            # Transformers refuses to load a file that imports, outside of `try`, a package that is not installed.
            indent = " " * node.col_offset
            body = "".join("    " + line for line in lines[first:last])
            lines[first:last] = [f"{indent}try:\n{body}{indent}except ImportError:\n{indent}    raise\n"]
    if OPERATOR_NAME.search(text):
        first = next(node.lineno for node in imports if getattr(node, "module", None) != "__future__") - 1
        lines.insert(first, f"from .{NAMESPACE_MODULE} import OPERATORS\n")
        lines = [OPERATOR_NAME.sub(r'f"{OPERATORS}::\1"', line) for line in lines]
    return "".join(lines), needed


def _rewritten(node: ast.ImportFrom, imported: str, modules: dict[ast.alias, str]) -> list[str]:
    """Lines for an import of modules, maybe of names beside them."""
    indent = " " * node.col_offset
    lines = []
    for alias, module in modules.items():
        # Transformers finds the files it must copy by the first form only.
        lines.append(f"{indent}from .{flat_name(module)} import __name__ as _\n")
        lines.append(f"{indent}from . import {flat_name(module)} as {alias.asname or alias.name}\n")
    if names := [ast.unparse(alias) for alias in node.names if alias not in modules]:
        lines.append(f"{indent}from .{flat_name(imported)} import {', '.join(names)}\n")
    return lines


def _imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements anywhere but in a `try`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, ast.Try):
            yield from _imports(node)


def _is_always_there(node: ast.Import | ast.ImportFrom) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
    return all(name.split(".")[0] in ALWAYS_THERE for name in names)


def _source_file(module: str) -> Path:
    path = ROOT.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _is_module(module: str) -> bool:
    return _source_file(module).is_file()
