# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimisation with TRL: adapters learn, the model without them is the reference.

python examples/dpo_trl.py --model runs/sft_trl
python examples/dpo_trl.py --model some/model --data some/preferences --bf16 true

The first command, after the two that its model comes from, on a CPU:

    Held out: 97% prefer the chosen answer, by 0.460 on average. The adapter is in runs/dpo_trl.

Needs `pip install trl`. Every argument of `trl.DPOConfig` is accepted too.
"""

from dataclasses import dataclass

from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from transformers.hf_argparser import HfArg
from trl import DPOConfig, DPOTrainer

from deltalatent import lora_targets
from deltalatent.training import freeze_selection_bias
from instructions import CHAT_TEMPLATE, load_preferences


@dataclass
class Arguments(DPOConfig):
    """Flags of this script, and defaults of TRL's flags."""

    model: str = HfArg(default="runs/sft_trl", help="Folder or Hub name of a saved model with its tokenizer.")
    data: str | None = HfArg(
        default=None,
        help="Data set with columns `prompt`, `chosen`, `rejected`; default: documentation strings of the standard "
        "library, in order and out of order.",
    )
    limit: int | None = HfArg(default=None, help="Use at most so many preferences.")
    rank: int = HfArg(default=8, help="Rank of the adapters.")

    max_length: int | None = HfArg(default=256, help="Longest prompt with answer, in tokens.")
    bf16: bool | None = HfArg(default=False, help="Products in bf16; the adapters stay float32.")
    gradient_checkpointing: bool = HfArg(default=False, help="Recompute activations: less memory, more time.")
    output_dir: str | None = HfArg(default="runs/dpo_trl", help="Where the adapter is written.")
    max_steps: int = HfArg(default=60, help="Optimizer steps; -1 to follow `--num_train_epochs`.")
    per_device_train_batch_size: int = HfArg(default=4, help="Preferences per device and step.")
    learning_rate: float = HfArg(default=5e-4, help="Peak learning rate.")
    warmup_steps: float = HfArg(default=5, help="Steps of linear warm-up.")
    save_strategy: str = HfArg(default="no", help="Checkpoints: no, steps or epoch.")


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Trains; returns, on held-out preferences, the share with the chosen answer ahead, and the mean margin."""
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.chat_template = tokenizer.chat_template or CHAT_TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(args.model)
    freeze_selection_bias(model)  # policy and reference are the same model, and so must be their routing
    targets = lora_targets(model.config, experts=False)
    split = load_preferences(args.data, args.limit).train_test_split(test_size=0.05, shuffle=False)
    trainer = DPOTrainer(
        model,
        args=args,
        train_dataset=split["train"],
        eval_dataset=split["test"],
        processing_class=tokenizer,
        peft_config=LoraConfig(r=args.rank, lora_alpha=2 * args.rank, task_type="CAUSAL_LM", **targets),
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    result = {key: metrics[f"eval_rewards/{key}"] for key in ("accuracies", "margins")}
    if trainer.is_world_process_zero():
        print(
            f"Held out: {result['accuracies']:.0%} prefer the chosen answer, by {result['margins']:.3f} on average. "
            f"The adapter is in {args.output_dir}."
        )
    return result


if __name__ == "__main__":
    main()
