# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels in a folder with its own code: found and used without this package, beside it, and beside those
of another folder.

Without a GPU they run in Triton's interpreter, in processes of their own.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deltalatent import KimiK3ForCausalLM
from deltalatent.conversion.export_remote_code import export_remote_code
from tests.bare_environment import make_bare_environment, run_python
from tests.testing_common import linear_attn_config, max_error, tiny_model

ROOT = Path(__file__).parents[2]
INPUT_IDS = torch.arange(6)[None]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="`triton` is not installed")

COMMON = """
import json, os, sys
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

if os.environ.get("TRITON_INTERPRET") == "1":
    # Loops up to a run-time bound: Triton 3.6 converts it in a way that NumPy 2.4 refuses.
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_scalar_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_scalar_index

def load(folder):
    return AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, kda_implementation="triton", experts_implementation="deltalatent"
    ).eval()

def logits(model):  # of the prompt's last token and of one more
    output = model.generate(
        torch.arange(6)[None], max_new_tokens=2, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    return torch.cat(output.logits)
"""

WITHOUT_PACKAGE = (
    COMMON
    + """
import contextlib, importlib.util

if importlib.util.find_spec("deltalatent") is not None:
    sys.exit("the environment must not have deltalatent")

folder, numbers = sys.argv[1:]
model = load(folder)
save_file({"logits": logits(model)}, numbers)
kernels = [(name, module.__file__) for name, module in sys.modules.items() if "kernels_" in name and "triton_" in name]

# What `auto` takes where there is a GPU. There is none: its tensors have shapes only, and cannot be computed with.
from torch._subclasses.fake_tensor import FakeTensorMode

package = type(model).__module__.rpartition(".")[0]
dispatch, kda = (sys.modules[f"{package}.{name}"] for name in ("kernels_dispatch", "kernels_kda"))
del os.environ["TRITON_INTERPRET"]
dispatch._probe_triton.cache_clear()
torch.cuda.get_device_capability = lambda device=None: (9, 0)
announced = []
dispatch._announce = lambda op, choice, device, passed_over: announced.append((op, choice, device.type))
with FakeTensorMode():
    q, k, v, g = (torch.empty(1, 8, 2, 16, device="cuda") for _ in range(4))
    beta, A_log, dt_bias = (torch.empty(shape, device="cuda") for shape in ((1, 8, 2), (2,), (32,)))
    with contextlib.suppress(Exception):
        kda.kda_chunk(q, k, v, g, beta, A_log, dt_bias)
torch.cuda.is_available = lambda: True
experts = model.get_correct_experts_implementation(None)
print(json.dumps({"kernels": kernels, "announced": announced, "experts": experts}))
"""
)

BESIDE_THE_PACKAGE = (
    COMMON
    + """
folder, changed, numbers = sys.argv[1:]
first = load(folder)
assert load(folder).__class__ is first.__class__
other = load(changed)  # what its attention reads has the opposite sign

import deltalatent

ours = load(folder)
modules = [type(model).__module__.rpartition(".")[0] for model in (first, other, ours)]
assert len(set(modules)) == 3 and modules[2] == "deltalatent.modeling", modules
results = {"other": logits(other), "first": logits(first), "ours": logits(ours)}
save_file(results, numbers)

def operators(package):
    loaded = [vars(module) for name, module in list(sys.modules.items()) if name.startswith(f"{package}.")]
    return [x._qualname for names in loaded for x in names.values() if isinstance(x, torch.library.CustomOpDef)]

print(json.dumps([operators(name) for name in (*modules[:2], "deltalatent")]))
"""
)


@pytest.fixture(scope="module")
def model() -> KimiK3ForCausalLM:
    """Of two layers, in which every kernel of a prompt and of a step has its part."""
    attention = linear_attn_config(kda_layers=[1], full_attn_layers=[2])
    return tiny_model(num_hidden_layers=2, linear_attn_config=attention)


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    model.save_pretrained(folder)
    export_remote_code(folder)
    return folder


@pytest.fixture(scope="module")
def without_package(exported, tmp_path_factory) -> tuple[torch.Tensor, dict]:
    """What a process computes and reports that has Triton, but not this package."""
    workspace = tmp_path_factory.mktemp("without_package")
    python = make_bare_environment(workspace / "environment", "triton")
    numbers = workspace / "numbers.safetensors"
    printed = run_python(python, WITHOUT_PACKAGE, exported, numbers, workspace=workspace, TRITON_INTERPRET="1")
    return load_file(numbers)["logits"], json.loads(printed.splitlines()[-1])


def test_kernels_of_the_folder_run_without_the_package(model, without_package):
    logits, report = without_package
    # The tolerance of float32 logits in the golden data's description.
    plain = model.generate(
        INPUT_IDS, max_new_tokens=2, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    assert max_error(logits, torch.cat(plain.logits)) < 1e-4
    names = {name.rpartition(".")[2] for name, _ in report["kernels"]}
    assert names >= {
        "kernels_attn_res_triton_kernels",
        "kernels_experts_triton_products",
        "kernels_gated_rms_norm_triton_kernels",
        "kernels_kda_triton_fwd",
        "kernels_kda_triton_recurrent",
        "kernels_latent_attention_triton_absorbed",
        "kernels_router_triton_kernels",
        "kernels_short_conv_triton_fwd",
        "kernels_situ_triton_kernels",
    }
    assert all(name.startswith("transformers_modules.model.") for name, _ in report["kernels"])
    assert all(Path(file).parts[-4:-2] == ("transformers_modules", "model") for _, file in report["kernels"])


def test_kernels_are_the_choice_of_auto_on_a_gpu(without_package):
    _, report = without_package
    assert report["announced"] == [["kda_chunk", "triton", "cuda"]]
    assert report["experts"] == "auto"


def test_copies_in_one_process_keep_their_own_kernels(exported, without_package, tmp_path):
    """One folder, another one of another version, and the package."""
    changed = Path(shutil.copytree(exported, tmp_path / "changed"))
    with (changed / "kernels_kda_triton_fwd.py").open("a") as file:
        file.write(
            "\n\n_forward = chunk_forward\n\n\n"
            "def chunk_forward(*args):\n    o, state = _forward(*args)\n    return -o, state\n"
        )
    numbers = tmp_path / "numbers.safetensors"
    printed = run_python(
        Path(sys.executable),
        BESIDE_THE_PACKAGE,
        exported,
        changed,
        numbers,
        workspace=tmp_path,
        TRITON_INTERPRET="1",
        PYTHONPATH=str(ROOT),
    )
    results = load_file(numbers)
    assert torch.equal(results["first"], without_package[0])
    assert torch.equal(results["ours"], results["first"])
    assert max_error(results["other"][:1], results["first"][:1]) > 1e-2
    # `torch.compile` calls kernels through operators, of which PyTorch has one table.
    names = json.loads(printed.splitlines()[-1])
    assert min(map(len, names)) >= 20
    assert len({*names[0], *names[1], *names[2]}) == sum(len({*copy}) for copy in names)
