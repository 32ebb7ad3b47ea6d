"""Carries out the target's commands that compute: forwards, judgements, draws, guesses. Knows no sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from msgspec.structs import replace

from pearl.config.options import LEAST_LOGPROB
from pearl.decoding.rules import Proposed, TargetHalf, make_half
from pearl.decoding.rules.direct import DirectDraw
from pearl.decoding.sampling import read_draw
from pearl.decoding.shaping import MakeGuide, Shaper, make_shaper
from pearl.drafting.datastore import Datastore
from pearl.drafting.fused_guesses import index_factory
from pearl.drafting.heads import HeadGuesses, TargetStates
from pearl.drafting.ngram import GuessWindow, NgramIndex, anchored, guess_tree
from pearl.drafting.output_ngrams import Habits
from pearl.errors import NumericalError
from pearl.models.feeds import depths, paths
from pearl.models.heads.head import Head
from pearl.models.out_of_memory import memory_errors
from pearl.models.runner import Feed, ModelRunner
from pearl.protocol.events import (
    Drafted,
    Forward,
    Forwarded,
    Guess,
    Guessed,
    Judge,
    Judged,
    Keep,
    Open,
    Phase,
    Rollback,
    Sample,
    Sampled,
    Spread,
)
from pearl.protocol.messages import HiddenStates, Logprobs, Verdict
from pearl.protocol.speeds import Cores
from pearl.spec.methods import METHODS, Method
from pearl.spec.rules import Needs, RuleSpec
from pearl.text.stream import TextStream

Event = Guessed | Forwarded | Judged | Sampled | Drafted  # what answers a command


@dataclass(slots=True)
class _Request:
    """The state of one request.

    Attributes:
        text: finds stop strings; None if there are none.
        prompt: the tokens that it began with.
        predicted: the tokens that its client expects after them.
        shaper: changes its logits; None if nothing changes them.
        index: what guesses are made from; None before the first `Guess`.
        logits: [rows, vocab], of the last tokens fed in its last forward.
        launched: results for these rows that judging needs, launched with the forward; None if it was not.
        draws: [rows, 2], the target's own draws, likewise.
        fed: that forward.
        logprobs: see `RequestOptions`. raw: as `logits`, before the shaper.
        said: log probabilities of decided tokens by position, until delivered.
    """

    slot: int
    rule: TargetHalf
    direct: DirectDraw
    spec: RuleSpec
    text: TextStream | None
    prompt: tuple[int, ...]
    shaper: Shaper | None
    method: Method
    predicted: tuple[int, ...] = ()
    index: NgramIndex | None = None
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    launched: torch.Tensor | None = None
    draws: torch.Tensor | None = None
    fed: Forward | None = None
    logprobs: int | None = None
    raw: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    said: dict[int, Logprobs] = field(default_factory=dict)

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Raise `GrammarError` for a row without a possible token, if a grammar is the reason."""
        try:
            yield
        except NumericalError as error:
            if self.shaper is None or self.shaper.stuck is None:
                raise
            raise self.shaper.stuck from error

    def positions(self) -> list[int]:
        """The positions that the rows are for."""
        assert self.fed is not None
        tokens, parents = len(self.fed.tokens), self.fed.parents
        depth = range(tokens) if parents is None else depths(parents)
        return [self.fed.start + 1 + depth[node] for node in range(tokens - self.fed.rows, tokens)]

    def row(self, node: int) -> int:
        """The index in `logits` of the row of a token of the last forward."""
        assert self.fed is not None
        return node - len(self.fed.tokens) + self.fed.rows

    def children(self) -> dict[int, dict[int, int]]:
        """For each token of the last forward: token id -> its child with that id."""
        assert self.fed is not None
        tokens, parents = self.fed.tokens, self.fed.parents
        found: dict[int, dict[int, int]] = {}
        for node, parent in enumerate(range(-1, len(tokens) - 1) if parents is None else parents):
            found.setdefault(parent, {}).setdefault(tokens[node], node)
        return found

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The tokens of the last forward that are `tokens`, a chain from its first one on, as far as they were fed."""
        children, found = self.children(), list[int]()
        for token in tokens:
            node = children.get(found[-1] if found else -1, {}).get(token)
            if node is None:
                break
            found.append(node)
        return found

    def say(self, position: int, tokens: Sequence[int], rows: Sequence[int]) -> None:
        """Keep the log probabilities of decided tokens from `position` on, from `rows` of the last forward."""
        if self.logprobs is None or not tokens:
            return
        logits = self.raw[list(rows)].float()
        own = torch.tensor(tokens, device=logits.device).unsqueeze(1)
        every = torch.log_softmax(logits, -1).clamp_(LEAST_LOGPROB, 0.0)
        top, ids = every.topk(min(self.logprobs, logits.shape[-1]))
        found = zip(
            every.gather(1, own).squeeze(1).tolist(), ids.tolist(), top.tolist(), strict=True
        )
        for at, (logprob, likeliest, values) in enumerate(found, position):
            self.said[at] = Logprobs(logprob, tuple(zip(likeliest, values, strict=True)))

    def stop_after(self, tokens: Sequence[int]) -> int | None:
        if self.text is not None:
            for count, token in enumerate(tokens, start=1):
                self.text.push(token)
                if self.text.stopped:
                    return count
        return None


@dataclass(frozen=True, slots=True)
class _Share:
    """One request's share of a forward.

    Attributes:
        window: nodes of the request's index, fed after the command's tokens; None: the index has none.
        feed: the command's tokens and the window.
    """

    command: Forward
    request: _Request
    window: GuessWindow | None
    feed: Feed


class TargetExecutor:
    """Computes for the coordinator.

    Args:
        runner: the target model.
        text_stream: (prompt, stops, reasoning=) -> a TextStream that finds the stop strings.
        datastore, habits: sources of guesses beside the text; habits learn what is committed.
        spread: called with the cores to compute on; None: there is no choice.
        launches: whether judging is launched before a forward has ended, so that a device goes from one to the other
            without waiting for the host. None: on every device but the host, where it would compute draws that a
            rejection makes needless.
        guides: make the guides of grammars.
        head: guesses too, for methods that take its guesses; the runner keeps features for it.
        gives_states: whether the draft reads hidden states, which the runner keeps.

    Attributes:
        chooses_cores: whether `Spread` changes anything.
        meanwhile: called while a forward is computed that was launched: work of the host for which none has to wait.
    """

    def __init__(
        self,
        runner: ModelRunner,
        text_stream: Callable[..., TextStream] | None = None,
        datastore: Datastore | None = None,
        spread: Callable[[Cores], None] | None = None,
        launches: bool | None = None,
        guides: MakeGuide | None = None,
        habits: Habits | None = None,
        head: Head | None = None,
        gives_states: bool = False,
    ) -> None:
        self.runner, self._guides = runner, guides
        self._head, self.has_head, self._gives_states = head, head is not None, gives_states
        self._states = TargetStates(runner, head, gives_states)
        self.launches = runner.device.type != "cpu" if launches is None else launches
        self.meanwhile: Callable[[], None] = lambda: None
        self._datastore, self._habits = datastore, habits
        self.chooses_cores = spread is not None
        self._text_stream, self._spread = text_stream, spread or (lambda cores: None)
        self._requests: dict[int, _Request] = {}

    def needs_rows(self, request: int) -> bool | None:
        """Whether judging the request takes the draft's distributions; None: it was not opened."""
        found = self._requests.get(request)
        return None if found is None else found.spec.needs is not Needs.NOTHING

    @memory_errors
    def execute(self, command: object) -> Event | None:
        """The event that answers `command`; None if it needs no answer.

        Raises `ForwardError` if the result cannot be used.
        """
        match command:
            case Open():
                self._open(command)
            case Rollback(length):
                slot = self._requests[command.request].slot
                self.runner.rollback(length, slot)
                self._states.rollback(length, slot)
            case Guess():
                return self._guess(command)
            case Spread(cores):
                self._spread(cores)
            case Keep(path):
                self._keep(path, self._requests[command.request])
            case Forward():
                return self.forward([command])[0]
            case Judge():
                return self._judged(self._requests[command.request], command)
            case Sample():
                return self._sampled(self._requests[command.request], command)
            case _:
                raise AssertionError(command)
        return None

    def _open(self, command: Open) -> None:
        self._requests = {
            number: each for number, each in self._requests.items() if each.slot != command.slot
        }
        options, text = command.options, None
        if options.stop:
            assert self._text_stream is not None
            text = self._text_stream(command.prompt, options.stop, reasoning=options.reasoning)
        self._requests[command.request] = _Request(
            command.slot,
            make_half("target", options),
            DirectDraw(options),
            options.rule_in_force,
            text,
            command.prompt,
            make_shaper(options, command.prompt, self._guides),
            METHODS[options.method],
            options.predicted,
            logprobs=options.logprobs,
        )

    def _guess(self, command: Guess) -> Guessed:
        """See `Guess`. A runner that takes no trees gets a chain behind the text."""
        request = self._requests[command.request]
        if request.index is None:
            request.index = self._make_index(request)
        index = request.index
        index.cut(command.base)
        index.extend(command.tokens)
        index.has_head = command.head
        if self._states.texts and request.fed is not None:
            self._log_path(request, index.tokens[request.fed.start : command.committed])
        index.learn(command.committed)
        anchors = anchored(index.tokens, command.committed, command.trust, command.alternatives)
        nodes, is_tree = (
            self.runner.capabilities.tree_nodes - len(anchors),
            self.runner.capabilities.tree_nodes > 0,
        )
        # In a tree the unfed tokens, the last committed one and the pending ones, are nodes too.
        anchors, nodes = (anchors, nodes) if is_tree else (anchors[-1:], command.most)
        tokens, parents, chances, sources = guess_tree(
            index, anchors, command.most, command.limit, is_tree, nodes
        )
        return Guessed(
            tuple(tokens), tuple(parents), tuple(chances), tuple(sources), request=command.request
        )

    def _log_path(self, request: _Request, tokens: Sequence[int]) -> int:
        """Log the states of `tokens`, which the text has from the first position of the last forward on, if that fed a
        tree: it may be settled only later. The position up to which they were fed.
        """
        assert request.fed is not None
        path = request.path(tokens)
        if request.fed.parents is not None:
            self._states.extend(request.fed.start, request.slot, path)
        return request.fed.start + len(path)

    def states(self, verdict: Verdict) -> Iterable[HiddenStates]:
        """What to send the draft before a verdict, if it reads hidden states: those of tokens committed and fed."""
        request = self._requests.get(verdict.request)
        if request is None or request.fed is None or not self._gives_states:
            return ()
        before = verdict.start - request.fed.start
        end = self._log_path(
            request, (*request.fed.tokens[: max(0, before)], *verdict.tokens[max(0, -before) :])
        )
        return self._states.messages(verdict.request, end, request.slot)

    def _make_index(self, request: _Request) -> NgramIndex:
        takes_head = self._head is not None and request.method.takes_head
        head = partial(self._head_guesses, request) if takes_head else None
        make_index = index_factory(request.method.guesses)
        return make_index(request.prompt, self._datastore, self._habits, head, request.predicted)

    def _head_guesses(self, request: _Request, tokens: Sequence[int]) -> HeadGuesses:
        assert self._head is not None
        ids, vocab = self._head.ids, self.runner.vocab_size

        def draw(logits: torch.Tensor, position: int) -> int:
            if request.direct.options.temperature == 0:
                return int(ids[logits.argmax()])
            every = logits.new_full((vocab,), -torch.inf)
            every[ids] = logits
            return read_draw(request.direct(every, position))

        return HeadGuesses(self._states.texts[request.slot], tokens, draw)

    @memory_errors
    def forward(self, commands: Sequence[Forward]) -> list[Forwarded]:
        """One forward of the model for several requests; the event that answers each. Raises as `execute`."""
        began = time.perf_counter()
        shares = [self._share(command) for command in commands]
        logits = self.runner.forward([share.feed for share in shares])
        for share, rows in zip(shares, logits, strict=True):
            self._take_rows(share, rows)
        if self.launches:
            self.meanwhile()
        self.runner.synchronize()
        now = time.perf_counter()
        fed = sum(len(share.feed.tokens) for share in shares)  # windows of indexes too
        has_prompts = any(command.phase is Phase.PREFILL for command in commands)
        results = []
        for command in commands:
            beside = None if has_prompts else fed - len(command.tokens)
            results.append(Forwarded(now - began, now, beside, request=command.request))
        return results

    def _share(self, command: Forward) -> _Share:
        """Make the feed of a command, and take a window from the request's index if it has one."""
        request = self._requests[command.request]
        length = self.runner.length(request.slot)
        assert length == command.start, (length, command)
        is_prompt = command.phase is Phase.PREFILL
        feed = Feed(command.tokens, command.rows, request.slot, command.parents, is_prompt)
        window = None
        if request.index is not None and command.rows and not is_prompt:
            most = self.runner.capabilities.tree_nodes - len(command.tokens)
            window = request.index.window(most, self.runner.context - command.start)
        if window is not None:
            feed = _with_window(feed, window)
        return _Share(command, request, window, feed)

    def _take_rows(self, share: _Share, rows: torch.Tensor) -> None:
        """Give the request the logits of its rows, and launch what judging needs of them."""
        command = share.command
        request = share.request
        if share.window is not None:
            self._take_window(share, share.window, rows)
            rows = rows[: command.rows]
        request.raw = rows
        request.fed = command
        request.launched = None
        request.draws = None
        if command.parents is None:
            self._states.extend(command.start, request.slot)
        request.logits = _shaped(request.shaper, command, rows)
        if self.launches and command.rows:
            self._launch(request)

    def _take_window(self, share: _Share, window: GuessWindow, rows: torch.Tensor) -> None:
        """Draw after the last level of the window, and give the index these draws."""
        command = share.command
        request = share.request
        assert request.index is not None
        if command.parents is None:  # a chain continues the text at once
            self.runner.keep(range(len(command.tokens)), request.slot)
        first = command.start + window.levels + 1  # the position that column 0's row is for
        positions = range(first, first + window.columns)
        draws = request.direct.rows(rows[-window.columns :], positions).cpu()
        request.index.take([read_draw(draw) for draw in draws])

    def _launch(self, request: _Request) -> None:
        """Launch what judging needs, and the target's own draws."""
        positions = request.positions()
        request.launched = request.rule.launch(request.logits, positions)
        if request.spec.is_proposal_invariant:  # it is the draws
            request.draws = request.launched
        elif (
            not request.direct.is_filtered
        ):  # to sort every row would take longer than to wait for those that are drawn
            request.draws = request.direct.rows(request.logits, positions).to(
                "cpu", non_blocking=True
            )

    def _keep(self, path: Sequence[int], request: _Request) -> None:
        assert request.fed is not None
        self._states.extend(request.fed.start, request.slot, path)
        self.runner.keep(path, request.slot)
        if request.shaper is not None:
            request.shaper.extend(request.fed.tokens[node] for node in path)

    def _judged(self, request: _Request, command: Judge) -> Judged:
        rows = [row for row in command.rows if row is not None]
        first, count = request.row(command.nodes[0]), len(command.nodes)
        at: slice | list[int] = slice(first, first + count)  # no copy
        if command.nodes != tuple(range(command.nodes[0], command.nodes[0] + count)):
            at = [request.row(node) for node in command.nodes]
        proposed = Proposed(request.logits[at], command.tokens, rows, command.start)
        if request.launched is not None:
            proposed = proposed._replace(launched=request.launched[at])
        with request.blamed():
            verdict = request.rule.judge(proposed)
            index = request.index
            is_cut_short = verdict.accepted + 1 < len(command.tokens)
            if index is not None and index.reads_discarded and is_cut_short:
                self._reuse(request, index, command, verdict.accepted)
        new = list(command.tokens[: verdict.accepted])
        if verdict.token is not None:
            new.append(verdict.token)
        request.say(command.start, new, [request.row(node) for node in command.nodes[: len(new)]])
        return replace(verdict, stop_after=request.stop_after(new), request=command.request)

    def _reuse(self, request: _Request, index: NgramIndex, command: Judge, accepted: int) -> None:
        """Give the index the tokens that are discarded, and the target's draws behind them but the last."""
        rows = [request.row(node) for node in command.nodes[accepted + 1 :]]
        positions = [command.start + number for number in range(accepted + 1, len(command.tokens))]
        draws = request.direct.rows(request.logits[rows], positions).cpu()
        index.discarded(command.tokens[accepted:-1], [read_draw(draw) for draw in draws])

    def _sampled(self, request: _Request, command: Sample) -> Sampled:
        children = request.children() if command.follow else {}
        tokens: list[int] = []
        rows: list[int] = []
        at: int | None = command.node
        with request.blamed():
            while at is not None:
                rows.append(request.row(at))
                position = command.position + len(tokens)
                if request.draws is None:
                    draw = request.direct(request.logits[rows[-1]], position)
                else:
                    draw = request.draws[rows[-1]]
                tokens.append(read_draw(draw))
                at = children.get(at, {}).get(tokens[-1])
        request.say(command.position, tokens, rows)
        return Sampled(tuple(tokens), request.stop_after(tokens), request=command.request)

    def logprobs(self, request: int, start: int, count: int) -> tuple[Logprobs, ...]:
        """Log probabilities of `count` decided tokens from `start` on, once; empty if the request wants none."""
        found = self._requests.get(request)
        if found is None or found.logprobs is None:
            return ()
        return tuple(found.said.pop(at) for at in range(start, start + count))


def _with_window(feed: Feed, window: GuessWindow) -> Feed:
    """Return one tree of `feed`, whose first token is the text's last, and a window after that token."""
    size = len(feed.tokens)
    parents = list(range(-1, size - 1) if feed.parents is None else feed.parents)
    for parent in window.parents:
        parents.append(0 if parent < 0 else size + parent)
    tokens = (*feed.tokens, *window.tokens)
    return Feed(tokens, feed.rows + len(window.tokens), feed.slot, tuple(parents))


def _shaped(shaper: Shaper | None, fed: Forward, logits: torch.Tensor) -> torch.Tensor:
    """The logits with penalties, biases and grammar of the text before each row."""
    if shaper is None:
        return logits
    shaper.hold(fed.start)
    if fed.parents is None:
        return shaper.chain(logits, fed.tokens)
    return shaper.tree(logits, fed.tokens, paths(fed.parents))
