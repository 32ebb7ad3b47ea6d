"""Quantised checkpoints run through transformers, whatever the kind; what is not installed for one is named."""

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from pearl.errors import ModelError
from pearl.models.own_forward import has_own_forward
from pearl.models.transformers.runner import HFRunner
from tests.runner_contract import Kinds, RunnerContract
from tests.tiny import on_cpu, tiny_model


def bitnet() -> Any:
    """Of transformers itself: three values a weight, four weights a byte."""
    return transformers.BitNetQuantConfig(linear_class="bitlinear", quantization_mode="offline")


def four_bits() -> Any:
    pytest.importorskip("bitsandbytes")
    return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)


def eight_bits() -> Any:
    pytest.importorskip("bitsandbytes")
    return transformers.BitsAndBytesConfig(load_in_8bit=True)


def torchao() -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    return transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())


KINDS = [bitnet, four_bits, eight_bits, torchao]


def quantised(kind: Callable[[], Any], directory: Path) -> Path:
    """A tiny Llama in that kind of quantisation, as transformers makes and saves it, with its tokenizer."""
    config = kind()
    if kind is bitnet:  # transformers loads such files and does not make them
        save_in_three_values(config, directory)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            tiny_model(), quantization_config=config, device_map={"": "cpu"}, dtype=torch.float32
        )
        model.save_pretrained(directory)
    for file in tiny_model().glob("tokenizer*"):
        shutil.copy(file, directory)
    return directory


def save_in_three_values(config: Any, directory: Path) -> None:
    from transformers.integrations.bitnet import pack_weights

    model = AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)
    state = dict(model.state_dict())
    for name, part in model.named_modules():
        if isinstance(part, torch.nn.Linear) and name != "lm_head":
            weight = part.weight.detach()
            scale = 1 / weight.abs().mean().clamp(min=1e-5)
            state[f"{name}.weight"] = pack_weights((weight * scale).round().clamp(-1, 1))
            state[f"{name}.weight_scale"] = scale[None]
    model.save_pretrained(directory)
    from safetensors.torch import save_file

    save_file(
        {name: each.contiguous() for name, each in state.items()},
        directory / "model.safetensors",
        {"format": "pt"},
    )
    described = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps(described | {"quantization_config": config.to_dict()})
    )


@pytest.fixture(scope="module", autouse=True)
def uncompiled() -> Iterator[None]:
    """transformers compiles how BitNet's weights are unpacked: ten seconds, for a tiny model's."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[], Any]], Path]:
    return cache(lambda kind: quantised(kind, tmp_path_factory.mktemp("quantised")))


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def checkpoint(request: pytest.FixtureRequest, made: Callable[[Callable[[], Any]], Path]) -> Path:
    return made(request.param)


class TestContract(RunnerContract):
    """Rollbacks, pieces and all: a row of it is near to itself however the text is cut."""

    kinds: ClassVar[Kinds] = {"bitnet": bitnet}
    others: ClassVar[Kinds] = {kind.__name__: kind for kind in KINDS if kind is not bitnet}

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, make: Callable[[], Any], made: Callable[[Callable[[], Any]], Path]) -> HFRunner:
        runner = on_cpu(made(make), max_context=64)
        assert isinstance(runner, HFRunner)
        return runner


def test_it_is_the_quantised_model_that_runs(checkpoint: Path) -> None:
    """Not one whose weights were drawn at random where the names in the files were unknown."""
    runner = on_cpu(checkpoint, max_context=64)
    assert isinstance(runner, HFRunner)
    assert not has_own_forward(runner.model)
    plain = on_cpu(tiny_model(), dtype="float32", max_context=64, forwards="transformers")
    fed = torch.arange(5, 25)[None]
    with torch.inference_mode():
        ours, exact = (
            each.model(input_ids=fed).logits.float().flatten() for each in (runner, plain)
        )
    assert 0.5 < float(torch.corrcoef(torch.stack((ours, exact)))[0, 1]) < 0.9999999
    assert runner.weights


def test_such_a_model_is_not_shared_nor_exact_and_that_is_said(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match="--exact refuses"):
        on_cpu(checkpoint, exact=True)
    with pytest.raises(ModelError, match="int8"):
        on_cpu(checkpoint, dtype="int8")


@pytest.mark.parametrize(("method", "package"), [("gptq", "optimum"), ("awq", "gptqmodel")])
def test_what_a_kind_needs_and_is_not_there_is_named(
    method: str, package: str, tmp_path: Path
) -> None:
    try:
        __import__(package)
    except ImportError:
        pass
    else:
        pytest.skip(f"{package} is installed")
    directory = tmp_path / method
    shutil.copytree(tiny_model(), directory)
    config = json.loads((directory / "config.json").read_text())
    quantization = {"quant_method": method, "bits": 4, "group_size": 32}
    (directory / "config.json").write_text(
        json.dumps(config | {"quantization_config": quantization})
    )
    with pytest.raises(ModelError, match=rf"(?i){package}"):
        on_cpu(directory)
