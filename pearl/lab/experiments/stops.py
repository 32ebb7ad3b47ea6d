"""Stop policies on recorded texts, under the virtual clock: calls of both models, and what a text takes.

Which of the draft's tokens are right is recorded (`texts.workload`), and so is the shape of its distribution at each
position.  Behind a wrong token the draft would have other distributions: there a policy is shown what was recorded for
the position.  That matters little, for what is drafted there is discarded; how much of it there is, is what stopping in
time is about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pearl.drafting.disco import Classifier
from pearl.drafting.proposer import Features, StopPolicy
from pearl.drafting.stops import Doubtful, Heuristic, StopWindow, Threshold
from pearl.errors import ConfigError
from pearl.lab.experiments.texts import workload
from pearl.lab.experiments.workload import Text, Totals, run
from pearl.lab.simulate import Event, Timing
from pearl.models.recorded import RecordedText, RecordedTexts
from pearl.protocol.events import Draft, Drafted
from pearl.protocol.options import RequestOptions
from pearl.spec.stops import CAP, FIXED

STATIC = 5  # tokens: the DISCO paper's window for whoever tunes none
_GAMMAS = (1, 2, 3, 4, 5, 6, 8, 10, 12, CAP)
_THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
Policies = Callable[[Text], StopPolicy | None]


class Oracle:
    """Stops where the draft's next token is wrong: as few calls of both models as there can be.

    Args:
        right: by position in the generated text.
    """

    def __init__(self, right: Sequence[bool]) -> None:
        self._right = right

    def stop(self, features: Features) -> bool:
        following = features.position + 1
        return following < len(self._right) and not self._right[following]

    def confidence(self, features: Features) -> None:
        pass

    def end_window(self, accepted: int) -> None:
        pass


class StoppingDraft:
    """Drafts token 0 for ever; a policy, shown what was recorded, ends its windows. Counts its forwards."""

    def __init__(self, text: RecordedText, policy: StopPolicy | None) -> None:
        begin = len(text.prompt)
        self._rows, self._begin = text.features, begin
        self._window = None if policy is None else StopWindow(policy, begin)
        self.calls = 0

    def execute(self, command: object) -> Event | None:
        if not isinstance(command, Draft):
            return None
        end, drafts = command.start + len(command.tokens), command.budget > 0
        if not drafts:
            return Drafted(paused=command.hedge > 0, request=command.request)
        self.calls += 1
        paused = False
        if self._window is not None:
            assert self._rows is not None
            self._window.see(command.start, command.tokens, drafts)
            row = self._rows[min(end - self._begin, len(self._rows) - 1)].tolist()
            paused = self._window.stops(end, 0, row)
        return Drafted((0,), paused=paused, request=command.request)


@dataclass(frozen=True)
class Stopped:
    """What came of one policy. `drafted`: forwards of the draft; `totals.steps` are those of the target."""

    name: str
    policy: str
    totals: Totals
    drafted: int


def stopped(
    recorded: RecordedTexts,
    timing: Timing,
    decoding: RequestOptions,
    policies: Policies | None = None,
    name: str = "",
    policy: str = FIXED,
) -> Stopped:
    """All texts by one method. `policies`: makes each text's, from the text as the workload has it; None: none."""
    work = workload(recorded, timing)
    made = [policies(text) if policies is not None else None for text in work.texts]
    drafts = [StoppingDraft(text, each) for text, each in zip(recorded.texts, made, strict=True)]
    waiting = iter(drafts)
    totals = run(work, decoding, draft=lambda limit, seed: next(waiting))
    return Stopped(name or totals.name, policy, totals, sum(draft.calls for draft in drafts))


def check_features(recorded: RecordedTexts) -> None:
    """Raises `ConfigError` where the draft's distributions were not recorded."""
    if any(text.features is None for text in recorded.texts):
        raise ConfigError("these texts lack what stop policies look at: record them again with pearl simulate record")


def bounded(gamma: int) -> RequestOptions:
    return RequestOptions("sd", "fixed", gamma)


def side_by_side(
    recorded: RecordedTexts,
    timing: Timing,
    classifier: Classifier | None,
    tell: Callable[[str], None] = lambda what: None,
) -> list[Stopped]:
    """The DISCO paper's table: `ar`; `sd` with 5 tokens, with its best number, and with each policy; `pearl` likewise.

    The best static window and the best threshold are found on these very texts, which favours them.
    """
    check_features(recorded)
    done = [stopped(recorded, timing, RequestOptions("ar"), name="ar")]

    def add(name: str, policy: str, tried: Iterable[tuple[str, RequestOptions, Policies | None]]) -> None:
        """The fastest of some."""
        tell(name)
        found = [stopped(recorded, timing, one, made, name + note, policy) for note, one, made in tried]
        done.append(max(found, key=lambda each: each.totals.tokens_per_second))

    def oracle(text: Text) -> StopPolicy:
        return Oracle([text.right[position] for position in sorted(text.right)])

    def threshold(least: float) -> Policies:
        return lambda text: Threshold(least)

    named: list[tuple[str, Policies]] = [("heuristic", lambda text: Heuristic())]
    if classifier is not None:
        named.append(("disco", lambda text: Doubtful(classifier)))
    named.append(("oracle", oracle))
    add(f"sd, {STATIC} tokens", FIXED, [("", bounded(STATIC), None)])
    add("sd, best static", FIXED, [(f": {gamma}", bounded(gamma), None) for gamma in _GAMMAS])
    thresholds = [(f": {least:g}", least) for least in _THRESHOLDS]
    for method, decoding in (("sd", bounded(CAP)), ("pearl", RequestOptions("pearl"))):
        if method == "pearl":
            add("pearl", FIXED, [("", decoding, None)])
        add(
            f"{method}, best threshold",
            "threshold",
            [(note, decoding, threshold(least)) for note, least in thresholds],
        )
        for policy, made in named:
            add(f"{method}, {policy}", policy, [("", decoding, made)])
    return done


def split(recorded: RecordedTexts, every: int) -> tuple[RecordedTexts, RecordedTexts]:
    """Most texts, and each `every`-th."""
    held_out = recorded.texts[every - 1 :: every]
    others = tuple(text for number, text in enumerate(recorded.texts, 1) if number % every)
    return replace(recorded, texts=others), replace(recorded, texts=held_out)
