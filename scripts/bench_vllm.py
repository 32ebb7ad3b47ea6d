"""vLLM with PEARL's draft beside it, against vLLM alone and with its own draft model: tokens a second, side by side.

    python scripts/bench_vllm.py --python VLLM/bin/python --target DIR --draft MODEL --vllm-draft DIR --out FILE

Runs in PEARL's environment, on two cores; each way is a process of vLLM's environment (`scripts/setup_vllm`). The ways,
with the cores of target and draft, are decoded in turns, `--rounds` times; greedy, one text at a time, with the same
prompts. Prints medians of the rounds with their range, and writes all figures with the hardware. With `--trace`, a
trace of the last round of each way with PEARL goes to a file beside FILE; recording lengthens the proposer's calls.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SETS = ROOT / "pearl" / "lab" / "bench" / "sets"


@dataclass(frozen=True)
class Way:
    """How to decode: the cores of vLLM's process, and who drafts."""

    name: str
    cores: str
    drafts: str = ""


WAYS = (
    Way("vLLM alone, core 0", "0"),
    Way("vLLM alone, both cores", "0-1"),
    Way("vLLM draft_model, both on core 0", "0", "vllm"),
    Way("vLLM draft_model, both on both cores", "0-1", "vllm"),
    Way("PEARL: vLLM on core 0, draft service on core 1", "0", "pearl"),
    Way("the same, without n-grams", "0", "pearl-plain"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--python", help="vLLM's Python")
    parser.add_argument("--target", type=Path)
    parser.add_argument("--draft", help="PEARL's draft: as of `pearl draft serve`")
    parser.add_argument("--vllm-draft", type=Path, help="the same draft for vLLM's draft_model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument(
        "--set", default="summaries", help="prompts: a file of pearl/lab/bench/sets"
    )
    parser.add_argument("--most", type=int, default=8, help="drafted tokens a step, PEARL")
    parser.add_argument("--vllm-most", type=int, default=4, help="the same of draft_model")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--together", type=int, default=1, help="texts at once")
    parser.add_argument("--ways", default=",".join(map(str, range(len(WAYS)))))
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker.read_text()))
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    figures: dict[str, list[dict[str, Any]]] = {}
    ways = [WAYS[int(index)] for index in options.ways.split(",")]
    for _ in range(options.rounds):
        for way in ways:
            result = decode(way, options)
            figures.setdefault(way.name, []).append(result)
            note = ""
            if "alone" in result:
                alone = result.pop("alone")
                figures.setdefault(f"{way.name}: drafts off", []).append(alone)
                note = f"; with drafts off, in turns, {alone['rate']:.2f}"
            rate = result["rate"]
            print(f"{way.name:48} {rate:7.2f} tokens/s{note}", file=sys.stderr, flush=True)
    texts = {json.dumps(result["texts"]) for results in figures.values() for result in results}
    document = {
        "processor": processor(),
        "settings": {name: str(value) for name, value in vars(options).items()},
        "texts": len(texts),
        "figures": figures,
    }
    options.out.write_text(json.dumps(document, indent=1))
    print(table(figures, len(texts)))


def table(figures: dict[str, list[dict[str, Any]]], num_texts: int) -> str:
    base = statistics.median(result["rate"] for result in next(iter(figures.values())))
    lines = [
        "| | tokens/s | times | tokens a step | step, ms | propose within 1 ms |",
        "|---|---|---|---|---|---|",
    ]
    for name, results in figures.items():
        rates = [result["rate"] for result in results]
        rate = statistics.median(rates)
        last = results[-1]
        at_once = f"{last['at_once']:.2f}" if last["calls"] else "-"
        lines.append(
            f"| {name} | {rate:.2f} ({min(rates):.2f} to {max(rates):.2f}) | {rate / base:.2f} | "
            f"{last['tokens_per_step']:.2f} | {last['step_ms']:.0f} | {at_once} |"
        )
    lines.append(f"{num_texts} different set(s) of texts among all runs.")
    return "\n".join(lines)


def decode(way: Way, options: argparse.Namespace) -> dict[str, Any]:
    """One run of a way, in a process of its own."""
    # Imported here: `-P` hides this folder from the process that runs this file in vLLM's environment.
    from draft_service import draft_service

    plan: dict[str, Any] = {
        "model": str(options.target),
        "dtype": options.dtype,
        "tokens": options.tokens,
        "together": options.together,
        "prompts": prompts(options),
        "extra": {},
    }
    environment = os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": way.cores,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "PYTHONPATH": str(ROOT),
    }
    environment.pop("OMP_NUM_THREADS", None)
    if way.drafts == "vllm":
        plan["extra"]["speculative_config"] = {
            "method": "draft_model",
            "model": str(options.vllm_draft),
            "num_speculative_tokens": options.vllm_most,
        }
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o700)
        plan_file = Path(directory, "plan.json")
        command = [
            "taskset",
            "-c",
            way.cores,
            options.python,
            "-P",
            __file__,
            "--worker",
            str(plan_file),
        ]
        if not way.drafts.startswith("pearl"):
            plan_file.write_text(json.dumps(plan))
            return run(command, environment)
        address = f"ipc://{directory}/draft"
        pearl = {"address": address, "ngrams": way.drafts == "pearl"}
        flags = ["--slots", str(options.together), "--log-level", "info"]
        trace = options.out.with_suffix(f".{way.drafts}.trace.json").absolute()
        if options.trace:
            pearl["trace"] = str(trace)
            flags += ["--trace", str(trace)]
            for part in trace.parent.glob(f"{trace.name}.*.part"):
                part.unlink()
        plan["extra"]["speculative_config"] = {
            "method": "custom_class",
            "model": "pearl.vllm.PearlProposer",
            "num_speculative_tokens": options.most,
        }
        plan["extra"]["additional_config"] = {"pearl": pearl}
        plan_file.write_text(json.dumps(plan))
        with draft_service(options.draft, address, *flags):
            result = run(command, environment)
        if options.trace:
            merge = [sys.executable, "-m", "pearl", "trace", "merge", str(trace)]
            subprocess.run(merge, cwd=ROOT, check=True)
        return result


def run(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def prompts(options: argparse.Namespace) -> list[str]:
    lines = (SETS / f"{options.set}.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines[: options.prompts]]


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.partition(':')[2].strip()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}"
    return "unknown"


def work(plan: dict[str, Any]) -> None:
    """In vLLM's environment: decode the plan's prompts, print the figures."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        plan["model"],
        dtype=plan["dtype"],
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
        **plan["extra"],
    )
    chats = [[{"role": "user", "content": prompt}] for prompt in plan["prompts"]]
    warm = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    engine.chat(chats[:1], warm, use_tqdm=False)
    worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    drafter = getattr(worker.model_runner, "drafter", None)
    watch = Watch(engine.llm_engine, drafter if "additional_config" in plan["extra"] else None)
    sampling = SamplingParams(temperature=0, max_tokens=plan["tokens"], ignore_eos=True)
    together = plan["together"]
    figures: dict[str, Any] = {}
    for start in range(0, len(chats), together):
        for name in watch.modes:
            mode = watch.begin(name)
            answers = engine.chat(chats[start : start + together], sampling, use_tqdm=False)
            mode.texts += [list(answer.outputs[0].token_ids) for answer in answers]
            watch.end()
    for name in watch.modes:
        figures[name] = watch.begin(name).figures()
    close = getattr(drafter, "close", lambda: None)
    close()
    result = figures.pop("drafts")
    print(json.dumps(result | figures), flush=True)


@dataclass
class Mode:
    """What was decoded with drafts, or without."""

    seconds: float = 0.0
    steps: int = 0
    texts: list[list[int]] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)  # seconds of each call of the proposer

    def figures(self) -> dict[str, Any]:
        tokens = sum(map(len, self.texts))
        at_once = sum(seconds <= 1e-3 for seconds in self.calls)
        return {
            "rate": tokens / self.seconds,
            "tokens_per_step": tokens / self.steps,
            "step_ms": 1000 * self.seconds / self.steps,
            "calls": len(self.calls),
            "at_once": at_once / max(1, len(self.calls)),
            "texts": self.texts,
        }


class Watch:
    """Counts steps and times. With PEARL's proposer each text is decoded twice, in turns: without drafts, and with."""

    def __init__(self, engine: Any, proposer: Any) -> None:
        self.modes = ("drafts",) if proposer is None else ("alone", "drafts")
        self._modes = {name: Mode() for name in self.modes}
        self._mode = self._modes["drafts"]
        self._proposes = True
        self._began = 0.0
        self._step = engine.step
        engine.step = self._counted
        if proposer is not None:
            self._propose = proposer.propose
            proposer.propose = self._timed

    def begin(self, name: str) -> Mode:
        self._mode = self._modes[name]
        self._proposes = name == "drafts"
        self._began = time.perf_counter()
        return self._mode

    def end(self) -> None:
        self._mode.seconds += time.perf_counter() - self._began

    def _counted(self) -> Any:
        self._mode.steps += 1
        return self._step()

    def _timed(self, sampled: Any, *arguments: Any, **more: Any) -> Any:
        if not self._proposes:
            return [[] for _ in sampled]
        began = time.perf_counter()
        windows = self._propose(sampled, *arguments, **more)
        self._mode.calls.append(time.perf_counter() - began)
        return windows


if __name__ == "__main__":
    main()
