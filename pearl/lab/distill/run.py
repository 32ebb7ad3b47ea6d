"""A run: rounds of answering and learning, which can be resumed after a kill.

Every random number is keyed by the seed and its place in the run, so a run that was killed and resumed gives the same
bytes as one that was not, on the same machine with the same number of threads.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pearl.errors import ConfigError, DistillError
from pearl.lab import Watcher
from pearl.lab.distill.answers import Answer, answer, batched
from pearl.lab.distill.config import DistillConfig
from pearl.lab.distill.draft import export, head, new_draft
from pearl.lab.distill.learning import Learner, generator, plan
from pearl.lab.distill.prompts import attempts, invent, training_prompts
from pearl.lab.distill.storage import (
    Place,
    locked,
    read_answers,
    read_json,
    restore_checkpoint,
    save_checkpoint,
    write_answers,
    write_json,
    written_whole,
)
from pearl.lab.distill.teacher import choose_device, load_teacher

DRAFT, HELD_OUT, ANSWERS = "draft", "held-out", "answers.jsonl"  # names within a run's directory
_FORMAT = 2  # of the files of a run


class Distillation:
    """One run in the directory `config.out`. Raises `PearlError`, and then leaves all saved files whole."""

    def __init__(self, config: DistillConfig, watcher: Watcher, *, resume: bool = False) -> None:
        self._directory = Path(config.out).expanduser()
        self._watcher = watcher
        self._given = training_prompts([Path(path) for path in config.prompts])
        self._teacher = load_teacher(
            config.target,
            choose_device(config.device),
            config.dtype,
            trust_remote_code=config.trust_remote_code,
            progress=watcher.say,
        )
        self._config, settings = config, self._settle(config, resume)
        draft = new_draft(self._config, self._teacher)
        write_json(self._directory / "run.json", settings)
        self._learner = Learner(self._config, draft)
        self._place = restore_checkpoint(self._directory / "checkpoints", draft, self._learner.optimizers)

    def _settle(self, config: DistillConfig, resume: bool) -> dict[str, Any]:
        """What run.json records of the settings.

        Raises `ConfigError` if the directory holds a run and `resume` is False, or a run with other settings.
        """
        path = self._directory / "run.json"
        before = read_json(path)
        if before is not None and not resume:
            raise ConfigError(
                f"{self._directory} holds a run already: --resume goes on with it; or choose another --out"
            )
        own = _settings(config) | {"target_digest": self._teacher.digest, "format": _FORMAT}
        differing = sorted(name for name in own if before is not None and before.get(name) != own[name])
        if differing:
            raise ConfigError(
                f"{path} has other settings than these: {', '.join(differing)}. A run keeps what it began with"
            )
        return own

    def run(self) -> Path:
        """Run all rounds, or those that are left; return the draft's directory."""
        config = self._config
        with locked(self._directory):
            held_out, pool = self._answers(HELD_OUT, config.held_out), list[Answer]()
            if not (self._directory / "log.jsonl").exists():
                self._log(held_out)
            for round in range(config.rounds):
                fresh = self._answers(f"round-{round:03d}", config.answers_per_round)
                pool += fresh
                if round >= self._place.round:
                    self._learn(round, pool, len(fresh))
                    self._export()
                    self._log(held_out)
                    self._save()
            return self._export()

    def _learn(self, round: int, pool: Sequence[Answer], fresh: int) -> None:
        """Train on one round, from the current place on. `fresh`: number of answers that the round added."""
        batches = plan(self._config, round, [a.length for a in pool], fresh)
        done = self._place.batch
        self._watcher.begin(f"round-{round:03d}: learning", len(batches) - done)
        for number in range(done, len(batches)):
            progress = (round + number / len(batches)) / self._config.rounds
            place = self._place
            loss, tokens = self._learner.step([pool[i] for i in batches[number]], progress, place.step)
            self._place = Place(round, number + 1, place.step + 1, place.tokens + tokens)
            self._watcher.advance(1, f"loss {loss:.3f}, {self._place.tokens / 1e6:.2f} M tokens")
            if self._place.step % self._config.checkpoint_steps == 0:
                self._save()
        self._place = replace(self._place, round=round + 1, batch=0)

    def _save(self) -> None:
        save_checkpoint(self._directory / "checkpoints", self._place, self._learner.draft, self._learner.optimizers)

    def _export(self) -> Path:
        about = {"target_digest": self._teacher.digest, "tokens_seen": self._place.tokens}
        path = self._directory / DRAFT
        export(self._learner.draft, self._config.target, path, about | {"settings": _settings(self._config)})
        return path

    def _log(self, held_out: Sequence[Answer]) -> None:
        """Measure, report, and append to the log. Raises `DistillError`."""
        agreement, tokens = self._learner.agreement(held_out), self._place.tokens
        self._watcher.say(f"{tokens:,} tokens seen: agreement on held-out answers {agreement:.3f}")
        entry = {"step": self._place.step, "tokens": tokens, "held_out_agreement": agreement}
        try:
            with (self._directory / "log.jsonl").open("a") as file:
                file.write(json.dumps(entry | {"unix_time": round(time.time(), 1)}) + "\n")
        except OSError as error:
            raise DistillError(f"cannot write the log in {self._directory}: {error}") from error

    # Answering

    def answer(self) -> Path:
        """Answer the prompts of all rounds and learn nothing; return a file with a line {"prompt", "text"} for each."""
        path, lines, count = self._directory / ANSWERS, list[str](), self._config.answers_per_round
        with locked(self._directory):
            for name in [f"round-{round:03d}" for round in range(self._config.rounds)]:
                answers = self._answers(name, count)
                for prompt, one in zip(self._prompts(name, count), answers, strict=True):
                    text = self._teacher.tokenizer.decode(one.tokens)
                    lines.append(json.dumps({"prompt": prompt, "text": text}) + "\n")
            with written_whole(path) as building:
                building.write_text("".join(lines))
        return path

    def _answers(self, name: str, count: int) -> list[Answer]:
        """The answers to `count` prompts; generates those that are not on disk yet. `name`: `HELD_OUT` or round-NNN."""
        batches = list(batched(self._prompts(name, count), self._config.answer_batch))
        shards = {f"{name}-{i:03d}": some for i, some in enumerate(batches)}
        paths = {shard: self._directory / "answers" / f"{shard}.pt" for shard in shards}
        if missing := [shard for shard in shards if not paths[shard].exists()]:
            self._watcher.begin(f"{name}: answering", len(missing) * self._config.max_answer_tokens)
        for shard in missing:
            write_answers(paths[shard], self._generate_shard(shard, shards[shard]))
        return [one for path in paths.values() for one in read_answers(path)]

    def _generate_shard(self, shard: str, prompts: Sequence[str]) -> list[Answer]:
        config, is_held_out = self._config, shard.startswith(HELD_OUT)
        with self._report_steps(config.max_answer_tokens) as tick:
            return answer(
                self._teacher.model,
                [self._teacher.encode_prompt(prompt) for prompt in prompts],
                limit=config.max_answer_tokens,
                eos=self._teacher.eos,
                temperatures=(0.0,) if is_held_out else config.temperatures,
                top=min(config.top, len(head(self._teacher.model))),
                allow_loops=is_held_out,
                generator=generator(config.seed, shard, "answers"),
                tick=tick,
            )

    def _prompts(self, name: str, count: int) -> list[str]:
        """Up to `count` prompts, kept in a file: a share of the given ones, and invented ones for the rest."""
        path = self._directory / "prompts" / f"{name}.json"
        if (before := read_json(path)) is not None:
            return list(before)
        own = [] if name == HELD_OUT else self._given[int(name[-3:]) :: self._config.rounds][:count]
        if len(own) < count:
            own = own + self._invent(name, count - len(own))
        if not own:
            raise DistillError("the target has invented no usable prompt: give some with --prompts")
        write_json(path, own)
        return own

    def _invent(self, name: str, count: int) -> list[str]:
        config = self._config
        steps = -(-attempts(count) // self._config.answer_batch) * config.max_prompt_tokens
        self._watcher.begin(f"{name}: inventing prompts", steps)
        with self._report_steps(steps) as tick:
            return invent(
                self._teacher,
                count,
                openings=config.openings,
                plain=config.plain,
                limit=config.max_prompt_tokens,
                batch=config.answer_batch,
                generator=generator(config.seed, name, "prompts"),
                tick=tick,
            )

    @contextmanager
    def _report_steps(self, steps: int) -> Iterator[Callable[[int], None]]:
        """Yield a function that reports one step and its tokens; at the end report the steps that were not needed."""
        began, made, done = time.monotonic(), 0, 0

        def tick(tokens: int) -> None:
            nonlocal made, done
            made, done = made + tokens, done + 1
            self._watcher.advance(1, f"{made / (time.monotonic() - began):,.0f} tokens/s")

        yield tick
        self._watcher.advance(steps - done)


def _settings(config: DistillConfig) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(config.model_dump_json(exclude={"out", "device"}))
    return settings
