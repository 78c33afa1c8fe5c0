# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains one model three times, with quantile balancing, with the sign rule and with neither, and plots the loads.

python examples/compare_balancing.py                                                  # nano on a CPU
python examples/compare_balancing.py --num_experts 896 --top_k 16 --num_layers 4 --batch_size 16 --steps 50 \\
    --max_bytes 4000000

The three runs have the same initial weights and the same batches. Writes `balancing.json` and `balancing.png` into
`--output_dir`; docs/training.md shows those of the second command, about eleven minutes on one CPU core.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from corpus import load_documents, pack, train_tokenizer
from deltalatent import KimiK3ForCausalLM, KimiK3TextConfig, size_config
from deltalatent.training import (
    BalanceReport,
    balanced_routers,
    parameter_groups,
    sign_rule_next_bias,
    update_selection_bias,
)

RULES = ("quantile", "sign", "none")
SIGN_STEP = 1e-3  # arXiv 2408.15664
CURVES = {
    "max_violation": "max violation: busiest expert / mean - 1",
    "dead": "experts without a token",
    "loss": "loss",
}


def balance(model: KimiK3ForCausalLM, rule: str) -> BalanceReport:
    """Ends a step: reads the loads of all routers and writes the selection bias that `rule` gives."""
    routers = [router for _, router in balanced_routers(model)]
    old = [router.e_score_correction_bias.clone() for router in routers]
    report = update_selection_bias(model)
    if rule != "quantile":
        for router, bias, loads in zip(routers, old, report.loads, strict=True):
            bias = sign_rule_next_bias(bias, loads, SIGN_STEP) if rule == "sign" else bias
            router.e_score_correction_bias.copy_(bias)
    return report


def train(config: KimiK3TextConfig, blocks: Tensor, rule: str, flags: argparse.Namespace) -> dict[str, list[float]]:
    """Trains a new model on blocks of tokens, int64 [N, block_size], each of them at most once.

    Returns:
        For each optimizer step the loss before it and, under the bias in force in it, the max violation (mean over
        layers) and the number of experts without a token (sum over layers).
    """
    torch.manual_seed(flags.seed)
    model = KimiK3ForCausalLM(config).to(flags.device).train()
    for _, router in balanced_routers(model):
        router.balance.has_reader = True
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=flags.learning_rate, betas=(0.9, 0.95))
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    history: list[Tensor] = []
    for batch in blocks[: flags.steps * flags.batch_size].split(flags.batch_size):
        ids = batch.to(flags.device)
        with torch.autocast(flags.device, torch.bfloat16, enabled=flags.device != "cpu"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        summary = balance(model, rule).summary()  # mean and worst violation, variation, dead
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        warm_up.step()
        history.append(torch.stack((summary[0], summary[3], loss.detach())))
        if len(history) % 20 == 0:
            print(f"{rule:9}step {len(history):4}  violation {summary[0]:7.3f}  loss {loss:.3f}", flush=True)
    return dict(zip(CURVES, torch.stack(history).T.tolist(), strict=True))


def plot(runs: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draws the curves of all runs into a PNG file."""
    figure = Figure(figsize=(15, 4), layout="constrained")
    for axes, (key, label) in zip(figure.subplots(1, len(CURVES)), CURVES.items(), strict=True):
        for rule, curves in runs.items():
            axes.plot(range(1, len(curves[key]) + 1), curves[key], label=rule)
        axes.set(title=label, xlabel="optimizer step", yscale="log" if key == "max_violation" else "linear")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Runs the comparison; returns what `balancing.json` holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="nano", help="ready-made model size")
    parser.add_argument("--num_layers", type=int, help="layers of the model, if not those of the size")
    parser.add_argument("--num_experts", type=int, help="routed experts per layer, if not those of the size")
    parser.add_argument("--top_k", type=int, help="experts per token, if not those of the size")
    parser.add_argument("--data", help="text file, folder or data set; default: the standard library")
    parser.add_argument("--max_bytes", type=int, help="use at most this many bytes of text")
    parser.add_argument("--vocab_size", type=int, default=1024, help="of the tokenizer that is trained")
    parser.add_argument("--block_size", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--batch_size", type=int, default=8, help="sequences per step")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each run")
    parser.add_argument("--learning_rate", type=float, default=2e-3, help="after 20 steps of warm-up")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ...")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights")
    parser.add_argument("--output_dir", default="runs/balancing", help="where the two files go")
    flags = parser.parse_args(argv)

    documents = load_documents(flags.data, max_bytes=flags.max_bytes)
    tokenizer = train_tokenizer(documents, flags.vocab_size)
    blocks = torch.tensor(pack(documents, tokenizer, flags.block_size).shuffle(seed=0)["input_ids"][:])
    fields = {
        "num_hidden_layers": flags.num_layers,
        "num_experts": flags.num_experts,
        "num_experts_per_token": flags.top_k,
    }
    overrides = {name: value for name, value in fields.items() if value is not None}
    config = size_config(flags.size, vocab_size=len(tokenizer), eos_token_id=0, pad_token_id=1, **overrides)

    output = Path(flags.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    runs: dict[str, dict[str, list[float]]] = {}
    result = {"flags": vars(flags), "runs": runs}
    for rule in RULES:
        runs[rule] = train(config, blocks, rule, flags)
        (output / "balancing.json").write_text(json.dumps(result) + "\n")  # what is done, should a later run be cut
    plot(runs, output / "balancing.png")
    for rule, curves in runs.items():
        figures = [f"{key} {curves[key][-1]:.3f}" for key in CURVES]
        within = next((str(step) for step, value in enumerate(curves["max_violation"], 1) if value < 1), "no")
        print(f"{rule:9}{', '.join(figures)}; violation below 1 at step {within}")
    return result


if __name__ == "__main__":
    main()
