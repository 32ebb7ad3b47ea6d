"""Bit for bit: logits that do not depend on how a sequence was cut into forwards, and texts that follow from it."""

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import product

import pytest
import torch
from transformers import AutoModelForCausalLM

from pearl import Engine, EngineConfig, SamplingParams
from pearl.errors import ModelError
from pearl.lab.bench.exactness import check_pair, check_texts, compare_cuts, text_cases
from pearl.models.cpu.runner import CpuRunner
from pearl.models.forward.linear_layers import Rounding, gated, matrix, normalise
from pearl.models.runner import Feed, ModelRunner, feed_chain
from pearl.models.transformers.runner import HFRunner
from tests.conftest import TOY, Quiet
from tests.forwards import KINDS
from tests.pairwise import pairwise
from tests.planted import BUGS, LAW
from tests.runner_contract import some_tokens
from tests.tiny import irregular, on_cpu, tiny_model

DTYPES = ("float32", "bfloat16", "float16", "int8", "int4")
TOKENS = 256  # two blocks of attention


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def load(kind: str, dtype: str, **options: object) -> ModelRunner:
    return on_cpu(tiny_model(kind), dtype=dtype, **options)  # type: ignore[arg-type]


# Every kind in one dtype, and some in all; with the tests marked `long` every kind in all.
USUAL = {(kind, DTYPES[at % len(DTYPES)]) for at, kind in enumerate(KINDS)}
USUAL |= set(product(("llama", "qwen3-moe", "gemma2-short"), DTYPES))
CASES = [
    pytest.param(*case, marks=[] if case[:2] in USUAL else pytest.mark.long)
    for case in pairwise(KINDS, DTYPES, [1, 2], range(4))
]


@pytest.mark.parametrize(("kind", "dtype", "threads", "seed"), CASES, indirect=["threads"])
def test_logits_are_the_same_bits_however_a_sequence_is_cut(
    kind: str, dtype: str, threads: int, seed: int
) -> None:
    runner = load(kind, dtype)
    assert runner.capabilities.row_invariant
    found = compare_cuts(runner, kind, TOKENS, seed)
    assert found.passed, found
    assert found.count >= TOKENS


def random_tree(rng: random.Random, nodes: int) -> tuple[int, ...]:
    """Of one root's children or several; often deep, for a new node mostly follows one of the last."""
    return tuple(max(-1, node - 1 - int(rng.random() ** 3 * (node + 1))) for node in range(nodes))


def paths(parents: Sequence[int]) -> list[list[int]]:
    """From the slot's end to each node."""
    found: list[list[int]] = []
    for node, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), node])
    return found


@pytest.mark.parametrize(
    ("kind", "dtype", "held"),
    [
        *((kind, "float32", 130) for kind in KINDS),
        *(
            ("llama", "bfloat16", 1),
            ("qwen3", "int8", 126),
            ("llama", "int4", 130),
            ("llama", "float32", 126),
        ),
    ],
)
def test_a_tree_gives_each_node_the_bits_of_its_path_alone(
    kind: str, dtype: str, held: int
) -> None:
    """Behind a cache that ends before, at and after a block of attention; and keeping a path is having fed it."""
    runner, rng = load(kind, dtype), random.Random(held)
    start = [rng.randrange(runner.vocab_size) for _ in range(held)]
    if start:
        feed_chain(runner, start, 0)
    for nodes in (1, 5, 14):
        parents = random_tree(rng, nodes)
        tokens = [rng.randrange(runner.vocab_size) for _ in range(nodes)]
        (found,) = runner.forward([Feed(tokens, nodes, parents=parents)])
        assert runner.length() == held, "a tree waits to be kept"
        kept = rng.choice(paths(parents))
        runner.keep(kept)
        assert runner.length() == held + len(kept)
        after = feed_chain(runner, [9], 1)
        for path in paths(parents):
            runner.rollback(held)
            assert torch.equal(
                feed_chain(runner, [tokens[node] for node in path], 1)[0], found[path[-1]]
            )
            if path == kept:
                assert torch.equal(feed_chain(runner, [9], 1), after)
        runner.rollback(held)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_what_is_fed_beside_a_slot_does_not_change_its_bits(kind: str) -> None:
    """Chains and trees of several slots in one forward; one slot forked from another."""
    runner = CpuRunner(AutoModelForCausalLM.from_pretrained(tiny_model(kind)), 256, slots=3)
    tokens = [11 * i % runner.vocab_size for i in range(200)]
    wanted = feed_chain(runner, tokens, 200)
    runner.rollback(0)
    feed_chain(runner, tokens[:130], 0, slot=1)
    runner.fork(1, 2)
    feed_chain(runner, tokens[:40], 0)
    parents = (-1, 0, 1, 0, -1)
    found = runner.forward(
        [
            Feed(tokens[40:45], 5),
            Feed(tokens[130:133], 2, 2),
            Feed([*tokens[130:133], 5, 6], 5, 1, parents),
        ]
    )
    assert torch.equal(found[2][:3], wanted[130:133])
    assert torch.equal(found[0], wanted[40:45])
    assert torch.equal(found[1], wanted[131:133])
    runner.keep([0, 1, 2], 1)
    assert [runner.length(slot) for slot in range(3)] == [45, 133, 133]
    assert torch.equal(feed_chain(runner, tokens[133:], 67, 1), wanted[133:])
    assert torch.equal(feed_chain(runner, tokens[133:], 67, 2), wanted[133:])


def test_one_thread_and_two_give_the_same_bits() -> None:
    found, before = [], torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        runner = load("qwen2", "float32")
        found.append(feed_chain(runner, some_tokens(runner, TOKENS), TOKENS))
    torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_check_notices_a_forward_whose_rows_depend_on_one_another(kind: str) -> None:
    """The general path, in float32: what our own forward did too, before its products were chosen for this."""
    runner = load(kind, "float32", forwards="transformers")
    assert isinstance(runner, HFRunner)
    assert not runner.capabilities.row_invariant
    found = compare_cuts(runner, kind, TOKENS)
    assert not found.passed
    assert "position" in found.first


# ---- the parts ----


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_elementwise_parts_do_not_depend_on_threads_or_company(threads: int) -> None:
    """Of so many elements that torch splits them, at widths that are no multiple of a vector."""
    for inner in (72, 1531):
        rows = irregular(40_000 // inner + 9, 2 * inner, torch.float32)
        together = gated(rows)
        assert torch.equal(together, torch.cat([gated(row[None]) for row in rows]))
        weight = rows[0].abs()
        assert torch.equal(
            normalise(rows, weight, 1e-6),
            torch.cat([normalise(r[None], weight, 1e-6) for r in rows]),
        )


@pytest.mark.parametrize("rounding", ["int8", "int4"])
def test_rounding_refuses_widths_that_its_kernel_cannot_take(rounding: Rounding) -> None:
    layer = torch.nn.Linear(36, 300, bias=False)
    with pytest.raises(ModelError, match=r"multiple of 32; one of this model takes 36"):
        matrix(layer, dtype=torch.float32, is_native=True, rounding=rounding)


# ---- whole pairs ----


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", "qwen3"), ("float32", "llama")])
def test_texts_of_every_method_are_equal_bit_for_bit(dtype: str, kind: str) -> None:
    """Greedy, coupled and ratio; with the draft killed in the middle of texts, too."""
    config = EngineConfig(
        target=str(tiny_model(kind, chat=True)),
        draft=str(tiny_model(kind, noise=0.05, chat=True)),
        target_dtype=dtype,  # type: ignore[arg-type]
        draft_dtype=dtype,  # type: ignore[arg-type]
        exact=True,
        draft_restarts=1000,
        log_level="error",
    )
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=40, ignore_eos=True)
    prompts = ["The hat and the tin", "an inner thing, then another one"]
    with Engine(config=config) as engine:
        findings = list(check_texts(engine, prompts, params, kill=True))
    assert len(findings) == 2 * 12 + 5
    assert [finding for finding in findings if not finding.passed] == []


@pytest.mark.parametrize(("draft", "quick"), [(TOY, True), (TOY, False), ("none", False)])
def test_the_number_of_comparisons_is_told_before_the_first(draft: str, quick: bool) -> None:
    watcher = Quiet()
    config = EngineConfig(target=TOY, draft=draft, log_level="error", draft_restarts=1000)
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True)
    kinds = set()
    for number, finding in enumerate(
        check_pair(config, [[1, 2, 3]], params, kill=True, quick=quick, watcher=watcher)
    ):
        assert finding.passed
        assert number < watcher.total, "it is told before the first"
        kinds.add(finding.what.partition(":")[0])
    assert watcher.total == number + 1
    assert {"greedy", "coupled"} <= kinds
    assert ("ratio" in kinds) == (draft != "none")
    cases = [len(text_cases(config, kill=True, quick=is_quick)) for is_quick in (True, False)]
    assert cases[0] < cases[1], "a first look is shorter"


def test_a_head_is_compared_where_there_is_no_draft() -> None:
    config = EngineConfig(target=TOY, draft="none", head="some")
    for is_quick in (True, False):
        methods = {case.settings for case in text_cases(config, kill=True, quick=is_quick)}
        assert {"ngram", "head", "auto"} <= methods


# Of a cache, a tree and a window.
QUICK = (
    "a KV prefix one too long on reuse",
    "the wrong rows of a tree kept",
    "the last token of a window accepted unseen",
)


@pytest.mark.slow
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="workers are not forked there, and bugs not planted"
)
@pytest.mark.parametrize(
    "bug", [bug if bug in QUICK else pytest.param(bug, marks=pytest.mark.long) for bug in BUGS]
)
def test_the_check_notices_bugs_that_change_a_text(
    bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not one that changes the law of sampled texts only, which tests/test_verification.py shows."""
    monkeypatch.setenv("PEARL_PLANTED", bug)
    config = EngineConfig(
        target=str(tiny_model("llama", chat=True)),
        draft=str(tiny_model("llama", noise=0.05, chat=True)),
        target_dtype="float32",
        draft_dtype="float32",
        log_level="error",
    )
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=40, ignore_eos=True)
    prompts = [
        "the hat the tin the cat the hat the ran the tin the hen the",
        "The hat and the hat and the hat",
    ]
    prompts.append(
        "an inner thing, then another one and the hat in the tin and the"
    )  # texts that repeat, and branch
    longest = 0
    with closing(check_pair(config, prompts, params, kill=False, watcher=Quiet())) as findings:
        for finding in findings:
            longest = max(longest, finding.longest)
            if not finding.passed:
                break
    assert finding.passed == (bug == LAW), finding
    assert longest >= 6 or bug != LAW, "paths of trees are long"
