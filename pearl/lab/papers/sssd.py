"""SSSD (Marzollo et al. 2024): guesses without a draft model, by source, by number and by temperature.

The target decodes texts at several temperatures, once each, as `ar` does.  They are replayed with guesses from the
text, from a datastore and from both, so acceptance does not depend on the load of the machine.  Only the duration of a
forward of s tokens is measured, and needs a quiet machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pearl.config import EngineConfig, SamplingParams
from pearl.drafting.datastore import Datastore, check_tokenizer
from pearl.engine.conversation import Conversation
from pearl.engine.request import resolve_sampling
from pearl.lab import Watcher
from pearl.lab.bench.tasks import Task
from pearl.lab.experiments.estimate import Estimate, bootstrap
from pearl.lab.experiments.guessing import Generated, Replayed, replay, store_alone
from pearl.lab.experiments.texts import answers
from pearl.lab.papers.figures import Figure
from pearl.lab.papers.page import Table
from pearl.lab.papers.studies import FILTERED
from pearl.lab.simulate import interpolated
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.models.runner import ModelRunner, feed_chain
from pearl.protocol.messages import Source
from pearl.spec.methods import LOOK_AHEAD
from pearl.worker.build import make_runner
from pearl.worker.placement import place

SIZES = (1, 2, 4, 8, 16, 32)  # tokens in a forward, the last committed one included: the paper's speculation length
TEMPERATURES = (0.0, 0.4, 0.7, 1.0, 2.0)
_AT_ONCE = 8  # texts decoded together
_CONTEXT = 256  # tokens in the cache while forwards are timed
_ROUNDS = 5  # of all sizes
PAPER = {  # section 4 of the paper
    "speedup": "2.05 to 2.61 at batch 1, s at most 30",
    "sources": "almost add up perfectly",
    0.4: "-1 to -2%",
    0.7: "-1 to -2%",
    1.0: "-1 to -2%",
    2.0: "around -20%",
}


@dataclass(frozen=True)
class Found:
    """`document`: the figures by size and by temperature, for JSON: see `by_size` and `by_temperature`."""

    document: dict[str, Any]
    tables: list[Table]
    figures: list[Figure]


def measure_guesses(
    config: EngineConfig, tasks: Sequence[Task], tokens: int, watcher: Watcher, most_batch: int, most_context: int
) -> Found:
    """Everything but the study's rows.

    Args:
        config: of the target, and of the datastore if there is one.
        tasks: the first turn of each is answered.
        tokens: the most of an answer.
        most_batch, most_context: requests at a time, and tokens in a cache.
    """
    from pearl.lab.papers import batches

    slots, room = min(_AT_ONCE, len(tasks)), config.max_context or 8192
    several = config.model_copy(update={"slots": slots, "max_context": min(room, 2048)})
    tokenizer, defaults = load_tokenizer(config.target)
    target = make_runner(several.model("target"), place(several, "target"))
    store = None
    if config.datastore is not None:
        directory = Path(config.datastore)
        store = Datastore(directory, target.vocab_size)
        check_tokenizer(store.header, tokenizer, directory)
    raw = tokenizer.apply_chat([{"role": "user", "content": "."}]) is None
    prompt_of = Conversation(tokenizer, raw).prompt
    prompts = [prompt_of(task.turns[0]) for task in tasks]

    def decode(temperature: float) -> list[Generated]:
        params = SamplingParams(temperature=temperature, min_p=0.0, repetition_penalty=1.0, seed=0, **FILTERED)
        sampling = resolve_sampling(params, defaults, 0)
        samplings = [sampling.changed(seed=task.number) for task in tasks]
        watcher.begin(f"texts at temperature {temperature:g}", tokens * len(tasks))
        found = answers(target, prompts, samplings, defaults.eos, tokens, watcher.advance)
        return [Generated((*p, *a), len(p)) for p, a in zip(prompts, found, strict=True)]

    texts = {temperature: decode(temperature) for temperature in TEMPERATURES}
    greedy, times = texts[0.0], measure_times(target, watcher)
    document: dict[str, Any] = {
        "sizes": by_size(greedy, store, times),
        "chosen": fastest(greedy, store, times),
        "temperatures": by_temperature(texts, store),
        "texts": len(tasks),
        "tokens": sum(len(text.tokens) - text.start for text in greedy),
        "datastore": None if store is None else [config.datastore, store.header.tokens],
        "threads": torch.get_num_threads(),
        "t_one": times[1],
    }
    beside, drawn = batches.baselines(greedy, store)
    virtual, by_batch = batches.roofline_speedups({row["size"]: row["both"] for row in document["sizes"]})
    target = make_runner(config.model("target"), place(config, "target"))  # of one slot, and the whole context
    tables = [*in_words(document), beside, batches.free_tokens(target, watcher, most_context), virtual]
    tables.append(
        batches.long_prompts(target, tokenizer, prompt_of, defaults.eos, tokens, store, watcher, most_context)
    )
    sizes = [batch for batch in batches.BATCHES if batch <= most_batch]
    tables.append(batches.by_batch(config, prompts, tokens, sizes, watcher))
    return Found(document, tables, [_by_length(document), drawn, by_batch])


def _by_length(document: dict[str, Any]) -> Figure:
    """Figure 2: tokens a step, the cost of a forward, and their quotient."""
    lines = {
        "tokens a step": [(row["size"], row["both"]) for row in document["sizes"]],
        "t(s) / t(1)": [(row["size"], row["time"]) for row in document["sizes"]],
        "times as fast as ar": [(row["size"], row["speedup"]) for row in document["sizes"]],
    }
    return Figure("sssd-length", "Speculation length: gain and cost (figure 2)", "s", "", lines, log="x")


# ---- the duration of a forward ----


def measure_times(
    target: ModelRunner, watcher: Watcher, sizes: Sequence[int] = SIZES, context: int = _CONTEXT
) -> dict[int, float]:
    """Seconds of a forward by tokens fed: medians over rounds in which all sizes take turns.

    `context`: tokens in the cache, if there is room for them.
    """
    base = max(1, min(context, target.context - max(sizes)))
    target.rollback(0)
    feed_chain(target, [(7 + 5 * i) % target.vocab_size for i in range(base)], 0)
    taken: dict[int, list[float]] = {fed: [] for fed in sizes}
    watcher.begin(f"forward times, {base} tokens in the cache", _ROUNDS)
    for round_ in range(_ROUNDS + 1):  # the first warms up
        for fed in sizes:
            target.rollback(base)
            target.synchronize()
            began = time.perf_counter()
            feed_chain(target, [(3 + 11 * i) % target.vocab_size for i in range(fed)], fed)
            target.synchronize()
            taken[fed] += [time.perf_counter() - began] if round_ else []
        watcher.advance(min(round_, 1))
    target.rollback(0)
    return {fed: median(some) for fed, some in taken.items()}


# ---- guesses on texts ----


def by_size(texts: Sequence[Generated], store: Datastore | None, times: Mapping[int, float]) -> list[dict[str, Any]]:
    """A row for each number of tokens in a forward, all found guesses fed; see `_row`."""
    return [_row(texts, store, size - 1, size, times) for size in SIZES]


def fastest(texts: Sequence[Generated], store: Datastore | None, times: Mapping[int, float]) -> dict[str, Any]:
    """The row whose forwards are fed the number of guesses, up to `LOOK_AHEAD`, that gives most tokens per second."""
    return _row(texts, store, LOOK_AHEAD, None, times)


def _row(
    texts: Sequence[Generated], store: Datastore | None, most: int, size: int | None, times: Mapping[int, float]
) -> dict[str, Any]:
    """Tokens a step from each source alone and from both; and the resulting speedup.

    `size`: tokens fed; None: the fastest number.
    """
    seconds = interpolated(dict(times))

    def steps(store: Datastore | None, **options: Any) -> Replayed:
        return replay(texts, store, most, seconds=None if size else seconds, **options)

    both = steps(store)
    return {
        "size": size,
        "time": None if size is None else times[size] / times[1],
        "fed": both.fed_per_step,
        "text": steps(None).tokens_per_step,
        "store": None if store is None else steps(store, make=store_alone).tokens_per_step,
        "both": both.tokens_per_step,
        "by_source": _by_source(both),
        "speedup": both.speedup(seconds),
    }


def by_temperature(texts: dict[float, list[Generated]], store: Datastore | None) -> list[dict[str, Any]]:
    """Tokens a step with up to `LOOK_AHEAD` guesses, all fed, and against greedy; 95% over the prompts.

    `texts`: of the same prompts, by temperature.
    """
    each = {key: [replay([text], store, LOOK_AHEAD) for text in those] for key, those in texts.items()}
    greedy, rows = each[0.0], []
    for temperature, replays in each.items():
        per_step, total = bootstrap(replays, _per_step), sum(replays, Replayed())
        pairs = list(zip(replays, greedy, strict=True))
        change = bootstrap(pairs, _change) if temperature else None
        rows.append(
            {
                "temperature": temperature,
                "tokens": total.tokens,
                "tokens_per_step": astuple(per_step),
                "by_source": _by_source(total),
                "change": change and astuple(change),
            }
        )
    return rows


def _by_source(replayed: Replayed) -> dict[str, float]:
    """Accepted guesses a step."""
    return {source.value: replayed.accepted_per_step(source) for source in (Source.NGRAM, Source.DATASTORE)}


def _per_step(replays: Sequence[Replayed]) -> float:
    return sum(one.tokens for one in replays) / max(1, sum(one.steps for one in replays))


def _change(pairs: Sequence[tuple[Replayed, Replayed]]) -> float:
    own, greedy = (_per_step([pair[i] for pair in pairs]) for i in (0, 1))
    return own / greedy - 1 if greedy else 0.0


# ---- in words ----


def in_words(found: dict[str, Any]) -> list[Table]:
    """The table by tokens in a forward, its last row the fastest; and the table by temperature."""
    columns = (
        *("s", "t(s)/t(1)", "tokens a step:\ntext alone", "datastore\nalone", "both"),
        *("accepted a step:\nn-gram, datastore", "over ar"),
    )
    sizes = [_size_in_words(row) for row in (*found["sizes"], found["chosen"])]
    rows = [
        [
            f"{row['temperature']:g}",
            str(Estimate(*row["tokens_per_step"])),
            ", ".join(f"{value:.2f}" for value in row["by_source"].values()),
            "" if row["change"] is None else "{:+.0%} ({:+.0%} to {:+.0%})".format(*row["change"]),
            PAPER.get(row["temperature"], ""),
        ]
        for row in found["temperatures"]
    ]
    temperatures = ("temperature", "tokens a step", "n-gram, datastore", "against greedy", "theirs")
    return [
        Table("Tokens in a forward", columns, sizes),
        Table("Temperatures", temperatures, rows, _explained(found)),
    ]


def _size_in_words(row: dict[str, Any]) -> list[str]:
    return [
        f"fastest: {row['fed']:.1f}" if row["size"] is None else str(row["size"]),
        "" if row["size"] is None else f"{row['time']:.2f}",
        f"{row['text']:.2f}",
        "" if row["store"] is None else f"{row['store']:.2f}",
        f"{row['both']:.2f}",
        ", ".join(f"{value:.2f}" for value in row["by_source"].values()),
        f"{row['speedup']:.2f}",
    ]


def _explained(found: dict[str, Any]) -> list[str]:
    """Settings, and the paper's statements in prose."""
    store, most = found["datastore"], found["sizes"][-1]
    best = max(found["sizes"], key=lambda row: row["speedup"])
    lines = [
        f"s: tokens in a forward, the last committed one included. {found['texts']} texts, {found['tokens']} tokens "
        f"greedy; t(1) {found['t_one'] * 1e3:.1f} ms, {found['threads']} threads, {_CONTEXT} tokens in the cache; "
        + (f"datastore {store[0]} of {store[1]:,} tokens" if store else "no datastore"),
        f"over ar: only forwards take time. Ours at its best s, {best['size']}: {best['speedup']:.2f}; theirs: "
        f"{PAPER['speedup']}",
        f"temperatures: up to {LOOK_AHEAD} guesses, all fed, as a tree; 95% over the prompts; top-k 50 and top-p 0.7",
    ]
    if store and most["both"] > 1:
        added = (most["text"] + most["store"] - 2) / (most["both"] - 1)
        lines.append(
            f"the gains of the sources alone add up, at s = {most['size']}, to {added:.2f} times the gain of both; "
            f'theirs "{PAPER["sources"]}"'
        )
    return lines
