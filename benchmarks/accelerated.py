# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What `deltalatent.kernels.accelerate` gives Transformers' own delta-attention models.

    python -m benchmarks.accelerated --out accelerated.json

Random models of the two architectures, as Transformers runs them without further packages and accelerated: a training
step (forward and backward) over one row, and one decoded token behind it. Medians, including the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.run import DTYPES, environment
from deltalatent.kernels import accelerate

REPEATS = 5


def make_model(model_type: str, width: int, heads: int, layers: int, device: torch.device, dtype: torch.dtype) -> Any:
    """One latent layer in four, heads of 128 channels, a few small experts: what is measured are the delta layers."""
    latent = "full_attention" if model_type == "kimi_linear" else "indexed_attention"
    types = ["linear_attention", "linear_attention", "linear_attention", latent] * (layers // 4)
    fields: dict[str, Any] = {
        "vocab_size": 1024,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "moe_intermediate_size": width // 2,
        "num_hidden_layers": layers,
        "layer_types": types,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": 128,
        "v_head_dim": 64,
        "qk_nope_head_dim": 64,
        "num_experts_per_tok": 2,
        "linear_head_dim": 128,
        "linear_num_heads": heads,
        "mlp_layer_types": ["dense"] * layers,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    if model_type == "kimi_linear":
        config = transformers.KimiLinearConfig(num_local_experts=4, qk_rope_head_dim=32, **fields)
        model = transformers.KimiLinearForCausalLM(config)
    else:
        text = transformers.Glm5NextTextConfig(
            n_routed_experts=4,
            q_lora_rank=128,
            indexer_types=["full"] * layers,
            hc_mult=2,
            **fields,
        )
        vision = transformers.Glm5NextVisionConfig(
            depth=1, hidden_size=16, num_heads=2, out_hidden_size=width, intermediate_size=16
        )
        model = transformers.Glm5NextForConditionalGeneration(
            transformers.Glm5NextConfig(text_config=text, vision_config=vision)
        )
    return model.to(device=device, dtype=dtype)


def median_ms(call: Callable[[], Any], device: torch.device) -> float:
    """Median wall time of a call that has been made before, with the device idle at both ends."""
    times = []
    call()
    for _ in range(REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def measure(model: Any, tokens: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of a training step over `tokens` tokens and of one decoded token."""
    ids = torch.randint(2, 1000, (1, tokens), device=device)

    def train() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    result = {"train_ms": median_ms(train, device)}
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).cache
        result["decode_ms"] = median_ms(lambda: model(input_ids=ids[:, :1], cache=cache), device)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerated", description=__doc__.split("\n")[0])
    parser.add_argument("--model", action="append", choices=("kimi_linear", "glm5_next"), help="default: both")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens in the row (default: 4096)")
    parser.add_argument("--width", type=int, default=1024, help="hidden size (default: 1024)")
    parser.add_argument("--heads", type=int, default=8, help="heads (default: 8)")
    parser.add_argument("--layers", type=int, default=4, help="layers, a multiple of 4 (default: 4)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the model (default: bfloat16)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--out", type=Path, help="result file (default: only print)")
    options = parser.parse_args(arguments)
    # Installed, flash-linear-attention would be found and tuned for minutes: the comparison is with what comes along.
    sys.modules["fla"] = None  # type: ignore[assignment]
    device = torch.device(options.device)
    report: dict[str, Any] = {"environment": environment(device), "results": []}
    for model_type in options.model or ("glm5_next", "kimi_linear"):
        torch.manual_seed(0)
        shape = (options.width, options.heads, options.layers)
        model = make_model(model_type, *shape, device, DTYPES[options.dtype])
        record: dict[str, Any] = {"model": model_type, "tokens": options.tokens, "width": options.width}
        record |= {"heads": options.heads, "layers": options.layers}
        record["shipped"] = measure(model, options.tokens, device)
        record["accelerated"] = measure(accelerate(model), options.tokens, device)
        report["results"].append(record)
        print(json.dumps(record), flush=True)
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
