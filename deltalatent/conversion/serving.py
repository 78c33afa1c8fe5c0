# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Hands a model to servers that read the released composite layout, or says which field they cannot represent.

The contract, spelled out in `docs/serving.md`, was read off the converter and the runtime that llama.cpp ships for
this architecture (`conversion/kimi_k3.py`, `src/models/kimi-k3.cpp`, as in the source distribution of llama-cpp-python
0.3.36); `make test-serving` runs both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from deltalatent.configuration.configuration_kimi_k3 import KimiK3Config, KimiK3TextConfig
from deltalatent.conversion.checkpoint_folder import CheckpointFolder
from deltalatent.conversion.config_files import ARCHITECTURES
from deltalatent.conversion.converter import ConversionReport, convert
from deltalatent.conversion.layouts import Source, read_source, stored_in_float32
from deltalatent.modeling.checkpoint_errors import shortened

REQUIRED_VALUES: dict[str, tuple[Any, str]] = {
    "hidden_act": ("situ", "no other activation is implemented"),
    "moe_router_activation_func": ("sigmoid", "no other score is implemented"),
    "mla_use_nope": (True, "latent attention has no positions"),
    "use_full_rank_gate": (True, "the output gate of KDA is one matrix"),
    "num_expert_group": (1, "experts are chosen without groups"),
    "moe_layer_freq": (1, "all layers after the first dense ones have experts"),
    "tie_word_embeddings": (False, "the output head is a tensor of its own"),
}
"""Field -> what readers assume, and why."""


def serving_obstacles(config: KimiK3TextConfig) -> list[str]:
    """What readers of the released layout cannot represent: `"field=value (must be ...: why)"` each; none if empty."""
    found = [
        f"{name}={getattr(config, name)!r} (must be {value!r}: {why})"
        for name, (value, why) in REQUIRED_VALUES.items()
        if getattr(config, name) != value
    ]
    if config.linear_num_heads != config.num_attention_heads:
        found.append(
            f"linear_attn_config.num_heads={config.linear_num_heads} (must be num_attention_heads="
            f"{config.num_attention_heads}: one number of heads is read for both kinds of layers)"
        )
    for name in ("attn_res_block_size", "num_experts", "activation_situ_beta", "activation_situ_linear_beta"):
        if not getattr(config, name):
            found.append(f"{name}={getattr(config, name)!r} (must be set: the mechanism is always there)")
    if not {"linear_attention", "full_attention"} <= set(config.layer_types):
        found.append("linear_attn_config (must name layers of both kinds: each has a cache of its own)")
    return found


def check_serving(folder: str | Path) -> Source:
    """Compare a folder with what servers read: config keys, architecture, tensor names, shapes, dtypes, tokenizer.

    Returns:
        The checked checkpoint.

    Raises:
        ValueError: With everything that is wrong; tensors and fields are named.
    """
    folder = Path(folder)
    source = read_source(CheckpointFolder.open(folder))
    raw = source.folder.config
    wrong = []
    if source.kind != "composite" or raw.get("architectures") != [ARCHITECTURES["composite"]]:
        wrong.append(
            f"config.json: `model_type` must be {KimiK3Config.model_type!r} with `architectures` "
            f"[{ARCHITECTURES['composite']!r}], got {raw.get('model_type')!r} with {raw.get('architectures')!r}"
        )
    elif (inner := raw["text_config"].get("model_type")) != "kimi_linear":
        wrong.append(f"config.json: `text_config.model_type` must be 'kimi_linear', got {inner!r}")
    wrong += [f"config.json: {obstacle}" for obstacle in serving_obstacles(source.config)]
    wrong += _wrong_dtypes(source)
    wrong += _wrong_tokenizer(folder, source.config.vocab_size)
    if wrong:
        raise ValueError(f"{folder} must be a folder that servers read, got:\n- " + "\n- ".join(wrong))
    return source


def export_serving(
    source: str | Path,
    target: str | Path,
    *,
    experts: Literal["as-is", "bfloat16", "mxfp4"] = "as-is",
    vision_from: str | Path | None = None,
    progress: bool = False,
) -> ConversionReport:
    """Write the composite layout that servers read; the source is only read, the target appears when it is complete.

    Args:
        source: Folder with a model and its tokenizer.
        target: Folder to be made.
        experts: `"mxfp4"` packs the routed experts to four bits, as released.
        vision_from: Composite folder whose vision part completes a text model.
        progress: Show a progress bar.

    Raises:
        ValueError: Servers cannot represent the model (the fields are named), or the source is damaged.
    """
    checked = read_source(CheckpointFolder.open(source))
    if obstacles := serving_obstacles(checked.config):
        raise ValueError(
            f"{source} must be a model that servers can represent, got:\n- "
            + "\n- ".join(obstacles)
            + "\nThe model trains and runs with Transformers all the same."
        )
    if wrong := _wrong_tokenizer(Path(source), checked.config.vocab_size):
        raise ValueError(f"{source} must hold the model's tokenizer, got: {'; '.join(wrong)}")
    report = convert(source, target, to="composite", experts=experts, vision_from=vision_from, progress=progress)
    check_serving(target)
    return report


def _wrong_dtypes(source: Source) -> list[str]:
    """`read_source` has seen that packed tensors are bytes and the others floats; some must be float32."""
    wrong = [name for name, piece in source.text.items() if stored_in_float32(name) and piece.dtype != "F32"]
    return [f"tensors must be float32, got another dtype for {shortened(wrong)}"] if wrong else []


def _wrong_tokenizer(folder: Path, vocab_size: int) -> list[str]:
    """The tokenizer must be a byte-level BPE: `tokenizer.json`, or the released table of ranks."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        if (folder / "tiktoken.model").is_file():
            return []
        return ["no tokenizer.json: save the tokenizer into the folder (`tokenizer.save_pretrained`)"]
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        kind, ids = content["model"]["type"], [*content["model"]["vocab"].values()]
        ids += [token["id"] for token in content["added_tokens"]]
    except (ValueError, KeyError, AttributeError) as error:
        return [f"tokenizer.json must hold a byte-level BPE, got {error!r}"]
    wrong = []
    if kind != "BPE" or '"ByteLevel"' not in json.dumps(content.get("pre_tokenizer")):
        wrong.append(f"tokenizer.json must hold a byte-level BPE, got a {kind} model")
    if max(ids) >= vocab_size:
        wrong.append(f"tokenizer.json must have ids below vocab_size={vocab_size}, got {max(ids)}")
    return wrong
