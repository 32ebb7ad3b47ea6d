"""A checkpoint's tokenizer, cached as transformers made it, and read again without transformers.

Importing transformers takes each process seconds.  What it makes of a checkpoint is one object of the `tokenizers`
library, a chat template and some settings: these are cached for the files' contents and the version of transformers,
with a digest of all tokens, so that a draft, which only compares vocabularies, reads nothing else.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pearl.cache import converted, find, silent, stamp
from pearl.errors import ModelError
from pearl.text.chat_template import chat_prompt, render
from pearl.text.stream import Tokenizer, Tools, check_characters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_SOURCES = {".json", ".jinja", ".model", ".txt", ".tiktoken"}  # what tokenizers and settings are read from
_TOKENIZER, _ABOUT = "tokenizer.json", "about.json"
_FORMAT = 6  # of these two files
_OF_BASE = ("_encode_plus", "_decode", "decode", "__call__", "convert_ids_to_tokens", "apply_chat_template")
_PROBES = (
    "Hello, world!  Two spaces, a\ttab\nand\n\n  lines.",
    " don't I'll 3.14159 1234567890 <b>&amp;</b> def f(x): return x**2 ",
    "Grüße, Ελληνικά, русский, 中文字符, 日本語, עברית, العربية, हिन्दी, 👩‍🚀\u00a0\ufffd\u2028",
    "",
)
_SAID = ("system", "Be <brief> & kind."), ("user", 'What\'s "new"?'), ("assistant", "Ünïts."), ("user", "?")
_TURNS = [{"role": role, "content": f"  {text}\n"} for role, text in _SAID]
_CONVERSATIONS = (_TURNS[1:2], _TURNS[:2], _TURNS[1:], _TURNS, _TURNS[:1], _TURNS[2:3])


class CachedTokenizer:
    """The tokenizer in a directory that `save` has written. Gives what `HFTokenizer` gives.

    Attributes:
        settings: as they were given to `save`.
        digest: of all tokens; see `vocabulary_digest`.
    """

    def __init__(self, directory: Path) -> None:
        about = json.loads((directory / _ABOUT).read_text())
        self._file = directory / _TOKENIZER
        self.vocab_size: int = about["vocab_size"]
        self.settings: dict[str, Any] = about["settings"]
        self.digest: bytes = bytes.fromhex(about["digest"])
        self._template, self._tools_template = about["chat_template"], about["tools_template"]
        self._special = about["special_tokens"]
        self._is_plain_chat: bool = about["is_plain_chat"]

    @cached_property
    def _tokenizer(self) -> Any:
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_file(str(self._file))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def _pieces(self) -> list[str | None]:
        return [self._tokenizer.id_to_token(id) for id in range(self.vocab_size)]

    def encode(self, text: str, special: bool = True) -> list[int]:
        # As a batch of one: `encode` would hold the interpreter lock, for seconds on a long prompt.
        (encoded,) = self._tokenizer.encode_batch_fast([check_characters(text)], add_special_tokens=special)
        return list(encoded.ids)

    def decode(self, ids: Sequence[int]) -> str:
        known = [id for id in ids if self.token(id) is not None]  # a model's padding ids have no text
        return str(self._tokenizer.decode(known, skip_special_tokens=True))

    def apply_chat(self, messages: list[dict[str, Any]], tools: Tools = None) -> list[int] | None:
        text = self.chat_text(messages, tools)
        return None if text is None else self.encode(text, special=False)  # the template writes its own

    def chat_text(self, messages: list[dict[str, Any]], tools: Tools = None) -> str | None:
        return None if self._template is None else chat_prompt(partial(self._render, tools), messages)

    def _render(self, tools: Tools, messages: list[dict[str, Any]]) -> str:
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        if tools is None and self._is_plain_chat and all(_is_plain_message(message) for message in given):
            return render(self._template, given, self._special)
        from transformers.utils.chat_template_utils import render_jinja_template  # takes 0.8 s, and no torch

        made: Any = render_jinja_template(
            [given],
            tools=None if tools is None else [*tools],
            chat_template=self._template if tools is None else self._tools_template,
            add_generation_prompt=True,
            **self._special,
        )
        return str(made[0][0])  # (conversations, where their replies begin)

    def token(self, id: int) -> str | None:
        return self._pieces[id] if 0 <= id < self.vocab_size else None


def read(directory: Path) -> CachedTokenizer | None:
    """The cached tokenizer of the checkpoint in `directory`; None where there is none. Removes what is unreadable."""
    where = None
    try:
        where = find(_name(directory))
        return None if where is None else CachedTokenizer(where)
    except Exception as error:  # the tokenizers library's errors have no common base
        log.debug("the cached tokenizer of %s cannot be read: %s", directory, error)
        if where is not None:
            shutil.rmtree(where, ignore_errors=True)
        return None


def save(
    directory: Path, tokenizer: PreTrainedTokenizerBase, ours: Tokenizer, settings: dict[str, Any], digest: bytes
) -> None:
    """Cache the tokenizer of the checkpoint in `directory` for `read`, where that is possible.

    Args:
        ours: the interface to `tokenizer` through transformers; the cached one must give the same.
        settings: further JSON to save with it.
        digest: of all its tokens.
    """
    if not _is_plain(tokenizer):
        return
    has_template = tokenizer.chat_template is not None
    template = tokenizer.get_chat_template() if has_template else None
    about = {
        "vocab_size": ours.vocab_size,
        "chat_template": template,
        "tools_template": tokenizer.get_chat_template(tools=[]) if has_template else None,
        "special_tokens": tokenizer.special_tokens_map,
        "settings": settings,
        "digest": digest.hex(),
        "is_plain_chat": template is not None and _is_plain_chat(template, tokenizer.special_tokens_map, ours),
    }

    def build(building: Path, progress: object) -> None:
        building.mkdir()
        tokenizer.backend_tokenizer.save(str(building / _TOKENIZER))
        (building / _ABOUT).write_text(json.dumps(about))
        if not _gives_the_same(CachedTokenizer(building), ours):
            raise ModelError("it does not give the same")

    try:
        converted(_name(directory), build, silent)
    except Exception as error:  # tokenizers raises no other where a disk is full; later starts take longer, and work
        log.debug("the tokenizer of %s is not cached: %s", directory, error)


def _name(directory: Path) -> str:
    """From the contents of all files that may matter. Raises `OSError`."""
    found = (*directory.iterdir(), *directory.glob("additional_chat_templates/*"))
    files = [path for path in sorted(found) if path.suffix in _SOURCES and path.is_file()]
    return f"tokenizer-{stamp(files, contents=True, also=[_FORMAT, version('jinja2')])}"


def _is_plain(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether its class adds nothing to what the `tokenizers` library does."""
    from transformers import PreTrainedTokenizerFast

    of = type(tokenizer)
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and all(getattr(of, name) is getattr(PreTrainedTokenizerFast, name) for name in _OF_BASE)
        and not getattr(tokenizer, "split_special_tokens", False)
    )


def _gives_the_same(cached: CachedTokenizer, ours: Tokenizer) -> bool:
    """Whether the two agree on every token, and on some texts."""
    size = ours.vocab_size
    if any(cached.token(id) != ours.token(id) for id in range(size)):
        return False
    added = [ours.token(id) or "" for id in (0, 1, 2, *range(max(0, size - 40), size))]
    for text in (*_PROBES, " ".join(added), "".join(added)):
        for special in (True, False):
            ids = ours.encode(text, special)
            if cached.encode(text, special) != ids or cached.decode(ids) != ours.decode(ids):
                return False
    spread = list(range(0, size, max(1, size // 500)))
    return cached.decode(spread) == ours.decode(spread)


def _is_plain_message(message: dict[str, Any]) -> bool:
    return message.keys() <= {"role", "content"} and all(type(value) is str for value in message.values())


def _is_plain_chat(template: str, special: dict[str, Any], ours: Tokenizer) -> bool:
    """Whether our rendering of some conversations is that of transformers, refusals included."""

    def made(by: Callable[[], str | None]) -> str | None:
        with suppress(Exception):  # it refuses
            return by()
        return None

    return all(
        made(partial(render, template, chat, special)) == made(partial(ours.chat_text, chat)) for chat in _CONVERSATIONS
    )
