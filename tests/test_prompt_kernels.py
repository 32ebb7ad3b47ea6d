"""Prompts by our GPU kernels in Triton's interpreter, against plain torch: the kernels alone, then whole runners.

In float32, because of what `test_interpreter` shows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from pearl.models.cpu.runner import CpuRunner
from pearl.models.feeds import Feed
from pearl.models.forward import attention
from pearl.models.forward.slots import Slots
from pearl.models.gpu import prefill_kernels
from pearl.models.gpu.check import KernelsUnfit
from pearl.models.gpu.prefill_kernels import PromptAttention
from pearl.models.gpu.recordings import FED, PREFILL, Record, Rows, not_recorded
from pearl.models.gpu.runner import KernelRunner
from pearl.models.runner import feed_chain
from tests.kernels import (  # skips where there is no Triton, or a GPU
    SMALL,
    TorchPrompts,
    model_of,
    text,
)
from tests.tiny import attended

ROWS, ROOM, DIM, LAYERS = 32, 256, 16, 2


class Piece:
    """Random rows, and a cache of two slots that is full of numbers."""

    def __init__(self, heads: int, kv_heads: int, turns: bool, scoring: attention.Scoring) -> None:
        random = torch.Generator().manual_seed(heads)
        self.slots = Slots((2, LAYERS, kv_heads, ROOM, DIM), torch.float32, torch.device("cpu"))
        self.slots.keys.copy_(torch.randn(self.slots.keys[0].shape, generator=random))
        self.slots.values.copy_(torch.randn(self.slots.values[0].shape, generator=random))
        states = torch.randn(ROOM, heads + 2 * kv_heads, DIM, generator=random)  # of every position
        self.queries_keys = states[:, : heads + kv_heads]
        self.values = states[:, heads + kv_heads :]
        angles = torch.randn(2, ROOM, 1, DIM, generator=random)
        self.rope = (angles[0], angles[1]) if turns else None
        self.heads, self.scoring = heads, scoring

    def ours(self, slot: int, start: int, count: int) -> torch.Tensor:
        given = torch.tensor([slot, start, count, *range(ROWS)])
        attends, rows = PromptAttention(given, self.slots, self.scoring), slice(start, start + ROWS)
        return attends.attend(1, self.queries_keys[rows], self.values[rows], self.rope)

    def torchs(self, slot: int, start: int) -> torch.Tensor:
        """And what must be in the cache then."""
        queries_keys, end = self.queries_keys[start : start + ROWS], start + ROWS
        if self.rope is not None:
            cos, sin = (table[start:end] for table in self.rope)
            queries_keys = queries_keys * cos + queries_keys.roll(DIM // 2, -1) * sin
        keys, values = self.slots.keys[slot, 1].clone(), self.slots.values[slot, 1].clone()
        keys[:, start:end] = queries_keys[:, self.heads :].transpose(0, 1)
        values[:, start:end] = self.values[start:end].transpose(0, 1)
        self.wanted = keys, values
        (_, window), scale, cap, _ = self.scoring
        positions, own = torch.arange(end), torch.arange(start, end)[:, None]
        sees = (positions <= own) & (positions > own - (window or ROOM))
        return attended(
            queries_keys[:, : self.heads],
            keys[:, :end],
            values[:, :end],
            sees,
            scale,
            cap,
            self.scoring.sinks_of(1),
        )


@pytest.fixture(
    params=[
        (4, 2, 0, 0.0, False, True),
        (3, 1, 9, 0.0, True, True),
        (2, 2, 40, 1.5, False, True),
        (2, 1, 0, 1.5, True, False),
        (2, 2, 1, 0.0, False, False),
    ],
    ids=["grouped", "window and sinks", "window and cap", "cap and sinks", "itself"],
)
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Piece:
    """In small tiles: so that few rows have tiles, and positions blocks, of every kind."""
    monkeypatch.setattr(prefill_kernels, "tile_of", lambda dim: prefill_kernels.Tile(16, 16, 4, 1))
    heads, kv_heads, window, cap, has_sinks, turns = request.param
    sinks = (
        tuple(torch.randn(LAYERS, heads, generator=torch.Generator().manual_seed(1)))
        if has_sinks
        else ()
    )
    return Piece(heads, kv_heads, turns, attention.Scoring((0, window), 0.3, cap, sinks))


def test_attention_is_torchs(piece: Piece) -> None:
    """From the beginning, from odd starts, and at the end of the cache, in both slots."""
    for slot, start in ((0, 0), (1, 16), (1, 61), (0, ROOM - ROWS)):
        wanted, others = piece.torchs(slot, start), piece.slots.keys[1 - slot].clone()
        torch.testing.assert_close(piece.ours(slot, start, ROWS), wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(piece.slots.keys[slot, 1], piece.wanted[0])
        assert torch.equal(piece.slots.values[slot, 1], piece.wanted[1])
        assert torch.equal(piece.slots.keys[1 - slot], others)


def test_bits_depend_on_no_slot_start_or_company(piece: Piece) -> None:
    """Rows of tiles without a token are zeros: they are never to be NaN, which a mask would not hide."""
    whole = [piece.ours(0, start, ROWS) for start in (64, 96)]
    piece.slots.keys[1], piece.slots.values[1] = piece.slots.keys[0], piece.slots.values[0]
    found = piece.ours(1, 77, ROWS)
    assert torch.equal(torch.cat(whole)[13 : 13 + ROWS], found)
    few = piece.ours(1, 77, 3)
    assert torch.equal(few[:16], found[:16])
    assert not few[16:].any()


WINDOWS = "windows, caps, gelu, norms behind"
NAMES = ["one layer", WINDOWS, "experts with biases, windows and sinks"]


class TorchTables:
    """In place of our kernels of tables, which are tested elsewhere, and take seconds to check."""

    most = 64

    def __init__(self, *given: Any) -> None:
        self.prompts = TorchPrompts(*given)

    def problem(self) -> str:
        return ""

    def forward(self, feeds: Sequence[Feed]) -> list[Rows]:
        return [self.prompts.forward(feed) for feed in feeds]


@pytest.fixture(autouse=True)
def _only_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pearl.models.gpu.token_forward.Decode", TorchTables)


def runner_of(
    model: PreTrainedModel, record: Record = not_recorded, taps: tuple[int, ...] = ()
) -> KernelRunner:
    return KernelRunner(model, 700, slots=2, record=record, taps=taps)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_those_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two pieces, with rows of both, beside a token of another slot; and the same bits in that slot."""
    ours = runner_of(model_of(name), taps=(1, 0))
    theirs = CpuRunner(model_of(name), 700, slots=2, taps=(1, 0))
    assert ours.capabilities.prompt_piece == PREFILL
    assert not ours.slots.keys.any(), "what the check has written is forgotten"
    found = []
    for runner in (ours, theirs):
        feeds = Feed(text(PREFILL + 9), 30, prompt=True), Feed(text(3), 3, 1)
        found.append(
            [
                *runner.forward(feeds),
                runner.features(0),
                feed_chain(runner, text(40, 1), 1, prompt=True),
            ]
        )
    for some, rows in zip(*found, strict=True):
        torch.testing.assert_close(some, rows, rtol=1e-3, atol=1e-4)
    ours.rollback(0, 1)
    tokens, sizes, logits = text(PREFILL + 9), set[int](), ours.layers.logits

    def noted(hidden: torch.Tensor) -> torch.Tensor:
        sizes.add(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(ours.layers, "logits", noted)
    again = torch.cat(
        [feed_chain(ours, tokens[at : at + PREFILL], 9, 1, prompt=True) for at in (0, PREFILL)]
    )
    assert torch.equal(again[9:], found[0][0][21:])
    assert len(feed_chain(ours, text(2), 0, 1, prompt=True)) == 0
    for slot, few in ((0, text(5)), (1, torch.tensor(text(5)))):
        ours.rollback(PREFILL, slot)
        found.append([feed_chain(ours, few, 1, slot, prompt=True)])
    assert torch.equal(found[2][0], found[3][0]), "ids on the device"
    assert sizes == {FED}, "the head's kernel is always the same"


@pytest.mark.parametrize("name", NAMES[1:])
def test_one_recording_serves_every_slot_and_start(name: str) -> None:
    """But none is made where the host reads which experts are chosen."""
    made = []

    def record(work: Callable[[], Rows]) -> Callable[[], Rows]:
        made.append(work)
        return work

    runner = runner_of(model_of(name), record)
    feed_chain(runner, text(PREFILL + 9), 1, 1, prompt=True)
    assert len(made) == ("experts" not in name)


def test_prompts_are_rows_of_tables_where_heads_do_not_fit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without a word: nothing is wrong."""
    for dim in (8, 24):
        config = LlamaConfig(**SMALL | {"head_dim": dim, "num_hidden_layers": 1})
        runner = runner_of(LlamaForCausalLM(config).eval())
        assert runner.capabilities.prompt_piece == 1
        assert feed_chain(runner, text(3), 2, prompt=True).shape == (2, 90)
    assert not caplog.text


@pytest.mark.parametrize(
    ("fault", "said"),
    [("in a slot", "wrong rows"), ("everywhere", "wrong rows"), ("none", "no such instruction")],
)
def test_kernels_that_are_wrong_are_refused(
    fault: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = PromptAttention.attend

    def faulty(self: PromptAttention, *given: Any) -> torch.Tensor:
        if fault == "none":
            raise RuntimeError("no such instruction")
        found = true(self, *given)
        return found.flip(-1) if fault == "everywhere" else found + 1e-4 * self.inputs[0]

    monkeypatch.setattr(PromptAttention, "attend", faulty)
    with pytest.raises(KernelsUnfit, match=said):
        runner_of(model_of(WINDOWS))
