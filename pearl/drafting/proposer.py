"""Drafts with a model: opens texts, turns commands into steps (see `step`), and runs forwards."""

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
    """Drafts one token per forward, or several if n-gram guesses of the model's draws are right.

    A forward is fed the text's last token and guesses of the next tokens. The model draws a token
    from the logits after the last token. If that draw equals the first guess, the logits after the
    guess give the next draw, and so on. Draws are keyed by position, so the tokens are the same as
    without guesses. The same forward continues branches for other outcomes (`Branches`), in slots
    that hold no text.

    Args:
        runner: the draft model. A text may move from one of the runner's slots to another.
        vocab_size: size of the target's vocabulary.
        policies: returns the stop policy of a request; None if drafting stops only at the window's
            end.
        chains: whether to launch a forward while the previous forward still runs. None: if the
            runner can do it.
        texts: the most texts at the same time; the runner's other slots are for branches.
        datastore: a further source of guesses.
        guides: makes the grammar guides of texts that have a grammar.
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
        """Return (seconds of a one-token forward, seconds per token of a longer forward).

        Empties all KV caches. `brief`: whether to measure only a few forwards.
        """
        return calibrate_draft(self.runner, brief)

    # ---- texts ----

    def open(self, command: Open) -> None:
        """Prepare the state of a request. Raises `RequestError` if the request cannot be served."""
        options = command.options
        half = make_half("draft", options)
        window = self._window(command)
        slot = self._slots.get(command.slot, command.slot)
        for request, text in list(self._texts.items()):
            if text.slot == slot:
                del self._texts[request]
        shaper = make_shaper(options, command.prompt, self._guides)
        text = DraftText(self.model, command.slot, slot, half, options, shaper, window)
        # No guesses for shaped texts, whose logits depend on the text before, and none for blocks.
        if shaper is None and not text.is_block:
            self._prepare_guesses(text, command.prompt)
        self._texts[command.request] = text

    def _window(self, command: Open) -> StopWindow | None:
        """Return the request's stop window; None if it has no stop policy.

        A request that is opened again keeps its window.
        """
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
            spare_slots = self._spare(text)
            if spare_slots:
                text.branches = Branches(self.runner, spare_slots, self._foresight)

    @property
    def _slots(self) -> dict[int, int]:
        """Maps each slot of the protocol to the runner's slot that holds the text of this slot.

        The two slots differ after the text has moved to the slot of a branch.
        """
        slots = {slot: slot for slot in range(self._max_texts)}
        for text in self._texts.values():
            slots[text.place] = text.slot
        return slots

    def _spare(self, text: DraftText) -> list[int]:
        """Return free slots for the branches of a text that is not in `_texts` yet.

        Each text gets an equal share of the slots that are not for texts.
        """
        slots = self._slots | {text.place: text.slot}
        occupied = set(slots.values())
        for other in self._texts.values():
            if other.branches is not None:
                occupied |= other.branches.slots
        num_slots = self.runner.capabilities.slots
        share = max(1, (num_slots - self._max_texts) // self._max_texts)
        return [spare for spare in range(num_slots) if spare not in occupied][:share]

    def rollback(self, length: int, request: int) -> None:
        """Forget all but the first `length` tokens of the request's text."""
        text = self._texts.get(request)
        if text is None:  # all caches are emptied while no request is open, before a recording
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
        """Keep the target's hidden states; the draft reads them before its next proposal.

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
        """Return whether a forward of this request may be launched before its tokens are known."""
        text = self._texts[request]
        return self.chains and not (text.is_block or text.shaper or text.options.withholds)

    def awaits(self, command: Draft, delay: float) -> bool:
        """Return whether the next forward should wait until the token of `command` is known.

        The next forward can then verify guesses or continue branches too. Waiting pays if this
        saves more than the `delay` seconds for which the device idles.
        """
        self.model.delay = delay
        if not self.model.times.measured:
            return False
        text = self._texts[command.request]
        _, chances = text.guess(command)
        # The first guess is of the awaited token itself; the others would be fed with that token.
        return bool(choose(text, command, chances[1:], 1))

    def launch(self, command: Draft, after: Step | None = None) -> Step:
        """Launch the forward that `command` asks for; return its step, to be passed to `collect`.

        Args:
            after: the step launched last, if the host does not know yet which token this step has
                drawn. `command` then has one token, which stands for the drawn token. The drawn
                token itself is fed from the device. This was not tested on a GPU.
        """
        step = self._step(command, after)
        self._launch([step])
        return step

    def launch_together(self, commands: Sequence[Draft]) -> list[Step]:
        """Launch the commands of several requests in one forward; return a step for each.

        Guesses and branches of each request get an equal share of the forward's remaining capacity.
        """
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
        """Make the step of one request. See `launch` for `after`, and `plan` for the rest."""
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
        """Run one forward for all steps, and launch their draws.

        If the draw of a step fails, only `collect` for that step raises the error.
        """
        began = make_mark(self.device)
        forwarded = make_mark(self.device)
        feeds = []
        for step in steps:
            feeds += step.feeds
        began.record()
        logits = iter(self._forward(feeds))
        forwarded.record()
        fed = sum(step.tokens for step in steps)
        has_prompt = any(step.command.prompt for step in steps)
        for step in steps:
            step.marks = (began, forwarded, make_mark(self.device))
            step.fed = fed
            step.has_prompt = has_prompt
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
        """Wait for this step, but not for later ones; return its proposal.

        Raises `NumericalError` if the logits were not finite.
        """
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
            has_prompt=launched.has_prompt,
            request=launched.command.request,
        )
