"""The proposer on a stand-in for vLLM whose steps last a given time, against PEARL's own engine: one emulated pair.

    python scripts/bench_proposer.py [--alpha .8] [--t-target .05] [--t-draft .01] [--tokens 300] [--rounds 3]

Both decode the same text greedily: the stand-in here, with a draft service of its own; the engine with its two workers.
Prints tokens a second of each round, their median ratio, and how often a window was ready at once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence

from draft_service import draft_service

from pearl import Engine, SamplingParams
from pearl.models.toy import coin_pair
from pearl.vllm import PearlProposer
from tests.vllm_steps import Steps, vllm_config

PROMPT = [1, 2, 3]
_NAP_SECONDS = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alpha", type=float, default=0.8)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--t-target", type=float, default=0.05)
    parser.add_argument("--t-draft", type=float, default=0.01)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--together", type=int, default=1, help="requests at once")
    parser.add_argument("--most", type=int, default=8)
    options = parser.parse_args()
    spec = f"toy:vocab={options.vocab},alpha={options.alpha},coin=1,context=8192"
    ratios: list[float] = []
    for _ in range(options.rounds):
        own = engine_rate(spec, options)
        outside = proposer_rate(spec, options)
        ratios.append(outside / own)
        print(
            f"engine {own:.2f} tokens/s, proposer {outside:.2f}, ratio {ratios[-1]:.3f}", flush=True
        )
    print(
        f"median ratio {statistics.median(ratios):.3f}; the target alone {1 / options.t_target:.1f} tokens/s"
    )


def engine_rate(spec: str, options: argparse.Namespace) -> float:
    slots = options.together
    with Engine(
        spec, spec, target_pace=options.t_target, draft_pace=options.t_draft, slots=slots
    ) as engine:
        alphabet = engine.tokenizer.tokens()
        prompts = ["".join(str(alphabet[id + i]) for id in PROMPT) for i in range(slots)]
        sampling = SamplingParams(method="pearl", temperature=0.0, max_tokens=options.tokens)
        engine.generate(prompts, sampling.changed(max_tokens=40))
        began = time.monotonic()
        results = engine.generate(prompts, sampling)
        seconds = time.monotonic() - began
        return sum(len(result.tokens) for result in results) / seconds


def proposer_rate(spec: str, options: argparse.Namespace) -> float:
    target, _ = coin_pair(options.vocab, options.alpha)
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o700)
        address = f"ipc://{directory}/draft"
        with draft_service(spec, address, "--draft-pace", str(options.t_draft)):
            config = vllm_config(address, options.most, 8192, options.vocab)
            proposer = PearlProposer(config)
            while proposer.served is not None and not proposer.served.link.is_ready:
                proposer.load_model()
            steps = PacedSteps(proposer, target, options)
            steps.decode(40)
            rate = steps.decode(options.tokens)
            times = sorted(steps.times)
            at_once = sum(taken <= 1e-3 for taken in times) / len(times)
            print(
                f"  proposer: {steps.num_steps} steps, within 1 ms {at_once:.2f}, "
                f"median {1000 * times[len(times) // 2]:.2f} ms, foreseen {proposer._foreseen:.2f}"
            )
            proposer.close()
            return rate


class PacedSteps(Steps):
    """Steps that last `t_target` each, until the proposer is called."""

    def __init__(
        self, proposer: PearlProposer, target: object, options: argparse.Namespace
    ) -> None:
        self._distribution = target
        super().__init__(proposer, self._token, rows=options.together, limit=8192)
        self._options = options
        self._due = 0.0
        self.times: list[float] = []
        self._propose = proposer.propose
        proposer.propose = self._timed  # type: ignore[method-assign]

    def _token(self, tokens: Sequence[int]) -> int:
        return int(self._distribution(tokens).argmax())  # type: ignore[operator]

    def _timed(self, *arguments: object, **more: object) -> list[list[int]]:
        while (left := self._due - time.monotonic()) > 0:
            time.sleep(min(left, _NAP_SECONDS))
        began = time.monotonic()
        windows = self._propose(*arguments, **more)  # type: ignore[arg-type]
        self.times.append(time.monotonic() - began)
        return windows

    def step(self) -> None:
        self._due = time.monotonic() + self._options.t_target
        super().step()

    def decode(self, count: int) -> float:
        for name in range(self._options.together):
            self.submit(name, [id + name for id in PROMPT], count)
        began = time.monotonic()
        self.run()
        return count * self._options.together / (time.monotonic() - began)


if __name__ == "__main__":
    main()
