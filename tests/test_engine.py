"""The engine on real processes: toy models for what any model does, tiny Hugging Face models for the rest.

How it starts, dies and cleans up is in test_processes.py.
"""

import asyncio
import json
import os
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pearl import AsyncEngine
from pearl.config import RequestOptions, SamplingParams
from pearl.engine import Engine, Result
from pearl.engine.asynchronous import AsyncStream
from pearl.errors import ConfigError, EngineClosed, ModelError, PearlError, RequestError, TargetLost
from pearl.lab.studies.simulate import Timing, paired_executors, simulate
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.protocol.messages import Provenance, Submit
from tests.conftest import AS_PUBLISHED, TOY, greedy_text
from tests.options import drawn_by, resolved
from tests.replace import replace
from tests.tiny import VOCAB_SIZE, on_cpu, tiny_model

PROMPT = [1, 2, 5]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
WARM = SamplingParams(temperature=1.0, seed=11, max_tokens=60, ignore_eos=True)
BOUND = 240.0  # seconds: for a slow machine, never reached where all is well


def one(
    engine: Engine, params: SamplingParams = GREEDY, prompt: object = PROMPT, **options: object
) -> Result:
    (result,) = engine.generate([prompt], params, **options)  # type: ignore[list-item]
    return result


# ---- texts ----

BEFORE = json.loads((Path(__file__).parent / "texts_of_before.json").read_text())


@pytest.mark.parametrize(
    "text", BEFORE["toy"], ids=lambda text: f"{text['rule']}-{text['temperature']}-{text['seed']}"
)
def test_a_seed_gives_the_text_that_it_gave_in_an_older_release(
    toy: Engine, text: dict[str, Any]
) -> None:
    sampling = {name: text[name] for name in ("temperature", "top_p", "seed")}
    params = SamplingParams(**sampling, max_tokens=len(text["tokens"]), ignore_eos=True)
    decoding = RequestOptions(method="pearl", rule=text["rule"])
    assert one(toy, params.overridden_by(decoding), [1, 2, 7]).tokens == text["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, pytest.param(32, marks=pytest.mark.long)])
def test_the_embedded_pair_writes_what_it_wrote_in_an_older_release(count: int) -> None:
    """In float32, by the virtual clock: the same executors as in the workers."""
    tokenizer, _ = load_tokenizer("embedded")
    runners = [on_cpu(name, dtype="float32") for name in ("embedded", "embedded-draft")]
    for text in BEFORE["embedded"]:
        prompt, tokens = (
            tokenizer.apply_chat([{"role": "user", "content": text["prompt"]}]),
            text["tokens"][:count],
        )
        assert prompt is not None
        sampling, decoding = (
            drawn_by(text["temperature"], seed=5),
            resolved("pearl", rule=text["rule"]),
        )
        submit = Submit(
            1, tuple(prompt), len(prompt) + len(tokens), replace(decoding, sampling=sampling)
        )
        with torch.inference_mode():
            outcome = simulate(submit, *paired_executors(*runners), Timing(1.0, lambda _: 4.0))
        assert outcome.tokens == tokens
        for runner in runners:
            runner.rollback(0)


def test_a_sampled_text_is_one_of_seed_and_sample(toy: Engine) -> None:
    texts = {}
    for window in ("stream", "fixed"):
        for seed, sample in ((11, 0), (11, 1), (12, 0)):
            params = WARM.changed(seed=seed, sample=sample)
            result = one(toy, params.changed(window=window))  # type: ignore[arg-type]
            assert result.seed == seed
            assert texts.setdefault((seed, sample), result.tokens) == result.tokens
    assert len({tuple(text) for text in texts.values()}) == 3


def test_prompts_come_as_text_tokens_and_lists(toy: Engine) -> None:
    text = toy.tokenizer.decode(PROMPT)
    results = toy.generate([text, PROMPT, tuple(PROMPT)], GREEDY)
    assert [r.prompt_tokens for r in results] == [PROMPT] * 3
    assert len({r.text for r in results}) == 1
    assert [r.text for r in toy.generate(text, GREEDY)] == [results[0].text]
    assert [r.text for r in toy.generate(PROMPT, GREEDY)] == [results[0].text]
    assert toy.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([{"role": "user", "content": "hello"}], "no chat template"),
        ("", "the prompt is empty"),
        *(
            (wrong, "a prompt is text")
            for wrong in (None, 7, {"role": "user", "content": "hi"}, [1, -1])
        ),
        ([1, True], "a prompt is text"),
        ([1.5], "a prompt is text"),
        ([1, 32], "token id 32"),
        ([1, 2**31], r"a token id of 2\*\*31 or more"),
        ([1] * 512, "the context holds 512"),
        ([1] * 460, "460 tokens . 60 to generate, the context holds 512"),
    ],
)
def test_impossible_prompts_are_refused_and_the_engine_unharmed(
    toy: Engine, prompt: object, said: str
) -> None:
    with pytest.raises(RequestError, match=said), toy.stream(prompt, GREEDY) as stream:  # type: ignore[arg-type]
        next(stream)
    assert one(toy).tokens == greedy_text(PROMPT, 60)


def test_text_may_fill_the_context_to_its_last_token(toy: Engine) -> None:
    for max_tokens in (62, None):
        result = one(toy, GREEDY.changed(max_tokens=max_tokens), [1] * 450)
        assert (result.tokens, result.finish_reason) == (greedy_text([1] * 450, 62), "length")


# ---- streams left, side by side, and in threads ----


def test_a_stream_closed_from_another_thread_ends_at_once() -> None:
    """As Ctrl-C does in the chat: whoever waits for the next piece must not wait for a slow model to make it."""
    with Engine(TOY, TOY) as engine:
        assert engine.target_worker is not None
        os.kill(engine.target_worker.pid, signal.SIGSTOP)  # as slow as can be
        stream = engine.stream(PROMPT, GREEDY)
        threading.Timer(0.3, stream.close).start()
        assert list(stream) == []
        assert stream.result.finish_reason == "cancelled"
        os.kill(engine.target_worker.pid, signal.SIGCONT)
        assert engine.generate([PROMPT], GREEDY)[0].tokens == greedy_text(PROMPT, 60)


LONG = GREEDY.changed(max_tokens=500)


def test_stream_left_early_is_cancelled_and_the_next_served(toy: Engine) -> None:
    with toy.stream(PROMPT, LONG) as stream:
        next(stream)
    assert stream.result.finish_reason == "cancelled"
    assert list(stream) == []
    for _ in toy.stream(PROMPT, LONG):
        break  # nobody holds it any more
    with suppress(ZeroDivisionError), toy.stream(PROMPT, LONG) as stream:
        next(stream)
        raise ZeroDivisionError
    assert one(toy).tokens == greedy_text(PROMPT, 60)
    assert not toy.client.streams, "a stream that is over must not be kept"


# ---- engines without a draft, closed engines ----


def test_engine_without_a_draft_serves_what_needs_none_and_closes_for_good() -> None:
    engine = Engine(
        TOY, "none", target_pace=0.05
    )  # nobody is away so long that LONG has come whole meanwhile
    with engine:
        assert engine.welcome.draft_context == 0
        short = GREEDY.changed(max_tokens=10)
        assert one(engine, short, method="ar").tokens == greedy_text(PROMPT, 10)
        assert one(engine, short).tokens == greedy_text(PROMPT, 10), (
            "what is not told otherwise needs no draft"
        )
        with pytest.raises(ConfigError, match="needs a draft model"):
            one(engine, method="pearl")
        stream = engine.stream(PROMPT, LONG, method="ar")
        next(stream)
    with pytest.raises(EngineClosed):
        list(stream)
    with pytest.raises(EngineClosed):
        engine.stream(PROMPT)
    engine.close()  # a second time does nothing


# ---- real models ----


@pytest.fixture(scope="module")
def reference() -> transformers.PreTrainedModel:
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(
        tiny_model(chat=True), dtype=torch.float32
    )


def transformers_greedy(
    model: transformers.PreTrainedModel, prompt: list[int], length: int
) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length
    )
    return out[0, len(prompt) :].tolist()


STORY = "the cat and the dog in the end"


def test_a_text_and_chat_messages_take_their_tokens(
    reference: transformers.PreTrainedModel,
) -> None:
    params = SamplingParams(temperature=0, max_tokens=30)
    with Engine(
        str(tiny_model(chat=True)), str(tiny_model(noise=0.3)), startup_timeout=200
    ) as engine:
        result = one(engine, params, [[{"role": "user", "content": "hi"}]][0])
        assert "<|start|>" in [engine.tokenizer.token(token) for token in result.prompt_tokens]
        assert result.tokens == transformers_greedy(reference, result.prompt_tokens, 30)
        assert one(engine, params, "hi", raw=False).tokens == result.tokens
        plain = one(engine, params, STORY)
        assert plain.prompt_tokens == engine.tokenizer.encode(STORY)
        assert plain.tokens == transformers_greedy(reference, plain.prompt_tokens, 30)
        assert plain.text == engine.tokenizer.decode(plain.tokens)


def _draft_of_odd_size(directory: Path) -> Path:
    """Five ids more than the target, and room for 40 tokens only."""
    shutil.copytree(tiny_model(noise=0.3, vocab_size=VOCAB_SIZE + 5), directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 40}))
    return directory


def test_draft_may_have_padding_ids_and_a_smaller_context(
    tmp_path: Path, reference: transformers.PreTrainedModel
) -> None:
    """Beyond its context the target goes on alone, to the same text."""
    with Engine(str(tiny_model(chat=True)), str(_draft_of_odd_size(tmp_path / "draft"))) as engine:
        assert engine.welcome.draft_context == 40
        result = one(engine, AS_PUBLISHED.changed(temperature=0, max_tokens=100), STORY)
        usual = one(engine, SamplingParams(temperature=0, max_tokens=100), STORY)
        sampled = one(
            engine, SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True), STORY
        )
    assert (
        usual.tokens == result.tokens == transformers_greedy(reference, result.prompt_tokens, 100)
    )
    beyond = 40 - len(result.prompt_tokens)
    assert Provenance.CORRECTED in result.provenance[:beyond]
    assert set(result.provenance[beyond:]) == {Provenance.DIRECT}
    assert max(sampled.tokens) < VOCAB_SIZE
    assert set(usual.provenance[beyond:]) <= {Provenance.DIRECT, Provenance.GUESSED}
    assert not result.statistics.draft_lost


# ---- mistakes of a program ----


def test_mistakes_in_a_call_are_named(toy: Engine) -> None:
    async def read() -> None:
        with toy.stream(PROMPT, GREEDY) as stream:
            async for _ in stream:
                pass

    mistakes: list[tuple[Callable[[], object], type[Exception], str]] = [
        (
            lambda: toy.generate({"role": "user"}),
            RequestError,
            "a prompt is text, a list of chat messages, or a list",
        ),  # type: ignore[arg-type]
        (
            lambda: toy.generate([PROMPT], GREEDY, metod="ar"),
            TypeError,
            "unexpected keyword argument 'metod'",
        ),  # type: ignore[call-arg]
        (lambda: SamplingParams(temprature=1.0), TypeError, "keyword argument 'temprature'"),  # type: ignore[call-arg]
        (lambda: Engine(TOY, TOY, taget="x"), ConfigError, "unknown setting 'taget'"),
        (lambda: asyncio.run(read()), RequestError, "read with `for`"),
    ]
    for make, kind, message in mistakes:
        with pytest.raises(kind, match=message):
            make()


# ---- for asyncio: the event loop is never blocked, and cancelling cancels the text ----

SLOWLY = 0.05  # seconds a forward, so that a busy machine looks before the end of `LONG`


@asynccontextmanager
async def started(pace: float = 0.002) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(TOY, TOY, target_pace=pace, draft_pace=pace / 4) as engine:
        yield engine


async def read(stream: AsyncStream) -> list[int]:
    return [token async for piece in stream for token in piece.tokens]


def tokens_of(stream: AsyncStream) -> list[int]:
    """What has come of a text; nothing before it has begun."""
    with suppress(RequestError):
        return stream.result.tokens
    return []


async def has_tokens(stream: AsyncStream, count: int) -> None:
    while len(tokens_of(stream)) < count:
        await asyncio.sleep(0.01)


async def texts_of_several_tasks_are_each_their_own() -> None:
    async with started() as engine:
        prompts = [[1, 2, 3], [4, 5], [6]]
        texts = await asyncio.gather(*(read(engine.stream(prompt, GREEDY)) for prompt in prompts))
        assert texts == [greedy_text(prompt, 60) for prompt in prompts]
        results = await engine.generate(prompts, GREEDY, method="sd")
        assert [result.tokens for result in results] == texts
        assert all(result.finish_reason == "length" for result in results)
        seeded = SamplingParams(temperature=1, seed=5, max_tokens=30, ignore_eos=True)
        (one,) = await engine.generate([1, 2], seeded)
        (other,) = await asyncio.to_thread(engine.engine.generate, [[1, 2]], seeded)
        assert one.tokens == other.tokens


async def streams_block_nobody_are_closed_before_amid_and_after_and_end_with_their_target() -> None:
    async with started(SLOWLY) as engine:
        stream = engine.stream([1, 2, 3], LONG, method="ar")
        reading = asyncio.create_task(read(stream))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not reading.done()
        assert not tokens_of(stream), "blocked, the event loop would find a piece there"
        stream.close()
        await reading
        stream = engine.stream([1, 2, 3], LONG, method="ar")
        reading = asyncio.create_task(read(stream))
        await asyncio.wait(
            {reading, asyncio.create_task(has_tokens(stream, 5))}, return_when="FIRST_COMPLETED"
        )
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert (await engine.generate([4, 5], GREEDY))[0].tokens == greedy_text([4, 5], 60)
        assert stream.result.finish_reason == "cancelled"
        assert 5 <= len(stream.result.tokens) < 500
        stream = engine.stream([1, 2, 3], LONG)
        async for piece in stream:
            if piece.tokens:
                stream.close()
        assert stream.result.finish_reason == "cancelled"
        waiting = engine.stream([1, 2, 3], GREEDY)
        waiting.close()
        assert await read(waiting) == [], "closed before it began"
        assert await read(engine.stream([9], GREEDY)) == greedy_text([9], 60)
        stream = engine.stream([1, 2, 3], LONG, method="ar")
        reading = asyncio.create_task(read(stream))
        await has_tokens(stream, 1)
        engine.engine.target_worker.kill()  # type: ignore[attr-defined]
        with pytest.raises(TargetLost):
            await reading


async def texts_of_a_closed_engine_end_whether_they_are_written_or_wait() -> None:
    async with started(SLOWLY) as engine:
        texts = [
            asyncio.create_task(read(engine.stream([1, 2, 3], LONG, method="ar"))) for _ in range(2)
        ]
        while not engine.streams:
            await asyncio.sleep(0.01)
    for text in texts:
        with pytest.raises(EngineClosed):
            await text


async def mistakes_are_reported_where_they_are_made() -> None:
    idle = AsyncEngine(TOY, TOY)
    with pytest.raises(EngineClosed, match="async with"):
        idle.stream([1])
    async with started() as engine:
        with pytest.raises(TypeError, match="temperature"):
            await read(engine.stream([1], temperature=0))  # type: ignore[call-arg]
        with pytest.raises(PearlError):
            await read(engine.stream([99], GREEDY))
        stream = engine.stream([1], GREEDY)
        with pytest.raises(RequestError, match="has not begun"):
            _ = stream.result
        await read(stream)
        with pytest.raises(RequestError, match="being read already"):
            await read(stream)
    with pytest.raises(EngineClosed):
        engine.stream([1])
    with pytest.raises(ModelError, match="vocab"):
        async with AsyncEngine("toy:vocab=nonsense", TOY):
            pass


async def an_engine_may_be_closed_before_it_starts_and_within_its_block() -> None:
    """Its workers end with the block either way."""
    AsyncEngine(TOY, TOY).close()
    async with started() as engine:
        wrapped = engine.engine
        engine.close()
    with pytest.raises(EngineClosed):
        wrapped.generate([[1]], GREEDY)


@pytest.mark.parametrize(
    "scenario",
    [
        texts_of_several_tasks_are_each_their_own,
        streams_block_nobody_are_closed_before_amid_and_after_and_end_with_their_target,
        texts_of_a_closed_engine_end_whether_they_are_written_or_wait,
        mistakes_are_reported_where_they_are_made,
        an_engine_may_be_closed_before_it_starts_and_within_its_block,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_asynchronous(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), BOUND))
