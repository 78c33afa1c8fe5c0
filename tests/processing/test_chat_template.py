# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""The chat format: roles, thinking, tools, what is trained on; written out here as text."""

from __future__ import annotations

import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from deltalatent.processing.chat_template import CHAT_TEMPLATE, IMAGE_PLACEHOLDER, STRUCTURE_TOKENS

USER = {"role": "user", "content": "Weather?"}
USER_TEXT = '<|open|>message role="user"<|sep|>Weather?<|close|>message<|sep|><|end_of_msg|>'
ASSISTANT = '<|open|>message role="assistant"<|sep|>'
END = "<|close|>message<|sep|><|end_of_msg|>"
QUIET = {"thinking_effort": None}
CALLS = [
    {"id": "a", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 3, "now": True, "at": None}}},
    {"id": "b", "function": {"name": "time", "arguments": '{"zone": "CET"}'}},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHAT_TEMPLATE)
    made.add_special_tokens({"additional_special_tokens": [*STRUCTURE_TOKENS, IMAGE_PLACEHOLDER]})
    return made


def render(tokenizer, messages, **variables) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **(QUIET | variables))


def test_roles(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Sunny."}]
    assert render(tokenizer, messages, thinking=False) == (
        '<|open|>message role="system"<|sep|>Be brief.'
        + END
        + USER_TEXT
        + ASSISTANT
        + "<|open|>response<|sep|>Sunny.<|close|>response<|sep|>"
        + END
    )


def test_names_are_escaped(tokenizer):
    text = render(tokenizer, [{"role": "user", "name": 'A & "B"', "content": "hi"}])
    assert text == '<|open|>message role="user" name="A &amp; &quot;B&quot;"<|sep|>hi' + END


def test_thinking_is_a_segment_even_when_empty(tokenizer):
    messages = [USER, {"role": "assistant", "reasoning_content": "Look up.", "content": "Sunny."}]
    response = "<|open|>response<|sep|>Sunny.<|close|>response<|sep|>"
    thought = "<|open|>think<|sep|>Look up.<|close|>think<|sep|>"
    assert render(tokenizer, messages) == USER_TEXT + ASSISTANT + thought + response + END
    assert render(tokenizer, messages, thinking=False) == USER_TEXT + ASSISTANT + response + END
    silent = [USER, {"role": "assistant", "content": "Sunny."}]
    assert render(tokenizer, silent) == (
        USER_TEXT + ASSISTANT + "<|open|>think<|sep|><|close|>think<|sep|>" + response + END
    )


def test_thinking_effort_is_announced_as_in_the_release(tokenizer):
    text = tokenizer.apply_chat_template([USER], tokenize=False)
    assert text.startswith('<|open|>message role="system" type="thinking-effort"<|sep|>`thinking_effort` guides on ')
    assert "`thinking_effort=max`." in text
    assert "`thinking_effort=low`." in render(tokenizer, [USER], thinking_effort="low")
    assert render(tokenizer, [USER], thinking=False, thinking_effort="max") == USER_TEXT
    with pytest.raises(TemplateError, match="low, high, max or none, got huge"):
        render(tokenizer, [USER], thinking_effort="huge")


def test_tools_are_declared_with_sorted_keys(tokenizer):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"b": 1, "a": "ä"}}}]
    declared = '[{"function":{"name":"weather","parameters":{"a":"ä","b":1}},"type":"function"}]'
    assert render(tokenizer, [USER], tools=tools) == (
        '<|open|>message role="system" type="tool-declare"<|sep|># Tools\nHere are the available tools, described in '
        f"JSONSchema.\n\n```json\n{declared}\n```" + END + USER_TEXT
    )


def test_tool_calls_carry_types_and_results_follow_the_calls(tokenizer):
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "b", "content": "12:00"},
        {"role": "tool", "tool_call_id": "a", "content": "sun"},
    ]
    assert render(tokenizer, messages, thinking=False) == (
        USER_TEXT
        + ASSISTANT
        + "<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
        + '<|open|>call tool="weather" index="1"<|sep|>'
        + '<|open|>argument key="city" type="string"<|sep|>Köln<|close|>argument<|sep|>'
        + '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        + '<|open|>argument key="now" type="boolean"<|sep|>true<|close|>argument<|sep|>'
        + '<|open|>argument key="at" type="null"<|sep|>null<|close|>argument<|sep|>'
        + "<|close|>call<|sep|>"
        + '<|open|>call tool="time" index="2"<|sep|>'
        + '<|open|>json type="object"<|sep|>{"zone": "CET"}<|close|>json<|sep|>'
        + "<|close|>call<|sep|><|close|>tools<|sep|>"
        + END
        + f'<|open|>message role="tool" tool="weather" index="1"<|sep|>sun{END}'
        + f'<|open|>message role="tool" tool="time" index="2"<|sep|>12:00{END}'
    )


@pytest.mark.parametrize("thinking", [True, False])
def test_generation_prompt_is_how_an_answer_begins(tokenizer, thinking):
    answered = render(tokenizer, [USER, {"role": "assistant", "content": "Sunny."}], thinking=thinking)
    prompt = render(tokenizer, [USER], thinking=thinking, add_generation_prompt=True)
    assert answered.startswith(prompt)
    assert prompt.endswith("<|open|>think<|sep|>" if thinking else "<|open|>response<|sep|>")


@pytest.mark.parametrize("thinking", [True, False])
def test_mask_holds_what_the_model_has_to_write(tokenizer, thinking):
    messages = [
        USER,
        {"role": "assistant", "reasoning_content": "Hm.", "content": "", "tool_calls": CALLS[:1]},
        {"role": "tool", "tool_call_id": "a", "content": "sun"},
        {"role": "assistant", "content": "Sunny."},
    ]
    encoded = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True, thinking=thinking, **QUIET
    )
    written, part = [], []
    for token, is_ours in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True):
        if is_ours:
            part.append(token)
        elif part:
            written.append(tokenizer.decode(part))
            part = []
    written.append(tokenizer.decode(part))
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for i, text in zip(answers, written, strict=True):
        prompt = render(tokenizer, messages[:i], thinking=thinking, add_generation_prompt=True)
        assert prompt + text == render(tokenizer, messages[: i + 1], thinking=thinking)


def test_images_leave_their_placeholder(tokenizer):
    content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    text = render(tokenizer, [{"role": "user", "content": content}])
    assert text == f'<|open|>message role="user"<|sep|>{IMAGE_PLACEHOLDER}What is it?' + END


def test_template_survives_a_save(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert render(again, [USER]) == render(tokenizer, [USER])


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([{"role": "robot", "content": "x"}], "`role` must be system, user, assistant or tool, got robot"),
        ([{"role": "tool", "content": "x"}], "A tool message must have a `name`"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "must have the name of a function"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}], "must be a mapping"),
    ],
    ids=["role", "tool name", "function name", "arguments"],
)
def test_bad_conversations_are_refused(tokenizer, messages, error):
    with pytest.raises(TemplateError, match=error):
        render(tokenizer, messages)
