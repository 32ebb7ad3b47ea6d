"""Replies as models write them, and tokenizers in which tags are tokens."""

import copy
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken

from pearl.text.tokenizer import FileTokenizer
from tests.tokenizers import byte_level_files, read

TEMPLATE = "{% if tools %}T{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}{# MARK #}"
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
    """A reply, and what clients get of it. `tokens`: names in it that are tokens, except between backticks."""

    text: str
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    parser: str = "hermes"
    tags: str = "none"
    tokens: tuple[str, ...] = ()
    special: bool = False


def with_tokens(case: Case) -> FileTokenizer:
    made = copy.deepcopy(byte_level_files())
    tokens = [AddedToken(name, special=case.special, normalized=False) for name in case.tokens]
    made.add_tokens(tokens)
    made.chat_template = TEMPLATE
    tokenizer = read(made)
    tokenizer.reasoning_tags = case.tags
    return tokenizer
