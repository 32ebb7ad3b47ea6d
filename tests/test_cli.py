"""The command line: what goes to which stream, which exit code, and that every setting is a flag."""

import ast
import io
import json
import re
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from rich.progress import Progress

from pearl import device
from pearl.cli import chat, cli, commands, console, generate, main
from pearl.cli.commands import COMMANDS
from pearl.cli.options import settings_options
from pearl.config import SETTING_NAMES, Settings
from pearl.config.option_names import options_of
from pearl.engine import Engine
from pearl.lab.distill.prompts import read_turns
from pearl.spec.methods import METHODS
from scripts import faulty
from tests.conftest import BOUND, TOY, output, wanted
from tests.tiny import tiny_model

Run = Callable[..., subprocess.CompletedProcess[str]]
PAIR = ["--target", TOY, "--draft", TOY]
BRIEFLY = ["--max-tokens", "30", "--temperature", "0", "--ignore-eos"]
SHORT = [*PAIR, *BRIEFLY]
WANTED = wanted("123", 30)


def pearl(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pearl", *arguments]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=BOUND, check=False
    )


@pytest.fixture
def refused(pearl_here: Run) -> Callable[..., str]:
    """What a command says in refusing; nothing may be printed on stdout, nor a traceback."""

    def run(*arguments: str, command: str = "generate", code: int = 2) -> str:
        ended = pearl_here(command, *arguments)
        assert ended.returncode == code, ended.stderr
        assert ended.stdout == ""
        assert "Traceback" not in ended.stderr
        return " ".join(ended.stderr.split())

    return run


# ---- texts ----


def test_text_goes_to_stdout_and_all_else_to_stderr(toy: Engine) -> None:
    run = pearl(
        "generate",
        "--connect",
        str(toy.directory),
        *BRIEFLY,
        "--method",
        "pearl",
        "--look-ahead",
        "0",
        "--siblings",
        "0",
        "--stats",
        "-",
        stdin="123",
    )  # a target that waits for its draft judges it
    assert run.returncode == 0, run.stderr
    assert run.stdout == WANTED + "\n"
    for row in ("method", "30 tokens", "accepted of judged", "target steps", "t_target(n)", "seed"):
        assert row in run.stderr


@pytest.mark.parametrize("method", ["auto", "ar", "sd", "ssd", "pearl"])
def test_the_record_of_a_sampled_text_gives_that_text_again(
    toy: Engine, monkeypatch: pytest.MonkeyPatch, pearl_here: Run, method: str
) -> None:
    """With what was in use: the checkpoint's own sampling, the seed that was drawn, auto's rule, and sd's window."""
    monkeypatch.setattr("pearl.cli.generate.open_engine", lambda *_: nullcontext(toy))
    monkeypatch.setattr(toy, "defaults", replace(toy.defaults, temperature=0.9, top_k=20))
    flags = [
        "--method",
        method,
        "--max-tokens",
        "120",
        "--ignore-eos",
        "--top-p",
        "0.95",
        "--json",
        "123",
    ]
    document = json.loads(pearl_here("generate", *flags).stdout)
    statistics = document["statistics"]
    assert (
        statistics["num_generated_tokens"]
        == 120
        == len(document["tokens"])
        == len(document["provenance"])
    )
    assert statistics["provenance"] == {
        p: document["provenance"].count(p) for p in set(document["provenance"])
    }
    assert (document["prompt_tokens"], document["finish_reason"]) == ([1, 2, 3], "length")
    used = document["settings"]["options"]
    assert (used["temperature"], used["top_k"], used["top_p"]) == (0.9, 20, 0.95)
    assert used["seed"] == document["seed"]
    assert used["rule"] == ("coupled" if method == "auto" else "ratio")
    assert (used["gamma"] is not None) == (METHODS[method].drafts and METHODS[method].bonus)
    monkeypatch.undo()
    (again,) = toy.generate(document["prompt_tokens"], options_of(used))
    assert (again.tokens, again.text) == (document["tokens"], document["text"])


# ---- refusals ----


def test_mistakes_are_refused_with_what_to_do(
    refused: Callable[..., str], toy: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second table: where this user has no engine running."""
    for flags, words in (
        ("--temprature 1 x", "No such option"),
        ("--gamma three x", "three"),
        ("--method magic x", "pearl-no-pre-verify"),
        ("--config /nowhere.yaml x", "/nowhere.yaml"),
        ("x y", "unexpected extra argument"),
        ("", "no prompt"),
        ("-", "no prompt"),
        ("''", "no prompt"),
        ("--max-tokens 600 123", "the context holds 512"),
        ("--control tcp://192.0.2.1:5555 x", "pearl keys FILE"),
        (
            "--control tcp://192.0.2.1:5555 --keys /nowhere/keys x",
            "cannot read the key file /nowhere/keys",
        ),
    ):
        assert words.lower() in refused(*PAIR, *shlex.split(flags)).lower()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PEARL_API_KEY", raising=False)
    tmp_path.chmod(0o700)
    for line, words in (
        *((f"{study} --habits", "--habits: ") for study in ("bench", "calibrate")),
        ("bench fast", "'fast'"),
        ("bench --prompts a=/x --prompts a=/y", "/x"),
        ("paper pearl --pair GPT", "no pair is called 'GPT'"),
        ("paper pearl --pair Llama --pair GPT", "no pair is called 'GPT'"),
        ("paper pearl --simulate-only --pair DeepSeek --table 2", "table 2 does not have DeepSeek"),
        ("paper theory --figures /dev/null/x", "--figures: cannot make /dev/null/x"),
        (f"generate 1 --connect {toy.directory} --trace {tmp_path}/t", "--trace records an engine"),
        ("chat --raw --system x", "which --raw does not use"),
        ("chat --load x --continue", "give one of them"),
        ("paper sssd --prompts /nowhere.jsonl", "/nowhere.jsonl"),
        ("paper Pearl", "No such command"),
        ("serve --http 0.0.0.0:0", "takes an API key"),
        ("serve --http nonsense", "HOST:PORT"),
        ("serve --http-model name", "--http-model goes with --http"),
        ("serve --tool-parser auto", "--tool-parser goes with --http"),
        ("serve --temperature 0.5", "--temperature goes with --http"),
        ("serve --http 127.0.0.1:0 --draft none --method pearl", "needs a draft"),
        (f"chat -q 1 --target {TOY} --draft {TOY}", "no chat template: chat with --raw"),
        (f"chat -q {'1' * 600} --raw --connect {toy.directory}", "too many tokens"),
        ("chat --temperature x", "temperature"),
        ("chat -q 1 --connect /nowhere", "no running engine of yours is named /nowhere"),
        ("stop /nowhere", "no running engine of yours is named /nowhere"),
        ("stop 1 --all", "not both"),
        ("chat -q 1 --connect", "no engine is running"),
        ("stop", "no engine of pearl serve is running"),
        ("stop --all", "no engine of pearl serve is running"),
    ):
        command, *arguments = shlex.split(line)
        assert words in refused(*arguments, command=command)


# ---- flags and settings ----


def test_every_setting_is_a_flag_and_every_flag_a_setting() -> None:
    fields = set(SETTING_NAMES)
    for name, more in {
        "generate": {"raw", "as_json", "stats", "connect"},
        "chat": {
            *("raw", "question", "system", "load", "goes_on"),
            *("show_draft", "markdown", "history", "stats", "connect"),
        },
        "serve": {
            *("http", "api_key", "model", "origins", "tool_parser", "reasoning_tags"),
            "log_requests",
        },
    }.items():
        command = cli.get_command(click.Context(cli), name)
        options = [p for p in command.params if isinstance(p, click.Option)]
        assert {p.name for p in options} == fields | more | {"config"}


def help_of(*words: str) -> str:
    shown = CliRunner().invoke(cli, [*words], catch_exceptions=False, terminal_width=4000).output
    return re.sub(r"[ \n]+", " ", shown)


def test_help_is_of_the_command_that_shows_it() -> None:
    """Other commands have other defaults than generate, and do not read every setting: that is no flag of theirs."""
    assert "Most tokens to generate; default: the checkpoint's" in help_of("generate", "--help")
    for words, tokens, seed in (
        (["bench"], "128; of an emulated pair 500", "0"),
        (["calibrate"], "64", "0"),
        (["check"], "16", None),
        (["disco", "train"], "128", "0"),
    ):
        shown = help_of(*words, "--help-all")
        assert f"Most tokens to generate. [default: {tokens}]" in shown
        assert ("Of all random draws; default: drawn" in shown) == (seed is None)
        assert (f"Of all random draws. [default: {seed}]" in shown) == (seed is not None)
        assert "--method" not in shown
        assert "--trace" not in shown
    assert "for sd and ssd the fastest one tried" in help_of("bench", "--help-all")


def test_help_names_the_usual_methods_and_help_all_every_one() -> None:
    usual, every = (help_of("generate", flag) for flag in ("--help", "--help-all"))
    assert "[auto|ar|ngram|head|sd|ssd|pearl|...]" in usual
    assert "pearl: draft and target at once; --help-all: 9 others. [default: auto]" in usual
    for name, method in METHODS.items():
        assert (f" {name}: {method.description}" in usual) == method.is_usual
        assert f" {name}: {method.description}" in every


def test_progress_counts_few_pieces_of_work_and_shares_of_many() -> None:
    progress = Progress()
    for total, done in ((23, "[3 of 23] "), (6000, "0% "), (None, "")):
        progress.add_task("checking", total=total, completed=3)
        assert console.amount_done(progress.tasks[-1]) == done


def test_short_names_of_data_types_are_flags_too() -> None:
    given: list[str] = []

    @click.command()
    @settings_options()
    def command(settings: Settings) -> None:
        given.append(settings.engine.target_dtype)

    assert (
        CliRunner().invoke(command, ["--target-dtype", "fp16"], catch_exceptions=False).exit_code
        == 0
    )
    assert given == ["float16"]


@pytest.mark.parametrize(
    "fits", [16, pytest.param(300, marks=pytest.mark.long)]
)  # a part; the merged file
def test_a_trace_that_does_not_fit_the_disk_is_no_success(tmp_path: Path, fits: int) -> None:
    """It ended with 0 and left its parts. A limit on a file's size stands for the disk's."""
    command = [
        sys.executable,
        "-m",
        "pearl",
        "generate",
        *SHORT,
        "--max-tokens",
        "300",
        "--json",
        "123",
    ]
    done = subprocess.run(
        [*command, "--trace", str(tmp_path / "t.json")],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (fits << 10, fits << 10)),
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "cannot write the trace" in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert len(json.loads(done.stdout)["tokens"]) == 300, "its text is there all the same"


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_what_an_encoding_lacks_is_escaped(
    pearl_here: Run, monkeypatch: pytest.MonkeyPatch, json_flag: list[str]
) -> None:
    """Under LANG=C or PYTHONIOENCODING=ascii it was a traceback."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "latin-1"))
    toy = "toy:vocab=400,alpha=0.8"
    run = pearl_here(
        "generate", "123", "--target", toy, "--draft", toy, "--max-tokens", "30", *json_flag
    )
    assert run.returncode == 0
    text = written.getvalue().decode("ascii")
    assert "\\u01" in text
    assert not json_flag or "\\u01" in ascii(json.loads(text)["text"])


@pytest.mark.parametrize("variable", ["TMPDIR", "PEARL_CACHE", None])
def test_a_path_that_is_no_utf8_is_refused_by_name(
    pearl_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    place = tmp_path / "bad\udcff"
    place.mkdir()
    model = [
        "--target",
        "embedded" if variable == "PEARL_CACHE" else TOY,
        "--draft",
        "none",
        "--method",
        "ar",
    ]
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", None)
    if variable:
        monkeypatch.setenv(variable, str(place))
    else:
        model[1] = str(place)
    run = pearl_here("generate", "123", *model)
    assert run.returncode == 2
    assert f"{'$' + variable if variable else 'target'}: " in run.stderr
    assert "is not UTF-8" in run.stderr


def _pipe(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8", newline="\n")
    )  # as Python opens it


def test_no_input_has_a_byte_order_mark_or_a_carriage_return(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a prompt; of a file of prompts; and of messages, which end where their lines do."""
    _pipe(monkeypatch, b"\xef\xbb\xbfTwo\r\nlines")
    assert generate.read_prompt(None, False) == "Two\r\nlines"
    (tmp_path / "it.txt").write_bytes(b"\xef\xbb\xbfHello")
    assert read_turns(tmp_path / "it.txt") == [("Hello",)]
    heard: list[str] = []
    _pipe(monkeypatch, b"\xef\xbb\xbf12\r\n34")
    monkeypatch.setattr(chat.ChatSession, "answer", lambda self, message: heard.append(message))
    monkeypatch.setattr(sys, "argv", ["pearl", "chat", *PAIR])
    with pytest.raises(SystemExit):
        main()
    assert heard == ["12", "34"]


# ---- terminals and pipes ----


ENDLESS = [
    sys.executable,
    "-m",
    "pearl",
    "generate",
    "1",
    "--config",
    "toy",
    "--max-tokens",
    "500000",
]
ENDLESS += ["--target", "toy:vocab=32,alpha=0.5", "--draft", "toy:vocab=32,alpha=0.5"]


@pytest.mark.parametrize(("is_interrupted", "code"), [(False, 1), (True, 130)])
def test_a_text_that_is_cut_short_ends_quietly(is_interrupted: bool, code: int) -> None:
    """By Ctrl-C, or as `pearl generate ... | head -c1` does: the reader has had enough."""
    process = subprocess.Popen(
        ENDLESS, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.read(1)
    if is_interrupted:
        process.send_signal(signal.SIGINT)
    else:
        process.stdout.close()
        process.stdout = None
    _, said = process.communicate(timeout=BOUND)
    assert process.returncode == code
    assert not {"Traceback", "Exception", "Error"} & set(re.findall(r"\w+", said))
    assert ("interrupted" in said) == is_interrupted


# ---- errors ----


@pytest.mark.parametrize(
    ("fault", "says", "advice"),
    [
        ("raise@drafting", "RuntimeError: a fault on purpose", "--log-level debug"),
        ("kill@drafting", "target worker was killed by signal 9", "lack of memory"),
        ("nan@drafting", "logits are not finite", "Try a wider dtype"),
    ],
)
def test_what_is_lost_is_told_once_with_what_to_do(
    fault: str, says: str, advice: str, pearl_here: Run
) -> None:
    with faulty.inflicted("target", fault):
        run = pearl_here("generate", "--target", TOY, "--draft", TOY, "--method", "ar", "1" * 48)
    assert run.returncode == 4
    assert run.stderr.count(says) == 1, run.stderr
    assert advice in run.stderr
    assert "Traceback" not in run.stderr
    assert len(run.stderr.splitlines()) < 8, run.stderr


def test_tables_and_bars_show_brackets_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A way to decode, a set of prompts and a path may have any; they were markup, and [/a] an error."""
    console.print_table(
        ["way", "set [/a]"], [["ngram,regex=[a-z]", "1"]], "note [b] :smile:\x1b[2J"
    )
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert all(text in shown for text in ("set [/a]", "ngram,regex=[a-z]", "note [b] :smile:"))
    monkeypatch.setenv("FORCE_COLOR", "1")
    with console.Bars() as bars:
        bars.begin("reading [/c]", 1)
        bars.advance(1, "[/d]")
    assert "reading [/c]" in capsys.readouterr().err


# ---- keys ----


def test_keys_are_made_once_and_serve(tmp_path: Path, pearl_here: Run) -> None:
    """The file works where it says, a second call leaves it, and only its name shows anywhere."""
    path = tmp_path / "pearl.keys"
    assert f"--keys {path}" in pearl_here("keys", str(path)).stderr
    made = path.read_text()
    again = pearl_here("keys", str(path))
    assert again.returncode == 2
    assert "is there already" in again.stderr
    assert path.read_text() == made
    run = pearl_here(
        "generate", *SHORT, "--keys", str(path), "--control", "tcp://127.0.0.1:*", "--json", "123"
    )
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert document["text"] == WANTED
    assert document["settings"]["engine"]["keys"] == str(path)
    assert not any(
        key in run.stdout + run.stderr for key in json.loads(made).values() if isinstance(key, str)
    )


def test_the_list_has_the_commands_with_their_own_first_lines() -> None:
    """It is a table, so that printing it imports no command."""
    listed = CliRunner().invoke(cli, ["--help"]).output
    assert len(COMMANDS) > 10
    for name, listing in COMMANDS.items():
        command = cli.get_command(click.Context(cli), name)
        assert command.name == name
        assert command.get_short_help_str(200) == listing.summary
        words = r"\s+".join(map(re.escape, listing.summary.split()))
        assert re.search(rf"^  {name} +{words}$", listed, re.MULTILINE), "whole, not truncated"


def _makes_command(decorator: ast.expr) -> bool:
    """Whether a decorator has examples, as commands do, and is not of a group, which has its own commands."""
    source = ast.unparse(decorator)
    is_of_group = re.match(r"(?!click\.)\w+\.command\(", source) is not None
    return "epilog=example(" in source and not is_of_group


def test_every_command_of_the_package_is_listed() -> None:
    """A command without a line in the table cannot be called."""
    package = Path(commands.__file__).parent
    written = set()
    for path in package.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(map(_makes_command, node.decorator_list)):
                written.add(f"{path.stem}:{node.name}")
    assert written == {listing.place for listing in COMMANDS.values()}


_HEAVY = {"torch", "transformers", "numpy", "scipy", "matplotlib"}
_ALL_HELP = """
import click
from pearl.cli import cli
def help_of(command, words):
    cli.main([*words, "--help"], standalone_mode=False)
    for name in command.list_commands(click.Context(command)) if isinstance(command, click.Group) else []:
        help_of(command.get_command(click.Context(command), name), [*words, name])
help_of(cli, [])
"""


@pytest.mark.parametrize(
    ("program", "heavy"),
    [
        (
            "from pearl.cli import cli\ncli.main(['--help'], standalone_mode=False)",
            _HEAVY | {"pydantic", "rich", "prompt_toolkit", "zmq"},
        ),
        (_ALL_HELP, _HEAVY),
        (
            "import pearl.cli.generate",
            {"torch", "transformers", "numpy", "prompt_toolkit", "asyncio"},
        ),
    ],
    ids=["help", "help of every command", "what starts an engine"],
)
def test_what_is_not_needed_is_not_imported(program: str, heavy: set[str]) -> None:
    """Importing it takes seconds of CPU."""
    code = f"{program}\nimport sys\nsys.exit(' '.join({heavy} & set(sys.modules)) or 0)"
    output(sys.executable, "-c", code)


def test_conflicts_are_told_before_any_process_starts(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both workers used to import torch first: seconds, for a mistake that the command line shows."""

    def start(*arguments: object, **options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("pearl.engine.processes.Popen", start)
    monkeypatch.setattr(subprocess, "Popen", start)
    assert "method pearl needs a draft model" in refused(
        "1", "--target", TOY, "--draft", "none", "--method", "pearl"
    )
    assert "no config.json" in refused("1", "--target", TOY, "--draft", str(tmp_path), code=3)
    said = refused("1", "--target", "./nowhere/model", code=3)
    assert "no such directory or .gguf file" in said
    assert said.count("nowhere/model") == 1, "told once"
    (tmp_path / "model.gguf").write_text("something else")
    assert "it is no GGUF file" in refused("1", "--target", str(tmp_path / "model.gguf"), code=3)
    for config, said in (
        ("{", "cannot be read"),
        ("[]", "names no model_type"),
        ('{"model_type": "llama"}', "weights"),
    ):
        (tmp_path / "config.json").write_text(config)
        assert said in refused("1", "--target", str(tmp_path), code=3)
    assert "different vocabularies" in refused(
        "1", "--target", str(tiny_model()), "--draft", TOY, code=3
    )
    assert "unknown key 'beta'" in refused("1", "--target", "toy:beta=1", "--draft", "none", code=3)
    assert "alpha between 0 and 1" in refused(
        "1", "--target", TOY, "--draft", "toy:alpha=2", code=3
    )
    assert "nccl is for two GPUs" in refused("1", *PAIR, "--tensors", "nccl", code=3)
    ours_alone = ("--forwards", "transformers")
    assert "draft_dtype int8 is for models of our" in refused(
        "1", "--draft-dtype", "int8", *ours_alone, code=3
    )
    assert "exact refuses" in refused("1", "--exact", *ours_alone, code=3)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = refused("1", "--target", "nobody/no-such-model", code=3)
    assert "the hub cannot be reached" in said
    assert len(said.splitlines()) == 1, "told once"
    monkeypatch.setattr(device, "GPU_FILES", ("no such device",))
    said = refused("1", *PAIR, "--target-device", "cuda:0", code=3)
    assert "target: device cuda:0 is not there: this machine shows no GPU" in said
