"""Replies as models write them, and tokenizers in which tags are special tokens."""

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


@dataclass
class Case:
    """A reply, and what clients get of it.

    Attributes:
        tokens: names in the text that are tokens, except between backticks.
        begun: the beginning of the reply, if the client sends one to be continued.
        opening: the text that the chat template writes at the prompt's end.
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
