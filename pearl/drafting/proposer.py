"""Drafts with a model: opens texts, turns commands into steps (see `step`), and runs forwards of these steps."""

from collections.abc import Callable, Sequence
from itertools import islice

import torch
from msgspec.structs import replace

from pearl.decoding.rules import make_half
from pearl.decoding.shaping import MakeGuide, make_shaper
from pearl.drafting.beams import LevelStep
from pearl.drafting.branches import Branches
from pearl.drafting.datastore import Datastore
from pearl.drafting.draft_text import DraftModel, DraftText
from pearl.drafting.fused_guesses import text_index
from pearl.drafting.step import Step, choose, make_mark, plan
from pearl.drafting.stops import StopPolicy, StopWindow, make_policy
from pearl.errors import NumericalError, RemoteProtocolError
from pearl.models.calibrate import calibrate_draft
from pearl.models.heads.runner import StatesRunner
from pearl.models.runner import Feed, ModelRunner
from pearl.protocol.acceptance_estimates import Foresight
from pearl.protocol.events import Draft, Drafted, Open
from pearl.protocol.messages import HiddenStates


class ModelProposer:
    """Drafts one token a forward, or several if guesses of the model's draws are right.

    A forward is fed guesses after the last token; while the model's own draw equals the guess, the next row is used
    too. Draws are keyed by position, so the tokens are the same as without guesses. The same forward continues branches
    for other outcomes in the target (`Branches`), in slots that hold no text.

    Args:
        runner: the draft model. A text's cache may move from one of the runner's slots to another.
        vocab_size: the target's.
        policies: returns the stop policy of a request; None if drafting stops only at the window's end.
        chains: whether a forward is launched before the last one has ended; by default, if the runner can do that.
        texts: most texts at once; the runner's other slots are for branches.
        datastore: a further source of guesses.
        guides: makes the guides of texts that have a grammar.
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
        self.runner = runner
        self.device = runner.device
        self.chains = runner.capabilities.launches if chains is None else chains
        self.model = DraftModel(runner, vocab_size, self.chains, runner.device.type != "cpu")
        self._policies = policies
        self._datastore = datastore
        self._guides = guides
        self._max_texts = texts
        self._texts: dict[int, DraftText] = {}  # by request
        self._foresight = Foresight()

    def measure(self, brief: bool) -> tuple[float, float]:
        """Return (seconds of a one-token forward, seconds per token of a longer one); empties all caches.

        `brief`: whether to measure only a few forwards.
        """
        return calibrate_draft(self.runner, brief)

    # ---- texts ----

    def open(self, command: Open) -> None:
        """Get ready for a request. Raises `RequestError` where it cannot be served."""
        options = command.options
        half = make_half("draft", options)
        window = self._window(command)
        slot = self._slots.get(command.slot, command.slot)
        for request, text in list(self._texts.items()):
            if text.slot == slot:
                del self._texts[request]
        shaper = make_shaper(options, command.prompt, self._guides)
        text = DraftText(self.model, command.slot, slot, half, options, shaper, window)
        # No guesses for shaped texts, whose rows depend on the text before them, nor for blocks.
        if shaper is None and not text.is_block:
            self._prepare_guesses(text, command.prompt)
        self._texts[command.request] = text

    def _window(self, command: Open) -> StopWindow | None:
        """Return the request's stop window; a request that is opened again keeps its window."""
        text = self._texts.get(command.request)
        if text is not None and text.window is not None:
            return text.window
        policy = self._policies(command)
        return None if policy is None else StopWindow(policy, len(command.prompt))

    def _prepare_guesses(self, text: DraftText, prompt: Sequence[int]) -> None:
        options = text.options
        if options.draft_lookup:
            text.index = text_index(prompt, self._datastore, prediction=options.predicted)
        text.ranks = options.sends_runners_up
        if options.branches and self.runner.capabilities.together and not options.withholds:
            spare_slots = self._spare(text.slot)
            if spare_slots:
                text.branches = Branches(self.runner, spare_slots, self._foresight)

    @property
    def _slots(self) -> dict[int, int]:
        """Map from each slot that requests name to the runner's slot that has the KV cache."""
        slots = {slot: slot for slot in range(self._max_texts)}
        for text in self._texts.values():
            slots[text.place] = text.slot
        return slots

    def _spare(self, slot: int) -> list[int]:
        """Return slots for a text's branches: an equal share of those that hold no text and no branches.

        `slot`: the text's own slot.
        """
        occupied = {slot, *self._slots.values()}
        for text in self._texts.values():
            if text.branches is not None:
                occupied |= text.branches.slots
        num_slots = self.runner.capabilities.slots
        share = max(1, (num_slots - self._max_texts) // self._max_texts)
        return [spare for spare in range(num_slots) if spare not in occupied][:share]

    def rollback(self, length: int, request: int) -> None:
        """Forget all but the first `length` tokens of the request's text."""
        text = self._texts.get(request)
        if text is None:  # no open request: all caches are emptied before a recording
            for slot in self._slots.values():
                self.runner.rollback(min(length, self.runner.length(slot)), slot)
            return
        if text.branches is not None:
            text.branches.rollback(length)
        # Each level of a search feeds the last token again.
        if text.search is not None and length < text.search.end - 1:
            text.search = None
        self.runner.rollback(length, text.slot)

    def see(self, states: HiddenStates) -> None:
        """Keep the target's hidden states, to be read before the next proposal.

        Raises `RemoteProtocolError` if this draft does not read such states.
        """
        runner = self.runner
        if not isinstance(runner, StatesRunner) or len(states.states) % (2 * runner.features):
            raise RemoteProtocolError("target sent hidden states that this draft does not read")
        text = self._texts.get(states.request)
        if text is not None and states.states:
            values = torch.frombuffer(bytearray(states.states), dtype=torch.bfloat16)
            text.states.append((states.start, values.view(-1, runner.features)))

    # ---- forwards ----

    def chained(self, request: int) -> bool:
        """Return whether this request's forwards may be launched before the host knows the tokens to feed."""
        text = self._texts[request]
        return self.chains and not (text.is_block or text.shaper or text.options.withholds)

    def awaits(self, command: Draft, delay: float) -> bool:
        """Return whether to await the token that `command` requests before the next forward is launched.

        Waiting lets the next forward verify guesses too. It pays if the guesses save more than the `delay` seconds for
        which the device idles.
        """
        self.model.delay = delay
        if not self.model.times.measured:
            return False
        text = self._texts[command.request]
        _, chances = text.guess(command)
        # The first guess is of the awaited token itself; the others would be fed with that token.
        return bool(choose(text, command, chances[1:], 1))

    def launch(self, command: Draft, after: Step | None = None) -> Step:
        """Take in the command's tokens, which continue the text, and start on a proposal of up to `budget` tokens.

        Args:
            after: the step launched last, if the host does not know its token: that token, on the device, is fed in
                place of the command's one token. Untested on a GPU.
        """
        step = self._step(command, after)
        self._launch([step])
        return step

    def launch_together(self, commands: Sequence[Draft]) -> list[Step]:
        """Launch commands of several requests in one forward. Each may use an equal share of the remaining rows."""
        steps = []
        planned = 0
        pending = sum(len(command.tokens) for command in commands)
        for i, command in enumerate(commands):
            pending -= len(command.tokens)
            step = self._step(command, None, planned + pending, len(commands) - i)
            planned += step.tokens
            steps.append(step)
        self._launch(steps)
        return steps

    def _step(
        self, command: Draft, after: Step | None = None, other_tokens: int = 0, sharing: int = 1
    ) -> Step:
        """Make the step of one request; `other_tokens`, `sharing`: see `plan`."""
        text = self._texts[command.request]
        length = self.runner.length(text.slot)
        assert length == command.start, (length, command)
        if text.shaper is not None:
            text.shaper.hold(command.start)
            text.shaper.extend(command.tokens)
        if text.window is not None and after is None:
            text.window.see(command.start, command.tokens, drafts=command.budget > 0)
        if text.is_block and command.budget:
            return LevelStep(text, command)
        if after is not None and after.following is not None:
            # The host knows neither the token nor guesses after it.
            if text.branches is not None:
                text.branches.settle(command.start, (), command.start + 1 - command.pending)
            return Step(text, command, Feed(after.following, 1, text.slot, prompt=command.prompt))
        return plan(text, command, other_tokens, sharing)

    def _launch(self, steps: Sequence[Step]) -> None:
        """Run a forward of the steps, and launch their draws. If a step's draw fails, `collect` raises the error."""
        began = make_mark(self.device)
        forwarded = make_mark(self.device)
        feeds = []
        for step in steps:
            feeds += step.feeds
        began.record()
        logits = iter(self._forward(feeds))
        forwarded.record()
        fed = sum(step.tokens for step in steps)
        for step in steps:
            step.marks = (began, forwarded, make_mark(self.device))
            step.fed = fed
            step_logits = list(islice(logits, len(step.feeds)))
            try:
                step.draw(step_logits)
            except NumericalError as error:
                step.failure = error
            step.marks[2].record()

    def _forward(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        logits = self.runner.forward(feeds) if feeds else []
        if not self.chains:
            self.runner.synchronize()
        return logits

    def collect(self, launched: Step) -> Drafted:
        """Wait for one step only; return its proposal. Raises `NumericalError` if the logits were not finite."""
        if launched.failure is not None:
            raise launched.failure
        began, forwarded, done = launched.marks
        done.synchronize()
        seconds = began.elapsed_time(forwarded) / 1000
        draw = forwarded.elapsed_time(done) / 1000
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
