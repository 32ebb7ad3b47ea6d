"""Recorded texts as models: a pair that writes what another pair wrote, at no cost and at any emulated speed.

`replay:FILE` is a target or a draft by its role.  While the context is the beginning of a recorded text, the target is
certain of the next token and the draft has the recorded row.  After any other context, which follows a wrong token, the
draft has some other recorded row and the target is certain of some token; nothing of it is committed.

A row spans the vocabulary.  Tokens that were not recorded are too unlikely to be drawn, but not zero, and no two are
equal, so ranking and drawing cost what they cost with the real model.  Greedy texts are greedy again, and texts of the
coupled rule are drawn again with their seed.  Under ratio at a temperature the acceptance rate differs: the target's
distributions are not recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from pearl.models.checkpoints.checkpoint import is_replay, replayed_file
from pearl.models.recorded import RecordedTexts, read_texts
from pearl.models.runner import ModelRunner
from pearl.models.toy import ToyRunner, load_toy
from pearl.spec.methods import BRANCHES

_CONTEXT = 1 << 20
_APART = 1e-5  # between logits that are not recorded: more than float32 rounding
_Place = tuple[int, int]  # text, number of answer tokens in the context


def faint(temperature: float) -> float:
    """Distance from a row's largest logit at which a token is never drawn: e**-40 as likely, at this temperature."""
    return 40 * (temperature or 1.0)


class ReplayRunner(ToyRunner):
    """One model of the pair. `role`: "target" or "draft"."""

    def __init__(self, recorded: RecordedTexts, role: str, context: int, slots: int = 1 + BRANCHES) -> None:
        super().__init__(recorded.header.vocab_size, self._unused, context, slots)
        self._recorded, self._is_target = recorded, role == "target"
        self._texts = [(*text.prompt, *text.answer) for text in recorded.texts]
        self._places: dict[int, _Place] = {}  # by the hash of the context
        for number, (text, whole) in enumerate(zip(recorded.texts, self._texts, strict=True)):
            for length in range(len(text.answer) + 1):
                self._places.setdefault(hash(whole[: len(text.prompt) + length]), (number, length))
        order = torch.from_numpy(np.random.default_rng(0).permutation(recorded.header.vocab_size))
        self._faint = -faint(recorded.header.temperature) - _APART * order
        self._ids = np.concatenate([text.ids for text in recorded.texts]).astype(np.int64)
        self._values = np.concatenate([text.logits for text in recorded.texts])
        lengths = [len(text.answer) for text in recorded.texts]
        self._first = [sum(lengths[:number]) for number in range(len(lengths))]  # row of each text

    @staticmethod
    def _unused(context: Sequence[int]) -> torch.Tensor:
        raise AssertionError("rows are logits here")

    def _logits(self, contexts: list[list[int]]) -> torch.Tensor:
        found = [(self._target_row if self._is_target else self._draft_row)(tuple(each)) for each in contexts]
        rows = torch.empty(len(found), self.vocab_size)
        for row, (ids, values) in zip(rows, found, strict=True):
            torch.add(self._faint, float(values.max()), out=row)
            row[torch.from_numpy(ids)] = torch.from_numpy(values)
        return rows

    def _place(self, context: tuple[int, ...]) -> _Place | None:
        place = self._places.get(hash(context))
        return place if place is not None and self._texts[place[0]][: len(context)] == context else None

    def _target_row(self, context: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        place, eos = self._place(context), self._recorded.header.eos
        if place is None:
            token = int(self._ids[self._elsewhere(context), 0])
        else:
            answer = self._recorded.texts[place[0]].answer
            token = answer[place[1]] if place[1] < len(answer) else (*eos, 0)[0]
        return np.array([token]), np.zeros(1, np.float32)

    def _draft_row(self, context: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        place = self._place(context)
        if place is None or place[1] == len(self._recorded.texts[place[0]].answer):
            row = self._elsewhere(context)
        else:
            row = self._first[place[0]] + place[1]
        return self._ids[row], self._values[row]

    def _elsewhere(self, context: tuple[int, ...]) -> int:
        """Some row, always the same for a context."""
        return hash(context) % len(self._ids)


def load_replay(spec: str, role: str, max_context: int | None, slots: int) -> ReplayRunner:
    """A runner, of `slots` sequences, from `replay:FILE`. Raises `ModelError`."""
    return ReplayRunner(read_texts(Path(replayed_file(spec))), role, max_context or _CONTEXT, slots)


def load_scripted(spec: str, role: str, max_context: int | None = None, texts: int = 1) -> ModelRunner:
    """The runner of a model without weights (`checkpoint.is_toy`): a toy, or recorded texts. Raises `ModelError`.

    Args:
        texts: number of sequences besides the room for a draft's branches.
    """
    return (load_replay if is_replay(spec) else load_toy)(spec, role, max_context, texts + BRANCHES)
