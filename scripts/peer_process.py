"""One process of `bench_peers.py`: carries out a plan, given as JSON, with one system, and prints a `Report` as JSON.

PEARL runs in its own environment, the others in that of `scripts/setup_peers`.  So each system is imported where it is
used, and nothing else here is.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, Protocol

CONTEXT = 1024  # tokens
FORWARDS = "forwards"  # the kind of a plan that times forwards, and decodes nothing
ROWS = (1, 8, 16)  # tokens of a timed forward
_CACHED = 256  # tokens in the cache of a timed forward
_REPEATS = 15  # forwards of each size
_WARM_UP = 4  # tokens


@dataclass
class Plan:
    """What a process does.

    Attributes:
        system: a key of `SYSTEMS`.
        kind: PEARL's method; how another system drafts, "" for not at all; or `FORWARDS`.
        cores: number of cores to compute on.
        target: a model as `Engine` takes it, or the path of a GGUF file.
        draft: likewise; "" for none.
        prompts: token ids.
    """

    system: str
    kind: str
    cores: int
    target: str
    draft: str
    prompts: list[list[int]]
    max_tokens: int


@dataclass
class Text:
    """A greedy text.

    Attributes:
        tokens: number of tokens after the first.
        seconds: duration of these.
        first_seconds: from the request to the first token.
        drafted: number of tokens that were drafted; None if the system does not say.
    """

    text: str
    tokens: int
    seconds: float
    first_seconds: float
    drafted: int | None = None


@dataclass
class Report:
    """What a process measured.

    Attributes:
        version: of the system, and what it was built for.
        forwards: number of tokens fed -> milliseconds.
        megabytes: peak memory of all processes of the system.
    """

    version: str
    texts: list[Text] = field(default_factory=list)
    forwards: Mapping[int, float] = field(default_factory=dict)
    megabytes: float = 0.0


class System(Protocol):
    """A system that has loaded its models."""

    version: str

    def decode(self, prompt: list[int], max_tokens: int) -> Text: ...


class Pearl:
    """PEARL's engine: with its draft if the method may use it and there are two cores for two processes."""

    def __init__(self, plan: Plan) -> None:
        from pearl import Engine, __version__

        draft = "none"
        if plan.draft and plan.cores > 1 and plan.kind in ("auto", "pearl"):
            draft = plan.draft
        self._engine = Engine(
            plan.target, draft, max_context=CONTEXT, profile="none", log_level="error"
        )
        # The workers' CPU time counts as this process's only if they end before it.
        atexit.register(self._engine.close)
        self._method = plan.kind
        self.version = f"PEARL {__version__}"

    def decode(self, prompt: list[int], max_tokens: int) -> Text:
        from pearl import SamplingParams

        greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        (result,) = self._engine.generate([prompt], greedy, method=self._method)
        statistics = result.statistics
        return Text(
            result.text,
            statistics.late_tokens,
            statistics.late_seconds,
            statistics.seconds_to_first_token,
        )


class LlamaCpp:
    """llama.cpp's server, in this process, without HTTP."""

    def __init__(self, plan: Plan) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = plan.target
        params.n_ctx = CONTEXT
        params.n_parallel = 1
        params.cache_ram_mib = 0  # keep no earlier prompts
        params.n_ctx_checkpoints = 0  # they would cut the last tokens off a prompt's forward
        params.verbosity = 0
        for threads in (params.cpuparams, params.cpuparams_batch):
            threads.n_threads = plan.cores
        if plan.kind:
            kinds = xllamacpp.common_speculative_type
            name = plan.kind.upper().replace("-", "_")
            params.speculative.types = [kinds[f"COMMON_SPECULATIVE_TYPE_{name}"]]
        if plan.kind.startswith("draft"):
            draft = params.speculative.draft
            draft.mparams.path = plan.draft
            for threads in (draft.cpuparams, draft.cpuparams_batch):
                threads.n_threads = plan.cores
        self._server = xllamacpp.Server(params)
        features = []
        for feature in xllamacpp.get_system_info().partition(":")[2].split("|"):
            name, _, value = feature.partition("=")
            if value.strip() == "1":
                features.append(name.strip())
        self.version = f"xllamacpp {xllamacpp.__version__} ({', '.join(features)})"

    def decode(self, prompt: list[int], max_tokens: int) -> Text:
        answer = self.complete(prompt, max_tokens)
        timings = answer["timings"]
        return Text(
            answer["choices"][0]["text"],
            timings["predicted_n"] - 1,  # counts the first token, whose time is the prompt's
            timings["predicted_ms"] / 1e3,
            timings["prompt_ms"] / 1e3,
            timings.get("draft_n", 0),
        )

    def complete(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """Return the server's answer, which reuses the prefix that the prompt shares with the last text."""
        request = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}
        answer = self._server.handle_completions(request)
        if "timings" not in answer:
            raise RuntimeError(f"llama.cpp refuses: {answer}")
        return dict(answer)


class OpenVino:
    """OpenVINO GenAI's pipeline, which converts the GGUF file as it loads."""

    def __init__(self, plan: Plan) -> None:
        import openvino_genai

        settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": plan.cores}
        if plan.kind:
            settings["prompt_lookup"] = True
        self._pipeline = openvino_genai.LLMPipeline(plan.target, "CPU", **settings)
        self._greedy = self._pipeline.get_generation_config()
        self._greedy.do_sample = False
        if plan.kind:  # as in the sample of its documentation
            self._greedy.num_assistant_tokens = 5
            self._greedy.max_ngram_size = 3
        self.version = f"OpenVINO GenAI {openvino_genai.__version__}"

    def decode(self, prompt: list[int], max_tokens: int) -> Text:
        import numpy
        import openvino

        self._greedy.max_new_tokens = max_tokens
        ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
        result = self._pipeline.generate(ids, self._greedy)
        tokens = result.tokens[0]
        metrics = result.perf_metrics
        first_seconds = metrics.get_ttft().mean / 1e3
        seconds = metrics.get_generate_duration().mean / 1e3
        text = self._pipeline.get_tokenizer().decode(tokens)
        return Text(text, len(tokens) - 1, seconds - first_seconds, first_seconds)


SYSTEMS: dict[str, Callable[[Plan], System]] = {
    "PEARL": Pearl,
    "llama.cpp": LlamaCpp,
    "OpenVINO": OpenVino,
}


def pearl_forwards(plan: Plan) -> Report:
    """Time forwards of PEARL's target."""
    import torch

    from pearl import __version__
    from pearl.config import ModelConfig
    from pearl.models.checkpoints.loading import load_runner
    from pearl.models.runner import feed_chain

    runner = load_runner(ModelConfig(plan.target, max_context=CONTEXT), torch.device("cpu"))
    runner.use_threads(plan.cores)
    cached = cached_tokens(plan)
    feed_chain(runner, cached, 1)
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for tokens in fed_tokens():
        runner.rollback(len(cached))
        began = time.perf_counter()
        feed_chain(runner, tokens, 1)
        times[len(tokens)].append(1e3 * (time.perf_counter() - began))
    return Report(f"PEARL {__version__}", forwards=medians(times))


def llama_cpp_forwards(plan: Plan) -> Report:
    """Time forwards of llama.cpp's target: those of a prompt's last tokens, whose others are in the cache."""
    llama_cpp = LlamaCpp(replace(plan, kind=""))
    cached = cached_tokens(plan)
    llama_cpp.complete(cached, 1)
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for tokens in fed_tokens():
        timings = llama_cpp.complete(cached + tokens, 1)["timings"]
        if timings["prompt_n"] != len(tokens):
            raise RuntimeError(f"llama.cpp fed {timings['prompt_n']} tokens, not {len(tokens)}")
        times[len(tokens)].append(timings["prompt_ms"])
    return Report(llama_cpp.version, forwards=medians(times))


def cached_tokens(plan: Plan) -> list[int]:
    """Return the prompts as one sequence, cut or repeated to `_CACHED` tokens."""
    tokens = list(chain.from_iterable(plan.prompts))
    repeats = -(-_CACHED // len(tokens))
    return (tokens * repeats)[:_CACHED]


def fed_tokens() -> Iterator[list[int]]:
    """Yield the tokens of each timed forward. No two begin with the same token, so that no cache holds them."""
    first = 1000
    for _ in range(_REPEATS):
        for rows in ROWS:
            yield list(range(first, first + rows))
            first += 1


def medians(times: Mapping[int, list[float]]) -> dict[int, float]:
    return {rows: median(values) for rows, values in times.items()}


TIMED = {"PEARL": pearl_forwards, "llama.cpp": llama_cpp_forwards}


def decode_texts(plan: Plan) -> Report:
    """Decode the prompts one by one, after a few tokens to warm up."""
    system = SYSTEMS[plan.system](plan)
    system.decode(plan.prompts[0][:8], _WARM_UP)
    texts = [system.decode(prompt, plan.max_tokens) for prompt in plan.prompts]
    return Report(system.version, texts, megabytes=peak_megabytes("self"))


def peak_megabytes(process: str) -> float:
    """Return the peak memory of a process and of those that it started, each at its own peak."""
    folder = Path("/proc") / process
    _, _, peak = (folder / "status").read_text().partition("VmHWM:")
    megabytes = int(peak.split()[0]) / 1024
    for children in folder.glob("task/*/children"):
        for child in children.read_text().split():
            megabytes += peak_megabytes(child)
    return megabytes


def main() -> None:
    plan = Plan(**json.load(sys.stdin))
    usable = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, usable[: plan.cores])
    if plan.kind == FORWARDS:
        report = TIMED[plan.system](plan)
    else:
        report = decode_texts(plan)
    print(json.dumps(asdict(report)), flush=True)


if __name__ == "__main__":
    main()
