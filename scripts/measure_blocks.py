"""Measure what a block drafter's block loses without the target's last hidden states, by speculators' own forward.

    python scripts/measure_blocks.py --head OUT/head --prompts questions --limit 8

A drafter in a process of its own gets the states of a block with the verdict on it.  Behind each outcome of a block of
which j tokens are accepted, the next block lacks the last j + 1 states.  Texts are greedy, of the target alone.  For
each number of missing states the table has the tokens of a step (accepted ones and the target's own), and the share of
blocks whose first 1, 2, ... tokens are all right:

    without     the missing positions are left out
    as tokens   their tokens stand in the block, before the anchor
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from speculators.model import SpeculatorModel

from pearl.lab.bench.tasks import read_tasks
from pearl.lab.distill.answers import answer
from pearl.lab.distill.config import DistillConfig
from pearl.lab.distill.pair import Teacher, load_teacher
from pearl.lab.distill.states import states_of

_BATCH = 48  # blocks of a forward


class Text(NamedTuple):
    """A greedy text of the target.

    Attributes:
        ids: [n], prompt and answer.
        features: [n, layers * hidden], the states that the head reads.
        start: length of the prompt.
    """

    ids: torch.Tensor
    features: torch.Tensor
    start: int


def recorded(teacher: Teacher, args: argparse.Namespace, layers: list[int]) -> Iterator[Text]:
    """Yield the target's greedy texts of the prompts, with its states."""
    for name in args.prompts:
        tasks = read_tasks(name, None, args.limit)
        prompts = [teacher.encode_prompt(task.turns[0]) for task in tasks]
        answers = answer(
            teacher.model, prompts, limit=args.max_tokens, eos=teacher.eos, allow_loops=True
        )
        for recorded_answer in answers:
            ids = recorded_answer.prompt + recorded_answer.tokens
            (states,) = states_of(teacher, [ids], layers)
            features = states[:, :-1].flatten(1).float()
            yield Text(torch.tensor(ids), features, len(recorded_answer.prompt))


def accepted(model: Any, text: Text, missing: int, as_tokens: bool) -> torch.Tensor:
    """Return how many tokens of each block are right, for every anchor in the answer, [anchors]."""
    size = model.block_size
    first = max(text.start, missing + 1)
    anchors = torch.arange(first, len(text.ids) - size)
    counts = []
    for batch in anchors.split(_BATCH):
        counts.append(_accepted(model, text, batch, missing, as_tokens))
    return torch.cat(counts) if counts else anchors


def _accepted(
    model: Any, text: Text, anchors: torch.Tensor, missing: int, as_tokens: bool
) -> torch.Tensor:
    size = model.block_size
    before = missing if as_tokens else 0  # tokens of the block before its anchor
    width = before + size
    offsets = torch.arange(-before, size)
    positions = anchors[:, None] + offsets  # [blocks, width]
    tokens = torch.where(offsets > 0, model.config.mask_token_id, text.ids[positions])
    context = len(text.ids)
    is_known = torch.arange(context) < (anchors - missing)[:, None]  # [blocks, context]
    own = torch.block_diag(*[torch.ones(width, width)] * len(anchors)).bool()
    mask = torch.cat((is_known.repeat_interleave(width, 0), own), 1)[None, None]
    hidden = _hidden(model, text.features, tokens.flatten(), positions.flatten(), mask)
    hidden = hidden.view(len(anchors), width, -1)[:, before:]
    logits = model.lm_head(hidden)
    ids = torch.arange(model.draft_vocab_size) + model.d2t
    is_right = torch.ones(len(anchors), dtype=torch.bool)
    counts = torch.zeros(len(anchors), dtype=torch.long)
    guesses = text.ids[anchors]
    first = 0 if model.config.sample_from_anchor else 1
    for slot in range(first, size):
        row = logits[:, slot]
        if getattr(model, "markov_head", None) is not None:
            bias = model.markov_head.block_bias(
                prev_token_ids=guesses[:, None], hidden_states=hidden[:, slot : slot + 1]
            )
            row = row + bias[:, 0]
        guesses = ids[row.argmax(-1)]
        is_right &= guesses == text.ids[anchors + slot + 1 - first]
        counts += is_right
    return counts


def _hidden(
    model: Any,
    features: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Run the head's layers on the tokens of all blocks; return their outputs [1, tokens, hidden]."""
    states = model.embed_tokens(tokens[None])
    read = model.hidden_norm(model.fc(features[None]))
    places = torch.cat((torch.arange(len(features)), positions))[None]
    rope = model.rotary_emb(read, places)
    for layer in model.layers:
        states = layer(
            hidden_states=states,
            target_hidden=read,
            attention_mask=mask,
            position_ids=places,
            use_cache=False,
            position_embeddings=rope,
        )
    hidden: torch.Tensor = model.norm(states)
    return hidden


def load(path: Path, verifier: Path) -> Any:
    """Return speculators' model of the head, whose embedding is that of the directory `verifier`."""
    config = SpeculatorModel.config_class.from_pretrained(str(path))
    config.speculators_config.verifier.name_or_path = str(verifier)
    config.transformer_layer_config._attn_implementation = "sdpa"
    return SpeculatorModel.from_pretrained(str(path), config=config).float().eval()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--head", required=True, type=Path)
    parser.add_argument("--prompts", action="append")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    args.prompts = args.prompts or ["humaneval", "questions", "edits"]
    model = load(args.head, args.head.parent / "states" / "verifier")
    teacher = load_teacher(DistillConfig(target=args.target, out="", device="cpu"), print)
    texts = list(recorded(teacher, args, model.target_layer_ids))
    first = 0 if model.config.sample_from_anchor else 1
    depth = model.block_size - first
    print("| missing | how | tokens a step | " + " | ".join(map(str, range(1, depth + 1))) + " |")
    print("|---" * (3 + depth) + "|")
    for missing in range(model.block_size + 1):
        for as_tokens in (False, True) if missing else (False,):
            counts = torch.cat([accepted(model, text, missing, as_tokens) for text in texts])
            shares = [f"{(counts >= number).float().mean():.3f}" for number in range(1, depth + 1)]
            how = "as tokens" if as_tokens else "without"
            step = 1 + counts.float().mean().item()
            print(f"| {missing} | {how} | {step:.3f} | " + " | ".join(shares) + " |", flush=True)


if __name__ == "__main__":
    main()
