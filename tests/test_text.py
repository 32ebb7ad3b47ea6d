"""Detokenisation and stop strings, piece by piece, against decoding everything and looking."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from pearl.errors import RequestError
from pearl.text.stream import (
    CONTEXT,
    PATIENCE,
    REPLACEMENT,
    Detokenizer,
    StopMatcher,
    TextStream,
    Tokenizer,
)
from pearl.text.tokenizer import FileTokenizer
from tests.tokenizers import byte_fallback, byte_level

LETTERS = bytes_to_unicode()  # of GPT-2: a printable character for each byte


def ids_of(tokenizer: FileTokenizer, text: str) -> list[int]:
    """The text's tokens without BOS."""
    return [id for id in tokenizer.encode(text) if id != 0]


def pieces_of(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*map(detokenizer.push, tokens), detokenizer.flush()]


def beyond(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """What the whole decoded says more than the prompt decoded."""
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *tokens])
    assert whole.startswith(before)
    return whole[len(before) :]


def bytes_of(tokenizer: FileTokenizer, data: bytes) -> list[int]:
    """One token for each byte, valid UTF-8 or not."""
    if tokenizer is byte_fallback():
        return [3 + byte for byte in data]
    ids = {tokenizer.token(id): id for id in range(tokenizer.vocab_size)}
    return [ids[LETTERS[byte]] for byte in data]


def tokens(tokenizer: FileTokenizer, length: int) -> st.SearchStrategy[list[int]]:
    """Tokens at random: mostly the bytes of characters, whole and cut, among words and special tokens."""
    data = st.one_of(st.text("a😀你é \ufffd", max_size=3).map(str.encode), st.binary(max_size=4))
    cut = st.tuples(data, st.integers(0, 3)).map(
        lambda pair: bytes_of(tokenizer, pair[0][pair[1] :])
    )
    anything = st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=3)
    return st.lists(cut | anything, max_size=length).map(
        lambda runs: list(itertools.chain(*runs))[:length]
    )


def texts(tokenizer: FileTokenizer) -> st.SearchStrategy[list[int]]:
    """Tokens of whole characters, some of them bytes."""
    return st.text("a😀你 \nthe", max_size=12).map(lambda text: ids_of(tokenizer, text))


class TestDetokenizer:
    def test_a_prompt_that_ends_in_a_run_of_byte_tokens(self) -> None:
        """Context that begins amid a character spoils the run, and with it the answer that goes on in it."""
        tokenizer = byte_fallback()
        answer = [*bytes_of(tokenizer, "好".encode()), *ids_of(tokenizer, "cat")]
        for length in range(1, 30):
            prompt = [
                *tokenizer.encode("the"),
                *bytes_of(tokenizer, ("aé" + "你" * length).encode()),
            ]
            assert "".join(pieces_of(tokenizer, prompt, answer)) == "好 cat"
            assert "".join(pieces_of(tokenizer, [*prompt, answer[0]], answer[1:])) == "好 cat"

    @pytest.mark.parametrize("text", ["မြန်မာ" * 20, "😀" * 50, "a你" * 40])
    def test_a_long_run_of_byte_tokens_flows(self, text: str) -> None:
        """Scripts outside the vocabulary write whole sentences in byte tokens: they must come, and rightly."""
        tokenizer = byte_fallback()
        pieces = pieces_of(tokenizer, tokenizer.encode("the"), bytes_of(tokenizer, text.encode()))
        assert "".join(pieces) == text
        assert max(map(len, pieces)) <= PATIENCE

    @pytest.mark.parametrize("garbage", [b"\xff", b"\xe4\xbd", b"\x80\xf0\x9f\x98"])
    @pytest.mark.parametrize("end", [b"", b"\xff", "😀".encode(), b"a"])
    def test_garbage_without_end(self, garbage: bytes, end: bytes) -> None:
        """Where no token ends a character for long, text is given out all the same, none twice or never."""
        tokenizer = byte_level()
        for count in range(60):
            answer = bytes_of(tokenizer, garbage * count + end)
            assert "".join(pieces_of(tokenizer, [], answer)) == tokenizer.decode(answer)

    @given(data=st.data())
    @settings(max_examples=300)
    def test_all_pieces_are_the_whole(self, data: st.DataObject) -> None:
        """Whatever the tokens, but for byte tokens of sentencepiece that are no UTF-8."""
        tokenizer = data.draw(st.sampled_from([byte_level(), byte_fallback()]))
        some = tokens(tokenizer, 40) if tokenizer is byte_level() else texts(tokenizer)
        word = ids_of(tokenizer, "cat")
        prompt = [*data.draw(some), *word]
        answer = [token for run in data.draw(st.lists(some, max_size=6)) for token in [*run, *word]]
        assert "".join(pieces_of(tokenizer, prompt, answer)) == beyond(tokenizer, prompt, answer)

    @given(data=st.data())
    @settings(deadline=None)
    def test_garbage_is_neither_held_for_ever_nor_decoded_over_and_over(
        self, data: st.DataObject
    ) -> None:
        """The work for a token is bounded, whatever came before it, and so is what is held."""
        tokenizer = Counting(data.draw(st.sampled_from([byte_level(), byte_fallback()])))
        detokenizer = Detokenizer(tokenizer, [])
        for token in bytes_of(tokenizer.inner, data.draw(st.binary(min_size=40, max_size=120))):
            detokenizer.push(token)
        assert len(detokenizer.flush()) <= 2 * PATIENCE
        assert tokenizer.most <= CONTEXT + PATIENCE + 4


class Counting:
    """Passes on to a tokenizer; notes the most tokens it was given at once."""

    def __init__(self, inner: FileTokenizer) -> None:
        self.inner, self.vocab_size, self.most = inner, inner.vocab_size, 0
        self.encode, self.apply_chat, self.token = inner.encode, inner.apply_chat, inner.token

    def decode(self, ids: Sequence[int]) -> str:
        self.most = max(self.most, len(ids))
        return self.inner.decode(ids)


class TestStopMatcher:
    def test_an_empty_stop_is_refused(self) -> None:
        with pytest.raises(RequestError, match="empty"):
            StopMatcher(["a", ""])

    @given(
        st.lists(st.text("ab😀", max_size=4), max_size=12),
        st.lists(st.text("ab😀", min_size=1, max_size=5), max_size=3),
    )
    @settings(max_examples=500)
    def test_against_looking_at_everything(self, pieces: list[str], stops: list[str]) -> None:
        """One that is complete first cuts though it is within another; in one piece the earlier start does."""
        matcher, shown, whole = StopMatcher(stops), "", ""
        for piece in pieces:
            whole += piece
            shown += matcher.push(piece)
            assert whole.startswith(shown)
            found = [whole.find(stop) for stop in stops if stop in whole]
            if found:
                assert (shown, matcher.push("b"), matcher.flush()) == (whole[: min(found)], "", "")
                assert whole.startswith(matcher.matched, min(found))
                assert matcher.matched in stops
                return
            held = whole[len(shown) :]
            assert not held or any(stop.startswith(held) for stop in stops), (
                "no more is held than may begin a stop"
            )
        assert matcher.matched is None
        assert shown + matcher.flush() == whole


class TestTextStream:
    @given(data=st.data())
    @settings(max_examples=400)
    def test_against_decoding_everything_after_each_token(self, data: st.DataObject) -> None:
        """The token that completes a stop is the first whose text holds one; the text is cut before it."""
        tokenizer = data.draw(st.sampled_from([byte_level(), byte_fallback()]))
        prompt = tokenizer.encode("the cat")
        anything = tokens(tokenizer, PATIENCE) if tokenizer is byte_level() else st.nothing()
        answer = data.draw(texts(tokenizer) | anything)
        text = beyond(tokenizer, prompt, answer)
        places = st.tuples(st.integers(0, len(text)), st.integers(1, 4))
        parts = places.map(lambda place: text[place[0] :][: place[1]]).filter(bool)
        stops = data.draw(st.lists(parts if text else st.just("a"), max_size=3))
        self.check(tokenizer, prompt, answer, stops)

    @staticmethod
    def check(
        tokenizer: FileTokenizer, prompt: list[int], answer: list[int], stops: list[str]
    ) -> None:
        stream, shown = TextStream(tokenizer, prompt, stops), ""
        for count, token in enumerate(answer, start=1):
            shown += stream.push(token)
            text = beyond(tokenizer, prompt, answer[:count]).rstrip(REPLACEMENT)
            found = [text.find(stop) for stop in stops if stop in text]
            assert stream.stopped == bool(found)
            if found:
                assert shown == text[: min(found)]
                assert (stream.push(token), stream.finish()) == ("", "")
                return
        text = beyond(tokenizer, prompt, answer)
        found = [text.find(stop) for stop in stops if stop in text]
        assert shown + stream.finish() == text[: min(found, default=None)]

    @pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()])
    @pytest.mark.parametrize(
        ("text", "stops", "shown"),
        [
            ("cat", ["x", "</s>"], "cat"),
            ("the a", ["abc", "</s>"], "the a"),
            ("你", ["</s>"], "你"),
            ("cat", ["a", "</s>"], "c"),
        ],
    )
    def test_a_special_token_ends_a_text_where_its_name_is_a_stop(
        self, tokenizer: FileTokenizer, text: str, stops: list[str], shown: str
    ) -> None:
        """It has no text, so nothing ended there. Text that was held back for more of it or for a stop is all shown."""
        start, end = 0, 1
        stream = TextStream(tokenizer, [start], stops)
        parts = [stream.push(token) for token in [start, *ids_of(tokenizer, text), end]]
        assert ("".join(parts).strip(), stream.stopped, stream.finish()) == (shown, True, "")
