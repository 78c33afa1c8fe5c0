# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains all weights of a saved model further on other text, documents packed without padding.

python examples/continue_training.py --model runs/quickstart --data my_texts/
torchrun --nproc_per_node 2 examples/continue_training.py --model runs/quickstart --data my_texts/ --bf16

After `make quickstart` (a `nano` of 4.2 M parameters), on a CPU, with `--data` the first 2 MB of SymPy's sources:

    Held-out loss: 4.413 before, 3.644 after. The model is in runs/continued.

Every argument of `transformers.TrainingArguments` is accepted too.
"""

from dataclasses import dataclass

import datasets
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithFlattening,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)
from transformers.hf_argparser import HfArg

import deltalatent  # noqa: F401  (registers the model with the Auto classes)
from corpus import load_documents
from deltalatent.training import QuantileBalancingCallback, last_complete_checkpoint, parameter_groups


@dataclass
class Arguments(TrainingArguments):
    """Flags of this script, and defaults of the Trainer's flags."""

    model: str = HfArg(default="runs/quickstart", help="Folder or Hub name of a saved model with its tokenizer.")
    data: str | None = HfArg(default=None, help="Text file, folder or data set; default: the standard library.")
    text_column: str = HfArg(default="text", help="Column of the data set that holds the text.")
    max_bytes: int | None = HfArg(default=None, help="Use at most this many bytes of text.")
    held_out_fraction: float = HfArg(default=0.02, help="Fraction of the documents kept for the held-out loss.")
    max_length: int = HfArg(default=512, help="Longer documents are cut into pieces of so many tokens.")

    output_dir: str | None = HfArg(default="runs/continued", help="Where checkpoints and the model are written.")
    max_steps: int = HfArg(default=60, help="Optimizer steps; -1 to follow `--num_train_epochs`.")
    per_device_train_batch_size: int = HfArg(default=4, help="Pieces that are packed into one row.")
    learning_rate: float = HfArg(default=5e-4, help="Peak learning rate, lower than that of the first training.")
    lr_scheduler_type: str = HfArg(default="cosine", help="Learning rate schedule.")
    warmup_steps: float = HfArg(default=10, help="Steps of linear warm-up.")
    weight_decay: float = HfArg(default=0.1, help="Weight decay of matrices.")
    logging_steps: float = HfArg(default=10, help="Steps between two lines of the log.")
    save_steps: float = HfArg(default=50, help="Steps between two checkpoints.")
    save_total_limit: int | None = HfArg(default=2, help="Number of checkpoints to keep.")


def pieces(documents: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> datasets.Dataset:
    """Tokenizes documents, each ended by an end-of-text token, and cuts them; no piece has tokens of two documents."""

    def cut(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        rows = [[*row, tokenizer.eos_token_id] for row in tokenizer(batch["text"])["input_ids"]]
        parts = [row[i : i + max_length] for row in rows for i in range(0, len(row), max_length)]
        return {"input_ids": parts, "labels": parts}

    return documents.map(cut, batched=True, remove_columns=documents.column_names, desc="Tokenizing")


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Trains; returns the held-out losses before and after."""
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    # Float32 weights whatever the file has: with --bf16 products run in bf16, but updates are not rounded away.
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    documents = load_documents(args.data, column=args.text_column, max_bytes=args.max_bytes)
    split = documents.train_test_split(test_size=args.held_out_fraction, shuffle=False)
    train, held_out = (pieces(split[side], tokenizer, args.max_length) for side in ("train", "test"))

    groups = parameter_groups(model, weight_decay=args.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95))
    trainer = Trainer(
        model,
        args,
        # Joins the pieces of a batch in one row; positions that restart keep them apart.
        data_collator=DataCollatorWithFlattening(return_tensors="pt"),
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        optimizers=(optimizer, None),
        callbacks=[QuantileBalancingCallback()],
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(args.output_dir))
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"Held-out loss: {before:.3f} before, {after:.3f} after. The model is in {args.output_dir}.")
    return {"before": before, "after": after}


if __name__ == "__main__":
    main()
