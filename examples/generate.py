# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Continues prompts with a saved model.

python examples/generate.py runs/quickstart "def close(self):" "The with statement"
python examples/generate.py runs/quickstart "import " --temperature 0 --stream
"""

import argparse
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

import deltalatent  # noqa: F401  (registers the model with the Auto classes)


def continue_prompts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], seed: int = 0, **arguments: Any
) -> list[str]:
    """Continues all prompts in one batch; returns each prompt with its continuation.

    Prompts of different length are padded on the left, which changes nothing in the result.

    Args:
        seed: seed of the sampling.
        **arguments: passed to `generate`, e.g. `max_new_tokens`, `do_sample`, `temperature`.
    """
    torch.manual_seed(seed)
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    tokens = model.eval().generate(**inputs, **arguments)
    return tokenizer.batch_decode(tokens, skip_special_tokens=True)


def main(argv: list[str] | None = None) -> list[str]:
    """Prints and returns each prompt with its continuation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub name of a saved model with its tokenizer")
    parser.add_argument("prompts", nargs="+", metavar="prompt", help="texts to continue, all in one batch")
    parser.add_argument("--max_new_tokens", type=int, default=100, help="longest continuation, in tokens")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 always takes the likeliest token")
    parser.add_argument("--top_p", type=float, default=0.9, help="sample from the likeliest tokens of this total mass")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the sampling")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ...")
    parser.add_argument("--dtype", default="auto", help="auto (as saved), float32, bfloat16")
    parser.add_argument("--stream", action="store_true", help="print tokens as they come (one prompt only)")
    flags = parser.parse_args(argv)
    if flags.stream and len(flags.prompts) > 1:
        parser.error(f"--stream takes one prompt, got {len(flags.prompts)}: leave --stream out or pass one prompt.")

    tokenizer = AutoTokenizer.from_pretrained(flags.model)
    model = AutoModelForCausalLM.from_pretrained(flags.model, dtype=flags.dtype).to(flags.device)
    sampling: dict[str, Any] = {"do_sample": False}
    if flags.temperature > 0:
        sampling = {"do_sample": True, "temperature": flags.temperature, "top_p": flags.top_p}
    if model.device.type == "cuda":
        sampling["cache_implementation"] = "static"  # steps are replayed from a CUDA graph
    streamer = TextStreamer(tokenizer, skip_special_tokens=True) if flags.stream else None
    texts = continue_prompts(
        model, tokenizer, flags.prompts, flags.seed, max_new_tokens=flags.max_new_tokens, streamer=streamer, **sampling
    )
    if not flags.stream:
        print("\n\n---\n\n".join(texts))
    return texts


if __name__ == "__main__":
    main()
