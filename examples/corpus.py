# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Text for the examples: documents from anywhere, a tokenizer trained on them, blocks of equal length.

Without `--data` the text is what every Python installation carries: the sources of the standard library and the
language reference behind `help()`. Nothing is downloaded.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import datasets
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"
TEXT_SUFFIXES = {".md", ".py", ".rst", ".txt"}
# Test data, near-copies of one table, and files that differ by machine would make the held-out loss say little.
SKIPPED_FOLDERS = {"__pycache__", "encodings", "idle_test", "pydoc_data", "site-packages", "test", "tests"}


def standard_library_texts() -> list[str]:
    """Returns the standard library's sources and the language reference's topics, one text per file or topic."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in root.rglob("*.py") if not SKIPPED_FOLDERS & set(path.relative_to(root).parts)]
    sources = [path.read_text("utf-8", "replace") for path in paths if not path.name.startswith("_sysconfigdata")]
    if not sources:
        raise ValueError(f"Expected Python sources below {root}, found none: pass a folder of text files as `--data`.")
    return [*sources, *topics.values()]


def _text_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES]


def load_documents(
    data: str | None, subset: str | None = None, column: str = "text", max_bytes: int | None = None
) -> datasets.Dataset:
    """Collects documents in a mixed order that is the same in every run.

    Args:
        data: `None` for the standard library; a text file or a folder of them (`TEXT_SUFFIXES`); else the name or path
            of anything `datasets.load_dataset` reads (its `train` split is used).
        subset: configuration name of that data set, if it has several.
        column: the column that holds the text of that data set's rows.
        max_bytes: stop before this much UTF-8 text is exceeded; `None` takes everything.

    Returns:
        Data set with the one column `text`, one row per document.

    Raises:
        ValueError: if the column is missing or fewer than two documents remain.
    """
    files = _text_files(Path(data)) if data is not None else []
    if data is not None and not files:
        documents = datasets.load_dataset(data, subset, split="train")
        if column not in documents.column_names:
            raise ValueError(f"`--text_column` must be one of {documents.column_names}, got {column!r}.")
        documents = documents.select_columns([column]).rename_column(column, "text").shuffle(seed=0)
    else:
        texts = [file.read_text("utf-8", "replace") for file in files] or standard_library_texts()
        # Ordered by digest: mixed, without duplicates, and independent of the file system's order.
        by_digest = {hashlib.sha256(text.encode("utf-8", "replace")).digest(): text for text in texts if text.strip()}
        documents = datasets.Dataset.from_dict({"text": [text for _, text in sorted(by_digest.items())]})
    if max_bytes is not None:
        documents = documents.select(range(sum(1 for _ in _until(documents, max_bytes))))
    if len(documents) < 2:
        raise ValueError(
            f"Expected at least two documents (one is held out), got {len(documents)}: pass more files with `--data`, "
            "or raise `--max_bytes`."
        )
    return documents


def _until(documents: datasets.Dataset, max_bytes: int) -> Iterator[str]:
    total = 0
    for row in documents:
        total += len(row["text"].encode("utf-8", "replace"))
        if total > max_bytes:
            return
        yield row["text"]


def train_tokenizer(
    documents: datasets.Dataset, vocab_size: int, max_bytes: int = 20_000_000
) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer (any text round-trips) on the first `max_bytes` of the documents.

    Token 0 ends a document, token 1 pads.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_until(documents, max_bytes), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def pack(
    documents: datasets.Dataset, tokenizer: PreTrainedTokenizerFast, block_size: int, num_proc: int | None = None
) -> datasets.Dataset:
    """Tokenizes, joins the documents with end-of-text tokens, and cuts blocks.

    Returns:
        Data set with columns `input_ids` and `labels`, each `[block_size]` integers per row. The remainder of every
        thousand documents that fills no block is dropped.
    """

    def blocks(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        rows = tokenizer(batch["text"], return_attention_mask=False)["input_ids"]
        ids = [token for row in rows for token in (*row, tokenizer.eos_token_id)]
        cut = [ids[i : i + block_size] for i in range(0, len(ids) - block_size + 1, block_size)]
        return {"input_ids": cut, "labels": cut}

    packed = documents.map(blocks, batched=True, remove_columns=["text"], num_proc=num_proc, desc="Tokenizing")
    if not len(packed):
        raise ValueError(f"The text fills no block of {block_size} tokens: lower `--block_size` or pass more text.")
    return packed


def unigram_loss(train: datasets.Dataset, held_out: datasets.Dataset, vocab_size: int) -> float:
    """Mean negative log-likelihood (nats per token) of the held-out labels under the training tokens' frequencies.

    Counts are smoothed by one. The first token of a block is left out, as a language model does not predict it either.
    """
    counts = np.ones(vocab_size)
    for batch in train.with_format("numpy").iter(batch_size=1000):
        counts += np.bincount(batch["input_ids"].ravel(), minlength=vocab_size)
    log_probabilities = np.log(counts / counts.sum())
    blocks = (block["input_ids"] for block in held_out.with_format("numpy"))
    return -float(np.mean([log_probabilities[block[1:]].mean() for block in blocks]))
