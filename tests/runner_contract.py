"""What every `ModelRunner` must satisfy.

A test module subclasses `RunnerContract`, and names the kinds of runner:

    class TestMine(RunnerContract):
        kinds = {"mine": MyRunner}  # each makes one: empty, float32, context from 24 to 256
        others = {"my other": MyOtherRunner}  # similar to one in `kinds`: tested as `long`
"""

from collections.abc import Callable, Mapping
from itertools import product
from typing import ClassVar

import pytest
import torch

from pearl.errors import RequestError
from pearl.models.runner import Feed, ModelRunner, feed_chain

Kinds = Mapping[str, Callable[..., ModelRunner]]
PIECES = [(1,) * 12, (5, 7), (1, 3, 8), (8, 1, 3), (2, 2, 1, 1, 6)]
PARENTS = (-1, 0, 0, 1, -1, 2, 3)


def some_tokens(runner: ModelRunner, count: int, start: int = 0) -> list[int]:
    """Return a fixed, irregular sequence of ids of the runner's vocabulary."""
    return [(7 + 5 * i + i * i) % runner.vocab_size for i in range(start, start + count)]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def empty(runner: ModelRunner) -> None:
    """Empty all slots of the runner, and forget their trees."""
    for slot in range(runner.capabilities.slots):
        runner.rollback(0, slot)


def needs_trees(runner: ModelRunner) -> None:
    if not runner.capabilities.tree_nodes:
        pytest.skip("takes no trees")


class RunnerContract:
    """Tests that the logits depend only on the text.

    They must not depend on how the text was cut into forwards, rolled back, grown as a tree, or
    copied.
    """

    kinds: ClassVar[Kinds] = {}
    others: ClassVar[Kinds] = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        known = [pytest.param(make, id=kind) for kind, make in self.kinds.items()]
        known += [
            pytest.param(make, id=kind, marks=pytest.mark.long)
            for kind, make in self.others.items()
        ]
        metafunc.parametrize("make", known, scope="class")

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, make: Callable[[], ModelRunner]) -> ModelRunner:
        return make()

    @pytest.fixture(scope="class")
    @classmethod
    def whole(cls, runner: ModelRunner) -> torch.Tensor:
        """Return logits [12, vocab] of the first 12 tokens, fed at once into an empty cache."""
        empty(runner)
        return feed_chain(runner, some_tokens(runner, 12), 12).clone()

    @pytest.fixture(autouse=True)
    def emptied(self, runner: ModelRunner) -> None:
        """Empty the runner before each test, after the class's fixtures have used it."""
        empty(runner)

    def test_pieces_equal_the_whole(self, runner: ModelRunner, whole: torch.Tensor) -> None:
        """A causal mask aligned to the upper left would fail in pieces of two or more tokens."""
        for pieces in PIECES:
            runner.rollback(0)
            fed, found = 0, []
            for piece in pieces:
                found.append(feed_chain(runner, some_tokens(runner, piece, fed), piece))
                fed += piece
                assert runner.length() == fed, pieces
            close(torch.cat(found), whole)

    def test_after_a_rollback_as_from_scratch(
        self, runner: ModelRunner, whole: torch.Tensor
    ) -> None:
        """The tokens that stood after position `keep` must not be seen after the rollback."""
        for keep in (0, 1, 5, 11, 12):
            runner.rollback(0)
            feed_chain(runner, some_tokens(runner, keep) + some_tokens(runner, 6, start=40), 1)
            runner.rollback(keep)
            assert runner.length() == keep
            if keep < 12:
                close(
                    feed_chain(runner, some_tokens(runner, 12 - keep, keep), 12 - keep),
                    whole[keep:],
                )

    def test_a_tree_equals_its_paths(self, runner: ModelRunner) -> None:
        needs_trees(runner)
        held, tokens = some_tokens(runner, 6), some_tokens(runner, 7, start=50)
        alone = {3: [0, 1, 3], 6: [0, 1, 3, 6], 5: [0, 2, 5], 4: [4], 2: [0, 2]}
        feed_chain(runner, held, 0)
        (found,) = runner.forward([Feed(tokens, 7, parents=PARENTS)])
        for node, path in alone.items():
            runner.rollback(6)
            close(feed_chain(runner, [tokens[i] for i in path], 1), found[node : node + 1])

    def test_keeping_a_path_is_having_fed_it_alone(self, runner: ModelRunner) -> None:
        needs_trees(runner)
        held, tokens = some_tokens(runner, 6), some_tokens(runner, 7, start=50)
        for path in ([], [0], [4], [0, 2], [0, 2, 5], [0, 1, 3, 6]):
            runner.rollback(0)
            feed_chain(runner, held, 0)
            runner.forward([Feed(tokens, 2, parents=PARENTS)])
            runner.keep(path)
            assert runner.length() == 6 + len(path)
            after = feed_chain(runner, some_tokens(runner, 4, start=20), 4).clone()
            runner.rollback(0)
            feed_chain(runner, held + [tokens[i] for i in path], 0)
            close(feed_chain(runner, some_tokens(runner, 4, start=20), 4), after)

    def test_slots_are_sequences_of_their_own(
        self, runner: ModelRunner, whole: torch.Tensor
    ) -> None:
        if runner.capabilities.slots < 2:
            pytest.skip("holds one sequence")
        feed_chain(runner, some_tokens(runner, 5), 0, slot=1)
        feed_chain(runner, some_tokens(runner, 9, start=30), 1)
        runner.fork(1, 0)
        found = runner.forward(
            [Feed(some_tokens(runner, 7, 5), 7), Feed(some_tokens(runner, 3, start=60), 1, slot=1)]
        )
        close(found[0], whole[5:])
        runner.rollback(5, 1)
        close(feed_chain(runner, some_tokens(runner, 7, 5), 7, slot=1), whole[5:])
        assert [runner.length(slot) for slot in (0, 1)] == [12, 12]

    def test_a_fork_of_a_part_copies_what_is_not_shared(
        self, runner: ModelRunner, whole: torch.Tensor
    ) -> None:
        if runner.capabilities.slots < 2:
            pytest.skip("holds one sequence")
        feed_chain(runner, some_tokens(runner, 9), 0)
        feed_chain(runner, some_tokens(runner, 4), 0, slot=1)
        feed_chain(runner, some_tokens(runner, 3, start=60), 0, slot=1)  # where the two part
        runner.fork(0, 1, 7, shared=4)
        assert [runner.length(slot) for slot in (0, 1)] == [9, 7]
        close(feed_chain(runner, some_tokens(runner, 5, 7), 5, slot=1), whole[7:])
        close(feed_chain(runner, some_tokens(runner, 3, 9), 3), whole[9:])

    def test_starts_empty(self, runner: ModelRunner) -> None:
        assert runner.length() == 0
        assert runner.context >= 24
        assert isinstance(runner.device, torch.device)
        runner.synchronize()

    def test_an_id_may_stand_on_the_device(self, runner: ModelRunner, whole: torch.Tensor) -> None:
        """A token id may be a tensor on the device, such as one that was just drawn there.

        Its buffer may be overwritten after the call.
        """
        feed_chain(runner, some_tokens(runner, 5), 0)
        found = []
        for token in some_tokens(runner, 7, 5):
            there = torch.tensor([token], device=runner.device)
            found.append(feed_chain(runner, there, 1))
            there.fill_(0)
        assert runner.length() == 12
        close(torch.cat(found), whole[5:])
        with pytest.raises(RequestError):
            feed_chain(
                runner, torch.zeros(runner.context, dtype=torch.long, device=runner.device), 1
            )

    def test_many_rollbacks(self, runner: ModelRunner, whole: torch.Tensor) -> None:
        """A decoding loop in small: guess wrong, roll back, correct."""
        for position in range(12):
            feed_chain(
                runner, some_tokens(runner, 1, position) + some_tokens(runner, 3, start=50), 4
            )
            runner.rollback(position)
            close(
                feed_chain(runner, some_tokens(runner, 1, position), 1),
                whole[position : position + 1],
            )

    def test_another_text_in_the_same_cache(self, runner: ModelRunner) -> None:
        """The logits depend on the tokens before; otherwise the other tests would prove nothing."""
        last = some_tokens(runner, 1)
        one = feed_chain(runner, some_tokens(runner, 8) + last, 1)
        runner.rollback(0)
        other = feed_chain(runner, some_tokens(runner, 8, start=30) + last, 1)
        assert not torch.allclose(one, other, atol=1e-3)

    def test_rows(self, runner: ModelRunner, whole: torch.Tensor) -> None:
        """The rows are those of the last tokens. A chunk of a long prefill may ask for no rows."""
        for cached, rows in product((0, 3), (0, 1, 2, 5)):
            runner.rollback(0)
            if cached:
                feed_chain(runner, some_tokens(runner, cached), 0)
            found = feed_chain(runner, some_tokens(runner, 5, cached), rows)
            assert (found.shape, found.dtype) == ((rows, runner.vocab_size), torch.float32)
            assert found.device == runner.device
            torch.testing.assert_close(
                found, whole[cached + 5 - rows : cached + 5], atol=1e-4, rtol=1e-4
            )

    @pytest.mark.parametrize("count", [1, 4])
    def test_overflow_changes_nothing(self, runner: ModelRunner, count: int) -> None:
        """An overflow is found before any layer has run, and the whole context can be used.

        An error halfway would leave the layers at different lengths.
        """
        full = runner.context - count + 1
        feed_chain(runner, some_tokens(runner, full), 1)
        with pytest.raises(RequestError, match=str(runner.context)):
            feed_chain(runner, some_tokens(runner, count), 1)
        assert runner.length() == full
        runner.rollback(full - 1)
        again = feed_chain(runner, some_tokens(runner, 1, full - 1), 1).clone()
        runner.rollback(0)
        close(again, feed_chain(runner, some_tokens(runner, full), 1))

    def test_kept_logits_stay(self, runner: ModelRunner) -> None:
        """A runner that reuses its output buffer would change rows that a verifier holds."""
        kept = feed_chain(runner, some_tokens(runner, 3), 2)
        copy = kept.clone()
        feed_chain(runner, some_tokens(runner, 3, start=20), 2)
        runner.rollback(1)
        feed_chain(runner, some_tokens(runner, 2, start=30), 2)
        assert torch.equal(kept, copy)

    def test_what_it_cannot_do_is_refused_by_name(self, runner: ModelRunner) -> None:
        can = runner.capabilities
        feed_chain(runner, some_tokens(runner, 3), 1)
        for feed in (
            Feed([1], 1, slot=can.slots),
            Feed([1] * (can.tree_nodes + 1), 1, parents=(-1,) * (can.tree_nodes + 1)),
        ):
            with pytest.raises(RequestError, match=r"slot|tree"):
                runner.forward([feed])
        assert runner.length() == 3

    def test_a_tree_that_overflows_changes_nothing(self, runner: ModelRunner) -> None:
        needs_trees(runner)
        feed_chain(runner, some_tokens(runner, runner.context - 1), 0)
        with pytest.raises(RequestError, match=str(runner.context)):
            runner.forward([Feed([1, 2], 1, parents=(-1, 0))])
        assert runner.forward([Feed([1, 2], 1, parents=(-1, -1))])[0].isfinite().all()
        runner.keep([1])
        assert runner.length() == runner.context
