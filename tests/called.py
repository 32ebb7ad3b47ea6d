"""Tools for models to call, and calls of these tools as clients read them."""

from typing import Any

POINT = {
    "type": "object",
    "properties": {"y": {"type": "boolean"}},
    "required": ["y"],
    "additionalProperties": False,
}
ADD = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"x": {"enum": [1, 22]}, "at": {"$ref": "#/$defs/Point"}},
        "required": ["x", "at"],
        "additionalProperties": False,
        "$defs": {"Point": POINT},
    },
}
STOP = {
    "name": "stop",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS: list[Any] = [{"type": "function", "function": ADD}, {"type": "function", "function": STOP}]

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


def joined(chunks: list[Any]) -> list[dict[str, Any]]:
    """Return the calls in a stream's deltas, joined as clients join them."""
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"][0]["delta"].get("tool_calls", ()):
            call = calls.setdefault(part["index"], {"function": {"name": "", "arguments": ""}})
            call |= {name: part[name] for name in ("id", "type") if name in part}
            for name, text in part["function"].items():
                call["function"][name] += text
    return [calls[index] for index in sorted(calls)]
