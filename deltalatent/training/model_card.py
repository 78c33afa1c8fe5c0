# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The model card of a folder to be pushed: what the model is, how it was trained, how its experts are balanced.

Everything in it is read from what a run leaves behind (`config.json`, `trainer_state.json`); nothing is made up, and
what is not known is not written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers.trainer import TRAINER_STATE_NAME

from deltalatent.configuration.configuration_kimi_k3 import KimiK3Config, KimiK3TextConfig
from deltalatent.configuration.sizes import count_parameters
from deltalatent.modeling.whole_files import write_whole

LARGE_FILES = ("*.safetensors", "*.pt", "*.pth", "*.bin", "*.png")
GIT_ATTRIBUTES = "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in LARGE_FILES)
"""What `.gitattributes` of a Hub repository says of large files."""

BALANCE_ROWS = {
    "expert_load/max_violation": "busiest expert / mean - 1, mean over layers",
    "expert_load/max_violation_worst": "the same in the worst layer",
    "expert_load/cv": "standard deviation of the load / mean",
    "expert_load/dead": "experts that no token of the step chose",
}

AUTO_CLASSES = {
    "image-text-to-text": "AutoModelForImageTextToText",
    "text-classification": "AutoModelForSequenceClassification",
    "text-generation": "AutoModelForCausalLM",
}
"""What a model does, in the Hub's words -> what loads it."""


def write_model_card(
    folder: str | os.PathLike,
    *,
    name: str | None = None,
    license: str | None = None,
    language: str | Sequence[str] | None = None,
    datasets: Sequence[str] = (),
    base_model: str | None = None,
    evaluation: Mapping[str, float] | None = None,
    notes: str = "",
) -> Path:
    """Write `README.md` and `.gitattributes` into a folder that a model was saved to, ready for `push_to_hub`.

    Args:
        folder: Holds `config.json`; `trainer_state.json` (`trainer.save_state()`) tells of the training.
        name: Title. Default: the name of the folder.
        license: Identifier on the Hub, e.g. `"apache-2.0"`.
        language: Code or codes, e.g. `"en"`.
        datasets: Names on the Hub of what it was trained on.
        base_model: Name on the Hub of the model that was fine-tuned.
        evaluation: Metric -> value, e.g. `{"held-out loss (nats per token)": 3.78}`. Default: the last `eval_loss` of
            the training.
        notes: Markdown in your own words, put first.

    Returns:
        The path of `README.md`.

    Raises:
        ValueError: The folder holds no configuration of this package.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} must hold a `config.json`, got none: save the model there first.")
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    is_composite = "text_config" in fields
    if is_composite:
        config: KimiK3Config | KimiK3TextConfig = KimiK3Config.from_pretrained(folder)
    else:
        config = KimiK3TextConfig.from_pretrained(folder)
    text_config = cast(KimiK3TextConfig, config.get_text_config())
    state_file = folder / TRAINER_STATE_NAME
    state = json.loads(state_file.read_text(encoding="utf-8")) if state_file.is_file() else {}
    history = state.get("log_history", [])
    title = name or folder.resolve().name
    is_classifier = any("SequenceClassification" in name for name in fields.get("architectures") or ())
    task = "image-text-to-text" if is_composite else "text-classification" if is_classifier else "text-generation"
    if evaluation is None:
        loss = _last(history, "eval_loss")
        metric = "held-out loss" if is_classifier else "held-out loss (nats per token)"
        evaluation = {} if loss is None else {metric: loss}

    data = ModelCardData(
        model_name=title if evaluation else None,  # with results the Hub wants the name of the model they are of
        library_name="transformers",
        pipeline_tag=task,
        tags=["deltalatent", config.model_type],
        license=license,
        language=[language] if isinstance(language, str) else list(language or []) or None,
        datasets=list(datasets) or None,
        base_model=base_model,
        eval_results=[
            EvalResult(
                task_type=task,
                dataset_type=datasets[0] if datasets else "unknown",
                dataset_name=datasets[0] if datasets else "held-out data of the training run",
                metric_type=metric.split(" ")[0],
                metric_name=metric,
                metric_value=value,
            )
            for metric, value in evaluation.items()
        ]
        or None,
    )
    sections = [
        f"# {title}",
        notes.strip(),
        _usage(AUTO_CLASSES[task]),
        "## Architecture",
        _table(("", ""), _architecture(text_config)),
        *_training(state, history),
        *_section("## Expert balance at the end of training", ("figure", "value"), _balance(history)),
        *_section("## Evaluation", ("metric", "value"), [(key, f"{value:.4g}") for key, value in evaluation.items()]),
    ]
    text = "\n\n".join(section for section in sections if section)
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n")
    readme = folder / "README.md"
    write_whole(readme, str(card))
    write_whole(folder / ".gitattributes", GIT_ATTRIBUTES)
    return readme


def _usage(auto_class: str) -> str:
    return f"""```python
import deltalatent  # registers the architecture with Transformers
from transformers import {auto_class}

model = {auto_class}.from_pretrained("this/repository", dtype="auto")
```"""


def _architecture(config: KimiK3TextConfig) -> list[tuple[str, str]]:
    count = count_parameters(config)
    kinds = config.layer_types
    kda, mla = kinds.count("linear_attention"), kinds.count("full_attention")
    rows = [
        ("parameters", f"{count.total:,} (text model)"),
        ("active per token", f"{count.active:,}"),
        ("layers", f"{len(kinds)}: {kda} delta attention (KDA), {mla} latent attention (MLA)"),
        ("width", f"{config.hidden_size}"),
        ("KDA heads", f"{config.linear_num_heads} of {config.linear_head_dim}"),
        ("MLA heads", f"{config.num_attention_heads}, latent of {config.kv_lora_rank} + {config.qk_rope_head_dim}"),
    ]
    if config.num_experts:
        width = config.routed_expert_hidden_size or config.hidden_size
        rows += [
            ("experts", f"{config.num_experts_per_token} of {config.num_experts}, {config.num_shared_experts} shared"),
            ("expert width", f"{config.moe_intermediate_size} (input {width})"),
        ]
    residual = config.attn_res_block_size
    rows += [
        ("residuals", "plain" if residual is None else f"attention over depth, blocks of {residual} layers"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("context", f"{config.max_position_embeddings:,} tokens"),
    ]
    return rows


def _training(state: Mapping[str, Any], history: Sequence[Mapping[str, float]]) -> list[str]:
    known = {
        "optimizer steps": state.get("global_step"),
        "epochs": state.get("epoch"),
        "tokens seen": state.get("num_input_tokens_seen") or None,
        "sequences per device and step": state.get("train_batch_size"),
        "last training loss": _last(history, "loss"),
        "last learning rate": _last(history, "learning_rate"),
    }
    rows = [(key, f"{value:,}" if isinstance(value, int) else f"{value:.4g}") for key, value in known.items() if value]
    return _section("## Training", ("", ""), rows)


def _balance(history: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    found = {meaning: _last(history, key) for key, meaning in BALANCE_ROWS.items()}
    return [(meaning, f"{value:.3g}") for meaning, value in found.items() if value is not None]


def _section(heading: str, columns: tuple[str, str], rows: Sequence[tuple[str, str]]) -> list[str]:
    return [heading, _table(columns, rows)] if rows else []


def _table(columns: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"| {left} | {right} |" for left, right in (columns, ("---", "---"), *rows))


def _last(history: Sequence[Mapping[str, float]], key: str) -> float | None:
    return next((log[key] for log in reversed(history) if key in log), None)
