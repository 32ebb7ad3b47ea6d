"""Recorded texts: the file, the models that replay it, and the simulator that decodes it again."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from pearl import Engine
from pearl.cli import cli
from pearl.config import DecodingConfig, SamplingParams
from pearl.decoding.rules.direct import DirectDraft, DirectDraw
from pearl.decoding.sampling import read_draw, read_shortlist, shortlist
from pearl.errors import ConfigError, ModelError, PearlError, RequestError
from pearl.lab.experiments import texts
from pearl.lab.experiments.texts import record
from pearl.lab.experiments.workload import run as run_coins
from pearl.lab.simulate import Outcome, Timing, paired_executors, simulate
from pearl.models.checkpoints.loading import load_runner
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.models.recorded import Header, RecordedTexts, read_texts, write_texts
from pearl.models.replay import ReplayRunner, load_scripted
from pearl.models.runner import ModelRunner, feed_chain
from pearl.protocol.messages import Submit
from pearl.protocol.options import RequestOptions
from pearl.spec.methods import AS_PUBLISHED, BRANCHES, DRAFT_LOOKUP, LOOK_AHEAD
from tests.replace import replace
from tests.tiny import tiny_model

TOKENS = 40
PEARL = RequestOptions("pearl", rule="coupled")
ALL = PEARL.changed(look_ahead=LOOK_AHEAD, draft_lookup=DRAFT_LOOKUP, branches=BRANCHES)
TIMING = Timing(1.0, lambda fed: 5.0)
TEMPERATURES = [0.0, 0.7]
PROMPTS = [["the first"], ["in another, the"], ["the first"], ["a an and"]]  # one comes twice


@cache
def runner(role: str) -> ModelRunner:
    path = str(tiny_model("llama", noise=0.0 if role == "target" else 0.2))
    return load_runner(path, device=torch.device("cpu"), dtype="float32", spare=8)


@cache
def recorded(temperature: float) -> RecordedTexts:
    target, draft = runner("target"), runner("draft")
    tokenizer, _ = load_tokenizer(str(tiny_model("llama", noise=0.0)))
    names = {"target": "tiny", "draft": "tiny", "vocab_size": target.vocab_size, "eos": [1]}
    header = Header.model_validate_json(
        json.dumps(names | {"temperature": temperature, "seed": 5, "max_tokens": TOKENS})
    )
    return RecordedTexts(header, tuple(record(target, draft, tokenizer, PROMPTS, header)))


@pytest.fixture(params=TEMPERATURES)
def both(request: pytest.FixtureRequest) -> RecordedTexts:
    return recorded(request.param)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    known = recorded(0.7)
    write_texts(tmp_path / "it.npz", known.header, known.texts)
    return tmp_path / "it.npz"


def pair_of(known: RecordedTexts | None) -> list[ModelRunner]:
    """Target and draft, with empty caches: replayed, or (None) real."""
    pair = [ReplayRunner(known, role, 1 << 20) if known else runner(role) for role in ("target", "draft")]
    for each in pair:
        for slot in range(each.capabilities.slots):
            each.rollback(0, slot)
    return pair


def decoded(pair: list[ModelRunner], known: RecordedTexts, number: int, decoding: RequestOptions) -> Outcome:
    text = known.texts[number - 1]
    options = replace(decoding, sampling=known.header.sampling(number))
    submit = Submit(number, text.prompt, len(text.prompt) + len(text.answer), options)
    outcome = simulate(submit, *paired_executors(*pair), TIMING)
    assert tuple(outcome.tokens) == text.answer
    return outcome


# ---- a replay is the run ----


def test_what_is_recorded_is_seeded_decoding(both: RecordedTexts) -> None:
    """The target's text, at every position the token that the draft draws, and its runners-up."""
    rights = []
    for number, text in enumerate(both.texts, 1):
        draw, whole, start = DirectDraw(both.header.sampling(number)), [*text.prompt, *text.answer], len(text.prompt)
        rows = [feed_chain(each, whole, len(text.answer) + 1)[:-1] for each in (*pair_of(None), *pair_of(both))]
        for i, (own, drafts, replayed, again) in enumerate(zip(*rows, strict=True)):
            assert read_draw(draw(own, start + i)) == read_draw(draw(replayed, start + i)) == text.answer[i]
            drawn = read_draw(draw(drafts, start + i))
            assert drawn == read_draw(draw(again, start + i))
            rights.append(drawn == text.answer[i])
            assert text.right[i] == rights[-1]
            half, tops = DirectDraft(draw.sampling), read_shortlist(shortlist(drafts), shortlist(again))
            (ids, shares), (ids_again, shares_again) = (half.likeliest(top, start + i, 5) for top in tops)
            assert ids_again == ids
            assert shares_again == pytest.approx(shares, rel=0.05)
    assert (len(both.texts), {*rights}) == (3, {True, False})


@pytest.mark.parametrize("window", ["stream", "fixed"])
def test_as_published_a_replay_is_the_run(both: RecordedTexts, window: str) -> None:
    """Token by token and second by second; by the replayed models, and by coins that know where the draft is right."""
    decoding = replace(PEARL, window=window)
    accepted = judged = 0
    for number in range(1, 4):
        real, again = (decoded(pair_of(known), both, number, decoding) for known in (None, both))
        assert (real.seconds, real.target_steps, real.counts.runs) == (
            again.seconds,
            again.target_steps,
            again.counts.runs,
        )
        accepted, judged = accepted + again.counts.accepted, judged + again.counts.judged
    coins = run_coins(texts.workload(both, TIMING), decoding)
    assert (coins.accepted, coins.judged) == (accepted, judged)


def test_with_all_that_guesses_a_replay_is_as_fast_as_the_run(both: RecordedTexts) -> None:
    """Behind a wrong token the draft's rows are others, so which branches are prepared may differ a little."""
    real, again = (
        sum(decoded(pair_of(known), both, number, ALL).target_steps for number in range(1, 4)) for known in (None, both)
    )
    assert again == pytest.approx(real, rel=0.1)


# ---- the models ----


def test_a_row_spans_the_vocabulary_and_holds_no_zero(both: RecordedTexts) -> None:
    text = both.texts[0]
    for role in ("target", "draft"):
        rows = feed_chain(ReplayRunner(both, role, 1 << 20), [*text.prompt, *text.answer[:3]], 4)
        assert rows.shape == (4, both.header.vocab_size)
        assert (torch.softmax(rows / (both.header.temperature or 1.0), -1) > 0).all()


def test_the_prompts_of_recorded_texts_are_their_numbers(file: Path) -> None:
    tokenizer, defaults = load_tokenizer(f"replay:{file}")
    assert tokenizer.encode("2") == list(recorded(0.7).texts[1].prompt)
    assert (defaults.temperature, defaults.eos) == (0.7, (1,))
    for prompt in ("0", "4", "hello", "²"):
        with pytest.raises(RequestError, match="1 to 3"):
            tokenizer.encode(prompt)


def test_two_processes_say_what_was_recorded(file: Path) -> None:
    """With everything on, and as published; the draft is right as often as it was."""
    known, spec = recorded(0.7), f"replay:{file}"
    with Engine(target=spec, draft=spec, target_pace=0.01, draft_pace=0.002) as engine:
        for number, text in enumerate(known.texts, 1):
            params = SamplingParams(seed=known.header.seed + number, max_tokens=len(text.answer))
            for extras in ({}, AS_PUBLISHED):
                decoding = DecodingConfig(method="pearl", rule="coupled", **extras)
                (result,) = engine.generate([str(number)], params, decoding=decoding)
                assert tuple(result.tokens) == text.answer
            assert result.statistics.num_accepted_draft_tokens == sum(text.right)


# ---- the file ----


def test_a_file_is_read_as_it_was_written(file: Path) -> None:
    known, found = recorded(0.7), read_texts(file)
    assert found.header == known.header
    for one, other in zip(known.texts, found.texts, strict=True):
        assert (one.prompt, one.answer) == (other.prompt, other.answer)
        assert np.array_equal(one.ids, other.ids)
        assert np.array_equal(one.logits, other.logits)
        assert np.array_equal(one.features, other.features)


def rewritten(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Damage that changes the arrays in a file."""

    def damage(file: Path) -> None:
        with np.load(file) as found:
            arrays = dict(found)
        change(arrays)
        with file.open("wb") as out:
            np.savez(out, **arrays)

    return damage


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)


def other_version(arrays: dict[str, Any]) -> None:
    arrays["header"] = np.frombuffer(bytes(arrays["header"]).replace(b'_texts":1', b'_texts":2'), np.uint8)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut short": lambda file: file.write_bytes(file.read_bytes()[:-200]),
    "a byte": flipped,
    "missing": rewritten(lambda arrays: arrays.pop("ids")),
    "pickle": rewritten(lambda arrays: arrays.update(tokens=np.array([object()]))),
    "version": rewritten(other_version),
    "tokens": rewritten(lambda arrays: arrays.update(tokens=arrays["tokens"][:-1])),
    "rows": rewritten(lambda arrays: arrays.update(ids=arrays["ids"][1:])),
    "vocabulary": rewritten(lambda arrays: arrays["tokens"].put(3, 10**6)),
    "nan": rewritten(lambda arrays: arrays["logits"].put(3, np.nan)),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_refused_by_name(file: Path, kind: str) -> None:
    DAMAGE[kind](file)
    for use in (read_texts, lambda path: load_scripted(f"replay:{path}", "draft")):
        with pytest.raises(ModelError, match=r"it\.npz") as raised:
            use(file)
        assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_is_named_before_a_process_starts(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.npz"):
        Engine(target=f"replay:{tmp_path / 'none.npz'}", draft=f"replay:{tmp_path / 'none.npz'}")


# ---- the commands ----


def invoked(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["simulate", *arguments])
    if isinstance(result.exception, PearlError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_recorded_by_one_command_and_simulated_by_another(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("abc\nhello\n")
    toy = "toy:vocab=20,alpha=0.6"
    options = ["--target", toy, "--draft", toy, "--max-tokens", "12", "--temperature", "1", "--raw"]
    out = str(tmp_path / "it.npz")
    assert "2 texts, 24 tokens" in invoked("record", str(tmp_path / "prompts.txt"), "--out", out, *options)
    shown = invoked("--texts", out, "--t-draft", "10", "--t-target", "50")
    rows = [line for line in shown.splitlines() if line.startswith("pearl, stream")]
    assert len(rows) == 1
    with pytest.raises(ConfigError, match="acceptance"):
        invoked("--texts", out, "--acceptance", "0.5")
    with pytest.raises(ConfigError, match="has the draft's tokens"):
        invoked("record", str(tmp_path / "prompts.txt"), "--out", out, "--draft", "none")
