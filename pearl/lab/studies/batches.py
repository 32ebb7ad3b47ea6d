"""SSSD by batch and by context: free tokens of a roofline and of a machine, and speed-ups with continuous batching.

Source: Marzollo et al. 2024, sections 3.2 and 4.4. The paper's device and model are evaluated in closed form; our
target's forwards and texts are measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from pearl.cache import Watcher
from pearl.config import EngineConfig, RequestOptions
from pearl.drafting.datastore import Datastore
from pearl.drafting.fused_guesses import index_factory
from pearl.engine import Engine
from pearl.lab.studies.figures import Figure, Table
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
_FLOPS, _BANDWIDTH = 280e12, 0.8e12  # a second
_WIDTH, _LAYERS, _WEIGHTS = 4096, 32, 6.6e9


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
    """Free tokens by batch: the paper's device in closed form, and this target by its forward times.

    `most`: tokens in the cache.
    """
    measured = {}
    for context in (
        each for each in CONTEXTS if each <= most and each + max(_FEEDS) <= target.context
    ):
        seconds = measure_times(target, watcher, _FEEDS, context)
        measured[context] = max(
            fed for fed in range(1, max(_FEEDS) + 1) if seconds(fed) <= _FREE * seconds(1)
        )
    rows = [
        [
            str(batch),
            f"{free_in_theory(batch):.1f}",
            *(f"{free / batch:.1f}" for free in measured.values()),
        ]
        for batch in BATCHES
    ]
    columns = (
        "batch",
        "theirs\n(closed form)",
        *(f"ours, {context}\nin the cache" for context in measured),
    )
    notes = [
        f"Free: a forward of so many tokens a sequence takes at most {_FREE:g} times that of one."
    ]
    return Table("Free tokens by batch (section 3.2)", columns, rows, notes)


def roofline_speedups(steps: Mapping[int, float]) -> tuple[Table, Figure]:
    """Times as fast as without guesses on the paper's device, at the best s. `steps`: tokens a step by s, of ours."""

    def best(batch: int, context: int) -> tuple[float, int]:
        alone = roofline_seconds(batch, 1, context)
        return max(
            (tokens * alone / roofline_seconds(batch, s, context), s) for s, tokens in steps.items()
        )

    found = {context: [(batch, *best(batch, context)) for batch in BATCHES] for context in _LENGTHS}
    rows = [
        [f"{context:,}", *(f"{speedup:.2f} (s {s})" for _, speedup, s in of_batches)]
        for context, of_batches in found.items()
    ]
    title = "Speed-up by batch and context on a toy clock: the paper's device, our tokens a step (figure 6)"
    notes = [
        "Theirs, measured: 2.05 to 2.61 at batch 1, 1.37 to 1.80 at 64; nearly constant with a long context."
    ]
    lines = {
        f"{context:,} tokens": [(b, speedup) for b, speedup, _ in some]
        for context, some in found.items()
    }
    figure = Figure(
        "sssd-batches", title, "batch", "times as fast as ar", lines, theirs=notes[0], log="x"
    )
    return Table(title, ("context", *(f"batch {batch}" for batch in BATCHES)), rows, notes), figure


def by_batch(
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    batches: Sequence[int],
    watcher: Watcher,
) -> Table:
    """The engine with continuous batching: twice as many requests as slots, all submitted at once; `ar` and `ngram`."""
    rows = []
    watcher.begin("batches", len(batches))
    for batch in batches:
        own = config.model_copy(update={"slots": batch, "draft": "none", "max_context": 1024})
        asked = [prompts[number % len(prompts)] for number in range(2 * batch)]
        params = RequestOptions(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        with Engine(config=own) as engine:
            rates = {}
            for method in ("ar", "ngram"):
                engine.generate(asked[:1], params.changed(max_tokens=8), method=method)
                began = time.monotonic()
                done = engine.generate(asked, params, method=method)
                rates[method] = sum(len(each.tokens) for each in done) / (time.monotonic() - began)
        latency = [f"{1e3 * batch / rate:.0f}" for rate in rates.values()]
        rows.append(
            [
                str(batch),
                *(f"{rate:.0f}" for rate in rates.values()),
                f"{rates['ngram'] / rates['ar']:.2f}",
                *latency,
            ]
        )
        watcher.advance(1, f"batch {batch}")
    columns = ("batch", "ar: tokens/s", "ngram", "over ar", "ar: ms a token\nof a text", "ngram")
    return Table(
        "Continuous batching, two requests a slot, prompts included (section 4.4)", columns, rows
    )


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
    """Summaries of long prose, as of PG-19 in the paper: tokens a step, and the speed-up at this context."""
    from pydoc_data.topics import topics

    prose = tokenizer.encode("\n".join(topics[name] for name in sorted(topics)))
    begins = tokenizer.encode("Write a summary of this text.\n\n")
    rows = []
    lengths = [
        each for each in _LONG if each <= most and each + tokens + max(SIZES) <= target.context
    ]
    watcher.begin("long prompts", len(lengths))
    for length in lengths:
        turn = tokenizer.decode([*begins, *prose[: length - len(begins)]])
        prompt = prompt_of(turn)
        (text,) = answers(target, [prompt], [RequestOptions().resolved()], eos, tokens)
        seconds = measure_times(target, watcher, SIZES, length)
        found = replay(
            [Generated((*prompt, *text), len(prompt))], store, SIZES[-1] - 1, seconds=seconds
        )
        gains = f"{found.tokens_per_step:.2f}", f"{found.speedup(seconds):.2f}"
        rows.append([f"{len(prompt):,}", str(len(text)), *gains])
        watcher.advance(1, f"{length} tokens")
    columns = ("tokens of\nthe prompt", "of the\nsummary", "tokens\na step", "over ar")
    notes = ["over ar: only forwards take time. The prose is that of Python's own help pages."]
    return Table("Summaries of long texts (section 4.4)", columns, rows, notes)


def baselines(texts: Sequence[Generated], store: Datastore | None) -> tuple[Table, Figure]:
    """Tokens a step by s, of the guesses of other papers and ours (figure 4)."""
    found: dict[str, list[tuple[int, float]]] = {}
    for name in ("pld", "llma", "rest", "sssd", "ngram"):
        if name == "rest" and store is None:
            continue
        make = index_factory(METHODS[name].guesses)
        found[name] = []
        for s in SIZES:
            found[name].append((s, replay(texts, store, s - 1, make=make).tokens_per_step))
    rows = [[name, *(f"{tokens:.2f}" for _, tokens in some)] for name, some in found.items()]
    title = "Tokens a step by s, the tokens in a forward, all guesses fed (figure 4)"
    notes = ["ngram: ours, with learned probabilities; sssd: as printed."]
    figure = Figure("sssd-baselines", title, "s", "tokens a step", found, log="x")
    return Table(title, ("method", *(f"s = {s}" for s in SIZES)), rows, notes), figure
