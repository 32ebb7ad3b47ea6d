"""Measures SSSD (Marzollo et al. 2024): what guesses without a draft gain, and when.

Tables and figures show the gain by the source and the number of the guesses, and by temperature,
batch size and context. The target decodes texts with method `ar`, once at each temperature. Then
the texts are replayed with guesses from the text, from a datastore and from both, so acceptance
does not depend on the load of the machine. Forward times and continuous batching are measured,
which needs a quiet machine.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from pearl.cache import Watcher
from pearl.config import EngineConfig, RequestOptions
from pearl.drafting.datastore import Datastore, check_tokenizer
from pearl.drafting.fused_guesses import index_factory
from pearl.engine import Engine
from pearl.lab.bench.tasks import Task
from pearl.lab.studies.estimate import bootstrap
from pearl.lab.studies.figures import Plot, Report, Table
from pearl.lab.studies.guessing import (
    Generated,
    Replayed,
    Seconds,
    no_time,
    replay,
    store_alone,
)
from pearl.lab.studies.recorded_texts import answers
from pearl.lab.studies.simulate import interpolated
from pearl.lab.studies.theory import free_in_theory, roofline_seconds
from pearl.models.calibrate import forward_seconds
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.models.runner import ModelRunner, feed_chain
from pearl.protocol.messages import Source
from pearl.spec.methods import METHODS
from pearl.text.conversation import Conversation
from pearl.text.stream import Tokenizer
from pearl.worker.build import make_runner
from pearl.worker.placement import place

# Tokens in a forward, with the last committed token: the paper's speculation length s.
SIZES = (1, 2, 4, 8, 16, 32)
_CONTEXT = 256  # tokens in the cache while forwards are timed
_ROUNDS = 5  # each round times every size once
BATCHES = (1, 2, 4, 8, 16, 32, 64)
_CONTEXTS = (256, 2048, 7800)  # tokens in the cache, for `free_tokens`
_LENGTHS = (500, 2000, 8000, 32000)  # tokens in the cache, for `roofline_speedups`
_LONG = (1000, 2000, 4000, 7500)  # tokens of a prompt to summarise
_FEEDS = (*SIZES, 64)  # tokens in a forward, for `free_tokens`
_FREE = 1.1  # tokens are free if their forward takes at most this multiple of a one-token forward
TEMPERATURES = (0.0, 0.4, 0.7, 1.0, 2.0)
LOOK_AHEAD = METHODS["ngram"].look_ahead
_AT_ONCE = 8  # texts decoded together
_FILTERED: dict[str, Any] = {"top_k": 50, "top_p": 0.7}  # as in the paper
PAPER: dict[Any, str] = {  # section 4 of the paper
    "speedup": "2.05 to 2.61 at batch 1, s at most 30",
    "sources": "almost add up perfectly",
    0.4: "-1 to -2%",
    0.7: "-1 to -2%",
    1.0: "-1 to -2%",
    2.0: "around -20%",
}


class Writer(NamedTuple):
    """A target that generates texts in this process."""

    target: ModelRunner
    tokenizer: Tokenizer
    eos: Sequence[int]
    watcher: Watcher

    def prompt(self, turn: str) -> list[int]:
        return Conversation(self.tokenizer, not self.tokenizer.chat_template).prompt(turn)

    def write(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[RequestOptions], tokens: int
    ) -> list[Generated]:
        """Decode up to `tokens` tokens per prompt; `samplings` has the options for each prompt."""
        tick = self.watcher.advance
        generated = []
        texts = answers(self.target, prompts, samplings, self.eos, tokens, tick)
        for prompt, text in zip(prompts, texts, strict=True):
            generated.append(Generated((*prompt, *text), len(prompt)))
        return generated


class Fed(NamedTuple):
    """Replays of the same texts with guesses from the text, from the datastore, and from both.

    `store` is None without a datastore. `size` is the number of tokens that each forward feeds. If
    `size` is None, each forward feeds the number with the most expected tokens per second, with up
    to `LOOK_AHEAD` guesses.
    """

    size: int | None
    text: Replayed
    store: Replayed | None
    both: Replayed


def measure(
    config: EngineConfig,
    tasks: Sequence[Task],
    tokens: int,
    watcher: Watcher,
    most_batch: int,
    most_context: int,
) -> Report:
    """Return the tables and figures of the paper that this module measures.

    The command also prints a table of methods, which `tables.run_study` measures.

    Args:
        config: names the target, and the datastore if there is one.
        tasks: conversations; the first turn of each is answered.
        tokens: most tokens of an answer.
        most_batch: most requests at a time.
        most_context: most tokens in a cache.
    """
    slots = min(_AT_ONCE, len(tasks))
    context = min(config.max_context or 8192, 2048)
    several = config.model_copy(update={"slots": slots, "max_context": context})
    tokenizer, defaults = load_tokenizer(config.target)
    runner = make_runner(several.model("target"), place(several, "target"))
    writer = Writer(runner, tokenizer, defaults.eos, watcher)
    store = None
    if config.datastore is not None:
        directory = Path(config.datastore)
        store = Datastore(directory, writer.target.vocab_size)
        check_tokenizer(store.header, tokenizer, directory)
    prompts = [writer.prompt(task.turns[0]) for task in tasks]
    texts = {}
    for temperature in TEMPERATURES:
        params = RequestOptions(
            temperature=temperature, min_p=0.0, repetition_penalty=1.0, seed=0, **_FILTERED
        )
        options = params.resolved(defaults.sampling)
        samplings = [options.changed(seed=task.number) for task in tasks]
        watcher.begin(f"texts at temperature {temperature:g}", tokens * len(tasks))
        texts[temperature] = writer.write(prompts, samplings, tokens)
    greedy = texts[0.0]
    seconds = measure_times(runner, watcher)
    rows = []
    steps = {}
    for size in SIZES:
        rows.append(fed(greedy, store, size, seconds))
        steps[size] = rows[-1].both.tokens_per_step
    notes = [_measured(config, greedy, store, seconds)]
    notes += _claims(rows, seconds)
    lengths_plot = _by_length(rows, seconds)
    rows.append(fed(greedy, store, None, seconds))
    compared, compared_plot = baselines(greedy, store)
    roofline, roofline_plot = roofline_speedups(steps)
    # This runner has one slot, with the whole context.
    runner = make_runner(config.model("target"), place(config, "target"))
    writer = writer._replace(target=runner)
    sizes = [batch for batch in BATCHES if batch <= most_batch]
    tables = [
        _by_size(rows, seconds),
        _by_temperature(texts, store, notes),
        compared,
        free_tokens(writer, most_context),
        roofline,
        long_prompts(writer, store, tokens, most_context),
        by_batch(config, prompts, tokens, sizes, watcher),
    ]
    return Report(tables, [lengths_plot, compared_plot, roofline_plot])


def _measured(
    config: EngineConfig, texts: Sequence[Generated], store: Datastore | None, seconds: Seconds
) -> str:
    count = sum(text.length for text in texts)
    datastore = "no datastore"
    if store is not None:
        datastore = f"datastore {config.datastore} of {store.header.tokens:,} tokens"
    return (
        f"{len(texts)} texts, {count} tokens greedy; t(1) {seconds(1) * 1e3:.1f} ms, "
        f"{torch.get_num_threads()} threads; {datastore}"
    )


def _by_length(rows: Sequence[Fed], seconds: Seconds) -> Plot:
    """Plot figure 2: tokens per step, the cost of a forward, and the speed-up, by speculation length."""
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


# ---- guesses on texts ----


def fed(
    texts: Sequence[Generated], store: Datastore | None, size: int | None, seconds: Seconds
) -> Fed:
    """Replay texts with each source of guesses. `size` is explained in `Fed`.

    Args:
        seconds: number of tokens fed -> seconds of the forward.
    """
    limit = LOOK_AHEAD
    times = seconds
    if size is not None:
        limit = size - 1
        times = no_time
    alone = None
    if store is not None:
        alone = replay(texts, store, limit, seconds=times, make=store_alone)
    return Fed(
        size,
        replay(texts, None, limit, seconds=times),
        alone,
        replay(texts, store, limit, seconds=times),
    )


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
    cells = []
    for row in rows:
        size = f"fastest: {row.both.fed_per_step:.1f}"
        cost = ""
        alone = ""
        if row.size:
            size = str(row.size)
            cost = f"{seconds(row.size) / seconds(1):.2f}"
        if row.store is not None:
            alone = f"{row.store.tokens_per_step:.2f}"
        text = f"{row.text.tokens_per_step:.2f}"
        together = f"{row.both.tokens_per_step:.2f}"
        speedup = f"{row.both.speedup(seconds):.2f}"
        cells.append([size, cost, text, alone, together, _by_source([row.both]), speedup])
    return Table("Tokens in a forward", columns, cells)


def _by_temperature(
    texts: dict[float, list[Generated]], store: Datastore | None, notes: Sequence[str]
) -> Table:
    """Compare the tokens per step at each temperature with those of greedy texts, with 95% intervals over the prompts.

    Each forward feeds all guesses, up to `LOOK_AHEAD`. `texts` maps a temperature to the texts of the same prompts.
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
    """Return the accepted guesses per step from text and datastore, such as "0.52, 0.31"."""
    steps = max(1, sum(replayed.steps for replayed in replays))
    accepted: Counter[Source] = Counter()
    for replayed in replays:
        accepted += replayed.accepted
    return f"{accepted[Source.NGRAM] / steps:.2f}, {accepted[Source.DATASTORE] / steps:.2f}"


def _per_step(replays: Sequence[Replayed]) -> float:
    steps = sum(replayed.steps for replayed in replays)
    return sum(replayed.tokens for replayed in replays) / max(1, steps)


def _change(pairs: Sequence[tuple[Replayed, Replayed]]) -> float:
    replays, greedy_replays = zip(*pairs, strict=True)
    greedy = _per_step(greedy_replays)
    if not greedy:
        return 0.0
    return _per_step(replays) / greedy - 1


def _claims(rows: Sequence[Fed], seconds: Seconds) -> list[str]:
    """Return notes on the columns, and the paper's claims next to ours.

    `rows` has no row whose `size` is None.
    """
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


# ---- the duration of a forward ----


def measure_times(
    target: ModelRunner,
    watcher: Watcher,
    sizes: Sequence[int] = SIZES,
    context: int = _CONTEXT,
) -> Seconds:
    """Measure forwards; return a function from the number of tokens fed to seconds.

    The times are medians over `_ROUNDS` rounds, interpolated between `sizes`. The cache holds `context` tokens, or
    fewer if the target's context is too small.
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


# ---- by batch and by context ----


def free_tokens(writer: Writer, most_context: int) -> Table:
    """Compare the numbers of free tokens per sequence, by batch size.

    Tokens are free if a forward that feeds them takes at most `_FREE` times as long as a forward of
    one token. For the paper's device, the number of free tokens comes from a closed form. For this
    target it comes from measured forward times. Contexts of more than `most_context` tokens are
    left out.
    """
    target = writer.target
    columns = ["batch", "theirs\n(closed form)"]
    rows = [[str(batch), f"{free_in_theory(batch):.1f}"] for batch in BATCHES]
    for context in _CONTEXTS:
        if context > most_context or context + max(_FEEDS) > target.context:
            continue
        seconds = measure_times(target, writer.watcher, _FEEDS, context)
        limit = _FREE * seconds(1)
        free = max(fed for fed in range(1, max(_FEEDS) + 1) if seconds(fed) <= limit)
        columns.append(f"ours, {context}\nin the cache")
        for row, batch in zip(rows, BATCHES, strict=True):
            row.append(f"{free / batch:.1f}")
    notes = [
        f"Free: a forward of so many tokens a sequence takes at most {_FREE:g} times that of one."
    ]
    return Table("Free tokens by batch (section 3.2)", columns, rows, notes)


class _Speedup(NamedTuple):
    """A speed-up, and the number of tokens in a forward (the paper's s) that gives it."""

    value: float
    s: int


def roofline_speedups(steps: Mapping[int, float]) -> tuple[Table, Plot]:
    """Return the speed-ups over `ar` on the paper's device, at the best s, by batch and context.

    Forwards take `theory.roofline_seconds`. `steps` maps s, the tokens in a forward, to our tokens
    per step.
    """

    def best(batch: int, context: int) -> _Speedup:
        alone = roofline_seconds(batch, 1, context)
        speedups = []
        for s, tokens in steps.items():
            speedups.append(_Speedup(tokens * alone / roofline_seconds(batch, s, context), s))
        return max(speedups)

    rows = []
    lines = {}
    for context in _LENGTHS:
        row = [f"{context:,}"]
        points = []
        for batch in BATCHES:
            speedup = best(batch, context)
            row.append(f"{speedup.value:.2f} (s {speedup.s})")
            points.append((batch, speedup.value))
        rows.append(row)
        lines[f"{context:,} tokens"] = points
    title = "Speed-up by batch and context on a toy clock: the paper's device, our tokens a step (figure 6)"
    theirs = "Theirs, measured: 2.05 to 2.61 at batch 1, 1.37 to 1.80 at 64; nearly constant with a long context."
    plot = Plot(
        "sssd-batches", title, "batch", "times as fast as ar", lines, theirs=theirs, log="x"
    )
    columns = ["context", *map("batch {}".format, BATCHES)]
    return Table(title, columns, rows, [theirs]), plot


def by_batch(
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    batches: Sequence[int],
    watcher: Watcher,
) -> Table:
    """Measure `ar` and `ngram` with continuous batching: twice as many requests as slots are submitted at once."""
    rows = []
    watcher.begin("batches", len(batches))
    for batch in batches:
        slots = config.model_copy(update={"slots": batch, "draft": "none", "max_context": 1024})
        requests = list(islice(cycle(prompts), 2 * batch))
        with Engine(config=slots) as engine:
            ar = _rate(engine, "ar", requests, tokens)
            ngram = _rate(engine, "ngram", requests, tokens)
        row = [str(batch), f"{ar:.0f}", f"{ngram:.0f}", f"{ngram / ar:.2f}"]
        row += [f"{1e3 * batch / ar:.0f}", f"{1e3 * batch / ngram:.0f}"]
        rows.append(row)
        watcher.advance(1, f"batch {batch}")
    columns = ("batch", "ar: tokens/s", "ngram", "over ar", "ar: ms a token\nof a text", "ngram")
    return Table(
        "Continuous batching, two requests a slot, prompts included (section 4.4)", columns, rows
    )


def _rate(engine: Engine, method: str, requests: Sequence[Sequence[int]], tokens: int) -> float:
    """Return the tokens per second of all requests together, after a warm-up."""
    params = RequestOptions(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    engine.generate(requests[:1], params.changed(max_tokens=8), method=method)
    began = time.monotonic()
    results = engine.generate(requests, params, method=method)
    seconds = time.monotonic() - began
    return sum(len(result.tokens) for result in results) / seconds


def long_prompts(writer: Writer, store: Datastore | None, tokens: int, most_context: int) -> Table:
    """Measure summaries of long prose: tokens per step and speed-up, by the length of the prompt.

    The prose is Python's help pages; the paper takes PG-19. Prompts that do not fit `most_context`
    tokens or the target's context are left out.
    """
    from pydoc_data.topics import topics

    tokenizer = writer.tokenizer
    target = writer.target
    prose = tokenizer.encode("\n".join(map(topics.__getitem__, sorted(topics))))
    begins = tokenizer.encode("Write a summary of this text.\n\n")
    longest = min(most_context, target.context - tokens - max(SIZES))
    lengths = [length for length in _LONG if length <= longest]
    rows = []
    for length in lengths:
        writer.watcher.begin(f"long prompts, {length} tokens", tokens)
        prompt = writer.prompt(tokenizer.decode(begins + prose[: length - len(begins)]))
        (text,) = writer.write([prompt], [RequestOptions().resolved()], tokens)
        seconds = measure_times(target, writer.watcher, SIZES, length)
        replayed = replay([text], store, SIZES[-1] - 1, seconds=seconds)
        steps = f"{replayed.tokens_per_step:.2f}"
        speedup = f"{replayed.speedup(seconds):.2f}"
        rows.append([f"{len(prompt):,}", str(text.length), steps, speedup])
    columns = ("tokens of\nthe prompt", "of the\nsummary", "tokens\na step", "over ar")
    notes = ["over ar: only forwards take time. The prose is that of Python's own help pages."]
    return Table("Summaries of long texts (section 4.4)", columns, rows, notes)


def baselines(texts: Sequence[Generated], store: Datastore | None) -> tuple[Table, Plot]:
    """Return the tokens per step with the guesses of other papers and with ours (figure 4).

    There is a column for each s, the number of tokens in a forward. Without a datastore there is no
    row of `rest`.
    """
    rows = []
    lines = {}
    for name in ("pld", "llma", "rest", "sssd", "ngram"):
        if name == "rest" and store is None:
            continue
        make = index_factory(METHODS[name].guesses)
        row = [name]
        points = []
        for s in SIZES:
            steps = replay(texts, store, s - 1, make=make).tokens_per_step
            row.append(f"{steps:.2f}")
            points.append((s, steps))
        rows.append(row)
        lines[name] = points
    title = "Tokens a step by s, the tokens in a forward, all guesses fed (figure 4)"
    notes = ["ngram: ours, with learned probabilities; sssd: as printed."]
    plot = Plot("sssd-baselines", title, "s", "tokens a step", lines, log="x")
    columns = ["method"] + [f"s = {s}" for s in SIZES]
    return Table(title, columns, rows, notes), plot
