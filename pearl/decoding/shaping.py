"""Shaping of logits: penalties for repeated tokens, biases of single tokens, and grammars.

Target and draft shape their logits in the same way, before temperature and filters.  Shaped logits
depend on the text before them alone, like the model's own logits.  So exact rules stay exact, and
one seed gives one text whatever was proposed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from pearl.config.options import RequestOptions
from pearl.errors import GrammarError

# Function (grammar, tokens that end the text) -> `pearl.text.grammar.Guide`, which knows the tokens
# that the grammar allows next; raises `GrammarError`.
MakeGuide = Callable[[str, Sequence[int]], Any]


class Shaper:
    """Shapes the logits of one text, and keeps the text's tokens that the model has been fed.

    Args:
        prompt: the tokens with which the text begins.
        guides: makes the guide of a text that has a grammar.

    Attributes:
        stuck: the grammar error of a row in the last `chain` or `tree`; None if there was no error.
            The row with the error is minus infinity throughout. The caller raises the error only if
            it samples that row, because the row may follow a guess that is rejected.
    """

    def __init__(
        self, options: RequestOptions, prompt: Sequence[int], guides: MakeGuide | None = None
    ) -> None:
        self._options = options
        self._prompt = prompt
        self._guide: Any = None  # of the text's grammar, if there is one
        #: Why the grammar has no guide. `shape` raises this error, so that only this request fails.
        self._broken: GrammarError | None = None
        if options.grammar:
            try:
                if guides is None:
                    raise GrammarError("texts are held to no grammar here")
                self._guide = guides(options.grammar, options.grammar_ends)
            except GrammarError as error:
                self._broken = error
        self._text: list[int] = []
        #: Length of the text at which the grammar begins. None while the text is still in the
        #: reasoning (thinking) part that its prompt has opened.
        self._grammar_from: int | None = options.prompt_length
        #: The tokens that end the reasoning. It is empty if the prompt has opened no reasoning.
        self._reasoning_ends: tuple[int, ...] = ()
        if options.reasoning is not None and options.reasoning.is_open:
            self._reasoning_ends = options.reasoning.end_tokens
        if self._reasoning_ends:
            self._grammar_from = None
        self._seen = Counter[int]()  # counts of the text's tokens
        self._written = Counter[int]()  # counts of the generated tokens
        self.stuck: GrammarError | None = None

    def hold(self, length: int) -> None:
        """Cut or extend the text to the first `length` tokens, which the model's KV cache holds.

        If the text is longer, its last tokens are removed. If it is shorter, tokens of the prompt
        are appended. The model was not fed these tokens for this request, because the KV cache held
        them already.
        """
        for token in reversed(self._text[length:]):
            self._text.pop()
            _count_down(self._seen, token)
            if len(self._text) >= self._options.prompt_length:
                _count_down(self._written, token)
        if self._guide is not None:
            self._cut_guide()
        assert length <= max(len(self._text), len(self._prompt))
        self.extend(self._prompt[len(self._text) : length])

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if len(self._text) >= self._options.prompt_length:
                self._written[token] += 1
                if self._guide is not None:
                    self._extend_guide(token)
            self._seen[token] += 1
            self._text.append(token)

    def _cut_guide(self) -> None:
        length = len(self._text)
        if self._grammar_from is None:
            return
        self._guide.cut(max(0, length - self._grammar_from))
        if self._reasoning_ends and length < self._grammar_from:
            self._grammar_from = None

    def _extend_guide(self, token: int) -> None:
        if self._grammar_from is not None:
            self._guide.extend(token)
        elif token in self._reasoning_ends:
            self._grammar_from = len(self._text) + 1

    def chain(self, logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """Append `tokens` to the text, and shape the logits [n, vocab] after the last n of them."""
        self.stuck = None
        if not len(logits):
            self.extend(tokens)
            return logits
        first = len(tokens) - len(logits)
        self.extend(tokens[:first])
        shaped = []
        for row, token in zip(logits, tokens[first:], strict=True):
            self.extend((token,))
            shaped.append(self._shaped(row))
        return torch.stack(shaped)

    def tree(
        self, logits: torch.Tensor, tokens: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Shape the logits [n, vocab] after the last n nodes of a token tree that follows the text.

        The text itself does not change.

        Args:
            tokens: the token of each node.
            paths: for each node, the nodes on the way from the root to the node, which comes last.
        """
        self.stuck = None
        length = len(self._text)
        if not len(logits):
            return logits
        shaped = []
        for node, row in enumerate(logits, start=len(tokens) - len(logits)):
            self.extend(tokens[ancestor] for ancestor in paths[node])
            shaped.append(self._shaped(row))
            self.hold(length)
        return torch.stack(shaped)

    def _shaped(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a shaped row. A grammar error is not raised but kept in `stuck`."""
        try:
            return self.shape(logits)
        except GrammarError as error:
            self.stuck = error
            return torch.full_like(logits, -torch.inf, dtype=torch.float32)

    def shape(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a shaped copy of logits [vocab], float32, for the token after the text.

        The steps are those of vLLM, in its order:

        * add biases;
        * penalise the text's tokens by `repetition_penalty`, as transformers does: divide a
          positive logit by it, and multiply a negative one;
        * from the logit of each generated token, subtract `presence_penalty`, and
          `frequency_penalty` times how often the token was generated;
        * set the logits of tokens that the grammar does not allow to minus infinity.

        If the model gives every allowed token probability 0, all allowed tokens become equally
        likely. If the text does not follow the grammar any more, no token is excluded.

        Raises `GrammarError` if the allowed tokens cannot be computed, or if this model's
        vocabulary has none of them.
        """
        if self._broken is not None:
            raise self._broken
        row = logits.to(torch.float32, copy=True)
        self._add_biases(row)
        self._penalise(row)
        return self._constrained(row)

    def _add_biases(self, row: torch.Tensor) -> None:
        # A draft may lack the target's last ids; biases of those ids have no effect there.
        biases = {token: bias for token, bias in self._options.logit_bias if token < len(row)}
        if biases:
            row[_ids(biases, row)] += _floats(biases.values(), row)

    def _penalise(self, row: torch.Tensor) -> None:
        options = self._options
        if options.repetition_penalty != 1 and self._seen:
            ids = _ids(self._seen, row)
            scores = row[ids]
            penalty = options.repetition_penalty
            row[ids] = torch.where(scores < 0, scores * penalty, scores / penalty)
        if (options.presence_penalty or options.frequency_penalty) and self._written:
            counts = _floats(self._written.values(), row)
            penalties = options.frequency_penalty * counts + options.presence_penalty
            row[_ids(self._written, row)] -= penalties

    def _constrained(self, row: torch.Tensor) -> torch.Tensor:
        """Set tokens that the grammar does not allow to minus infinity.

        Raises `GrammarError` as `shape` does.
        """
        if self._guide is not None and self._grammar_from is None:
            return self._unended(row)
        allowed = None if self._guide is None else self._guide.allowed()
        if allowed is None:
            return row
        refused = np.ones(len(row), np.bool_)
        refused[: len(allowed)] = ~allowed[: len(row)]
        if refused.all():
            raise GrammarError("the text's grammar goes on with no token that this model has")
        mask = torch.from_numpy(refused).to(row.device)
        row.masked_fill_(mask, -torch.inf)
        equal = torch.zeros_like(row).masked_fill_(mask, -torch.inf)
        return torch.where(row.max() == -torch.inf, equal, row)

    def _unended(self, row: torch.Tensor) -> torch.Tensor:
        """Set the tokens that end a text to minus infinity, and return the row.

        This keeps the text from ending in its reasoning part, before the answer has begun.
        """
        ends = [token for token in self._options.grammar_ends if token < len(row)]
        row[_ids(ends, row).long()] = -torch.inf
        return row


def _ids(tokens: Iterable[int], row: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(tokens), device=row.device)


def _floats(values: Iterable[float], row: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float32, device=row.device)


def make_shaper(
    options: RequestOptions, prompt: Sequence[int], guides: MakeGuide | None = None
) -> Shaper | None:
    """Return the shaper of a request; None if the request's options change no logits."""
    if not options.shapes_logits:
        return None
    return Shaper(options, prompt, guides)


def _count_down(counts: dict[int, int], token: int) -> None:
    counts[token] -= 1
    if not counts[token]:
        del counts[token]
