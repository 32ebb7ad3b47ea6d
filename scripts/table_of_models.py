"""Which causal language models of the installed transformers PEARL runs, and on which path; the rest with its reason.

Makes each architecture tiny and random from its configuration class, and loads it as a checkpoint is loaded.  Those
that run must then give, for a text longer than their windows that is cut at random, with other tokens fed between and
rolled back, the logits of one forward without a cache.

    python scripts/table_of_models.py [model type ...] > pearl/models/ARCHITECTURES.md
"""

from __future__ import annotations

import logging
import multiprocessing
import random
import sys
import textwrap
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import transformers
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from pearl.errors import ModelError
from pearl.models.own_forward import has_own_forward
from pearl.models.runner import feed_chain
from pearl.models.transformers.runner import HFRunner
from pearl.printable import cause_of

SECONDS = 60  # for one architecture
WIDTH = 130  # of the page
HEAD = """
Of transformers {}, by `python scripts/table_of_models.py`: each one tiny and random, from its configuration class.
What runs through transformers was compared, after random cuts and rollbacks, with one forward without a cache. Other
configurations of an architecture may have windows or states; [those of some](README.md#our-own-forward-pass) run in
our own forward.
"""
VOCAB = 300
TOKENS = 48
# By size, the settings that count something; a name that a configuration lacks is left out.
NAMES_BY_SIZE: dict[float, str] = {
    64: """
        hidden_size n_embd d_model embed_dim dim word_embed_proj_dim intermediate_size ffn_dim
        n_inner ffn_hidden_size d_ff intermediate_size_mlp dense_intermediate_size decoder_ffn_dim
        mamba_d_ssm moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size
        shared_intermediate_size attention_hidden_size lru_width shared_experts_intermediate_size
    """,
    4: """
        num_attention_heads n_head n_heads num_heads decoder_attention_heads
        encoder_attention_heads swa_num_attention_heads num_key_value_heads num_kv_heads
        swa_num_key_value_heads num_global_key_value_heads linear_num_value_heads
        linear_num_key_heads mamba_num_heads mamba_n_heads num_experts num_local_experts
        n_routed_experts moe_num_experts num_routed_experts num_hidden_layers n_layer n_layers
        num_layers decoder_layers encoder_layers
    """,
    16: """
        head_dim global_head_dim attention_head_dim v_head_dim kv_channels qk_nope_head_dim
        qk_rope_head_dim query_pre_attn_scalar rotary_dim index_head_dim kv_lora_rank q_lora_rank
        hidden_size_per_layer_input linear_key_head_dim linear_value_head_dim mamba_head_dim
        mamba_d_head indexer_head_dim ngram_vocab_size_base hc_lowrank
    """,
    8: """
        index_topk state_size ssm_state_size mamba_d_state mamba_state_dim chunk_size
        mamba_chunk_size indexer_budget sliding_window attention_chunk_size sliding_window_size
        attention_window_size window_size
    """,
    2: """
        num_experts_per_tok moe_topk moe_k top_k num_experts_per_token attn_layer_period
        expert_layer_period heads_per_ngram split_ngram_parts indexer_n_heads
        indexer_compress_ratio eos_token_id
    """,
    1: """
        n_group topk_group n_shared_experts n_groups mamba_n_groups mamba_ngroups
        first_k_dense_replace attn_layer_offset expert_layer_offset bos_token_id n_input_layers
        n_output_layers indexer_kv_heads
    """,
    VOCAB: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    0.1: "initializer_range init_std",
    256: "max_position_embeddings n_positions",
    0: "pad_token_id num_kv_shared_layers",
}
KINDS = ("layer_types", "layers_block_type")
WIDE = {
    **dict.fromkeys(("head_dim", "mamba_d_head", "attention_head_dim"), 32),
    "attention_hidden_size": 128,
    "num_experts_per_tok": 1,
}
# What is tried in turn until a model runs: other configurations want these left out or otherwise.
OTHERWISE: list[dict[str, Any]] = [
    {},
    dict.fromkeys(KINDS),
    {"head_dim": None},
    {"num_hidden_layers": None, "head_dim": None},
    {**dict.fromkeys(KINDS), "head_dim": None, "global_head_dim": None},
    {"num_key_value_heads": 2, "swa_num_key_value_heads": 2},
    WIDE,
    WIDE | dict.fromkeys(KINDS) | {"attn_layer_indices": [1]},
    WIDE | {"layer_types": ["linear_attention", "full_attention"], "layers_block_type": None},
    {"layer_types": ["conv", "full_attention"]},
    {**dict.fromkeys(KINDS), "num_key_value_heads": None, "head_dim": 16, "pad_token_id": None},
]


def tiny_config(config_class: type[Any], otherwise: dict[str, Any]) -> Any:
    """Return the class's defaults with small sizes, and a layer of each kind."""
    default = config_class()
    # Without it, reading what differs between layers is an error.
    default.allow_global_per_layer_attribute_access = True
    candidates: dict[str, Any] = {}
    for size, names in NAMES_BY_SIZE.items():
        candidates |= dict.fromkeys(names.split(), size)
    for name, size in otherwise.items():
        if name not in KINDS:
            candidates[name] = size
    sizes = {}
    for name, size in candidates.items():
        if size is not None and hasattr(default, name):
            sizes[name] = size
    for name in KINDS:
        kinds = list(dict.fromkeys(otherwise.get(name, getattr(default, name, None)) or ()))
        if kinds:
            sizes[name] = (kinds * 4)[: max(4, len(kinds))]
            sizes["num_hidden_layers"] = max(4, len(kinds))
    for name in list(sizes):
        attribute = getattr(config_class, name, None)
        if isinstance(attribute, property) and not attribute.fset:
            del sizes[name]
    return config_class(**sizes)


def tiny_model(model_type: str, otherwise: dict[str, Any]) -> Any:
    """Make a tiny model; of a model of pictures and texts its language model, if it has one."""
    config_class = CONFIG_MAPPING[model_type]
    text_class = type(config_class().get_text_config(decoder=True))
    if text_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        config_class = text_class
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    torch.manual_seed(0)
    return model_class(tiny_config(config_class, otherwise)).eval()


class Verdict(NamedTuple):
    """How an architecture runs, and what it keeps or why it does not run.

    `path`: "ours", "theirs", "refused", "failed", "wrong" or "untried".
    """

    path: str
    why: str


def judge(model_type: str) -> Verdict:
    """Try one configuration after the other until the architecture runs."""
    verdicts: list[Verdict] = []
    for otherwise in OTHERWISE:
        try:
            verdict = judge_model(tiny_model(model_type, otherwise))
        except Exception as error:
            verdict = Verdict("untried", cause_of(error).partition(". ")[0].rstrip(".:"))
        if verdict.path in ("ours", "theirs", "wrong"):
            return verdict
        verdicts.append(verdict)
    order = ("refused", "failed", "untried")
    return min(verdicts, key=lambda verdict: order.index(verdict.path))


def judge_model(model: Any) -> Verdict:
    if has_own_forward(model):
        return Verdict("ours", "")
    try:
        runner = HFRunner(model, 128)
    except ModelError as error:
        why = str(error).removeprefix(type(model).__name__)
        why = why.removeprefix(" cannot be used here: ").partition(". ")[0].strip()
        path = "failed" if "trial forward failed" in why else "refused"
        return Verdict(path, why.removeprefix("a trial forward failed: "))
    worst = largest_difference(runner, model)
    if not worst < 1e-3:
        return Verdict("wrong", f"logits differ by up to {worst:.1e} of their largest")
    properties = []
    layers = DynamicCache(config=model.config).layers
    if any(isinstance(layer, DynamicSlidingWindowLayer) for layer in layers):
        properties.append("windows")
    if runner.snapshots and not runner.snapshots.unknown:
        properties.append("states")
    if runner.snapshots.unknown:
        properties.append("all tokens fed again after a rejected one")
    if runner._is_single:
        properties.append("fed token by token")
    return Verdict("theirs", ", ".join(properties))


@torch.inference_mode()
def largest_difference(runner: HFRunner, model: Any) -> float:
    rng = random.Random(0)
    text = [rng.randrange(3, VOCAB) for _ in range(TOKENS)]
    logits = model(torch.tensor([text]), use_cache=False).logits
    expected = logits[0, :, : runner.vocab_size].float()
    worst = 0.0
    start = runner.length()
    while start < TOKENS:
        part = text[start : start + rng.choice((1, 2, 9))]
        rows = feed_chain(runner, part, len(part))
        worst = max(worst, float((rows - expected[start : start + len(part)]).abs().max()))
        for _ in range(rng.choice((0, 3, 12))):
            feed_chain(runner, [rng.randrange(3, VOCAB)], 1)
        runner.rollback(start + rng.randint(1, len(part)))
        start = runner.length()
    return worst / float(expected.abs().max())


def in_a_child(model_type: str) -> Verdict:
    """Run `judge` in a process of its own, which may hang or die."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=lambda: answer(theirs, model_type))
    child.start()
    verdict = Verdict("untried", f"no answer within {SECONDS} seconds")
    if ours.poll(SECONDS):
        verdict = ours.recv()
    child.kill()
    child.join()
    return verdict


def answer(pipe: Connection, model_type: str) -> None:
    try:
        pipe.send(judge(model_type))
    except BaseException as error:
        pipe.send(Verdict("refused", cause_of(error)))


def lines(verdicts: dict[str, Verdict]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield from ("# Which architectures run", "")
    yield from textwrap.wrap(HEAD.strip().format(transformers.__version__), WIDTH)
    titles = {
        "ours": "Our own forward pass",
        "theirs": "Through transformers",
        "refused": "Refused at load",
        "wrong": "Wrong logits",
        "failed": "A trial forward fails, of a tiny configuration at least",
        "untried": "Not tried",
    }
    for path, title in titles.items():
        by_reason: dict[str, list[str]] = {}
        for model_type, verdict in verdicts.items():
            if verdict.path == path:
                by_reason.setdefault(verdict.why, []).append(f"`{model_type}`")
        if by_reason:
            yield from ("", f"## {title}: {sum(map(len, by_reason.values()))}", "")
        for why, names in sorted(by_reason.items(), key=lambda group: -len(group[1])):
            reason = f"{why}: " if why else ""
            line = f"* {reason}{', '.join(names)}"
            yield from textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    verdicts = {}
    for model_type in sys.argv[1:] or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        verdict = in_a_child(model_type)
        verdicts[model_type] = verdict
        print(model_type, verdict.path, verdict.why, file=sys.stderr)
    print("\n".join(lines(verdicts)))


if __name__ == "__main__":
    main()
