"""A text ends exactly where it should: EOS, stop, limit, at every offset inside a window; short and full contexts."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from pearl.drafting.ngram import GuessTree
from pearl.drafting.proposer import ModelProposer
from pearl.execution.draft import DraftExecutor
from pearl.execution.target import TargetExecutor
from pearl.metrics import Stopwatch, fold
from pearl.models.checkpoints.tokenizers import ToyTokenizer
from pearl.models.toy import ToyRunner
from pearl.protocol.events import Guess
from pearl.protocol.messages import FinishReason, Provenance, Source, Submit
from pearl.protocol.request import Counts
from pearl.protocol.scheduler import PREFILL_CHUNK
from pearl.protocol.speeds import Speeds
from pearl.spec.methods import METHODS
from pearl.text.stream import TextStream
from tests.options import drawn_by
from tests.pairwise import combined
from tests.protocol_pair import Pair, Result, at_random, check_counts
from tests.scripted import PROMPT, ScriptDraft, ScriptTarget, submission

VOCAB = 40
GARBAGE = VOCAB - 1  # what either model says in a context that is not the script's
TEXT = (3, 1, *range(5, 25))
OFFSETS = range(1, 11)  # tokens generated up to the end: over two windows of four
AHEAD = [(method, 0) for method in METHODS] + [
    (name, 8) for name, method in METHODS.items() if method.look_ahead
]
WINDOWS = [("fixed", 1), ("fixed", 4), ("stream", 4)]
TOKENIZER = ToyTokenizer(VOCAB)


def runner(text: Sequence[int], wrong: Sequence[int] = (), says: int = GARBAGE) -> ToyRunner:
    """A toy that is sure of `text`; at the positions in `wrong` it is sure of the token `says`."""

    def distribution(seen: Sequence[int]) -> torch.Tensor:
        position = len(seen)
        known = tuple(seen) == tuple(text[:position]) and position < len(text)
        token = GARBAGE if not known else says if position in wrong else text[position]
        return torch.nn.functional.one_hot(torch.tensor(token), VOCAB).float()

    return ToyRunner(VOCAB, distribution)


class Foresees(TargetExecutor):
    """It guesses the next four tokens of `TEXT`, and a wrong one beside the first."""

    def _guess(self, request: object, guess: Guess, num_fed: int) -> GuessTree:
        place = guess.base + len(guess.tokens)
        right = TEXT[place : min(place + 4, guess.limit)]
        tokens = (*right, GARBAGE) if right else ()
        parents = (place - 1, *range(place, place + len(right) - 1), place - 1) if right else ()
        sources = [Source.NGRAM] * len(tokens)
        return GuessTree([*tokens], [*parents], [0.9] * len(tokens), sources)


def run(
    submit: Submit,
    text: Sequence[int] = TEXT,
    wrong: Sequence[int] = (),
    says: int = GARBAGE,
    seed: int = 0,
    draft_context: int = 1000,
) -> Result:
    """Real executors on toy runners, moves in random order."""
    target = Foresees(runner(text), partial(TextStream, TOKENIZER))
    pair = Pair(
        [submit],
        target,
        lambda: DraftExecutor(ModelProposer(runner(text, wrong, says), VOCAB)),
        draft_context,
    )
    pair.run(at_random(seed))
    result = pair.results[submit.request]
    check_counts(result, runs_ahead=submit.options.look_ahead > 0)
    return result


ENDS: dict[FinishReason, Callable[[int], dict[str, Any]]] = {
    FinishReason.EOS: lambda offset: {"eos": (TEXT[len(PROMPT) + offset - 1], 38)},
    FinishReason.STOP: lambda offset: {
        "stop": ("~", TOKENIZER.decode(TEXT[: len(PROMPT) + offset][-min(2, offset) :]))
    },
    FinishReason.LENGTH: lambda offset: {"limit": len(PROMPT) + offset},
}


@combined
@pytest.mark.parametrize(("method", "look_ahead"), AHEAD)
def test_the_text_is_cut_at_its_end(method: str, look_ahead: int, combined: Any) -> None:
    """Greedy or sampled, the end accepted, corrected or guessed: nothing after it is committed or counted."""
    for (window, gamma), reason, offset, is_wrong in combined(WINDOWS, ENDS, OFFSETS, range(3)):
        end = len(PROMPT) + offset
        wrong = ((), (end - 1,), (4, 7))[is_wrong]
        sampling = drawn_by(temperature=offset % 2, seed=offset)
        settings = {
            "window": window,
            "gamma": gamma,
            "look_ahead": look_ahead,
            "sampling": sampling,
        }
        submit = submission(TEXT, method, **settings, **ENDS[reason](offset))
        result = run(submit, wrong=wrong, seed=offset)
        assert tuple(result.tokens) == TEXT[len(PROMPT) : end], (
            window,
            gamma,
            reason,
            offset,
            wrong,
        )
        assert result.end is not None
        assert result.end.reason is reason, (window, gamma, reason, offset, wrong)


@pytest.mark.parametrize("method", METHODS)
def test_an_end_that_was_drafted_but_rejected_ends_nothing(method: str) -> None:
    for position in range(len(PROMPT), len(TEXT) - 1, 3):
        stop = TOKENIZER.decode([TEXT[position - 1], 38])
        submit = submission(TEXT, method, window="stream", gamma=4, eos=(38,), stop=(stop,))
        result = run(submit, wrong=(position,), says=38, seed=position)
        assert tuple(result.tokens) == TEXT[len(PROMPT) :]


def test_a_stop_is_looked_for_in_what_was_generated_only() -> None:
    """Not in the prompt, nor across its end."""
    stops = (TOKENIZER.decode(PROMPT), TOKENIZER.decode(TEXT[1:3]))
    result = run(submission(TEXT, gamma=3, stop=stops))
    assert tuple(result.tokens) == TEXT[len(PROMPT) :]


def test_of_several_endings_at_one_token_eos_is_named() -> None:
    submit = submission(TEXT[:8], gamma=3, eos=(TEXT[7],), stop=(TOKENIZER.decode(TEXT[7:8]),))
    result = run(submit)
    assert result.end is not None
    assert result.end.reason is FinishReason.EOS
    assert len(result.tokens) == 6


@combined
@pytest.mark.parametrize("method", METHODS)
def test_prompts_of_one_token_and_limits_of_one(method: str, combined: Any) -> None:
    """Prompts shorter than the window crash official PEARL; a limit of one token leaves no room for any window."""
    windows, limits = [*WINDOWS, ("fixed", 30), ("stream", 30)], ((1, 2), (1, 9), (8, 9), (20, 22))
    for (window, gamma), (prompt, limit), seed in combined(windows, limits, range(3)):
        submit = submission(TEXT, method, prompt, window=window, gamma=gamma, limit=limit)
        assert tuple(run(submit, seed=seed, wrong=(limit - 1,)).tokens) == TEXT[prompt:limit]


@combined
@pytest.mark.parametrize("method", METHODS)
def test_a_draft_with_a_shorter_context_is_outlived(method: str, combined: Any) -> None:
    """Crossed at every point of a window; filled by the prompt, exactly or more. From there on the target is alone."""
    for (window, gamma), context, is_wrong in combined(WINDOWS, range(1, 16), range(3)):
        submit = submission(TEXT, method, window=window, gamma=gamma)
        result = run(
            submit,
            wrong=((), (context - 1,), (4, 8))[is_wrong],
            seed=context,
            draft_context=context,
        )
        assert tuple(result.tokens) == TEXT[len(PROMPT) :]
        beyond = result.provenance[max(0, context - len(PROMPT)) :]
        assert set(beyond) <= {Provenance.DIRECT}, "judged where no draft could be"


@pytest.mark.parametrize(
    "length", [1, PREFILL_CHUNK - 1, PREFILL_CHUNK, PREFILL_CHUNK + 1, 2 * PREFILL_CHUNK + 5]
)
@pytest.mark.parametrize("draft_context", [PREFILL_CHUNK + 3, 1 << 20])
def test_long_prompts_are_fed_in_chunks(length: int, draft_context: int) -> None:
    """On both sides; the draft's context may end inside the prompt. The scripted executors check every forward."""
    text = tuple(range(length + 12))
    submit = submission(text, prompt=length, gamma=4)
    for seed in range(4):
        draft = partial(ScriptDraft, text, (length + 3,))
        pair = Pair([submit], ScriptTarget(text), draft, draft_context)
        pair.run(at_random(seed))
        assert tuple(pair.results[1].tokens) == text[length:]
        forwards = [c for c in pair.log if type(c).__name__ in ("Forward", "Draft")]
        assert max(len(f.tokens) for f in forwards) <= PREFILL_CHUNK  # type: ignore[attr-defined]


def test_the_whole_context_can_be_used() -> None:
    """The last token needs no feeding: a text as long as the cache fits."""
    small = runner(TEXT)
    small.context = len(TEXT) - 1
    draft = runner(TEXT, (7,))
    draft.context = len(TEXT) - 1
    pair = Pair(
        [submission(TEXT, gamma=4)],
        TargetExecutor(small),
        lambda: DraftExecutor(ModelProposer(draft, VOCAB)),
        len(TEXT),
    )
    pair.run(at_random(0))
    assert tuple(pair.results[1].tokens) == TEXT[len(PROMPT) :]


def test_latencies_between_tokens_and_from_the_submission() -> None:
    """Tokens of one commit come together; a request that waited for another says so apart."""
    watch = Stopwatch(submitted=1.0, begun=3.0)
    for at, tokens in ((4.0, 1), (5.0, 1), (5.5, 3), (7.5, 1)):
        watch.committed(tokens, at)
    told = fold(Counts(), watch, Speeds(), 4, 0)
    assert (told.queue_seconds, told.seconds_to_first_token, told.seconds) == (2.0, 3.0, 6.5)
    gaps = [1.0, 0.5, 0.0, 0.0, 2.0]
    assert told.itl_p50 == sorted(gaps)[2] == 0.5
    assert told.itl_p99 == 2.0
    assert told.tokens_per_second == 5 / 3.5
    assert Stopwatch().token_latency(0.5) is None
    together = Stopwatch()
    together.committed(1, 1.0)
    together.committed(9, 2.0)
    assert (together.token_latency(0.5), together.token_latency(0.99)) == (0.0, 1.0)
