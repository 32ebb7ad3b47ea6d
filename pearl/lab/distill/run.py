"""A run: rounds of answering and learning, which can be resumed after a kill.

A run's directory has two files of PyTorch, written atomically. `answers.pt` has the settings, the
prompts and the target's answers; `checkpoint.pt` has the weights, the optimizers and the position
in the run.

Every random number is keyed by the seed and its place in the run. So a run that was killed and
resumed gives the same bytes as an uninterrupted run, on the same machine with the same number of
threads.
"""

from __future__ import annotations

import io
import json
import os
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from pearl.cache import Watcher
from pearl.errors import ConfigError, DistillError, installing
from pearl.lab.distill.answers import RecordedAnswer, along, answer
from pearl.lab.distill.config import DistillConfig
from pearl.lab.distill.invention import invent
from pearl.lab.distill.learning import Learner, generator, plan
from pearl.lab.distill.pair import head, load_teacher, new_draft, replacing
from pearl.lab.distill.prompts import training_prompts
from pearl.lab.distill.states import write_states
from pearl.models.forward.layers import tapped

HELD_OUT = "held-out"
_FORMAT = 4  # version of the format of a run's files


@dataclass(frozen=True)
class RunPosition:
    """A position in a run. Random numbers are keyed by the position, so checkpoints hold no generator state.

    Attributes:
        round: the current round.
        batch: steps done in the current round.
        step: steps done in all rounds.
        tokens: answer tokens trained on in all rounds.
    """

    round: int = 0
    batch: int = 0
    step: int = 0
    tokens: int = 0


class Distillation:
    """A run in the directory `config.out`.

    Its methods raise `PearlError`. After an error all saved files are intact.
    """

    def __init__(self, config: DistillConfig, watcher: Watcher, *, resume: bool = False) -> None:
        if config.head != "none" and find_spec("speculators") is None:
            raise ConfigError(f"--head {config.head} needs speculators: {installing('heads')}")
        self._config = config
        self._watcher = watcher
        self._directory = Path(config.out).expanduser()
        self._given = training_prompts(config.prompts)
        self._teacher = load_teacher(config, watcher.say)
        self._answered = self._settle(resume)
        self._place = RunPosition()
        if config.head == "none":
            self._learner = Learner(config, new_draft(config, self._teacher))
            saved = _read(self._directory / "checkpoint.pt")
            if saved is not None:
                self._place = RunPosition(**saved["place"])
                self._learner.restore(saved)

    def _settle(self, resume: bool) -> dict[str, Any]:
        """Return the contents of answers.pt: the settings, and for each round the prompts and the answers so far.

        Raises `ConfigError` if the directory holds a run and `resume` is False, or if that run has other settings.
        """
        path = self._directory / "answers.pt"
        saved = _read(path)
        settings = _settings(self._config) | {"format": _FORMAT}
        if saved is None:
            return {"settings": settings, "rounds": {}}
        if not resume:
            raise ConfigError(
                f"{self._directory} holds a run already: --resume goes on with it; or choose another --out"
            )
        differing = []
        for name in sorted(settings):
            if saved["settings"].get(name) != settings[name]:
                differing.append(name)
        if differing:
            raise ConfigError(
                f"{path} has other settings than these: {', '.join(differing)}. A run keeps what it began with"
            )
        return saved

    def run(self) -> Path:
        """Run all rounds that are not done yet; return the directory of the draft or head."""
        config = self._config
        with locked(self._directory):
            held_out = self._answers(HELD_OUT, config.held_out)
            if config.head != "none":
                return self._make_head(held_out)
            if not (self._directory / "log.jsonl").exists():
                self._log(held_out)
            pool: list[RecordedAnswer] = []
            for round in range(config.rounds):
                fresh = self._answers(f"round-{round:03d}", config.answers_per_round)
                pool += fresh
                if round >= self._place.round:
                    self._learn(round, pool, len(fresh))
                    self._export()
                    self._log(held_out)
                    self._save()
            return self._export()

    def _learn(self, round: int, pool: Sequence[RecordedAnswer], fresh: int) -> None:
        """Train on the batches of one round that are not done yet.

        Args:
            pool: the answers of all rounds so far.
            fresh: number of answers that this round added; they are at the end of `pool`.
        """
        lengths = list(map(attrgetter("length"), pool))
        batches = plan(self._config, round, lengths, fresh)
        start = self._place.batch
        self._watcher.begin(f"round-{round:03d}: learning", len(batches) - start)
        for number in range(start, len(batches)):
            progress = (round + number / len(batches)) / self._config.rounds
            answers = list(map(pool.__getitem__, batches[number]))
            place = self._place
            loss, tokens = self._learner.step(answers, progress, place.step)
            self._place = RunPosition(round, number + 1, place.step + 1, place.tokens + tokens)
            self._watcher.advance(1, f"loss {loss:.3f}, {self._place.tokens / 1e6:.2f} M tokens")
            if self._place.step % self._config.checkpoint_steps == 0:
                self._save()
        self._place = replace(self._place, round=round + 1, batch=0)

    def _save(self) -> None:
        state = {"place": asdict(self._place), **self._learner.state()}
        _write(self._directory / "checkpoint.pt", state)

    def _export(self) -> Path:
        about = {"tokens_seen": self._place.tokens, "settings": _settings(self._config)}
        path = self._directory / "draft"
        self._learner.export(self._config.target, path, about)
        return path

    def _make_head(self, held_out: Sequence[RecordedAnswer]) -> Path:
        """Train a head on the answers of all rounds; return its directory."""
        from pearl.lab.distill import heads

        config = self._config
        states = self._directory / "states"
        layers = sorted(set(tapped(self._teacher.model.config.num_hidden_layers)))
        if not states.exists():
            answers: list[RecordedAnswer] = []
            for round in range(config.rounds):
                answers += self._answers(f"round-{round:03d}", config.answers_per_round)
            with replacing(states) as building:
                write_states(
                    self._teacher, answers + list(held_out), layers, building, self._watcher
                )
        self._watcher.begin("learning", config.passes)
        device = self._teacher.model.device
        checkpoint = heads.train(config, states, layers, len(held_out), device, self._log_epoch)
        path = self._directory / "head"
        with replacing(path) as building:
            heads.export(config, checkpoint, building)
        return path

    def _log_epoch(self, epoch: int, metrics: dict[str, float]) -> None:
        """Report an epoch of a head, and append its metrics on held-out answers to the log."""
        note = f"loss {metrics['loss_epoch']:.3f}"
        if "eal_epoch" in metrics:  # expected accepted length; not all kinds measure it
            note += f", {metrics['eal_epoch']:.2f} tokens a step on held-out answers"
        self._watcher.advance(1, note)
        entry: dict[str, Any] = {"epoch": epoch}
        for name, value in sorted(metrics.items()):
            entry[name.removesuffix("_epoch")] = round(value, 4)
        self._append(entry)

    def _log(self, held_out: Sequence[RecordedAnswer]) -> None:
        """Measure the agreement on held-out answers, report it, and append it to the log."""
        tokens = self._place.tokens
        agreement = self._learner.agreement(held_out)
        self._watcher.say(f"{tokens:,} tokens seen: agreement on held-out answers {agreement:.3f}")
        entry = {
            "step": self._place.step,
            "tokens": tokens,
            "held_out_agreement": agreement,
        }
        self._append(entry)

    def _append(self, entry: dict[str, Any]) -> None:
        entry["unix_time"] = round(time.time(), 1)
        with (self._directory / "log.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")

    # Answering

    def answer(self) -> Path:
        """Answer the prompts of all rounds without training.

        Return the path of a .jsonl file that has an object {"prompt": ..., "text": ...} for each answer.
        """
        if self._config.on_policy:
            raise ConfigError("answers alone are the target's: leave on_policy out")
        path = self._directory / "answers.jsonl"
        lines = []
        with locked(self._directory):
            for round in range(self._config.rounds):
                name = f"round-{round:03d}"
                answers = self._answers(name, self._config.answers_per_round)
                prompts = self._answered["rounds"][name]["prompts"]
                for prompt, answer in zip(prompts, answers, strict=True):
                    text = self._teacher.tokenizer.decode(answer.tokens)
                    lines.append(json.dumps({"prompt": prompt, "text": text}) + "\n")
            path.write_text("".join(lines))
        return path

    def _answers(self, name: str, count: int) -> list[RecordedAnswer]:
        """Return the answers to up to `count` prompts; generate those that are not on disk yet.

        Args:
            name: `HELD_OUT` or "round-NNN".
        """
        rounds = self._answered["rounds"]
        size = self._config.answer_batch
        if name not in rounds:
            rounds[name] = {"prompts": self._prompts(name, count), "answers": []}
            self._keep()
        prompts = rounds[name]["prompts"]
        answers = rounds[name]["answers"]
        if len(answers) < len(prompts):
            self._watcher.begin(f"{name}: answering", len(prompts) - len(answers))
        while len(answers) < len(prompts):
            start = len(answers)
            batch = f"{name}-{start // size:03d}"
            answers += map(vars, self._generate(batch, prompts[start : start + size]))
            self._keep()
        return [RecordedAnswer(**fields) for fields in answers]

    def _keep(self) -> None:
        _write(self._directory / "answers.pt", self._answered)

    def _generate(self, batch: str, prompts: Sequence[str]) -> list[RecordedAnswer]:
        """Answer prompts.

        The draft writes a share `on_policy` of the answers, but none of those to held-out prompts.
        The likeliest tokens recorded with an answer are the target's, whoever wrote the answer.

        Args:
            batch: name of the batch, which keys its random numbers.
        """
        config = self._config
        target = self._teacher.model
        encoded = list(map(self._teacher.encode_prompt, prompts))
        top = min(config.top, len(head(target)))
        temperatures = config.temperatures
        drafted = round(config.on_policy * len(prompts))
        is_held_out = batch.startswith(HELD_OUT)
        if is_held_out:
            temperatures = (0.0,)
            drafted = 0
        write = partial(
            answer,
            limit=config.max_answer_tokens,
            eos=self._teacher.eos,
            temperatures=temperatures,
            top=top,
            allow_loops=is_held_out,
            tick=self._watcher.advance,
        )
        answers: list[RecordedAnswer] = []
        if drafted < len(encoded):
            draw = generator(config.seed, batch, "answers")
            answers = write(target, encoded[drafted:], generator=draw)
        if drafted:
            draw = generator(config.seed, batch, "drafted")
            drafts = write(self._learner.draft, encoded[:drafted], generator=draw)
            answers = along(target, drafts, top) + answers
        return answers

    def _prompts(self, name: str, count: int) -> list[str]:
        """Return up to `count` prompts for a round, or for `HELD_OUT`.

        A round begins with its share of the prompts that the user gave; the target invents the
        rest. Held-out prompts are all invented. Raises `DistillError` if there is no prompt.
        """
        prompts: list[str] = []
        if name != HELD_OUT:
            prompts = self._given[int(name[-3:]) :: self._config.rounds][:count]
        missing = count - len(prompts)
        if missing > 0:
            label = f"{name}: inventing prompts"
            draw = generator(self._config.seed, name, "prompts")
            prompts += invent(self._teacher, missing, self._config, draw, self._watcher, label)
        if not prompts:
            raise DistillError("the target has invented no usable prompt: give some with --prompts")
        return prompts


def _settings(config: DistillConfig) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(config.model_dump_json(exclude={"out", "device"}))
    return settings


# ---- files ----


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a run's directory inside the block.

    Raises `DistillError` if another process holds the lock, and in place of any `OSError` in the
    block.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / ".lock").acquire(blocking=False):
            yield
    except Timeout:
        raise DistillError(f"another process works in {directory}") from None
    except OSError as error:
        raise DistillError(
            f"cannot write in {directory}: {error}. Nothing that was saved before is lost: make room, and go on with "
            "--resume"
        ) from error


def _write(path: Path, state: Any) -> None:
    """Write a file of PyTorch atomically.

    Raises `OSError`; the file is then as it was before.
    """
    content = io.BytesIO()
    torch.save(state, content)
    building = path.with_name(f".{path.name}.building")
    try:
        with building.open("wb") as file:
            file.write(content.getbuffer())
            os.fsync(file.fileno())
        os.replace(building, path)
    finally:
        building.unlink(missing_ok=True)


def _read(path: Path) -> Any:
    """Read a file that `_write` wrote; return None if there is none. Raises `DistillError` if it is damaged."""
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
        if damaged is not None:
            raise ValueError(f"{damaged} has a wrong checksum")
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # PyTorch, its reader of zips and pickle have no common base
        cause = str(error).partition("\n")[0]
        raise DistillError(
            f"{path} is damaged: {cause}. Remove it; --resume then makes it anew"
        ) from error
