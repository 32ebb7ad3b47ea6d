"""A checkpoint's tokenizer as transformers has made it, kept, and read again without transformers.

To import what makes it takes seconds in each process of a run, for it imports torch and much of torch's compiler. What
comes of it is one object of the `tokenizers` library, a chat template and some settings: these are kept in the cache,
for the files as they are and the version of transformers.  And a digest of all tokens: who only compares vocabularies,
as a draft does, reads nothing else.
"""

from __future__ import annotations

import json
import logging
import shutil
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pearl.cache import converted, find, silent, stamp
from pearl.errors import ModelError, RequestError
from pearl.text.stream import Tokenizer, Tools, check_characters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_READ = {".json", ".jinja", ".model", ".txt", ".tiktoken"}  # what tokenizers and settings are read from
_TOKENIZER, _ABOUT = "tokenizer.json", "about.json"
_FORMAT = 5  # of what is written to them
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


class KeptTokenizer:
    """The tokenizer in a directory that `keep` has written. Gives what `HFTokenizer` gives."""

    def __init__(self, directory: Path) -> None:
        about = json.loads((directory / _ABOUT).read_text())
        self._file = directory / _TOKENIZER
        if about["checksum"] != _checksum(self._file):
            raise ValueError("its tokens have changed")
        self.vocab_size: int = about["vocab_size"]
        self.settings: dict[str, Any] = about["settings"]
        self.digest: bytes = bytes.fromhex(about["digest"])  # of all tokens: see `vocabulary_digest`
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
        # As a batch of one: `encode` keeps the interpreter lock, of a long prompt for seconds, and a server has others.
        (encoded,) = self._tokenizer.encode_batch_fast([check_characters(text)], add_special_tokens=special)
        return list(encoded.ids)

    def decode(self, ids: Sequence[int]) -> str:
        known = [id for id in ids if self.token(id) is not None]  # a model's padding ids mean nothing
        return str(self._tokenizer.decode(known, skip_special_tokens=True))

    def apply_chat(self, messages: list[dict[str, Any]], tools: Tools = None) -> list[int] | None:
        text = self.chat_text(messages, tools)
        return None if text is None else self.encode(text, special=False)  # the template writes its own

    def chat_text(self, messages: list[dict[str, Any]], tools: Tools = None) -> str | None:
        if self._template is None:
            return None
        return rendered(lambda given: self._render(given, tools), messages)

    def _render(self, messages: list[dict[str, Any]], tools: Tools) -> str:
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        if tools is None and self._is_plain_chat and all(_is_plain_message(message) for message in given):
            from pearl.text.templates import render

            return render(self._template, given, self._special)
        from transformers.utils.chat_template_utils import render_jinja_template  # takes 0.8 s, and no torch

        made: Any = render_jinja_template(
            [given],
            tools=None if tools is None else [*tools],
            chat_template=self._template if tools is None else self._tools_template,
            add_generation_prompt=True,
            **self._special,
        )
        return str(made[0][0])  # of the first conversation; beside them stands where replies begin

    def token(self, id: int) -> str | None:
        return self._pieces[id] if 0 <= id < self.vocab_size else None


def rendered(render: Callable[[list[dict[str, Any]]], str], messages: list[dict[str, Any]]) -> str:
    """What a chat template makes of `messages`. Raises `RequestError` for whatever it raises: it is anybody's program.

    A call's arguments are an object to most templates, and text to some, such as DeepSeek's.
    """
    given = [_joined(message) for message in messages]
    objects = [_with_arguments(message, _parsed) for message in given]
    try:
        return render(objects)
    except Exception as error:
        with suppress(Exception):
            if (texts := [_with_arguments(message, _as_text) for message in given]) != objects:
                return render(texts)
        if isinstance(error, RecursionError):  # a template that writes nested tools as JSON
            raise RequestError("tools or their calls are nested too deep for the model's chat template") from None
        name = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
        raise RequestError(
            f"The model's chat template does not take these messages: {name}{error}. "
            "Change their roles or order, or send a raw prompt."
        ) from error


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """With a content of text parts as one text, which every template takes."""
    parts = message.get("content")
    if not isinstance(parts, list) or not all(isinstance(one, dict) and one.get("type") == "text" for one in parts):
        return message
    return {**message, "content": "\n".join(str(part.get("text")) for part in parts)}


def _with_arguments(message: dict[str, Any], form: Callable[[Any], Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_call(call, form) for call in calls]} if isinstance(calls, list) else message


def _call(call: Any, form: Callable[[Any], Any]) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": form(function["arguments"])}}


def _parsed(arguments: Any) -> Any:
    with suppress(TypeError, ValueError, RecursionError):
        if isinstance(given := json.loads(arguments), dict):
            return given
    return arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def read(directory: Path) -> KeptTokenizer | None:
    """What was kept of the checkpoint in `directory`; None: nothing. What cannot be read is removed."""
    where = None
    try:
        where = find(_name(directory))
        return None if where is None else KeptTokenizer(where)
    except Exception as error:  # those of the tokenizers library have no common base
        log.debug("the kept tokenizer of %s cannot be read: %s", directory, error)
        if where is not None:
            shutil.rmtree(where, ignore_errors=True)
        return None


def keep(
    directory: Path, tokenizer: PreTrainedTokenizerBase, ours: Tokenizer, settings: dict[str, Any], digest: bytes
) -> bool:
    """Keep the tokenizer of the checkpoint in `directory` for `read`, and return whether that was possible.

    Args:
        ours: what is made of `tokenizer` otherwise; what was kept must give the same.
        settings: anything else to keep with it, as JSON.
        digest: of all its tokens.
    """
    if not _is_plain(tokenizer):
        return False

    def build(building: Path, progress: object) -> None:
        building.mkdir()
        tokenizer.backend_tokenizer.save(str(building / _TOKENIZER))
        about: dict[str, Any] = {
            "checksum": _checksum(building / _TOKENIZER),
            "vocab_size": ours.vocab_size,
            "chat_template": tokenizer.get_chat_template() if tokenizer.chat_template is not None else None,
            "tools_template": tokenizer.get_chat_template(tools=[]) if tokenizer.chat_template is not None else None,
            "special_tokens": tokenizer.special_tokens_map,
            "settings": settings,
            "digest": digest.hex(),
            "is_plain_chat": False,
        }
        about["is_plain_chat"] = _is_plain_chat(about["chat_template"], about["special_tokens"], ours)
        (building / _ABOUT).write_text(json.dumps(about))
        if not _same(KeptTokenizer(building), ours):
            raise ModelError("it does not give the same")

    try:
        converted(_name(directory), build, silent)
    except Exception as error:  # tokenizers has no other where a disk is full; it takes longer then, and works
        log.debug("the tokenizer of %s is not kept: %s", directory, error)
        return False
    return True


def _checksum(file: Path) -> int:
    return zlib.crc32(file.read_bytes())


def _name(directory: Path) -> str:
    """By the contents of all files that may matter. Raises `OSError`."""
    found = (*directory.iterdir(), *directory.glob("additional_chat_templates/*"))
    files = [path for path in sorted(found) if path.suffix in _READ and path.is_file()]
    return f"tokenizer-{stamp(files, contents=True, also=[_FORMAT, version('jinja2')])}"


def _is_plain(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the class adds nothing of its own to what the `tokenizers` library does."""
    from transformers import PreTrainedTokenizerFast

    of = type(tokenizer)
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and all(getattr(of, name) is getattr(PreTrainedTokenizerFast, name) for name in _OF_BASE)
        and not getattr(tokenizer, "split_special_tokens", False)
    )


def _same(kept: KeptTokenizer, ours: Tokenizer) -> bool:
    """Whether the two agree on every token, and on some texts."""
    size = ours.vocab_size
    if any(kept.token(id) != ours.token(id) for id in range(size)):
        return False
    added = [ours.token(id) or "" for id in (0, 1, 2, *range(max(0, size - 40), size))]
    for text in (*_PROBES, " ".join(added), "".join(added)):
        for special in (True, False):
            ids = ours.encode(text, special)
            if kept.encode(text, special) != ids or kept.decode(ids) != ours.decode(ids):
                return False
    spread = list(range(0, size, max(1, size // 500)))
    return kept.decode(spread) == ours.decode(spread)


def _is_plain_message(message: dict[str, Any]) -> bool:
    return message.keys() <= {"role", "content"} and all(type(value) is str for value in message.values())


def _is_plain_chat(template: str | None, special: dict[str, Any], ours: Tokenizer) -> bool:
    """Whether our own rendering of some conversations is what transformers makes of them, or refuses."""
    from pearl.text.templates import render

    def made(by: Callable[[], str | None]) -> str | None:
        with suppress(Exception):  # it refuses
            return by()
        return None

    return template is not None and all(
        made(lambda chat=chat: render(template, chat, special)) == made(lambda chat=chat: ours.chat_text(chat))  # type: ignore[misc]
        for chat in _CONVERSATIONS
    )
