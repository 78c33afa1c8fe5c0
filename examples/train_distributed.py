# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains all weights of a saved model on several GPUs, spread in one of two ways.

Transformers' own engine, which also spreads experts and reads only a rank's share of the file:

torchrun --nproc-per-node 2 examples/train_distributed.py --model runs/quickstart --fsdp_size 2 --ep_size 2 --bf16

FSDP2 of accelerate, whose checkpoints can be resumed (`--resume_from_checkpoint runs/distributed/checkpoint-50`):

accelerate launch --config_file examples/fsdp2.yaml examples/train_distributed.py --model runs/quickstart --bf16

Every argument of `transformers.TrainingArguments` is accepted too.
"""

from dataclasses import dataclass

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithFlattening,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig
from transformers.hf_argparser import HfArg

import deltalatent  # noqa: F401  (registers the model with the Auto classes)
from continue_training import pieces
from corpus import load_documents
from deltalatent.training import MuonAdamW, QuantileBalancingCallback, keep_float32, parameter_groups


@dataclass
class Arguments(TrainingArguments):
    """Flags of this script, and defaults of the Trainer's flags."""

    model: str = HfArg(default="runs/quickstart", help="Folder or Hub name of a saved model with its tokenizer.")
    data: str | None = HfArg(default=None, help="Text file, folder or data set; default: the standard library.")
    max_bytes: int | None = HfArg(default=None, help="Use at most this many bytes of text.")
    max_length: int = HfArg(default=512, help="Longer documents are cut into pieces of so many tokens.")
    fsdp_size: int = HfArg(default=1, help="GPUs that share all parameters; 1 leaves that to accelerate, if it does.")
    ep_size: int = HfArg(default=1, help="GPUs among them that share the experts, whose tokens come to them.")

    output_dir: str | None = HfArg(default="runs/distributed", help="Where checkpoints and the model are written.")
    max_steps: int = HfArg(default=100, help="Optimizer steps; -1 to follow `--num_train_epochs`.")
    per_device_train_batch_size: int = HfArg(default=4, help="Pieces that are packed into one row, per GPU.")
    learning_rate: float = HfArg(default=5e-4, help="Peak learning rate.")
    warmup_steps: float = HfArg(default=10, help="Steps of linear warm-up.")
    weight_decay: float = HfArg(default=0.1, help="Weight decay of matrices.")
    logging_steps: float = HfArg(default=10, help="Steps between two lines of the log.")
    save_steps: float = HfArg(default=50, help="Steps between two checkpoints.")
    save_total_limit: int | None = HfArg(default=2, help="Number of checkpoints to keep.")


def main(argv: list[str] | None = None) -> list[float]:
    """Trains; returns the logged losses."""
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses(argv)
    layout = None
    if args.fsdp_size > 1:
        # The Trainer cannot resume a model that Transformers has spread: it saves the model alone.
        args.save_only_model = True
        layout = DistributedConfig(fsdp_size=args.fsdp_size, ep_size=args.ep_size, fsdp_mixed_precision=args.bf16)
    # Float32 weights whatever the file has: with --bf16 products run in bf16, but updates are not rounded away.
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, distributed_config=layout)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    with args.main_process_first():  # the others find what it has tokenized
        documents = load_documents(args.data, max_bytes=args.max_bytes)
        train = pieces(documents, tokenizer, args.max_length)

    trainer = Trainer(
        model,
        args,
        data_collator=DataCollatorWithFlattening(return_tensors="pt"),
        train_dataset=train,
        processing_class=tokenizer,
        callbacks=[QuantileBalancingCallback()],
    )
    keep_float32(trainer.accelerator, model)  # only FSDP2 of accelerate needs it
    groups = parameter_groups(model, weight_decay=args.weight_decay)
    trainer.optimizer = MuonAdamW(groups, lr=args.learning_rate)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if trainer.is_fsdp_enabled:  # its parts were for checkpoints; `save_model` would write nothing
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()  # one whole model in the released layout, however it is spread
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
