"""Log probabilities: the target's own, the same whatever proposed the text, and as OpenAI's clients read them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgpack
import pytest
import torch

from pearl import SamplingParams
from pearl.config import DecodingConfig
from pearl.config.sampling import LEAST_LOGPROB
from pearl.engine import Engine
from pearl.engine.stream import Result
from pearl.errors import ConfigError, RemoteProtocolError
from pearl.models.toy import alpha_pair
from pearl.protocol import messages as m
from pearl.server import answers
from pearl.server.answers import Answer
from pearl.text.stream import token_bytes
from pearl.transport.codec import decode, encode
from tests.conftest import AS_PUBLISHED
from tests.test_text import byte_fallback, byte_level

PROMPT = [1, 2, 3]
WAYS = {
    "ar": DecodingConfig(method="ar"),
    "ngram": DecodingConfig(method="ngram"),
    "sd": DecodingConfig(method="sd", gamma=3),
    "published": AS_PUBLISHED,
    "coupled": AS_PUBLISHED.model_copy(update={"rule": "coupled"}),
    "pearl": DecodingConfig(method="pearl", rule="coupled"),
    "auto": DecodingConfig(method="auto"),
}


def rows(tokens: Sequence[int]) -> Iterator[torch.Tensor]:
    """The target's log probabilities at the place of each."""
    target, _ = alpha_pair(32, 0.5)
    for count in range(len(tokens)):
        yield target([*PROMPT, *tokens[:count]]).double().log().clamp(min=LEAST_LOGPROB)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("way", WAYS)
def test_they_are_the_targets_own(toy: Engine, way: str, temperature: float) -> None:
    """At temperature 1 and unfiltered, however the text was drawn and whoever proposed it."""
    params = SamplingParams(temperature=temperature, top_k=9, seed=4, max_tokens=60, ignore_eos=True, logprobs=3)
    with toy.stream(PROMPT, params, decoding=WAYS[way]) as stream:
        pieces = list(stream)
    result = stream.result
    assert [one for piece in pieces for one in piece.logprobs] == result.logprobs
    assert all(len(piece.logprobs) == len(piece.tokens) for piece in pieces)
    assert len(result.logprobs) == len(result.tokens) == 60
    for token, told, row in zip(result.tokens, result.logprobs, rows(result.tokens), strict=True):
        assert told.logprob == pytest.approx(float(row[token]), abs=1e-4)
        values, ids = row.topk(3)
        assert [id for id, _ in told.top] == ids.tolist()
        assert [value for _, value in told.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_penalties_and_biases_are_not_in_them(toy: Engine) -> None:
    asked = SamplingParams(temperature=1, seed=2, max_tokens=40, ignore_eos=True, logprobs=0)
    shaped = asked.model_copy(update={"presence_penalty": 2.0, "logit_bias": ((4, 5.0),)})
    (result,) = toy.generate([PROMPT], shaped, decoding=WAYS["pearl"])
    assert result.tokens != toy.generate([PROMPT], asked, decoding=WAYS["pearl"])[0].tokens
    for token, told, row in zip(result.tokens, result.logprobs, rows(result.tokens), strict=True):
        assert told == m.Logprobs(pytest.approx(float(row[token]), abs=1e-4))


def test_they_are_told_only_where_asked_for_and_up_to_the_end(toy: Engine) -> None:
    """One for each token of a text that an EOS or a stop string ends."""
    assert toy.generate([PROMPT], SamplingParams(max_tokens=5))[0].logprobs == []
    (whole,) = toy.generate([PROMPT], SamplingParams(temperature=1, seed=3, max_tokens=200, logprobs=1))
    assert whole.finish_reason == "eos"
    assert len(whole.logprobs) == len(whole.tokens)
    stop = whole.text[2:4]
    (cut,) = toy.generate([PROMPT], SamplingParams(temperature=1, seed=3, max_tokens=200, logprobs=1, stop=stop))
    assert cut.finish_reason == "stop"
    assert cut.logprobs == whole.logprobs[: len(cut.tokens)]
    with pytest.raises(ConfigError, match="logprobs"):
        SamplingParams(logprobs=21)


# ---- on the wire ----


@pytest.mark.parametrize(
    "damage",
    [
        b"\x15\0",  # 21 of the likeliest
        b"\0",
        b"\0\0" + b"\0" * 5,
        b"\0\0" + b"\0" * 4,  # of one token; there are two
        b"\0\0" + b"\0\0\x80\x3f" * 2,  # above 0
        b"\0\0" + b"\0\0\xc0\x7f" * 2,  # no number
        b"\0\0" + b"\0\0\x80\xff" * 2,  # no number that JSON has
        b"\x01\0" + (b"\0\0\0\0" + b"\xff\xff\xff\xff" + b"\0\0\0\0") * 2,  # token -1
        [0.0, 0.0],
        None,
    ],
)
def test_what_is_wrong_with_them_is_refused(damage: object) -> None:
    provenance = (m.Provenance.ACCEPTED, m.Provenance.DIRECT)
    good = m.Committed(1, 0, (4, 5), provenance, (m.Logprobs(-0.5, ((7, -0.25),)), m.Logprobs(-1.0, ((8, 0.0),))))
    assert decode(encode(good)) == good
    fields = msgpack.unpackb(encode(good)[0])
    with pytest.raises(RemoteProtocolError, match="Committed"):
        decode([msgpack.packb([*fields[:-1], damage])])


# ---- as OpenAI's clients read them; see test_server too ----


def spelled(token: int) -> bytes:
    return bytes([64 + token])


def test_an_impossible_token_is_a_number_too() -> None:
    """JSON has no infinity."""
    answer = Answer(True, "m", spell=spelled)
    told = answer._logprobs(0, [1], [m.Logprobs(LEAST_LOGPROB, ((2, -0.5),))])
    assert json.loads(json.dumps(told, allow_nan=False))["content"][0]["logprob"] == -9999.0


def test_tokens_of_one_text_and_parts_of_characters_are_told_apart() -> None:
    """In `/v1/completions`: one part of a character was left of several, and each counted as a character."""
    of = [b"a", b"a", b"\xe4", b"\xbd", b"\xa0", "ü".encode(), b"x"]
    answer = Answer(False, "m", spell=of.__getitem__)
    parts = [answer._logprobs(0, tokens, [m.Logprobs(-1.0, ((2, -2.0), (3, -3.0), (0, -4.0), (1, -5.0)))] * len(tokens))
             for tokens in ([1, 2], [3, 4, 5, 6])]  # fmt: skip
    assert all(parts)
    tokens = [text for part in parts for text in part["tokens"]]  # type: ignore[index]
    assert tokens == ["a", r"bytes:\xe4", r"bytes:\xbd", r"bytes:\xa0", "ü", "x"]
    assert [offset for part in parts for offset in part["text_offset"]] == [0, 1, 1, 1, 2, 3]  # type: ignore[index]
    first, second = parts[0]["top_logprobs"]  # type: ignore[index]
    assert first == {r"bytes:\xe4": -2.0, r"bytes:\xbd": -3.0, "token_id:0": -4.0, "a": -1.0}
    assert second == {r"bytes:\xe4": -1.0, r"bytes:\xbd": -3.0, "a": -4.0, "token_id:1": -5.0}


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("top", [0, 2])
@pytest.mark.parametrize("length", [0, 1, 64, 200])
def test_many_are_written_a_few_at_a_time(chat: bool, top: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is written no other thread runs; a request for many texts had the server's others wait for 20 s."""
    tokens = [at % 32 for at in range(length)]
    told = [m.Logprobs(-1.0 - at, tuple((other, -2.0 - other) for other in range(top))) for at in range(length)]
    result = Result('ü"' * length, tokens, finish_reason="length", logprobs=told)
    texts: list[str] = []
    write = answers._written

    def noted(data: Any) -> str:
        texts.append(write(data))
        return texts[-1]

    monkeypatch.setattr(answers, "_written", noted)
    said = json.loads(Answer(chat, "m", spell=spelled).whole([result, result], {"x": 1}))
    assert max(map(len, texts)) < 20_000
    expected = Answer(chat, "m", spell=spelled)
    for index, choice in enumerate(said["choices"]):
        assert choice["logprobs"] == expected._logprobs(index, tokens, told)
        assert (choice["message"]["content"] if chat else choice["text"]) == result.text
        assert (choice["index"], choice["finish_reason"]) == (index, "length")
    assert (len(said["choices"]), said["usage"], said["model"]) == (2, {"x": 1}, "m")


def test_a_token_is_its_bytes() -> None:
    """A part of a character too; they join to the text."""
    text = "Grüße, 你好 👍🏽 x"
    for tokenizer in (byte_level(), byte_fallback()):
        ids = tokenizer.encode(text, special=False)
        assert b"".join(token_bytes(tokenizer, id) for id in ids).decode().strip() == tokenizer.decode(ids).strip()
    assert token_bytes(byte_level(), 10**6) == b""
    assert math.isfinite(LEAST_LOGPROB)
