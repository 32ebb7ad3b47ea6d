"""Datastores: what is found in them, what becomes of damaged ones, and that they change no text."""

import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.config import SamplingParams
from pearl.drafting import datastore_build
from pearl.drafting.datastore import HEADER, Datastore, DatastoreHeader, check_tokenizer, width_of
from pearl.drafting.fused_guesses import Guesser
from pearl.drafting.ngram import MOST_MATCHED, Candidate, anchored, guess_tree
from pearl.engine import Engine
from pearl.errors import ConfigError
from pearl.lab.bench.exactness import check_texts
from pearl.lab.studies.simulate import Outcome, Timing, paired_executors, simulate
from pearl.models.checkpoints.tokenizers import ToyTokenizer, load_tokenizer
from pearl.models.toy import ToyRunner, alpha_pair
from pearl.protocol.messages import Provenance, Source, Submit
from tests.conftest import TOY, Quiet, greedy_text, ran
from tests.datastores import VOCAB, Texts, make
from tests.options import drawn_by, resolved
from tests.tiny import tiny_model
from tests.virtual import decoded

WIDE = 70_000  # ids that take three bytes


@pytest.fixture
def store(tmp_path: Path) -> Datastore:
    return make(tmp_path / "store", [[1, 2, 3, 1, 2, 4], [2, 3, 5]])


# ---- lookups ----


def expected(texts: Texts, suffix: Sequence[int], length: int) -> Counter[int]:
    """What follows the last `length` tokens of `suffix`, by brute force; -1: a document's end."""
    wanted, found = list(suffix[len(suffix) - length :]), Counter[int]()
    for text in texts:
        for at in range(len(text) - length + 1):
            if list(text[at : at + length]) == wanted:
                found[text[at + length] if at + length < len(text) else -1] += 1
    return found


def found(store: Datastore, suffix: Sequence[int], **options: Any) -> tuple[int, Counter[int]]:
    """The longest match, and what follows where that has been seen."""
    occurrences = store.occurrences(suffix, **options)
    longest = max((matched for _, matched in occurrences), default=0)
    best = [each for each in occurrences if each[1] == longest]
    counts = Counter({token: len(seen) for token, seen in store.followed(best).items()})
    if ends := len(best) - counts.total():
        counts[-1] = ends
    return longest, counts


DOCUMENTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=4)


@settings(max_examples=60)
@given(texts=DOCUMENTS, suffix=st.lists(st.integers(0, 3), max_size=15), wide=st.booleans())
def test_a_lookup_finds_what_brute_force_finds(
    texts: list[list[int]], suffix: list[int], wide: bool
) -> None:
    vocab = WIDE if wide else VOCAB
    raise_ids = WIDE - 4 if wide else 0
    texts = [[token + raise_ids for token in text] for text in texts]
    suffix = [token + raise_ids for token in suffix]
    with tempfile.TemporaryDirectory() as directory:
        longest, counts = found(make(Path(directory), texts, vocab), suffix, most=10_000)
    seen = [n for n in range(1, min(len(suffix), MOST_MATCHED) + 1) if expected(texts, suffix, n)]
    assert longest == max(seen, default=0)
    assert counts == (expected(texts, suffix, longest) if longest else Counter())


# ---- writing ----


@pytest.mark.parametrize("dies_at", ["tokens.bin", "order.bin", HEADER])
def test_a_build_that_dies_leaves_no_datastore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: str
) -> None:
    for name in ("write_bytes", "write_text"):

        def dies(path: Path, data: Any, *args: Any, name: str = name, **options: Any) -> None:
            getattr(path, f"old_{name}")(data, *args, **options)
            if path.name == dies_at:
                raise KeyboardInterrupt

        monkeypatch.setattr(Path, f"old_{name}", getattr(Path, name), raising=False)
        monkeypatch.setattr(Path, name, dies)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "new", [[1, 2]])
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"is no datastore: it has no datastore\.json"):
        Datastore(tmp_path / "new")


# ---- reading files ----


def texts_of(path: Path) -> list[str]:
    return list(datastore_build.documents(datastore_build.listed([str(path)]), Quiet()))


def test_of_a_folder_the_texts_are_read_and_nothing_hidden(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / ".secret").write_text("hidden")
    (tmp_path / "b" / "c.txt").write_text("c")
    (tmp_path / "a.py").write_text("ä")
    (tmp_path / "image").write_bytes(b"\x89PNG\0\1")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "link").symlink_to(tmp_path / "a.py")
    assert texts_of(tmp_path) == ["ä", "c"]
    with pytest.raises(ConfigError, match="latin is no UTF-8 text"):
        texts_of(tmp_path / "latin")
    with pytest.raises(ConfigError, match="nowhere is not there"):
        datastore_build.listed([str(tmp_path / "nowhere")])


def test_a_line_of_jsonl_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(
        '{"text": "a", "id": "x"}\n\n{"question": "a", "answer": "b", "n": 3}\n{"text": "\\ud800"}\n["c", ["d"]]\n'
    )
    assert texts_of(path) == ["a", "a\n\nb", "?", "c\n\nd"]
    path.write_text('{"text": "a"}\n{\n')
    with pytest.raises(ConfigError, match="line 2 is not JSON"):
        texts_of(path)


# ---- damage ----


def with_header(directory: Path, **changed: Any) -> None:
    path = directory / HEADER
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def bin_of(directory: Path, name: str) -> Path:
    return directory / f"{name}.bin"


def written(content: str | bytes) -> Callable[[Path], object]:
    """Damage that puts `content` in place of the header."""
    return lambda d: (d / HEADER).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no header": (lambda d: (d / HEADER).unlink(), "is no datastore"),
    "tokens cut short": (
        lambda d: bin_of(d, "tokens").write_bytes(b"ab"),
        r"damaged: tokens\.bin should have",
    ),
    "order missing": (lambda d: bin_of(d, "order").unlink(), r"damaged: order\.bin"),
    "no JSON": (written(b"\xff{"), "damaged"),
    "nested": (written("[" * 100_000), "damaged"),
    "another's": (written('{"version": 3}'), "damaged.*tokenizer Field required"),
    "a huge header": (written(bytes(2**24 + 1)), "too large"),
    "another format": (
        lambda d: with_header(d, pearl_datastore=1),
        "damaged.*pearl_datastore Input should be 2",
    ),
    "more tokens": (lambda d: with_header(d, tokens=2**31), "damaged"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_damaged_is_refused_by_name_in_a_line(store: Datastore, kind: str) -> None:
    damage, why = DAMAGE[kind]
    damage(store.directory)
    with pytest.raises(ConfigError, match=why) as error:
        Datastore(store.directory)
    assert str(store.directory) in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400 + len(str(store.directory))


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), wide=st.booleans(), far=st.sampled_from([4, 50, 2**32 - 1]))
def test_lookups_in_nonsense_find_tokens_or_nothing(seed: int, wide: bool, far: int) -> None:
    """A hostile one, whose sizes hold: nothing is read beyond its end, and no id that there is not."""
    vocab, chance = (WIDE if wide else VOCAB), np.random.default_rng(seed)
    size, width = int(chance.integers(1, 40)), width_of(WIDE if wide else VOCAB)
    tokens = chance.integers(0, 256 if seed % 2 else 8, size * width, dtype=np.uint8)
    order = chance.integers(0, far, size, dtype=np.uint32, endpoint=True)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        header = DatastoreHeader(
            tokenizer="x", digest="0" * 32, vocab_size=vocab, tokens=size, documents=1, width=2 if width == 2 else 3,
        )  # fmt: skip
        for (path, _), data in zip(header.files(directory), (tokens, order), strict=True):
            path.write_bytes(data.tobytes())
        (directory / HEADER).write_text(header.model_dump_json())
        store = Datastore(directory, vocab)
        text = chance.integers(0, VOCAB, 30).tolist()
        guesser = Guesser(text, store)
        guesses, _, chances, _ = guess_tree(
            guesser, anchored(text, 30, (0.5,) * (len(text) - 30)), 64, 99
        )
    assert all(0 <= token < vocab for token in guesses)
    assert all(0 <= each <= 1 for each in chances)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    store = make(tmp_path, [[1, 2]])
    check_tokenizer(store.header, ToyTokenizer(VOCAB), tmp_path)
    check_tokenizer(
        store.header, ToyTokenizer(VOCAB + 1), tmp_path
    )  # a model of the family, with tokens of its own
    for other in (ToyTokenizer(VOCAB - 1), load_tokenizer(str(tiny_model("llama")))[0]):
        with pytest.raises(
            ConfigError, match=rf"{tmp_path} was built with another tokenizer, that of toy:vocab=6"
        ):
            check_tokenizer(store.header, other, tmp_path)


# ---- guesses ----


def test_a_tree_goes_on_by_both_sources(tmp_path: Path) -> None:
    """1 2 is followed by 3 4 in the text, by 3 5 in the datastore; by 0 in the datastore alone."""
    store = make(tmp_path, [[1, 2, 3, 5, 2]] * 9 + [[1, 2, 0]] * 9)
    index = Guesser([1, 2, 3, 4, 1, 2], store)
    tokens, parents, _, sources = guess_tree(
        index, anchored(index.tokens, 6, (1.0,) * (len(index) - 6)), 40, 99
    )
    nodes = list(zip(parents, tokens, strict=True))
    assert len(set(nodes)) == len(nodes), "the same token at the same place is one node"
    three = 6 + nodes.index((5, 3))
    assert {(three, 4), (three, 5), (5, 0)} <= set(nodes)
    assert sources[nodes.index((three, 4))] is Source.NGRAM
    assert sources[nodes.index((three, 5))] is Source.DATASTORE


def without_origin(candidate: Candidate) -> Candidate:
    """What two indexes, each with sources of its own, have in common."""
    also = tuple(map(without_origin, candidate.also))
    return candidate._replace(origin=None, also=also)


def test_what_is_taken_back_leaves_no_trace(tmp_path: Path) -> None:
    chance = random.Random(2)
    store = make(tmp_path, [[chance.randrange(VOCAB) for _ in range(200)]])
    text = [chance.randrange(VOCAB) for _ in range(30)]
    index, plain = Guesser([], store), Guesser([], store)
    index.extend([*text[:20], *text[:10]])
    for position in range(1, 31):
        index.candidates(position)
    index.cut(20)
    index.extend(text[20:])
    plain.extend(text)
    for position in range(1, 31):
        candidates = map(without_origin, index.candidates(position))
        assert list(candidates) == list(map(without_origin, plain.candidates(position)))


# ---- texts ----

PROMPT = (1, 2, 3)
TIMING = Timing(1.0, lambda n: 2.0 + 0.3 * n, delay=0.7, jitter=0.5, seed=1)


@pytest.fixture(scope="module")
def knowing(tmp_path_factory: pytest.TempPathFactory) -> Datastore:
    """A datastore of the toy target's texts."""
    pair, texts = alpha_pair(VOCAB, 0.7, order=1), []
    for seed in range(20):
        found = decoded(
            pair, VOCAB, resolved("ar"), drawn_by(1.0, seed=100 + seed), 97, TIMING, PROMPT
        )
        texts.append([*PROMPT, *found.tokens])
    return make(tmp_path_factory.mktemp("knowing"), texts)


def decode(method: str, rule: str, store: Datastore | None, **options: int) -> Outcome:
    target, draft = (ToyRunner(VOCAB, model) for model in alpha_pair(VOCAB, 0.7, order=1))
    decoding = resolved(method, "stream", 3, rule, sampling=drawn_by(1.0, seed=4), **options)
    submit = Submit(1, PROMPT, len(PROMPT) + 60, decoding)
    return simulate(submit, *paired_executors(target, draft, store), TIMING)


@pytest.mark.parametrize(
    ("method", "rule"), [("ngram", "coupled"), ("pearl", "coupled"), ("pearl", "ratio")]
)
def test_a_datastore_saves_steps_and_changes_no_text(
    knowing: Datastore, method: str, rule: str
) -> None:
    """Whether the target guesses by it, or the draft (under ratio it alone); and statistics count its guesses."""
    plain, known = (
        decode(method, rule, store, look_ahead=16, draft_lookup=8) for store in (None, knowing)
    )
    assert known.tokens == plain.tokens
    assert known.counts.steps < plain.counts.steps or method == "pearl"
    assert sum(known.counts.guessed_by_source.values()) == known.provenance.count(
        Provenance.GUESSED
    )
    assert rule == "ratio" or known.counts.guessed_by_source[Source.DATASTORE] > 0


# ---- an engine ----


@pytest.fixture(scope="module")
def toy_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A datastore of the toy target's greedy text."""
    directory = tmp_path_factory.mktemp("toy") / "store"
    make(directory, [[1, 2, 3, *greedy_text([1, 2, 3], 60)]] * 3, 32)
    return directory


def test_an_engine_takes_a_datastore_and_a_text_that_differs_from_a_known_one_is_found(
    toy_store: Path,
) -> None:
    right = greedy_text([1, 2, 3], 20)
    wrong = [*right[:7], right[7] ^ 1, *right[8:]]
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)
    with Engine(TOY, "none", datastore=str(toy_store)) as engine:
        (result,) = engine.generate([[1, 2, 3]], method="ngram")
        findings = [
            *check_texts(engine, [[1, 2, 3]], params, kill=False, known={"greedy": [wrong]})
        ]
    assert result.tokens == greedy_text([1, 2, 3], len(result.tokens))
    assert result.statistics.guessed_by_source["datastore"] > 0
    assert (
        sum(result.statistics.guessed_by_source.values()) == result.statistics.provenance["guessed"]
    )
    greedy, coupled = (finding for finding in findings if "ngram" in finding.what)
    assert (greedy.equal, greedy.first, coupled.equal) == (0, "text 1, token 7", 1)


# ---- the command line ----


def test_build(tmp_path: Path) -> None:
    text, out = tmp_path / "a.txt", tmp_path / "x.ds"
    text.write_text("0123" * 10)
    assert (
        "40 tokens in 1 documents"
        in ran("datastore", "build", "--tokenizer", TOY, "--out", out, text).output
    )
    assert Datastore(out).header.tokenizer == TOY


def test_mistakes_are_told(tmp_path: Path, toy_store: Path) -> None:
    (empty := tmp_path / "empty.txt").write_text("")
    build = ("datastore", "build", "--tokenizer", TOY, "--out")
    generate = (
        "generate",
        "--target",
        "toy:vocab=20",
        "--draft",
        "none",
        "--method",
        "ngram",
        "--datastore",
    )
    for words, arguments in (
        ("is not there", (*build, tmp_path / "x.ds", tmp_path / "b.txt")),
        ("is there already", (*build, toy_store, empty)),
        ("there is no text in", (*build, tmp_path / "x.ds", empty)),
        ("is no datastore", (*generate, tmp_path, "123")),
        ("another tokenizer", (*generate, toy_store, "123")),
    ):
        with pytest.raises(ConfigError, match=words):
            ran(*arguments)
