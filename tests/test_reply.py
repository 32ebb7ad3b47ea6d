"""How a reply is drawn while it is made: every character of it, and no frame with less than the one before."""

import re
from io import StringIO
from itertools import pairwise

import pyte
import pytest
from rich.console import Console

from pearl.cli.reply import END_FRAME, MarkdownReply, TokenReply
from pearl.protocol.messages import Provenance
from tests.conftest import eventually


def rendered(reply: type[MarkdownReply] | type[TokenReply], *texts: str) -> str:
    """What a terminal has been given in the end, without its control sequences."""
    file = StringIO()
    shown = reply(Console(file=file, force_terminal=True, width=80, height=20))
    for text in texts:
        shown.add((text,), (Provenance.ACCEPTED,))
    shown.finish()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())


def test_markdown_is_rendered_and_never_flickers(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first character on no frame is without the text of the one before."""
    monkeypatch.setattr("pearl.cli.reply.FRAME_SECONDS", 0.001)
    file, text = (
        StringIO(),
        "- **red** is warm\n- **blue** is cold\n\nI like *both* of them, for they are colours.",
    )
    shown = MarkdownReply(Console(file=file, force_terminal=True, width=80, height=20))
    for start in range(0, len(text), 4):
        drawn = len(file.getvalue())
        shown.add((text[start : start + 4],), (Provenance.ACCEPTED,))
        eventually(lambda drawn=drawn: len(file.getvalue()) > drawn, "another frame")  # type: ignore[misc]
    shown.finish()
    screen, frames = pyte.Screen(80, 20), list[str]()
    for frame in file.getvalue().split(END_FRAME):
        pyte.Stream(screen).feed(frame)
        frames.append("\n".join(line.rstrip() for line in screen.display).strip())
    assert len({*frames}) > 10
    begun = False
    for before, frame in pairwise(frames):
        begun = begun or bool(before)
        assert not begun or frame[:5] == before[:5] or len(before) < 10
    assert "*" not in frames[-1]
    assert frames[-1].endswith("colours.")


@pytest.mark.parametrize("reply", [MarkdownReply, TokenReply])
def test_no_text_is_lost_in_rendering(reply: type[MarkdownReply] | type[TokenReply]) -> None:
    """Text that only looks like HTML is shown, and so are the targets of links, and escapes, which are not obeyed."""
    for text in (
        "std::vector<int> and List<String>",
        "<think>hm</think>",
        "<div>hello</div>",
        "x <!-- hidden --> y",
        "e\u0301 \u4e2d\U0001f600",
        "a [link](http://example.com/where) b",
        "a\x1b]0;title\x07b\x1b[2Jc",
    ):
        shown = rendered(reply, *text, "\n\nend")
        plain = text.replace("[link](http://example.com/where)", "link (http://example.com/where)")
        assert any(words in shown for words in (text, plain, "a␛]0;title␇b␛[2Jc")), shown
        assert "\x1b]0" not in shown
