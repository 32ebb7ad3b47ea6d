"""`scripts/prove_gpu.py` and `scripts/peer_pearl.py`, rehearsed on a CPU with tiny models and loops of our own."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from pearl.models.runner import feed_chain
from pearl.models.transformers.runner import HFRunner
from tests.conftest import output
from tests.tiny import random_llama, tiny_model

Script = Any


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
        yield importlib.import_module("prove_gpu")


@pytest.mark.slow
@pytest.mark.parametrize("left_out", ["tests", pytest.param("", marks=pytest.mark.long)])
def test_every_step_passes_in_a_rehearsal(script: Script, tmp_path: Path, left_out: str) -> None:
    """The step `tests` starts pytest, which takes as long as all others."""
    names = [name for name in script.STEPS if name != left_out]
    only = [part for name in names for part in ("--only", name)]
    run = CliRunner().invoke(
        script.main, ["--rehearse", *only, "--json", str(tmp_path / "found.json")]
    )
    found = json.loads((tmp_path / "found.json").read_text())
    steps = [(step["step"], step["passed"], step["error"]) for step in found["steps"]]
    assert steps == [(name, True, "") for name in names]
    assert all(step["figures"] for step in found["steps"])
    assert found["rehearsal"]
    assert found["hardware"]["versions"]["torch"] == torch.__version__
    assert run.exit_code == 0, run.output
    table = found["table"]  # which is to be pasted
    assert "\n".join(table) in run.output
    assert len(table) == len(steps) + 2 <= 12
    assert max(map(len, table)) <= 80
    assert table[-1].startswith("all passed")


def test_bench_forward_takes_the_commands_that_it_shows(script: Script) -> None:
    bench = importlib.import_module("bench_forward")
    commands = re.findall(r"python scripts/bench_forward.py([^#\n]*)", bench.__doc__)
    assert len(commands) == 3
    for command in commands:
        bench.main.make_context("bench_forward", command.split())


def test_bench_forward_measures(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = importlib.import_module("bench_forward")
    short = partial(bench.bandwidth, floats=1 << 20)
    monkeypatch.setattr(bench, "bandwidth", short)
    model = str(tiny_model())
    flags = ["--model", model, "--device", "cpu", "--context", "8", "--repeats", "1", "--json"]
    run = CliRunner().invoke(bench.main, flags)
    assert run.exit_code == 0, run.output
    about = json.loads(run.stdout)
    assert about["draft_step_seconds"] > 0
    assert about["read_bytes_per_second"] > 0


def test_a_draft_that_proposes_several_tokens_at_once_is_measured(script: Script) -> None:
    """Its guesses come true, because the model writes the same token again and again."""
    bench = importlib.import_module("bench_forward")
    model = random_llama(256)
    with torch.no_grad():
        for weights in model.parameters():
            weights.zero_()
        model.model.embed_tokens.weight.fill_(1.0)
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight[7] = 1.0
    runner = HFRunner(model, 256)
    feed_chain(runner, [7] * 32, 1)
    assert bench.step_seconds(runner, 32, chains=False) > 0


@pytest.mark.parametrize(
    ("code", "said", "passed"),
    [
        (0, "3 passed, 2 skipped in 1.00s", 3),
        (1, "FAILED tests/test_a.py::b\n1 failed in 1.00s", 0),
    ],
)
def test_tests_marked_gpu_are_counted(
    script: Script, monkeypatch: pytest.MonkeyPatch, code: int, said: str, passed: int
) -> None:
    commands = []

    def run(command: list[str], **options: Any) -> CompletedProcess[str]:
        commands.append(command)
        return CompletedProcess(command, code * (len(commands) > 1), f"{said}\n", "")

    monkeypatch.setattr(script.subprocess, "run", run)
    count, failures = script.tests(script.REHEARSAL)
    assert {"-m", "gpu"} <= set(commands[1])
    assert count.value == passed
    assert failures.passed == (code == 0)
    assert code == 0 or "FAILED tests/test_a.py::b" in failures.detail


def test_steps_that_fail_are_named_and_the_others_run(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(_: object) -> Iterator[object]:
        yield script.Measurement("so far", 1.0)
        raise RuntimeError("CUDA error")

    bad, good = (
        script.Measurement("too slow", 2.0, "ms", "at most 1", False),
        script.Measurement("fine", 3.0),
    )
    for name, step in (
        ("rows", breaks),
        ("graphs", lambda _: iter([bad])),
        ("speed", lambda _: iter([good])),
    ):
        monkeypatch.setitem(script.STEPS, name, step)
    wanted = [part for name in ("rows", "graphs", "speed") for part in ("--only", name)]
    run = CliRunner().invoke(
        script.main, ["--rehearse", *wanted, "--json", str(tmp_path / "found.json")]
    )
    assert run.exit_code == 1
    assert re.search(
        r"^rows       FAIL +\d+ s  RuntimeError: CUDA error$", run.output, re.MULTILINE
    )
    assert re.search(r"^graphs     FAIL +\d+ s  too slow 2 ms$", run.output, re.MULTILINE)
    assert "failed: rows, graphs" in run.output
    found = json.loads((tmp_path / "found.json").read_text())["steps"]
    errors = [(step["passed"], step["error"], len(step["figures"])) for step in found]
    assert errors == [(False, "RuntimeError: CUDA error", 1), (False, "", 1), (True, "", 1)]
    if not torch.cuda.is_available():
        refused = CliRunner().invoke(script.main, [])
        assert refused.exit_code == 2
        assert "--rehearse" in refused.output


SCRIPT = Path(__file__).parent.parent / "scripts" / "peer_pearl.py"
# A checkout with the names and calls that the script relies on. Its loops decode greedily, two tokens beyond the limit,
# with a cache as tuples; that of two processes gathers a row of the target's and names a GPU that is not there.
ENGINE = """
import torch
from accelerate import Accelerator


class Decoding:
    def __init__(self, args):
        self.args, self.accelerator = args, Accelerator()
        assert self.accelerator.num_processes == (2 if args.eval_mode == "para_sd" else 1)

    @torch.no_grad()
    def autoregressive_sampling(self, prefix, model=None):
        model, x, past = model or self.target_model, prefix, None
        while x.shape[1] < prefix.shape[1] + self.args.max_tokens + 2:
            output = model(x if past is None else x[:, -1:], past_key_values=past, use_cache=True)
            past = [(k[:, :, : x.shape[1]], v[:, :, : x.shape[1]]) for k, v in output.past_key_values]
            assert past[0][0].shape[2] == x.shape[1]
            assert output.logits.dtype is torch.float32
            x = torch.cat((x, output.logits[:, -1, : self.vocab_size].argmax(-1, keepdim=True)), dim=1)
        return x

    def speculative_decoding(self, prefix):
        assert self.draft_model.device == self.target_model.device
        return self.autoregressive_sampling(prefix)

    def parallel_speculative_decoding(self, prefix):
        first = self.accelerator.is_main_process
        x = self.autoregressive_sampling(prefix, self.draft_model if first else self.target_model)
        return self.accelerator.gather(x.to("cuda:1"))[[1]]
"""


@pytest.mark.long
@pytest.mark.slow
def test_their_loops_and_ours_decode_in_turns(tmp_path: Path) -> None:
    """Of their tokens those up to the limit count; greedy ones in float32 are ours."""
    (tmp_path / "peer" / "src").mkdir(parents=True)
    (tmp_path / "peer" / "src" / "engine.py").write_text(ENGINE)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the inn"}\n{"prompt": "a"}\n')
    models = ["--target", str(tiny_model()), "--draft", str(tiny_model(noise=0.3))]
    arguments = [
        "--prompts",
        tmp_path / "prompts.jsonl",
        "--max-tokens",
        12,
        "--json",
        tmp_path / "it.json",
    ]
    said = output(sys.executable, SCRIPT, tmp_path / "peer", *models, *arguments, timeout=300)
    made = json.loads((tmp_path / "it.json").read_text())["samples"]
    systems = ["ours: ar", "ours: sd", "ours: pearl, published", "ours: pearl"]
    systems += ["theirs: large", "theirs: sd", "theirs: para_sd"]
    assert [one["system"] for one in made] == systems * 2
    for one in made:
        assert one["same"] == one["tokens"] == one["of"], one
        assert one["seconds"] > 0
        if one["system"].startswith("theirs"):
            assert one["returned"] == 14
    assert all(name in said for name in systems)
