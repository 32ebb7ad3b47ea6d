"""What a newcomer gets wrong: every refusal is a line or two that names the mistake, and often what was meant."""

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import TOY
from tests.served import JSON, MODEL, Served

Run = Callable[..., subprocess.CompletedProcess[str]]
PAIR = f"--target {TOY} --draft {TOY}"
FILES: dict[str, bytes] = {
    "list.yaml": b"- a\n",
    "colons.yaml": b"a: b: c\n",
    "tab.yaml": b"target:\tx\n\tdraft: y",
    "binary.yaml": bytes(range(256)),
    "key.yaml": b"methd: sd\n",
    "odd.yaml": b"zzz: 1\n",
    "word.yaml": b"gamma: three\n",
    "dtype.yaml": b"target_dtype: bf17\n",
    "text.txt": b"hello\n",
    "damaged.gguf": b"GGUFxxxx",
    "empty": b"",
    "broken.jsonl": b"{not json\n",
    "other.jsonl": b'{"a": 1}\n',
    "prompts.jsonl": b'{"prompt": "hi"}\n',
    "object.json": b"{}",
    "trace.json": b'{"traceEvents": []}',
}
# Arguments of `pearl`, words of the message, and its exit code where that is not 2.
COMMANDS: list[tuple[str, str] | tuple[str, str, int]] = [
    ("generat hi", "No such command 'generat'. Did you mean 'generate'?"),
    ("srve", "Did you mean 'serve'?"),
    ("help", "No such command 'help'"),
    ("--versio", "Did you mean '--version'?"),
    ("datastore biuld", "No such command 'biuld'"),
    ("generate --temprature 1 x", "--temperature"),
    ("generate --gamma three x", "'three' is not a valid integer"),
    ("generate --method perl x", "Did you mean 'pearl'?"),
    ("generate --draft-dtype bf17 x", "Did you mean 'bf16'?"),
    ("generate x y", "unexpected extra argument (y)"),
    ("generate", "no prompt: give one"),
    ("generate --config none.yaml x", "cannot read the configuration none.yaml: No such file"),
    ("generate --config list.yaml x", "a mapping of settings, not a list"),
    ("generate --config colons.yaml x", "not allowed here (line 1, column 5)"),
    ("generate --config tab.yaml x", "(line 1, column 8)"),
    ("generate --config binary.yaml x", "no text in UTF-8"),
    ("generate --config key.yaml x", "key.yaml: unknown setting 'methd': did you mean method?"),
    ("generate --config odd.yaml x", "unknown setting 'zzz': allowed are branches,"),
    ("generate --config word.yaml x", "word.yaml: gamma: "),
    ("generate --config dtype.yaml x", "target_dtype: Input should be 'auto', 'float32'"),
    ("generate --target ./nowhere x", "no such directory or .gguf file", 3),
    ("generate --target text.txt x", "it is a file, but no .gguf file", 3),
    ("generate --target damaged.gguf x", "cut off or damaged", 3),
    ("generate --target toy:beta=1 x", "unknown key 'beta'; known are vocab", 3),
    ("generate --draft toy x", "different vocabularies", 3),
    (
        f"generate {PAIR} --temperature -1 x",
        "temperature: takes a number >= 0.0",
    ),
    (f"generate {PAIR} --json-schema {{ x", "json_schema: is not JSON"),
    (f"generate {PAIR} --json-schema [] x", "json_schema: must be a JSON object"),
    (f"generate {PAIR} --target-device gpu x", "bad device 'gpu': use auto, cpu"),
    (f"generate {PAIR} --control udp://x x", "control: use ipc, or tcp://HOST:PORT"),
    (f"generate {PAIR} --trace /nowhere/x.json x", "name one in a directory that exists"),
    (f"generate {PAIR} --datastore . --method rest x", "`pearl datastore build` makes one"),
    (
        f"generate {PAIR} --disco text.txt --draft-stop disco x",
        "no classifier that pearl disco train has made",
    ),
    (f"generate {PAIR} --method sd --look-ahead 4 x", "look_ahead is for methods auto, ngram"),
    (f"generate {PAIR} --look-ahead many x", "look_ahead: takes a whole number, got text"),
    (f"generate {PAIR} --connect 99999 x", "give a PID or a directory of `pearl ps`"),
    ("chat --load text.txt", "text.txt is no saved conversation"),
    ("chat --system", "'--system' requires an argument"),
    ("serve --http 8000", "give HOST:PORT, such as 127.0.0.1:8000"),
    ("serve --http 127.0.0.1:0 --cors nonsense", "give an origin, such as https://example.com"),
    ("stop x y", "unexpected extra argument (y)"),
    ("ps --jsn", "Did you mean '--json'?"),
    ("keys", "Missing argument 'FILE'"),
    ("show nowhere", "get it with `pearl pull nowhere`", 3),
    ("pull ./text.txt", "is no hub id: give ID", 3),
    ("rm nowhere", "see `pearl list`", 3),
    ("datastore build --out ds nowhere.txt", "nowhere.txt is not there"),
    ("trace report empty", "empty is empty"),
    ("trace report text.txt", "text.txt is no trace"),
    ("trace report object.json", "it has no traceEvents"),
    ("trace report trace.json", "pearl writes them with --trace FILE"),
    ("trace show trace.json", "Missing option '--png'"),
    ("trace show trace.json --png /nowhere/x.png", "--png: cannot write /nowhere/x.png"),
    ("bench fast", "'fast': unknown method 'fast'; choose one of auto"),
    (
        "bench --method sd",
        "--method: pearl bench runs untraced, and each way with its own settings",
    ),
    ("bench pearl --rule opt", "--rule: pearl bench runs untraced"),
    (
        "bench --prompts none.jsonl",
        "cannot read the prompts in none.jsonl: No such file or directory",
    ),
    (
        f"bench --prompts broken.jsonl {PAIR}",
        "broken.jsonl, prompt 1: not a JSON object with a text under",
    ),
    (f"bench ar {PAIR} --json /nowhere/x.json", "--json: cannot write /nowhere/x.json"),
    (f"bench ar {PAIR} --json .", "--json: cannot write .: name a file"),
    ("calibrate --method ar", "--method: pearl calibrate runs untraced, and compares the methods"),
    ("calibrate --prompts empty", "empty holds no prompts"),
    ("check --gamma 3", "--gamma: pearl check runs untraced"),
    ("check --stop x", "--stop: pearl check runs untraced, without stop strings"),
    ("check --prompts binary.yaml", "it is no text in UTF-8"),
    ("paper pearl --pair GPT", "no pair is called 'GPT'; there are"),
    (
        "disco train other.jsonl --out x",
        "other.jsonl, prompt 1: not a JSON object with a text under",
    ),
    ("disco train prompts.jsonl --out /nowhere/x", "--out: cannot write /nowhere/x"),
    (
        "disco train prompts.jsonl --out x --temperature 1",
        "--temperature: pearl disco train records greedy answers",
    ),
    ("distill --out d --config key.yaml", "key.yaml: unknown setting 'methd'"),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with `FILES`, and no engine of this user anywhere."""
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    tmp_path.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.mark.parametrize("case", COMMANDS, ids=lambda case: case[0])
def test_a_command_says_in_two_lines_what_is_wrong(
    pearl_here: Run, here: Path, case: tuple[str, str] | tuple[str, str, int]
) -> None:
    """None of them starts a worker."""
    line, words, *code = case
    done = pearl_here(*shlex.split(line))
    assert done.returncode == (code[0] if code else 2), done.stderr
    assert done.stdout == ""
    lines = [said for said in done.stderr.splitlines() if not said.startswith("reading the header")]
    assert lines[0].startswith("error: ")
    assert words in lines[0]
    assert len(lines) <= 2, done.stderr


TEXT: dict[str, Any] = {"model": MODEL, "prompt": "1", "max_tokens": 2}
TALK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "1"}],
    "max_tokens": 2,
}
# Endpoint, body, status, words of the message.
BODIES: list[tuple[str, Any, int, str]] = [
    (
        "/v1/completion",
        TEXT,
        404,
        "did you mean /v1/completions? /openapi.json lists what there is",
    ),
    ("/v2/models", TEXT, 404, "did you mean /v1/models?"),
    ("/nowhere/at/all", TEXT, 404, "there is no /nowhere/at/all here: /openapi.json"),
    ("/v1/models", TEXT, 405, "POST /v1/models: this path takes GET, HEAD"),
    ("/v1/completions", b"{", 400, "the body is not valid JSON"),
    ("/v1/completions", b"\xff", 400, "the body is not UTF-8"),
    ("/v1/completions", b"[]", 400, "the body must be a JSON object"),
    ("/v1/completions", {"prompt": "1"}, 400, "model: is missing"),
    ("/v1/completions", TEXT | {"model": "gpt-4"}, 404, f"no model 'gpt-4' here, only '{MODEL}'"),
    ("/v1/completions", TEXT | {"prompt": ""}, 400, "prompt: must not be empty"),
    ("/v1/completions", TEXT | {"prompt": []}, 400, "prompt: must not be empty"),
    (
        "/v1/completions",
        TEXT | {"prompt": [99999]},
        400,
        "token id 99999, the model has ids up to 31",
    ),
    (
        "/v1/completions",
        TEXT | {"temperature": "hot"},
        400,
        "temperature: should be a valid number",
    ),
    ("/v1/completions", TEXT | {"max_tokens": 600}, 400, "the context holds 512 tokens"),
    (
        "/v1/completions",
        TEXT | {"logit_bias": {"x": 1}},
        400,
        "logit_bias: takes token ids, each with a number",
    ),
    ("/v1/completions", TEXT | {"echo": True}, 400, "echo is not supported"),
    (
        "/v1/completions",
        TEXT | {"stream_options": {}},
        400,
        "stream_options: is for stream true only",
    ),
    (
        "/v1/completions",
        TEXT | {"response_format": {"type": "xml"}},
        400,
        "should be 'text', 'json_object' or",
    ),
    ("/v1/chat/completions", TALK | {"messages": []}, 400, "messages: should have at least 1 item"),
    (
        "/v1/chat/completions",
        TALK | {"messages": [{"role": "robot"}]},
        400,
        "messages[0].role: should be 'system'",
    ),
    (
        "/v1/chat/completions",
        TALK | {"tool_choice": "required"},
        400,
        "tool_choice: required needs tools",
    ),
    (
        "/v1/chat/completions",
        TALK | {"top_logprobs": 3},
        400,
        "top_logprobs: is for logprobs true only",
    ),
    ("/v1/responses", {"model": MODEL}, 400, "input: is missing"),
    (
        "/v1/responses",
        {"model": MODEL, "input": "1", "previous_response_id": "r"},
        404,
        "there is no response 'r' here",
    ),
]


def test_the_server_says_what_is_wrong_with_a_request(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    for path, body, status, words in BODIES:
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        answer = httpx.post(served.url + path, headers=JSON, timeout=60, **content)
        assert answer.status_code == status, (path, body, answer.text)
        error = answer.json()["error"]
        message = error if path.startswith("/api") else error["message"]
        assert words in message, (path, body)
        assert "\n" not in message, (path, body)
    assert (
        httpx.get(f"{served.url}/v1/models/other")
        .json()["error"]["message"]
        .endswith(f"only '{MODEL}'")
    )
    served.post(temprature=1, max_tokens=1)
    assert "'temprature', which is not known and ignored: did you mean temperature?" in caplog.text
