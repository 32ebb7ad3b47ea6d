"""The proposer that is a model: it opens texts, turns commands into steps (see `step`), and runs forwards of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from msgspec.structs import replace

from pearl.decoding.rules import make_half
from pearl.decoding.shaping import MakeGuide, make_shaper
from pearl.drafting.beams import LevelStep
from pearl.drafting.branches import Branches
from pearl.drafting.datastore import Datastore
from pearl.drafting.drawing import BranchStep, DrawStep, choose, plan_draw
from pearl.drafting.fused_guesses import text_index
from pearl.drafting.step import DraftModel, Step, Text, make_mark
from pearl.drafting.stops import StopPolicy, StopWindow, make_policy
from pearl.errors import NumericalError, RemoteProtocolError
from pearl.models.calibrate import calibrate_draft
from pearl.models.heads.runner import HeadRunner
from pearl.models.runner import Feed, ModelRunner
from pearl.protocol.acceptance_estimates import Foresight
from pearl.protocol.events import Draft, Drafted, Open
from pearl.protocol.messages import HiddenStates


class ModelProposer:
    """Drafts with a model: one token a forward, or several where it guesses well what it will draw itself.

    It feeds a guess behind the last token; while the model's own draw is what was guessed, the row behind it counts
    too. Draws are keyed by position, so the tokens are those of single forwards. The same forward continues what would
    follow if the target decided otherwise (`Branches`), in slots that hold no text.

    Args:
        runner: the draft model. A text's cache may move from one of its slots to another.
        vocab_size: the target's.
        policies: makes the stop policy of a request; None: drafting stops at the window's end.
        chains: whether a forward is launched before the one before has ended; None: if the runner can.
        texts: the most texts at once: the runner's other slots are for branches.
        datastore: a source of guesses beside the text.
        guides: of texts that are held to a grammar.
    """

    def __init__(
        self,
        runner: ModelRunner,
        vocab_size: int,
        policies: Callable[[Open], StopPolicy | None] = make_policy,
        chains: bool | None = None,
        texts: int = 1,
        datastore: Datastore | None = None,
        guides: MakeGuide | None = None,
    ) -> None:
        self.runner, self.device = runner, runner.device
        self.chains = runner.capabilities.launches if chains is None else chains
        self.model = DraftModel(runner, vocab_size, self.chains, runner.device.type != "cpu")
        self._policies, self._datastore, self._guides = policies, datastore, guides
        self._max_texts = texts
        self._texts: dict[int, Text] = {}  # by request
        self._foresight = Foresight()

    def measure(self, brief: bool) -> tuple[float, float]:
        """Seconds a token, and seconds a token of a long prefix; forgets all texts. `brief`: in little time."""
        return calibrate_draft(self.runner, brief)

    # ---- texts ----

    def open(self, command: Open) -> None:
        """Get ready for a request. Raises `RequestError` where it cannot be served."""
        options = command.options
        half = make_half("draft", options.rule, options, options.parameters)
        before = self._texts.get(command.request)
        window = (
            before.window if before is not None else None
        )  # a request that gets its prefix again keeps its windows
        if window is None and (policy := self._policies(command)) is not None:
            window = StopWindow(policy, len(command.prompt))
        slot = self._slots.get(command.slot, command.slot)
        self._texts = {number: each for number, each in self._texts.items() if each.slot != slot}
        shaper = make_shaper(options, command.prompt, self._guides)
        text = Text(command.slot, slot, half, options, shaper, window)
        # Shaped rows depend on the text up to them, blocks are searched for.
        if shaper is None and not text.is_block:
            self._prepare_guesses(text, command.prompt)
        self._texts[command.request] = text

    def _prepare_guesses(self, text: Text, prompt: Sequence[int]) -> None:
        options = text.options
        if options.draft_lookup:
            text.index = text_index(prompt, self._datastore)
        text.ranks = options.sends_runners_up
        may_branch = (
            options.branches and self.runner.capabilities.together and not options.withholds
        )
        if may_branch and (spare := self._spare(text.slot)):
            text.branches = Branches(self.runner, spare, self._foresight)

    @property
    def _slots(self) -> dict[int, int]:
        """By the slot that requests name: the runner's slot that holds its text."""
        return {slot: slot for slot in range(self._max_texts)} | {
            each.place: each.slot for each in self._texts.values()
        }

    def _spare(self, slot: int) -> list[int]:
        """Slots that hold neither a text nor its branches, an equal share for each text. `slot`: of a new text."""
        held = {
            each
            for text in self._texts.values()
            if text.branches is not None
            for each in text.branches.slots
        }
        taken, every = {slot, *self._slots.values(), *held}, self.runner.capabilities.slots
        share = max(1, (every - self._max_texts) // self._max_texts)
        return [each for each in range(every) if each not in taken][:share]

    def rollback(self, length: int, request: int) -> None:
        """Forget all but the first `length` tokens of the request's text."""
        text = self._texts.get(request)
        if text is None:  # of no request: before a recording all caches are emptied
            for slot in self._slots.values():
                self.runner.rollback(min(length, self.runner.length(slot)), slot)
            return
        if text.branches is not None:
            text.branches.rollback(length)
        if (
            text.search is not None and length < text.search.end - 1
        ):  # each level feeds the last token again
            text.search = None
        self.runner.rollback(length, text.slot)

    def see(self, states: HiddenStates) -> None:
        """Read the target's hidden states before the next proposal. Raises `RemoteProtocolError`."""
        text, runner = self._texts.get(states.request), self.runner
        if not isinstance(runner, HeadRunner) or len(states.states) % (2 * runner.features):
            raise RemoteProtocolError("target sent hidden states that this draft does not read")
        if text is not None and states.states:
            found = torch.frombuffer(bytearray(states.states), dtype=torch.bfloat16)
            text.states.append((states.start, found.view(-1, runner.features)))

    # ---- forwards ----

    def chained(self, request: int) -> bool:
        """Whether this request's forwards may be launched before the host knows the tokens to feed."""
        text = self._texts[request]
        return self.chains and not (text.is_block or text.shaper or text.options.withholds)

    def awaits(self, command: Draft, delay: float) -> bool:
        """Whether to await the token that `command` requests before the next forward is launched.

        That forward can then be fed guesses behind the token, which has to gain more than the `delay` in seconds for
        which the device idles.
        """
        self.model.delay = delay
        if not self.model.times.measured:
            return False
        text = self._texts[command.request]
        # The first guess is of the token that is waited for; those behind it would be fed with that.
        return bool(choose(self.model, text, command, text.guess(command)[1][1:], 1))

    def launch(self, command: Draft, after: Step | None = None) -> Step:
        """Take in the command's tokens, which continue the text, and start on a proposal of up to `budget` tokens.

        Args:
            after: what was launched last; its token stands in place of the command's one token. Untested on a GPU.
        """
        step = self._step(command, after)
        step.marks[0].record()
        logits = self._forward(step.feeds)
        step.marks[1].record()
        step.draw(logits)
        step.marks[2].record()
        return step

    def launch_together(self, commands: Sequence[Draft]) -> list[Step | Drafted]:
        """As `launch` of each, in one forward. An event in place of one: nothing can be drawn for it."""
        steps, left = list[Step](), sum(len(command.tokens) for command in commands)
        for number, command in enumerate(commands):
            left -= len(command.tokens)
            planned = sum(step.tokens for step in steps)
            steps.append(self._step(command, None, planned + left, len(commands) - number))
        began, forwarded = make_mark(self.device), make_mark(self.device)
        began.record()
        logits = self._forward([feed for step in steps for feed in step.feeds])
        forwarded.record()
        in_all = sum(step.tokens for step in steps)
        launched: list[Step | Drafted] = []
        for step in steps:
            own, logits = logits[: len(step.feeds)], logits[len(step.feeds) :]
            step.marks[:2], step.fed = (began, forwarded), in_all
            try:
                step.draw(own)
                step.marks[2].record()
                launched.append(step)
            except NumericalError as error:
                launched.append(Drafted(failure=str(error), request=step.command.request))
        return launched

    def _step(
        self, command: Draft, after: Step | None = None, beside: int = 0, sharing: int = 1
    ) -> Step:
        """What to feed for one request; `beside`, `sharing`: see `plan_draw`."""
        text, model = self._texts[command.request], self.model
        assert self.runner.length(text.slot) == command.start, (
            self.runner.length(text.slot),
            command,
        )
        if text.shaper is not None:
            text.shaper.hold(command.start)
            text.shaper.extend(command.tokens)
        if text.window is not None and after is None:
            text.window.see(command.start, command.tokens, drafts=command.budget > 0)
        if command.hedge:
            return BranchStep(model, text, command, beside, sharing)
        if text.is_block and command.budget:
            return LevelStep(model, text, command)
        if (
            after is not None and after.following is not None
        ):  # the host does not know the token, nor guesses behind it
            if text.branches is not None:
                text.branches.settle(command.start, (), command.start + 1 - command.pending)
            return DrawStep(model, text, command, after.following)
        return plan_draw(model, text, command, beside, sharing)

    def _forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        logits = self.runner.forward(feeds) if feeds else []
        if not self.chains:
            self.runner.synchronize()
        return logits

    def collect(self, launched: Step) -> Drafted:
        """Wait for a proposal, and only for that. Raises `NumericalError` where the logits were not finite."""
        began, forwarded, done = launched.marks
        done.synchronize()
        seconds, draw = began.elapsed_time(forwarded) / 1000, forwarded.elapsed_time(done) / 1000
        drafted = launched.collect()
        if drafted.tokens:
            self.model.times.observe(launched.fed, seconds + draw)  # each row costs a draw too
        return replace(
            drafted,
            seconds=seconds,
            draw=draw if drafted.tokens else 0.0,
            fed=launched.fed,
            request=launched.command.request,
        )
