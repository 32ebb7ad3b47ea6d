"""A run: rounds of answering and learning, which can be resumed after a kill.

Every random number is keyed by the seed and its place in the run, so a run that was killed and resumed gives the same
bytes as one that was not, on the same machine with the same number of threads.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from pearl.errors import ConfigError, DistillError
from pearl.lab.distill import checkpoints
from pearl.lab.distill.answers import Answer, answer, batched, fitting_batch
from pearl.lab.distill.checkpoints import Place
from pearl.lab.distill.config import DistillConfig
from pearl.lab.distill.draft import export, head, hidden_states, new_draft
from pearl.lab.distill.loss import head_loss
from pearl.lab.distill.optimizers import optimizers_of
from pearl.lab.distill.plan import generator, plan, rate
from pearl.lab.distill.prompts import attempts, invent, training_prompts
from pearl.lab.distill.shards import Shards, locked, read_json, write_json, written_whole
from pearl.lab.distill.teacher import choose_device, load_teacher

DRAFT, HELD_OUT, ANSWERS = "draft", "held-out", "answers.jsonl"  # names within a run's directory
_AGREEMENT_ROWS = 2048  # tokens of a batch when measuring


class Watcher(Protocol):
    """Receives progress reports. `total` and `count`: steps."""

    def begin(self, what: str, total: int) -> None: ...

    def advance(self, count: int, note: str = "") -> None: ...

    def say(self, message: str) -> None: ...


@dataclass
class Batch:
    """Right-padded answers. `rows`: indices into the flattened ids, of the states that predict answer tokens."""

    ids: torch.Tensor  # [answers, length]
    rows: torch.Tensor  # [tokens]
    top_ids: torch.Tensor  # [tokens, top]
    top_probs: torch.Tensor


def batch_of(answers: list[Answer], device: torch.device) -> Batch:
    length = max(len(a.prompt) + len(a.tokens) for a in answers) - 1  # the last token is predicted, never fed
    ids, rows = torch.zeros(len(answers), length, dtype=torch.long), []
    for i, a in enumerate(answers):
        fed = [*a.prompt, *a.tokens][:-1]
        ids[i, : len(fed)] = torch.tensor(fed)
        first = i * length + len(a.prompt) - 1
        rows.append(torch.arange(first, first + len(a.tokens)))
    top_ids, top_probs = torch.cat([a.top_ids for a in answers]), torch.cat([a.top_probs for a in answers])
    moved = (ids, torch.cat(rows), top_ids.long(), top_probs.float())
    return Batch(*(tensor.to(device) for tensor in moved))


class Distillation:
    """One run in the directory `config.out`. Raises `PearlError`, and then leaves all saved files whole."""

    def __init__(self, config: DistillConfig, watcher: Watcher, *, resume: bool = False) -> None:
        self._directory = Path(config.out).expanduser()
        self._watcher = watcher
        given = training_prompts([Path(path) for path in config.prompts])
        device = choose_device(config.device)
        self._teacher = load_teacher(
            config.target, device, config.dtype, trust_remote_code=config.trust_remote_code, progress=watcher.say
        )
        self._config, settings = self._settle(config, resume)
        self._given = given
        self._shards = Shards(self._directory / "answers")
        self._draft = new_draft(self._config, self._teacher)
        self._check_space()
        write_json(self._directory / "run.json", settings)
        self._optimizers = optimizers_of(self._draft, config)
        self._place = checkpoints.restore(self._directory / "checkpoints", self._draft, self._optimizers)
        self._head = None if head(self._draft).requires_grad else head(self._draft).to(self._dtype)
        self._pool: list[Answer] = []
        self._held_out: list[Answer] = []

    @property
    def _log_path(self) -> Path:
        return self._directory / "log.jsonl"

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self._config.dtype == "bfloat16" else torch.float32

    def _settle(self, config: DistillConfig, resume: bool) -> tuple[DistillConfig, dict[str, Any]]:
        """(settings with `answer_batch` resolved, what run.json records of them).

        Raises `ConfigError` if the directory holds a run and `resume` is False, or a run with other settings.
        """
        path = self._directory / "run.json"
        before = read_json(path)
        if before is not None and not resume:
            raise ConfigError(
                f"{self._directory} holds a run already: --resume goes on with it; or choose another --out"
            )
        batch = config.answer_batch or (before or {}).get("answer_batch")
        length = config.max_prompt_tokens + config.max_answer_tokens + 64
        config = config.model_copy(update={"answer_batch": batch or fitting_batch(self._teacher.model, length)})
        own = json.loads(config.model_dump_json(exclude={"out", "device"})) | {"target_digest": self._teacher.digest}
        differing = sorted(name for name in own if before is not None and before.get(name) != own[name])
        if differing:
            raise ConfigError(
                f"{path} has other settings than these: {', '.join(differing)}. A run keeps what it began with"
            )
        return config, own

    def _check_space(self) -> None:
        """Raise `DistillError` unless the disk can hold the longest answers, three checkpoints and two drafts."""
        config, answers = self._config, self._config.rounds * self._config.answers_per_round
        weights = sum(weight.numel() for weight in self._draft.parameters())
        trainable = sum(weight.numel() for weight in checkpoints.trainable_parameters(self._draft).values())
        needed = answers * config.max_answer_tokens * config.top * 6 + 3 * 12 * trainable + 2 * 2 * weights
        self._directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._directory).free
        if free < needed:
            raise DistillError(
                f"no room in {self._directory}: {free / 1e9:.1f} GB are free, the run may need {needed / 1e9:.1f} GB. "
                "Make room, choose another --out, or lower top, rounds or answers_per_round"
            )

    def run(self) -> Path:
        """Run all rounds, or those that are left; return the draft's directory."""
        with locked(self._directory / DRAFT, wait=False) as held:
            if not held:
                raise DistillError(f"another process learns in {self._directory}: one can, others with --answers-only")
            return self._run()

    def _run(self) -> Path:
        self._held_out = self._load_or_generate(HELD_OUT, self._config.held_out)
        if not self._log_path.exists():
            self._measure()
        for round in range(self._config.rounds):
            fresh = self._load_or_generate(f"round-{round:03d}", self._config.answers_per_round)
            self._pool += fresh
            if round >= self._place.round:
                self._learn(round, len(fresh))
        export(self._draft, self._config.target, self._directory / DRAFT, self._metadata())
        return self._directory / DRAFT

    # Answering

    def answer(self) -> Path:
        """Answer the prompts of all rounds and learn nothing; return a file with a line {"prompt", "text"} for each."""
        path, lines = self._directory / ANSWERS, []
        names = [f"round-{round:03d}" for round in range(self._config.rounds)]
        for name in names:  # first all that no other process is at
            self._generate(name, self._config.answers_per_round, wait=False)
        for name in names:
            answers = self._load_or_generate(name, self._config.answers_per_round)
            for prompt, one in zip(self._prompts(name, len(answers)), answers, strict=True):
                lines.append(json.dumps({"prompt": prompt, "text": self._teacher.tokenizer.decode(one.tokens)}) + "\n")
        with written_whole(path) as building:
            building.write_text("".join(lines))
        return path

    def _load_or_generate(self, name: str, count: int) -> list[Answer]:
        """The answers to `count` prompts; generates those that are not on disk yet, one shard per batch.

        Args:
            name: of the prompts' file and the shards: `HELD_OUT` or round-NNN.
        """
        self._generate(name, count, wait=False)
        shards = self._generate(name, count, wait=True)
        return [one for shard in shards for one in self._shards.read(shard)]

    def _generate(self, name: str, count: int, wait: bool) -> list[str]:
        """Write the missing shards of `name` and return the names of all.

        Args:
            wait: for those that other processes make; else they may still be missing.
        """
        config = self._config
        assert config.answer_batch is not None
        prompts = self._prompts(name, count)
        shards = {f"{name}-{i:03d}": some for i, some in enumerate(batched(prompts, config.answer_batch))}
        missing = [shard for shard in shards if shard not in self._shards]
        if missing:
            self._watcher.begin(f"{name}: answering", len(missing) * config.max_answer_tokens)
        for shard in missing:
            self._shards.make(shard, partial(self._answers, shard, shards[shard]), wait)
        return list(shards)

    def _answers(self, shard: str, prompts: Sequence[str]) -> list[Answer]:
        config, held_out = self._config, shard.startswith(HELD_OUT)
        with self._report_steps(config.max_answer_tokens) as tick:
            return answer(
                self._teacher.model,
                [self._teacher.encode_prompt(prompt) for prompt in prompts],
                limit=config.max_answer_tokens,
                eos=self._teacher.eos,
                temperatures=(0.0,) if held_out else config.temperatures,
                top=min(config.top, len(head(self._teacher.model))),
                allow_loops=held_out,
                generator=generator(config.seed, shard, "answers"),
                tick=tick,
            )

    def _prompts(self, name: str, count: int) -> list[str]:
        """`count` prompts: a share of the given ones, and invented ones for the rest; kept in a file."""
        path = self._directory / "prompts" / f"{name}.json"
        with locked(path):
            if (before := read_json(path)) is not None:
                return list(before)
            return self._new_prompts(path, name, count)

    def _new_prompts(self, path: Path, name: str, count: int) -> list[str]:
        own = [] if name == HELD_OUT else self._given[int(name[-3:]) :: self._config.rounds][:count]
        if len(own) < count:
            own = own + self._invent(name, count - len(own))
        if not own:
            raise DistillError("the target has invented no usable prompt: give some with --prompts")
        write_json(path, own)
        return own

    def _invent(self, name: str, count: int) -> list[str]:
        config = self._config
        assert config.answer_batch is not None
        steps = -(-attempts(count) // config.answer_batch) * config.max_prompt_tokens
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
        """Yield a `tick` that reports steps of a batch to the watcher; at the end report the steps not needed.

        Args:
            steps: most steps that the batch may take.
        """
        began, made, done = time.monotonic(), 0, 0

        def tick(tokens: int) -> None:
            nonlocal made, done
            made, done = made + tokens, done + 1
            self._watcher.advance(1, f"{made / (time.monotonic() - began):,.0f} tokens/s")

        yield tick
        self._watcher.advance(steps - done)

    # Learning

    def _learn(self, round: int, fresh: int) -> None:
        """Train on one round, from the current position on. `fresh`: number of answers that the round added."""
        lengths = [len(a.prompt) + len(a.tokens) for a in self._pool]
        batches = plan(self._config, round, lengths, fresh)
        done = self._place.batch
        self._watcher.begin(f"round-{round:03d}: learning", len(batches) - done)
        for number in range(done, len(batches)):
            progress = (round + number / len(batches)) / self._config.rounds
            batch = batch_of([self._pool[i] for i in batches[number]], self._teacher.device)
            loss = self._step(batch, progress)
            place = self._place
            self._place = Place(round, number + 1, place.step + 1, place.tokens + len(batch.rows))
            self._watcher.advance(1, f"loss {loss:.3f}, {self._place.tokens / 1e6:.2f} M tokens")
            if self._place.step % self._config.checkpoint_steps == 0:
                self._save()
        self._place = replace(self._place, round=round + 1, batch=0)
        export(self._draft, self._config.target, self._directory / DRAFT, self._metadata())
        self._measure()
        self._save()

    def _step(self, batch: Batch, progress: float) -> float:
        """Make one optimizer step; return the loss. Raises `DistillError` if loss or gradient is not finite."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._config.learning_rate * rate(self._config, progress)
            optimizer.zero_grad(set_to_none=True)
        loss = head_loss(
            self._states(batch),
            head(self._draft) if self._head is None else self._head,
            batch.top_ids,
            batch.top_probs,
            negatives=self._config.negatives,
            generator=generator(self._config.seed, self._place.step, "negatives"),
        )
        loss.backward()
        weights = checkpoints.trainable_parameters(self._draft).values()
        norm = torch.nn.utils.clip_grad_norm_(weights, self._config.clip)
        if not torch.isfinite(loss + norm):
            raise DistillError(
                f"the loss is {loss.item()} and the gradient's norm {norm.item()} at step {self._place.step}. The last "
                "good checkpoint is kept; begin anew in another directory with a lower learning_rate"
            )
        for optimizer in self._optimizers:
            optimizer.step()
        return loss.item()

    def _states(self, batch: Batch) -> torch.Tensor:
        """The draft's last states that predict the answer tokens [tokens, width]."""
        device = self._teacher.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self._dtype is torch.bfloat16):
            states = hidden_states(self._draft, batch.ids)
        return states.flatten(0, 1)[batch.rows].to(self._dtype)

    @torch.no_grad()
    def _measure(self) -> None:
        """Log how often the draft's likeliest token is the target's on held-out answers."""
        agreed = total = 0
        for some in _by_length(self._held_out, _AGREEMENT_ROWS):
            batch = batch_of(some, self._teacher.device)
            weight = head(self._draft).to(self._dtype)
            best = torch.cat([(rows @ weight.T).argmax(-1) for rows in self._states(batch).split(512)])
            agreed += int((best == batch.top_ids[:, 0]).sum())
            total += len(best)
        self._log({"step": self._place.step, "tokens": self._place.tokens, "held_out_agreement": agreed / total})

    # Keeping

    def _save(self) -> None:
        checkpoints.save(self._directory / "checkpoints", self._place, self._draft, self._optimizers)

    def _log(self, entry: dict[str, Any]) -> None:
        """Report an entry to the watcher and append it to the log. Raises `DistillError`."""
        entry = entry | {"unix_time": round(time.time(), 1)}
        self._watcher.say(
            f"{entry['tokens']:,} tokens seen: agreement on held-out answers {entry['held_out_agreement']:.3f}"
        )
        try:
            with self._log_path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            raise DistillError(f"cannot write the log in {self._directory}: {error}") from error

    def _metadata(self) -> dict[str, Any]:
        settings = json.loads(self._config.model_dump_json(exclude={"out", "device"}))
        return {"target_digest": self._teacher.digest, "tokens_seen": self._place.tokens, "settings": settings}


def _by_length(answers: list[Answer], tokens: int) -> Iterator[list[Answer]]:
    """Split into batches of about `tokens` tokens, of answers of similar length."""
    some: list[Answer] = []
    for one in sorted(answers, key=lambda a: len(a.prompt) + len(a.tokens)):
        some.append(one)
        if sum(len(a.prompt) + len(a.tokens) for a in some) >= tokens:
            yield some
            some = []
    if some:
        yield some
