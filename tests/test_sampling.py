"""Logits to probabilities as transformers has it, and draws that are keyed: the same bits for ever, evenly spread."""

from collections.abc import Iterator
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pearl.config import RequestOptions
from pearl.config.option_values import LEAST_SHARE, LEAST_TEMPERATURE, MOST_TEMPERATURE
from pearl.decoding import sampling as module
from pearl.decoding.keys import Purpose, draw_key, uniform
from pearl.decoding.keys import exponentials as draws_of
from pearl.decoding.sampling import (
    greedy,
    nucleus,
    pick,
    pick_on_device,
    probabilities,
    race,
    race_of_logits,
    race_rows,
    read_draw,
    read_shortlist,
    shortlist,
)
from pearl.errors import NumericalError
from tests.options import drawn_by

NEVER = 1e-4  # a p-value below this does not come by chance; seeds are fixed, so it either does or does not
KEYS = [
    draw_key(drawn_by(seed=seed), position, Purpose.DRAFT)
    for seed in range(40)
    for position in range(100)
]
PINNED_KEYS = [3864364845839433636, 3477034322568795051, 14614277576934471270, 1131526410593929789]
PINNED_UNIFORMS = [
    0.20948763805678616,
    0.18849040831678754,
    0.7922415749109273,
    0.06134016962953315,
]
PINNED_EXPONENTIALS = [
    1.0366574833705107,
    0.2668946523086024,
    0.7148030408934173,
    2.1494252913143104,
]
PINNED_RACES = [62, 83, 67, 98, 60, 67, 48, 96]
PINNED_PICKS = [55, 29, 85, 69, 56, 51, 23, 24]


def exponentials(key: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    return draws_of(key, ids).numpy()


def picked(probs: torch.Tensor, key: int, otherwise: torch.Tensor | None = None) -> int:
    return read_draw(pick(probs, key, otherwise))


def raced(probs: torch.Tensor, key: int) -> int:
    return read_draw(race(probs, key))


def picked_there(probs: torch.Tensor, key: int) -> int:
    """As on a device."""
    return read_draw(pick_on_device(probs, key))


def raced_there(probs: torch.Tensor, key: int) -> int:
    return read_draw(race_rows(probs[None], [key])[0])


DRAWS = [raced, picked, picked_there, raced_there]


def warped(logits: torch.Tensor, sampling: RequestOptions) -> torch.Tensor:
    """The oracle: transformers' own warpers in its own order."""
    warpers: list[object] = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    scores = logits[None]
    for warper in warpers:
        scores = warper(None, scores)  # type: ignore[operator]
    return torch.softmax(scores, -1)[0]


@pytest.mark.parametrize("vocab", [5, 200, 3000])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_probabilities_are_transformers(vocab: int, temperature: float) -> None:
    """3000 flat tokens overflow the shortlist of the nucleus, 200 do not."""
    for scale, top_k, top_p, min_p in product((0.1, 3.0), (0, 1, 20), (1.0, 0.9, 0.3), (0.0, 0.1)):
        sampling = drawn_by(temperature, top_k, top_p, min_p)
        logits = scale * torch.randn(vocab, generator=torch.Generator().manual_seed(vocab + top_k))
        ours, theirs = probabilities(logits, sampling), warped(logits, sampling)
        assert torch.equal(ours > 0, theirs > 0), sampling
        torch.testing.assert_close(ours, theirs)


def test_keys_differ_by_seed_sample_position_and_purpose() -> None:
    """Two draws that share a key are one draw: the official implementation's bug."""
    keys = [
        draw_key(drawn_by(seed=seed, sample=sample), position, purpose)
        for seed, sample, position, purpose in product(
            (0, 1, 2**64 - 1), (0, 1, 2**62), range(50), Purpose
        )
    ]
    assert len(set(keys)) == len(keys)


def test_the_bits_never_change() -> None:
    """A seed gives the same text on every machine and in every version. If this fails, a release note is due."""
    sampling = drawn_by(seed=42, sample=3)
    keys = [draw_key(sampling, 7, purpose) for purpose in Purpose]
    assert keys == PINNED_KEYS
    assert [uniform(key) for key in keys] == PINNED_UNIFORMS
    np.testing.assert_allclose(
        exponentials(keys[0], np.array([0, 1, 31_999, 128_255])), PINNED_EXPONENTIALS, rtol=1e-15
    )
    probs = torch.arange(1.0, 101.0)
    many = [draw_key(sampling, i, Purpose.DIRECT) for i in range(8)]
    assert [raced(probs, key) for key in many] == PINNED_RACES
    assert [picked(probs, key) for key in many] == PINNED_PICKS


def test_uniform_is_below_one() -> None:
    """Nothing may be accepted for u = 1, and the largest key must not round up to it."""
    assert uniform(0) == 0
    assert uniform(2**64 - 1) < 1


def splitmix(key: int, token: int) -> int:
    """The reference in Python's integers: the (token + 1)-th output of SplitMix64 seeded with `key`."""
    x = (key + (token + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


# The outputs with the most bits alike -> keys for which token 0 gets them: the generator run backwards.
EXTREMES = {
    0: 7046029254386353131,
    1: 17885559969949501885,
    2**12 - 1: 8869505746154656805,
    2**63: 3453682501520545093,
    2**64 - 1: 3558559446808474027,
    2**64 - 2**12: 5441626385717431455,
    2**64 - 2**13: 12881909834071257373,
}


@pytest.mark.parametrize(("output", "key"), EXTREMES.items())
def test_exponentials_are_never_zero_nor_infinite(output: int, key: int) -> None:
    """Even where the hash is all zeros or all ones: 0 would win every race, infinity would lose the last chance."""
    assert splitmix(key, 0) == output
    value = exponentials(key, np.array([0]))[0]
    assert 0 < value < 40


def brute_force(weights: npt.NDArray[np.float64], key: int) -> tuple[float, int]:
    """Every token takes part."""
    with np.errstate(divide="ignore"):
        times = exponentials(key, np.arange(len(weights))) / weights
    return float(times.min()), int(times.argmin())


def rows(size: int) -> dict[str, torch.Tensor]:
    """Distributions of many kinds, normalised or not."""
    logits = torch.randn(size, generator=torch.Generator().manual_seed(size))
    peaked = torch.softmax(8 * logits, -1)
    return {
        "peaked": peaked,
        "flat": torch.softmax(0.1 * logits, -1),
        "a few likely": torch.softmax(3 * logits, -1),
        "half is unlikely": torch.cat(
            (0.5 * peaked[: size // 2], torch.full((size - size // 2,), 1 / size))
        ),
        "one likely among many": torch.full((size,), 0.9e-4).index_fill_(0, torch.tensor([7]), 1.0),
        "filtered": torch.where(peaked > 1e-3, peaked, 0),
        "equal": torch.full((size,), 1 / 64),
    }


def race_and_all(
    kind: str, size: int, temperature: float = 1.0
) -> Iterator[tuple[list[float], list[float]]]:
    """What `race_of_logits` finds, and what a race of all tokens does."""
    logits = temperature * torch.log(rows(size)[kind])
    weights = np.exp((logits.numpy().astype(np.float64) - float(logits.max())) / temperature)
    for key in [*KEYS[:300], 0, 2**64 - 1]:
        wanted = list(brute_force(weights, key))
        yield race_of_logits(logits, temperature, key).tolist(), wanted
        yield (
            race_of_logits(logits, temperature, key, *read_shortlist(shortlist(logits))).tolist(),
            wanted,
        )


@pytest.mark.parametrize("kind", list(rows(64)))
@pytest.mark.parametrize(("size", "temperature"), [(4096, 1.0), (16_391, 0.7), (60, 2.0)])
def test_who_wins_a_race_does_not_depend_on_who_is_left_out(
    kind: str, size: int, temperature: float
) -> None:
    """Only tokens that can win take part: time and winner are those of all, to a bit."""
    for found, wanted in race_and_all(kind, size, temperature):
        assert found == wanted


@pytest.mark.parametrize("size", [5, 200, 50_000])
def test_a_device_draws_what_the_host_does(size: int) -> None:
    probs = torch.rand(size, generator=torch.Generator().manual_seed(1)) ** 4
    probs[::3] = 0
    assert [picked_there(probs, key) for key in KEYS[:200]] == [
        picked(probs, key) for key in KEYS[:200]
    ]
    assert [raced_there(probs, key) for key in KEYS[:200]] == [
        raced(probs, key) for key in KEYS[:200]
    ]


SHORTLISTED = {
    "normal": lambda row: row,
    "sharp": lambda row: 20 * row,
    "rounded": lambda row: (4 * row).round() / 4,  # many are equal
    "constant": torch.zeros_like,
    "mostly excluded": lambda row: row.masked_fill(row < 2.5, -torch.inf),
    "all but a few excluded": lambda row: row.masked_fill(row < 3.8, -torch.inf),
    "ascending": lambda row: row.sort().values,
}


@pytest.mark.parametrize("vocab", [64, 4095, 4096, 32000, 49152, 50257])
@pytest.mark.parametrize("name", SHORTLISTED)
def test_a_shortlist_has_the_likeliest(name: str, vocab: int) -> None:
    """Found by blocks or not; of equals any."""
    for seed in range(5):
        row = SHORTLISTED[name](torch.randn(vocab, generator=torch.Generator().manual_seed(seed)))
        ((ids, logits),) = read_shortlist(shortlist(row))
        probs = module.shares(logits, 0.8)
        top = torch.topk(row, min(64, vocab)).values
        assert len(set(ids.tolist())) == len(ids)
        assert torch.equal(row[torch.from_numpy(ids)], top)
        wanted = torch.softmax(top.double() / 0.8, -1)
        assert torch.allclose(torch.from_numpy(probs), wanted, rtol=1e-12, atol=0, equal_nan=True)


def test_a_shortlist_of_what_is_not_finite_has_its_length() -> None:
    """Branches are made of it, and a row that is not finite must end a request by name, not here."""
    row = torch.randn(49152)
    row[77] = torch.nan
    ((ids, logits),) = read_shortlist(shortlist(row))
    assert len(ids) == len(module.shares(logits, 1.0)) == 64


@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 1000, 32_000])
def test_a_pick_by_blocks_is_a_pick_from_the_cumulative_sum(vocab: int) -> None:
    """Of any length, with holes; and never of a token without probability."""
    probs = torch.softmax(
        2 * torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)), -1
    )
    probs[::3] = 0
    probs[-1] = 0.1
    cumulative = np.add.accumulate(probs.numpy(), dtype=np.float64)
    for key in KEYS[:500]:
        token = picked(probs, key)
        assert probs[token] > 0
        assert token == np.searchsorted(cumulative, uniform(key) * cumulative[-1], side="right")


@pytest.mark.parametrize("vocab", [16_384, 32_000])
@pytest.mark.parametrize("top_p", [0.3, 0.95, 0.9999])
def test_a_nucleus_on_the_host_is_that_of_a_device(vocab: int, top_p: float) -> None:
    """The same tokens but for those at the edge, where sums are rounded, and about the same probabilities."""
    scores = torch.randn(2, vocab, generator=torch.Generator().manual_seed(3))
    scores[0] *= 6
    found = probabilities(scores, drawn_by(1.0, top_p=top_p))
    expected = torch.softmax(nucleus(scores, top_p), -1)
    both = (found > 0) & (expected > 0)
    assert ((found > 0) ^ (expected > 0)).sum() <= 0.001 * both.sum()
    torch.testing.assert_close(found[both], expected[both], rtol=1e-4, atol=0)


@pytest.mark.parametrize("vocab", [48, 320, 16_384])
@pytest.mark.parametrize("step", [0.5, 2.0])
def test_ties_at_the_edge_follow_a_rule(vocab: int, step: float) -> None:
    """On the host any of them stayed, on a GPU whichever its sort put first.  Scores of few bits are often equal.

    As many stay as in transformers, whose sort is not stable: which ones it keeps changes with the vocabulary's size.
    """
    noise = torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab))
    for scores, top_k, top_p in product(
        (noise / step).round() * step, (0, 3, 40), (1.0, 0.97, 0.6, 0.1)
    ):
        sampling = drawn_by(1.0, top_k=top_k, top_p=top_p)
        within_k = scores.masked_fill(
            probabilities(scores, drawn_by(1.0, top_k=top_k)) == 0, -torch.inf
        )
        expected = int((warped(scores, sampling) > 0).sum())
        on_host = probabilities(scores, sampling) > 0
        on_device = nucleus(within_k, top_p) > -torch.inf if top_p < 1 else on_host
        for kept in (on_host, on_device):
            edge = scores == scores[kept].min()
            assert torch.equal(kept[edge], kept[edge].sort(stable=True).values), (
                "of equal ones the highest ids"
            )
            assert top_p < 1 or kept[edge].all()
            assert abs(int(kept.sum()) - expected) <= max(1, 0.001 * expected), "sums are rounded"


def test_of_equal_tokens_top_p_keeps_the_highest_ids() -> None:
    scores = torch.zeros(640)
    scores[7] = 1.0
    half = probabilities(scores, drawn_by(1.0, top_p=0.5))
    assert torch.equal(torch.softmax(nucleus(scores, 0.5), -1), half)
    assert half.nonzero().flatten().tolist() == [7, *range(641 - int((half > 0).sum()), 640)]
    assert torch.equal(probabilities(scores, drawn_by(1.0, top_k=2)), torch.softmax(scores, -1)), (
        "all are second"
    )


SETTINGS = [
    drawn_by(1.0),
    drawn_by(0.7, top_k=3),
    drawn_by(1.3, top_p=0.6),
    drawn_by(1.0, min_p=0.1),
]


@pytest.mark.parametrize("sampling", [*SETTINGS, drawn_by(0.9, 20, 0.8, 0.05)], ids=str)
def test_a_row_s_probabilities_do_not_depend_on_the_rows_beside_it(
    sampling: RequestOptions,
) -> None:
    """Else the text would depend on how many tokens a window happened to hold."""
    logits = 3 * torch.randn(7, 600, generator=torch.Generator().manual_seed(3))
    together = probabilities(logits, sampling)
    assert all(torch.equal(together[i], probabilities(logits[i], sampling)) for i in range(7))
    assert len({int((row > 0).sum()) for row in together}) > 1 or (
        sampling.top_p == 1 and sampling.min_p == 0
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_logits_that_are_not_finite_are_an_error_whatever_is_drawn(
    sampling: RequestOptions, bad: float
) -> None:
    """One such number among them, or nothing else."""
    for logits in (torch.tensor([1.0, bad, 3.0, 4.0, 5.0]), torch.full((5,), bad)):
        for draw in DRAWS:
            with pytest.raises(NumericalError, match="not finite"):
                draw(probabilities(logits, sampling), 7)
        with pytest.raises(NumericalError, match="not finite"):
            read_draw(greedy(logits))


temperatures = st.floats(LEAST_TEMPERATURE, MOST_TEMPERATURE)
shares = st.floats(LEAST_SHARE, 1)


@settings(max_examples=300)
@example(LEAST_TEMPERATURE, LEAST_SHARE, LEAST_SHARE, [1e4, -1e4, 0.0])
@example(MOST_TEMPERATURE, LEAST_SHARE, 1.0, [0.0, 0.0, 0.0])
@given(
    temperatures,
    shares,
    st.just(0.0) | shares,
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=8),
)
def test_whatever_is_admitted_can_be_sampled(
    temperature: float, top_p: float, min_p: float, logits: list[float]
) -> None:
    """In float32, also where ids that a model lacks have minus infinity: else a request would end its draft."""
    rows = torch.tensor([*logits, -torch.inf], dtype=torch.float32)
    probs = probabilities(rows, drawn_by(temperature, 0, top_p, min_p))
    assert float(probs.sum()) == pytest.approx(1, abs=1e-4)
    assert probs[-1] == 0
