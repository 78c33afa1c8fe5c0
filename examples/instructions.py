# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Instructions for the fine-tuning examples: questions and answers from Python's own documentation strings.

"What does `json.dumps` do?" is answered by the first paragraph of the function's documentation. Nothing is downloaded.
"""

import ast
import functools
import inspect
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import datasets
from transformers import PreTrainedTokenizerBase

# `generation` marks what the assistant says: losses on answers alone are computed from it. The prompt ends with a line
# break, which no tokenizer of ours merges with a word: tokens of the prompt must not depend on the answer.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{%- else %}{{ 'Question: ' + message['content'] + '\\nAnswer:\\n' }}{%- endif %}"
    "{%- endfor %}"
)


def _documented(source: str) -> Iterator[tuple[str, str]]:
    """Names of public functions and classes of a module, each with the first paragraph of its documentation."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            paragraph = inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n")[0]
            if paragraph and not paragraph.startswith(">>>"):
                yield node.name, " ".join(paragraph.split())


@functools.cache
def standard_library_questions() -> tuple[tuple[str, str], ...]:
    """Questions and answers about the standard library, in a mixed order that is the same in every run."""
    root = Path(sysconfig.get_paths()["stdlib"])
    pairs = []
    for path in sorted([*root.glob("*.py"), *root.glob("[a-z]*/*.py")]):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        if not {"site-packages", "test", "idlelib", "lib2to3"} & set(parts) and "._" not in f".{module}":
            for name, answer in _documented(path.read_text("utf-8", "replace")):
                pairs.append((f"What does `{module}.{name}` do?", answer))
    random.Random(0).shuffle(pairs)
    return tuple(pairs)


def load_instructions(data: str | None = None, limit: int | None = None) -> datasets.Dataset:
    """Conversations.

    Args:
        data: `None` for the standard library; else anything `datasets.load_dataset` reads that has a column `messages`
            (lists of `{"role": ..., "content": ...}`) in its `train` split.
        limit: Take at most so many.

    Raises:
        ValueError: if there is no such column.
    """
    if data is None:
        rows = [
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            for question, answer in standard_library_questions()
        ]
        conversations = datasets.Dataset.from_list(rows)
    else:
        conversations = datasets.load_dataset(data, split="train")
        if "messages" not in conversations.column_names:
            raise ValueError(f"`--data` must have a column `messages`, got {conversations.column_names}.")
        conversations = conversations.select_columns(["messages"])
    return conversations if limit is None else conversations.select(range(min(limit, len(conversations))))


def load_preferences(data: str | None = None, limit: int | None = None) -> datasets.Dataset:
    """Preferences: columns `prompt`, `chosen` and `rejected`, each a list of messages.

    Without `data` the rejected answer has the words of the right one in another order; else as in `load_instructions`,
    with these three columns.
    """
    if data is not None:
        preferences = datasets.load_dataset(data, split="train")
        if missing := {"prompt", "chosen", "rejected"} - set(preferences.column_names):
            raise ValueError(f"`--data` lacks the columns {sorted(missing)}, got {preferences.column_names}.")
        preferences = preferences.select_columns(["prompt", "chosen", "rejected"])
    else:
        rng, rows = random.Random(0), []
        for question, answer in standard_library_questions():
            words = answer.split()
            rng.shuffle(words)
            if (other := " ".join(words)) != answer:
                prompt, chosen, rejected = (
                    [{"role": role, "content": content}]
                    for role, content in (("user", question), ("assistant", answer), ("assistant", other))
                )
                rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
        preferences = datasets.Dataset.from_list(rows)
    return preferences if limit is None else preferences.select(range(min(limit, len(preferences))))


def tokenize(conversations: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> datasets.Dataset:
    """Columns `input_ids` and `labels`, cut to `max_length`; labels are -100 wherever the assistant does not speak."""

    def row(example: dict) -> dict[str, list[int]]:
        encoded = tokenizer.apply_chat_template(
            example["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, spoken = encoded["input_ids"][:max_length], encoded["assistant_masks"][:max_length]
        return {
            "input_ids": ids,
            "labels": [token if is_answer else -100 for token, is_answer in zip(ids, spoken, strict=True)],
        }

    return conversations.map(row, remove_columns=conversations.column_names, desc="Tokenizing")
