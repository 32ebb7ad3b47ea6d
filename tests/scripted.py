"""Scripted executors, which decode a known text.

They mirror the KV cache, and fail if a command disagrees with the mirror.
"""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from pearl.config import RequestOptions
from pearl.errors import NumericalError
from pearl.protocol import events as e
from pearl.protocol.acceptance_estimates import Seen
from pearl.protocol.fed_tokens import FedTokens
from pearl.protocol.messages import Source, Submit
from pearl.protocol.proposals import Proposal
from tests.options import resolved

PROMPT = (3, 1)
WRONG = 1_000  # what a scripted draft says where it is wrong
OTHER = 1_001  # what it thinks might be said where it is right
LOST = 2_000  # what a scripted model says in a context that is not the script's


def script(length: int, prompt: Sequence[int] = PROMPT) -> tuple[int, ...]:
    """Return a text of `length` tokens in all. After the prompt, no token occurs twice."""
    return (*prompt, *range(10, 10 + length - len(prompt)))


TEXT = script(30)


def submission(
    text: Sequence[int], method: str = "pearl", prompt: int = len(PROMPT), **settings: Any
) -> Submit:
    """Return a request for the rest of `text`, after the first `prompt` tokens.

    `settings`: fields of `RequestOptions` or of `Submit`.
    """
    names = {*RequestOptions.__struct_fields__, "sampling"}
    ours = {name: value for name, value in settings.items() if name in names}
    fields: dict[str, Any] = {"request": 1, "limit": len(text)} | {
        k: v for k, v in settings.items() if k not in ours
    }
    return Submit(prompt=tuple(text[:prompt]), options=resolved(method, **ours), **fields)


class Executor(Protocol):
    def execute(self, command: object) -> object | None: ...


class Told:
    """A verifier that gives prepared answers, in order."""

    def __init__(self, *answers: Any) -> None:
        self.answers = [*answers]
        self.asked: list[e.Judge | e.Sample] = []

    def judge(self, question: e.Judge) -> e.Judged:
        assert isinstance(self.answers[0], e.Judged), question
        return self._next(question)

    def sample(self, question: e.Sample) -> e.Sampled:
        assert isinstance(self.answers[0], e.Sampled), question
        return self._next(question)

    def _next(self, question: Any) -> Any:
        self.asked.append(question)
        return self.answers.pop(0)


class Cache:
    """A mirror of a KV cache, which holds tokens instead of keys and values."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def rollback(self, length: int) -> None:
        assert 0 <= length <= len(self.tokens), "a rollback may only shorten"
        del self.tokens[length:]

    def feed(self, start: int, tokens: Sequence[int]) -> None:
        assert len(self.tokens) == start, "the cache does not hold what the command says"
        assert tokens, "a forward of nothing"
        self.tokens += tokens


class ScriptTarget:
    """A target whose own tokens are those of `text`.

    A row can be used only if the last forward kept it. If the target is to guess, it guesses at
    each position: one wrong token, and the next two tokens of the text, except at positions in
    `unguessed`.
    """

    def __init__(
        self, text: Sequence[int], unguessed: Collection[int] = (), trees: bool = True
    ) -> None:
        self.text = tuple(text)
        self.unguessed = frozenset(unguessed)
        self.trees = trees
        self.cache = Cache()
        self.indexed: list[int] = list(text)  # the text as of the last guesses
        self.contexts: list[
            tuple[int, ...]
        ] = []  # of each token of the last forward, itself included
        self.fed: tuple[int, ...] = ()
        self.parents: tuple[int, ...] | None = None  # of a tree that waits
        self.rows = 0
        self.chokes = False  # on the next question

    def execute(self, command: object) -> object | None:
        match command:
            case e.Open() | e.Spread():
                return None
            case e.Rollback(length):
                self.cache.rollback(length)
                self.parents = None
                return None
            case e.Keep(path):
                assert self.parents is not None, "no tree waits"
                assert [self.parents[node] for node in path] == [-1, *path[:-1]], "no path"
                self.cache.tokens += [self.fed[node] for node in path]
                self.parents = None
                return None
            case e.Forward():
                return self._forward(command)
        raise AssertionError(command)

    def judge(self, judge: e.Judge) -> e.Judged:
        self._choke()
        for i, (token, node) in enumerate(zip(judge.tokens, judge.nodes, strict=True)):
            if token != self._says(judge.start + i, node):
                return e.Judged(i, self._says(judge.start + i, node))
        return e.Judged(len(judge.tokens), None)

    def _choke(self) -> None:
        if self.chokes:
            self.chokes = False
            raise NumericalError("on purpose")

    def _forward(self, command: e.Forward) -> e.Forwarded:
        fed = self._fed(command)
        tokens, parents = fed.tokens, fed.parents
        rows = command.rows + len(fed.guessers)
        assert 0 <= rows <= len(tokens)
        assert len(self.cache.tokens) == command.start, (
            "the cache does not hold what the command says"
        )
        self.contexts, self.fed, self.rows, self.parents = [], tokens, rows, parents
        for token, parent in zip(tokens, parents or range(-1, len(tokens) - 1), strict=True):
            self.contexts.append(
                (*(self.contexts[parent] if parent >= 0 else self.cache.tokens), token)
            )
        assert len(set(self.contexts)) == len(self.contexts), "one token twice"
        if parents is None:
            self.cache.feed(command.start, tokens)
        else:
            assert self.trees
        return e.Forwarded(fed=fed if fed.guessers else None, request=command.request)

    def _fed(self, command: e.Forward) -> FedTokens:
        if command.guess is None:
            return FedTokens(command.start, command.tokens)
        tokens, parents, sources = self._guess(command.guess)
        payoff = command.guess.payoff(len(command.tokens), len(tokens))
        for _ in tokens:
            payoff.offer(0.5)
        count = payoff.count
        length, chain = len(self.indexed), len(command.tokens)
        nodes = list(range(-1, chain - 1))
        for parent in parents[:count]:
            nodes.append(parent - command.start if parent < length else parent - length + chain)
        every = (*command.tokens, *tokens[:count])
        is_chain = nodes == list(range(-1, len(every) - 1))
        return FedTokens(
            command.start, every, None if is_chain else tuple(nodes), tuple(sources[:count])
        )

    def _guess(self, command: e.Guess) -> tuple[list[int], list[int], list[Source]]:
        text = self.indexed[: command.base] + list(command.tokens)
        assert len(self.indexed) >= command.base
        self.indexed = text
        tokens: list[int] = []
        parents: list[int] = []
        places = range(command.committed, len(text) + 1) if self.trees else [len(text)]
        places = places if command.most else []
        for place in places:
            above, end = place - 1, min(command.limit, place + 2)
            right = [p for p in range(place, end) if self.unguessed.isdisjoint(range(place, p + 1))]
            taken = place < len(text) and text[place : place + 1] == list(
                self.text[place : place + 1]
            )
            if self.trees and place < command.limit:
                tokens.append(WRONG + 1)
                parents.append(above)
            for position in () if taken else right:
                tokens.append(self.text[position])
                parents.append(above)
                above = len(text) + len(tokens) - 1
        sources = [Source.NGRAM] * len(tokens)
        for other in command.alternatives if self.trees else ():
            above = other.position - 1
            is_pending = other.tokens[0] == text[other.position]
            for token in (
                () if is_pending else other.tokens[: max(0, command.limit - other.position)]
            ):
                if (above, token) not in zip(parents, tokens, strict=True):
                    tokens.append(token)
                    parents.append(above)
                    sources.append(Source.RUNNER_UP)
                above = len(text) + list(zip(parents, tokens, strict=True)).index((above, token))
        return tokens, parents, sources

    def sample(self, sample: e.Sample) -> e.Sampled:
        self._choke()
        node = sample.node
        says = [self._says(sample.position, node)]
        while sample.follow and (*self.contexts[node], says[-1]) in self.contexts:
            node = self.contexts.index((*self.contexts[node], says[-1]))
            says.append(self._says(sample.position + len(says), node))
        return e.Sampled(tuple(says))

    def _says(self, position: int, node: int) -> int:
        assert node >= len(self.fed) - self.rows, "no row was kept for this position"
        assert self.contexts[node] == self.text[:position], "the row is of another context"
        return self.text[position]


class ScriptDraft:
    """A draft that writes the tokens of `text`, except at the positions in `wrong`.

    If its options ask for runners-up, the runner-up is the right token at a position where its own
    token is wrong.

    Args:
        foresees: positions for which it prepares another outcome. If its own token there is wrong,
            this outcome is the right token.
        stops: positions after which its stop policy ends drafting. If the policy withholds tokens,
            these are the positions whose tokens are withheld.
        twice: positions at which one forward gives two tokens, as if it had confirmed a guess.
    """

    def __init__(
        self,
        text: Sequence[int],
        wrong: Collection[int] = (),
        foresees: Collection[int] = (),
        stops: Collection[int] = (),
        twice: Collection[int] = (),
    ) -> None:
        self.text = tuple(text)
        self.twice = frozenset(twice)
        self.wrong = frozenset(wrong)
        self.foresees = frozenset(foresees)
        self.stops = frozenset(stops)
        self.cache = Cache()
        self.branches: dict[tuple[int, int], tuple[int, ...]] = {}
        self.ranks = self.withholds = False

    def execute(self, command: object) -> object | None:
        match command:
            case e.Open():
                self.ranks, self.withholds = (
                    command.options.sends_runners_up,
                    command.options.withholds,
                )
                return None
            case e.Rollback(length):
                self.cache.rollback(length)
                self.branches = {
                    after: tokens for after, tokens in self.branches.items() if after[0] <= length
                }
                return None
            case e.Draft(start, tokens, budget, pending, hedge, bonus):
                if tokens or not hedge:
                    self.cache.feed(start, tokens)
                if hedge:
                    return self._hedged(pending, hedge, bonus)
                if not budget:
                    return e.Drafted()
                known = len(self.cache.tokens)
                if self.withholds and known in self.stops:
                    return e.Drafted(paused=True)
                branches = self._prepared(known - pending, known + budget)
                said = self._says(self.cache.tokens)
                if known in self.twice and budget > 1 and not self.ranks and not branches:
                    self.cache.tokens.append(said)
                    more = self._says(self.cache.tokens)
                    return e.Drafted((said, more), cached=1, paused=known + 1 in self.stops)
                seen = (
                    (Seen(3, (self.text[known] if said == WRONG else OTHER, LOST)),)
                    if self.ranks
                    else ()
                )
                return e.Drafted((said,), branches=branches, paused=known in self.stops, seen=seen)
        raise AssertionError(command)

    def _says(self, prefix: Sequence[int]) -> int:
        position = len(prefix)
        if tuple(prefix) != self.text[:position]:
            return LOST
        return WRONG if position in self.wrong else self.text[position]

    def _hedged(self, pending: int, depth: int, bonus: bool) -> e.Drafted:
        """Extend each branch by one token; pause if there is no branch to extend."""
        before, known = dict(self.branches), len(self.cache.tokens)
        branches = self._prepared(known - pending, len(self.text), depth, bonus)
        return e.Drafted(branches=branches, paused=self.branches == before)

    def _prepared(
        self, committed: int, until: int, depth: int = 99, bonus: bool = False
    ) -> tuple[Proposal, ...]:
        """Extend the branch of each foreseen outcome by one token; drop branches that are past."""
        known = self.cache.tokens
        opened = {
            (p, self.text[p] if known[p] == WRONG else OTHER): ()
            for p in self.foresees
            if p < len(known)
        }
        if bonus and len(known) in self.foresees and len(known) < len(self.text):
            opened[len(known), self.text[len(known)]] = ()
        every = {
            after: tokens
            for after, tokens in (opened | self.branches).items()
            if after[0] >= committed
        }
        for after, tokens in every.items():
            if after[0] + 1 + len(tokens) < until and len(tokens) < depth:
                every[after] = (*tokens, self._says([*known[: after[0]], after[1], *tokens]))
        self.branches = every
        return tuple(
            Proposal(
                after[0] + 1,
                tokens,
                after=after,
                seen=(Seen(7),) * len(tokens) if self.ranks else (),
            )
            for after, tokens in every.items()
            if tokens
        )
