"""The HTTP server's texts, answers and figures: OpenAI's client and plain HTTP against a toy pair."""

import asyncio
import base64
import hashlib
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import openai
import pytest

from pearl.colours import WORK
from pearl.config import SamplingParams
from pearl.engine import Engine, Result
from pearl.engine.recording import Recording
from pearl.metrics import Statistics, Stopwatch
from pearl.server import app
from pearl.server.http import CompletionWriter
from pearl.server.metrics import ServerMetrics
from pearl.server.timeline import Timeline
from tests.browser import CHROMIUM, Browser
from tests.conftest import eventually
from tests.served import BOUND, MODEL, Served, body, message, serving, text_of

PARAMS = SamplingParams(temperature=1, seed=5, max_tokens=40)


@pytest.fixture(scope="module")
def engine(served: Served) -> Engine:
    return served.service.engine


def written(engine: Engine, *prompts: Any, **changes: Any) -> list[str]:
    """The engine's own texts."""
    return [result.text for result in engine.generate([*prompts], PARAMS.changed(**changes))]


# ---- texts ----


def test_openais_client(served: Served, engine: Engine) -> None:
    client = served.client()
    assert (
        [model.id for model in client.models.list()]
        == [client.models.retrieve(MODEL).id]
        == [MODEL]
    )
    assert served.get("/v1/models").json()["data"][0]["max_model_len"] == 512
    (wanted,) = engine.generate([[message("123")]], PARAMS)
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [message("123")],
        "seed": 5,
        "temperature": 1.0,
    }
    whole = client.chat.completions.create(max_completion_tokens=40, **asked)
    assert whole.choices[0].message.content == wanted.text
    assert whole.usage.completion_tokens == len(wanted.tokens)
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    with client.chat.completions.create(max_tokens=40, **options, **asked) as chunks:
        *got, last = list(chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in got) == wanted.text
    assert got[0].choices[0].delta.role == "assistant"
    assert last.choices == []
    assert last.usage.total_tokens == len(wanted.tokens) + len(wanted.prompt_tokens)
    completed = client.completions.create(model=MODEL, prompt="123", temperature=0, max_tokens=5)
    assert [completed.choices[0].text] == written(engine, "123", temperature=0, max_tokens=5)
    with pytest.raises(openai.NotFoundError, match="no model"):
        client.completions.create(model="other", prompt="1")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="1", temperature=-1)
    assert refused.value.param == "temperature"


def test_openais_client_reads_log_probabilities(served: Served) -> None:
    client = served.client().chat.completions
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "seed": 5, "temperature": 1.0}
    asked |= {"messages": [message("123")]}
    (choice,) = client.create(logprobs=True, top_logprobs=2, **asked).choices
    content = choice.logprobs.content or []
    assert "".join(entry.token for entry in content) == choice.message.content
    for entry in content:
        assert bytes(entry.bytes or []).decode() == entry.token
        assert len(entry.top_logprobs) == 2
        assert entry.logprob <= entry.top_logprobs[0].logprob <= 0
    chunks = client.create(logprobs=True, top_logprobs=2, stream=True, **asked)
    assert [
        e for chunk in chunks for c in chunk.choices if c.logprobs for e in c.logprobs.content or []
    ] == content
    alone = client.create(logprobs=True, **asked).choices[0].logprobs
    assert [(e.logprob, e.top_logprobs) for e in alone.content or []] == [
        (e.logprob, []) for e in content
    ]
    assert client.create(**asked).choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError, match="logprobs true"):
        client.create(top_logprobs=2, **asked)


def test_several_texts_of_one_request(served: Served, engine: Engine) -> None:
    """n answers for each prompt are the samples of one seed; the prompt counts once."""
    texts = [
        written(engine, prompt, sample=n, max_tokens=8)[0]
        for prompt in ("123", "4567")
        for n in (0, 1)
    ]
    assert len(set(texts)) > 1
    answer = served.post(prompt=["123", [4, 5, 6, 7]], n=2).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        *enumerate(texts)
    ]
    assert answer["usage"]["prompt_tokens"] == 7
    chunks = served.events(prompt=["123", [4, 5, 6, 7]], n=2)
    assert [text_of(chunks, index) for index in range(4)] == texts


def test_texts_are_written_side_by_side(engine: Engine) -> None:
    """The texts of one request, streamed and not, and those of many clients, are as with one slot."""
    with serving(slots=3, target_pace=0.01, draft_pace=0.003) as several:
        wanted = [written(engine, "123", sample=number)[0] for number in range(5)]
        assert [
            choice["text"] for choice in several.post(n=5, max_tokens=40).json()["choices"]
        ] == wanted
        chunks = several.events(n=5, max_tokens=40)
        assert [text_of(chunks, index) for index in range(5)] == wanted
        order = [chunk["choices"][0]["index"] for chunk in chunks]
        assert sum(a != b for a, b in pairwise(order)) > 5, (
            "they come as they are made, not one after the other"
        )
        prompts = [f"{i % 10}{i // 10}{i % 7}" for i in range(12)]
        with ThreadPoolExecutor(12) as pool:
            got = list(
                pool.map(lambda prompt: several.post(prompt=prompt, max_tokens=30).json(), prompts)
            )
        assert [one["choices"][0]["text"] for one in got] == written(
            engine, *prompts, max_tokens=30
        )


def test_pieces_come_as_they_are_made(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunk arrives though no other is made before it has been looked at."""
    with ExitStack() as until_seen:
        committed = Stopwatch.committed

        def hold(watch: Stopwatch, tokens: int, now: float) -> None:
            if watch.first is None:
                until_seen.enter_context(served.held())
            committed(watch, tokens, now)

        monkeypatch.setattr(Stopwatch, "committed", hold)
        asked: dict[str, Any] = {"model": MODEL, "prompt": "123", "max_tokens": 400}
        with served.client().completions.create(
            stream=True, extra_body={"ignore_eos": True}, **asked
        ) as chunks:
            first = next(iter(chunks))
            assert served.figure("vllm:num_requests_running") == 1
            until_seen.close()
            assert (
                len(first.choices[0].text + "".join(chunk.choices[0].text for chunk in chunks))
                == 400
            )


def test_a_stream_that_waits_is_kept_alive(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """With comments, before the first token too; clients skip them."""
    monkeypatch.setattr(app, "SILENT_SECONDS", 0.05)
    wanted = served.post().json()["choices"][0]["text"]
    with ExitStack() as until_seen:
        until_seen.enter_context(served.held())
        with httpx.stream(
            "POST", f"{served.url}/v1/completions", json=body() | {"stream": True}, timeout=BOUND
        ) as response:
            lines = response.iter_lines()
            assert next(lines) == ": waiting"
            until_seen.close()
            events = [line for line in lines if line.startswith("data: {")]
    assert text_of([json.loads(event[6:]) for event in events]) == wanted
    asked: dict[str, Any] = {"seed": 5, "temperature": 1.0, "max_tokens": 8}
    with ExitStack() as until_asked:
        until_asked.enter_context(served.held())
        chunks = served.client().completions.create(model=MODEL, prompt="123", stream=True, **asked)
        until_asked.close()
        assert "".join(chunk.choices[0].text for chunk in chunks) == wanted


def test_usage_and_provenance(served: Served) -> None:
    options = {"include_provenance": True, "include_usage": True}
    *chunks, last = served.events(
        "chat/completions", max_tokens=60, ignore_eos=True, stream_options=options
    )
    usage, ours = last["usage"], last["usage"]["pearl"]
    assert usage["completion_tokens"] == 60
    assert usage["total_tokens"] == 60 + usage["prompt_tokens"]
    assert ours["seed"] == 5
    assert ours["num_accepted_draft_tokens"] <= ours["num_draft_tokens"]
    assert len(ours["speedup_basis"]) == len(ours["settled"]) == 1
    assert 0 <= ours["core_wait"][0] <= 1
    sources = [
        one["source"] for chunk in chunks for one in chunk["choices"][0].get("provenance", [])
    ]
    assert len(sources) == 60
    assert {source: sources.count(source) for source in set(sources)} == ours["tokens_by_source"]
    assert all(chunk["usage"] is None for chunk in chunks)


def test_a_text_ends_before_a_stop_string(served: Served, engine: Engine) -> None:
    (text,) = written(engine, "123", ignore_eos=True)
    stop = text[20:22]
    for given in (stop, ["~~", stop]):
        choice = served.post(max_tokens=40, ignore_eos=True, stop=given).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")


def test_penalties_and_biases_are_those_of_the_engine(served: Served, engine: Engine) -> None:
    asked = {"presence_penalty": 1.5, "frequency_penalty": -0.5, "repetition_penalty": 1.3}
    wanted = written(engine, "123", logit_bias=((4, 3.0), (7, -100.0)), ignore_eos=True, **asked)
    biased = served.post(
        max_tokens=40, ignore_eos=True, logit_bias={"4": 3, "7": -100.0}, **asked
    ).json()
    assert [biased["choices"][0]["text"]] == wanted != written(engine, "123", ignore_eos=True)


# ---- the event loop is never blocked ----


def test_others_do_not_wait_for_long_work(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checking a schema, or writing many texts with 20 log probabilities a token: no stream went on for 20 s."""
    ended, whole = threading.Event(), CompletionWriter.whole

    def slowly(answer: CompletionWriter, *given: Any) -> Any:
        assert ended.wait(BOUND)
        return whole(answer, *given)

    for place, work in (
        ("pearl.server.app.read_request", lambda *_: ended.wait(BOUND)),
        (CompletionWriter, slowly),
    ):
        ended.clear()
        with monkeypatch.context() as patch, ThreadPoolExecutor() as pool:
            patch.setattr(*((place, work) if isinstance(place, str) else (place, "whole", work)))
            asked = pool.submit(served.post)
            eventually(lambda: served.figure("vllm:num_requests_running") == 0)
            assert httpx.get(f"{served.url}/health", timeout=BOUND / 2).status_code == 200
            assert not asked.done()
            ended.set()
            asked.result()


# ---- figures and pages ----


def test_figures(served: Served) -> None:
    wanted = {
        "vllm:prompt_tokens_total": 6,
        "vllm:generation_tokens_total": 100,
        "vllm:request_success_total": 2,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:inter_token_latency_seconds_count": 98,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:request_queue_time_seconds_count": 2,
        "pearl:tokens_by_source_total": 100,
    }
    drafted = [
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
    ]
    names = (*wanted, *drafted)
    served.post()
    before = served.figures(*names)
    usage = served.post(max_tokens=50, ignore_eos=True, n=2).json()["usage"]["pearl"]
    grown = [after - was for was, after in zip(before, served.figures(*names), strict=True)]
    assert grown == [
        *wanted.values(),
        usage["num_draft_tokens"],
        usage["num_accepted_draft_tokens"],
    ]
    served.until_running(0)
    assert served.figure("pearl:draft_restarts") == 0


def page(figures: ServerMetrics) -> str:
    return figures.page().decode()


def test_accepted_tokens_are_counted_by_their_place_in_a_run() -> None:
    figures = ServerMetrics("m", restarts=lambda: 3)
    for runs in ({0: 2, 1: 1, 3: 2}, {40: 1}):
        result = Result(seed=1, finish_reason="length", statistics=Statistics(run_histogram=runs))
        figures.ended(result, Stopwatch(), 0.0)
    found = re.findall(
        r'pearl:accepted_tokens_per_position_total.*position="(.*?)".*? (\S+)$', page(figures), re.M
    )
    assert {place: float(count) for place, count in found} == (
        {"0": 4, "1": 3, "2": 3} | {str(place): 1 for place in range(3, 32)} | {"32 and more": 8}
    )
    assert 'pearl:runs_total{model_name="m"} 6.0' in page(figures)
    assert 'pearl:draft_restarts{model_name="m"} 3.0' in page(figures)


def test_the_page_asks_nobody_else(served: Served) -> None:
    """And lets the browser run its script only."""
    response = served.get("/")
    assert not {"http:", "https:", "innerHTML"} & set(
        re.findall(r"https?:|innerHTML", response.text)
    )
    script = response.text.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in response.headers["content-security-policy"]


USAGE: dict[str, Any] = {  # as the last chunk of a stream has it
    "completion_tokens": 100,
    "pearl": {
        "seed": 7,
        "tokens_per_second": [20.0],
        "tokens_per_step": [1.5],
        "speedup": [1.3],
        "speedup_basis": ["estimated"],
        "settled": [""],
    },
}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_the_line_below_a_reply_says_what_its_speedup_is_by(served: Served, tmp_path: Path) -> None:
    """As the command line says it: `test_metrics`."""

    def line(browser: Browser, **changes: Any) -> str:
        usage = USAGE | {"pearl": USAGE["pearl"] | changes}
        return str(browser.run(f"summary({json.dumps(usage)})"))

    with Browser(served.url, tmp_path / "profile") as browser:
        browser.sees("$('model').textContent")
        begin = "100 tokens · 20.0 tokens/s · 1.50 tokens a step"
        times = f"{begin} · about 1.30 times the target alone"
        assert line(browser) == f"{times} (estimated) · seed 7"
        assert (
            line(browser, speedup_basis=["ngram"], settled=["pearl"])
            == f"{times} (compared with ngram) · seed 7"
        )
        settled = "auto settled on the target alone (ngram)"
        assert line(browser, speedup=[None], settled=["ngram"]) == f"{begin} · {settled} · seed 7"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_the_page_runs_in_a_browser(tmp_path: Path) -> None:
    """A text streams, the timeline moves, and no script fails; `PEARL_SCREENSHOT` keeps a picture of it."""
    with (
        serving(target_pace=0.03, draft_pace=0.008) as served,
        Browser(served.url, tmp_path / "profile") as browser,
    ):
        assert browser.sees("$('model').textContent") == MODEL
        browser.run("$('look').click()")
        browser.sees("looking && $('looking').textContent === ''")
        assert browser.run("$('live').hidden") is False
        browser.run(
            "new Reply().text = '# One\\n- **two** `3`\\n```py\\n<b>4</b>\\n```\\n'; replies[0].draw()"
        )
        assert (
            browser.run("replies[0].box.innerText.split(/\\s+/).join(' ')")
            == "One two 3 <b>4</b> Copy"
        )
        assert (
            browser.run(
                "replies[0].box.querySelectorAll('h1, li strong, li code, pre code').length"
            )
            == 4
        )
        browser.run("$('clear').click(); $('system').value = 'Be brief.'")
        assert (
            browser.run("request('hello')[1].messages.map((one) => one.role).join()")
            == "system,user"
        )
        browser.run(  # auto drafts only where that should pay
            "const asked = request; request = (...given) => { const made = asked(...given);"
            " made[1].speculation = 'pearl'; return made; }"
        )
        browser.run(
            "texts = []; new MutationObserver(() => texts.push($('shares').innerText))"
            ".observe($('shares'), {childList: true});"  # a slow browser looks after the reply's end
            "$('plain').checked = true; $('text').value = '123'; $('most').value = 200; $('send').click()"
        )
        first = browser.sees("document.querySelector('.assistant').textContent.length")
        assert browser.sees(
            "document.querySelector('.assistant').textContent.length", lambda now: now > first
        )
        shares = browser.sees(
            r"texts.find((text) => /target: .*verify/.test(text) && /draft: .*draft \d/.test(text))"
        )
        assert "target: " in shares
        drawn = "$('live').toDataURL()"
        before = browser.run(drawn)
        assert browser.sees(drawn, lambda now: now != before), "it moves"
        browser.sees("marks.length")
        if (kept := os.environ.get("PEARL_SCREENSHOT")) is not None:
            browser.sees("performance.now() > 6000")
            browser.screenshot(Path(kept))
        browser.sees("!running")
        assert "tokens a step" in browser.run("document.querySelector('.figures').textContent")
        coloured = "document.querySelectorAll('.assistant .text span[title]').length"
        assert browser.run(coloured) == browser.run("Number($('tokens').textContent)")
        browser.run("$('coloured').click()")
        assert browser.run(coloured) == 0
        browser.run("$('text').value = '1'; $('most').value = 3; $('send').click()")
        browser.sees("!running && replies[1].mark.startsWith('cut at max tokens')")
        labels = browser.run(  # in one go: a short text could end between two calls
            "(() => { $('text').value = '12'; $('send').click(); const label = $('send').textContent;"
            " $('text').value = '34'; $('ask').requestSubmit(); const kept = $('text').value;"
            " $('send').click(); return label + ', ' + kept; })()"
        )
        assert labels == "Stop, 34", "Enter, while a text is written, leaves the next message there"
        assert browser.sees("replies[2].mark") == "stopped"
        assert browser.run("$('send').textContent") == "Send"
        assert browser.run("$('waiting').textContent") in ("0", "-")
        browser.run("$('look').click()")
        browser.sees("!looking && $('live').hidden")
        eventually(lambda: not list(served.service.engine.directory.glob("trace-*")))
        assert browser.said == []


MARKED = "*So*\n1. **two** [it](https://a) `3`\n   ```py\n   Copy\n   x = 4\n   ```\nEnd"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_the_page_shows_who_guessed_each_token(served: Served, tmp_path: Path) -> None:
    """In rendered Markdown too, of which tokens hold any part; and behind a thought, which may say the same."""
    pieces = re.findall(r".{1,3}", MARKED, re.DOTALL)
    origins = ["accepted", "corrected", "guessed", "direct"]
    tokens = [{"text": text, "source": origins[i % 4]} for i, text in enumerate(pieces)]
    thought = [
        {"text": f"<think>\n{MARKED * 3}", "source": "bonus"},
        {"text": "\n</think>\n", "source": "direct"},
    ]
    with Browser(served.url, tmp_path / "profile") as browser:
        assert browser.sees("document.querySelector('.hint').checkVisibility()"), (
            "what to do stands in the empty box"
        )
        browser.run("new Reply()")
        assert not browser.run("document.querySelector('.hint').checkVisibility()")
        shown = "[...replies[0].box.querySelectorAll('.text span[title]')].map((one) => [one.textContent, one.title])"
        for before in ([], thought):
            said = json.dumps(
                {"text": MARKED, "thought": MARKED * 3 if before else "", "tokens": before + tokens}
            )
            browser.run(f"Object.assign(replies[0], {said}).draw()")
            names = browser.run("SOURCES")
            at = 0
            for text, title in browser.run(shown):
                at = MARKED.index(text, at)
                assert title == names[origins[at // 3 % 4]], (text, at)
                at += len(text)
            plain = "".join(text for text, _ in browser.run(shown))
            assert plain == "Sotwo ithttps://a) 3Copy\nx = 4End"
        of_source = "[...replies[0].box.querySelectorAll('.text span')].find((one) => one.title === SOURCES.%s)"
        colour = f"getComputedStyle({of_source}).color"
        assert browser.run(colour % "corrected") == "rgb(217, 119, 6)"
        assert browser.run(colour % "direct") == browser.run(
            "getComputedStyle(document.body).color"
        )
        browser.run("$('clear').click()")
        assert browser.run("document.querySelector('.hint').checkVisibility()")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [1000, 700, 500])  # the narrowest window that Chromium opens
def test_the_page_leaves_no_figure_alone_in_a_row(
    served: Served, tmp_path: Path, width: int
) -> None:
    with Browser(served.url, tmp_path / "profile", (width, 900)) as browser:
        browser.sees("$('model').textContent")
        tops = browser.run(
            "[...document.querySelectorAll('dl > div')].map((one) => one.getBoundingClientRect().top)"
        )
        assert min(Counter(tops).values()) > 1
        assert browser.run("document.documentElement.scrollWidth <= innerWidth"), (
            "nothing is cut off"
        )
        assert browser.run("colour(colourOf('waits: verdict'))") == WORK["wait"][0], (
            "as in pictures"
        )


# ---- the timeline ----


def watch(
    served: Served, meanwhile: Callable[[], object], is_enough: Callable[[list[Any]], bool]
) -> list[Any]:
    """The events of the timeline from before `meanwhile` until there are enough."""
    seen: list[Any] = []
    with (
        ThreadPoolExecutor(1) as pool,
        httpx.stream("GET", f"{served.url}/v1/timeline", timeout=BOUND) as response,
    ):
        assert response.status_code == 200
        for line in filter(None, response.iter_lines()):
            seen.append(json.loads(line.removeprefix("data: ")))
            if "recording" in seen[-1]:
                pool.submit(meanwhile)
            if is_enough(seen):
                break
    return seen


def tokens(seen: list[Any]) -> list[str]:
    return [source for event in seen for source in event.get("tokens", ())]


def test_the_timeline_has_what_both_workers_do(engine: Engine) -> None:
    """Forwards, waits and each token by its source, in order; nothing of it is left when nobody looks on."""
    asked = {"max_tokens": 40, "ignore_eos": True}

    def all_seen(seen: list[Any]) -> bool:  # the draft may write down later what it did
        return len(tokens(seen)) >= 40 and any(event.get("name") == "draft" for event in seen)

    with Served(engine, method="pearl") as served:  # under auto the draft may rest
        seen = watch(served, lambda: served.post(**asked), all_seen)
        eventually(lambda: not list(engine.directory.glob("trace-*")))
        assert served.is_well()
        assert watch(served, lambda: served.post(**asked), lambda seen: bool(tokens(seen)))
    assert len(tokens(seen)) == 40
    assert set(tokens(seen)) <= {"accepted", "corrected", "guessed", "direct", "bonus"}
    of = {
        role: {event["name"] for event in seen if event.get("of") == role}
        for role in ("target", "draft")
    }
    assert of["target"] & {"pre-verify", "post-verify"}
    assert "draft" in of["draft"]
    assert all(event["from"] < event["to"] for event in seen if "of" in event)


def test_a_viewer_learns_why_there_is_nothing_to_see(tmp_path: Path) -> None:
    async def look() -> None:
        timeline = Timeline(
            Recording(Mock(), Mock(), tmp_path, is_taken=True)
        )  # no other can begin
        with timeline.viewed() as viewer:
            assert "problem" in await asyncio.wait_for(viewer.get(), BOUND)

    asyncio.run(look())
