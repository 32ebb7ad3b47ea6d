"""Draw a picture of the chat from a real conversation: `python scripts/picture_chat.py pearl/cli/chat.svg`.

The first reply is complete; the second is frozen in the middle, with the draft's tokens behind the text.
"""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Sequence
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from pearl.cli.chat import ChatSession, status
from pearl.cli.reply import PENDING, STYLES, Reply, legend
from pearl.config import RequestOptions
from pearl.engine import Engine, Piece, Stream
from pearl.protocol.messages import Provenance
from pearl.text.conversation import Conversation
from pearl.text.reply import ReplyParser

QUESTIONS = ("In one sentence, what is gravity?", "And what would happen without it?")
FROZEN_AT = 12  # tokens of the text
LEAST_GUESS = 16  # characters of the guess


class Still(Reply):
    """A reply of which one moment is kept."""

    def __init__(self, console: Console, frozen_at: int | None) -> None:
        self._console = console
        self._frozen_at = frozen_at
        self._text = Text()
        self._guess = ""
        self._tokens = 0

    @property
    def is_frozen(self) -> bool:
        return (
            self._frozen_at is not None
            and self._tokens >= self._frozen_at
            and len(self._guess) >= LEAST_GUESS
        )

    def add(
        self,
        texts: Sequence[str],
        provenance: Sequence[Provenance],
        tokens: Sequence[int] = (),
    ) -> None:
        if self.is_frozen:
            return
        for text, source in zip(texts, provenance, strict=True):
            self._text.append(text, STYLES[source])
            self._guess = self._guess.removeprefix(text) if self._guess.startswith(text) else ""
            self._tokens += 1

    def guess(self, text: str) -> None:
        if not self.is_frozen:
            self._guess = text

    def finish(self) -> None:
        self._console.print(self._text + Text(self._guess if self.is_frozen else "", PENDING))


class Pictured(ChatSession):
    frozen_at: int | None = None

    def _await_first(self, stream: Stream) -> list[Piece]:
        return []  # a recorded line would stay

    def _display(self, parser: ReplyParser | None) -> Reply:
        return Still(self.console, self.frozen_at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    file: Path = parser.parse_args().file
    console = Console(
        record=True,
        width=100,
        file=io.StringIO(),
        force_terminal=True,
        highlight=False,
        markup=False,
    )
    with Engine() as engine:
        options = RequestOptions(
            method="pearl", rule="coupled", gamma=4, temperature=0, max_tokens=96
        )
        chat = Pictured(
            engine,
            options,
            Conversation(engine.tokenizer, False, ""),
            True,
            False,
        )
        chat.console = console
        engine.generate(QUESTIONS[0], options)
        for question in QUESTIONS:
            chat.frozen_at = FROZEN_AT if question == QUESTIONS[-1] else None
            if not chat.has_legend:
                console.print(legend())
                chat.has_legend = True
            console.print(Text(f">>> {question}"))
            answer = chat.answer(question)
            if chat.frozen_at is None:
                console.print(status(answer, engine.context, False))
                console.print()
    # No fonts from the network: a page that shows the picture may forbid them, and any monospaced font will do.
    frame = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    svg = console.export_svg(
        title="pearl chat --show-draft", theme=MONOKAI, code_format=frame, unique_id="chat"
    )
    file.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
