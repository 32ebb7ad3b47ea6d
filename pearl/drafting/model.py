"""The proposer that is a model: a forward of its runner, and a keyed draw from the row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from pearl.decoding.rules import DraftHalf, make_draft_half, rule_in_force
from pearl.decoding.rules.joint import JointDraft
from pearl.decoding.sampling import read_draw
from pearl.decoding.shaping import MakeGuide, Shaper, make_shaper
from pearl.drafting.beams import Search, plan_level
from pearl.drafting.branches import Branch, Branches, Foresight, see
from pearl.drafting.datastore import Datastore
from pearl.drafting.guesser import text_index
from pearl.drafting.launch import LaunchedForward, Plan, known, marks_of
from pearl.drafting.ngram import Anchor, TextIndex, guess_tree
from pearl.drafting.proposer import Launched, StopPolicy
from pearl.drafting.rows import Row, confidence, draw_together, largest_of, pauses, shape_of
from pearl.drafting.stops import StopWindow, make_policy
from pearl.errors import NumericalError
from pearl.models.calibrate import calibrate_draft
from pearl.models.runner import Feed, ModelRunner
from pearl.protocol.events import Draft, Drafted, Open, Seen
from pearl.protocol.speeds import ForwardTimes
from pearl.protocol.window import worthwhile
from pearl.spec.rules import Unit

_LONG = 16  # tokens: a forward of more is part of a prompt, and is fed no guesses


@dataclass(slots=True)
class _Text:
    """One request's, as this side of it knows it.

    Attributes:
        slot: of the runner, that holds the text now.
        index: of the tokens fed, for guesses; None where none are to be made.
        most: guesses in one forward.
        branches: prepared for other outcomes; None where none are to be.
        hedges: the most of them in one forward.
        shaper: changes its logits; None where they are taken as they are.
        window: as its stop policy sees it; None where there is no policy.
        drawn: the last token that was drawn for it: (position, token); None before the first.
        has_blocks: whether its rule judges whole blocks, which are searched for; search: the one that goes on.
    """

    rule: DraftHalf
    slot: int
    index: TextIndex | None
    most: int
    branches: Branches | None
    hedges: int
    shaper: Shaper | None
    window: StopWindow | None
    has_blocks: bool
    drawn: tuple[int, int] | None = None
    search: Search | None = None


class ModelProposer:
    """Drafts with a model: one token a forward or, where it guesses well what it will say itself, several.

    A guess is fed behind the last token; while the model's own draw is what was guessed, the row behind it counts too.
    Draws are keyed by position, so the tokens are those that single forwards would give.  The same forward continues
    what would follow if the target decided otherwise (`Branches`), in slots that no text has.

    Args:
        runner: the draft model. A text's cache may move from one of its slots to another.
        vocab_size: the target's. A draft with more ids (padding) never emits them; one with fewer gives the rest
            probability 0.
        policies: makes the stop policy that a request asks for; None of it: drafting stops at the bound alone.
        chains: whether forwards are to be launched one after the other; None: where the runner's can be.
        texts: how many texts there may be at once: the runner's other slots are for branches.
        datastore: where guesses come from, beside the text.
        noted: whether of each token it is to be told what its row says (`Drafted.seen`), as long as a trace wants that.
        guides: of texts that are held to a grammar.
        at_once: whether all rows of a forward are drawn from before one is looked at, so that a device is waited for
            once. None: where it is not the host, which would compute draws that come to nothing.
    """

    def __init__(
        self,
        runner: ModelRunner,
        vocab_size: int,
        policies: Callable[[Open], StopPolicy | None] = make_policy,
        chains: bool | None = None,
        texts: int = 1,
        datastore: Datastore | None = None,
        noted: Callable[[], bool] = lambda: False,
        guides: MakeGuide | None = None,
        at_once: bool | None = None,
    ) -> None:
        self.runner = runner
        self.device = runner.device
        self._at_once = runner.device.type != "cpu" if at_once is None else at_once
        self.chains = runner.capabilities.launches if chains is None else chains
        self._missing = vocab_size - runner.vocab_size
        self._policies = policies
        self._datastore = datastore
        self._noted, self._guides = noted, guides
        self._open: dict[int, _Text] = {}  # by request
        self._times = ForwardTimes()
        self._delay = 0.0  # seconds that a device idles where the next forward waits for what was drawn
        self._texts = texts
        self._slots = {slot: slot for slot in range(texts)}  # which of the runner's has what is asked for as which
        self._foresight = Foresight()

    def measure(self, brief: bool) -> tuple[float, float]:
        return calibrate_draft(self.runner, brief)

    def open(self, command: Open) -> None:
        half = make_draft_half(command.options.rule, command.options.sampling, command.options.parameters)
        place = self._slots.setdefault(command.slot, command.slot)
        before = self._open.get(command.request)
        window = before.window if before is not None else None  # given the prefix anew: its windows go on
        if window is None and (policy := self._policies(command)) is not None:
            window = StopWindow(policy, len(command.prompt))
        self._open = {number: each for number, each in self._open.items() if each.slot != place}
        shaper = make_shaper(command.options.sampling.shaping, command.prompt, self._guides)
        # Where the text changes the logits, a row of its own is drawn from each.
        has_blocks = rule_in_force(command.options.rule, command.options.sampling).unit is Unit.BLOCK
        is_plain = shaper is None and not has_blocks
        index = text_index(command.prompt, self._datastore) if command.options.draft_lookup and is_plain else None
        branches, hedges, lookup = None, command.options.branches, command.options.draft_lookup
        if self.chains:  # the rows of one recording, the last token's among them
            lookup = min(lookup, self.runner.capabilities.tree_nodes - 1)
        elif hedges and is_plain and (spare := self._spare()):
            branches = Branches(self.runner, spare, self._foresight)
        extras = index, lookup, branches, hedges, shaper, window, has_blocks
        self._open[command.request] = _Text(half, place, *extras)

    def chained(self, request: int) -> bool:
        text = self._open[request]
        return self.chains and text.shaper is None and not text.has_blocks

    def awaits(self, command: Draft, delay: float) -> bool:
        """See `Proposer`."""
        text, self._delay = self._open[command.request], delay
        chances = self._guess(text, command)[1] if text.index is not None and self._times.measured else []
        # The first guess is of the token that is waited for; those behind it would be fed with that.
        return worthwhile(chances[1:], 1, 1.0, self._with_guesses(1)) > 0

    def _with_guesses(self, alone: int) -> Callable[[int], float]:
        """How long a forward takes, by the tokens that it is fed; with more than `alone` it has guesses, and the next
        one is launched once the host knows what was drawn.
        """
        delay = self._delay if self.chains else 0.0
        return lambda fed: self._times.seconds(fed) + delay * (fed > alone)

    def _spare(self) -> list[int]:
        """Slots that neither a text has nor its branches: an equal share for each text."""
        held = {slot for text in self._open.values() if text.branches is not None for slot in text.branches.slots}
        taken, every = {*self._slots.values(), *held}, self.runner.capabilities.slots
        share = max(1, (every - self._texts) // self._texts)
        return [slot for slot in range(every) if slot not in taken][:share]

    def rollback(self, length: int, request: int) -> None:
        text = self._open.get(request)
        if text is None:  # of no request: the caches are emptied before a recording, say
            for slot in self._slots.values():
                self.runner.rollback(min(length, self.runner.length(slot)), slot)
            return
        if text.branches is not None:
            text.branches.rollback(length)
        if text.search is not None and length < text.search.end - 1:  # the last token alone is fed again at each level
            text.search = None
        self.runner.rollback(length, text.slot)

    def launch(self, command: Draft, after: Launched | None = None) -> LaunchedForward:
        """See `Proposer`. What a GPU does here is unproven: none was at hand."""
        plan = self._plan(command, after)
        marks = marks_of(self.device)
        marks[0].record()
        logits = self._forward(plan.feeds)
        marks[1].record()
        return plan.finish(logits, marks, plan.fed)

    def launch_together(self, commands: Sequence[Draft]) -> list[Launched | Drafted]:
        """See `Proposer`. Where forwards are chained each is launched by itself: a device computes feeds in turn."""
        fed = [len(command.tokens) for command in commands]
        plans = [self._plan(each, beside=sum(fed) - own) for each, own in zip(commands, fed, strict=True)]
        began, forwarded = marks_of(self.device)[:2]
        began.record()
        logits = self._forward([feed for plan in plans for feed in plan.feeds])
        forwarded.record()
        in_all = sum(plan.fed for plan in plans)
        launched: list[Launched | Drafted] = []
        for plan in plans:
            own, logits = logits[: len(plan.feeds)], logits[len(plan.feeds) :]
            try:
                launched.append(plan.finish(own, [began, forwarded, marks_of(self.device)[2]], in_all))
            except NumericalError as error:
                launched.append(Drafted(failure=str(error), request=plan.request))
        return launched

    def _forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        logits = self.runner.forward(feeds) if feeds else []
        if not self.chains:
            self.runner.synchronize()
        return logits

    def _plan(self, command: Draft, after: Launched | None = None, beside: int = 0) -> Plan:
        """What to feed for one request; `beside`: tokens that the forward is fed for others."""
        text = self._open[command.request]
        assert self.runner.length(text.slot) == command.start, (self.runner.length(text.slot), command)
        if text.shaper is not None:
            text.shaper.hold(command.start)
            text.shaper.extend(command.tokens)
        if text.window is not None and after is None:
            text.window.see(command.start, command.tokens, drafts=command.budget > 0)
        if command.hedge:
            return self._hedging(text, command, beside)
        if text.has_blocks and command.budget:
            assert isinstance(text.rule, JointDraft)
            text.search = search = Search.of(text.search, text.rule, command)
            return plan_level(search, command, self.runner, text.slot, text.shaper, self._fit)
        guesses, hedges = list[int](), list[Branch]()
        if after is not None and after.following is not None:  # nor does the host know what may follow that
            tokens: Sequence[int] | torch.Tensor = after.following
        else:
            unfed = self._unfed(text, command)
            guesses, hedges = self._chosen(text, command, len(unfed), beside)
            tokens = [*known(unfed, self.runner), *guesses]
        feeds = [Feed(tokens, (1 + len(guesses)) * (command.budget > 0), text.slot, prompt=command.prompt)]
        feeds += [Feed(known([branch.unfed], self.runner), 1, branch.slot) for branch in hedges]

        def finish(logits: Sequence[torch.Tensor], marks: Sequence[Any], fed: int) -> LaunchedForward:
            own, *others = logits
            if command.budget == 0:
                marks[-1].record()
                return LaunchedForward(command, marks)
            if guesses or text.branches is not None:
                return self._agreed(text, command, fed, guesses, own, hedges, others, marks)
            return self._drawn(text, command, fed, own[0], marks)

        return Plan(command.request, feeds, sum(len(feed.tokens) for feed in feeds), finish)

    def _drawn(
        self, text: _Text, command: Draft, fed: int, logits: torch.Tensor, marks: Sequence[Any]
    ) -> LaunchedForward:
        """Draws one token, without waiting for what a device has not computed yet."""
        row = self._fit(logits)
        if text.shaper is not None:
            row = text.shaper.shape(row)
        draw, probs = text.rule.draft(row, command.start + len(command.tokens))
        features = shape_of(row, draw[1:]) if text.window is not None else None
        largest = largest_of(row) if self._noted() else None
        following = None
        if self.chains:
            # Of logits that are not finite the draw may be any number, and a wrong id would abort the process.
            following = draw[1:].long().clamp_(0, self.runner.vocab_size - 1)
            draw = draw.to("cpu", non_blocking=True)
            features = None if features is None else features.to("cpu", non_blocking=True)
            largest = None if largest is None else largest.to("cpu", non_blocking=True)
        marks[-1].record()
        rows = () if probs is None else (probs,)
        return LaunchedForward(command, marks, (draw,), rows, following, features, fed, largest=largest)

    def _hedging(self, text: _Text, command: Draft, beside: int) -> Plan:
        """Continues what may follow if the target decides otherwise, as many at once as make most tokens a second."""
        end, hedges, branches = command.start + len(command.tokens), list[Branch](), text.branches
        unfed = self._unfed(text, command)
        if branches is not None:
            cached, until = self.runner.length(text.slot), self.runner.context
            worth = branches.worth(text.hedges, cached, until, command.hedge)
            fed = len(unfed)
            count = worthwhile([chance for chance, _ in worth], beside + fed, float(fed > 0), self._times.seconds)
            found = (branches.branch(after, text.slot) for _, after in worth[:count])
            hedges = [branch for branch in found if branch is not None]
        feeds = [Feed(known(unfed, self.runner), int(command.bonus), text.slot)] if unfed else []
        feeds += [Feed(known([branch.unfed], self.runner), 1, branch.slot) for branch in hedges]

        def finish(logits: Sequence[torch.Tensor], marks: Sequence[Any], fed: int) -> LaunchedForward:
            if branches is not None and unfed and command.bonus:
                branches.see_bonus(end, text.rule, self._fit(logits[0][0]))
            rows, ends = self._ends(hedges, logits[bool(unfed) :])
            self._continue(text, hedges, draw_together(text.rule, rows, ends, is_ranked=True))
            marks[-1].record()
            proposals = () if branches is None else branches.proposals
            return LaunchedForward(command, marks, fed=fed, paused=not feeds, branches=proposals)

        return Plan(command.request, feeds, sum(len(feed.tokens) for feed in feeds), finish)

    def _unfed(self, text: _Text, command: Draft) -> Sequence[int]:
        """Of the command's tokens those whose keys and values are still to be computed: a branch may have some."""
        branches, end = text.branches, command.start + len(command.tokens)
        if branches is None:
            return command.tokens
        slot, held = branches.adopt(command.start, command.tokens, text.slot) if command.tokens else (text.slot, 0)
        branches.settle(command.start, command.tokens, end - command.pending)
        if held:
            place = next(place for place, each in self._slots.items() if each == text.slot)
            text.slot = self._slots[place] = slot
            text.drawn = end - 1, command.tokens[-1]
        return command.tokens[held:]

    def _chosen(self, text: _Text, command: Draft, fed: int, beside: int) -> tuple[list[int], list[Branch]]:
        """What is fed beside `fed` tokens, and `beside` of other requests: what makes most tokens a second of all that
        may be.

        Returns:
            Guesses of what this model will say next, a chain; and what to continue for other outcomes.
        """
        reach = 1.0 if text.branches is None else text.branches.reach()
        guesses, chances = self._guess(text, command)
        worth: list[tuple[float, tuple[int, int]]] = []
        if text.branches is not None and command.budget and fed <= _LONG:
            until = command.start + len(command.tokens) + command.budget
            worth = text.branches.worth(text.hedges, self.runner.length(text.slot), until)
        ranked = sorted([*(reach * chance for chance in chances), *(chance for chance, _ in worth)], reverse=True)
        count = worthwhile(ranked, beside + fed, reach, self._with_guesses(beside + fed))
        least = ranked[count - 1] if count else 2.0
        guesses = guesses[: sum(reach * chance >= least for chance in chances)]
        hedges: list[Branch] = []
        for _, after in [each for each in worth if each[0] >= least]:
            assert text.branches is not None
            branch = text.branches.branch(after, text.slot)
            hedges += [branch] if branch is not None else []
        return known(guesses, self.runner), hedges

    def _guess(self, text: _Text, command: Draft) -> tuple[list[int], list[float]]:
        """What this model is likely to say next: a chain of tokens, and how likely each is with those before it."""
        if text.index is None:
            return [], []
        text.index.cut(command.start)
        text.index.extend(command.tokens)
        end = len(text.index)
        text.index.learn(end)
        most = min(text.most, command.budget - 1)
        if most <= 0 or end - command.start > _LONG:
            return [], []
        tokens, _, chances, _ = guess_tree(text.index, [Anchor(end, 1.0)], most, end + most, branches=False)
        return tokens, chances

    def _ends(self, branches: Sequence[Branch], logits: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
        """Of each branch the row [vocab], of its logits [1, vocab], and the position that it is for."""
        return [self._fit(row) for (row,) in logits], [branch.end for branch in branches]

    def _continue(self, text: _Text, branches: Sequence[Branch], rows: Sequence[Row]) -> None:
        """Adds the next token of each. One that cannot be drawn ends its branch: only the text's own must be finite."""
        for branch, row in zip(branches, rows, strict=True):
            assert text.branches is not None
            assert row.top is not None
            try:
                token = read_draw(row.told)
            except NumericalError:
                text.branches.end(branch)
                continue
            sure = None if text.window is None else confidence(text.window, row.position, row.features)
            branch.seen.append(see(*row.top, row.position, token, text.rule, confidence=sure))
            branch.tokens.append(token)
            branch.rows += [] if row.probs is None else [row.probs]

    def _agreed(
        self,
        text: _Text,
        command: Draft,
        fed: int,
        guesses: Sequence[int],
        logits: torch.Tensor,
        hedges: Sequence[Branch],
        beside: Sequence[torch.Tensor],
        marks: Sequence[Any],
    ) -> LaunchedForward:
        """Draws position after position, as long as what is drawn was guessed; forgets the other guesses.

        `beside`: logits [1, vocab] of each of `hedges`, which goes on too.
        """
        first = command.start + len(command.tokens)
        own, (rows, ends) = list(map(self._fit, logits)), self._ends(hedges, beside)
        count = len(own) if self._at_once else 1
        is_ranked = text.branches is not None or self._noted()
        at = [*ends, *range(first, first + count)]
        together = draw_together(text.rule, [*rows, *own[:count]], at, is_ranked)
        self._continue(text, hedges, together[: len(hedges)])
        later = (
            draw_together(text.rule, [row], [position], is_ranked)[0]
            for position, row in enumerate(own[count:], first + count)
        )
        drawn: list[Row] = []
        seen: list[tuple[int, Seen]] = [] if text.branches is None else text.branches.taken()
        paused, is_root = False, text.drawn != (first - 1, command.tokens[-1])
        for i, row in enumerate(chain(together[len(hedges) :], later)):
            drawn.append(row)
            token = read_draw(row.told)
            sure = None
            if text.window is not None:
                features = row.features
                sure = confidence(text.window, row.position, features)
                paused = pauses(text.window, row.position, token, features)
            if row.top is not None:
                seen.append((row.position, see(*row.top, row.position, token, text.rule, is_root and i == 0, sure)))
            if text.branches is not None:
                text.branches.drafted(*seen[-1])
            if paused or (i < len(guesses) and token != guesses[i]):
                break
        draws = [row.told for row in drawn]
        probs = [row.probs for row in drawn if row.probs is not None]
        cached = len(draws) - 1
        text.drawn = drawn[-1].position, read_draw(drawn[-1].told)
        if guesses:
            self.runner.rollback(first + cached, text.slot)
        marks[-1].record()
        branches = () if text.branches is None else text.branches.proposals
        return LaunchedForward(command, marks, draws, probs, None, None, fed, cached, paused, branches, seen)

    def collect(self, launched: Launched) -> Drafted:
        assert isinstance(launched, LaunchedForward)
        began, forwarded, done = launched.marks
        done.synchronize()
        seconds, draw = began.elapsed_time(forwarded) / 1000, forwarded.elapsed_time(done) / 1000
        command, cached = launched.command, launched.cached
        if not launched.draws:
            paused, branches = bool(launched.paused), launched.branches
            return Drafted((), seconds, paused=paused, branches=branches, fed=launched.fed, request=command.request)
        self._times.observe(launched.fed, seconds + draw)  # each row costs a draw too
        tokens = tuple(map(read_draw, launched.draws))
        rows = tuple(launched.probs)
        paused, text = bool(launched.paused), self._open.get(command.request)
        if launched.following is not None and text is not None and text.index is not None:
            end = command.start + len(command.tokens)  # the next forward was launched, it may be, and told of no token
            text.index.cut(end)
            text.index.extend(tokens)
        if launched.features is not None:
            window = self._open[command.request].window
            assert window is not None
            paused = pauses(window, command.start + len(command.tokens), tokens[0], launched.features)
        seen = tuple(launched.seen)
        if launched.largest is not None:
            logits, ids = launched.largest.cpu().numpy()
            position, half = command.start + len(command.tokens), self._open[command.request].rule
            seen = ((position, see(ids.astype(np.int64), logits, position, tokens[0], half)),)
        extras: dict[str, Any] = {"cached": cached, "paused": paused, "branches": launched.branches, "seen": seen}
        return Drafted(tokens, seconds, rows, draw, **extras, fed=launched.fed, request=command.request)

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        if self._missing == 0:
            return logits
        if self._missing < 0:
            return logits[: self._missing]
        return torch.nn.functional.pad(logits, (0, self._missing), value=-torch.inf)
