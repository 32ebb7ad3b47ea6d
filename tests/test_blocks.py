"""Block drafters: what each setting computes, what is refused, and that no text changes."""

import json
import os
import subprocess
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pearl.config import SamplingParams
from pearl.drafting.fused_guesses import Guesser
from pearl.drafting.heads import HeadGuesses, HeadText
from pearl.engine import Engine
from pearl.errors import ModelError
from pearl.models.checkpoints.description import describe
from pearl.models.checkpoints.memory import needed
from pearl.models.checkpoints.stored import kind_of as stored_kind
from pearl.models.cpu import native
from pearl.models.cpu.runner import CpuRunner
from pearl.models.feeds import Feed
from pearl.models.forward.runner import ForwardRunner
from pearl.models.forward.slot_attention import BlockAttention
from pearl.models.gpu.recordings import PREFILL, not_recorded
from pearl.models.gpu.runner import KernelRunner
from pearl.models.heads.dflash import BlockSettings
from pearl.models.heads.head import Block, Head, HeadToken
from pearl.models.heads.kinds import KINDS
from pearl.models.heads.loading import load_draft_head, load_head, states_for
from pearl.models.runner import Capabilities, feed_chain
from pearl.protocol.events import Draft, Drafted, Open
from pearl.protocol.messages import HiddenStates
from pearl.protocol.speeds import ForwardTimes
from pearl.protocol.window import worthwhile
from tests.block_heads import (
    ALL_SLIDING,
    ANCHOR,
    FIELDS,
    HIDDEN,
    LAYERS,
    VOCAB,
    Watched,
    config_of,
    target_weights,
    text_and_states,
    weights_of,
    width_of_states,
    write_all,
    write_block_head,
)
from tests.opened import OpenProposer
from tests.options import resolved
from tests.tiny import CPU, on_cpu, tiny_model

# [token, logit] of the likeliest token of each level, and the confidences: by speculators 0.9.0 (torch 2.14.1,
# transformers 5.19.0, attention "eager") with the checkpoints of `write_all`, as `tests/speculators_logits.py` printed
# them.
RECORDED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("block_logits.json").read_text()
)
CASES = [(kind, name) for kind, fields in FIELDS.items() for name in fields]
SPECULATORS = os.environ.get(
    "PEARL_SPECULATORS"
)  # the interpreter of an environment that has the package


class FakeTarget:
    """The runner of a target, as far as a head's loader reads it."""

    def __init__(self, features: int) -> None:
        embedding, output = target_weights()
        self.embedding = embedding
        self.output = lambda states: states @ output.T
        self.vocab_size = VOCAB
        self.context = 64
        self.capabilities = Capabilities(slots=2, features=features)


def target() -> Path:
    return tiny_model("llama-tied", layers=4, chat=True)


def target_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(target(), dtype=torch.float32).eval()


def loaded(directory: Path, features: int = 3 * HIDDEN) -> Head:
    target: Any = FakeTarget(features)
    return load_head(str(directory), target, lambda what: None)


def head_of(directory: Path, kind: str, name: str = "none") -> Head:
    return loaded(write_block_head(directory, kind, name), width_of_states(config_of(kind, name)))


@torch.inference_mode()
def proposal(head: Head, config: dict[str, Any], slot: int = 1) -> Watched:
    """What the head proposes after `ANCHOR`, each level after the text's own tokens."""
    ids, states = text_and_states(config)
    head.lengths[slot] = 0
    for start, end in ((0, 2), (2, ANCHOR)):
        head.extend(ids[start + 1 : end + 1], states[start:end], slot)
    block = Watched(head.ids, ids[ANCHOR + 1 : ANCHOR + 1 + head.deepest])
    head.propose(block, slot)
    return block


# ---- numbers ----


@pytest.fixture(params=["our C", "torch"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which a head attends: the second one is that of a GPU."""
    if request.param == "torch":
        monkeypatch.setattr(native, "takes_model", lambda device, config: False)
    return str(request.param)


@pytest.mark.usefixtures("attention")
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_each_setting_computes_what_its_trainer_does(kind: str, name: str, tmp_path: Path) -> None:
    block = proposal(head_of(tmp_path / "head", kind, name), config_of(kind, name))
    recorded = RECORDED[f"{kind}/{name}"]
    assert len(block.logits) == len(recorded["likeliest"])
    for row, (token, logit) in zip(block.logits, recorded["likeliest"], strict=True):
        assert int(row.argmax()) == token
        assert float(row[token]) == pytest.approx(logit, abs=1e-4)
    confidences = [confidence for confidence in block.confidences if confidence is not None]
    assert confidences == pytest.approx(recorded["confidences"], abs=1e-4)


def test_each_setting_changes_a_guess() -> None:
    """Else the table above would show nothing of it."""
    assert set(RECORDED) == {f"{kind}/{name}" for kind, name in CASES}
    alike: dict[str, list[str]] = {}
    for kind, name in CASES:
        alike.setdefault(json.dumps(RECORDED[f"{kind}/{name}"]), []).append(name)
    # DFlash's layers are Qwen3's whatever model type they have; gelu's approximation is too near; the layer for
    # multi-token prediction sees the whole text whatever windows its target has.
    known = [["none", "model_type"], ["gelu", "gelu_pytorch_tanh"], ["none", "sliding_window"]]
    assert [names for names in alike.values() if len(names) > 1] == known


@pytest.mark.skipif(not SPECULATORS, reason="PEARL_SPECULATORS names no interpreter")
def test_all_logits_are_those_of_speculators(tmp_path: Path) -> None:
    """Within 1e-4, on the checkpoints that it has saved after it has read ours."""
    write_all(tmp_path / "heads")
    script = Path(__file__).with_name("speculators_logits.py")
    command = [str(SPECULATORS), "-P", str(script), str(tmp_path / "heads"), str(tmp_path / "out")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, check=True, env=environment)
    theirs = load_file(tmp_path / "out" / "logits")
    for kind, name in CASES:
        config = config_of(kind, name)
        head = loaded(tmp_path / "out" / kind / name, width_of_states(config))
        block = proposal(head, config)
        logits = torch.stack(block.logits)
        torch.testing.assert_close(logits, theirs[f"{kind}/{name}"], rtol=1e-4, atol=1e-4)
        confidence = theirs.get(f"{kind}/{name}.confidence")
        if confidence is not None:
            assert block.confidences == pytest.approx(confidence.tolist(), abs=1e-4)


def test_xpress_needs_no_passes_over_the_block(tmp_path: Path) -> None:
    """Drawn one after the other, the tokens are what as many passes over all rows settle on."""
    head, config = head_of(tmp_path / "head", "xpress"), config_of("xpress")
    greedy = lambda logits, position: int(head.ids[logits.argmax()])  # noqa: E731
    block = Block(head.ids, greedy, ANCHOR + 1, head.deepest)
    proposal(head, config)
    with torch.inference_mode():
        head.propose(block, 1)
        tokens = [0] * head.deepest
        for _ in range(head.deepest):  # each pass reads the tokens of the pass before
            before = Watched(head.ids, torch.tensor(tokens))
            head.propose(before, 1)
            tokens = [int(head.ids[logits.argmax()]) for logits in before.logits]
    assert tokens == [level[0].token for level in block.levels]


@pytest.mark.parametrize("kind", FIELDS)
def test_a_block_leaves_the_cache_as_it_was(kind: str, tmp_path: Path) -> None:
    """In each slot, however the text was cut, and after a rollback; a proposal ends where no more is wanted."""
    head, config = head_of(tmp_path / "head", kind), config_of(kind)
    wanted = proposal(head, config, 0)
    ids, states = text_and_states(config)
    with torch.inference_mode():
        for slot in (0, 1):
            again = proposal(head, config, slot)
            assert all(map(torch.equal, again.logits, wanted.logits))
            head.extend(ids[ANCHOR + 1 : ANCHOR + 4], states[ANCHOR : ANCHOR + 3], slot)
            head.propose(Watched(head.ids, ids), slot)
            head.lengths[slot] = ANCHOR - 4
            head.extend(ids[ANCHOR - 3 : ANCHOR + 1], states[ANCHOR - 4 : ANCHOR], slot)
            block = Watched(head.ids, ids[ANCHOR + 1 : ANCHOR + 3])
            head.propose(block, slot)
            assert head.lengths[slot] == ANCHOR
            assert len(block.levels) == 2
            for row, expected in zip(block.logits, wanted.logits, strict=False):
                torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)


def test_a_confidence_is_the_probability_of_a_drawn_token(tmp_path: Path) -> None:
    """The runners-up keep those of the logits, and an unsure level is the last one."""
    head, config = head_of(tmp_path / "head", "dspark"), config_of("dspark")
    watched = proposal(head, config)
    greedy = lambda logits, position: int(head.ids[logits.argmax()])  # noqa: E731
    block = Block(head.ids, greedy, ANCHOR + 1, head.deepest, least=0.99)
    with torch.inference_mode():
        head.propose(block, 1)
    (level,) = block.levels
    assert level[0].prob == pytest.approx(watched.confidences[0])
    probs = watched.logits[0].softmax(-1).topk(3)
    assert [guess.token for guess in level] == head.ids[probs.indices].tolist()
    assert [guess.prob for guess in level[1:]] == pytest.approx(probs.values[1:].tolist())


@pytest.mark.parametrize(("bias", "levels"), [(-9.0, 1), (9.0, 5)])
@torch.inference_mode()
def test_a_confidence_says_how_many_tokens_are_verified(
    bias: float, levels: int, tmp_path: Path
) -> None:
    """The same head, sure and unsure: an unsure one proposes a token, and no forward is fed it."""
    confidence = "confidence_head.proj"
    tensors = {
        f"{confidence}.weight": torch.zeros(1, HIDDEN + 8),
        f"{confidence}.bias": torch.tensor([bias]),
    }
    head = loaded(altered(tmp_path / "head", "dspark", tensors, {}))
    ids, states = text_and_states(config_of("dspark"))
    text = HeadText(head, 0)
    text.log.extend(0, states[:ANCHOR])
    draw = lambda logits, position: int(head.ids[logits.argmax()])  # noqa: E731
    tokens = ids.tolist()[: ANCHOR + 1]
    guesses = HeadGuesses(text, tokens, draw)
    guesses.learn(len(tokens))
    chain = guesses.candidates(len(tokens))[:1]
    chances = [chain[0].chance]
    while chain := guesses.following(chain[0])[:1]:
        chances.append(chain[0].chance)
    assert len(chances) == levels
    reached = list(accumulate(chances, mul))
    count = worthwhile(reached, 1, 1.0, lambda fed: 1.0 + 0.1 * fed)
    assert count == (levels if bias > 0 else 0)


class ToldText:
    """A text for which a head has proposed these levels."""

    def __init__(self, *levels: list[HeadToken]) -> None:
        self.levels = list(levels)
        self.drafted = 0

    def read(self, tokens: list[int], committed: int) -> bool:
        return True

    def draft(self, position: int, draw: object) -> list[list[HeadToken]]:
        self.drafted += 1
        return self.levels


def test_a_head_also_guesses_after_tokens_of_a_draft() -> None:
    """Where they are what it drew itself; its guesses after them were lost."""
    text: Any = ToldText([HeadToken(7, 0.6), HeadToken(5, 0.2)], [HeadToken(8, 0.6)])
    tokens = [1, 2, 3]
    guesses = HeadGuesses(text, tokens, lambda logits, position: 0)
    guesses.learn(3)
    tokens += [7, 4, 6]
    found = [[guess.token for guess in guesses.candidates(end)] for end in range(2, 7)]
    assert found == [[], [7, 5], [8], [], []]
    tokens[3] = 5
    assert guesses.candidates(4) == []


@pytest.mark.parametrize(("text", "asks"), [([1, 2, 3, 4], 1), ([5, 6, 7, 8, 9] * 8, 0)])
def test_a_head_is_not_asked_where_n_grams_are_nearly_sure(text: list[int], asks: int) -> None:
    """Its forward takes a good part of the target's on a CPU, and the guesses are there already."""
    told: Any = ToldText([HeadToken(7, 0.6)])
    guesser = Guesser(text, head=lambda tokens: HeadGuesses(told, tokens, lambda logits, _: 0))
    guesser.learn(len(text))
    guesser.candidates(len(text))
    assert told.drafted == asks
    guesser.has_head = False
    guesser.extend([1])
    guesser.learn(len(text) + 1)
    guesser.candidates(len(text) + 1)
    assert told.drafted == asks, "a method that takes no head"


@pytest.mark.parametrize("kind", FIELDS)
def test_what_a_head_is_and_needs_is_told(kind: str, tmp_path: Path) -> None:
    """By `pearl show` and `pearl list`, as for a model, and before it is loaded."""
    directory = write_block_head(tmp_path / "head", kind)
    head: Any = head_of(tmp_path / "loaded", kind)
    described = describe(str(directory), print)
    assert described["architecture"] == KINDS[kind].title
    assert described["reads"].startswith("the target's hidden states before ")
    assert (described["forward"], stored_kind(directory).forward) == ("own", "head")
    need: Any = needed(directory, "float32", 64, 64, slots=2)
    tensors = load_file(directory / "model.safetensors").values()
    assert need.weights == pytest.approx(sum(tensor.nbytes for tensor in tensors), rel=0.2)
    slots = getattr(head, "_head", head)._slots  # P-EAGLE has an EAGLE-3 head
    of_position = (slots.keys.nbytes + slots.values.nbytes) / slots.keys.shape[3]
    assert need.cache == of_position * (64 + PREFILL)


def test_a_head_that_is_not_read_is_told_with_its_reason(tmp_path: Path) -> None:
    directory = altered(tmp_path / "head", "dflash", {}, {"speculators_model_type": "domino"})
    described = describe(str(directory), print)
    assert described["forward"] is None
    assert "Domino" in described["why"]


@pytest.mark.usefixtures("small_tables")
@pytest.mark.parametrize("kind", FIELDS)
def test_a_target_of_our_kernels(kind: str, tmp_path: Path) -> None:
    """Its head reads the states that the kernels keep, and makes the same proposal."""
    directory = str(write_block_head(tmp_path / "head", kind))
    text = text_and_states(config_of(kind))[0].tolist()[: ANCHOR + 1]
    greedy = lambda logits, position: int(logits.argmax())  # noqa: E731
    taps = (LAYERS,) if kind == "mtp" else (1, 2, 3)
    levels = []
    runners: list[ForwardRunner] = [
        CpuRunner(target_model(), 256, taps=taps),
        KernelRunner(target_model(), 256, taps=taps, record=not_recorded),
    ]
    for runner in runners:
        head = load_head(directory, runner, lambda what: None)
        feed_chain(runner, text, 1, prompt=True)
        block = Block(head.ids, greedy, len(text), head.deepest)
        with torch.inference_mode():
            head.extend(torch.tensor(text[1:]), runner.features()[:-1], 0)
            head.propose(block, 0)
        levels.append(block.levels)
    for ours, theirs in zip(*levels, strict=True):
        assert [guess.token for guess in ours] == [guess.token for guess in theirs]
        assert [guess.prob for guess in ours] == pytest.approx(
            [guess.prob for guess in theirs], abs=1e-4
        )


# ---- SpecForge ----


def as_specforge(directory: Path, kind: str, name: str = "none", **options: Any) -> Path:
    """A head as SpecForge writes it: the layers' settings at the top, those of its kind in `dflash_config`."""
    config = config_of(kind, name)
    write_block_head(directory, kind, name)
    method = {
        "mask_token_id": config["mask_token_id"],
        "target_layer_ids": [layer - 1 for layer in config["aux_hidden_state_layer_ids"]],
        **options,
    }
    architecture = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}[kind]
    written = {
        **config["transformer_layer_config"],
        "architectures": [architecture],
        "block_size": config["block_size"],
        "num_target_layers": 4,
        "dflash_config": method,
    }
    (directory / "config.json").write_text(json.dumps(written))
    return directory


@pytest.mark.parametrize("nested", ["", "logit_head."])
def test_heads_of_specforge(nested: str, tmp_path: Path) -> None:
    """The same weights give the same guesses as in speculators' layout; DSpark's parts may be nested, in old files."""
    plain = as_specforge(tmp_path / "dflash", "dflash")
    assert states_for([str(plain)], "target", lambda what: None) == (1, 2, 3)
    wanted = proposal(head_of(tmp_path / "theirs", "dflash"), config_of("dflash"))
    found = proposal(loaded(plain), config_of("dflash"))
    assert all(map(torch.equal, found.logits, wanted.logits))
    options = {"markov_rank": 8, "confidence_head_with_markov": True, "confidence_head_alpha": 1.0}
    directory = as_specforge(tmp_path / "dspark", "dspark", **options)
    tensors = {}
    for name, tensor in weights_of(config_of("dspark")).items():
        is_part = name.startswith(("markov", "confidence"))
        tensors[nested + name if is_part else name] = tensor
    save_file(tensors, directory / "model.safetensors")
    wanted = proposal(head_of(tmp_path / "other", "dspark"), config_of("dspark"))
    found = proposal(loaded(directory), config_of("dspark"))
    assert all(map(torch.equal, found.logits, wanted.logits))
    assert found.confidences == wanted.confidences


# [token, logit] of the likeliest token of each level: `DFlashDraftModel` of specforge 0.2.0 (torch 2.14.1, transformers
# 5.19.0, attention "eager", masks of `create_dflash_sdpa_mask`) with the weights of `write_block_head`.
OF_SPECFORGE = {
    "sliding_window": ((80, 2.3862), (80, 2.6196), (80, 2.524), (80, 2.5395)),
    "layer_types": ((265, 3.5569), (265, 3.7835), (265, 3.656), (265, 3.5747)),
}


@pytest.mark.usefixtures("attention")
@pytest.mark.parametrize("name", OF_SPECFORGE)
def test_windows_of_specforge_move_with_the_rows(name: str, tmp_path: Path) -> None:
    head = loaded(as_specforge(tmp_path / "head", "dflash", name))
    block = proposal(head, config_of("dflash", name))
    for row, (token, logit) in zip(block.logits, OF_SPECFORGE[name], strict=True):
        assert int(row.argmax()) == token
        assert float(row[token]) == pytest.approx(logit, abs=1e-4)


def test_windows_of_two_trainers(tmp_path: Path) -> None:
    """What the rows of a block at position 10 see of the text before it.

    As `create_anchor_block_mask_mod` of speculators 0.9.0 says, and `create_dflash_sdpa_mask` of specforge 0.2.0.
    """
    directory = as_specforge(tmp_path / "head", "dflash", "sliding_window")
    written = json.loads((directory / "config.json").read_text())
    seen = []
    for config in (config_of("dflash", "sliding_window"), written):
        attention = BlockAttention(Any, 0, 10, Any, BlockSettings.of(config).mask)  # type: ignore[arg-type]
        positions = torch.arange(15)
        is_hidden = attention._is_hidden(0, positions, positions[10:, None])
        assert torch.equal(is_hidden[:, 10:], torch.ones(5, 5, dtype=torch.bool).triu(1))
        seen.append([(~row).nonzero().flatten().tolist() for row in is_hidden[:, :10]])
    assert seen == [[[6, 7, 8, 9]] * 5, [[7, 8, 9], [8, 9], [9], [], []]]


# The same by `PEagleDraftModel` of specforge 0.2.0, with the rope of the test below in its configuration.
P_EAGLE_OF_SPECFORGE = {
    "none": (
        (7, 3.4562),
        (77, 2.1044),
        (77, 1.9611),
        (77, 1.875),
        (77, 1.825),
        (77, 1.7752),
        (77, 1.6674),
        (7, 1.6098),
    ),
    "norm_before_residual": (
        (7, 2.5093),
        (77, 2.0409),
        (77, 1.884),
        (77, 1.7853),
        (77, 1.7439),
        (77, 1.702),
        (77, 1.587),
        (7, 1.5411),
    ),
    "num_hidden_layers": (
        (0, 2.6594),
        (7, 2.8034),
        (7, 2.8425),
        (7, 2.7331),
        (7, 2.586),
        (7, 2.5442),
        (7, 2.6697),
        (7, 2.7547),
    ),
}


@pytest.mark.parametrize("name", P_EAGLE_OF_SPECFORGE)
def test_p_eagle_heads_of_specforge(name: str, tmp_path: Path) -> None:
    """Their rope is plain whatever the target's is, and their mask token must be added to config.json."""
    config = config_of("peagle", name)
    directory = write_block_head(tmp_path / "head", "peagle", name)
    written = {
        **config["transformer_layer_config"],
        "architectures": ["PEagleDraftModel"],
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": config["norm_before_residual"],
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    }
    (directory / "config.json").write_text(json.dumps(written))
    with pytest.raises(ModelError, match="no mask_token_id: add the token"):
        loaded(directory)
    (directory / "config.json").write_text(json.dumps(written | {"mask_token_id": 3}))
    block = proposal(loaded(directory), config)
    for row, (token, logit) in zip(block.logits, P_EAGLE_OF_SPECFORGE[name], strict=True):
        assert int(row.argmax()) == token
        assert float(row[token]) == pytest.approx(logit, abs=1e-4)


# ---- refusals ----


def altered(
    directory: Path, kind: str, tensors: dict[str, Any], settings: dict[str, Any], **inner: Any
) -> Path:
    """A head with other tensors (None: removed) and settings, in its config.json and of its layers."""
    write_block_head(directory, kind)
    weights = {**weights_of(config_of(kind)), **tensors}
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors", {"format": "pt"})
    config = config_of(kind) | settings
    config["transformer_layer_config"] |= inner
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("kind", "tensors", "settings", "inner", "why"),
    [
        ("dflash", {"fc.weight": torch.zeros(32, 64)}, {}, {}, "it is of another model"),
        ("dflash", {"hidden_norm.weight": None}, {}, {}, "it has no hidden_norm.weight"),
        (
            "dflash",
            {"markov_head.markov_w1.weight": torch.zeros(VOCAB, 8)},
            {},
            {},
            "nothing reads its tensor markov_head.markov_w1.weight",
        ),
        ("dflash", {"lm_head.weight": torch.zeros(96, 32)}, {}, {}, "nothing says which"),
        ("dflash", {}, {"mask_token_id": None}, {}, "no mask_token_id: set it"),
        ("dflash", {}, {"mask_token_id": VOCAB}, {}, "mask_token_id 267 is not in its target's"),
        ("dflash", {}, {"gates": True}, {}, "sets gates, which is not computed"),
        ("dflash", {}, {}, {"is_causal": True}, "sets is_causal, which is not computed"),
        ("dflash", {}, {}, {"model_type": "gemma3_text"}, "llama and qwen3 are computed"),
        ("dflash", {}, {}, {"hidden_act": "mish"}, "activation 'mish' is not computed"),
        ("dspark", {}, {"markov_head_type": "tree"}, {}, "markov_head_type 'tree' is not computed"),
        ("dspark", {}, {"markov_rank": 9}, {}, r"proj.weight has the shape \[1, 40\], not"),
        ("dspark", {"confidence_head.proj.bias": None}, {}, {}, "no confidence_head.proj.bias"),
        (
            "xpress",
            {},
            {"xpress_rank": 9},
            {},
            r"down_g.weight has the shape \[8, 32\], not \[9, 32\]",
        ),
        ("xpress", {"refiner_head.mix_l": None}, {}, {}, "it has no refiner_head.mix_l"),
        ("xpress", {}, {"mask_token_id": None}, {}, "no mask_token_id: set it"),
        ("peagle", {}, {"mask_token_id": None}, {}, "no mask_token_id: add the token"),
        ("peagle", {}, {"mask_token_id": 999}, {}, "mask_token_id 999 is not in its vocabulary"),
        ("peagle", {"mask_hidden": None}, {}, {}, "it has no mask_hidden"),
        (
            "peagle",
            {"mask_hidden": torch.zeros(1, 1, 32)},
            {},
            {},
            r"its mask_hidden has the shape \[1, 1, 32\], not \[1, 1, 96\]",
        ),
        (
            "peagle",
            {"fc_norm.0.weight": torch.ones(32)},
            {},
            {},
            "nothing reads its tensor fc_norm",
        ),
        (
            "peagle",
            {
                "layers.0.self_attn.q_norm.weight": torch.ones(8),
                "layers.0.self_attn.k_norm.weight": torch.ones(8),
            },
            {},
            {"model_type": "qwen3", **ALL_SLIDING},
            "sliding_window 4 is shorter than its block of 5 tokens",
        ),
        ("mtp", {}, {}, {"model_type": "qwen3_5_text"}, "qwen3_5_text.*stitch-mtp"),
        ("mtp", {}, {}, {"hidden_act": "mish"}, "activation 'mish' is not computed"),
        ("mtp", {}, {"num_nextn_predict_layers": 2}, {}, "it has 2 layers, not one"),
        ("mtp", {}, {}, {"hidden_size": 48}, "reads 48 numbers.*it is of another model"),
        (
            "mtp",
            {"mtp_layers.0.token_layernorm.weight": None},
            {},
            {},
            "it has no mtp_layers.0.token_layernorm.weight",
        ),
        (
            "mtp",
            {"mtp_layers.1.input_proj.weight": torch.ones(2, 2)},
            {},
            {},
            "nothing reads its tensor mtp_layers.1.input_proj.weight",
        ),
        ("dflash2", {}, {"conv_group_size": 5}, {}, "conv_group_size 5 does not divide"),
        (
            "dflash2",
            {},
            {"selector_rank": 4},
            {},
            r"hidden_projection.weight has the shape \[8, 32\]",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    kind: str,
    tensors: dict[str, Any],
    settings: dict[str, Any],
    inner: dict[str, Any],
    why: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(ModelError, match=why):
        loaded(
            altered(tmp_path / "head", kind, tensors, settings, **inner),
            width_of_states(config_of(kind)),
        )


# ---- as the draft ----


def draft_of(directory: Path, kind: str, name: str = "draft_vocab_size") -> Any:
    """A block drafter as a draft, and the head that it runs."""
    head = write_block_head(directory, kind, name)
    return load_draft_head(str(head), str(target()), CPU, None, 2, lambda what: None)


def test_a_head_of_one_forward_is_no_draft(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"reads its target's states.*Name it as --head"):
        draft_of(tmp_path / "head", "peagle")


@pytest.mark.parametrize(
    ("kind", "vocabulary"),
    [
        ("dflash", "draft_vocab_size"),
        ("dflash", "none"),
        ("dspark", "draft_vocab_size"),
        ("xpress", "draft_vocab_size"),
        ("dflash2", "none"),
    ],
)
@torch.inference_mode()
def test_a_draft_has_the_rows_of_a_block(kind: str, vocabulary: str, tmp_path: Path) -> None:
    """It gives token by token the logits that a proposal has at once, and then begins another block."""
    draft = draft_of(tmp_path / "head", kind, vocabulary)
    head = draft.head
    ids, states = text_and_states(config_of(kind))
    head.extend(ids[1 : ANCHOR + 1], states[:ANCHOR], 1)
    watched = Watched(head.ids, ids[ANCHOR + 1 : ANCHOR + 1 + head.deepest])
    head.propose(watched, 1)
    draft.extend(0, states[:ANCHOR], 0)
    fed = ids[: ANCHOR + 1].tolist()
    for depth, expected in enumerate(watched.logits):
        (logits,) = draft.forward([Feed(fed, 1)])
        torch.testing.assert_close(logits[0, head.ids], expected)
        assert logits.isneginf().sum() >= draft.vocab_size - len(head.ids)
        fed = [int(ids[ANCHOR + 1 + depth])]
    (logits,) = draft.forward([Feed(fed, 1)])
    assert logits[0].max().isfinite(), "a new block"


def row_after(draft: Any, tokens: list[int], states: torch.Tensor) -> torch.Tensor:
    """The draft's logits after a text of which it has these states."""
    draft.rollback(0)
    draft.extend(0, states, 0)
    (logits,) = draft.forward([Feed(tokens, 1)])
    return logits[0, draft.head.ids]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("dflash", "draft_vocab_size"),
        ("dflash", "sliding_window"),
        ("dspark", "draft_vocab_size"),
        ("dflash2", "none"),
        ("xpress", "draft_vocab_size"),
    ],
)
@torch.inference_mode()
def test_tokens_without_states_stand_in_the_block(kind: str, name: str, tmp_path: Path) -> None:
    """In place of its mask tokens: mask tokens that the text happens to have there change nothing, others do."""
    draft = draft_of(tmp_path / "head", kind, name)
    head = draft.head
    config = config_of(kind, name)
    ids, states = text_and_states(config)
    masks = [config["mask_token_id"]] * 2
    watched = Watched(head.ids, torch.tensor([*masks, 0]))
    head.extend(ids[1 : ANCHOR + 1], states[:ANCHOR], 1)
    head.propose(watched, 1)
    text = ids[: ANCHOR + 1].tolist()
    row = row_after(draft, text + masks, states[:ANCHOR])
    torch.testing.assert_close(row, watched.logits[2])
    other = row_after(draft, [*text, masks[0] + 1, masks[1]], states[:ANCHOR])
    assert not torch.allclose(row, other, atol=1e-3)


@torch.inference_mode()
def test_tokens_that_a_block_has_no_room_for_are_left_out(tmp_path: Path) -> None:
    """The text's last token stands where the first of them would."""
    draft = draft_of(tmp_path / "head", "dflash")
    ids, states = text_and_states(config_of("dflash"))
    states = states[:ANCHOR]
    text = ids[: ANCHOR + 1 + draft.head.deepest].tolist()
    row = row_after(draft, text, states)
    assert torch.equal(row, row_after(draft, text[:ANCHOR] + text[-1:], states))
    del text[-1]
    row = row_after(draft, text, states)
    without = row_after(draft, text[:ANCHOR] + text[-1:], states)
    assert not torch.allclose(row, without, atol=1e-3)


@torch.inference_mode()
def test_a_new_block_begins_in_a_fork_and_after_a_rollback(tmp_path: Path) -> None:
    """A branch is the block after its outcome; states that come in between are for the next block."""
    draft = draft_of(tmp_path / "head", "dspark")
    ids, states = text_and_states(config_of("dspark"))
    tokens = ids.tolist()
    draft.extend(0, states[:6], 0)
    draft.forward([Feed(tokens[:8], 1)])
    draft.fork(0, 1)
    (branch,) = draft.forward([Feed([33], 1, slot=1)])
    (row,) = draft.forward([Feed([33], 1)])
    assert not torch.equal(branch, row)
    draft.rollback(7)
    draft.forward([Feed(tokens[7:8], 1)])
    draft.extend(6, states[6:8], 0)
    (later,) = draft.forward([Feed([33], 1)])
    assert torch.equal(later, row)
    draft.rollback(8)
    (known,) = draft.forward([Feed([33], 1)])
    assert not torch.equal(known, row)
    draft.rollback(0)
    draft.extend(0, states[:8], 0)
    (anew,) = draft.forward([Feed([*tokens[:8], 33], 1)])
    assert torch.equal(known, anew)


@torch.inference_mode()
def test_branches_get_states_that_come_after_they_were_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head of a branch that lacked them began anew with the next ones, as if the text were a few tokens long."""
    monkeypatch.setattr(ForwardTimes, "observe", lambda *_: None)  # all rows are used
    monkeypatch.setattr("pearl.drafting.branches._LEAST_CHANCE", 0.0)
    directory = str(write_block_head(tmp_path / "head", "dspark", "draft_vocab_size"))
    draft: Any = load_draft_head(directory, str(target()), CPU, None, 6, lambda what: None)
    ids, states = text_and_states(config_of("dspark", "draft_vocab_size"))
    states = states.bfloat16()
    prompt = tuple(ids[:6].tolist())
    proposer = OpenProposer(draft, draft.vocab_size)
    proposer.open(Open(prompt, resolved(rule="coupled", branches=5), request=1))

    def drafted(start: int, tokens: Sequence[int], pending: int, known: range) -> Drafted:
        data = states[known.start : known.stop].view(torch.uint8).numpy().tobytes()
        proposer.see(HiddenStates(1, known.start, data))
        command = Draft(start, tuple(tokens), 8 - pending, pending, request=1)
        return proposer.collect(proposer.launch(command))

    text = list(prompt)
    event = drafted(0, prompt, 0, range(5))
    for pending in range(1, 5):
        text += event.tokens
        event = drafted(len(text) - 1, text[-1:], pending, range(0))
    text += event.tokens
    branch = max(event.branches, key=lambda branch: branch.start)
    assert branch.after is not None
    position, token = branch.after
    assert position >= 7, "else no verdict comes between"
    drafted(len(text) - 1, text[-1:], 4, range(5, 6))
    proposer.rollback(position, 1)
    text = [*text[:position], token, *branch.tokens]
    drafted(position, text[position:], len(branch.tokens), range(6, position))
    anew = draft_of(tmp_path / "other", "dspark")
    anew.extend(0, states[:position].float(), 0)
    (wanted,) = anew.forward([Feed(text, 1)])
    slot = proposer.text(1).slot
    draft.rollback(len(text) - 1, slot)
    (row,) = draft.forward([Feed(text[-1:], 1, slot=slot)])
    assert torch.equal(row, wanted)


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2", "xpress"])
def test_no_text_changes_where_blocks_are_the_draft(
    kind: str, texts: dict[float, list[list[int]]], tmp_path: Path
) -> None:
    name = "none" if kind == "dflash2" else "draft_vocab_size"
    head = str(write_block_head(tmp_path / "head", kind, name))
    with Engine(str(target()), head, slots=2) as engine:
        for temperature, expected in texts.items():
            for method in ("pearl", "sd"):
                assert written(engine, method, temperature) == expected, method


def test_a_layer_for_multi_token_prediction_drafts_in_another_process(tmp_path: Path) -> None:
    """Like the head in the target's process: it reads the target's output matrix, too."""
    directory = write_block_head(tmp_path / "head", "mtp")
    ids, states = text_and_states(config_of("mtp"))
    path = str(target())
    draft = load_draft_head(str(directory), path, CPU, None, 1, lambda what: None)
    own = on_cpu(path, features=(LAYERS,))
    head = load_head(str(directory), own, lambda what: None)
    with torch.inference_mode():
        head.extend(ids[1 : ANCHOR + 1], states[:ANCHOR], 0)
        block = Watched(head.ids, ids[ANCHOR + 1 : ANCHOR + 5])
        head.propose(block, 0)
        draft.extend(0, states[:ANCHOR], 0)
        rows = feed_chain(draft, ids[: ANCHOR + 4].tolist(), 4)
    torch.testing.assert_close(rows, torch.stack(block.logits), rtol=1e-4, atol=1e-4)


# ---- texts ----


def written(engine: Engine, method: str, temperature: float) -> list[list[int]]:
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=5, ignore_eos=True)
    prompts = ["Write a", "Write a poem", "Explain"]
    results = engine.generate(prompts, params, method=method, rule="coupled")
    return [result.tokens for result in results]


@pytest.fixture(scope="module")
def texts() -> dict[float, list[list[int]]]:
    with Engine(str(target()), "none") as engine:
        return {temperature: written(engine, "ar", temperature) for temperature in (0.0, 0.8)}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("dflash", "none"),
        ("dflash", "draft_vocab_size"),
        ("dflash", "sliding_window"),
        ("dspark", "none"),
        ("dspark", "rnn"),
        ("dflash2", "none"),
        ("xpress", "none"),
        ("peagle", "none"),
        ("peagle", "draft_vocab_size"),
        ("mtp", "none"),
    ],
)
def test_no_text_changes(
    kind: str, name: str, texts: dict[float, list[list[int]]], tmp_path: Path
) -> None:
    """By a block drafter, with n-grams, beside a draft, in several slots, at each temperature."""
    head = str(write_block_head(tmp_path / "head", kind, name))
    draft = str(tiny_model("llama-tied", layers=4, chat=True, noise=0.3))
    with Engine(str(target()), draft, head=head, slots=2) as engine:
        for temperature, expected in texts.items():
            for method in ("head", "pearl", "auto"):
                assert written(engine, method, temperature) == expected, method


def test_no_text_changes_by_a_layer_that_drafts(
    texts: dict[float, list[list[int]]], tmp_path: Path
) -> None:
    head = str(write_block_head(tmp_path / "head", "mtp"))
    with Engine(str(target()), head, slots=2) as engine:
        for temperature, expected in texts.items():
            for method in ("pearl", "sd"):
                assert written(engine, method, temperature) == expected, method


@torch.inference_mode()
def test_a_text_is_read_as_far_as_states_are_there(tmp_path: Path) -> None:
    head, config = head_of(tmp_path / "head", "dflash"), config_of("dflash")
    ids, states = text_and_states(config)
    tokens = ids.tolist()
    text = HeadText(head, 0)
    draw = lambda logits, position: int(head.ids[logits.argmax()])  # noqa: E731
    text.log.extend(0, states[:6])
    assert not text.read(tokens, ANCHOR + 1), "states of later tokens are missing"
    text.log.extend(6, states[6:ANCHOR])
    assert text.read(tokens, ANCHOR + 1)
    levels = text.draft(ANCHOR + 1, draw, 0.0)
    assert len(levels) == head.deepest == 4
    text.log.rollback(0)
    text.log.extend(0, states[:ANCHOR])
    assert text.read(tokens, ANCHOR + 1), "it begins anew"
    assert text.draft(ANCHOR + 1, draw, 0.0) == levels
