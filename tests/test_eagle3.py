"""EAGLE-3 heads as their trainers write them: what each setting computes, which files are read, what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pearl.config import SamplingParams
from pearl.engine import Engine
from pearl.errors import ModelError
from pearl.models.checkpoints.checkpoint import is_head, resolve_checkpoint
from pearl.models.checkpoints.direct import EMBEDDING
from pearl.models.checkpoints.gguf import table_in
from pearl.models.checkpoints.gguf_weights import GgufWeights
from pearl.models.cpu import native
from pearl.models.cpu.runner import CpuRunner
from pearl.models.families import OWN_FORWARD
from pearl.models.feeds import Feed
from pearl.models.forward.runner import ForwardRunner
from pearl.models.gpu.recordings import not_recorded
from pearl.models.gpu.runner import KernelRunner
from pearl.models.heads import eagle3
from pearl.models.heads.head import Head
from pearl.models.heads.kinds import KINDS, kind_of
from pearl.models.heads.loading import load_draft_head, load_head, states_for
from pearl.models.runner import Capabilities, feed_chain
from tests.eagle3 import (
    FIELDS,
    HIDDEN,
    KNOWN,
    PLAIN_ROPES,
    STEPS,
    VOCAB,
    config_of,
    num_states,
    reference,
    text_and_states,
    weights_of,
    write_head,
)
from tests.gguf_files import write_gguf
from tests.tiny import CPU, on_cpu, tiny_model

CUT = 8
# The likeliest token and its logit at each step for the tokens after `CUT`: `Eagle3DraftModel` of speculators 0.9.0
# (torch 2.14.1, transformers 5.19.0, attention "eager", `ttt_steps` 4, without targets), with the weights of
# `write_head`; its logits are what its lm_head gives at index CUT - 1 of each step.
OF_SPECULATORS = {
    "none": ((95, 2.3025), (78, 2.1062), (78, 2.0944), (78, 2.1287)),
    "draft_vocab_size": ((110, 3.7152), (110, 3.7792), (110, 3.8982), (110, 3.9581)),
    "norm_before_residual": ((78, 2.2514), (78, 2.0321), (78, 1.9215), (78, 1.9189)),
    "norm_before_fc": ((95, 2.5853), (71, 2.3635), (71, 2.5723), (71, 2.6253)),
    "fc_norm": ((95, 2.5683), (71, 2.2382), (71, 2.4599), (71, 2.547)),
    "norm_output": ((95, 2.3025), (78, 2.1677), (78, 2.348), (78, 2.569)),
    "the trainer's defaults": ((85, 2.647), (89, 2.8441), (89, 2.9902), (60, 3.0526)),
    "eagle_aux_hidden_state_layer_ids": ((39, 2.5171), (39, 2.1047), (34, 1.9255), (34, 2.1646)),
    "model_type": ((95, 2.0442), (87, 2.4211), (87, 2.4057), (87, 2.4351)),
    "num_hidden_layers": ((41, 3.7189), (41, 2.6129), (19, 2.2338), (19, 2.5553)),
    "three layers of qwen3": ((1, 1.873), (88, 2.5449), (93, 2.7784), (93, 2.845)),
    "sliding_window": ((95, 2.0449), (36, 2.2356), (36, 2.3433), (36, 2.4304)),
    "layer_types": ((41, 4.0178), (41, 3.2394), (41, 2.6894), (41, 2.3853)),
    "head_dim": ((68, 2.57), (53, 2.4743), (53, 2.5291), (53, 2.499)),
    "num_key_value_heads": ((75, 2.4207), (87, 3.4972), (87, 4.0007), (87, 3.8057)),
    "attention_bias": ((60, 2.09), (60, 1.7803), (71, 1.6863), (71, 1.7024)),
    "mlp_bias": ((95, 2.0923), (78, 1.8699), (78, 1.8146), (78, 1.7988)),
    "rms_norm_eps": ((95, 2.3537), (78, 2.0937), (78, 2.0697), (78, 2.0987)),
    "rope_theta": ((78, 2.1578), (78, 2.1728), (78, 2.1557), (78, 2.1452)),
    "linear rope": ((95, 2.5967), (71, 1.9772), (71, 2.0444), (78, 1.9309)),
    "llama3 rope": ((78, 2.1959), (78, 2.1473), (78, 2.1873), (78, 2.202)),
    "yarn": ((95, 2.3554), (78, 2.1247), (78, 2.1024), (78, 2.1442)),
    "longrope": ((95, 2.3362), (78, 2.1091), (78, 2.0939), (78, 2.133)),
    "two ropes": ((95, 2.2183), (78, 2.1421), (78, 2.1301), (78, 2.1523)),
    "gelu": ((95, 2.1638), (78, 2.1066), (78, 2.1405), (78, 2.1949)),
    "gelu_new": ((95, 2.1639), (78, 2.1067), (78, 2.1405), (78, 2.1949)),
    "gelu_pytorch_tanh": ((95, 2.1639), (78, 2.1067), (78, 2.1405), (78, 2.1949)),
    "quick_gelu": ((95, 2.1652), (78, 2.1045), (78, 2.1377), (78, 2.1913)),
    "relu": ((78, 2.0855), (78, 2.0961), (78, 2.1614), (78, 2.217)),
    "relu2": ((78, 1.8964), (78, 1.9972), (78, 2.0485), (78, 2.0709)),
}


class FakeTarget:
    """The runner of a target, as far as a head's loader reads it."""

    def __init__(self, features: int, hidden: int = HIDDEN) -> None:
        random = torch.Generator().manual_seed(9)
        self.embedding = torch.randn(VOCAB, hidden, generator=random)
        self.output = None  # an EAGLE-3 head has an output matrix of its own
        self.vocab_size, self.context = VOCAB, 64
        self.capabilities = Capabilities(slots=2, features=features)


def loaded(directory: Path, features: int = 3 * HIDDEN, hidden: int = HIDDEN) -> Head:
    target: Any = FakeTarget(features, hidden)
    return load_head(str(directory), target, lambda what: None)


def guesses(head: Head, config: dict[str, Any], cut: int) -> torch.Tensor:
    """What `reference` computes, by a head of the runtime, in its second slot."""
    ids, states = text_and_states(config)
    with torch.inference_mode():
        head.lengths[1] = 0
        head.read(ids[1:3], head.fused(states[:2]), 1)
        output = head.read(ids[3 : cut + 1], head.fused(states[2:cut]), 1)[-1:]
        rows = []
        for depth in range(1, STEPS + 1):
            rows.append(head.logits(output))
            token = ids[cut + depth : cut + depth + 1]
            output = head.read(token, output, 1, guessed=depth)
    return torch.cat(rows)


@pytest.fixture(params=["our C", "torch"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which a head attends: the second one is that of a GPU."""
    if request.param == "torch":
        monkeypatch.setattr(native, "takes_model", lambda device, config: False)
    return str(request.param)


@pytest.mark.usefixtures("attention")
@pytest.mark.parametrize("name", FIELDS)
def test_each_setting_computes_what_its_trainer_does(name: str, tmp_path: Path) -> None:
    """First and later guesses: as speculators, and as the definition in plain torch."""
    config = config_of(name)
    head = loaded(write_head(tmp_path / "head", name), num_states(config) * HIDDEN)
    rows = guesses(head, config, CUT)
    for row, (token, logit) in zip(rows, OF_SPECULATORS[name], strict=True):
        assert int(row.argmax()) == token
        assert float(row[token]) == pytest.approx(logit, abs=1e-4)
    if config["transformer_layer_config"]["rope_parameters"].get("rope_type") not in PLAIN_ROPES:
        return
    for cut in (4, CUT, 9):
        wanted = reference(config, weights_of(config), cut)
        torch.testing.assert_close(guesses(head, config, cut), wanted, rtol=1e-4, atol=1e-4)


def test_each_setting_changes_a_guess() -> None:
    """Else the table above would show nothing of it."""
    assert OF_SPECULATORS.keys() == FIELDS.keys()
    assert len({*OF_SPECULATORS.values()}) == len(FIELDS) - 1, (
        "gelu_new is another name of gelu_pytorch_tanh"
    )


# ---- other trainers' notations ----


def native_layout(directory: Path, name: str = "none", **settings: Any) -> Path:
    """A head as EAGLE's authors and SpecForge write it."""
    write_head(directory, name)
    config = config_of(name)
    inner = config.pop("transformer_layer_config")
    kept = {key: config[key] for key in ("draft_vocab_size", "norm_before_residual", "fc_norm")}
    own = {"architectures": ["LlamaForCausalLMEagle3"], **inner, **kept, **settings}
    (directory / "config.json").write_text(json.dumps(own))
    tensors = load_file(directory / "model.safetensors")
    renamed = {
        name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()
    }
    save_file(renamed, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.mark.parametrize("name", ["none", "fc_norm", "norm_before_residual"])
@pytest.mark.parametrize("norm_output", [None, True])
def test_norm_output_of_specforge_is_not_that_of_speculators(
    name: str, norm_output: bool | None, tmp_path: Path
) -> None:
    """There it says that the last norm stands before lm_head, which is so without it too."""
    settings = {} if norm_output is None else {"norm_output": norm_output}
    head = loaded(native_layout(tmp_path / "head", name, **settings))
    config = config_of(name)
    wanted = reference(config, weights_of(config), CUT)
    torch.testing.assert_close(guesses(head, config, CUT), wanted, rtol=1e-4, atol=1e-4)


def test_a_head_of_specforge_without_a_last_norm(tmp_path: Path) -> None:
    head = loaded(native_layout(tmp_path / "head", norm_output=False))
    config, weights = config_of("none"), weights_of(config_of("none"))
    ids, states = text_and_states(config)
    with torch.inference_mode():
        output = head.read(ids[1:5], head.fused(states[:4]), 0)
        torch.testing.assert_close(
            head.logits(output), output @ weights["lm_head.weight"].T, rtol=1e-4, atol=1e-4
        )


def test_layers_counted_by_what_they_give() -> None:
    """`eagle_config` counts as SGLang does; the other notation as vLLM and speculators do."""
    name = "eagle_aux_hidden_state_layer_ids"
    assert eagle3.target_layers({}) is None
    assert eagle3.target_layers({name: []}) is None
    assert eagle3.target_layers({name: [2, 18, 36]}) == (2, 18, 36)
    assert eagle3.target_layers({"eagle_config": {name: [1, 17, 35]}}) == (2, 18, 36)
    assert eagle3.target_layers({name: [2, 18, 36], "eagle_config": {name: [1, 17, 35]}}) == (
        2,
        18,
        36,
    )
    with pytest.raises(ValueError, match="name other states"):
        eagle3.target_layers({name: [2, 18, 36], "eagle_config": {name: [2, 18, 36]}})


def test_a_head_of_another_width_than_its_target(tmp_path: Path) -> None:
    """It has an embedding of its own, and reads a wider target's states."""
    directory = write_head(tmp_path / "head", "none")
    weights = load_file(directory / "model.safetensors")
    random = torch.Generator().manual_seed(4)
    wide = {"fc.weight": torch.randn(HIDDEN, 144, generator=random) * 0.1}
    save_file(weights | wide, directory / "model.safetensors", {"format": "pt"})
    head = loaded(directory, 144, 48)
    ids, _ = text_and_states(config_of("none"))
    states = torch.randn(4, 144, generator=random)
    with torch.inference_mode():
        fused = head.fused(states)
        torch.testing.assert_close(fused, states @ wide["fc.weight"].T, rtol=1e-4, atol=1e-4)
        assert head.logits(head.read(ids[1:5], fused, 0)).isfinite().all()
    del weights["embed_tokens.weight"]
    save_file(weights | wide, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="states have 32 numbers, its target's embedding 48"):
        loaded(directory, 144, 48)


# ---- files ----


def test_a_second_file_beside_a_head_is_not_read(tmp_path: Path) -> None:
    directory = write_head(tmp_path / "head", "none")
    wanted = guesses(loaded(directory), config_of("none"), CUT)
    tensors = load_file(directory / "model.safetensors")
    save_file(
        {name: torch.zeros_like(tensor) for name, tensor in tensors.items()},
        directory / "optimizer.safetensors",
    )
    assert torch.equal(guesses(loaded(directory), config_of("none"), CUT), wanted)
    shutil.move(directory / "model.safetensors", directory / "head.safetensors")
    with pytest.raises(
        ModelError,
        match=r"2 files of tensors and no index: head\.safetensors, optimizer\.safetensors",
    ):
        loaded(directory)
    (directory / "optimizer.safetensors").unlink()
    assert torch.equal(guesses(loaded(directory), config_of("none"), CUT), wanted)


def test_the_index_says_which_file_has_a_tensor(tmp_path: Path) -> None:
    directory = write_head(tmp_path / "head", "none")
    wanted = guesses(loaded(directory), config_of("none"), CUT)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {
        name: f"model-0000{1 + number % 2}-of-00002.safetensors"
        for number, name in enumerate(names)
    }
    for file in {*files.values()}:
        own = {
            name: tensor if files[name] == file else torch.zeros_like(tensor)
            for name, tensor in tensors.items()
        }
        save_file(own, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert torch.equal(guesses(loaded(directory), config_of("none"), CUT), wanted)


# ---- refusals ----


def altered(
    directory: Path, tensors: dict[str, Any], settings: dict[str, Any], inner: dict[str, Any]
) -> Path:
    """A head with other tensors (None: removed) and settings, in its config.json and of its layers."""
    write_head(directory, "none")
    weights = {**load_file(directory / "model.safetensors"), **tensors}
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors", {"format": "pt"})
    config = config_of("none") | settings
    config["transformer_layer_config"] |= inner
    (directory / "config.json").write_text(json.dumps(config))
    return directory


NUMBERS = torch.ones(HIDDEN)


@pytest.mark.parametrize(
    ("tensors", "settings", "inner", "why"),
    [
        (
            {"input_norm.weight": torch.ones(96)},
            {},
            {},
            r"nothing reads its tensor input_norm\.weight",
        ),
        (
            {"layers.0.mlp.gate.weight": NUMBERS},
            {},
            {},
            r"nothing reads its tensor layers\.0\.mlp\.gate\.weight",
        ),
        (
            {"layers.0.self_attn.q_norm.weight": torch.ones(8)},
            {},
            {},
            r"nothing reads its tensor .*q_norm\.weight",
        ),
        (
            {"layers.1.input_layernorm.weight": NUMBERS},
            {},
            {},
            r"nothing reads its tensor layers\.1\.input_layernorm",
        ),
        (
            {"layers.0.self_attn.q_proj.bias": NUMBERS},
            {},
            {},
            "it has biases .*q_proj.bias, but not all of",
        ),
        ({}, {"norm_before_fc": True}, {}, r"it has no input_norm\.weight"),
        ({}, {"fc_norm": True}, {}, r"it has no fc_norm\.0\.weight"),
        ({}, {}, {"model_type": "qwen3"}, r"it has no layers\.0\.self_attn\.q_norm\.weight"),
        ({}, {}, {"num_hidden_layers": 2}, r"it has no layers\.1\."),
        (
            {"norm.weight": torch.ones(31)},
            {},
            {},
            r"its norm\.weight has the shape \[31\], not \[32\]",
        ),
        (
            {"d2t": torch.zeros(95, dtype=torch.long)},
            {},
            {},
            r"its d2t has the shape \[95\], not \[96\]",
        ),
        (
            {"embed_tokens.weight": torch.zeros(99, 32)},
            {},
            {},
            r"embed_tokens\.weight has 99 tokens and its target 267",
        ),
        (
            {},
            {"gates_output": True},
            {},
            "its config.json sets gates_output, which is not computed",
        ),
        (
            {},
            {},
            {"gates_output": True},
            "its config.json sets gates_output, which is not computed",
        ),
        (
            {},
            {"eagle_config": {"use_mtp_layernorm": True}},
            {},
            "sets use_mtp_layernorm, which is not computed",
        ),
        (
            {},
            {"eagle_config": {"use_aux_hidden_state": False}},
            {},
            "reads the last hidden states alone",
        ),
        ({}, {}, {"hidden_act": "mish"}, "its activation 'mish' is not computed"),
        (
            {},
            {},
            {"model_type": "gemma3_text"},
            "of model type 'gemma3_text'; llama and qwen3 are computed",
        ),
        (
            {},
            {},
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "its rope is not computed",
        ),
        ({}, {}, {"use_sliding_window": True}, "its decoder layers are not computed"),
        ({}, {"speculators_model_type": "domino"}, {}, r"a block drafter \(Domino\)"),
        ({"mask_hidden": torch.zeros(1, 1, 96)}, {}, {}, "it is a P-EAGLE head .*PEagleDraftModel"),
        (
            {},
            {"speculators_model_type": "eagle9"},
            {},
            "its speculators_model_type 'eagle9' is none that is known",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    tensors: dict[str, Any],
    settings: dict[str, Any],
    inner: dict[str, Any],
    why: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(ModelError, match=why):
        loaded(altered(tmp_path / "head", tensors, settings, inner))


def test_another_drafter_of_specforge_is_refused(tmp_path: Path) -> None:
    directory = native_layout(tmp_path / "head", architectures=["DominoDraftModel"])
    with pytest.raises(ModelError, match="such heads are not read yet"):
        loaded(directory)
    (directory / "config.json").write_text(json.dumps({"architectures": ["DominoDraftModel"]}))
    assert is_head(str(directory)), "its class alone says so"


def test_kinds_that_are_read_have_their_functions() -> None:
    for name, kind in KINDS.items():
        if kind.module:
            read = kind_of({"speculators_model_type": name})
            assert callable(read.make), name
            assert callable(read.target_layers), name


def test_a_refusal_names_tensors_as_the_file_does(tmp_path: Path) -> None:
    """Names are changed at their start alone: "mtp_layers.0" holds "layers.0", and is no layer of an EAGLE-3 head."""
    directory = write_head(tmp_path / "head", "none")
    tensors = {"mtp_layers.0.input_proj.weight": torch.ones(2, 2), "norm.weight": torch.ones(2)}
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"2 tensors such as mtp_layers\.0\.input_proj\.weight, norm\.weight"
    ):
        loaded(directory)
    directory = native_layout(tmp_path / "other")
    tensors = load_file(directory / "model.safetensors")
    del tensors["midlayer.hidden_norm.weight"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelError, match=r"it has no midlayer\.hidden_norm\.weight"):
        loaded(directory)


# ---- with a target ----

LAYERS = 4


def target() -> Path:
    return tiny_model("llama-tied", layers=LAYERS, chat=True)


@pytest.mark.parametrize("how", ["in C", "kernels"])
def test_a_target_keeps_the_states_that_a_head_names(
    how: str, request: pytest.FixtureRequest
) -> None:
    """In the head's order; the number of layers names what the last norm reads, of which transformers gives what it
    makes of it."""
    model = AutoModelForCausalLM.from_pretrained(target(), dtype=torch.float32).eval()
    ids, _ = text_and_states(config_of("none"))
    before_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, given: before_norm.append(given[0][0]))
    with torch.inference_mode():
        theirs = model.model(ids[None], output_hidden_states=True).hidden_states
    wanted = torch.cat((before_norm[0], theirs[0][0], theirs[3][0]), -1)
    own: ForwardRunner
    if how == "kernels":
        request.getfixturevalue("small_tables")
        own = KernelRunner(model, 256, taps=(LAYERS, 0, 3), record=not_recorded)
    else:
        own = CpuRunner(model, 256, taps=(LAYERS, 0, 3))
    feed_chain(own, ids[:6].tolist(), 1, prompt=True)
    torch.testing.assert_close(own.features(), wanted[:6], rtol=1e-4, atol=1e-4)
    own.forward([Feed((200, int(ids[6]), int(ids[7])), 1, parents=(-1, -1, 1))])
    torch.testing.assert_close(own.features()[1:], wanted[6:8], rtol=1e-4, atol=1e-4)
    own.keep((1, 2))
    feed_chain(own, ids[8:].tolist(), 1)
    torch.testing.assert_close(own.features(), wanted[8:], rtol=1e-4, atol=1e-4)


def test_which_states_heads_read(tmp_path: Path) -> None:
    plain = str(write_head(tmp_path / "plain", "none"))
    other = str(write_head(tmp_path / "other", "eagle_aux_hidden_state_layer_ids"))
    quiet = lambda what: None  # noqa: E731
    assert is_head(other)
    assert states_for([], "target", quiet) == ""
    assert states_for([plain], "target", quiet) == "layers"
    assert states_for([other, other], "target", quiet) == (4, 1)
    with pytest.raises(ModelError, match="read other hidden states of the target"):
        states_for([plain, other], "target", quiet)
    assert on_cpu(target(), features=(LAYERS, 1)).capabilities.features == 2 * HIDDEN
    with pytest.raises(
        ModelError, match=r"has 4 layers, and its head reads the hidden states \[5, 1\]"
    ):
        on_cpu(target(), features=(LAYERS + 1, 1))
    with pytest.raises(ModelError, match="keeps no hidden states"):
        on_cpu(target(), features=(1,), forwards="transformers")


@pytest.mark.parametrize(
    "name", ["norm_output", "sliding_window", "eagle_aux_hidden_state_layer_ids"]
)
def test_a_draft_computes_what_the_head_does(name: str, tmp_path: Path) -> None:
    """Later guesses too: it feeds its own outputs on where no states have come."""
    config, directory = config_of(name), write_head(tmp_path / "head", name)
    ids, states = text_and_states(config)
    draft = load_draft_head(str(directory), str(target()), CPU, None, 1, lambda what: None)
    assert draft.features == num_states(config) * HIDDEN
    with torch.inference_mode():
        draft.extend(0, states[:CUT], 0)
        rows = feed_chain(draft, ids[: CUT + STEPS].tolist(), STEPS)
    wanted = reference(config, weights_of(config), CUT)
    known = torch.arange(KNOWN) * 2 + 5
    torch.testing.assert_close(rows[:, known], wanted, rtol=1e-4, atol=1e-4)


def test_a_head_looks_tokens_up_in_the_file_of_its_target(tmp_path: Path, cache: Path) -> None:
    """The embedding of a GGUF file stays there; a head with a copy of it computes the same."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file, target(), kind="Q8_0")
    table = table_in(resolve_checkpoint(str(file)))
    assert table is not None
    stored = GgufWeights(table, OWN_FORWARD["LlamaForCausalLM"].forward)
    embedding = stored.plain(EMBEDDING, CPU, torch.bfloat16)
    config = config_of("none")
    ids, states = text_and_states(config)
    rows = []
    for copies in ({}, {"embed_tokens.weight": embedding}):
        directory = write_head(tmp_path / f"head{len(copies)}", "none")
        weights = load_file(directory / "model.safetensors")
        weights.pop("embed_tokens.weight", None)
        save_file(weights | copies, directory / "model.safetensors")
        draft = load_draft_head(str(directory), str(file), CPU, None, 1, lambda what: None)
        with torch.inference_mode():
            draft.extend(0, states[:CUT], 0)
            rows.append(feed_chain(draft, ids[: CUT + STEPS].tolist(), STEPS))
    assert torch.equal(*rows)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    with Engine(str(target()), "none") as engine:
        return written(engine, "ar")


def written(engine: Engine, method: str) -> list[list[int]]:
    params = SamplingParams(temperature=0.8, max_tokens=24, seed=5, ignore_eos=True)
    results = engine.generate(["Write a", "Explain"], params, method=method, rule="coupled")
    return [result.tokens for result in results]


@pytest.fixture(
    params=["eagle_aux_hidden_state_layer_ids", "three layers of qwen3", "sliding_window"]
)
def head(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(write_head(tmp_path / "head", request.param))


def test_no_text_changes(head: str, texts: list[list[int]]) -> None:
    """By a head in the target's process, and by one that is the draft."""
    with Engine(str(target()), "none", head=head) as engine:
        assert written(engine, "head") == texts
    with Engine(str(target()), head, slots=2) as engine:
        assert written(engine, "pearl") == texts
