# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""A composite folder with its own code is usable where only torch, Transformers and Pillow are: images in, text out.

Token ids, pixel values and generated tokens are those of the package, to the last bit.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer, PreTrainedTokenizerFast

from deltalatent import KimiK3ForConditionalGeneration, KimiK3ImageProcessor, KimiK3Processor
from deltalatent.conversion.export_remote_code import export_remote_code
from deltalatent.processing.image_processing_kimi_k3 import KimiK3ImageProcessorPil
from deltalatent.processing.processing_kimi_k3 import MEDIA_TOKENS
from deltalatent.processing.tokenization_kimi_k3 import KimiK3Tokenizer
from tests.bare_environment import make_bare_environment, run_python
from tests.processing.test_tokenizer import ranks, write_released_files  # noqa: F401 - a fixture
from tests.testing_common import tiny_model
from tests.vision.vision_testing import PATCH, tiny_multimodal_model, tiny_tokenizer

READER = """
import importlib.util, json, sys
from safetensors.torch import save_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

if importlib.util.find_spec("deltalatent") is not None:
    sys.exit("the environment must not have deltalatent")

folder, image, target, numbers = sys.argv[1:]
processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
image_processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True).eval()

messages = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]}]
inputs = processor.apply_chat_template(
    messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
)
tokens = model.generate(**inputs, max_new_tokens=4, do_sample=False)
pixels = image_processor(image, return_tensors="pt")["pixel_values"]
save_file({**inputs, "tokens": tokens, "pixels": pixels}, numbers)
model.save_pretrained(target)
processor.save_pretrained(target)
classes = [f"{type(x).__module__.split('.')[0]}.{type(x).__name__}" for x in (processor, image_processor, tokenizer)]
ids = tokenizer("a b  c").input_ids
print(json.dumps({"classes": classes, "text": processor.batch_decode(tokens), "ids": ids}))
"""


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory) -> Path:
    return make_bare_environment(tmp_path_factory.mktemp("bare"), "pillow", "tiktoken")


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Path:
    """With an opacity, so large that it is shrunk, and no whole number of patches."""
    generator = np.random.default_rng(0)
    file = tmp_path_factory.mktemp("image") / "picture.png"
    Image.fromarray(generator.integers(0, 256, (45, 37, 4), dtype=np.uint8), "RGBA").save(file)
    return file


def save_composite(folder: Path, tokenizer: PreTrainedTokenizerFast) -> KimiK3Processor:
    """A tiny model for the ids of the tokenizer; returns a processor for both."""
    processor = KimiK3Processor(KimiK3ImageProcessor(patch_size=PATCH, in_patch_limit=40), tokenizer)
    model = tiny_multimodal_model(vocab_size=len(tokenizer))
    model.config.media_placeholder_token_id = processor.media_token_id
    model.save_pretrained(folder)
    return processor


@pytest.fixture
def saved(tmp_path) -> Path:
    """As Transformers saves it: one file for the processor, `tokenizer.json`."""
    tokenizer = KimiK3Tokenizer(
        tokenizer_object=tiny_tokenizer().backend_tokenizer, eos_token="[EOS]", pad_token="[PAD]"
    )
    folder = tmp_path / "saved"
    save_composite(folder, tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def released(tmp_path, ranks) -> Path:  # noqa: F811
    """As released: `preprocessor_config.json` and `tiktoken.model`, both with code of the release."""
    folder = tmp_path / "released"
    folder.mkdir()
    write_released_files(folder, ranks)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    first = len(ranks) + len(config["added_tokens_decoder"])
    config["added_tokens_decoder"] |= {
        str(first + i): {"content": token, "special": True} for i, token in enumerate(MEDIA_TOKENS)
    }
    file.write_text(json.dumps(config))
    processor = save_composite(folder, AutoTokenizer.from_pretrained(folder))
    settings = {"media_proc_cfg": processor.image_processor.to_dict()["media_proc_cfg"]}
    code = {"AutoImageProcessor": "kimi_k3_vision_processing.KimiK3VisionProcessor", "AutoProcessor": "kimi_k3.Other"}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | {"auto_map": code}))
    return folder


def read(python: Path, folder: Path, image: Path, workspace: Path) -> tuple[Path, dict, dict]:
    """Run a reader; where it saved, its numbers, and its report."""
    workspace.mkdir()
    target, numbers = workspace / "saved_again", workspace / "numbers.safetensors"
    printed = run_python(python, READER, folder, image, target, numbers, workspace=workspace)
    return target, load_file(numbers), json.loads(printed.splitlines()[-1])


@pytest.mark.parametrize(("layout", "round_trips"), [("saved", 2), ("released", 1)], ids=["saved", "released"])
def test_images_in_text_out_without_the_package(layout, round_trips, image, bare_python, tmp_path, request):
    folder = request.getfixturevalue(layout)
    processor = AutoProcessor.from_pretrained(folder)
    image_processor = AutoImageProcessor.from_pretrained(folder)
    model = KimiK3ForConditionalGeneration.from_pretrained(folder).eval()
    content = [{"type": "image", "image": str(image)}, {"type": "text", "text": "What is it?"}]
    expected = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    tokens = model.generate(**expected, max_new_tokens=4, do_sample=False)
    pixels = image_processor(str(image), return_tensors="pt")["pixel_values"]
    expected = {**expected, "tokens": tokens, "pixels": pixels}

    export_remote_code(folder)
    for number in range(round_trips):  # the second reads what the first saved
        folder, numbers, report = read(bare_python, folder, image, tmp_path / f"round trip {number}")
        torch.testing.assert_close(numbers, expected, rtol=0, atol=0)
        assert report["text"] == processor.batch_decode(tokens)
        assert report["ids"] == processor.tokenizer("a b  c").input_ids
        classes = ("KimiK3Processor", "KimiK3ImageProcessorPil", "KimiK3Tokenizer")
        assert report["classes"] == [f"transformers_modules.{name}" for name in classes]
    # What that environment saved is an ordinary folder of this package too.
    again = AutoProcessor.from_pretrained(folder)
    assert type(again) is KimiK3Processor
    assert type(again.image_processor) is type(image_processor)
    torch.testing.assert_close(
        again.image_processor(str(image), return_tensors="pt")["pixel_values"], pixels, rtol=0, atol=0
    )


@pytest.mark.parametrize("trust", [None, True])
def test_the_package_uses_its_own_classes(saved, trust):
    export_remote_code(saved)
    processor = AutoProcessor.from_pretrained(saved, trust_remote_code=trust)
    assert type(processor) is KimiK3Processor
    assert type(processor.image_processor) is KimiK3ImageProcessorPil
    assert type(AutoImageProcessor.from_pretrained(saved, trust_remote_code=trust)) is KimiK3ImageProcessorPil


def test_tokenizers_of_transformers_get_no_code(tmp_path):
    folder = tmp_path / "folder"
    save_composite(folder, tiny_tokenizer()).save_pretrained(folder)
    before = (folder / "tokenizer_config.json").read_bytes()
    written = {file.name for file in export_remote_code(folder)}
    assert (folder / "tokenizer_config.json").read_bytes() == before
    assert "processing_tokenization_kimi_k3.py" not in written and "processing_kimi_k3.py" in written


def test_text_models_get_no_image_processor(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    KimiK3ImageProcessor().save_pretrained(tmp_path)  # left over from a composite
    written = {file.name for file in export_remote_code(tmp_path)}
    assert not [name for name in written if name.startswith("processing_")]
    assert "auto_map" not in json.loads((tmp_path / "preprocessor_config.json").read_text())


def test_a_damaged_file_is_named(saved):
    (saved / "processor_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"processor_config.json` must be readable JSON"):
        export_remote_code(saved)
    assert not list(saved.glob("*.py"))
