"""Finds the end of the reasoning at the beginning of a text.

Stop strings and grammars apply only to the answer, after the reasoning. Reasoning ends with a mark
such as "</think>". If the vocabulary has a token for the mark, only this token ends the reasoning,
because the model may quote the mark in other tokens. Otherwise the mark is searched in the text.
Where the reasoning ends depends on the text's tokens alone, so the front and each worker find the
same end, whatever was proposed.
"""

from pearl.config.options import Reasoning


class ReasoningState:
    """Follows a text, token by token, up to the end of its reasoning.

    Attributes:
        is_begun: whether the text has begun with reasoning.
        is_over: whether the reasoning has ended, or the text has none.
        is_blank: whether only white space has followed the reasoning.
    """

    def __init__(self, marks: Reasoning | None) -> None:
        self.is_over = marks is None
        self._marks = marks or Reasoning()
        self.is_begun = self._marks.is_open
        self.is_blank = marks is not None
        self._lead = ""  # held back: it may become the opening mark
        self._tail = ""  # the end of the reasoning, in which a mark may have begun
        self._longest = max(map(len, self._marks.ends), default=0)

    def feed(self, token: int, text: str) -> tuple[str, str]:
        """Take the next token, and the text that becomes final with it.

        Returns the part of this text that is reasoning, and the part that is answer. White space
        between reasoning and answer counts as reasoning, because clients do not get it.
        """
        if self.is_over:
            return self._parted("", text)
        if not self.is_begun:
            text = self._lead + text
            self._lead = ""
            self._begin(token, text.lstrip())
        if self.is_over:
            self.is_blank = False
            return "", text
        if not self.is_begun:
            self._lead = text
            return "", ""
        if self._marks.end_tokens:
            self.is_over = token in self._marks.end_tokens
            return text, ""
        thought, answer = self._until_end(text)
        return self._parted(thought, answer)

    def _parted(self, thought: str, answer: str) -> tuple[str, str]:
        """Return (reasoning, answer), with white space before the answer moved to the reasoning."""
        if not self.is_blank:
            return thought, answer
        stripped = answer.lstrip()
        self.is_blank = not stripped
        return thought + answer[: len(answer) - len(stripped)], stripped

    def flush(self) -> str:
        """Return the text that is still held back; call it at the end of the text."""
        lead = self._lead
        self._lead = ""
        return lead

    def _begin(self, token: int, text: str) -> None:
        """Find out whether the text begins with the opening mark. `text`: all of it so far."""
        start = self._marks.start
        if self._marks.start_token is not None:
            self.is_begun = token == self._marks.start_token
            self.is_over = not self.is_begun and bool(text)
            return
        self.is_begun = text.startswith(start)
        self.is_over = not self.is_begun and not start.startswith(text)

    def _until_end(self, text: str) -> tuple[str, str]:
        """Return the part of `text` up to a mark that ends the reasoning, and the rest."""
        searched = self._tail + text
        end = len(searched)
        for mark in self._marks.ends:
            start = searched.find(mark)
            if start >= 0 and start + len(mark) <= end:
                end = start + len(mark)
                self.is_over = True
        length = end - len(self._tail)
        self._tail = searched[-self._longest :]
        return text[:length], text[length:]
