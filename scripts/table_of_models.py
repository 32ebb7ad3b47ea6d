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
from typing import Any

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
from pearl.models.forward.runner import has_own_forward
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
VOCAB, TOKENS, WINDOW = 300, 48, 8
# By what they count; a name that a configuration lacks is left out.
SIZES: dict[str, Any] = {
    name: size
    for names, size in (
        (
            "hidden_size n_embd d_model embed_dim dim word_embed_proj_dim intermediate_size ffn_dim n_inner",
            64,
        ),
        (
            "ffn_hidden_size d_ff intermediate_size_mlp dense_intermediate_size decoder_ffn_dim mamba_d_ssm",
            64,
        ),
        (
            "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size",
            64,
        ),
        ("attention_hidden_size lru_width", 64),
        (
            "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads",
            4,
        ),
        ("swa_num_attention_heads num_key_value_heads num_kv_heads swa_num_key_value_heads", 4),
        (
            "num_global_key_value_heads linear_num_value_heads linear_num_key_heads mamba_num_heads mamba_n_heads",
            4,
        ),
        ("num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts", 4),
        ("num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers", 4),
        (
            "head_dim global_head_dim attention_head_dim v_head_dim kv_channels qk_nope_head_dim qk_rope_head_dim",
            16,
        ),
        (
            "query_pre_attn_scalar rotary_dim index_head_dim kv_lora_rank q_lora_rank hidden_size_per_layer_input",
            16,
        ),
        ("linear_key_head_dim linear_value_head_dim mamba_head_dim mamba_d_head", 16),
        (
            "index_topk state_size ssm_state_size mamba_d_state mamba_state_dim chunk_size mamba_chunk_size",
            8,
        ),
        (
            "sliding_window attention_chunk_size sliding_window_size attention_window_size window_size",
            WINDOW,
        ),
        (
            "num_experts_per_tok moe_topk moe_k top_k num_experts_per_token attn_layer_period expert_layer_period",
            2,
        ),
        (
            "n_group topk_group n_shared_experts n_groups mamba_n_groups mamba_ngroups first_k_dense_replace",
            1,
        ),
        (
            "attn_layer_offset expert_layer_offset bos_token_id n_input_layers n_output_layers indexer_kv_heads",
            1,
        ),
        ("indexer_head_dim ngram_vocab_size_base hc_lowrank", 16),
        ("shared_experts_intermediate_size", 64),
        ("indexer_budget", 8),
        ("heads_per_ngram split_ngram_parts indexer_n_heads indexer_compress_ratio", 2),
        ("vocab_size vocab_size_per_layer_input unpadded_vocab_size", VOCAB),
        ("initializer_range init_std", 0.1),
        ("max_position_embeddings n_positions", 256),
        ("pad_token_id num_kv_shared_layers", 0),
        ("eos_token_id", 2),
    )
    for name in names.split()
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
    """The class's defaults with small sizes, and a layer of each kind."""
    default = config_class()
    default.allow_global_per_layer_attribute_access = (
        True  # else reading what differs between layers is an error
    )
    sizes = SIZES | {name: size for name, size in otherwise.items() if name not in KINDS}
    sizes = {
        name: size for name, size in sizes.items() if size is not None and hasattr(default, name)
    }
    for name in KINDS:
        kinds = list(dict.fromkeys(otherwise.get(name, getattr(default, name, None)) or ()))
        if kinds:
            sizes |= {
                name: (kinds * 4)[: max(4, len(kinds))],
                "num_hidden_layers": max(4, len(kinds)),
            }
    for name in list(sizes):
        held = getattr(config_class, name, None)
        if isinstance(held, property) and not held.fset:
            del sizes[name]
    return config_class(**sizes)


def tiny_model(model_type: str, otherwise: dict[str, Any]) -> Any:
    """Of a model of pictures and texts its language model, if it has one."""
    config_class = CONFIG_MAPPING[model_type]
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    text = type(config_class().get_text_config(decoder=True))
    if text is not config_class and text in MODEL_FOR_CAUSAL_LM_MAPPING:
        config_class, model_class = text, MODEL_FOR_CAUSAL_LM_MAPPING[text]
    torch.manual_seed(0)
    return model_class(tiny_config(config_class, otherwise)).eval()


def judge(model_type: str) -> tuple[str, str]:
    """Return how it runs ("ours", "theirs", "refused", "failed", "wrong", "untried"), and what it keeps or why not."""
    found: list[tuple[str, str]] = []
    for otherwise in OTHERWISE:
        try:
            found.append(judge_model(tiny_model(model_type, otherwise)))
        except Exception as error:
            found.append(("untried", cause_of(error).partition(". ")[0].rstrip(".:")))
        if found[-1][0] in ("ours", "theirs", "wrong"):
            return found[-1]
    order = ("refused", "failed", "untried")
    return min(found, key=lambda judged: order.index(judged[0]))


def judge_model(model: Any) -> tuple[str, str]:
    if has_own_forward(model):
        return "ours", ""
    try:
        runner = HFRunner(model, 128)
    except ModelError as error:
        why = (
            str(error)
            .removeprefix(type(model).__name__)
            .removeprefix(" cannot be used here: ")
            .partition(". ")[0]
            .strip()
        )
        return "failed" if "trial forward failed" in why else "refused", why.removeprefix(
            "a trial forward failed: "
        )
    worst = largest_difference(runner, model)
    if not worst < 1e-3:
        return "wrong", f"logits differ by up to {worst:.1e} of their largest"
    layers = DynamicCache(config=model.config).layers
    kept = {
        "windows": any(isinstance(layer, DynamicSlidingWindowLayer) for layer in layers),
        "states": bool(runner._states) and not runner._states.unknown,
        "all tokens fed again after a rejected one": bool(runner._states.unknown),
        "fed token by token": runner._is_single,
    }
    return "theirs", ", ".join(name for name, is_so in kept.items() if is_so)


@torch.inference_mode()
def largest_difference(runner: HFRunner, model: Any) -> float:
    rng, worst = random.Random(0), 0.0
    text = [rng.randrange(3, VOCAB) for _ in range(TOKENS)]
    expected = (
        model(torch.tensor([text]), use_cache=False).logits[0, :, : runner.vocab_size].float()
    )
    while (start := runner.length()) < TOKENS:
        part = text[start : start + rng.choice((1, 2, 9))]
        found = feed_chain(runner, part, len(part))
        worst = max(worst, float((found - expected[start : start + len(part)]).abs().max()))
        for _ in range(rng.choice((0, 3, 12))):
            feed_chain(runner, [rng.randrange(3, VOCAB)], 1)
        runner.rollback(start + rng.randint(1, len(part)))
    return worst / float(expected.abs().max())


def in_a_child(model_type: str) -> tuple[str, str]:
    """`judge` in a process of its own, which may hang or die."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=lambda: answer(theirs, model_type))
    child.start()
    found = (
        ours.recv() if ours.poll(SECONDS) else ("untried", f"no answer within {SECONDS} seconds")
    )
    child.kill()
    child.join()
    return found


def answer(pipe: Connection, model_type: str) -> None:
    try:
        pipe.send(judge(model_type))
    except BaseException as error:
        pipe.send(("refused", cause_of(error)))


def lines(found: dict[str, tuple[str, str]]) -> Iterator[str]:
    """The page."""
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
    for way, title in titles.items():
        groups: dict[str, list[str]] = {}
        for model_type, (how, why) in found.items():
            if how == way:
                groups.setdefault(why, []).append(model_type)
        if groups:
            yield from ("", f"## {title}: {sum(map(len, groups.values()))}", "")
        for why, names in sorted(groups.items(), key=lambda group: -len(group[1])):
            line = f"* {why + ': ' if why else ''}{', '.join(f'`{name}`' for name in names)}"
            yield from textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {}
    for model_type in sys.argv[1:] or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        found[model_type] = in_a_child(model_type)
        print(model_type, *found[model_type], file=sys.stderr)
    print("\n".join(lines(found)))


if __name__ == "__main__":
    main()
