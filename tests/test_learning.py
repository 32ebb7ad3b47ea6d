"""The pieces that learning stands on, and what is measured of a draft, against the same computed the long way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pearl.errors import ModelError
from pearl.lab.distill.answers import Answer, answer
from pearl.lab.distill.config import DistillConfig
from pearl.lab.distill.learning import DraftLearner, generator
from pearl.lab.distill.loss import DIVERGENCES, head_loss
from pearl.lab.distill.pair import check_head
from pearl.models.checkpoints.loading import load_model, load_runner
from pearl.models.runner import feed_chain
from tests.tiny import EOS_ID, tiny_model

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8], [9, 10], [40, 41, 42, 43, 44, 45, 46]]


def model(**options):
    return load_model(str(tiny_model("llama", **options)), device=CPU).eval()


def by_hand(kind: Path, prompt: list[int], limit: int) -> list[int]:
    """Greedy text, a token at a time."""
    runner = load_runner(str(kind), device=CPU, forwards="transformers")
    tokens, logits = [], feed_chain(runner, prompt, 1)
    while len(tokens) < limit and EOS_ID not in tokens:
        tokens.append(int(logits[0].argmax()))
        logits = feed_chain(runner, tokens[-1:], 1)
    return tokens


# ---- answers ----


def test_a_batch_answers_as_each_alone() -> None:
    """Left padding, rows that end and are cut out of the batch: none of it shows."""
    kind = tiny_model("llama")
    prompts = [[i, *range(3, 3 + i % 7)] for i in range(5, 29)]
    limits = 20
    model = load_model(str(kind), device=CPU).eval()
    found = answer(model, prompts, limit=limits, eos=(EOS_ID,), top=5, allow_loops=True)
    assert [a.tokens for a in found] == [by_hand(kind, prompt, limits) for prompt in prompts]


def test_drawn_tokens_have_the_recorded_frequencies() -> None:
    """Chi-square over one position of many rows, at temperature 1; greedy rows among them take the first."""
    drawn = answer(
        model(), [[5, 6]] * 4000, limit=1, eos=(), temperatures=(1.0, 0.0), top=4, generator=generator(0, "chi")
    )
    probs, ids = drawn[0].top_probs[0].double(), drawn[0].top_ids[0].tolist()
    counts = torch.tensor([sum(a.tokens[0] == id for a in drawn[::2]) for id in ids]).double()
    expected = 2000 * probs / probs.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # 3 degrees of freedom, one in a thousand
    assert {a.tokens[0] for a in drawn[1::2]} == {ids[0]}


# ---- loss ----


def divergence(p: torch.Tensor, q: torch.Tensor, name: str) -> torch.Tensor:
    """Of two distributions, by definition; fkl without the first one's entropy."""
    middle = (p + q) / 2
    found = {
        "fkl": -(p * q.log()).sum(),
        "rkl": (q * (q / p).log()).sum(),
        "jsd": ((p * (p / middle).log()).sum() + (q * (q / middle).log()).sum()) / 2,
        "tvd": (p - q).abs().sum() / 2,
    }
    return found[name]


def reference(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, name: str
) -> torch.Tensor:
    """The same by autograd, row by row."""
    total = torch.zeros(())
    for row, kinds, theirs in zip(hidden, ids, probs, strict=True):
        ours = (weight @ row).softmax(-1)
        rest = torch.ones(len(weight), dtype=torch.bool)
        rest[kinds] = False
        all_theirs = torch.cat((theirs, 1 - theirs.sum(0, keepdim=True)))
        total = total + divergence(all_theirs, torch.cat((ours[kinds], ours[rest].sum(0, keepdim=True))), name)
    return total / len(hidden)


@pytest.mark.parametrize(("rows", "name"), [(1100, "fkl"), *((7, name) for name in DIVERGENCES)])  # chunks, or one
def test_the_loss_and_its_gradients(rows: int, name: str) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, 6, requires_grad=True), torch.randn(20, 6, requires_grad=True)
    probs, ids = (torch.randn(rows, 20) * 2).softmax(-1).topk(4)
    wanted = reference(hidden, weight, ids, probs, name)
    gradients = torch.autograd.grad(wanted, (hidden, weight))
    found = head_loss(hidden, weight, ids, probs, divergence=name)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)  # what is left over is a difference
    for ours, theirs in zip(torch.autograd.grad(found, (hidden, weight)), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_head_that_does_more_is_refused() -> None:
    """Bloom multiplies only; a cap on the logits would make every figure wrong."""
    loaded = model()
    check_head(loaded)
    loaded.lm_head.bias = torch.nn.Parameter(torch.linspace(-5, 5, loaded.config.vocab_size))
    with pytest.raises(ModelError, match="does more to its logits"):
        check_head(loaded)


# ---- agreement ----


def test_agreement_is_what_a_look_at_each_token_says(tmp_path: Path) -> None:
    """Brute force: the draft on each prefix alone."""
    draft = model(noise=0.6)
    learner = DraftLearner(DistillConfig(out=str(tmp_path)), draft)

    def answered(prompt: list[int], tokens: list[int]) -> Answer:
        return Answer(prompt, tokens, torch.tensor(tokens)[:, None], torch.ones(len(tokens), 1))

    def likeliest(prefix: list[int]) -> int:
        return int(draft(torch.tensor([prefix])).logits[0, -1].argmax())

    given = [
        answered(prompt, [likeliest(prompt), *tokens])
        for prompt, tokens in zip(PROMPTS, ([12, 13, 14, 15], [], [32, 33]), strict=True)
    ]
    agreed = [likeliest(one.prompt + one.tokens[:i]) == one.tokens[i] for one in given for i in range(len(one.tokens))]
    assert learner.agreement(given) == sum(agreed) / len(agreed) >= 3 / 9
    assert learner.agreement(given[1:2]) == 1.0
