# Copyright 2026 The deltalatent authors.
# SPDX-License-Identifier: Apache-2.0
"""How a conversation becomes text: the format of the release (XTML), with the assistant's part marked for training.

A message is `<|open|>message role="user"<|sep|>...<|close|>message<|sep|><|end_of_msg|>`. What an assistant says has
up to three segments, `think`, `response` and `tools`; a tool call has one `argument` with a key and a JSON type for
each argument. The released checkpoints render this in Python code; this template gives the same text.

Variables besides `messages`, `tools` and `add_generation_prompt`:

- `thinking` (default true): whether the assistant thinks first. If false there are no `think` segments.
- `thinking_effort` (default `"max"`; `"low"`, `"high"`): announced in a system message of its own; none if null.
- `tool_choice` (`"required"`, `"none"`): announced in a system message before the answer.

A message is a mapping with `role` (`system`, `user`, `assistant`, `tool`), `content` (a string, or a list of parts
`{"type": "text", "text": ...}`, `{"type": "image"}` and `{"type": "video"}`), maybe `name`; of an assistant also
`reasoning_content` and `tool_calls` (`{"id", "function": {"name", "arguments"}}`, arguments a mapping or a JSON object
as a string); of a tool `tool_call_id`, or its `name`. Results are rendered in the order of the calls they answer.

The `generation` blocks hold exactly what the model has to write after the generation prompt, so
`return_assistant_tokens_mask` trains on what `generate` produces.
"""

OPEN, SEPARATOR, CLOSE, END_OF_MESSAGE = "<|open|>", "<|sep|>", "<|close|>", "<|end_of_msg|>"
IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER = "<|kimi_image_placeholder|>", "<|kimi_video_placeholder|>"
STRUCTURE_TOKENS = (OPEN, CLOSE, SEPARATOR, END_OF_MESSAGE)
"""Special tokens of the format; a tokenizer trained for it needs them. The placeholders are none: a processor replaces
them."""

CHAT_TEMPLATE = r"""
{%- macro open(tag, attributes=[]) -%}
    {{- '<|open|>' + tag -}}
    {%- for key, value in attributes -%}
        {{- ' ' + key + '="' + value|string|replace('&', '&amp;')|replace('"', '&quot;') + '"' -}}
    {%- endfor -%}
    {{- '<|sep|>' -}}
{%- endmacro -%}

{%- macro close(tag) -%}
    {{- '<|close|>' + tag + '<|sep|>' -}}
{%- endmacro -%}

{%- macro content_of(message) -%}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content or [] -%}
            {%- if part.type in ['image', 'image_url'] -%}{{- '<|kimi_image_placeholder|>' -}}
            {%- elif part.type == 'video' -%}{{- '<|kimi_video_placeholder|>' -}}
            {%- else -%}{{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}

{%- macro plain_message(message, attributes) -%}
    {%- set attributes = attributes + ([('name', message.name)] if message.name else []) -%}
    {{- open('message', attributes) + content_of(message) + close('message') + '<|end_of_msg|>' -}}
{%- endmacro -%}

{%- macro announcement(kind, text) -%}
    {{- open('message', [('role', 'system'), ('type', kind)]) + text + close('message') + '<|end_of_msg|>' -}}
{%- endmacro -%}

{%- macro declaration(tools, introduction) -%}
    {%- set schema = tools|tojson(ensure_ascii=false, separators=(',', ':'), sort_keys=true) -%}
    {{- announcement('tool-declare', introduction + '\n\n```json\n' + schema + '\n```') -}}
{%- endmacro -%}

{%- macro argument(key, value) -%}
    {%- if value is boolean -%}{%- set type = 'boolean' -%}
    {%- elif value is none -%}{%- set type = 'null' -%}
    {%- elif value is number -%}{%- set type = 'number' -%}
    {%- elif value is string -%}{%- set type = 'string' -%}
    {%- elif value is mapping -%}{%- set type = 'object' -%}
    {%- else -%}{%- set type = 'array' -%}
    {%- endif -%}
    {{- open('argument', [('key', key), ('type', type)]) -}}
    {{- value if value is string else value|tojson(ensure_ascii=false) -}}
    {{- close('argument') -}}
{%- endmacro -%}

{%- macro call_of(tool_call, index) -%}
    {%- set function = tool_call.function if tool_call.function is defined else tool_call -%}
    {%- if not function.name -%}
        {{- raise_exception('A tool call must have the name of a function, got ' + tool_call|string + '.') -}}
    {%- endif -%}
    {{- open('call', [('tool', function.name), ('index', index)]) -}}
    {%- if function.arguments is mapping -%}
        {%- for key, value in function.arguments.items() -%}{{- argument(key, value) -}}{%- endfor -%}
    {%- elif function.arguments is string and function.arguments|trim -%}
        {{- open('json', [('type', 'object')]) + function.arguments + close('json') -}}
    {%- elif function.arguments -%}
        {{- raise_exception('Arguments of a tool call must be a mapping or a JSON object as a string.') -}}
    {%- endif -%}
    {{- close('call') -}}
{%- endmacro -%}

{%- macro result_of(message, calls, index) -%}
    {%- set call = calls[index - 1] if index <= calls|length else none -%}
    {%- set function = call.function if call and call.function is defined else call -%}
    {%- set name = message.name or (function.name if function else none) -%}
    {%- if not name -%}
        {{- raise_exception('A tool message must have a `name`, or answer a call of the assistant before it.') -}}
    {%- endif -%}
    {{- open('message', [('role', 'tool'), ('tool', name), ('index', index)]) -}}
    {{- content_of(message) + close('message') + '<|end_of_msg|>' -}}
{%- endmacro -%}

{%- set thinking = true if thinking is undefined else thinking -%}
{%- set thinking_effort = 'max' if thinking_effort is undefined else thinking_effort -%}
{%- if thinking_effort not in ['low', 'high', 'max', none] -%}
    {{- raise_exception('`thinking_effort` must be low, high, max or none, got ' + thinking_effort|string + '.') -}}
{%- endif -%}

{%- if tools -%}
    {{- declaration(tools, '# Tools\nHere are the available tools, described in JSONSchema.') -}}
{%- endif -%}
{%- if thinking and thinking_effort -%}
    {{- announcement('thinking-effort', '`thinking_effort` guides on how much to think in your thinking channel (not '
        + 'including the response channel), supported values include `low`, `medium`, `high`, and `max`.\nNow the '
        + 'system is invoked with `thinking_effort=' + thinking_effort + '`.') -}}
{%- endif -%}

{%- set turn = namespace(calls=[], results=[]) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {{- plain_message(message, [('role', 'user')]) -}}
    {%- elif message.role == 'system' and message.tools -%}
        {{- declaration(message.tools, '## New Tools Available\nThe system dynamically extends the toolset via '
            + 'lazy-loading.\nYou have access to all existing and extended tools.\nHere are the specs for the '
            + 'extended tools.') -}}
    {%- elif message.role == 'system' -%}
        {{- plain_message(message, [('role', 'system')]) -}}
    {%- elif message.role == 'assistant' -%}
        {%- set turn.calls = message.tool_calls or [] -%}
        {{- open('message', [('role', 'assistant')] + ([('name', message.name)] if message.name else [])) -}}
        {{- open('think' if thinking else 'response') -}}
        {%- generation -%}
            {%- if thinking -%}
                {%- set reasoning = message.reasoning_content or message.reasoning or '' -%}
                {{- (reasoning if reasoning|trim else '') + close('think') + open('response') -}}
            {%- endif -%}
            {{- content_of(message) + close('response') -}}
            {%- if turn.calls -%}
                {{- open('tools') -}}
                {%- for tool_call in turn.calls -%}{{- call_of(tool_call, loop.index) -}}{%- endfor -%}
                {{- close('tools') -}}
            {%- endif -%}
            {{- close('message') + '<|end_of_msg|>' -}}
        {%- endgeneration -%}
    {%- elif message.role == 'tool' -%}
        {%- set turn.results = turn.results + [message] -%}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}
            {%- set run = namespace(ordered=[]) -%}
            {%- for tool_call in turn.calls if tool_call.id -%}
                {%- for result in turn.results if result.tool_call_id == tool_call.id -%}
                    {%- set run.ordered = run.ordered + [result] -%}
                {%- endfor -%}
            {%- endfor -%}
            {%- set results = run.ordered if run.ordered|length == turn.results|length else turn.results -%}
            {%- for result in results -%}{{- result_of(result, turn.calls, loop.index) -}}{%- endfor -%}
            {%- set turn.results = [] -%}
        {%- endif -%}
    {%- else -%}
        {{- raise_exception('`role` must be system, user, assistant or tool, got ' + message.role|string + '.') -}}
    {%- endif -%}
{%- endfor -%}

{%- if tool_choice == 'required' -%}
    {{- announcement('tool-choice', 'The system is invoked with `tool_choice=required`.\nYou MUST call tools in the '
        + 'next message.') -}}
{%- elif tool_choice == 'none' -%}
    {{- announcement('tool-choice', 'The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools '
        + 'in the next message.') -}}
{%- endif -%}
{%- if add_generation_prompt -%}
    {{- open('message', [('role', 'assistant')]) + open('think' if thinking else 'response') -}}
{%- endif -%}
""".lstrip("\n")
"""Jinja source; `tokenizer.chat_template = CHAT_TEMPLATE` gives any tokenizer with `STRUCTURE_TOKENS` this format."""
