"""PEARL in the real vLLM. Needs its environment: `scripts/setup_vllm DIR`, then PEARL_VLLM=DIR/bin/python."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tiny import VOCAB_SIZE, tiny_model
from tests.virtual import NEVER, chi_square

VLLM = os.environ.get("PEARL_VLLM", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM, reason="needs PEARL_VLLM: see scripts/setup_vllm"),
]
ROOT = Path(__file__).parent.parent
MINUTES = 1800.0  # seconds: vLLM alone takes one to start


def make_model(into: Path, vocab_size: int, noise: float) -> Path:
    """A random Llama of a head size that vLLM takes on a CPU; with noise it agrees with the one without, mostly."""
    shutil.copytree(tiny_model("llama"), into)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if noise and weight.ndim == 2:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    model.save_pretrained(into)
    return into


def service_command(draft: Path, address: str) -> list[str]:
    command = [sys.executable, "-m", "pearl", "draft", "serve", "--draft", str(draft)]
    return [*command, "--listen", address, "--draft-device", "cpu", "--draft-dtype", "float32"]


@contextmanager
def serving(draft: Path, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    directory.mkdir(mode=0o700)
    process = subprocess.Popen(service_command(draft, f"ipc://{directory}/draft"), cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def drive(plan: dict[str, Any], directory: Path) -> dict[str, Any]:
    file = directory / "plan.json"
    file.write_text(json.dumps(plan))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("OMP_NUM_THREADS", None)
    driver = ROOT / "tests" / "vllm_driver.py"
    done = subprocess.run(
        [VLLM, "-P", str(driver), str(file)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=MINUTES,
    )
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def rounds_of(count: int) -> list[list[list[int]]]:
    """Prompts that are decoded together, one to eight; some share a prefix, and some are the same."""
    generator = random.Random(1)
    shared = [generator.randrange(3, VOCAB_SIZE) for _ in range(40)]
    prompts: list[list[int]] = []
    for _ in range(count):
        own = [generator.randrange(3, VOCAB_SIZE) for _ in range(generator.randrange(1, 30))]
        prompts.append(shared[: generator.choice([0, 0, 17, 40])] + own)
    prompts[5] = prompts[4]
    rounds: list[list[list[int]]] = []
    while prompts:
        size = 1 + len(rounds) % 8
        rounds.append(prompts[:size])
        prompts = prompts[size:]
    return rounds


@pytest.mark.parametrize("blocks", [None, 14], ids=["roomy", "preempting"])
def test_greedy_texts_are_vllms_own(tmp_path: Path, blocks: int | None) -> None:
    """The service is killed and started again in the middle; with few blocks vLLM preempts requests."""
    target = make_model(tmp_path / "target", VOCAB_SIZE, 0.0)
    draft = make_model(tmp_path / "draft", VOCAB_SIZE, 0.1)
    engine: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8, "block_size": 32}
    if blocks is not None:
        engine["num_gpu_blocks_override"] = blocks
    plan: dict[str, Any] = {
        "model": str(target),
        "engine": engine,
        "sampling": {"temperature": 0, "max_tokens": 48},
        "rounds": rounds_of(50),
    }
    alone = drive(plan, tmp_path)
    sockets = tmp_path / "sockets"
    address = f"ipc://{sockets}/draft"
    with serving(draft, sockets) as service:
        plan["pearl"] = {"address": address}
        plan["actions"] = {
            "0": [["meet"]],
            "40": [["kill", "-9", str(service.pid)]],
            "60": [["start", *service_command(draft, address)], ["meet"]],
        }
        drafted = drive(plan, tmp_path)
    assert drafted["texts"] == alone["texts"]
    assert drafted["calls"]["drafted"] > 0
    assert drafted["steps"] < alone["steps"]
    assert bool(drafted["calls"]["preempted"]) is (blocks is not None)


def test_sampled_texts_keep_vllms_law(tmp_path: Path) -> None:
    """Chi-square of the second and third token, which are drafted, on a vocabulary of 16."""
    target = make_model(tmp_path / "target", 16, 0.0)
    draft = make_model(tmp_path / "draft", 16, 0.1)
    prompt = [5, 6, 7]
    plan = {
        "model": str(target),
        "engine": {"max_model_len": 64, "max_num_seqs": 8, "skip_tokenizer_init": True},
        "sampling": {"temperature": 1.0, "max_tokens": 5},
        "rounds": [[prompt] * 8] * 250,
        "actions": {"0": [["meet"]]},
    }
    sockets = tmp_path / "sockets"
    with serving(draft, sockets):
        plan["pearl"] = {"address": f"ipc://{sockets}/draft"}
        sampled = drive(plan, tmp_path)
    assert sampled["calls"]["drafted"] > 100
    counts = np.zeros((16, 16))
    for texts in sampled["texts"]:
        for text in texts:
            counts[text[1], text[2]] += 1
    expected = counts.sum() * second_and_third(target, prompt)
    is_likely = expected >= 5
    seen = [*counts[is_likely], counts[~is_likely].sum()]
    hoped = [*expected[is_likely], expected[~is_likely].sum()]
    assert chi_square(seen, np.divide(hoped, sum(hoped)) * sum(seen)) > NEVER


def second_and_third(target: Path, prompt: list[int]) -> Any:
    """The distribution of the second and third token, summed over the first: [16, 16]."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float64)
    texts = [[*prompt, first, second] for first in range(16) for second in range(16)]
    with torch.no_grad():
        logits = model(torch.tensor(texts)).logits.softmax(-1)
    start = len(prompt) - 1
    first_probs = logits[0, start]
    joint = torch.zeros(16, 16, dtype=torch.float64)
    for index, text in enumerate(texts):
        first, second = text[-2:]
        weight = first_probs[first] * logits[index, start + 1, second]
        joint[second] += weight * logits[index, start + 2]
    return joint.numpy()
