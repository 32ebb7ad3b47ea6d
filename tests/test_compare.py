"""`pearl bench` with ways of one's own: settings named in a line; bias and perplexity; the table."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from pearl.config import EngineConfig
from pearl.config.option_names import options_of
from pearl.engine.stream import Result as Text
from pearl.errors import ConfigError
from pearl.lab.bench.figures import Surprise
from pearl.lab.bench.rows import named_rows, parse_settings
from pearl.models.toy import ToyRunner, alpha_pair
from tests.conftest import TOY, ran

SLOW_TOY = ["--target", TOY, "--draft", TOY, "--raw", "--ignore-eos", "--max-tokens", "40"]


# ---- naming ----


def test_a_row_is_a_method_and_its_settings() -> None:
    for text, settings in {
        "ar": {"method": "ar"},
        "pearl,rule=opt,epsilon=0.1": {"method": "pearl", "rule": "opt", "epsilon": 0.1},
        "sd,gamma=4,draft-stop=threshold,confidence=0.5": {
            "method": "sd",
            "gamma": 4,
            "draft_stop": "threshold",
            "confidence": 0.5,
        },
        "published": {
            "method": "pearl",
            "look_ahead": 0,
            "draft_lookup": 0,
            "branches": 0,
            "siblings": 0,
        },
    }.items():
        assert parse_settings(text) == options_of(settings)
    assert parse_settings("pearl,branches=off").guesses["branches"] == 0
    rows = named_rows(["sd", "ar", "ngram"])
    assert [row.name for row in rows] == ["ar", "sd", "ngram"], "ar is there once and first"


def test_ways_of_ones_own_have_their_own_rules(tmp_path: Path) -> None:
    """Whatever a configuration file says, and whether a way is one of those that run by default."""
    (tmp_path / "it.yaml").write_text(f"target: {TOY}\ndraft: {TOY}\nrule: coupled\n")
    (tmp_path / "it.jsonl").write_text('{"prompt": "123"}\n')
    path = tmp_path / "it.json"
    asked: tuple[object, ...] = (
        "--config",
        tmp_path / "it.yaml",
        "--prompts",
        tmp_path / "it.jsonl",
        "--max-tokens",
        8,
        "--json",
        path,
    )
    ran("bench", "sd", "sd,gamma=3", *asked, "--temperature", 1)
    document = json.loads(path.read_text())
    assert [row["rule"] for row in document["rows"]] == ["", "ratio", "ratio"]
    seen = {text["row"] for text in document["texts"] if text["texts"][0]["expected_rejections"]}
    assert seen == {"sd", "sd,gamma=3"}, "ratio alone sees the draft's distributions"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sd", "perl"], "method"),
        (["sd", "pearl,rule=opt,epsilon=2"], "epsilon"),
        (["sd", "pearl,epsilon"], "write METHOD,NAME=VALUE"),
        (["sd", "pearl,ruel=opt"], "ruel"),
        (["sd", "sd"], "'sd' is named twice"),
        (
            ["sd", "--rule", "opt"],
            "--rule: pearl bench runs untraced, and each way with its own settings",
        ),
        (
            ["sd", "--branches", "0"],
            "--branches: pearl bench runs untraced, and each way with its own settings",
        ),
        (["sd", "--draft", "none"], "method sd needs a draft"),
        (["pia"], "give --habits"),
        (["rest", "--draft", "none"], "with --datastore"),
        (["ar", "--max-context", "20"], "no prompt fits the context"),
    ],
)
def test_rows_that_cannot_be_compared_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        ran("bench", *SLOW_TOY, *arguments)
    assert "\n" not in str(caught.value)


# ---- figures ----


def test_a_surprise_is_the_targets_own_probability() -> None:
    """Against the distributions of which the toy is made, over more positions than one forward takes."""
    target, _ = alpha_pair(16, 0.7, order=2)
    prompt, tokens = (1, 2, 3), list[int]()
    generator = torch.Generator().manual_seed(1)
    while len(tokens) < 150:
        tokens.append(int(torch.multinomial(target([*prompt, *tokens]), 1, generator=generator)))
    wanted = -sum(math.log(target([*prompt, *tokens[:i]])[token]) for i, token in enumerate(tokens))
    surprise = Surprise(EngineConfig(target=TOY, draft=TOY), ToyRunner(16, target))
    assert surprise(Text(tokens=tokens, prompt_tokens=[*prompt])) == pytest.approx(wanted, rel=1e-4)
    assert surprise(Text(tokens=tokens[:1], prompt_tokens=[1])) == pytest.approx(
        -math.log(target([1])[tokens[0]])
    )


def test_a_biased_row_is_shown_with_its_bias(tmp_path: Path) -> None:
    """Three real rows, of which one is biased: its figure is that of its statistics."""
    path, prompts = tmp_path / "it.json", tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "123"}\n{"prompt": "4567"}\n')
    ways = ["published", "published,rule=opt,epsilon=0.3", "pearl,rule=coupled"]
    pair = TOY + ",coin=1"  # no token of it is impossible, so relaxed acceptance applies
    files, warm = ["--prompts", prompts, "--json", path], ["--temperature", 1, "--perplexity"]
    result = ran("bench", *ways, *SLOW_TOY, "--target", pair, "--draft", pair, *files, *warm)
    assert "biased by: total variation distance" in result.stdout
    document = json.loads(path.read_text())
    rows = {row["name"]: row for row in document["rows"]}
    assert [*rows] == ["ar", *ways]
    assert {name: row["exact"] for name, row in rows.items()} == dict.fromkeys(rows, True) | {
        ways[1]: False
    }
    bias = rows[ways[1]]["bias"]
    assert 0 < bias["low"] <= bias["value"] <= bias["high"] < 1
    assert all(rows[name]["bias"]["value"] == 0 for name in rows if name != ways[1])
    assert rows["ar"]["speedup"]["value"] == 1
    # Half the tokens of a toy have no probability: biased texts have some of these.
    assert rows["ar"]["perplexity"]["value"] == rows[ways[2]]["perplexity"]["value"] < 32
    assert rows[ways[1]]["perplexity"]["value"] > rows["ar"]["perplexity"]["value"]
    assert document["settings"]["options"]["temperature"] == 1
