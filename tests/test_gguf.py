"""GGUF files: what runs is the model that the file describes, or it is refused."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from pearl.config import SamplingParams
from pearl.errors import ModelError
from pearl.models.checkpoints.checkpoint import resolve_checkpoint
from pearl.models.checkpoints.direct import EMBEDDING, read_decoder
from pearl.models.checkpoints.gguf import (
    NEEDED,
    NEEDED_BY_EXPERTS,
    family_of,
    table_in,
    window_settings,
)
from pearl.models.checkpoints.gguf_weights import GgufWeights
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.models.cpu import native
from pearl.models.families import GGUF, OWN_FORWARD
from pearl.models.forward.layers import DecoderLayers
from pearl.models.forward.linear_layers import multiplies_bf16
from pearl.models.forward.quantised import StoredMatrix
from pearl.models.forward.runner import ForwardRunner
from pearl.models.runner import feed_chain
from pearl.text.tokenizer import GenerationDefaults
from tests.gguf_files import EXPERTS, FAMILIES, LLAMA3, is_matrix, tensors_of, write_gguf
from tests.replace import replace
from tests.runner_contract import close, some_tokens
from tests.tiny import CPU, changed_model, on_cpu, tiny_model

USUAL_ROPE = {"rope_type": "default", "rope_theta": 1e4}
AUTOMATIC = torch.bfloat16 if multiplies_bf16() else torch.float32


def test_a_gguf_file_gives_the_same_model(tmp_path: Path, cache: Path) -> None:
    """It is described once; an unnamed dtype is bfloat16."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    runner = on_cpu(file, dtype="float32", max_context=64)
    tokens = some_tokens(runner, 9)
    close(feed_chain(runner, tokens, 9), feed_chain(on_cpu(tiny_model()), tokens, 9))
    messages: list[str] = []
    automatic = on_cpu(file, max_context=64, progress=messages.append)
    assert isinstance(automatic, ForwardRunner)
    assert automatic.dtype == AUTOMATIC
    assert messages == [f"loading {file}"]
    (made,) = (path for path in (cache / "gguf").iterdir() if path.is_dir())
    assert sum(each.stat().st_size for each in made.iterdir()) < file.stat().st_size, "no weights"
    tokenizer, defaults = load_tokenizer(str(file))
    assert (tokenizer.token(0), defaults.eos) == ("<end>", (0,))


SCALED: dict[
    str, tuple[dict[str, Any], dict[str, Any]]
] = {  # what a file says, and what a config.json would
    "linear": (
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {"rope_type": "linear", "factor": 4.0},
    ),
    "yarn": (
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_beta_fast": 16.0,
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16.0,
        },
    ),
    "llama3": ({"freqs": True}, {"rope_type": "llama3", **LLAMA3}),
    "none": ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_type": "default"}),
}


OPEN: dict[
    str, tuple[str, dict[str, Any], dict[str, Any]]
] = {  # a file says, and what that is in a config.json
    "llama": ("llama", {}, {"rope_parameters": USUAL_ROPE}),
    "phi3": ("phi3-partial", {"attention.sliding_window": 0}, {"rope_parameters": USUAL_ROPE}),
    "mixtral": ("mixtral", FAMILIES["mixtral"], {"rope_parameters": USUAL_ROPE}),
    "gemma3": (
        "gemma3-linear",
        {"attention.key_length": 8},
        {
            "rope_parameters": {"full_attention": USUAL_ROPE, "sliding_attention": USUAL_ROPE},
            "layer_types": ["full_attention", "full_attention"],
        },
    ),
    "gemma3-pattern": (
        "gemma3-linear",
        FAMILIES["gemma3-linear"] | {"attention.sliding_window_pattern": 2},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
                "sliding_attention": USUAL_ROPE,
            },
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


CASES = {  # name -> (tiny model, fields of its file, the same in config.json)
    **{
        f"rope {kind}": ("llama", said, {"rope_parameters": rope | {"rope_theta": 5e5}})
        for kind, (said, rope) in SCALED.items()
    },
    **{
        kind: (kind, said, {"norm_topk_prob": True} if kind == "qwen3-moe" else {})
        for kind, said in FAMILIES.items()
    },
    "a window": (
        "phi3-partial",
        FAMILIES["phi3-partial"] | {"attention.sliding_window": 32},
        {"sliding_window": 32},
    ),
    **{
        f"open {name}": (kind, {"rope.freq_base": None, **said}, usual)
        for name, (kind, said, usual) in OPEN.items()
    },
}


@pytest.mark.parametrize("name", CASES)
def test_a_gguf_file_gives_the_model_that_it_describes(
    tmp_path: Path, cache: Path, name: str
) -> None:
    """Whether its rope is scaled (transformers drops it), what its family usually has (it was not read from the file),
    and what it leaves open, as in llama.cpp: a rope of base 10,000 that turns whole heads, and no window."""
    kind, said, changes = CASES[name]
    plain = changed_model(tmp_path / "plain", kind, **changes)
    write_gguf(
        file := tmp_path / "tiny.gguf",
        plain if name.startswith("rope") else tiny_model(kind),
        **said,
    )
    runner, wanted = (on_cpu(path, dtype="float32") for path in (file, plain))
    assert type(runner) is type(wanted)
    tokens = some_tokens(runner, 60)
    close(feed_chain(runner, tokens, 60), feed_chain(wanted, tokens, 60))


SIX = ["sliding_attention"] * 5 + ["full_attention"]


@pytest.mark.parametrize(
    ("family", "window", "pattern", "kinds"),
    [
        ("gemma3", 64, None, SIX),
        ("gemma3", 64, 3, [*SIX[3:], *SIX[3:]]),
        ("gemma3", 64, 1, SIX[5:] * 6),
        ("gemma3", 64, [False, *[True] * 5], SIX[::-1]),
        ("gemma3", 0, None, SIX[5:] * 6),
        ("gemma3", None, 3, SIX[5:] * 6),
        ("gemma2", None, None, SIX[4:] * 3),
        ("gemma2", 64, [True, False], None),
    ],
)
def test_layers_slide_as_the_gguf_file_says(
    family: str, window: int | None, pattern: Any, kinds: Any
) -> None:
    """It was five of six whatever the file said, and a window of 0 an error of Python's."""
    said = {
        "attention.sliding_window": window,
        "attention.sliding_window_pattern": pattern,
        "context_length": 256,
    }
    given = (
        GGUF[family, False],
        {name: value for name, value in said.items() if value is not None},
        6,
    )
    if kinds is None:
        with pytest.raises(
            ValueError, match="it says of 2 layers whether they have a window, and has 6"
        ):
            window_settings(*given)
    else:
        usual = 4096 if family == "gemma2" else 256
        assert window_settings(*given) == {"layer_types": kinds, "sliding_window": window or usual}


MOE = {"model": "qwen3-moe", **EXPERTS}
UNKEPT: list[tuple[str, dict[str, Any]]] = [  # what is said of it
    ("its rope is scaled by 'longrope'", {"rope.scaling.type": "longrope"}),
    ("its rope is scaled in a way", {"rope.scaling.type": "yarn", "rope.scaling.attn_factor": 0.5}),
    ("its rope has frequencies", {"freqs": 3}),
    (
        "its rope is scaled by tensors",
        {"freqs": 3, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    ("its rope is scaled by tensors", {"model": "phi4-mini", "rope.scaling.type": "none"}),
    ("2 of its weights are in no file", {"without": "up_proj"}),
    ("its rope is scaled in a way", {"rope.scaling.finetuned": False}),
    ("a window of 64", {"attention.sliding_window": 64}),
    ("its rope turns 4 of 8", {"model": "qwen2", "rope.dimension_count": 4, "without": "bias"}),
    ("6 of its weights have no place", {"model": "llama-biased", "without": "q_proj.bias"}),
    (
        r"mlp.gate_proj.weight has the shape \[64, 32\] where \[48, 32\] is expected",
        {"feed_forward_length": 48},
    ),
    (
        "it does not say 'attention.layer_norm_rms_epsilon'",
        {"attention.layer_norm_rms_epsilon": None},
    ),
    ("it does not say 'context_length'", {"model": "qwen2", "context_length": None}),
    ("it does not say 'expert_used_count'", {**MOE, "expert_used_count": None}),
    ("it uses 9 experts of 8", {**MOE, "expert_used_count": 9}),
    ("it scales what its experts say by 2.5", {**MOE, "expert_weights_scale": 2.5}),
    ("2 of its weights are in no file.*mlp.gate.weight", {**MOE, "without": "mlp.gate."}),
    ("it has 8 experts", {"model": "qwen2", "expert_count": 8}),
]


@pytest.mark.parametrize(("cause", "said"), UNKEPT, ids=[cause for cause, _ in UNKEPT])
def test_a_gguf_file_that_cannot_be_kept_whole_is_refused(
    tmp_path: Path, cache: Path, cause: str, said: dict[str, Any]
) -> None:
    model = tiny_model(said.get("model", "llama"))
    write_gguf(
        file := tmp_path / "tiny.gguf",
        model,
        **{name: said[name] for name in said if name != "model"},
    )
    with pytest.raises(ModelError, match=cause):
        on_cpu(file)


def test_no_number_of_a_gguf_file_is_made_up() -> None:
    """What llama.cpp does not start without. It was the class's number, of some other model."""
    for (architecture, has_experts), family in GGUF.items():
        needed = {**NEEDED, **family.gguf.needed, **(NEEDED_BY_EXPERTS if has_experts else {})}
        said: dict[str, Any] = dict.fromkeys(needed, 2)
        assert family_of(architecture, said) is family
        for name in needed.keys() - {"expert_count"}:
            with pytest.raises(ValueError, match=f"it does not say '{name}'"):
                family_of(architecture, {each: said[each] for each in said if each != name})
        with pytest.raises(ValueError, match="for each layer"):
            family_of(architecture, said | {"attention.head_count_kv": [2, 1]})


def test_a_gguf_file_of_an_architecture_that_is_not_read_is_refused(
    tmp_path: Path, cache: Path
) -> None:
    """The causes were errors of Python's, such as 'int' object is not iterable."""
    for architecture in ("lfm2", "t5", "deci", "gemma4", "falcon"):
        writer = gguf.GGUFWriter(file := tmp_path / f"{architecture}.gguf", architecture)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(
            ModelError, match=f"loaded: files of the architecture '{architecture}' are not"
        ):
            on_cpu(file)


@pytest.mark.parametrize(
    "kind", ["llama", "gemma3-linear", "phi3-partial", "qwen3-moe", "gpt-oss-plain"]
)
@pytest.mark.parametrize("of", ["Q4_1", "Q5_1", "Q8_0", "BF16", "MXFP4"])
def test_weights_are_dequantised_as_the_reference_does(
    tmp_path: Path, cache: Path, kind: str, of: str
) -> None:
    """In our own forward and in transformers', whose own reading of such files is the same but for the rope's scale."""
    write_gguf(
        file := tmp_path / "tiny.gguf", model := tiny_model(kind), kind=of, **FAMILIES.get(kind, {})
    )
    config = json.loads((model / "config.json").read_text())
    family = OWN_FORWARD[config["architectures"][0]]
    table = table_in(resolve_checkpoint(str(file)))
    weights = GgufWeights(table, family.forward)
    for name, given in tensors_of(model, family.gguf.architecture, config):
        its = gguf.GGMLQuantizationType[of if is_matrix(name, given) else "F32"]
        wanted = torch.from_numpy(
            gguf.dequantize(gguf.quantize(given.contiguous().numpy(), its), its)
        )
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            wanted = wanted.unflatten(0, (-1, 4, 2)).transpose(1, 2).flatten(0, 2)
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            wanted = wanted - 1
        for number, part in enumerate(wanted) if ".experts." in name else ():
            its = name.replace(".experts", f".experts.{number}")
            assert torch.equal(weights.plain(its, CPU, torch.float32), part), its
        assert ".experts." in name or torch.equal(
            weights.plain(name, CPU, torch.float32), wanted
        ), name


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "llama-tied",
        "gemma2-caps",
        "glm4",
        "phi3-partial",
        "qwen3-moe",
        "mixtral",
        "gpt-oss-plain",
    ],
)
def test_weights_in_their_own_bits_are_the_dequantised_ones(
    tmp_path: Path, cache: Path, kind: str
) -> None:
    """Experts too.  Dequantised, the file runs through transformers as well."""
    write_gguf(
        file := tmp_path / "tiny.gguf", tiny_model(kind), kind="Q8_0", **FAMILIES.get(kind, {})
    )
    few, whole = (on_cpu(file, dtype=dtype) for dtype in ("auto", "float32"))
    theirs = on_cpu(file, dtype="float32", forwards="transformers")
    assert isinstance(few, ForwardRunner)
    assert few.weights == "8 bits"
    assert not isinstance(theirs, ForwardRunner)
    tokens = some_tokens(whole, 30)
    wanted = feed_chain(whole, tokens, 30)
    close(feed_chain(theirs, tokens, 30), wanted)
    bound = 0.03 if "moe" in kind else 0.02  # rounded rows may choose another expert
    assert (feed_chain(few, tokens, 30) - wanted).abs().mean() < bound, (
        "rows are rounded to bfloat16"
    )
    few.rollback(0)
    again = torch.cat(
        [feed_chain(few, some, len(some)) for some in (tokens[:1], tokens[1:9], tokens[9:])]
    )
    few.rollback(0)
    assert torch.equal(again, feed_chain(few, tokens, 30)), "however they were fed"


@pytest.mark.skipif(native.library() is None, reason="our products are not built")
@pytest.mark.parametrize("kind", ["llama", "glm4", "phi3-partial", "qwen3-moe", "gpt-oss-plain"])
def test_a_layer_is_unpacked_when_it_is_laid_out(
    tmp_path: Path, cache: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers were unpacked first, a byte for each weight: to state their bits, to split what is fused, or to
    reorder rows."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny_model(kind), kind="Q8_0", **FAMILIES.get(kind, {}))
    path = resolve_checkpoint(str(file))
    decoder = read_decoder(path, None, CPU, keeps_bits=True)
    last = decoder.model.layers[-1]

    def packed() -> int:
        return sum("_make" in vars(module) for module in last.modules())

    total = packed()
    left: list[int] = []
    monkeypatch.setattr(native, "give_back", lambda: left.append(packed()))
    layers = DecoderLayers(decoder, 64, "", is_native=True)
    assert layers.weights == "8 bits"
    assert total > 0
    assert left == [total] * (len(layers) - 1) + [0, 0]


@pytest.mark.skipif(native.library() is None, reason="our products are not built")
@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_an_embedding_stays_in_its_file(tmp_path: Path, cache: Path, kind: str) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny_model(kind), kind="Q8_0")
    runner = on_cpu(file)
    assert isinstance(runner, ForwardRunner)
    assert isinstance(runner.embedding, StoredMatrix)
    table = table_in(resolve_checkpoint(str(file)))
    assert table is not None
    weights = GgufWeights(table, OWN_FORWARD["LlamaForCausalLM"].forward)
    whole = weights.plain(EMBEDDING, CPU, torch.bfloat16)
    assert torch.equal(runner.embedding[torch.arange(len(whole))], whole)


PENALISED = {"temp": 0.5, "penalty_repeat": 1.2}
SAMPLED: list[
    tuple[dict[str, Any], GenerationDefaults]
] = [  # what a file says of how to sample it, and its defaults
    ({}, GenerationDefaults()),
    (
        {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "penalty_repeat": 1.05},
        GenerationDefaults(0.6, 20, 0.95, 0.01, repetition_penalty=1.05),
    ),
    ({"temp": 0.7}, GenerationDefaults(0.7)),
    ({"temp": 0.7, "top_k": -1, "min_p": -1.0}, GenerationDefaults(0.7)),
    ({"temp": 0.0, "top_k": 20}, GenerationDefaults(top_k=20)),
    ({"temp": -1.0}, GenerationDefaults()),
    ({"top_p": 0.9}, GenerationDefaults(top_p=0.9)),
    (PENALISED | {"penalty_last_n": -1}, GenerationDefaults(0.5, repetition_penalty=1.2)),
    (PENALISED | {"penalty_last_n": 0}, GenerationDefaults(0.5)),
    (
        PENALISED | {"penalty_last_n": 64},
        GenerationDefaults(
            0.5, repetition_penalty=1.2, ignored=("general.sampling.penalty_last_n 64",)
        ),
    ),
    (
        {
            "temp": 0.5,
            "mirostat": 1,
            "mirostat_tau": 4.0,
            "mirostat_eta": 0.1,
            "sequence": "top_k;temperature",
        },
        GenerationDefaults(
            0.5,
            ignored=("general.sampling.mirostat 1", "general.sampling.sequence top_k;temperature"),
        ),
    ),
    (
        {"temp": 0.5, "xtc_probability": 1.0, "xtc_threshold": 0.1},
        GenerationDefaults(0.5, ignored=("general.sampling.xtc_probability 1.0",)),
    ),
    (
        {"temp": 0.5, "xtc_probability": 0.5, "xtc_threshold": 0.6, "mirostat": 0},
        GenerationDefaults(0.5),
    ),
    ({"temp": 0.5, "top_p": 1.5}, GenerationDefaults(0.5, ignored=("top_p 1.5",))),
]


@pytest.mark.parametrize(("said", "wanted"), SAMPLED)
def test_a_file_s_sampling_options_are_its_defaults(
    tmp_path: Path, cache: Path, said: dict[str, Any], wanted: GenerationDefaults
) -> None:
    """Each of the twelve that llama-server obeys was dropped: such a file wrote greedily."""
    options = {f"general.sampling.{name}": value for name, value in said.items()}
    write_gguf(file := tmp_path / "tiny.gguf", **options)
    _, defaults = load_tokenizer(str(file))
    assert defaults == replace(wanted, eos=(0,))
    chosen = SamplingParams(temperature=0.1, top_k=3).resolved(defaults.sampling)
    assert (chosen.temperature, chosen.top_k, chosen.top_p) == (0.1, 3, defaults.top_p)
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_k": 9}))
    assert load_tokenizer(str(file))[1] == GenerationDefaults(1.0, 9, eos=(0,)), (
        "a file beside it has the last word"
    )


def _of_type(whole: bytes, number: int) -> bytes:
    """A file whose first norm is of the type with this number."""
    name = b"output_norm.weight"
    at = (
        whole.index(name) + len(name) + 4 + 8
    )  # behind the number of its dimensions, and the only one
    return whole[:at] + number.to_bytes(4, "little") + whole[at + 4 :]


def test_a_gguf_file_that_is_newer_than_the_reader_is_not_called_damaged(
    tmp_path: Path, cache: Path
) -> None:
    """Such as one of llama.cpp's type 42, Q2_0, which gguf 0.19.0 does not know."""
    write_gguf(file := tmp_path / "tiny.gguf")
    whole = file.read_bytes()
    newest = max(gguf.GGMLQuantizationType)
    field = whole.index(b"tokenizer.ggml.model") + len(b"tokenizer.ggml.model")
    cases = {
        f"it has weights of the type {newest + 1}, which is newer than the reader: gguf": _of_type(
            whole, newest + 1
        ),
        "it has weights of the type 4, which was withdrawn": _of_type(whole, 4),
        "it is cut off or damaged": _of_type(whole, 2**31),
        "it has weights of the type I32, which gguf .* does not dequantise": _of_type(whole, 26),
        "it has fields of the type 99, which is newer than the reader": whole[:field]
        + b"\x63"
        + whole[field + 1 :],
        "it has the version 4 of GGUF, which is newer than the reader": whole[:4]
        + b"\4"
        + whole[5:],
    }
    for cause, content in cases.items():
        file.write_bytes(content)
        with pytest.raises(ModelError, match=cause):
            resolve_checkpoint(str(file))


def test_a_damaged_gguf_file_is_a_model_error(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    whole = file.read_bytes()
    for size, cause in (
        *((size, "cut off") for size in (5, 23, 24, 99, 3000, len(whole) - 33)),
        (3, "no GGUF file"),
    ):
        file.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=rf"tiny\.gguf' could not be loaded: it is {cause}"):
            on_cpu(file)
    file.write_bytes(whole[:4] + b"\1" + whole[5:])
    with pytest.raises(ModelError, match="version 1 which we cannot handle"):
        on_cpu(file)
    assert not [path for path in (cache / "gguf").iterdir() if path.is_dir()]
