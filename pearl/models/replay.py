"""Recorded texts as models: a pair that says what another pair said, at no cost and for any emulated speed.

`replay:FILE` is a target or a draft by its role.  While what they are fed is the beginning of a recorded text, the
target is sure of the token that follows there, and the draft has the row that was recorded.  Off that path (behind a
wrong token) the draft has rows of other places, and the target is sure of tokens that mean nothing: whatever they are,
nobody commits them.

A row spans the vocabulary and has no zeros: what was not recorded is too faint to be drawn, but is drawn *from*, and no
two of it are equal, so that ranking and drawing cost what they cost with the real model.  Greedy texts are greedy
again, and texts of `coupled` are drawn again with their seed (`pearl.models.recorded`).  Under `ratio` at a temperature
acceptance is another: the target's distributions are not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from pearl.models.checkpoint import is_replay, replayed_file
from pearl.models.recorded import RecordedTexts, read_texts
from pearl.models.runner import ModelRunner
from pearl.models.toy import ToyRunner, load_toy
from pearl.spec.methods import BRANCHES

_CONTEXT = 1 << 20
_APART = 1e-5  # logits that are not recorded, one from the next smaller: more than float32 rounds them by
_Place = tuple[int, int]  # which text, how many tokens of its answer are there


def faint(temperature: float) -> float:
    """How far below a row's largest logit a token is that is never drawn: e**-40 as likely, at this temperature."""
    return 40 * (temperature or 1.0)


class _Places:
    """Where in the recorded texts a context is."""

    def __init__(self, recorded: RecordedTexts) -> None:
        self._texts = [(*text.prompt, *text.answer) for text in recorded.texts]
        self._found: dict[int, _Place] = {}
        for number, (text, whole) in enumerate(zip(recorded.texts, self._texts, strict=True)):
            for said in range(len(text.answer) + 1):
                self._found.setdefault(hash(whole[: len(text.prompt) + said]), (number, said))

    def of(self, context: tuple[int, ...]) -> _Place | None:
        place = self._found.get(hash(context))
        if place is None or self._texts[place[0]][: len(context)] != context:
            return None
        return place


class ReplayRunner(ToyRunner):
    """One model of the pair; see the head of this file.

    Args:
        role: "target" or "draft".
    """

    def __init__(self, recorded: RecordedTexts, role: str, context: int, slots: int = 1 + BRANCHES) -> None:
        super().__init__(recorded.header.vocab_size, self._unused, context, slots)
        self._recorded, self._is_target = recorded, role == "target"
        self._places = _Places(recorded)
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

    def _target_row(self, context: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        place, eos = self._places.of(context), self._recorded.header.eos
        if place is None:
            token = int(self._ids[self._elsewhere(context), 0])
        else:
            answer = self._recorded.texts[place[0]].answer
            token = answer[place[1]] if place[1] < len(answer) else (*eos, 0)[0]
        return np.array([token]), np.zeros(1, np.float32)

    def _draft_row(self, context: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        place = self._places.of(context)
        if place is None or place[1] == len(self._recorded.texts[place[0]].answer):
            row = self._elsewhere(context)
        else:
            row = self._first[place[0]] + place[1]
        return self._ids[row], self._values[row]

    def _elsewhere(self, context: tuple[int, ...]) -> int:
        """Any row, but for one context always the same."""
        return hash(context) % len(self._ids)


def load_replay(spec: str, role: str, max_context: int | None, slots: int) -> ReplayRunner:
    """A runner, of `slots` sequences, from `replay:FILE`. Raises `ModelError`."""
    return ReplayRunner(read_texts(Path(replayed_file(spec))), role, max_context or _CONTEXT, slots)


def load_scripted(spec: str, role: str, max_context: int | None = None, texts: int = 1) -> ModelRunner:
    """The runner of a model without weights (`checkpoint.is_toy`): a toy, or recorded texts. Raises `ModelError`.

    `texts`: how many it must hold side by side; a draft's branches find as much room beside them as with real weights.
    """
    return (load_replay if is_replay(spec) else load_toy)(spec, role, max_context, texts + BRANCHES)
