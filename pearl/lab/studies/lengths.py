"""Optimal speculation lengths, from recorded texts.

These lengths fill DISCO's tables 2 and 4 and its figures 2 to 6, and PEARL's figure 2b.

An oracle drafts until the next draft token would be wrong. Then the target adds a token itself, and
the oracle drafts again. The oracle's lengths are the numbers of tokens that it drafts each time.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from statistics import fmean, pstdev

from pearl.drafting.disco import Classifier
from pearl.lab.studies.estimate import speedup
from pearl.lab.studies.figures import Plot, Report, Table, curve
from pearl.lab.studies.recorded_texts import RecordedText, RecordedTexts
from pearl.lab.studies.simulate import Timing
from pearl.lab.studies.stops import (
    LEAST_TEXTS,
    STATIC,
    Trained,
    features_of,
    side_by_side,
    split,
    train,
)
from pearl.lab.studies.theory import sd_improvement

# Settings of figure 2.
_COST = 0.05  # t_draft / t_target
_RATES = (0.6, 0.8, 0.9)  # acceptance rates
_GAMMAS = range(1, 41)
_BINS = 10


def oracle_lengths(right: Sequence[bool]) -> list[int]:
    """Return how many tokens an oracle drafts in each step of a text.

    The target adds one token per step. Example: a text whose draft tokens are right, right, wrong,
    right gives the lengths 2 and 1.
    """
    lengths = []
    length = 0
    for is_right in right:
        if is_right:
            length += 1
        else:
            lengths.append(length)
            length = 0
    if length:
        lengths.append(length)
    return lengths


def forwards(right: Sequence[bool], gamma: int) -> tuple[int, int]:
    """Return (number of target forwards, number of draft forwards) of `sd` with window `gamma` over a text."""
    position = 0
    target = 0
    draft = 0
    while position < len(right):
        window = min(gamma, len(right) - position - 1)
        guesses = [*right[position : position + window], False]
        position += guesses.index(False) + 1
        target += 1
        draft += window
    return target, draft


def decisions(
    text: RecordedText, gamma: int, classifier: Classifier | None
) -> Iterator[tuple[bool, bool]]:
    """Yield for each token of a text whether drafting goes on after it, and whether it is right.

    The classifier decides by its confidence. If `classifier` is None, drafting goes on up to the
    static length `gamma`. A window begins after each wrong token, as for an oracle.
    """
    index = 0
    for right, features in zip(text.right, features_of(text), strict=True):
        index += 1
        if classifier is None:
            goes_on = index < gamma
        else:
            goes_on = classifier.confidence(features) >= classifier.threshold
        yield goes_on, right
        if not right:
            index = 0


def f1(decisions: Iterable[tuple[bool, bool]]) -> float:
    """Return the F1 score of "drafting goes on" as a prediction of "the token is right".

    The score is 2 TP / (2 TP + FP + FN).
    """
    counts = Counter(decisions)
    hits = 2 * counts[True, True]
    return hits / max(1, hits + counts[True, False] + counts[False, True])


def measure(recorded: RecordedTexts, timing: Timing, sets: Sequence[str]) -> Report:
    """Return tables 2 and 4 and figures 2 to 6 of DISCO.

    Args:
        sets: item i names the prompt set of conversation i.
    """
    by_text: dict[str, list[list[int]]] = {}
    by_set: dict[str, list[int]] = {}
    for text in recorded.texts:
        name = sets[text.conversation]
        lengths = oracle_lengths(text.right)
        by_text.setdefault(name, []).append(lengths)
        by_set.setdefault(name, []).extend(lengths)
    plots = [
        _improvement(),
        step_by_step(recorded.texts[0], "disco-steps", "Lengths step by step (figure 3)"),
        _by_progress(by_text),
        _histogram(by_set),
    ]
    tables = [_oracle_table(by_set)]
    if len(recorded.texts) < LEAST_TEXTS:  # too few to train on
        tables.append(_policies(recorded, timing, None))
    else:
        trained = train(recorded, timing)
        tables.append(_policies(recorded, timing, trained.classifier))
        tables.append(_scores(recorded, trained))
    return Report(tables, plots)


def _oracle_table(by_set: dict[str, list[int]]) -> Table:
    rows = []
    for name, lengths in by_set.items():
        if lengths:
            mean = f"{fmean(lengths):.1f}"
            rows.append([name, mean, f"{pstdev(lengths):.1f}", str(len(lengths))])
    notes = [
        "Theirs: MBPP 18.0, sd 46.2; HumanEval 14.7, sd 42.6; CNN-DM 3.2, sd 4.0; Alpaca 2.4, sd 2.1."
    ]
    columns = ("prompts", "mean", "sd", "steps")
    return Table("Oracle speculation length in tokens (table 2)", columns, rows, notes)


def _policies(recorded: RecordedTexts, timing: Timing, classifier: Classifier | None) -> Table:
    """Compare methods sd and pearl with each stop policy, and with the oracle."""
    results = side_by_side(recorded, timing, classifier)
    rows = []
    for result in results:
        totals = result.totals
        acceptance = "-"
        wasted = "-"
        if totals.acceptance_rate is not None:
            acceptance = f"{totals.acceptance_rate:.3f}"
        if result.wasted is not None:
            wasted = f"{result.wasted:.1%}"
        target_calls = f"{100 / result.tokens_per_step:.1f}"
        draft_calls = f"{100 * result.drafted / totals.total('late_tokens'):.1f}"
        steps = f"{result.tokens_per_step:.3f}"
        over_ar = str(speedup(totals, results[0].totals))
        rows.append([result.name, target_calls, draft_calls, steps, acceptance, wasted, over_ar])
    columns = (
        "policy",
        "target\ncalls",
        "draft\ncalls",
        "tokens\na step",
        "accepted",
        "wasted",
        "over ar, 95%",
    )
    notes = [
        f"t_draft {timing.t_draft * 1e3:.4g} ms, t_target {timing.t_target(1) * 1e3:.4g} ms; {len(recorded.texts)} "
        f"texts of {recorded.target} and {recorded.draft}; virtual time. The best static window, the best threshold "
        "and the classifier are chosen on these texts.",
        "calls: forwards of either model after the prefill, per 100 tokens; wasted: drafted tokens that were not "
        "accepted",
    ]
    return Table("Stop policies on recorded texts (tables 1 and 5)", columns, rows, notes)


def _scores(recorded: RecordedTexts, trained: Trained) -> Table:
    """Return DISCO's table 4: the F1 of a static length and of the classifier on held-out texts."""
    _, held_out = split(recorded)
    gamma = trained.static.window
    rows = []
    for name, classifier in ((f"static length {gamma}", None), ("disco", trained.classifier)):
        answers: list[tuple[bool, bool]] = []
        for text in held_out.texts:
            answers += decisions(text, gamma, classifier)
        rows.append([name, f"{f1(answers):.0%}"])
    notes = ["Theirs: 85 and 95% (MBPP), 76 and 88% (CNN-DM), 68 and 77% (Alpaca)."]
    title = f"F1 of going on behind a token that is accepted, {trained.held_out} held-out tokens (table 4)"
    return Table(title, ("policy", "F1"), rows, notes)


def step_by_step(text: RecordedText, name: str, title: str) -> Plot:
    """Plot the oracle's length at each step of a text, and a static length: PEARL's figure 2b, DISCO's figure 3."""
    lengths = oracle_lengths(text.right)
    target, draft = forwards(text.right, STATIC)
    static = f"static length {STATIC}: {target} target and {draft} draft forwards"
    optimal = f"optimal length: {len(lengths)} target and {sum(lengths)} draft forwards"
    line = [(1.0, float(STATIC)), (float(max(2, len(lengths))), float(STATIC))]
    bars = {optimal: list(enumerate(lengths, 1))}
    return Plot(name, title, "step", "draft tokens", {static: line}, bars=bars)


def _improvement() -> Plot:
    lines = {}
    for acceptance in _RATES:
        improvement = partial(sd_improvement, acceptance, cost=_COST)
        lines[f"acceptance {acceptance:g}"] = curve(improvement, _GAMMAS)
    title = f"Improvement of sd by length, t_draft / t_target = {_COST:g} (figure 2; closed form)"
    return Plot(
        "disco-improvement", title, "speculation length", "times as fast as the target alone", lines
    )


def _by_progress(lengths: dict[str, list[list[int]]]) -> Plot:
    lines = {}
    for name, texts in lengths.items():
        bins: dict[int, list[int]] = {}
        for text in texts:
            for step, length in enumerate(text):
                bins.setdefault(_BINS * step // len(text), []).append(length)
        points = []
        for number, members in sorted(bins.items()):
            points.append(((number + 0.5) / _BINS, fmean(members)))
        lines[name] = points
    title = "Mean oracle length by progress of the text (figures 4 and 6)"
    return Plot("disco-progress", title, "share of the text's steps", "tokens", lines)


def _histogram(by_set: dict[str, list[int]]) -> Plot:
    lines = {}
    for name, lengths in by_set.items():
        if lengths:
            counts = sorted(Counter(lengths).items())
            lines[name] = [(length, count / len(lengths)) for length, count in counts]
    title = "Oracle lengths (figure 5)"
    return Plot("disco-histogram", title, "tokens", "share of steps", lines, log="y")
