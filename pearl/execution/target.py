"""Carries out those commands of the target that compute: forwards, judgements, draws and guesses.

This file knows no sockets.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from msgspec.structs import replace

from pearl.config.option_values import LEAST_LOGPROB
from pearl.decoding.rules import Proposed, TargetHalf, make_half
from pearl.decoding.rules.direct import DirectDraw
from pearl.decoding.sampling import read_draw
from pearl.decoding.shaping import MakeGuide, Shaper, make_shaper
from pearl.drafting.datastore import Datastore
from pearl.drafting.fused_guesses import index_factory
from pearl.drafting.heads import HeadGuesses, TargetStates
from pearl.drafting.ngram import GuessTree, GuessWindow, NgramIndex, anchored, guess_tree
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
from pearl.protocol.fed_tokens import FedTokens
from pearl.protocol.messages import HiddenStates, TokenDetails, Verdict
from pearl.protocol.speeds import Cores
from pearl.spec.methods import METHODS, Method
from pearl.spec.rules import Needs, RuleSpec
from pearl.text.stream import TextStream

Event = Forwarded | Drafted  # the events that answer commands


@dataclass(slots=True)
class _Request:
    """The state of one request in the target.

    Attributes:
        rule: the target's half of the acceptance rule.
        direct: draws from the target alone.
        spec: the declaration of the rule.
        text: finds stop strings; None if the request has none.
        prompt: the tokens that the request began with.
        shaper: applies penalties, biases and grammars to logits; None if the request has none.
        predicted: the tokens that the client expects after the prompt.
        index: source of guesses; None before the first `Guess`.
        logits: [rows, vocab], the logits after the last tokens in `fed`, changed by the shaper.
        launched: what `TargetHalf.launch` returned for `logits`; None if it was not called.
        draws: [rows, 2], the target's own draws from `logits`, launched with the forward; None if
            they were not launched.
        fed: the tokens that the request's last forward was fed.
        raw: `logits` before the shaper changed them.
        details: details of decided tokens by position, kept until they are delivered.
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
    fed: FedTokens = field(default_factory=lambda: FedTokens(0, ()))
    raw: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    details: dict[int, TokenDetails] = field(default_factory=dict)

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Replace a `NumericalError` by the `GrammarError` that caused it, if there is one.

        A grammar that allows no token makes all logits minus infinity.
        """
        try:
            yield
        except NumericalError as error:
            if self.shaper is None or self.shaper.stuck is None:
                raise
            raise self.shaper.stuck from error

    def positions(self) -> list[int]:
        """Return the position that each row of `logits` is for."""
        num_tokens = len(self.fed.tokens)
        depth: Sequence[int] = range(num_tokens)
        if self.fed.parents is not None:
            depth = depths(self.fed.parents)
        first = num_tokens - len(self.logits)
        return [self.fed.start + 1 + depth[node] for node in range(first, num_tokens)]

    def row(self, node: int) -> int:
        """Return the index in `logits` of the row after `node`, the index of a token in `fed`."""
        return node - len(self.fed.tokens) + len(self.logits)

    @property
    def has_details(self) -> bool:
        """Whether the options ask for any `TokenDetails`."""
        return self.direct.options.logprobs is not None

    def add_details(self, position: int, tokens: Sequence[int], rows: Sequence[int]) -> None:
        """Compute and keep the details of decided tokens from `position` on.

        `rows`: for each token, the index in `logits` of the row that decided it.
        """
        if not tokens or not self.has_details:
            return
        logits = self.raw[list(rows)].float()
        logprobs = torch.log_softmax(logits, -1).clamp_(LEAST_LOGPROB, 0.0)
        count = self.direct.options.logprobs or 0
        top = logprobs.topk(min(count, logits.shape[-1]))
        ids = top.indices.tolist()
        values = top.values.tolist()
        chosen = logprobs[range(len(tokens)), list(tokens)].tolist()
        for index, logprob in enumerate(chosen):
            likeliest = tuple(zip(ids[index], values[index], strict=True))
            self.details[position + index] = TokenDetails(logprob, likeliest)

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
        fed: the command's tokens and the guesses fed with them.
        window: further tokens that the request's index wants to be fed; None if it wants none.
        feed: `fed` and `window` in the form that the runner takes.
    """

    command: Forward
    request: _Request
    fed: FedTokens
    window: GuessWindow | None
    feed: Feed


class TargetExecutor:
    """Carries out the commands of a `Coordinator`, and is its `Verifier`.

    Args:
        runner: the target model.
        text_stream: function (prompt, stops, reasoning=) -> a `TextStream`, which finds stop
            strings.
        datastore: a source of guesses; None if there is none.
        spread: called with the cores to compute on; None if cores cannot be chosen.
        launches: whether to launch the computation that judging needs before the forward has ended,
            so that the device need not wait for the host in between. The default is
            False on a CPU, so that no draw after a rejection is computed, and True on any other
            device.
        guides: makes the guides of grammars.
        habits: n-grams of earlier outputs, a source of guesses that learns from committed tokens.
        head: the target's drafting head, whose guesses some methods take; the runner keeps hidden
            states for it.
        gives_states: whether the draft reads the target's hidden states, which the runner then
            keeps.
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
        self.runner = runner
        self.head = head
        self.spread = spread
        self.launches = launches
        if launches is None:
            self.launches = runner.device.type != "cpu"
        self._guides = guides
        self._gives_states = gives_states
        self._states = TargetStates(runner, head, gives_states)
        self._datastore = datastore
        self._habits = habits
        self._text_stream = text_stream
        self._requests: dict[int, _Request] = {}

    def needs_rows(self, number: int) -> bool | None:
        """Return whether a request's rule needs draft distributions; None if it was not opened."""
        if number not in self._requests:
            return None
        return self._requests[number].spec.needs is not Needs.NOTHING

    @memory_errors
    def execute(self, command: object) -> Event | None:
        """Carry out `command`; return the event that answers it, or None if it needs no answer.

        Raises `ForwardError` if the result cannot be used.
        """
        match command:
            case Open():
                self._open(command)
            case Rollback(length):
                slot = self._requests[command.request].slot
                self.runner.rollback(length, slot)
                self._states.rollback(length, slot)
            case Spread(cores):
                if self.spread is not None:
                    self.spread(cores)
            case Keep(path):
                self._keep(path, self._requests[command.request])
            case Forward():
                return self.forward([command])[0]
            case _:
                raise AssertionError(command)
        return None

    def _open(self, command: Open) -> None:
        for number, request in list(self._requests.items()):
            if request.slot == command.slot:
                del self._requests[number]
        options = command.options
        text = None
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
        )

    def _guess(self, request: _Request, guess: Guess, num_fed: int) -> GuessTree:
        """Return the tree of guesses that pay when fed together with `num_fed` tokens of the text.

        If the runner takes no trees, return a chain of guesses after the text.
        """
        if request.index is None:
            request.index = self._make_index(request)
        index = request.index
        index.cut(guess.base)
        index.extend(guess.tokens)
        index.has_head = guess.head
        index.learn(guess.committed)
        anchors = anchored(index.tokens, guess.committed, guess.trust, guess.alternatives)
        is_tree = self.runner.capabilities.tree_nodes > 0
        if is_tree:
            # The last committed token and the pending tokens are nodes of the tree too.
            room = self.runner.capabilities.tree_nodes - len(anchors)
        else:
            anchors = anchors[-1:]
            room = guess.most
        most = max(0, min(room, guess.most_in_all))
        payoff = guess.payoff(num_fed, most)
        tree = guess_tree(index, anchors, guess.most, guess.limit, is_tree, most, payoff)
        return tree.first(payoff.count)

    def _fed(self, request: _Request, command: Forward) -> FedTokens:
        """Return the command's tokens together with the guesses that are worth feeding."""
        fed = FedTokens(command.start, command.tokens)
        if command.guess is None:
            return fed
        num_fed = len(command.tokens)
        tree = self._guess(request, command.guess, num_fed)
        if not tree.tokens:
            return fed
        length = command.guess.base + len(command.guess.tokens)
        parents = list(range(-1, num_fed - 1))
        for parent in tree.parents:
            if parent < length:  # a position of the text
                parents.append(parent - command.start)
            else:  # a guess
                parents.append(parent - length + num_fed)
        tokens = command.tokens + tuple(tree.tokens)
        guessers = tuple(tree.sources)
        if parents == list(range(-1, len(tokens) - 1)):
            return FedTokens(command.start, tokens, None, guessers)
        return FedTokens(command.start, tokens, tuple(parents), guessers)

    def _log_path(self, request: _Request, tokens: Sequence[int]) -> int:
        """Return the position of the first of `tokens` that the last forward was not fed.

        If the forward was fed a tree, the tokens before this position are a path in the tree. Log
        their hidden states. The KV cache still has all nodes of the tree, because the cache is cut
        down to a path only before the next forward.

        Args:
            tokens: the text from the forward's first position on.
        """
        path = request.fed.walk(-1, tokens)
        if request.fed.parents is not None:
            self._states.extend(request.fed.start, request.slot, path)
        return request.fed.start + len(path)

    def states(self, verdict: Verdict) -> Iterable[HiddenStates]:
        """Return messages with hidden states, to be sent to the draft before `verdict`.

        The messages have the states of the committed tokens that the target was fed, without those
        states that were sent before. There are no messages if the draft reads no hidden states.
        """
        request = self._requests.get(verdict.request)
        if request is None or not request.fed.tokens or not self._gives_states:
            return ()
        offset = verdict.start - request.fed.start
        prefix = request.fed.tokens[: max(0, offset)]
        end = self._log_path(request, prefix + verdict.tokens[max(0, -offset) :])
        return self._states.messages(verdict.request, end, request.slot)

    def _make_index(self, request: _Request) -> NgramIndex:
        head = None
        if self.head is not None and request.method.takes_head:
            head = partial(self._head_guesses, request, self.head)
        make_index = index_factory(request.method.guesses)
        return make_index(request.prompt, self._datastore, self._habits, head, request.predicted)

    def _head_guesses(self, request: _Request, head: Head, tokens: Sequence[int]) -> HeadGuesses:
        def draw(logits: torch.Tensor, position: int) -> int:
            if request.direct.options.temperature == 0:
                return int(head.ids[logits.argmax()])
            target_logits = logits.new_full((self.runner.vocab_size,), -torch.inf)
            target_logits[head.ids] = logits
            return read_draw(request.direct(target_logits, position))

        return HeadGuesses(self._states.texts[request.slot], tokens, draw)

    @memory_errors
    def forward(
        self, commands: Sequence[Forward], meanwhile: Callable[[], None] = lambda: None
    ) -> list[Forwarded]:
        """Compute one forward for several requests; return the event that answers each command.

        Raises `ForwardError` as `execute` does. `meanwhile` is called while a device other than the
        CPU computes; it does work of the host that nothing waits for.
        """
        shares = [self._share(command) for command in commands]
        began = time.perf_counter()
        logits = self.runner.forward([share.feed for share in shares])
        for share, rows in zip(shares, logits, strict=True):
            self._take_rows(share, rows)
        if self.launches:
            meanwhile()
        self.runner.synchronize()
        now = time.perf_counter()
        num_fed = sum(len(share.feed.tokens) for share in shares)  # includes the windows of indexes
        has_prompts = any(command.phase is Phase.PREFILL for command in commands)
        events = []
        for share in shares:
            num_others = num_fed - len(share.fed.tokens)
            forwarded = Forwarded(
                now - began,
                now,
                None if has_prompts else num_others,
                share.fed,
                request=share.command.request,
            )
            events.append(forwarded)
        return events

    def _share(self, command: Forward) -> _Share:
        """Return a command's share of a forward.

        It has the command's tokens, the guesses fed with them, and the window of the request's
        index, if there is one.
        """
        request = self._requests[command.request]
        length = self.runner.length(request.slot)
        assert length == command.start, (length, command)
        fed = self._fed(request, command)
        is_prompt = command.phase is Phase.PREFILL
        rows = command.rows + len(fed.guessers)
        feed = Feed(fed.tokens, rows, request.slot, fed.parents, is_prompt)
        window = None
        if request.index is not None and command.rows and not is_prompt:
            num_nodes = self.runner.capabilities.tree_nodes - len(fed.tokens)
            window = request.index.window(num_nodes, self.runner.context - command.start)
        if window is not None:
            feed = _with_window(feed, window)
        return _Share(command, request, fed, window, feed)

    def _take_rows(self, share: _Share, rows: torch.Tensor) -> None:
        """Store the logits `rows` of a request, and launch what judging needs."""
        fed = share.fed
        request = share.request
        if share.window is not None:
            self._take_window(share, share.window, rows)
            rows = rows[: share.command.rows + len(fed.guessers)]
        request.raw = rows
        request.fed = fed
        request.launched = None
        request.draws = None
        if fed.parents is None:
            self._states.extend(fed.start, request.slot)
        request.logits = _shaped(request.shaper, fed, rows)
        if self.launches and len(rows):
            self._launch(request)

    def _take_window(self, share: _Share, window: GuessWindow, rows: torch.Tensor) -> None:
        """Draw after each node of the window's last level, and pass the draws to the index."""
        fed = share.fed
        request = share.request
        assert request.index is not None
        if fed.parents is None:  # drop the window now, because no `Keep` follows after a chain
            self.runner.keep(range(len(fed.tokens)), request.slot)
        start = fed.start + window.levels + 1  # the position that column 0's row is for
        positions = range(start, start + window.columns)
        draws = request.direct.rows(rows[-window.columns :], positions).cpu()
        request.index.take([read_draw(draw) for draw in draws])

    def _launch(self, request: _Request) -> None:
        """Launch what judging needs, and the target's own draws."""
        positions = request.positions()
        request.launched = request.rule.launch(request.logits, positions)
        if request.spec.is_proposal_invariant:  # judging needs just the draws
            request.draws = request.launched
        elif (
            not request.direct.is_filtered
        ):  # to sort every row would take longer than to wait for those that are drawn
            request.draws = request.direct.rows(request.logits, positions).to(
                "cpu", non_blocking=True
            )

    def _keep(self, path: Sequence[int], request: _Request) -> None:
        self._states.extend(request.fed.start, request.slot, path)
        self.runner.keep(path, request.slot)
        if request.shaper is not None:
            request.shaper.extend([request.fed.tokens[node] for node in path])

    @memory_errors
    def judge(self, judge: Judge) -> Judged:
        """Judge draft tokens by the request's rule. Raises `ForwardError` for unusable logits."""
        request = self._requests[judge.request]
        draft_rows = [row for row in judge.rows if row is not None]
        rows = [request.row(node) for node in judge.nodes]
        index: slice | list[int] = rows
        if rows == list(range(rows[0], rows[0] + len(rows))):
            index = slice(rows[0], rows[0] + len(rows))  # no copy
        proposed = Proposed(request.logits[index], judge.tokens, draft_rows, judge.start)
        if request.launched is not None:
            proposed = proposed._replace(launched=request.launched[index])
        with request.blamed():
            verdict = request.rule.judge(proposed)
            if request.index is not None and request.index.reads_discarded:
                self._reuse(request, request.index, judge, rows, verdict.accepted)
        new = list(judge.tokens[: verdict.accepted])
        if verdict.token is not None:
            new.append(verdict.token)
        request.add_details(judge.start, new, rows[: len(new)])
        return replace(verdict, stop_after=request.stop_after(new))

    def _reuse(
        self, request: _Request, index: NgramIndex, judge: Judge, rows: list[int], accepted: int
    ) -> None:
        """Pass the discarded draft tokens to the index, with the target's draw after each.

        The last token is left out, because there is no draw after it.
        """
        rows = rows[accepted + 1 :]
        if rows:
            positions = range(judge.start + accepted + 1, judge.start + len(judge.tokens))
            draws = request.direct.rows(request.logits[rows], positions).cpu()
            index.discarded(judge.tokens[accepted:-1], [read_draw(draw) for draw in draws])

    @memory_errors
    def sample(self, sample: Sample) -> Sampled:
        """Draw from the target alone; see `Sample`. Raises `ForwardError` for unusable logits."""
        request = self._requests[sample.request]
        tokens: list[int] = []
        rows = []
        node: int | None = sample.node
        with request.blamed():
            while node is not None:
                row = request.row(node)
                if request.draws is None:
                    draw = request.direct(request.logits[row], sample.position + len(tokens))
                else:
                    draw = request.draws[row]
                rows.append(row)
                tokens.append(read_draw(draw))
                if not sample.follow:
                    break
                node = request.fed.child(node, tokens[-1])
        request.add_details(sample.position, tokens, rows)
        return Sampled(tuple(tokens), request.stop_after(tokens))

    def details(self, number: int, start: int, count: int) -> tuple[TokenDetails, ...]:
        """Return the details of `count` decided tokens from position `start` on, and forget them.

        Return () if the request asks for no details.
        """
        request = self._requests.get(number)
        if request is None or not request.has_details:
            return ()
        return tuple(map(request.details.pop, range(start, start + count)))


def _with_window(feed: Feed, window: GuessWindow) -> Feed:
    """Return `feed` and the window as one tree.

    The window follows the first token of `feed`, which is the text's last token.
    """
    size = len(feed.tokens)
    parents = list(feed.parents or range(-1, size - 1))
    for parent in window.parents:
        parents.append(0 if parent < 0 else size + parent)
    tokens = tuple(feed.tokens) + window.tokens
    return Feed(tokens, feed.rows + len(window.tokens), feed.slot, tuple(parents))


def _shaped(shaper: Shaper | None, fed: FedTokens, logits: torch.Tensor) -> torch.Tensor:
    """Return the logits after penalties, biases and grammar.

    Each row is shaped by the tokens that come before the row's position.
    """
    if shaper is None:
        return logits
    shaper.hold(fed.start)
    if fed.parents is None:
        return shaper.chain(logits, fed.tokens)
    return shaper.tree(logits, fed.tokens, paths(fed.parents))
