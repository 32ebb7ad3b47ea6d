"""Clients that people have, against our server: those in the extra `clients`, which the tests do without otherwise."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from pearl import Engine
from tests.conftest import TOY, output
from tests.served import MODEL, Served, serving_tools
from tests.tiny import EOS_ID

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.xdist_group("test_clients")]

QUESTION = "Name a colour."


class Cat(BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """The embedded target, which knows how to answer."""
    with Engine("embedded", "none") as engine, Served(engine) as running:
        yield running


@pytest.fixture(scope="module")
def wanted(served: Served) -> str:
    """Its answer to `QUESTION`."""
    message = {"role": "user", "content": QUESTION}
    answer = served.post("chat/completions", messages=[message], temperature=0, max_tokens=16)
    text: str = answer.json()["choices"][0]["message"]["content"]
    assert text
    return text


def test_langchain(served: Served, wanted: str) -> None:
    """A text, a stream, an object of a class of the program's, and an error that says what is wrong."""
    langchain_openai = pytest.importorskip("langchain_openai")
    chat: Any = langchain_openai.ChatOpenAI(
        base_url=f"{served.url}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=16
    )
    answer = chat.invoke(QUESTION)
    assert answer.content == wanted
    assert answer.usage_metadata["output_tokens"] in (16, 17)
    assert "".join(piece.content for piece in chat.stream(QUESTION)) == wanted
    asked = chat.model_copy(update={"max_tokens": 60})
    for method in ("json_schema", "json_mode"):
        made = asked.with_structured_output(Cat, method=method).invoke(
            "Describe a cat as JSON with name and age."
        )
        assert isinstance(made, Cat)
    called = asked.bind_tools([Cat], tool_choice="required").invoke("Describe a cat.")
    assert [call["name"] for call in called.tool_calls] == ["Cat"]


# ---- agents: a random model's first turn must be a call, its second is text ----


SOON = {"seed": 1, "temperature": 1, "logit_bias": {str(EOS_ID): 6}}  # so that a random text ends


@pytest.fixture(scope="module")
def tooled() -> Iterator[Served]:
    with serving_tools() as running:
        yield running


@pytest.fixture
def added() -> list[int]:
    """What a tool was called with."""
    return []


def test_langchains_agent(tooled: Served, added: list[int]) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    agents = pytest.importorskip("langchain.agents")

    def add(x: Literal[1, 22]) -> int:
        """Add one."""
        added.append(x)
        return x + 1

    given: dict[str, Any] = {
        "base_url": f"{tooled.url}/v1",
        "api_key": "none",
        "model": MODEL,
        "max_tokens": 300,
    }
    given["extra_body"] = SOON
    for is_response in (False, True):
        chat: Any = langchain_openai.ChatOpenAI(**given, use_responses_api=is_response)
        (call,) = (
            chat.bind_tools([add], tool_choice="required", strict=True).invoke("Hi").tool_calls
        )
        assert call["args"]["x"] in (1, 22)
        pieces = list(chat.bind_tools([add], tool_choice="required", strict=True).stream("Hi"))
        assert sum(pieces[1:], pieces[0]).tool_calls[0]["args"]["x"] in (1, 22)

    class First(langchain_openai.ChatOpenAI):  # type: ignore[misc,name-defined]
        """The agent leaves the choice to the model, and ours is random."""

        def _get_request_payload(self, *given: Any, **named: Any) -> Any:
            payload = super()._get_request_payload(*given, **named)
            is_first = all(message["role"] != "tool" for message in payload["messages"])
            return payload | {"tool_choice": "required" if is_first else "none"}

    done = agents.create_agent(First(**given), [add]).invoke({"messages": [("user", "Hi")]})
    assert [message.type for message in done["messages"]] == ["human", "ai", "tool", "ai"]
    assert added


@pytest.mark.parametrize("model", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openais_agents(
    tooled: Served, added: list[int], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which ask for a call once, and then leave the choice to the model."""
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    agents: Any = pytest.importorskip("agents")

    @agents.function_tool  # type: ignore[untyped-decorator]
    def add(x: Literal[1, 22]) -> int:
        """Add one."""
        added.append(x)
        return x + 1

    async def run() -> Any:
        client = openai.AsyncOpenAI(base_url=f"{tooled.url}/v1", api_key="none")
        settings = agents.ModelSettings(tool_choice="required", max_tokens=300, extra_body=SOON)
        of = getattr(agents, model)(model=MODEL, openai_client=client)
        agent = agents.Agent(
            name="A", instructions="Be brief.", tools=[add], model=of, model_settings=settings
        )
        whole = await agents.Runner.run(agent, "Hi", max_turns=4)
        streamed = agents.Runner.run_streamed(agent, "Hi", max_turns=4)
        async for _ in streamed.stream_events():
            pass
        await client.close()
        return whole, streamed

    whole, streamed = asyncio.run(run())
    assert whole.final_output == streamed.final_output
    assert len(added) == 2


@pytest.mark.parametrize("model", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(tooled: Served, model: str) -> None:
    """An object of a class is a call that must be made."""
    pydantic_ai: Any = pytest.importorskip("pydantic_ai")
    models: Any = pytest.importorskip("pydantic_ai.models.openai")
    providers: Any = pytest.importorskip("pydantic_ai.providers.openai")

    class Coin(BaseModel):
        side: Literal["heads", "tails"]

    of = getattr(models, model)(
        MODEL, provider=providers.OpenAIProvider(base_url=f"{tooled.url}/v1", api_key="none")
    )
    settings = {"max_tokens": 300, "extra_body": SOON}
    assert (
        pydantic_ai.Agent(of, output_type=Coin, model_settings=settings).run_sync("Hi").output.side
    )


def test_litellm(served: Served, wanted: str) -> None:
    litellm: Any = pytest.importorskip("litellm")
    asked = {
        "model": f"openai/{MODEL}",
        "api_base": f"{served.url}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 16,
    }
    assert litellm.completion(**asked).choices[0].message.content == wanted
    pieces = litellm.completion(**asked, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == wanted
    with pytest.raises(litellm.BadRequestError, match="the context holds"):
        litellm.completion(**asked | {"max_tokens": 10**7})


CLAUDE_CODE: dict[
    str, Any
] = {  # as Claude Code sends it to Anthropic's Messages API, in its second turn
    "max_tokens": 300,
    "system": [
        {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Working directory: /tmp"},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"},
                {"type": "text", "text": "Read a.", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "s"},
                {"type": "text", "text": "Reading."},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "red"}],
                    "is_error": False,
                }
            ],
        },
    ],
    "tools": [
        {
            "name": "Read",
            "description": "Reads a file.",
            "input_schema": {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
                "additionalProperties": False,
            },
        }
    ],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "medium"},
    "metadata": {"user_id": "user_1"},
}


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_claude_code_through_litellm(
    tooled: Served, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LiteLLM translates Anthropic's API: for one provider to /v1/responses, for the other to chats."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # not from the internet
    litellm: Any = pytest.importorskip("litellm")
    for part in ("fastapi", "soundfile"):  # of its proxy, which this translation imports
        pytest.importorskip(part)
    asked = CLAUDE_CODE | {
        "model": f"{provider}/{MODEL}",
        "api_base": f"{tooled.url}/v1",
        "api_key": "none",
    }

    async def run() -> tuple[Any, bytes]:
        whole = await litellm.anthropic.messages.acreate(**asked)
        streamed = await litellm.anthropic.messages.acreate(**asked, stream=True)
        events = [event async for event in streamed]
        return whole, b"".join(events)

    with tooled.writing('I do[.]<tool_call>\\{"name": "Read", "arguments": \\{\\}\\}</tool_call>'):
        whole, events = asyncio.run(run())
    text, call = whole["content"]
    assert (text["text"], call["type"], call["name"]) == ("I do.", "tool_use", "Read")
    assert whole["stop_reason"] == "tool_use"
    assert b"message_stop" in events
    assert b'"name": "Read"' in events
    refused = tooled.send(json.dumps(CLAUDE_CODE).encode(), "messages")
    assert refused.status_code == 404, "Anthropic's API itself is not served"


def program(name: str) -> str:
    """The path of a program, if it is installed; else the test is skipped."""
    path = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def test_llm_holds_a_conversation(served: Served, wanted: str, tmp_path: Path) -> None:
    """The command `llm`: it asks, continues a conversation, and takes a schema."""
    command = program("llm")
    model = {
        "model_id": "pearl",
        "model_name": MODEL,
        "api_base": f"{served.url}/v1",
        "supports_schema": True,
    }
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))
    environment = os.environ | {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}

    def llm(*arguments: str, most: int = 16) -> str:
        options = ("-o", "max_tokens", str(most), "-o", "temperature", "0")
        return output(command, *arguments, *options, env=environment).strip()

    assert (
        llm("-m", "pearl", QUESTION)
        == llm("-m", "pearl", "--no-stream", QUESTION)
        == wanted.strip()
    )
    assert llm("-c", "And another?")
    logged = json.loads(output(command, "logs", "--json", "-n", "2", env=environment))
    assert {entry["prompt"] for entry in logged} == {QUESTION, "And another?"}
    assert len({entry["conversation_id"] for entry in logged}) == 1
    schema = json.dumps(Cat.model_json_schema() | {"additionalProperties": False})
    assert Cat.model_validate_json(
        llm("-m", "pearl", "--schema", schema, "Describe a cat.", most=80)
    )


def test_what_is_described_can_be_sent(tmp_path: Path) -> None:
    """Requests generated from the OpenAPI document, right and wrong ones: none is an error of the server's."""
    command = program("schemathesis")
    with Engine(TOY, TOY) as engine, Served(engine) as running:
        output(
            *(
                command,
                "run",
                f"{running.url}/openapi.json",
                "--max-examples",
                "60",
                "--seed",
                "1",
                "--no-color",
            ),
            *("--checks", "not_a_server_error,status_code_conformance,content_type_conformance"),
            *("--phases", "examples,coverage,fuzzing"),
            cwd=tmp_path,
            timeout=600,
        )
        assert running.is_well()
