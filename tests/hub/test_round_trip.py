# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""What is pushed comes back the same: model, sharded model, tokenizer, adapter, folder with card and code."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from huggingface_hub import HfApi
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    modeling_utils,
)

from deltalatent import KimiK3ForCausalLM, KimiK3ImageProcessor, KimiK3Processor, lora_targets
from deltalatent.processing.chat_template import IMAGE_PLACEHOLDER, STRUCTURE_TOKENS
from deltalatent.processing.tokenization_kimi_k3 import KimiK3Tokenizer
from deltalatent.training import write_model_card
from tests.fake_hub import fake_hub  # noqa: F401 - a fixture
from tests.testing_common import tiny_model
from tests.vision.vision_testing import tiny_multimodal_config, tiny_tokenizer

REPOSITORY = "someone/tiny-hybrid"
INPUT_IDS = torch.arange(24).view(2, 12)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(INPUT_IDS).logits


def test_model(fake_hub):  # noqa: F811
    model = tiny_model()
    model.push_to_hub(REPOSITORY, commit_message="Upload model")
    again = AutoModelForCausalLM.from_pretrained(REPOSITORY)
    assert type(again) is KimiK3ForCausalLM
    assert torch.equal(logits(again), logits(model))
    assert AutoConfig.from_pretrained(REPOSITORY).layer_types == model.config.layer_types
    assert fake_hub.commits == [(REPOSITORY, "Upload model")]


def test_sharded_model(fake_hub):  # noqa: F811
    model = tiny_model()
    model.push_to_hub(REPOSITORY, max_shard_size="200KB")
    files = {file.name for file in fake_hub.snapshot(REPOSITORY).iterdir()}
    assert "model.safetensors.index.json" in files
    assert len([name for name in files if name.endswith(".safetensors")]) > 2
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(REPOSITORY)), logits(model))


@pytest.mark.parametrize("pushed", [False, True], ids=["saved", "pushed"])
def test_files_have_five_gigabytes_at_most(fake_hub, tmp_path, monkeypatch, pushed):  # noqa: F811
    sizes = []
    split = modeling_utils.split_torch_state_dict_into_shards

    def spy(state_dict, **kwargs):
        sizes.append(kwargs["max_shard_size"])
        return split(state_dict, **kwargs)

    monkeypatch.setattr(modeling_utils, "split_torch_state_dict_into_shards", spy)
    model = tiny_model()
    if pushed:
        model.push_to_hub(REPOSITORY)
    else:
        model.save_pretrained(tmp_path)
    assert sizes == ["5GB"]


def test_second_push_replaces_the_weights(fake_hub):  # noqa: F811
    first, second = tiny_model(), tiny_model()
    with torch.no_grad():
        second.lm_head.weight.mul_(2)
    first.push_to_hub(REPOSITORY)
    second.push_to_hub(REPOSITORY)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(REPOSITORY)), logits(second))


def test_tokenizer_with_chat_template(fake_hub):  # noqa: F811
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = KimiK3Tokenizer(tokenizer_object=backend, chat_template="{{ messages[0].content }}")
    tokenizer.add_special_tokens({"additional_special_tokens": list(STRUCTURE_TOKENS)})
    tokenizer.push_to_hub(REPOSITORY)
    tiny_model().config.push_to_hub(REPOSITORY)
    again = AutoTokenizer.from_pretrained(REPOSITORY)
    assert type(again) is KimiK3Tokenizer
    text = "<|open|>message<|sep|>ñ 你好"
    assert again.encode(text) == tokenizer.encode(text)
    assert again.decode(again.encode(text)) == text
    assert again.chat_template == tokenizer.chat_template


def test_processor(fake_hub):  # noqa: F811
    processor = KimiK3Processor(KimiK3ImageProcessor(patch_size=4), tiny_tokenizer())
    processor.push_to_hub(REPOSITORY)
    tiny_multimodal_config().push_to_hub(REPOSITORY)
    again = AutoProcessor.from_pretrained(REPOSITORY)
    assert type(again) is KimiK3Processor
    image = np.arange(3 * 16 * 24, dtype=np.uint8).reshape(16, 24, 3)
    inputs = {"images": [image], "text": f"{IMAGE_PLACEHOLDER} what is it?", "return_tensors": "pt"}
    torch.testing.assert_close(dict(again(**inputs)), dict(processor(**inputs)), rtol=0, atol=0)


def test_adapter(fake_hub):  # noqa: F811
    base = tiny_model()
    base.push_to_hub(REPOSITORY)
    adapted = get_peft_model(base, LoraConfig(r=2, **lora_targets(base.config, experts=True)))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    adapted.push_to_hub("someone/adapter")
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(REPOSITORY), "someone/adapter")
    assert torch.equal(logits(again), logits(adapted))
    assert not torch.equal(logits(again), logits(AutoModelForCausalLM.from_pretrained(REPOSITORY)))


def test_trainer_pushes_what_it_trained(fake_hub, tmp_path):  # noqa: F811
    """Weights in the released layout, tokenizer and card; no checkpoints, nothing of a save in progress."""
    model, tokenizer = tiny_model(vocab_size=300), tiny_tokenizer()
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        hub_model_id=REPOSITORY,
        push_to_hub=True,
        max_steps=2,
        save_steps=1,
        hub_strategy="end",
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"input_ids": row, "labels": row} for row in INPUT_IDS.tolist()]
    trainer = Trainer(model, arguments, train_dataset=data, processing_class=tokenizer)
    before = logits(model)
    trainer.train()
    trainer.push_to_hub()
    assert not torch.equal(logits(model), before)
    again = AutoModelForCausalLM.from_pretrained(REPOSITORY)
    assert torch.equal(logits(again), logits(model))
    assert AutoTokenizer.from_pretrained(REPOSITORY)("ñ").input_ids == tokenizer("ñ").input_ids
    pushed = {file.name for file in fake_hub.snapshot(REPOSITORY).rglob("*") if file.is_file()}
    assert pushed >= {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert not [name for name in pushed if name.startswith(("optimizer", "save_in_progress"))]
    stored = load_file(fake_hub.snapshot(REPOSITORY) / "model.safetensors")
    assert "model.layers.1.block_sparse_moe.experts.0.w1.weight" in stored


def test_folder_with_its_card(fake_hub, tmp_path):  # noqa: F811
    model = tiny_model()
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    write_model_card(folder, license="apache-2.0")
    HfApi().upload_folder(repo_id=REPOSITORY, folder_path=folder)
    pushed = {file.name: file.read_bytes() for file in fake_hub.snapshot(REPOSITORY).iterdir()}
    assert pushed == {file.name: file.read_bytes() for file in folder.iterdir()}
    assert b"license: apache-2.0" in pushed["README.md"]
    assert b"*.safetensors filter=lfs" in pushed[".gitattributes"]
    assert json.loads(pushed["config.json"])["architectures"] == ["KimiK3ForCausalLM"]
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(REPOSITORY)), logits(model))
