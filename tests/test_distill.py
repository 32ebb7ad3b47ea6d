"""Distillation on tiny models: the same bytes whatever happens on the way, and nothing lost when something does."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pearl.config import ModelConfig
from pearl.errors import ConfigError, DistillError, ModelError
from pearl.lab.distill.answers import RecordedAnswer, _sample, answer
from pearl.lab.distill.config import DistillConfig, load_config
from pearl.lab.distill.learning import Learner, generator
from pearl.lab.distill.loss import DIVERGENCES, head_loss
from pearl.lab.distill.pair import _from_layers, check_head
from pearl.lab.distill.prompts import training_prompts
from pearl.lab.distill.run import Distillation, locked
from pearl.models.checkpoints.loading import load_model, load_runner
from pearl.models.checkpoints.tokenizers import load_tokenizer
from pearl.models.runner import ModelRunner, feed_chain
from pearl.text.tokenizer import check_same_vocabulary
from tests.conftest import Quiet, files_of_at_most, ran
from tests.tiny import CPU, EOS_ID, VOCAB_SIZE, on_cpu, tiny_model


class Silent(Quiet):
    """A watcher that counts, and pulls the plug at one call."""

    def __init__(self, last: int | None = None) -> None:
        super().__init__()
        self.last, self.calls = last, 0

    def advance(self, count: int, note: str = "") -> None:
        self.calls += 1
        if self.last is not None and self.calls > self.last:
            raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def target(**options: Any) -> str:
    return str(tiny_model("llama-tied", layers=3, chat=True, **options))


def settings(out: Path, **others: Any) -> DistillConfig:
    values: dict[str, Any] = {
        "target": target(),
        "out": str(out),
        "device": "cpu",
        "dtype": "float32",
        "rounds": 2,
        "answers_per_round": 8,
        "held_out": 4,
        "answer_batch": 4,
        "max_prompt_tokens": 6,
        "max_answer_tokens": 12,
        "top": 8,
        "batch_tokens": 200,
        "checkpoint_steps": 3,
        "learning_rate": 3e-3,
    }
    return DistillConfig(**values | others)


def run(config: DistillConfig, *, resume: bool = False) -> Path:
    return Distillation(config, Silent(), resume=resume).run()


def weights(out: Path) -> bytes:
    return (out / "draft" / "model.safetensors").read_bytes()


def answered(out: Path) -> Any:
    return torch.load(out / "answers.pt")["rounds"]


def agreements(out: Path) -> list[float]:
    return [
        json.loads(line)["held_out_agreement"]
        for line in (out / "log.jsonl").read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    torch.set_num_threads(1)
    out, counting = tmp_path_factory.mktemp("whole"), Silent()
    Distillation(settings(out), counting).run()
    (out / "calls").write_text(str(counting.calls))
    return out


def interrupted(whole: Path, out: Path, share: float) -> None:
    """A run that ends after a share of all its steps."""
    with pytest.raises(KeyboardInterrupt):
        Distillation(
            settings(out), Silent(int(share * int((whole / "calls").read_text()))), resume=True
        ).run()


# ---- what comes out ----


def test_the_draft_is_an_ordinary_checkpoint(whole: Path) -> None:
    """Which a worker loads, with the target's vocabulary."""
    draft = str(whole / "draft")
    runner = on_cpu(draft)
    assert runner.vocab_size == VOCAB_SIZE
    assert feed_chain(runner, [5, 6, 7], rows=1).isfinite().all()
    check_same_vocabulary(load_tokenizer(target())[0], load_tokenizer(draft)[0], target(), draft)
    about = json.loads((whole / "draft" / "distillation.json").read_text())
    assert about["tokens_seen"] > 0
    assert about["settings"]["seed"] == 0


@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adamw", marks=pytest.mark.long)])
def test_learning_makes_it_agree_more(optimizer: str, tmp_path: Path) -> None:
    """A draft that begins as noise has nearly nothing in common with its target; one with all its layers, all."""
    out = tmp_path / "noise"
    start = str(tiny_model("llama-tied", layers=3, noise=1.0, chat=True))
    size = {
        "rounds": 1,
        "held_out": 16,
        "answers_per_round": 32,
        "passes": 8,
        "learning_rate": 1e-2,
    }
    run(settings(out, init_from=start, optimizer=optimizer, **size))
    found = agreements(out)
    assert len(found) == 2
    assert found[-1] > found[0] + 0.1
    copied = tmp_path / "copied"
    run(settings(copied, layers=(0, 1, 2), rounds=1, learning_rate=1e-9))
    assert agreements(copied)[0] == 1.0


def test_a_draft_learns_from_texts_of_its_own(tmp_path: Path) -> None:
    """The first half of each batch is the draft's, as it was when the round began, with the target's rows along it."""
    config = settings(tmp_path / "own", on_policy=0.5, temperatures=(0.0,), divergence="jsd")
    run(config)
    found = answered(tmp_path / "own")
    loaded = on_cpu(target(), dtype="float32")
    first = found["round-000"]["answers"]
    for number, one in enumerate(first):
        rows = [
            feed_chain_anew(loaded, [*one["prompt"], *one["tokens"][:i]])
            for i in range(len(one["tokens"]))
        ]
        likeliest = [int(row.argmax()) for row in rows]
        assert likeliest == one["top_ids"][:, 0].tolist(), "the target's, along either's text"
        assert (likeliest == one["tokens"]) == (number % 4 >= 2), "the draft's text is another"
    assert agreements(tmp_path / "own")[-1] > agreements(tmp_path / "own")[0]
    run(settings(tmp_path / "all", on_policy=1.0))
    with pytest.raises(ConfigError, match="on_policy"):
        Distillation(settings(tmp_path / "x", on_policy=0.5), Silent()).answer()
    with pytest.raises(ConfigError, match="forward KL"):
        settings(tmp_path / "x", head="eagle3", divergence="tvd")


def feed_chain_anew(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    runner.rollback(0)
    return feed_chain(runner, tokens, 1)[0]


def test_answers_alone_are_a_file_and_what_is_learnt_from_them_later_is_the_same(
    whole: Path, tmp_path: Path
) -> None:
    path = Distillation(settings(tmp_path), Silent()).answer()
    assert path == tmp_path / "answers.jsonl"
    assert not (tmp_path / "draft").exists()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    tokenizer = load_tokenizer(target())[0]
    rounds = answered(tmp_path)
    assert [record["text"] for record in records[:8]] == [
        tokenizer.decode(one["tokens"]) for one in rounds["round-000"]["answers"]
    ]
    assert [record["prompt"] for record in records[8:]] == rounds["round-001"]["prompts"]
    run(settings(tmp_path), resume=True)
    assert weights(tmp_path) == weights(whole)


# ---- the same bytes ----


def test_another_seed_is_another_draft(whole: Path, tmp_path: Path) -> None:
    """That it is the same draft each time is below, where runs are interrupted."""
    run(settings(tmp_path, seed=1))
    assert weights(tmp_path) != weights(whole)


@pytest.mark.parametrize("share", [0.02, 0.4, 0.7, 0.99])
def test_what_is_interrupted_ends_as_if_it_were_not(
    whole: Path, tmp_path: Path, share: float
) -> None:
    """In the middle of prompts, of answers, of learning; and again at once."""
    interrupted(whole, tmp_path, share)
    interrupted(whole, tmp_path, 0)
    run(settings(tmp_path), resume=True)
    assert weights(tmp_path) == weights(whole)
    assert agreements(tmp_path)[-1] == agreements(whole)[-1]


def test_two_do_not_work_in_one_run(whole: Path) -> None:
    with locked(whole), pytest.raises(DistillError, match="another process works"):
        run(settings(whole), resume=True)


# ---- what goes wrong ----


def test_a_full_disk_keeps_what_was_saved(whole: Path, tmp_path: Path) -> None:
    """Answers are small and checkpoints are not: the limit falls on the first checkpoint after the interruption."""
    interrupted(whole, tmp_path, 0.7)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    resumed = Distillation(settings(tmp_path), Silent(), resume=True)
    with (
        files_of_at_most(100_000),
        pytest.raises(DistillError, match=r"cannot write in .*--resume"),
    ):
        resumed.run()
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    run(settings(tmp_path), resume=True)
    assert weights(tmp_path) == weights(whole)


@pytest.mark.parametrize("name", ["checkpoint.pt", "answers.pt"])
def test_a_damaged_file_is_named_and_made_anew(whole: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    content = bytearray((out / name).read_bytes())
    content[len(content) // 2] ^= 1
    for damaged in (content, content[:100]):
        (out / name).write_bytes(damaged)
        with pytest.raises(DistillError, match=rf"{name} is damaged: .*Remove it"):
            run(settings(out), resume=True)
    (out / name).unlink()
    run(settings(out), resume=True)
    assert weights(out) == weights(whole)
    assert [one["tokens"] for one in answered(out)["round-001"]["answers"]] == [
        one["tokens"] for one in answered(whole)["round-001"]["answers"]
    ]


def test_a_loss_that_is_no_number_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    """Steps so large that the weights overflow."""
    config = settings(tmp_path, learning_rate=1e38, checkpoint_steps=1)
    with pytest.raises(DistillError, match=r"the loss is .* at step [1-9]"):
        run(config)
    kept = torch.load(tmp_path / "checkpoint.pt")["weights"]
    assert all(tensor.isfinite().all() for tensor in kept.values())


def test_a_run_is_not_overwritten_nor_continued_otherwise(whole: Path) -> None:
    """By the command, too."""
    with pytest.raises(ConfigError, match="other settings than these: passes, seed"):
        run(settings(whole, seed=5, passes=2), resume=True)
    given = settings(whole).model_dump(exclude_unset=True)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    with pytest.raises(ConfigError, match="holds a run already: --resume"):
        ran("distill", *flags)


# ---- prompts and settings ----

DUCKS = (
    "Janet’s ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes muffins for her friends "
    "every day with four. She sells the remainder at the farmers' market daily for $2 per fresh duck egg. How much in "
    "dollars does she make every day at the farmers' market?"
)
HAWAII = (
    "Compose an engaging travel blog post about a recent trip to Hawaii, highlighting cultural experiences and "
    "must-see attractions."
)


@pytest.mark.parametrize(
    "prompt",
    [
        DUCKS,
        HAWAII,
        DUCKS.replace("Janet", "Maria")
        .replace("16", "24")
        .replace("$2", "$5")
        .replace("breakfast", "lunch"),
        "Please help me with this one:\n" + HAWAII.upper(),
        "from typing import List\n\n\ndef has_close_elements(numbers: List[float], threshold: float) -> bool:\n"
        '    """ Check if in given list of numbers, are any two numbers closer to each other than\n'
        "    given threshold.",
    ],
)
def test_benchmark_prompts_are_refused(tmp_path: Path, prompt: str) -> None:
    """As they stand, with other names and numbers, and within other text."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": p}) for p in ("What is a duck?", prompt)))
    with pytest.raises(ConfigError, match="for testing only"):
        training_prompts([path])


def test_ordinary_prompts_are_not(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    ordinary = [
        "Write a Python function that takes a list of integers and returns the largest.",
        "A farmer has 12 cows and buys 7 more. How many cows does he have now?",
        "Compose a short letter about a trip to Norway.",
        "How do I bake bread?",
        "def is_prime(n):",
    ]
    path.write_text("\n".join(ordinary))
    assert training_prompts([path]) == ordinary


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"epochs": 3}, "unknown setting 'epochs'"),
        ({"rounds": 0}, "rounds"),
        ({"init_from": "x", "layers": [1]}, "brings its own layers"),
        ({"temperatures": [-1.0]}, "none of them negative"),
    ],
)
def test_bad_settings_are_refused_by_name(values: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_config(None, {"out": "x"} | values)


def test_the_configuration_that_ships_is_one() -> None:
    path = Path(__file__).parent.parent / "configs" / "distill" / "embedded.yaml"
    assert load_config(path, {"out": "x"}).init_from == "embedded-draft"
    with pytest.raises(ConfigError, match="--out"):
        load_config(path, {})


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_every_device_takes_the_same_path(tmp_path: Path, device: str) -> None:
    """In bfloat16, with few negatives; interrupted amid answers, and resumed."""
    config = settings(tmp_path, device=device, dtype="bfloat16", negatives=16)
    with pytest.raises(KeyboardInterrupt):
        Distillation(config, Silent(20)).run()
    runner = load_runner(ModelConfig(str(run(config, resume=True))), torch.device(device))
    assert feed_chain(runner, [5, 6, 7], rows=1).isfinite().all()
    assert agreements(tmp_path)[-1] > 0


# ---- the pieces, against the same computed the long way ----

PROMPTS = [[5, 6, 7, 8], [9, 10], [40, 41, 42, 43, 44, 45, 46]]


def model(**options):
    return load_model(ModelConfig(str(tiny_model("llama", **options))), CPU).eval()


def by_hand(kind: Path, prompt: list[int], limit: int) -> list[int]:
    """Greedy text, a token at a time."""
    runner = on_cpu(kind, forwards="transformers")
    tokens, logits = [], feed_chain(runner, prompt, 1)
    while len(tokens) < limit and EOS_ID not in tokens:
        tokens.append(int(logits[0].argmax()))
        logits = feed_chain(runner, tokens[-1:], 1)
    return tokens


def test_a_batch_answers_as_each_alone() -> None:
    """Left padding, rows that end and are cut out of the batch: none of it shows."""
    kind = tiny_model("llama")
    prompts = [[i, *range(3, 3 + i % 7)] for i in range(5, 29)]
    limits = 20
    model = load_model(ModelConfig(str(kind)), CPU).eval()
    found = answer(model, prompts, limit=limits, eos=(EOS_ID,), top=5, allow_loops=True)
    assert [a.tokens for a in found] == [by_hand(kind, prompt, limits) for prompt in prompts]


def test_drawn_tokens_have_the_recorded_frequencies() -> None:
    """Chi-square over one position of many rows, at temperature 1; greedy rows among them take the first."""
    drawn = answer(
        model(),
        [[5, 6]] * 4000,
        limit=1,
        eos=(),
        temperatures=(1.0, 0.0),
        top=4,
        generator=generator(0, "chi"),
    )
    probs, ids = drawn[0].top_probs[0].double(), drawn[0].top_ids[0].tolist()
    counts = torch.tensor([sum(a.tokens[0] == id for a in drawn[::2]) for id in ids]).double()
    expected = 2000 * probs / probs.sum()
    assert (
        (counts - expected) ** 2 / expected
    ).sum() < 16.3  # 3 degrees of freedom, one in a thousand
    assert {a.tokens[0] for a in drawn[1::2]} == {ids[0]}


def test_a_low_temperature_draws_the_likeliest() -> None:
    """Of a flat distribution all powers were 0, and the least likely token was drawn."""
    ids, probs = torch.arange(4).expand(9, 4), torch.tensor([0.3, 0.2, 0.1, 0.05]).expand(9, 4)
    drawn = _sample(ids, probs, [0.01, 0.0, 0.02] * 3, generator(0, "cold"))
    assert drawn.tolist() == [0] * 9


def divergence(p: torch.Tensor, q: torch.Tensor, name: str) -> torch.Tensor:
    """Of two distributions, by definition; fkl without the first one's entropy."""
    middle = (p + q) / 2
    found = {
        "fkl": -(p * q.log()).sum(),
        "rkl": (q * (q / p).log()).sum(),
        "jsd": ((p * (p / middle).log()).sum() + (q * (q / middle).log()).sum()) / 2,
        "tvd": (p - q).abs().sum() / 2,
    }
    return found[name]


def reference(
    hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, name: str
) -> torch.Tensor:
    """The same by autograd, row by row."""
    total = torch.zeros(())
    for row, kinds, theirs in zip(hidden, ids, probs, strict=True):
        ours = (weight @ row).softmax(-1)
        rest = torch.ones(len(weight), dtype=torch.bool)
        rest[kinds] = False
        all_theirs = torch.cat((theirs, 1 - theirs.sum(0, keepdim=True)))
        total = total + divergence(
            all_theirs, torch.cat((ours[kinds], ours[rest].sum(0, keepdim=True))), name
        )
    return total / len(hidden)


@pytest.mark.parametrize(
    ("rows", "name"), [(1100, "fkl"), *((7, name) for name in DIVERGENCES)]
)  # chunks, or one
def test_the_loss_and_its_gradients(rows: int, name: str) -> None:
    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(rows, 6, requires_grad=True),
        torch.randn(20, 6, requires_grad=True),
    )
    probs, ids = (torch.randn(rows, 20) * 2).softmax(-1).topk(4)
    wanted = reference(hidden, weight, ids, probs, name)
    gradients = torch.autograd.grad(wanted, (hidden, weight))
    found = head_loss(hidden, weight, ids, probs, divergence=name)
    torch.testing.assert_close(
        found, wanted, rtol=1e-4, atol=1e-5
    )  # what is left over is a difference
    for ours, theirs in zip(torch.autograd.grad(found, (hidden, weight)), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_gradient_of_a_draft_that_is_very_sure(name: str) -> None:
    """Of tokens that the target did not record it leaves less than float32 can tell from 1 minus the others."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 6, requires_grad=True), torch.randn(20, 6)
    ids, probs = torch.arange(4).expand(7, 4), (torch.randn(7, 20) * 2).softmax(-1)[:, :4]
    with torch.no_grad():
        hidden[:, 0], weight[:, 0] = 1, torch.tensor([22.0] * 4 + [0.0] * 16)
    wanted = reference(hidden.double(), weight.double(), ids, probs.double(), name)
    found = head_loss(hidden, weight, ids, probs, divergence=name)
    ours, theirs = (torch.autograd.grad(each, hidden)[0] for each in (found, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_where_the_target_recorded_all_tokens_there_are_no_others() -> None:
    hidden, weight = torch.randn(7, 6, requires_grad=True), torch.randn(4, 6)
    ids, probs = torch.arange(4).expand(7, 4), torch.randn(7, 4).softmax(-1)
    found = head_loss(hidden, weight, ids, probs)
    wanted = -(probs * (hidden @ weight.T).log_softmax(-1)).sum() / 7
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    ours, theirs = (torch.autograd.grad(each, hidden)[0] for each in (found, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_head_that_does_more_is_refused() -> None:
    """Bloom multiplies only; a cap on the logits would make every figure wrong."""
    loaded = model()
    check_head(loaded)
    loaded.lm_head.bias = torch.nn.Parameter(torch.linspace(-5, 5, loaded.config.vocab_size))
    with pytest.raises(ModelError, match="does more to its logits"):
        check_head(loaded)


def test_a_layer_is_computed_as_in_its_target() -> None:
    """It had the window, the rope, or none, of the target's layer that has its number in the draft."""
    layers = (1, 3, 2)
    loaded = load_model(ModelConfig(str(tiny_model("smollm3"))), CPU)
    loaded.config.layer_types = ["full_attention", "sliding_attention", *["full_attention"] * 2]
    loaded.config.no_rope_layers = [1, 0, 1, 0]
    draft = _from_layers(loaded, layers)
    assert draft.config.layer_types == ["sliding_attention", "full_attention", "full_attention"]
    assert [layer.self_attn.use_rope for layer in draft.model.layers] == [0, 0, 1]


def test_agreement_is_what_a_look_at_each_token_says(tmp_path: Path) -> None:
    """Brute force: the draft on each prefix alone."""
    draft = model(noise=0.6)
    learner = Learner(DistillConfig(out=str(tmp_path)), draft)

    def answered(prompt: list[int], tokens: list[int]) -> RecordedAnswer:
        return RecordedAnswer(
            prompt, tokens, torch.tensor(tokens)[:, None], torch.ones(len(tokens), 1)
        )

    def likeliest(prefix: list[int]) -> int:
        return int(draft(torch.tensor([prefix])).logits[0, -1].argmax())

    given = [
        answered(prompt, [likeliest(prompt), *tokens])
        for prompt, tokens in zip(PROMPTS, ([12, 13, 14, 15], [], [32, 33]), strict=True)
    ]
    agreed = [
        likeliest(one.prompt + one.tokens[:i]) == one.tokens[i]
        for one in given
        for i in range(len(one.tokens))
    ]
    assert learner.agreement(given) == sum(agreed) / len(agreed) >= 3 / 9
    assert learner.agreement(given[1:2]) == 1.0
