"""The runner over Hugging Face models: the contract, what it refuses, and how it is loaded."""

import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import MagicMock

import pytest
import torch
import transformers
from huggingface_hub.errors import RepositoryNotFoundError
from transformers import AutoModelForCausalLM

from pearl.config import ModelConfig
from pearl.errors import ForwardError, ModelError, RequestError
from pearl.models.checkpoints import loading, memory
from pearl.models.checkpoints.checkpoint import resolve_checkpoint
from pearl.models.checkpoints.loading import load_runner
from pearl.models.forward.linear_layers import multiplies_bf16
from pearl.models.forward.runner import ForwardRunner
from pearl.models.runner import feed_chain
from pearl.models.transformers.runner import HFRunner
from tests.runner_contract import Kinds, RunnerContract, close, some_tokens
from tests.tiny import CPU, VOCAB_SIZE, on_cpu, tiny_model

AUTOMATIC = torch.bfloat16 if multiplies_bf16() else torch.float32  # of a checkpoint in bfloat16


def load(
    kind: str = "llama",
    device: torch.device = CPU,
    dtype: str = "float32",
    seed: int = 0,
    **options: object,
) -> HFRunner:
    """`dtype`: of the checkpoint too."""
    path = tiny_model(kind, seed=seed, dtype=dtype if hasattr(torch, dtype) else "float32")
    options = {"max_context": 64, "dtype": dtype, **options}
    runner = load_runner(ModelConfig(str(path), forwards="transformers", **options), device)
    assert isinstance(runner, HFRunner)
    return runner


CORE = ["gpt2", "bloom", "mistral-wide"]
KINDS = ["llama", "qwen2", "opt", "bloom", "mistral", "gpt-neox", "mistral-wide", "gemma2-wide"]


def eager() -> HFRunner:
    """Models without sdpa attention run eagerly, where masks are additive."""
    return HFRunner(
        AutoModelForCausalLM.from_pretrained(tiny_model(), attn_implementation="eager"), 64
    )


class TestContract(RunnerContract):
    kinds: ClassVar[Kinds] = {kind: partial(load, kind) for kind in CORE}
    others: ClassVar[Kinds] = {kind: partial(load, kind) for kind in KINDS if kind not in CORE}
    others |= {"gemma4-shared": partial(load, "gemma4-shared"), "eager": eager}


@pytest.mark.gpu
class TestContractCuda(RunnerContract):
    kinds: ClassVar[Kinds] = {"cuda": partial(load, device=torch.device("cuda", 0))}


@pytest.mark.parametrize(
    "kind", ["llama", "gpt2", "gpt-neox", "mistral-wide", "gemma2-wide", "gemma4", "gemma4-shared"]
)
def test_greedy_text_equals_generate(kind: str) -> None:
    runner, prompt = load(kind), [20, 30, 40, 50]
    text = list(prompt)
    for _ in range(24):
        text.append(int(feed_chain(runner, text[runner.length() :], 1).argmax()))
    model = AutoModelForCausalLM.from_pretrained(tiny_model(kind))
    ids = torch.tensor([prompt])
    reference = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, eos_token_id=-1
    )
    assert text == reference[0].tolist()
    assert len(set(text[4:])) > 2, "a text of one token proves nothing"


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("rwkv", "RwkvForCausalLM does not keep its state"),
        ("bert", "BertLMHeadModel.*decoder-only"),
        ("llama-encoder", "LlamaForCausalLM.*decoder-only"),
        ("gemma-encoder", "GemmaForCausalLM.*decoder-only"),
        ("gemma3-encoder", "Gemma3ForCausalLM.*decoder-only"),
        ("doge", "DogeForCausalLM.*fed with it"),
        ("dory-last-loop", "DoryForCausalLM.*fed with it"),
        ("t5", "not a causal language model"),
        ("bart", "BartForCausalLM cannot be used here: a trial forward failed"),
        (
            "roberta",
            "RobertaForCausalLM cannot be used here: its own forward counts positions otherwise",
        ),
        ("openai-gpt", "OpenAIGPTLMHeadModel does not keep its state"),
    ],
)
def test_what_cannot_be_rolled_back_is_refused_by_name(kind: str, named: str) -> None:
    """Such a model would run, and its text would go wrong at the first rejection."""
    for forwards in ("auto", "transformers"):
        with pytest.raises(ModelError, match=named):
            on_cpu(tiny_model(kind), max_context=64, forwards=forwards)


@pytest.mark.parametrize(
    ("dtype", "scale", "masked"),
    [
        (torch.float32, 0.05, None),
        (torch.bfloat16, 3.0, None),  # in half precision only what is far beyond rounding is found
        *((torch.float32, 0.3, masked) for masked in (float("-inf"), float("nan"), -1e4)),
    ],
)
def test_a_model_whose_logits_depend_on_how_a_text_is_cut_is_refused_whatever_its_kind(
    dtype: torch.dtype, scale: float, masked: float | None
) -> None:
    """Here each token sees the mean of those that are fed with it, which no configuration would tell.

    Beside a mask's numbers those of all other tokens were too small to count, or nothing was compared.
    """
    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=dtype)
    if masked is not None:
        mask = torch.tensor([2, 7])
        model.lm_head.register_forward_hook(
            lambda _module, _given, rows: rows.index_fill(-1, mask, masked)
        )
    HFRunner(model, 64)
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(
        lambda _module, _given, rows: rows + scale * rows.mean(1, keepdim=True)
    )
    with pytest.raises(ModelError, match="depend on which tokens are fed with it"):
        HFRunner(model, 64)


@pytest.mark.parametrize("kind", [*KINDS, "gpt2", "minimax-m2", "gemma4"])
def test_rounding_is_no_reason_to_refuse_a_model(kind: str) -> None:
    """In half precision experts may be chosen otherwise in some rows."""
    for seed, dtype in enumerate(("bfloat16", "float16")):
        runner = load(kind, dtype=dtype, seed=seed)
        assert runner.weights == dtype


@pytest.mark.parametrize(("kind", "steady"), [("phi3-long", 32), ("llama-dynamic", 256)])
@pytest.mark.parametrize("forwards", ["auto", "transformers"])
def test_a_rope_that_changes_with_the_length_caps_the_context(
    kind: str, steady: int, forwards: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Longer texts turned new keys one way, and left those in the cache turned another: the text went wrong."""
    spec = str(tiny_model(kind))
    assert on_cpu(spec, forwards=forwards).context == steady
    assert ("32 tokens: beyond, its rope changes" in caplog.text) == (kind == "phi3-long")
    assert on_cpu(spec, forwards=forwards, max_context=steady).context == steady
    with pytest.raises(ModelError, match=rf"max_context {steady + 1} .*{steady} positions"):
        on_cpu(spec, forwards=forwards, max_context=steady + 1)


@pytest.mark.parametrize(("kind", "steady"), [("phi3-long", 32), ("llama-dynamic", 256)])
def test_up_to_the_cap_a_text_is_the_same_however_it_is_cut(kind: str, steady: int) -> None:
    """And after a rollback: within the cap only one set of factors is ever used. The last row is `generate`'s."""
    spec = str(tiny_model(kind))
    model = AutoModelForCausalLM.from_pretrained(spec)
    tokens = [7 + i % 90 for i in range(steady)]
    expected = model(torch.tensor([tokens])).logits[0]
    for step in (1, 5, steady // 2, steady):
        runner = on_cpu(spec)
        cut = [tokens[at : at + step] for at in range(0, steady, step)]
        close(torch.cat([feed_chain(runner, some, len(some)) for some in cut]), expected)
        runner.rollback(steady - 3)
        close(feed_chain(runner, tokens[-3:], 3), expected[-3:])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"rope_parameters": None}, None),
        ({"rope_parameters": {"rope_type": "default"}}, None),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 64}}, None),
        (
            {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64}},
            64,
        ),
        (
            {"rope_parameters": {"rope_type": "longrope"}, "original_max_position_embeddings": 32},
            32,
        ),
        (
            {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 32},
            32,
        ),  # code with the checkpoint
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "original_max_position_embeddings": 32.0,
                }
            },
            32,
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "original_max_position_embeddings": 32.5,
                }
            },
            32,
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 256),
        ({"rope_parameters": {"rope_type": "dynamic"}}, 256),
        (
            {
                "rope_parameters": {
                    "full": {"rope_type": "longrope", "original_max_position_embeddings": 16},
                    "b": None,
                }
            },
            16,
        ),
    ],
    ids=str,
)
def test_where_a_rope_stays_the_same(values: dict[str, object], expected: int | None) -> None:
    config = SimpleNamespace(max_position_embeddings=256, **values)
    steady = loading.steady_positions(config)
    assert steady == expected
    assert steady is None or type(steady) is int, "a context is a number of tokens"


@pytest.mark.parametrize("kind", ["llama", "qwen3.5"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    "cause", [KeyboardInterrupt(), IndexError("it is"), RuntimeError("it is")], ids=repr
)
def test_a_forward_that_fails_leaves_no_state_half_changed(
    kind: str, layer: int, cause: BaseException
) -> None:
    """The first layer has written by then. On a CPU an error is its request's affair; after a GPU's nothing works."""
    runner = load(kind)
    expected = feed_chain(runner, some_tokens(runner, 12), 4)
    runner.rollback(8)
    handle = runner.model.model.layers[layer].mlp.register_forward_pre_hook(
        MagicMock(side_effect=cause)
    )
    for _ in range(2):
        with pytest.raises(
            (KeyboardInterrupt, ForwardError), match=r"ForCausalLM's forward failed: it is|^$"
        ):
            feed_chain(runner, [3], 1)
    handle.remove()
    assert runner.length() == 8
    close(feed_chain(runner, some_tokens(runner, 4, 8), 4), expected)


def test_a_model_that_ignores_its_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Custom code may keep its state elsewhere; every rollback would silently do nothing."""
    runner = load()
    forward = runner.model.forward
    monkeypatch.setattr(
        runner.model, "forward", lambda **given: forward(**given | {runner.cache_name: None})
    )
    with pytest.raises(ModelError, match="LlamaForCausalLM"):
        feed_chain(runner, [3, 4], 1)


@pytest.mark.parametrize("token", [-1, 10_000])
def test_a_token_outside_the_vocabulary(token: int) -> None:
    """On a GPU the embedding lookup would kill the process."""
    runner = load()
    with pytest.raises(RequestError, match="vocabulary"):
        feed_chain(runner, [3, token], 1)
    assert runner.length() == 0


@pytest.mark.parametrize(
    ("stored", "wanted", "found"),
    [
        ("bfloat16", "auto", AUTOMATIC),
        ("float32", "auto", torch.float32),
        ("bfloat16", "float32", torch.float32),
        ("float32", "bfloat16", torch.bfloat16),
        ("float32", "float16", torch.float16),
    ],
)
def test_dtype(stored: str, wanted: str, found: torch.dtype) -> None:
    runner = on_cpu(tiny_model(dtype=stored), dtype=wanted, forwards="transformers")
    assert isinstance(runner, HFRunner)
    assert runner.model.dtype == found
    assert feed_chain(runner, [3, 4], 1).dtype == torch.float32


def test_context() -> None:
    path = str(tiny_model())
    assert on_cpu(path).context == 256
    assert on_cpu(path, max_context=99).context == 99
    for wrong in (0, 257):
        with pytest.raises(ModelError, match="256 positions"):
            on_cpu(path, max_context=wrong)


@pytest.mark.parametrize("kind", ["llama", "qwen3.5"])
def test_a_cache_that_memory_cannot_hold_is_refused_before_any_request(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the runner says it takes; of a recurrent one with the copies of its state. A byte less is too little."""
    wanted = ModelConfig(str(tiny_model(kind)), dtype="float32", max_context=64)
    runner = load_runner(wanted, CPU)
    held = runner.slots if isinstance(runner, ForwardRunner) else None
    taken = held.keys.nbytes + held.values.nbytes if held else runner.cache_bytes
    monkeypatch.setattr(memory, "available_memory", lambda: taken)
    load_runner(wanted, CPU)
    monkeypatch.setattr(memory, "available_memory", lambda: taken - 1)
    with pytest.raises(ModelError, match=r"KV cache .* 64 tokens .* Lower max_context"):
        load_runner(wanted, CPU)


def test_names_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
    for spec in ("/no/such/place", "./x", "missing.gguf", "a/b/c", ""):
        with pytest.raises(ModelError, match="no such directory"):
            on_cpu(spec)
    look_up = MagicMock(side_effect=RepositoryNotFoundError("404", response=MagicMock()))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", look_up)
    with pytest.raises(
        ModelError, match=r"nobody/no-such-model.*the hub has no such model that you may read"
    ):
        on_cpu("nobody/no-such-model")
    assert look_up.call_args.kwargs["timeout"] == 10.0


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_without_a_network_the_hubs_cache_is_used(
    offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would ask for each file, wait, and ask again, in each process."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--some--model"
    shutil.copytree(tiny_model(), repository / "snapshots" / "0123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    with pytest.raises(
        ModelError, match=r"nobody/no-such-model.*the hub cannot be reached \(.*offline"
    ):
        on_cpu("nobody/no-such-model")
    messages: list[str] = []
    assert on_cpu("some/model", progress=messages.append).vocab_size == VOCAB_SIZE
    assert messages == [
        "the hub cannot be reached: taking some/model as it is in the cache",
        "loading some/model",
    ]


def test_a_damaged_directory_is_a_model_error(tmp_path: Path) -> None:
    weights = (tiny_model() / "model.safetensors").read_bytes()
    damages: list[tuple[str, bytes | None]] = [
        ("model.safetensors", weights[:1000]),
        ("model.safetensors", None),
    ]
    for name, content in [*damages, ("config.json", b"{}"), ("config.json", b"{")]:
        directory = shutil.copytree(tiny_model(), tmp_path / "model", dirs_exist_ok=True)
        (directory / name).unlink() if content is None else (directory / name).write_bytes(content)
        with pytest.raises(ModelError, match="could not be loaded"):
            on_cpu(directory)


_INKLING = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "head_dim": 8} | {
    "swa_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("Apertus1p5", {"output_vocab_size": 200, "tie_word_embeddings": False}),
        ("Inkling2", _INKLING | {"unpadded_vocab_size": 200}),
    ],
)
def test_a_model_may_have_fewer_logits_than_tokens(family: str, sizes: dict[str, object]) -> None:
    """Which `config.vocab_size` does not tell: rows were of another width than the runner said."""
    config = getattr(transformers, f"{family}TextConfig")(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        **sizes,
    )
    runner = HFRunner(AutoModelForCausalLM.from_config(config), 32)
    assert feed_chain(runner, [3, 4], 1).shape == (1, runner.vocab_size)
