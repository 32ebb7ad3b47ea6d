"""Measure what a block drafter's block loses without the target's last hidden states, by speculators' own forward.

    python scripts/measure_blocks.py --head OUT/head --verifier OUT/states/verifier --texts texts.pt

A drafter in a process of its own gets the states of a block with the verdict on it.  If the target accepts j tokens of
a block, the block that was prepared for this outcome lacks the last j + 1 states.  Texts are greedy, of the target
alone.  For each number of missing states the table has the tokens of a step (accepted ones and the target's own), and
the share of blocks whose first 1, 2, ... tokens are all right:

    left out    their positions are left out: the anchor stands where the first of them would
    in block    their tokens take the places of the block's first mask tokens (as `BlockRunner` does it); so it
                guesses fewer tokens, and a whole block of them is left out
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
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


def texts_of(args: argparse.Namespace) -> list[Text]:
    """Return the recorded texts, which are made if the file is missing."""
    if not args.texts.exists():
        teacher = load_teacher(DistillConfig(target=args.target, out="", device="cpu"), print)
        torch.save([tuple(text) for text in recorded(teacher, args)], args.texts)
    return [Text(*text) for text in torch.load(args.texts)]


def recorded(teacher: Teacher, args: argparse.Namespace) -> Iterator[Text]:
    """Yield the target's greedy texts of the prompts, with its states."""
    for name in args.prompts:
        tasks = read_tasks(name, None, args.limit)
        prompts = [teacher.encode_prompt(task.turns[0]) for task in tasks]
        answers = answer(
            teacher.model, prompts, limit=args.max_tokens, eos=teacher.eos, allow_loops=True
        )
        for recorded_answer in answers:
            ids = recorded_answer.prompt + recorded_answer.tokens
            (states,) = states_of(teacher, [ids], args.layers)
            features = states[:, :-1].flatten(1).float()
            yield Text(torch.tensor(ids), features, len(recorded_answer.prompt))


class Blocks(NamedTuple):
    """The blocks after every anchor of a text.

    Attributes:
        start: position of the first anchor.
        counts: [anchors], how many tokens of a block are right.
        ranks: [anchors], how many tokens the head finds likelier than the first one that it has wrong.
    """

    start: int
    counts: torch.Tensor
    ranks: torch.Tensor


def blocks_of(model: Any, text: Text, missing: int, as_tokens: bool) -> Blocks:
    """Draft a block after every anchor in the answer, without the last `missing` states."""
    anchors = torch.arange(text.start, len(text.ids) - model.block_size)
    parts = []
    for batch in anchors.split(_BATCH):
        parts.append(_blocks(model, text, batch, missing, as_tokens))
    counts = [part.counts for part in parts]
    ranks = [part.ranks for part in parts]
    return Blocks(text.start, torch.cat(counts), torch.cat(ranks))


def _blocks(model: Any, text: Text, anchors: torch.Tensor, missing: int, as_tokens: bool) -> Blocks:
    width = model.block_size
    before = missing if as_tokens else 0  # tokens of the block before the last known one
    offsets = torch.arange(width) - before
    positions = anchors[:, None] + offsets  # [blocks, width]
    tokens = torch.where(offsets > 0, model.config.mask_token_id, text.ids[positions])
    is_known = torch.arange(len(text.ids)) < (anchors - missing)[:, None]
    own = torch.block_diag(*[torch.ones(width, width)] * len(anchors)).bool()
    mask = torch.cat((is_known.repeat_interleave(width, 0), own), 1)[None, None]
    places = positions if as_tokens else positions - missing
    hidden = _hidden(model, text.features, tokens.flatten(), places.flatten(), mask)
    hidden = hidden.view(len(anchors), width, -1)[:, before:]
    logits = model.lm_head(hidden)
    ids = torch.arange(model.draft_vocab_size) + model.d2t
    is_right = torch.ones(len(anchors), dtype=torch.bool)
    counts = torch.zeros(len(anchors), dtype=torch.long)
    ranks = torch.zeros(len(anchors), dtype=torch.long)
    guesses = text.ids[anchors]
    first = first_slot(model)
    for slot in range(first, width - before):
        row = logits[:, slot]
        if getattr(model, "markov_head", None) is not None:
            bias = model.markov_head.block_bias(
                prev_token_ids=guesses[:, None], hidden_states=hidden[:, slot : slot + 1]
            )
            row = row + bias[:, 0]
        guesses = ids[row.argmax(-1)]
        wanted = text.ids[anchors + slot + 1 - first]
        is_wanted = ids == wanted[:, None]
        share = row.masked_fill(~is_wanted, -torch.inf).amax(-1)  # -inf: not in its vocabulary
        rank = (row > share[:, None]).sum(-1)
        ranks = torch.where(is_right, rank, ranks)
        is_right &= guesses == wanted
        counts += is_right
    return Blocks(0, counts, ranks)


def first_slot(model: Any) -> int:
    """Return the first position of a block whose output guesses a token."""
    return 0 if model.config.sample_from_anchor else 1


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
    parser.add_argument("--head", type=Path, help="None: only record.")
    parser.add_argument("--verifier", type=Path, help="OUT/states/verifier of the head's run.")
    parser.add_argument(
        "--texts", required=True, type=Path, help="Recorded texts; made if missing."
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 15, 27])
    parser.add_argument("--prompts", action="append")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--c", type=int, nargs="+", default=[3, 5, 8, 12])
    parser.add_argument("--per-row", type=float, default=0.0025)
    parser.add_argument("--message", type=float, default=0.02)
    args = parser.parse_args()
    args.prompts = args.prompts or ["humaneval", "questions", "edits"]
    texts = texts_of(args)
    if args.head is None:
        return
    model = load(args.head, args.verifier)
    depth = model.block_size - first_slot(model)
    drafted: dict[Way, list[Blocks]] = {}
    for missing in range(depth + 1):
        for as_tokens in (False, True):
            if not as_tokens or 0 < missing < depth:
                way = Way(missing, as_tokens)
                drafted[way] = [blocks_of(model, text, missing, as_tokens) for text in texts]
    print_losses(drafted, depth)
    print()
    print_speeds(drafted, depth, args)


class Way(NamedTuple):
    """How many of the target's last states a block lacks, and whether their tokens stand in it."""

    missing: int
    as_tokens: bool = False


def tokens_per_step(blocks: Sequence[Blocks]) -> float:
    """Return the mean number of accepted tokens and the target's own."""
    return 1 + torch.cat([text.counts for text in blocks]).float().mean().item()


def print_losses(drafted: Mapping[Way, Sequence[Blocks]], depth: int) -> None:
    print("| missing | how | tokens a step | " + " | ".join(map(str, range(1, depth + 1))) + " |")
    print("|---" * (3 + depth) + "|")
    for way, blocks in drafted.items():
        counts = torch.cat([text.counts for text in blocks])
        shares = [f"{(counts >= number).float().mean():.3f}" for number in range(1, depth + 1)]
        how = "in block" if way.as_tokens else "left out"
        step = f"{tokens_per_step(blocks):.3f}"
        print(f"| {way.missing} | {how} | {step} | " + " | ".join(shares) + " |")


# ---- speed ----


class Place(NamedTuple):
    """Where blocks are drafted, and which outcomes of a block are prepared while the target verifies it.

    Attributes:
        is_remote: the head is in a process of its own.
        prepares_all: a block for the outcome that all tokens are accepted.
        prepares_runners_up: also blocks for each rejection in favour of a runner-up.
        is_selective: only outcomes whose block, with the states that it lacks, is worth more than
            the time for a new one.
        as_tokens: the tokens of missing states stand in the block, if it guesses a token then.
    """

    is_remote: bool = False
    prepares_all: bool = False
    prepares_runners_up: bool = False
    is_selective: bool = False
    as_tokens: bool = False


PLACES = {
    "in the target's process": Place(),
    "as the draft, as published": Place(True, True),
    "as the draft, outcomes prepared": Place(True, True, True),
    "as the draft, outcomes prepared where they pay": Place(True, True, True, True),
    "outcomes prepared, tokens in the block": Place(True, True, True, False, True),
    "tokens in the block, where they pay": Place(True, True, True, True, True),
}


class Clock(NamedTuple):
    """Times in units of a target forward of one token.

    Attributes:
        per_row: of each further token of a target forward.
        block: of a block.
        message: of a verdict and an answer between the processes.
    """

    per_row: float
    block: float
    message: float


class Replay:
    """Replays texts: what a step commits, and how long it takes.

    Args:
        runners_up: for how many tokens in place of a rejected one a block is prepared.
    """

    def __init__(
        self,
        drafted: Mapping[Way, Sequence[Blocks]],
        depth: int,
        place: Place,
        clock: Clock,
        runners_up: int,
    ) -> None:
        self._drafted = drafted
        self._depth = depth
        self._place = place
        self._runners_up = runners_up
        self._new = clock.block  # what a block takes that was not prepared
        self._step = 1 + clock.per_row * depth
        if place.is_remote:
            self._step += clock.message
        self.prepared = 0
        self.steps = 0

    def speed(self) -> float:
        """Return the speed over `ar`, which takes 1 for each token."""
        tokens = 0
        seconds = 0.0
        for number, text in enumerate(self._drafted[Way(0)]):
            end = text.start + len(text.counts)
            anchor = text.start
            way = Way(0)
            seconds += self._new
            used = 0  # tokens of the block that are committed already
            while anchor - used < end and anchor < end:
                blocks = self._drafted[way][number]
                row = anchor - used - text.start
                accepted = int(blocks.counts[row]) - used
                tokens += accepted + 1
                seconds += self._step
                self.steps += 1
                outcome = self._prepared(number, row, way, accepted, used)
                anchor += accepted + 1
                if outcome is None:
                    way = Way(0)
                    used = 0
                    seconds += self._new
                else:
                    way, used = outcome
                    self.prepared += 1
        return tokens / seconds

    def _prepared(
        self, number: int, row: int, way: Way, accepted: int, used: int
    ) -> tuple[Way, int] | None:
        """Return the way of the block that is ready for this outcome, and how many of its tokens are committed."""
        place = self._place
        blocks = self._drafted[way][number]
        depth = self._depth
        if way.as_tokens:
            depth -= way.missing
        if accepted + used == depth:  # it begins with the target's own next token
            next_way = self._way(depth - used)
            following = row + depth
            counts = self._drafted[next_way][number].counts
            is_right = following < len(counts) and bool(counts[following] > 0)
            return (next_way, 1) if place.prepares_all and is_right else None
        next_way = self._way(accepted + 1)
        if not place.prepares_runners_up or int(blocks.ranks[row]) > self._runners_up:
            return None
        if place.is_selective and not self._pays(next_way):
            return None
        return next_way, 0

    def _way(self, missing: int) -> Way:
        return Way(missing, self._place.as_tokens and 0 < missing < self._depth)

    def _pays(self, way: Way) -> bool:
        """Whether a block that lacks states gives more tokens a second than a new one, which takes its time."""
        lacking = tokens_per_step(self._drafted[way]) / self._step
        return lacking > tokens_per_step(self._drafted[Way(0)]) / (self._step + self._new)


def print_speeds(
    drafted: Mapping[Way, Sequence[Blocks]], depth: int, args: argparse.Namespace
) -> None:
    print("| speed over ar, prepared | " + " | ".join(f"c = {c}" for c in args.c) + " |")
    print("|---" * (1 + len(args.c)) + "|")
    for name, place in PLACES.items():
        cells = []
        for c in args.c:
            clock = Clock(args.per_row, 1 / c, args.message)
            # A forward of 16 rows takes no longer than one of one row; c of them fit in the target's.
            runners_up = max(1, 16 * c // depth**2)
            replay = Replay(drafted, depth, place, clock, runners_up)
            speed = replay.speed()
            cells.append(f"{speed:.2f}, {replay.prepared / replay.steps:.0%}")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
