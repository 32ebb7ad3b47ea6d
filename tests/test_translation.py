"""A draft of another vocabulary: what it is fed, what it proposes, and that no text changes."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from pearl import Engine, SamplingParams
from pearl.config import RequestOptions
from pearl.errors import ModelError
from pearl.models.checkpoints.tokenizers import ToyTokenizer, load_tokenizer
from pearl.models.runner import feed_chain
from pearl.models.translated import TranslatedRunner
from pearl.text.translation import Translation
from tests.runner_contract import Kinds, RunnerContract
from tests.tiny import SPECIAL, VOCAB_SIZE, on_cpu, tiny_model

MERGES = (
    ("h", "e"),
    ("t", "he"),
    ("o", "u"),
    ("Ġ", "s"),
    ("i", "n"),
    ("in", "g"),
)  # some are the target's too
PROMPT = "the ant and the other thing"


def other_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level as the target's, in another order, with other merges, and no character "q"."""
    characters = [
        piece for piece in sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True) if piece != "q"
    ]
    pieces = [*characters, *("".join(pair) for pair in MERGES), SPECIAL[1]]
    found = Tokenizer(
        models.BPE(vocab={piece: id for id, piece in enumerate(pieces)}, merges=list(MERGES))
    )
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([SPECIAL[1]])
    return PreTrainedTokenizerFast(tokenizer_object=found, eos_token=SPECIAL[1])


def translation(draft: Path) -> Translation:
    (target, defaults), (own, of_draft) = (
        load_tokenizer(str(tiny_model())),
        load_tokenizer(str(draft)),
    )
    return Translation(target, own, defaults.eos, of_draft.eos)


@functools.cache
def other_model() -> Path:
    """The target, with its rows of tokens in the order of the other vocabulary; those of other tokens are random."""
    directory, tokenizer = tiny_model().parent / "other-vocabulary", other_tokenizer()
    tokenizer.save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(tiny_model())
    model.config.save_pretrained(directory)
    before = [
        each.weight.detach().clone() for each in (model.get_input_embeddings(), model.lm_head)
    ]
    model.resize_token_embeddings(len(tokenizer))
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    with torch.no_grad():
        for target, own in translation(directory).shared.items():
            for rows, layer in zip(
                before, (model.get_input_embeddings(), model.lm_head), strict=True
            ):
                layer.weight[own] = rows[target]
    model.save_pretrained(directory)
    return directory


def translated(context: int = 64) -> TranslatedRunner:
    runner = on_cpu(other_model(), max_context=context, slots=2)
    return TranslatedRunner(runner, translation(other_model()), VOCAB_SIZE)


class TestContract(RunnerContract):
    kinds: ClassVar[Kinds] = {"translated": translated}


def test_tokens_of_the_same_bytes_are_the_same() -> None:
    found, (target, _) = translation(other_model()), load_tokenizer(str(tiny_model()))
    own, _ = load_tokenizer(str(other_model()))
    pieces = {target.token(id) for id in range(VOCAB_SIZE)} & {
        own.token(id) for id in range(own.vocab_size)
    }
    assert {(target.token(ours), own.token(theirs)) for ours, theirs in found.shared.items()} == {
        (p, p) for p in pieces
    }
    assert [own.token(id) for id in found.spell(target.encode("and")[0])] == ["a", "n", "d"]
    assert found.spell(target.encode("q")[0]), (
        "a token that the draft cannot spell is fed as another one"
    )


class Pieces(ToyTokenizer):
    """A vocabulary with names of bytes before its characters, as Llama 2's, which writes a space before a text."""

    def __init__(self, pieces: Sequence[str]) -> None:
        super().__init__(1)
        self.pieces, self.vocab_size = pieces, len(pieces)

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [self.pieces.index(each) for each in f"\u2581{text}" if each in self.pieces]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[id] for id in ids).replace("\u2581", " ").lstrip(" ")

    def token(self, id: int) -> str | None:
        return self.pieces[id] if 0 <= id < self.vocab_size else None


def test_characters_are_shared_as_themselves_and_words_are_spelled_as_they_stand() -> None:
    """Names of bytes came first once, so that no "." was ever proposed; and pieces within a word got a space."""
    ours = Pieces(["<0x2E>", "<0xE2>", "\u2581", "\n", ".", "a", "b", "ab", "<end>", "<stop>"])
    theirs = Pieces(["<stop>", "<0x2E>", "<0xE2>", "b", ".", "a", "\u2581", "\n"])
    found = Translation(ours, theirs, target_eos=(8, 9), draft_eos=(0,))
    assert {ours.pieces[id]: theirs.pieces[same] for id, same in found.shared.items()} == {
        each: each for each in (*".ab\u2581\n", "<0xE2>", "<stop>")
    }
    assert [theirs.pieces[id] for id in found.spell(7)] == ["a", "b"]
    assert len(found.spell(8)) == 1


def test_logits_are_the_drafts_for_shared_tokens_and_no_others() -> None:
    """Its weights are the target's, so after shared tokens alone they are the target's logits."""
    runner, target = translated(), on_cpu(tiny_model(), max_context=32)
    shared = sorted(translation(other_model()).shared)
    tokens = [shared[(7 * i + i * i) % len(shared)] for i in range(20)]
    ours, theirs = feed_chain(runner, tokens, 20), feed_chain(target, tokens, 20)
    torch.testing.assert_close(ours[:, shared], theirs[:, shared], atol=1e-4, rtol=1e-4)
    rest = [id for id in range(VOCAB_SIZE) if id not in set(shared)]
    assert rest
    assert ours[:, rest].eq(-torch.inf).all()


def test_a_text_of_long_spellings_fits_the_context() -> None:
    """Each token would take three of the draft's, and its context has room for two."""
    (and_,) = load_tokenizer(str(tiny_model()))[0].encode("and")
    runner = translated(48)
    assert feed_chain(runner, [and_] * runner.context, 1).shape == (1, VOCAB_SIZE)
    runner.rollback(3)
    assert runner.length() == 3


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(
        str(tiny_model()), str(other_model()), max_context=128, log_level="error"
    ) as running:
        yield running


@pytest.mark.slow
def test_the_user_is_told_in_a_sentence(engine: Engine) -> None:
    """It was a line of the draft's log, which the chat does not show."""
    (note,) = engine.notes
    assert note.startswith(
        f"the draft {engine.config.draft} has another vocabulary than its target: it has "
    )
    assert "Texts stay the same" in note


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_the_targets(engine: Engine, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=48, ignore_eos=True)
    alone = engine.generate(
        PROMPT, params.overridden_by(RequestOptions(method="ar", rule="coupled"))
    )[0]
    for method in ("sd", "ssd", "pearl", "auto"):
        found = engine.generate(
            PROMPT, params.overridden_by(RequestOptions(method=method, rule="coupled"))
        )[0]
        assert found.tokens == alone.tokens, method
        if method == "sd":
            assert (found.statistics.acceptance_rate or 0) > 0.3
    held = params.changed(regex="(the|and) [a-z]{20}", ignore_eos=False)  # in the target's tokens
    texts = [
        engine.generate(PROMPT, held.overridden_by(RequestOptions(method=way, rule="coupled")))[0]
        for way in ("ar", "sd")
    ]
    assert texts[0].tokens == texts[1].tokens
    assert len(texts[0].text) == 24
    ratio = engine.generate(
        PROMPT, params.overridden_by(RequestOptions(method="sd", rule="ratio"))
    )[0].statistics
    assert ratio.num_accepted_draft_tokens


@pytest.mark.slow
def test_a_draft_with_hardly_a_token_in_common_is_refused(tmp_path: Path) -> None:
    words = [SPECIAL[1], "unlike", "any", "of", "its"]
    found = Tokenizer(
        models.WordLevel({word: id for id, word in enumerate(words)}, unk_token=SPECIAL[1])
    )
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=found, eos_token=SPECIAL[1]).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tiny_model())
    model.resize_token_embeddings(len(words))
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"it has 1 of the target's .* too few"):
        Engine(str(tiny_model()), str(tmp_path), log_level="error")
