"""Replies as models write them, and tokenizers in which tags are tokens."""

import copy
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken

from pearl.text.tokenizer import FileTokenizer
from tests.tokenizers import byte_level_files, read

TEMPLATE = "{% if tools %}T{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}{# MARK #}"
HARMONY_TEXTS = {
    "a call in analysis": (
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>analysis to=functions.add "
        '<|constrain|>json<|message|>{"x": 1}<|call|>',
        ("Look.", "", [{"name": "add", "arguments": '{"x": 1}'}]),
    ),
    "a recipient before the channel": (
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"x": 1}<|call|>',
        ("", "", [{"name": "add", "arguments": '{"x": 1}'}]),
    ),
    "a preamble, and two analyses": (
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final"
        "<|message|>Done.<|return|>",
        ("One.\n\nTwo.", "I look.\n\nDone.", []),
    ),
    "words": (
        "<|channel|>final<|message|>finally, assistantfinal 42 commentary",
        ("", "finally, assistantfinal 42 commentary", []),
    ),
    "no header": ("finally, 42", ("", "finally, 42", [])),
    "no arguments": (
        "<|channel|>commentary to=functions.add<|message|><|call|>",
        ("", "", [{"name": "add", "arguments": "{}"}]),
    ),
}
OTHER_TAGS = {
    "mistral": "[THINK]Hm.[/THINK]Yes.",
    "gemma": "<|channel>thought\nHm.\n<channel|>Yes.",
    "seed": "<seed:think>Hm.</seed:think>Yes.",
    "cohere": "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
    "think": "<think>\nHm.\n</think>\n\nYes.",
    "harmony": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
}

HARMONY_TEXTS = {
    "a call in analysis": (
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>analysis to=functions.add "
        '<|constrain|>json<|message|>{"x": 1}<|call|>',
        ("Look.", "", [{"name": "add", "arguments": '{"x": 1}'}]),
    ),
    "a recipient before the channel": (
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"x": 1}<|call|>',
        ("", "", [{"name": "add", "arguments": '{"x": 1}'}]),
    ),
    "a preamble, and two analyses": (
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final"
        "<|message|>Done.<|return|>",
        ("One.\n\nTwo.", "I look.\n\nDone.", []),
    ),
    "words": (
        "<|channel|>final<|message|>finally, assistantfinal 42 commentary",
        ("", "finally, assistantfinal 42 commentary", []),
    ),
    "no header": ("finally, 42", ("", "finally, 42", [])),
    "no arguments": (
        "<|channel|>commentary to=functions.add<|message|><|call|>",
        ("", "", [{"name": "add", "arguments": "{}"}]),
    ),
}
CALLS = [("add", {"x": 'a}"\\'}), ("stop", {})]
TEXTS = {  # what models of each format write
    "hermes": 'Sure, a < b.\n<tool_call>\n{"name": "add", "arguments": {"x": "a}\\"\\\\"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"x": "a}\\"\\\\"}, "id": "abc"}, '
    '{"name": "stop", "arguments": {}}]',
    "mistral since 2025": '[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"x": "a}\\"\\\\"}[TOOL_CALLS]stop{}',
    "deepseek": "Sure, a < b.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"x": "a}\\"\\\\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "llama3": '\n{"type": "function", "name": "add", "parameters": {"x": "a}\\"\\\\"}}; '
    '{"name": "stop", "parameters": {}}',
    "pythonic": "[add(x='a}\"\\\\'), stop()]",
    "pythonic without names": "[add('a}\"\\\\'), stop()]",
    "lfm2": "Sure, a < b.<|tool_call_start|>[add(x='a}\"\\\\'), stop()]<|tool_call_end|>",
    "qwen3_coder": 'Sure, a < b.\n<tool_call>\n<function=add>\n<parameter=x>\na}"\\\n</parameter>\n</function>\n'
    "</tool_call>\n<tool_call>\n<function=stop>\n</function>\n</tool_call>",
    "qwen3_coder without the outer tag": 'Sure, a < b.\n<function=add>\n<parameter=x>\na}"\\\n</parameter>\n'
    "</function>\n<function=stop>\n</function>\n</tool_call>",
    "seed": 'Sure, a < b.\n<seed:tool_call>\n<function=add>\n<parameter=x>a}"\\</parameter>\n</function>\n'
    "</seed:tool_call>\n<seed:tool_call>\n<function=stop>\n</function>\n</seed:tool_call>",
    "glm": 'Sure, a < b.\n<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>a}"\\</arg_value>\n</tool_call>\n'
    "<tool_call>stop\n</tool_call>",
    "minimax": 'Sure, a < b.\n<minimax:tool_call>\n<invoke name="add">\n<parameter name="x">a}"\\</parameter>\n'
    '</invoke>\n<invoke name="stop">\n</invoke>\n</minimax:tool_call>',
    "gemma": 'Sure, a < b.<|tool_call>call:add{x:<|"|>a}"\\<|"|>}<tool_call|><|tool_call>call:stop{}<tool_call|>',
    "tool_calls": 'Sure, a < b.\n<tool_calls>\n{"name": "add", "arguments": {"x": "a}\\"\\\\"}}\n'
    '{"name": "stop", "arguments": {}}\n</tool_calls>',
    "nemotron": 'Sure, a < b.\n<TOOLCALL>[{"name": "add", "arguments": {"x": "a}\\"\\\\"}}, '
    '{"name": "stop", "arguments": {}}]</TOOLCALL>',
    "granite": 'Sure, a < b.<|tool_call|>[{"name": "add", "arguments": {"x": "a}\\"\\\\"}}, '
    '{"name": "stop", "arguments": {}}]',
    "dsml": 'Sure, a < b.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n'
    '<｜DSML｜parameter name="x" string="true">a}"\\</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="stop">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "kimi": "Sure, a < b.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"x": "a}\\"\\\\"}<|tool_call_end|><|tool_call_begin|>functions.stop:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "cohere": 'Sure, a < b.<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "add", "parameters": '
    '{"x": "a}\\"\\\\"}},\n    {"tool_call_id": "1", "tool_name": "stop", "parameters": {}}\n]<|END_ACTION|>',
}
TEXTS["llama3 with arguments first"] = (
    '{"parameters": {"x": "a}\\"\\\\"}, "name": "add"}; {"name": "stop", "parameters": null}'
)
NO_CALLS = {
    "hermes": "a <tool_call> is {a tag} of some < models",
    "mistral": "[TOOL_CALLS] is one, too",
    "deepseek": "Hello! ",
    "llama3": '{"name": "nobody", "parameters": {}} is JSON',
    "pythonic": "[1, 2] or [f(x)]",
    "pythonic with more than the schema has": '[add("a", "b")]',
    "pythonic of another function": '[add("a"), nobody("b")]',
    "qwen3_coder": "a <tool_call> is <function=x> of some <parameter=y> models",
    "glm": "a <tool_call>is</tool_call> of <arg_key>some</arg_key> models",
    "seed": "a <seed:tool_call> is <a tag>",
    "minimax": '<minimax:tool_call> is <invoke name="a">',
    "gemma": "a <|tool_call>is one",
    "tool_calls": "<tool_calls> is {one}",
    "nemotron": "<TOOLCALL>[1, {}] is one",
    "granite": "<|tool_call|> is one",
    "dsml": "<｜DSML｜tool_calls> is one",
    "kimi": "<|tool_calls_section_begin|> is one",
    "cohere": "<|START_ACTION|>[1, {}] is one",
    "lfm2": "<|tool_call_start|>[1] is one",
}


SCHEMAS: dict[str, Any] = {"add": {"properties": {"x": {"type": "string"}}}, "stop": {}}


@dataclass
class Case:
    """A reply, and what clients get of it.

    Attributes:
        tokens: names in the text that are tokens, except between backticks.
        begun: the beginning of the reply, which the client sends.
        opening: what the template writes at the prompt's end.
    """

    text: str
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    parser: str = "hermes"
    tags: str = "none"
    tokens: tuple[str, ...] = ()
    special: bool = False
    begun: str = ""
    opening: str = ""


def with_tokens(case: Case) -> FileTokenizer:
    made = copy.deepcopy(byte_level_files())
    tokens = [AddedToken(name, special=case.special, normalized=False) for name in case.tokens]
    made.add_tokens(tokens)
    made.chat_template = TEMPLATE + case.opening
    tokenizer = read(made)
    tokenizer.reasoning_tags = case.tags
    return tokenizer
