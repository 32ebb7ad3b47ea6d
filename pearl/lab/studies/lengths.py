"""Optimal speculation lengths, from recorded texts: DISCO's tables 2 and 4 and figures 2 to 6, and PEARL's figure 2b.

An oracle drafts up to the first token that the target rejects; its lengths are the runs of right tokens between two of
the target's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean, pstdev

from pearl.drafting.disco import Classifier
from pearl.lab.studies.estimate import speedup
from pearl.lab.studies.figures import Plot, Table
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

_COST, _RATES, _GAMMAS = (
    0.05,
    (0.6, 0.8, 0.9),
    range(1, 41),
)  # of figure 2: t_draft / t_target, acceptance, lengths
_BINS = 10


def oracle_lengths(right: Sequence[bool]) -> list[int]:
    """Tokens that an oracle drafts in each step of a text; the target adds one to each."""
    runs = "".join("+" if is_right else "-" for is_right in right).split("-")
    return [len(run) for run in (runs if runs[-1] else runs[:-1])]


def forwards(right: Sequence[bool], gamma: int) -> tuple[int, int]:
    """(target's, draft's) forwards of `sd` with this window over a text."""
    at = target = draft = 0
    while at < len(right):
        window = min(gamma, len(right) - at - 1)
        accepted = next((i for i in range(window) if not right[at + i]), window)
        at, target, draft = at + accepted + 1, target + 1, draft + window
    return target, draft


def decisions(
    text: RecordedText, gamma: int, classifier: Classifier | None
) -> Iterator[tuple[bool, bool]]:
    """(whether drafting went on behind a token, whether the token was right), along the steps of an oracle.

    By a static length, or by the classifier's threshold.
    """
    features, index = features_of(text), 0
    for right, seen in zip(text.right, features, strict=True):
        index += 1
        goes_on = (
            index < gamma
            if classifier is None
            else classifier.confidence(seen) >= classifier.threshold
        )
        yield goes_on, right
        if not right:
            index = 0


def f1(found: Sequence[tuple[bool, bool]]) -> float:
    """Of the answer "accepted"."""
    counts = Counter(found)
    hits = 2 * counts[True, True]
    return hits / (hits + counts[True, False] + counts[False, True]) if hits else 0.0


def measure(
    recorded: RecordedTexts, timing: Timing, sets: Sequence[str]
) -> tuple[list[Table], list[Plot]]:
    """Tables 2 and 4 and figures 2 to 6 of DISCO. `sets`: the set of prompts of each text."""
    lengths = {
        name: [
            oracle_lengths(text.right)
            for text, own in zip(recorded.texts, sets, strict=True)
            if own == name
        ]
        for name in dict.fromkeys(sets)
    }
    every = {name: [length for text in texts for length in text] for name, texts in lengths.items()}
    rows = [
        [name, f"{fmean(some):.1f}", f"{pstdev(some):.1f}", str(len(some))]
        for name, some in every.items()
        if some
    ]
    table = Table(
        "Oracle speculation length in tokens (table 2)",
        ("prompts", "mean", "sd", "steps"),
        rows,
        [
            "Theirs: MBPP 18.0, sd 46.2; HumanEval 14.7, sd 42.6; CNN-DM 3.2, sd 4.0; Alpaca 2.4, sd 2.1."
        ],
    )
    figures = [
        _improvement(),
        step_by_step(recorded.texts[0], "disco-steps", "Lengths step by step (figure 3)"),
    ]
    figures += [_by_progress(lengths), _histogram(every)]
    if len(recorded.texts) < LEAST_TEXTS:  # too few to train on
        return [table, _policies(recorded, timing, None)], figures
    trained = train(recorded, timing)
    return [
        table,
        _policies(recorded, timing, trained.classifier),
        _scores(recorded, trained),
    ], figures


def _policies(recorded: RecordedTexts, timing: Timing, classifier: Classifier | None) -> Table:
    """Methods sd and pearl with each policy, and with the oracle: under sd no policy is faster."""
    done = side_by_side(recorded, timing, classifier)
    rows = [
        [
            one.name,
            f"{100 / one.tokens_per_step:.1f}",
            f"{100 * one.drafted / one.totals.total('late_tokens'):.1f}",
            f"{one.tokens_per_step:.3f}",
            "-" if one.totals.acceptance_rate is None else f"{one.totals.acceptance_rate:.3f}",
            "-" if one.wasted is None else f"{one.wasted:.1%}",
            str(speedup(one.totals, done[0].totals)),
        ]
        for one in done
    ]
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
    """Table 4."""
    _, held_out = split(recorded)
    gamma = trained.static.window
    rows = [
        [
            name,
            f"{f1([each for text in held_out.texts for each in decisions(text, gamma, known)]):.0%}",
        ]
        for name, known in ((f"static length {gamma}", None), ("disco", trained.classifier))
    ]
    notes = ["Theirs: 85 and 95% (MBPP), 76 and 88% (CNN-DM), 68 and 77% (Alpaca)."]
    title = f"F1 of going on behind a token that is accepted, {trained.held_out} held-out tokens (table 4)"
    return Table(title, ("policy", "F1"), rows, notes)


def step_by_step(text: RecordedText, name: str, title: str) -> Plot:
    """The oracle's length at each step of a text, beside a static one. PEARL's figure 2b, DISCO's figure 3."""
    lengths = oracle_lengths(text.right)
    target, draft = forwards(text.right, STATIC)
    static = f"static length {STATIC}: {target} target and {draft} draft forwards"
    own = f"optimal length: {len(lengths)} target and {sum(lengths)} draft forwards"
    ends = [(1.0, float(STATIC)), (float(max(2, len(lengths))), float(STATIC))]
    return Plot(
        name, title, "step", "draft tokens", {static: ends}, bars={own: [*enumerate(lengths, 1)]}
    )


def _improvement() -> Plot:
    lines = {
        f"acceptance {a:g}": [(g, sd_improvement(a, g, _COST)) for g in _GAMMAS] for a in _RATES
    }
    title = f"Improvement of sd by length, t_draft / t_target = {_COST:g} (figure 2; closed form)"
    return Plot(
        "disco-improvement", title, "speculation length", "times as fast as the target alone", lines
    )


def _by_progress(lengths: dict[str, list[list[int]]]) -> Plot:
    lines = {}
    for name, texts in lengths.items():
        bins: list[list[int]] = [[] for _ in range(_BINS)]
        for text in texts:
            for step, length in enumerate(text):
                bins[_BINS * step // len(text)].append(length)
        lines[name] = [
            ((number + 0.5) / _BINS, fmean(some)) for number, some in enumerate(bins) if some
        ]
    title = "Mean oracle length by progress of the text (figures 4 and 6)"
    return Plot("disco-progress", title, "share of the text's steps", "tokens", lines)


def _histogram(every: dict[str, list[int]]) -> Plot:
    lines = {
        name: [(length, count / len(some)) for length, count in sorted(Counter(some).items())]
        for name, some in every.items()
        if some
    }
    return Plot(
        "disco-histogram", "Oracle lengths (figure 5)", "tokens", "share of steps", lines, log="y"
    )
