"""SSSD (Marzollo et al. 2024): guesses without a draft model, by source, by number and by temperature.

The target decodes texts at several temperatures, once each, as `ar` does.  They are replayed with guesses from the
text, from a datastore and from both, so acceptance does not depend on the load of the machine.  Only the duration of a
forward of s tokens is measured, and needs a quiet machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from pearl.cache import Watcher
from pearl.config import EngineConfig, RequestOptions
from pearl.drafting.datastore import Datastore, check_tokenizer
from pearl.lab.bench.tasks import Task
from pearl.lab.studies.estimate import bootstrap
from pearl.lab.studies.figures import Plot, Table
from pearl.lab.studies.guessing import Generated, Replayed, Seconds, replay, store_alone
from pearl.lab.studies.recorded_texts import answers
from pearl.lab.studies.simulate import interpolated
from pearl.models.calibrate import forward_seconds
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.models.runner import ModelRunner, feed_chain
from pearl.protocol.messages import Source
from pearl.spec.methods import LOOK_AHEAD
from pearl.text.conversation import Conversation
from pearl.worker.build import make_runner
from pearl.worker.placement import place

# Tokens in a forward, the last committed one included: the paper's speculation length.
SIZES = (1, 2, 4, 8, 16, 32)
TEMPERATURES = (0.0, 0.4, 0.7, 1.0, 2.0)
_AT_ONCE = 8  # texts decoded together
_CONTEXT = 256  # tokens in the cache while forwards are timed
_ROUNDS = 5  # of all sizes
_FILTERED: dict[str, Any] = {"top_k": 50, "top_p": 0.7}  # as in the paper
PAPER: dict[Any, str] = {  # section 4 of the paper
    "speedup": "2.05 to 2.61 at batch 1, s at most 30",
    "sources": "almost add up perfectly",
    0.4: "-1 to -2%",
    0.7: "-1 to -2%",
    1.0: "-1 to -2%",
    2.0: "around -20%",
}


class Fed(NamedTuple):
    """Replays with guesses from the text alone, from the datastore alone, if there is one, and from both.

    `size`: tokens fed to a forward; None: as many as are fastest, up to `LOOK_AHEAD` guesses.
    """

    size: int | None
    text: Replayed
    store: Replayed | None
    both: Replayed


def measure_guesses(
    config: EngineConfig,
    tasks: Sequence[Task],
    tokens: int,
    watcher: Watcher,
    most_batch: int,
    most_context: int,
) -> tuple[list[Table], list[Plot]]:
    """Return all tables and figures but the study's rows.

    Args:
        config: of the target, and of the datastore if there is one.
        tasks: the first turn of each is answered.
        tokens: the most of an answer.
        most_batch, most_context: requests at a time, and tokens in a cache.
    """
    from pearl.lab.studies import batches

    slots = min(_AT_ONCE, len(tasks))
    context = min(config.max_context or 8192, 2048)
    several = config.model_copy(update={"slots": slots, "max_context": context})
    tokenizer, defaults = load_tokenizer(config.target)
    target = make_runner(several.model("target"), place(several, "target"))
    store = None
    if config.datastore is not None:
        directory = Path(config.datastore)
        store = Datastore(directory, target.vocab_size)
        check_tokenizer(store.header, tokenizer, directory)
    prompt_of = Conversation(tokenizer, not tokenizer.chat_template).prompt
    prompts = [prompt_of(task.turns[0]) for task in tasks]

    def decode(temperature: float) -> list[Generated]:
        params = RequestOptions(
            temperature=temperature, min_p=0.0, repetition_penalty=1.0, seed=0, **_FILTERED
        )
        options = params.resolved(defaults.sampling)
        samplings = [options.changed(seed=task.number) for task in tasks]
        watcher.begin(f"texts at temperature {temperature:g}", tokens * len(tasks))
        texts = answers(target, prompts, samplings, defaults.eos, tokens, watcher.advance)
        generated = []
        for prompt, text in zip(prompts, texts, strict=True):
            generated.append(Generated((*prompt, *text), len(prompt)))
        return generated

    texts = {temperature: decode(temperature) for temperature in TEMPERATURES}
    greedy = texts[0.0]
    seconds = measure_times(target, watcher)
    sized = [fed(greedy, store, size, seconds) for size in SIZES]
    rows = [*sized, fed(greedy, store, None, seconds)]
    notes = [_measured(config, greedy, store, seconds), *_claims(sized, seconds)]
    baselines, baselines_plot = batches.baselines(greedy, store)
    steps = {size: row.both.tokens_per_step for size, row in zip(SIZES, sized, strict=True)}
    roofline, roofline_plot = batches.roofline_speedups(steps)
    # A runner of one slot, with the whole context.
    target = make_runner(config.model("target"), place(config, "target"))
    sizes = [batch for batch in batches.BATCHES if batch <= most_batch]
    tables = [
        _by_size(rows, seconds),
        _by_temperature(texts, store, notes),
        baselines,
        batches.free_tokens(target, watcher, most_context),
        roofline,
        batches.long_prompts(
            target, tokenizer, prompt_of, defaults.eos, tokens, store, watcher, most_context
        ),
        batches.by_batch(config, prompts, tokens, sizes, watcher),
    ]
    return tables, [_by_length(sized, seconds), baselines_plot, roofline_plot]


def _measured(
    config: EngineConfig, texts: Sequence[Generated], store: Datastore | None, seconds: Seconds
) -> str:
    count = sum(len(text.tokens) - text.start for text in texts)
    datastore = "no datastore"
    if store is not None:
        datastore = f"datastore {config.datastore} of {store.header.tokens:,} tokens"
    return (
        f"{len(texts)} texts, {count} tokens greedy; t(1) {seconds(1) * 1e3:.1f} ms, "
        f"{torch.get_num_threads()} threads; {datastore}"
    )


def _by_length(rows: Sequence[Fed], seconds: Seconds) -> Plot:
    """Figure 2: tokens a step, the cost of a forward, and their quotient."""
    steps = []
    costs = []
    speedups = []
    for size, row in zip(SIZES, rows, strict=True):
        steps.append((size, row.both.tokens_per_step))
        costs.append((size, seconds(size) / seconds(1)))
        speedups.append((size, row.both.speedup(seconds)))
    lines = {"tokens a step": steps, "t(s) / t(1)": costs, "times as fast as ar": speedups}
    return Plot(
        "sssd-length", "Speculation length: gain and cost (figure 2)", "s", "", lines, log="x"
    )


# ---- the duration of a forward ----


def measure_times(
    target: ModelRunner, watcher: Watcher, sizes: Sequence[int] = SIZES, context: int = _CONTEXT
) -> Seconds:
    """Return the seconds of a forward by tokens fed: medians over rounds of all sizes, interpolated.

    `context`: tokens in the cache, if there is room for them.
    """
    base = max(1, min(context, target.context - max(sizes)))
    target.rollback(0)
    feed_chain(target, [(7 + 5 * i) % target.vocab_size for i in range(base)], 0)
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    watcher.begin(f"forward times, {base} tokens in the cache", _ROUNDS)
    for size in sizes:  # to warm up
        forward_seconds(target, base, size)
    for _ in range(_ROUNDS):
        for size in sizes:
            seconds[size].append(forward_seconds(target, base, size))
        watcher.advance(1)
    target.rollback(0)
    return interpolated({size: median(times) for size, times in seconds.items()})


# ---- guesses on texts ----


def fed(
    texts: Sequence[Generated], store: Datastore | None, size: int | None, seconds: Seconds
) -> Fed:
    """Replay texts with all guesses fed, or, without a `size`, the fastest number."""

    def steps(store: Datastore | None, **options: Any) -> Replayed:
        most = LOOK_AHEAD if size is None else size - 1
        return replay(texts, store, most, seconds=None if size else seconds, **options)

    alone = None if store is None else steps(store, make=store_alone)
    return Fed(size, steps(None), alone, steps(store))


def _by_size(rows: Sequence[Fed], seconds: Seconds) -> Table:
    columns = (
        "s",
        "t(s)/t(1)",
        "tokens a step:\ntext alone",
        "datastore\nalone",
        "both",
        "accepted a step:\nn-gram, datastore",
        "over ar",
    )
    words = []
    for row in rows:
        size = f"fastest: {row.both.fed_per_step:.1f}"
        cost = ""
        if row.size:
            size = str(row.size)
            cost = f"{seconds(row.size) / seconds(1):.2f}"
        cells = [
            size,
            cost,
            f"{row.text.tokens_per_step:.2f}",
            "" if row.store is None else f"{row.store.tokens_per_step:.2f}",
            f"{row.both.tokens_per_step:.2f}",
            _by_source([row.both]),
            f"{row.both.speedup(seconds):.2f}",
        ]
        words.append(cells)
    return Table("Tokens in a forward", columns, words)


def _by_temperature(
    texts: dict[float, list[Generated]], store: Datastore | None, notes: Sequence[str]
) -> Table:
    """Compare tokens a step with up to `LOOK_AHEAD` guesses, all fed, with greedy; 95% over the prompts.

    `texts`: of the same prompts, by temperature.
    """
    greedy = [replay([text], store, LOOK_AHEAD) for text in texts[0.0]]
    rows = []
    for temperature, generated in texts.items():
        replays = [replay([text], store, LOOK_AHEAD) for text in generated]
        against = ""
        if temperature:
            change = bootstrap(list(zip(replays, greedy, strict=True)), _change)
            against = f"{change.value:+.0%} ({change.low:+.0%} to {change.high:+.0%})"
        steps = str(bootstrap(replays, _per_step))
        sources = _by_source(replays)
        rows.append([f"{temperature:g}", steps, sources, against, PAPER.get(temperature, "")])
    columns = ("temperature", "tokens a step", "n-gram, datastore", "against greedy", "theirs")
    return Table("Temperatures", columns, rows, notes)


def _by_source(replays: Sequence[Replayed]) -> str:
    """Return the accepted guesses a step, from the text and from the datastore."""
    steps = max(1, sum(replayed.steps for replayed in replays))
    accepted: Counter[Source] = Counter()
    for replayed in replays:
        accepted.update(replayed.accepted)
    return f"{accepted[Source.NGRAM] / steps:.2f}, {accepted[Source.DATASTORE] / steps:.2f}"


def _per_step(replays: Sequence[Replayed]) -> float:
    steps = sum(replayed.steps for replayed in replays)
    return sum(replayed.tokens for replayed in replays) / max(1, steps)


def _change(pairs: Sequence[tuple[Replayed, Replayed]]) -> float:
    replays, greedy_replays = zip(*pairs, strict=True)
    greedy = _per_step(greedy_replays)
    return _per_step(replays) / greedy - 1 if greedy else 0.0


def _claims(rows: Sequence[Fed], seconds: Seconds) -> list[str]:
    """Return the meaning of the columns, and the paper's statements in prose. `rows`: with a size."""
    largest = rows[-1]
    best = max(rows, key=lambda row: row.both.speedup(seconds))
    lines = [
        f"s: tokens in a forward, the last committed one included; {_CONTEXT} tokens in the cache",
        f"over ar: only forwards take time. Ours at its best s, {best.size}: {best.both.speedup(seconds):.2f}; theirs: "
        f"{PAPER['speedup']}",
        f"temperatures: up to {LOOK_AHEAD} guesses, all fed, as a tree; 95% over the prompts; top-k 50 and top-p 0.7",
    ]
    gain = largest.both.tokens_per_step - 1
    if largest.store is not None and gain > 0:
        added = largest.text.tokens_per_step + largest.store.tokens_per_step - 2
        lines.append(
            f"the gains of the sources alone add up, at s = {largest.size}, to {added / gain:.2f} "
            f'times the gain of both; theirs "{PAPER["sources"]}"'
        )
    return lines
