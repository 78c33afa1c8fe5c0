# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a hybrid delta-attention + latent-attention + latent-MoE model from scratch, saves, reloads, and writes text.

python examples/train_quickstart.py                                 # nano, about six minutes on two CPU cores
python examples/train_quickstart.py --resume_from_checkpoint true   # goes on from the last whole checkpoint
python examples/train_quickstart.py --size small --device cuda --bf16 --data my_texts/ --max_steps 20000

Every argument of `transformers.TrainingArguments` is accepted too. On a CPU the run repeats bit for bit from its seed.
"""

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments
from transformers.hf_argparser import HfArg
from transformers.trainer_utils import enable_full_determinism, set_seed

from corpus import load_documents, pack, train_tokenizer, unigram_loss
from deltalatent import KimiK3ForCausalLM, size_config
from deltalatent.training import QuantileBalancingCallback, last_complete_checkpoint
from generate import continue_prompts
from report import last_logged, plot_curves, weights_sha256

PROMPTS = ["def read(self,", "The following statement"]
BALANCE_FIGURES = ["expert_load/max_violation", "expert_load/cv", "expert_load/dead"]
SHOWN_AS = {int: ",", float: ",.4g"}


@dataclass
class QuickstartArguments(TrainingArguments):
    """Flags of this script, and defaults of the Trainer's flags that suit a model of four million parameters."""

    size: str = HfArg(default="nano", help="Ready-made model size, see `deltalatent.size_config`.")
    device_type: str = HfArg(default="cpu", aliases="--device", help="Where to train: cpu, cuda, mps, ...")
    data: str | None = HfArg(
        default=None,
        help="Text file, folder of text files, or any text data set that `datasets.load_dataset` reads. "
        "Default: the sources and the language reference of this Python's standard library.",
    )
    data_subset: str | None = HfArg(default=None, help="Configuration name of the data set, if it has several.")
    text_column: str = HfArg(default="text", help="Column of the data set that holds the text.")
    max_bytes: int | None = HfArg(default=None, help="Use at most this many bytes of text. Default: all of it.")
    held_out_fraction: float = HfArg(default=0.015, help="Fraction of the documents kept for the held-out loss.")
    tokenizer: str | None = HfArg(default=None, help="Name or path of a tokenizer. Default: train one on the text.")
    vocab_size: int = HfArg(default=1024, help="Vocabulary size of the tokenizer that is trained.")
    block_size: int = HfArg(default=256, help="Tokens per training sequence.")
    num_proc: int | None = HfArg(default=None, help="Number of processes that tokenize.")

    output_dir: str | None = HfArg(default="runs/quickstart", help="Where checkpoints, model and report are written.")
    max_steps: int = HfArg(default=400, help="Optimizer steps; -1 to follow `--num_train_epochs`.")
    per_device_train_batch_size: int = HfArg(default=4, help="Sequences per device and step.")
    learning_rate: float = HfArg(default=4e-3, help="Peak learning rate.")
    lr_scheduler_type: str = HfArg(default="cosine", help="Learning rate schedule.")
    warmup_steps: float = HfArg(default=20, help="Steps of linear warm-up, or, below 1, a fraction of all steps.")
    weight_decay: float = HfArg(default=0.1, help="Weight decay of AdamW.")
    adam_beta2: float = HfArg(default=0.95, help="Second beta of AdamW.")
    logging_steps: float = HfArg(default=10, help="Steps between two lines of the log.")
    eval_strategy: str = HfArg(default="steps", help="When to measure the held-out loss: no, steps or epoch.")
    eval_steps: float | None = HfArg(default=100, help="Steps between two measurements of the held-out loss.")
    save_steps: float = HfArg(default=200, help="Steps between two checkpoints.")
    save_total_limit: int | None = HfArg(default=2, help="Number of checkpoints to keep.")
    include_num_input_tokens_seen: bool = HfArg(default=True, help="Count tokens, for the speed.")

    def __post_init__(self) -> None:
        self.use_cpu = self.device_type == "cpu"
        if self.use_cpu:
            # Costs little on a CPU; on an accelerator ask for it with --full_determinism.
            self.full_determinism, self.dataloader_pin_memory = True, False
        super().__post_init__()
        if self.device.type != self.device_type:
            raise ValueError(f"`--device {self.device_type}` is not available: pass `--device {self.device.type}`.")


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Runs the whole job with the given flags (default: the command line's); returns what `summary.json` holds."""
    (args,) = HfArgumentParser(QuickstartArguments).parse_args_into_dataclasses(argv)
    (enable_full_determinism if args.full_determinism else set_seed)(args.seed)
    output = Path(args.output_dir)

    # The documents come in a mixed order; whole documents are held out, so that no text is on both sides.
    documents = load_documents(args.data, args.data_subset, args.text_column, args.max_bytes)
    split = documents.train_test_split(test_size=args.held_out_fraction, shuffle=False)
    if args.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    else:
        tokenizer = train_tokenizer(split["train"], args.vocab_size)
    train, held_out = (pack(split[side], tokenizer, args.block_size, args.num_proc) for side in ("train", "test"))

    special_tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model = KimiK3ForCausalLM(size_config(args.size, vocab_size=len(tokenizer), **special_tokens))
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        callbacks=[QuantileBalancingCallback()],
    )
    if trainer.is_world_process_zero():
        print(
            f"{len(documents)} documents, {len(train) * args.block_size:,} tokens to train on and "
            f"{len(held_out) * args.block_size:,} held out; `{args.size}`, {model.num_parameters():,} parameters."
        )
    resume = args.resume_from_checkpoint
    if resume and resume.lower() == "true":
        resume = last_complete_checkpoint(output)  # a run that was killed may have left half a checkpoint
    trainer.train(resume_from_checkpoint=resume)
    held_out_loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    trainer.save_state()
    if not trainer.is_world_process_zero():
        return {}

    reloaded = AutoModelForCausalLM.from_pretrained(output).to(args.device)
    history = trainer.state.log_history
    summary = {
        "parameters": model.num_parameters(),
        "steps": trainer.state.global_step,
        "tokens_seen": trainer.state.num_input_tokens_seen,
        "tokens_per_second": last_logged(history, "train_tokens_per_second"),
        "training_loss": last_logged(history, "loss"),
        "held_out_loss": held_out_loss,
        "held_out_loss_unigram": unigram_loss(train, held_out, len(tokenizer)),
        **{key: last_logged(history, key) for key in BALANCE_FIGURES},
        "weights_sha256": weights_sha256(model),
        "weights_sha256_reloaded": weights_sha256(reloaded),
        "continuations": continue_prompts(
            reloaded, tokenizer, PROMPTS, args.seed, max_new_tokens=80, do_sample=True, temperature=0.7, top_p=0.9
        ),
    }
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    plot_curves(history, summary["held_out_loss_unigram"], output / "curves.png")
    for key, value in summary.items():
        if key != "continuations":
            print(f"{key:27}{format(value, SHOWN_AS.get(type(value), ''))}")
    for text in summary["continuations"]:
        print(f"\n{textwrap.indent(text, '    | ', lambda line: True)}")
    print(f"\nWrote the model, summary.json and curves.png to {output}.")
    return summary


if __name__ == "__main__":
    main()
