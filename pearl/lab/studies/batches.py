"""SSSD by batch and by context: free tokens of a roofline and of a machine, and speed-ups with continuous batching.

Source: Marzollo et al. 2024, sections 3.2 and 4.4. The paper's device and model are evaluated in closed form; our
target's forwards and texts are measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pearl.cache import Watcher
from pearl.config import EngineConfig, RequestOptions
from pearl.drafting.datastore import Datastore
from pearl.drafting.fused_guesses import index_factory
from pearl.engine import Engine
from pearl.lab.studies.figures import Plot, Table
from pearl.lab.studies.guessing import Generated, replay
from pearl.lab.studies.recorded_texts import answers
from pearl.lab.studies.sssd import SIZES, measure_times
from pearl.models.runner import ModelRunner
from pearl.spec.methods import METHODS
from pearl.text.stream import Tokenizer

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (256, 2048, 7800)  # of measured forwards: tokens in the cache
_LENGTHS = (500, 2000, 8000, 32000)  # of the roofline
_LONG = (1000, 2000, 4000, 7500)  # tokens of a prompt that is to be summarised
_FEEDS = (*SIZES, 64)
_FREE = 1.1  # a forward is free up to this multiple of that of one token


# The paper's device and model, an Ascend 910B4 and Llama 2 7B in 16 bits, which has no grouped heads.
_FLOPS = 280e12  # a second
_BANDWIDTH = 0.8e12  # bytes a second
_WIDTH = 4096
_LAYERS = 32
_WEIGHTS = 6.6e9


def free_in_theory(batch: int) -> float:
    """Tokens of a sequence, its last one included, up to which a product of width by width costs no more there."""
    return 1 / (_BANDWIDTH / _FLOPS - 2 / _WIDTH) / batch


def roofline_seconds(batch: int, fed: int, context: int) -> float:
    """Time there of a forward that feeds `fed` tokens to each of `batch` sequences, each with `context` tokens cached.

    An operation takes what it computes or what it reads, if that is more.
    """
    products = max(2 * _WEIGHTS * batch * fed / _FLOPS, 2 * _WEIGHTS / _BANDWIDTH)
    pairs = context * _WIDTH * _LAYERS * batch
    return products + max(4 * pairs * fed / _FLOPS, 4 * pairs / _BANDWIDTH)


def free_tokens(target: ModelRunner, watcher: Watcher, most: int) -> Table:
    """Compare free tokens by batch: the paper's device in closed form, and this target by its forward times.

    `most`: tokens in the cache.
    """
    columns = ["batch", "theirs\n(closed form)"]
    rows = [[str(batch), f"{free_in_theory(batch):.1f}"] for batch in BATCHES]
    for context in CONTEXTS:
        if context > most or context + max(_FEEDS) > target.context:
            continue
        seconds = measure_times(target, watcher, _FEEDS, context)
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
    """The largest speed-up, and the s that reaches it."""

    value: float
    s: int


def roofline_speedups(steps: Mapping[int, float]) -> tuple[Table, Plot]:
    """Return speed-ups over `ar` on the paper's device, at the best s. `steps`: tokens a step by s, of ours."""

    def best(batch: int, context: int) -> _Speedup:
        alone = roofline_seconds(batch, 1, context)
        speedups = []
        for s, tokens in steps.items():
            speedups.append(_Speedup(tokens * alone / roofline_seconds(batch, s, context), s))
        return max(speedups)

    rows = []
    lines = {}
    for context in _LENGTHS:
        speedups = [best(batch, context) for batch in BATCHES]
        words = [f"{speedup.value:.2f} (s {speedup.s})" for speedup in speedups]
        rows.append([f"{context:,}", *words])
        values = [speedup.value for speedup in speedups]
        lines[f"{context:,} tokens"] = list(zip(BATCHES, values, strict=True))
    title = "Speed-up by batch and context on a toy clock: the paper's device, our tokens a step (figure 6)"
    theirs = "Theirs, measured: 2.05 to 2.61 at batch 1, 1.37 to 1.80 at 64; nearly constant with a long context."
    plot = Plot(
        "sssd-batches", title, "batch", "times as fast as ar", lines, theirs=theirs, log="x"
    )
    columns = ["context"] + [f"batch {batch}" for batch in BATCHES]
    return Table(title, columns, rows, [theirs]), plot


def by_batch(
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    batches: Sequence[int],
    watcher: Watcher,
) -> Table:
    """Measure `ar` and `ngram` with continuous batching: twice as many requests as slots, submitted at once."""
    rows = []
    watcher.begin("batches", len(batches))
    for batch in batches:
        slots = config.model_copy(update={"slots": batch, "draft": "none", "max_context": 1024})
        requests = [prompts[number % len(prompts)] for number in range(2 * batch)]
        with Engine(config=slots) as engine:
            ar = _rate(engine, "ar", requests, tokens)
            ngram = _rate(engine, "ngram", requests, tokens)
        rates = [f"{ar:.0f}", f"{ngram:.0f}", f"{ngram / ar:.2f}"]
        latencies = [f"{1e3 * batch / ar:.0f}", f"{1e3 * batch / ngram:.0f}"]
        rows.append([str(batch), *rates, *latencies])
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
    return sum(len(result.tokens) for result in results) / (time.monotonic() - began)


def long_prompts(
    target: ModelRunner,
    tokenizer: Tokenizer,
    prompt_of: Callable[[str], list[int]],
    eos: Sequence[int],
    tokens: int,
    store: Datastore | None,
    watcher: Watcher,
    most: int,
) -> Table:
    """Measure summaries of long prose, as of PG-19 in the paper: tokens a step, and the speed-up at this context."""
    from pydoc_data.topics import topics

    prose = tokenizer.encode("\n".join(topics[name] for name in sorted(topics)))
    begins = tokenizer.encode("Write a summary of this text.\n\n")
    longest = min(most, target.context - tokens - max(SIZES))
    lengths = [length for length in _LONG if length <= longest]
    rows = []
    watcher.begin("long prompts", len(lengths))
    for length in lengths:
        turn = tokenizer.decode([*begins, *prose[: length - len(begins)]])
        prompt = prompt_of(turn)
        (text,) = answers(target, [prompt], [RequestOptions().resolved()], eos, tokens)
        seconds = measure_times(target, watcher, SIZES, length)
        generated = Generated((*prompt, *text), len(prompt))
        replayed = replay([generated], store, SIZES[-1] - 1, seconds=seconds)
        row = [
            f"{len(prompt):,}",
            str(len(text)),
            f"{replayed.tokens_per_step:.2f}",
            f"{replayed.speedup(seconds):.2f}",
        ]
        rows.append(row)
        watcher.advance(1, f"{length} tokens")
    columns = ("tokens of\nthe prompt", "of the\nsummary", "tokens\na step", "over ar")
    notes = ["over ar: only forwards take time. The prose is that of Python's own help pages."]
    return Table("Summaries of long texts (section 4.4)", columns, rows, notes)


def baselines(texts: Sequence[Generated], store: Datastore | None) -> tuple[Table, Plot]:
    """Return the tokens a step by s, of the guesses of other papers and ours (figure 4)."""
    rows = []
    lines = {}
    for name in ("pld", "llma", "rest", "sssd", "ngram"):
        if name == "rest" and store is None:
            continue
        make = index_factory(METHODS[name].guesses)
        steps = [replay(texts, store, s - 1, make=make).tokens_per_step for s in SIZES]
        rows.append([name] + [f"{tokens:.2f}" for tokens in steps])
        lines[name] = list(zip(SIZES, steps, strict=True))
    title = "Tokens a step by s, the tokens in a forward, all guesses fed (figure 4)"
    notes = ["ngram: ours, with learned probabilities; sssd: as printed."]
    plot = Plot("sssd-baselines", title, "s", "tokens a step", lines, log="x")
    columns = ["method"] + [f"s = {s}" for s in SIZES]
    return Table(title, columns, rows, notes), plot
