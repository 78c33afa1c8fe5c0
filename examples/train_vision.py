# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a nano multimodal model from scratch, pictures and text together from the first step.

python examples/train_vision.py                             # --max_steps 2000 for more than some minutes

A million parameters are trained to name photographs and to read words that are drawn on them; docs/vision.md has
figures. Arguments of `transformers.TrainingArguments` are accepted too. Writes the model, its processor, summary.json
and predictions.png.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.hf_argparser import HfArg

from deltalatent import (
    KimiK3Config,
    KimiK3ForConditionalGeneration,
    KimiK3ImageProcessor,
    KimiK3Processor,
    KimiK3VisionConfig,
    size_config,
)
from deltalatent.processing import MEDIA_TOKENS
from deltalatent.training import MuonAdamW, QuantileBalancingCallback, parameter_groups
from report import last_logged
from vision_data import Pictures
from vision_prompts import collate, draw, figures, predict

PATCH, WIDTH = 8, 96


@dataclass
class VisionArguments(TrainingArguments):
    """Defaults of the Trainer's flags that suit this job."""

    output_dir: str | None = HfArg(default="runs/vision", help="Where everything is written.")
    max_steps: int = HfArg(default=800, help="Optimizer steps.")
    per_device_train_batch_size: int = HfArg(default=32, help="Pictures per step.")
    learning_rate: float = HfArg(default=2e-3, help="Peak learning rate.")
    lr_scheduler_type: str = HfArg(default="cosine", help="Learning rate schedule.")
    warmup_steps: float = HfArg(default=40, help="Steps of linear warm-up.")
    weight_decay: float = HfArg(default=0.05, help="Weight decay of matrices.")
    logging_steps: float = HfArg(default=50, help="Steps between two lines of the log.")
    save_strategy: str = HfArg(default="no", help="When to write checkpoints.")
    remove_unused_columns: bool = HfArg(default=False, help="The collator takes examples as they are.")
    dataloader_pin_memory: bool = HfArg(default=False, help="Copies to a GPU are few here.")
    held_out_pictures: int = HfArg(default=480, help="How many held-out pictures are judged.")
    use_cpu: bool = HfArg(default=True, help="Train on the CPU.")


def make_processor() -> KimiK3Processor:
    """Letters as they are (bytes), and special tokens; patches of 8 x 8 pixels."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|pad|>", "<|end|>", *MEDIA_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>", padding_side="left"
    )
    return KimiK3Processor(KimiK3ImageProcessor(patch_size=PATCH), fast)


def make_model(processor: KimiK3Processor) -> KimiK3ForConditionalGeneration:
    """Three layers of text model, four blocks of tower."""
    tokenizer = processor.tokenizer
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = size_config(
        "nano", vocab_size=len(tokenizer), hidden_size=WIDTH, num_hidden_layers=3, intermediate_size=256,
        num_attention_heads=3, num_experts=8, num_experts_per_token=2, **special,
    )  # fmt: skip
    vision = KimiK3VisionConfig(
        patch_size=PATCH, init_pos_emb_height=6, init_pos_emb_width=8, vt_hidden_size=WIDTH, mm_hidden_size=WIDTH,
        vt_num_attention_heads=4, vt_num_hidden_layers=4, vt_intermediate_size=256, qkv_hidden_size=128,
        text_hidden_size=WIDTH, initializer_range=0.08,
    )  # fmt: skip
    media = processor.media_token_id
    config = KimiK3Config(text_config=text, vision_config=vision, media_placeholder_token_id=media, **special)
    return KimiK3ForConditionalGeneration(config)


def make_optimizer(model: KimiK3ForConditionalGeneration, args: VisionArguments) -> MuonAdamW:
    """Muon for the linear maps of the layers, of the tower and of the projector too; AdamW for everything else."""
    groups = parameter_groups(model, weight_decay=args.weight_decay)
    return MuonAdamW(groups, lr=args.learning_rate, update_rms=0.4)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Runs the whole job with the given flags (default: the command line's); returns what `summary.json` holds."""
    (args,) = HfArgumentParser(VisionArguments).parse_args_into_dataclasses(argv)
    set_seed(args.seed)
    output = Path(args.output_dir)
    processor = make_processor()
    model = make_model(processor)
    trainer = Trainer(
        model=model,
        args=args,
        optimizers=(make_optimizer(model, args), None),
        train_dataset=Pictures(args.max_steps * args.per_device_train_batch_size, held_out=False, seed=args.seed),
        data_collator=lambda examples: collate(examples, processor),
        callbacks=[QuantileBalancingCallback()],
    )
    started = time.process_time()
    trainer.train()
    minutes = (time.process_time() - started) / 60
    trainer.save_model()
    processor.save_pretrained(output)

    reloaded = AutoModelForImageTextToText.from_pretrained(output).to(args.device).eval()
    processor = AutoProcessor.from_pretrained(output)
    held_out = Pictures(args.held_out_pictures, held_out=True)
    examples = [held_out[i] for i in range(len(held_out))]
    answers = predict(reloaded, processor, examples)
    summary = {
        "parameters": model.num_parameters(),
        "pictures_seen": trainer.state.global_step * args.train_batch_size,
        "processor_minutes": round(minutes, 1),
        "training_loss": last_logged(trainer.state.log_history, "loss"),
        **figures(examples, answers),
    }
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    draw(examples, answers, output / "predictions.png")
    for key, value in summary.items():
        print(f"{key:27}{'-' if value is None else format(value, ',.4g')}")
    print(f"Wrote the model, its processor, summary.json and predictions.png to {output}.")
    return summary


if __name__ == "__main__":
    main()
