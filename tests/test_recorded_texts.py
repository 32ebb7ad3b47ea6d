"""Recorded texts: the file, and the simulator that decodes it again."""

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

from pearl.cli import cli
from pearl.decoding.rules.direct import DirectDraw
from pearl.decoding.sampling import read_draw
from pearl.errors import ConfigError, ModelError, PearlError
from pearl.lab.experiments.texts import record
from pearl.lab.experiments.workload import Text, run
from pearl.lab.simulate import Outcome, Timing, paired_executors, simulate
from pearl.models.checkpoints.loading import load_runner
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.models.recorded import Header, RecordedTexts, read_texts, write_texts
from pearl.models.runner import ModelRunner, feed_chain
from pearl.protocol.messages import Submit
from pearl.protocol.options import RequestOptions
from tests.replace import replace
from tests.tiny import tiny_model

TOKENS = 40
PEARL = RequestOptions("pearl", rule="coupled")
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
    return RecordedTexts(header, tuple(text for _, text in record(target, draft, tokenizer, PROMPTS, header)))


@pytest.fixture(params=TEMPERATURES)
def both(request: pytest.FixtureRequest) -> RecordedTexts:
    return recorded(request.param)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    known = recorded(0.7)
    write_texts(tmp_path / "it.npz", known.header, known.texts)
    return tmp_path / "it.npz"


def empty_pair() -> list[ModelRunner]:
    """Target and draft, with empty caches."""
    pair = [runner(role) for role in ("target", "draft")]
    for each in pair:
        for slot in range(each.capabilities.slots):
            each.rollback(0, slot)
    return pair


def decoded(known: RecordedTexts, number: int, decoding: RequestOptions) -> Outcome:
    text = known.texts[number - 1]
    options = replace(decoding, sampling=known.header.sampling(number))
    submit = Submit(number, text.prompt, len(text.prompt) + len(text.answer), options)
    outcome = simulate(submit, *paired_executors(*empty_pair()), TIMING)
    assert tuple(outcome.tokens) == text.answer
    return outcome


# ---- a recording is the run ----


def test_what_is_recorded_is_seeded_decoding(both: RecordedTexts) -> None:
    """The target's text, and at every position the token that the draft draws."""
    rights = []
    for number, text in enumerate(both.texts, 1):
        draw, whole, start = DirectDraw(both.header.sampling(number)), [*text.prompt, *text.answer], len(text.prompt)
        rows = [feed_chain(each, whole, len(text.answer) + 1)[:-1] for each in empty_pair()]
        for i, (own, drafts) in enumerate(zip(*rows, strict=True)):
            assert read_draw(draw(own, start + i)) == text.answer[i]
            assert text.drawn[i] == read_draw(draw(drafts, start + i))
            rights.append(text.drawn[i] == text.answer[i])
            assert text.right[i] == rights[-1]
    assert (len(both.texts), {*rights}) == (3, {True, False})


@pytest.mark.parametrize("window", ["stream", "fixed"])
def test_as_published_a_simulation_is_the_run(both: RecordedTexts, window: str) -> None:
    """With the models, and with coins that know where the draft is right."""
    decoding = replace(PEARL, window=window)
    real = [decoded(both, number, decoding) for number in range(1, 4)]
    coins = run([Text(len(text.prompt), text.right) for text in both.texts], TIMING, decoding)
    for name in ("num_accepted_draft_tokens", "num_judged_draft_tokens", "seconds"):
        assert coins.total(name) == pytest.approx(sum(getattr(one.statistics, name) for one in real)), name


# ---- the file ----


def test_a_file_is_read_as_it_was_written(file: Path) -> None:
    known, found = recorded(0.7), read_texts(file)
    assert found.header == known.header
    for one, other in zip(known.texts, found.texts, strict=True):
        assert (one.prompt, one.answer) == (other.prompt, other.answer)
        assert np.array_equal(one.drawn, other.drawn)
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
    arrays["header"] = np.frombuffer(bytes(arrays["header"]).replace(b'_texts":2', b'_texts":1'), np.uint8)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut short": lambda file: file.write_bytes(file.read_bytes()[:-200]),
    "a byte": flipped,
    "missing": rewritten(lambda arrays: arrays.pop("drawn")),
    "pickle": rewritten(lambda arrays: arrays.update(tokens=np.array([object()]))),
    "version": rewritten(other_version),
    "tokens": rewritten(lambda arrays: arrays.update(tokens=arrays["tokens"][:-1])),
    "rows": rewritten(lambda arrays: arrays.update(drawn=arrays["drawn"][1:])),
    "vocabulary": rewritten(lambda arrays: arrays["tokens"].put(3, 10**6)),
    "nan": rewritten(lambda arrays: arrays["features"].put(3, np.nan)),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_refused_by_name(file: Path, kind: str) -> None:
    DAMAGE[kind](file)
    with pytest.raises(ModelError, match=r"it\.npz") as raised:
        read_texts(file)
    assert "\n" not in str(raised.value)


# ---- the commands ----


def invoked(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["simulate", *arguments])
    if isinstance(result.exception, PearlError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_recorded_by_one_command_and_decoded_by_another(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("abc\nhello\n")
    toy = "toy:vocab=20,alpha=0.6"
    options = ["--target", toy, "--draft", toy, "--max-tokens", "12", "--temperature", "1", "--raw"]
    out = str(tmp_path / "it.npz")
    assert "2 texts, 24 tokens" in invoked("record", str(tmp_path / "prompts.txt"), "--out", out, *options)
    shown = invoked("stops", out, "--t-draft", "10", "--t-target", "50")
    rows = [line for line in shown.splitlines() if line.startswith("pearl, oracle")]
    assert len(rows) == 1
    with pytest.raises(ConfigError, match="has the draft's tokens"):
        invoked("record", str(tmp_path / "prompts.txt"), "--out", out, "--draft", "none")
