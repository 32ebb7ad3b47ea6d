"""Heads that read the target's hidden states: their checkpoints, their guesses, and that no text changes."""

import json
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pearl.config import EngineConfig, RequestOptions, SamplingParams
from pearl.drafting.heads import HeadText
from pearl.engine import Engine
from pearl.engine.stream import Result
from pearl.errors import ConfigError, ModelError, RequestError
from pearl.execution.target import TargetExecutor
from pearl.lab.studies.simulate import Timing, paired_executors, simulate
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.models.cpu.runner import CpuRunner
from pearl.models.feeds import Feed
from pearl.models.forward.layers import tapped
from pearl.models.forward.runner import ForwardRunner
from pearl.models.gpu.recordings import not_recorded
from pearl.models.gpu.runner import KernelRunner
from pearl.models.heads.loading import load_draft_head, load_head
from pearl.models.heads.runner import HeadRunner
from pearl.models.runner import feed_chain
from pearl.protocol.coordinator import Coordinator
from pearl.protocol.events import Deliver, End, Forward, Keep, Open, Phase, Rollback, Wait
from pearl.protocol.messages import Submit, Verdict
from tests.eagle3 import config_with
from tests.learned_head import texts_of, write_learned_head
from tests.options import resolved
from tests.tiny import CPU, on_cpu, tiny_model
from tests.trees import TreeExecutor, guess_after

TEXT = [5, 40, 7, 93, 11, 12, 200, 3, 17, 60, 61, 5, 40]
ODD_ROPE = {"rope_type": "odd", "rope_theta": 1e4}
PROMPTS = ["Write a", "Write a poem", "Explain"]


def target(kind: str = "llama-tied") -> Path:
    return tiny_model(kind, layers=4, chat=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that knows a few texts of the target by heart."""
    tokenizer, _ = load_tokenizer(str(target()))
    prompts = [tokenizer.encode(text) for text in (*PROMPTS, "Who", "a few", "Sum up", "Why not")]
    return write_learned_head(tmp_path_factory.mktemp("made") / "head", target(), prompts)


def runner(**options: Any) -> Any:
    return on_cpu(target(), features="layers", **options)


def changed(
    head: Path, into: Path, tensors: dict[str, torch.Tensor | None] | None = None, **config: Any
) -> Path:
    """A copy with some tensors replaced (None: removed) and settings changed."""
    shutil.copytree(head, into, dirs_exist_ok=True)
    found: dict[str, torch.Tensor | None] = {
        **load_file(head / "model.safetensors"),
        **(tensors or {}),
    }
    save_file(
        {name: one for name, one in found.items() if one is not None}, into / "model.safetensors"
    )
    settings = json.loads((head / "config.json").read_text()) | config
    (into / "config.json").write_text(json.dumps(settings))
    return into


# ---- hidden states ----


@torch.inference_mode()
def tapped_states(model: Any) -> torch.Tensor:
    """Those of `TEXT` that heads read, as transformers has them."""
    states = model.base_model(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in tapped(4)], -1)


@pytest.mark.parametrize("how", ["in C", "kernels"])
def test_features_are_the_inputs_of_three_layers(how: str, request: pytest.FixtureRequest) -> None:
    """Of chains in any cut and of trees, in each of the ways that our own forward computes."""
    model = AutoModelForCausalLM.from_pretrained(target(), dtype=torch.float32).eval()
    wanted = tapped_states(model)
    own: ForwardRunner
    if how == "kernels":
        request.getfixturevalue("small_tables")
        own = KernelRunner(model, 256, taps=tapped(4), record=not_recorded)
    else:
        own = CpuRunner(model, 256, taps=tapped(4))
    feed_chain(own, TEXT[:6], 1, prompt=True)
    torch.testing.assert_close(own.features(), wanted[:6], rtol=1e-4, atol=1e-4)
    own.forward([Feed((200, TEXT[6], TEXT[7], 9), 4, parents=(-1, -1, 1, 0))])
    torch.testing.assert_close(own.features()[[1, 2]], wanted[6:8], rtol=1e-4, atol=1e-4)
    own.keep((1, 2))
    feed_chain(own, TEXT[8:], 1)
    torch.testing.assert_close(own.features(), wanted[8:], rtol=1e-4, atol=1e-4)


# ---- the head ----


def test_what_is_read_follows_the_cache(trained: Path) -> None:
    """After a rollback the head continues from states that it kept, and starts over where it kept none."""
    own = runner()
    head = load_head(str(trained), own, lambda what: None)
    text = HeadText(head, 0)
    draw = lambda logits, position: int(head.ids[logits.argmax()])  # noqa: E731
    with torch.inference_mode():
        feed_chain(own, TEXT, 1)
        text.log.extend(0, own.features())
        assert text.read(TEXT, 5)
        before = text.draft(5, draw, 0.0)
        assert len(before) == 8
        text.log.rollback(9)
        assert text.read(TEXT, 9)
        own.rollback(7)
        text.log.rollback(7)
        feed_chain(own, TEXT[7:], 1)
        text.log.extend(7, own.features())
        assert text.read(TEXT, len(TEXT)), "what it knows begins later"
        own.rollback(0)
        text.log.rollback(0)
        feed_chain(own, TEXT, 1)
        text.log.extend(0, own.features())
        assert text.read(TEXT, 5)
        assert text.draft(5, draw, 0.0) == before
        text.log.rollback(0)
        text.log.extend(0, own.features()[:10])
        assert not text.read(TEXT, len(TEXT)), "states of later tokens are missing"


def test_a_head_reads_each_tree_before_it_guesses_again(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the cache keeps the tree's path only with the next forward."""
    own, was_read = runner(), []
    read = HeadText.read
    monkeypatch.setattr(
        HeadText, "read", lambda *given: was_read.append(read(*given)) or was_read[-1]
    )
    executor = TargetExecutor(own, head=load_head(str(trained), own, lambda what: None))
    coordinator, trees = Coordinator(executor, piece=own.capabilities.prompt_piece), 0
    events: list[object] = [
        Submit(1, tuple(TEXT), 80, resolved("head", look_ahead=8, rule="coupled"))
    ]
    with torch.inference_mode():
        while events:
            for command in coordinator.handle(events.pop()):
                if not isinstance(command, Deliver | Wait | End) and (
                    answer := executor.execute(command)
                ):
                    trees += bool(answer.fed and answer.fed.parents)  # type: ignore[union-attr]
                    events.append(answer)
    assert trees > 1
    assert all(was_read)
    assert executor._states.texts[0]._first == 0, "it never began anew"


@pytest.mark.parametrize(
    ("tensors", "config", "why"),
    [
        (
            {"model.layers.61.eh_proj.weight": torch.zeros(2, 2)},
            {},
            "a layer for multi-token prediction",
        ),
        ({"fc.weight": torch.zeros(32, 64)}, {}, "EAGLE head of the first or second version"),
        ({"fc.weight": torch.zeros(32, 99)}, {}, "of another model"),
        ({"layers.0.hidden_norm.weight": None}, {}, "has no layers.0.hidden_norm.weight"),
        ({"d2t": None}, {}, "nothing says which"),
        ({}, config_with({}, {"rope_parameters": ODD_ROPE}), "rope is not computed"),
    ],
)
def test_other_checkpoints_are_refused_by_what_they_are(
    trained: Path, tmp_path: Path, tensors: dict[str, Any], config: dict[str, Any], why: str
) -> None:
    with pytest.raises(ModelError, match=why):
        load_head(
            str(changed(trained, tmp_path / "head", tensors, **config)), runner(), lambda what: None
        )


def test_the_layout_of_the_authors_is_read(trained: Path, tmp_path: Path) -> None:
    """The same head under the names of EAGLE-3's authors gives the same guesses."""
    weights = load_file(trained / "model.safetensors")
    renamed: dict[str, torch.Tensor | None] = {
        name: None for name in weights if name.startswith("layers.0.")
    }
    renamed |= {name.replace("layers.0.", "midlayer."): weights[name] for name in renamed}
    other = changed(trained, tmp_path / "head", renamed)
    config = json.loads((trained / "config.json").read_text())
    layer = config["transformer_layer_config"]
    (other / "config.json").write_text(
        json.dumps({**layer, "draft_vocab_size": config["draft_vocab_size"]})
    )
    own = runner()
    feed_chain(own, TEXT, 1)
    outputs = []
    for path in (trained, other):
        head = load_head(str(path), own, lambda what: None)
        with torch.inference_mode():
            outputs.append(head.read(torch.tensor(TEXT[1:]), head.fused(own.features()[:-1]), 0))
    assert torch.equal(*outputs)


def test_who_needs_a_head_and_who_cannot_have_one(trained: Path) -> None:
    with pytest.raises(ConfigError, match="name one with --head"):
        EngineConfig(draft="none").check_options(RequestOptions(method="head"))  # type: ignore[call-arg]
    with pytest.raises(ModelError, match="keeps no hidden states"):
        runner(forwards="transformers")
    with pytest.raises(ModelError, match="needs a target of our own forward"):
        Engine("toy:vocab=32", "none", head=str(trained)).close()


# ---- texts ----


def results(engine: Engine, method: str, temperature: float) -> list[Result]:
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=5, ignore_eos=True)
    return engine.generate(PROMPTS, params, method=method, rule="coupled")


@pytest.fixture(scope="module")
def engine(trained: Path) -> Iterator[Engine]:
    draft = tiny_model("llama-tied", layers=4, chat=True, noise=0.3)
    with Engine(str(target()), str(draft), head=str(trained), slots=2) as running:
        yield running


@pytest.fixture(scope="module")
def with_a_head(trained: Path) -> Iterator[Engine]:
    """The head is the draft."""
    with Engine(str(target()), str(trained), slots=2) as running:
        yield running


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_text_changes(engine: Engine, with_a_head: Engine, temperature: float) -> None:
    """By a head alone, beside a draft and as the draft, with all that guesses, in slots, and after a common prefix."""
    wanted = [one.tokens for one in results(engine, "ar", temperature)]
    guessed = {}
    for method in ("head", "pearl", "ngram", "auto"):
        found = results(engine, method, temperature)
        assert [one.tokens for one in found] == wanted, method
        guessed[method] = sum(one.statistics.guessed_by_source.get("head", 0) for one in found)
    assert guessed["ngram"] == 0
    assert guessed["head"] > 0 or temperature, "random models' sampled texts cannot be guessed"
    for method in ("pearl", "sd", "ssd", "auto"):
        assert [one.tokens for one in results(with_a_head, method, temperature)] == wanted, method


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_head_of_a_target_of_another_dtype(trained: Path, dtype: str) -> None:
    """As in float32, but for rounding."""
    found = []
    for name in ("float32", dtype):
        own = runner(dtype=name)
        head = load_head(str(trained), own, lambda what: None)
        with torch.inference_mode():
            feed_chain(own, TEXT, 1)
            outputs = head.read(torch.tensor(TEXT[1:]), head.fused(own.features()[:-1]), 0)
            found.append(head.logits(outputs))
    assert (found[0] - found[1]).abs().mean() < 0.02 * found[0].std()


# ---- a head as the draft ----


def drafting(head: Path, **options: Any) -> HeadRunner:
    return load_draft_head(str(head), str(target()), CPU, None, 3, lambda what: None, **options)


@pytest.fixture(scope="module")
def states() -> torch.Tensor:
    """The target's, of `TEXT`."""
    own = runner()
    feed_chain(own, TEXT, 1)
    found: torch.Tensor = own.features()
    return found


def test_a_draft_head_computes_what_the_head_does(trained: Path, states: torch.Tensor) -> None:
    """With the target's states, and behind them with its own outputs, however the text was cut, and in other slots."""
    head = load_head(str(trained), runner(), lambda what: None)
    known = 9
    with torch.inference_mode():
        outputs = [head.read(torch.tensor(TEXT[1 : known + 1]), head.fused(states[:known]), 0)]
        for token in TEXT[known + 1 :]:
            outputs.append(head.read(torch.tensor([token]), outputs[-1][-1:], 0))
        wanted = torch.full((len(TEXT) - 1, 267), -torch.inf)
        wanted[:, head.ids] = head.logits(torch.cat(outputs))
        for cuts in ((0, 13), (0, 1, 9, 10, 13), (0, 8, 11, 13), (0, 4, 13)):
            own = drafting(trained)
            own.extend(0, states[: cuts[1]][:known], 0)
            found = []
            for start, end in pairwise(cuts):
                found.append(feed_chain(own, TEXT[start:end], end - start))
                own.extend(end, states[end:known], 0)
            torch.testing.assert_close(torch.cat(found)[1:], wanted, rtol=1e-4, atol=1e-4)
            own.fork(0, 2, 11)
            again = feed_chain(own, TEXT[11:], 2, slot=2)
            torch.testing.assert_close(again, wanted[-2:], rtol=1e-4, atol=1e-4)
            own.rollback(7)
            own.extend(7, states[7:known], 0)
            torch.testing.assert_close(
                feed_chain(own, TEXT[7:], 6), wanted[-6:], rtol=1e-4, atol=1e-4
            )


def test_a_draft_head_in_fewer_bits(trained: Path, states: torch.Tensor) -> None:
    own, few = drafting(trained), drafting(trained, rounding="int8")
    assert few.weights == "int8"
    with torch.inference_mode():
        for each in (own, few):
            each.extend(0, states, 0)
        rows = [feed_chain(each, TEXT, 5) for each in (own, few)]
    rows = [each[each.isfinite()] for each in rows]  # the tokens that the head knows
    assert (rows[0] - rows[1]).abs().mean() < 0.05 * rows[0].std()


def test_what_was_read_without_states_is_read_again_with_them(
    trained: Path, states: torch.Tensor
) -> None:
    """A prompt that was fed first; a few tokens drafted ahead; states that come before their tokens."""
    with torch.inference_mode():
        first = drafting(trained)
        first.extend(0, states, 0)
        wanted = feed_chain(first, TEXT, 1)
        for fed in (3, 12):
            own = drafting(trained)
            early = feed_chain(own, TEXT[:fed], 1, prompt=True)
            assert early.isfinite().any()
            own.extend(0, states[:5], 0)
            own.extend(5, states[5:], 0)
            torch.testing.assert_close(feed_chain(own, TEXT[fed:], 1), wanted, rtol=1e-4, atol=1e-4)
        own.rollback(6)
        assert not torch.allclose(feed_chain(own, TEXT[6:], 1), wanted, atol=1e-3), (
            "their states went with them"
        )


def test_a_slot_that_is_forked_again_has_the_states_that_came_since(
    trained: Path, states: torch.Tensor
) -> None:
    """The tokens that it shares with the text are not copied again, unless states have come for them."""
    with torch.inference_mode():
        draft = drafting(trained)
        draft.extend(0, states[:5], 0)
        feed_chain(draft, TEXT[:9], 1)
        draft.fork(0, 2, 9)
        draft.extend(5, states[5:9], 0)
        feed_chain(draft, TEXT[9:10], 1)
        draft.fork(0, 2, 10, shared=9)
        rows = [feed_chain(draft, TEXT[10:], 3, slot=slot) for slot in (0, 2)]
    assert torch.equal(*rows)


def test_the_target_gives_each_state_once_and_those_of_a_tree_before_it_is_settled() -> None:
    own = runner()
    executor = TreeExecutor(own, gives_states=True)
    verdict = lambda start, *tokens: Verdict(1, 0, start, tokens, 99, 0)  # noqa: E731
    with torch.inference_mode():
        wanted = tapped_states(
            AutoModelForCausalLM.from_pretrained(target(), dtype=torch.float32).eval()
        )
        executor.execute(Open(tuple(TEXT[:5]), resolved(), request=1))
        executor.forward([Forward(Phase.PREFILL, 0, tuple(TEXT[:3]), 0, request=1)])
        executor.forward([Forward(Phase.PREFILL, 3, tuple(TEXT[3:5]), 1, request=1)])
        given = [*executor.states(verdict(5, TEXT[5]))]
        executor.tokens, executor.parents = (201, TEXT[6], TEXT[7]), (5, 5, 7)
        guess = guess_after(TEXT[:6])
        executor.forward([Forward(Phase.PRE_VERIFY, 5, (TEXT[5],), 1, guess, request=1)])
        given += executor.states(verdict(6, TEXT[6], TEXT[7], TEXT[8]))
        assert not [*executor.states(verdict(6, TEXT[6], TEXT[7], TEXT[8]))]
        executor.execute(Keep((0, 2, 3), request=1))
        executor.forward([Forward(Phase.POST_VERIFY, 8, (TEXT[8], 201), 2, request=1)])
        given += executor.states(verdict(9, TEXT[9]))
        executor.execute(Rollback(9, request=1))
        executor.forward([Forward(Phase.POST_VERIFY, 9, tuple(TEXT[9:11]), 2, request=1)])
        given += executor.states(verdict(10, TEXT[10], TEXT[11]))
    assert [one.start for one in given] == [0, 5, 8, 9]
    found = torch.frombuffer(bytearray(b"".join(one.states for one in given)), dtype=torch.bfloat16)
    torch.testing.assert_close(
        found.view(-1, wanted.shape[1]), wanted[:11].bfloat16(), rtol=1e-2, atol=1e-2
    )


def test_a_head_that_drafts_is_right_as_often_as_it_learned(
    with_a_head: Engine, trained: Path
) -> None:
    """On texts that it knows by heart: only with the target's states it can say them."""
    plain: dict[str, Any] = {"gamma": 3, "look_ahead": "off", "siblings": "off", "branches": "off"}
    for method, least in (("sd", 0.6), ("pearl", 0.4)):
        judged = accepted = 0
        for one in texts_of(trained):
            params = SamplingParams(temperature=0, max_tokens=len(one.tokens), ignore_eos=True)
            (found,) = with_a_head.generate(
                [one.prompt], params.overridden_by(RequestOptions(method=method, **plain))
            )
            assert found.tokens == one.tokens
            judged += found.statistics.num_judged_draft_tokens
            accepted += found.statistics.num_accepted_draft_tokens
        assert accepted > least * judged, (method, accepted, judged)


def test_the_simulator_runs_heads(trained: Path) -> None:
    """In the target's process and as the draft: on a text that they know they save target forwards."""
    one = texts_of(trained)[0]
    own, timing = runner(), Timing(0.1, lambda fed: 1.0)
    prompt, steps = tuple(one.prompt), {}
    for name, draft, head in (
        ("ar", drafting(trained), None),
        ("ngram", drafting(trained), None),
        ("head", drafting(trained), load_head(str(trained), own, lambda what: None)),
        ("pearl", drafting(trained), None),
    ):
        own.rollback(0)
        options = resolved(name, look_ahead=8 if name in ("head", "ngram") else 0, gamma=4)
        submit = Submit(1, prompt, len(prompt) + len(one.tokens), options)
        with torch.inference_mode():
            outcome = simulate(
                submit,
                *paired_executors(own, draft, head=head),
                timing,
                draft_context=draft.context,
            )
        assert outcome.tokens == one.tokens, name
        steps[name] = outcome.counts.steps
    assert steps["head"] < 0.9 * steps["ngram"]
    assert steps["pearl"] < steps["ar"]


def test_a_head_drafts_only_where_it_cannot_change_a_text(with_a_head: Engine) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8)
    with pytest.raises(RequestError, match="give rule coupled, or temperature 0"):
        with_a_head.generate(["What"], params, method="pearl", rule="ratio")
    assert with_a_head.generate(["What"], params, method="ar", rule="ratio")
    with pytest.raises(ModelError, match="needs a target of our own forward pass"):
        load_draft_head(
            with_a_head.config.draft, str(tiny_model("gpt2")), CPU, None, 1, lambda what: None
        )
