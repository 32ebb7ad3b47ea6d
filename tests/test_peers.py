"""`scripts/bench_peers.py`: what it runs and prints, and the embedded draft as llama.cpp gets it.

With llama.cpp and OpenVINO GenAI themselves: `scripts/setup_peers DIR`, then PEARL_PEERS=DIR/bin/python.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pearl.config import ModelConfig
from pearl.models.checkpoints.loading import load_runner
from pearl.models.runner import feed_chain
from tests.conftest import output

PEERS = os.environ.get("PEARL_PEERS", "")
SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield importlib.import_module("bench_peers")


def test_pearl_needs_a_draft_and_two_cores(script: Any) -> None:
    turns = script.turns_of((1, 2), "PEARL", has_draft=True, avx2=False)
    decoding = [
        (turn.contender.kind, turn.cores)
        for turn in turns
        if turn.contender.kind != script.FORWARDS
    ]
    both = [(kind, cores) for kind in ("ar", "ngram", "auto") for cores in (1, 2)]
    assert decoding == [*both, ("pearl", 2)]
    alone = script.turns_of((1, 2), "", has_draft=False, avx2=False)
    assert not {"pearl", "draft-simple"} & {turn.contender.kind for turn in alone}


def test_forwards_are_timed_on_one_core_of_systems_that_can(script: Any) -> None:
    turns = script.turns_of((1, 2), script.FORWARDS, has_draft=True, avx2=True)
    assert [(turn.contender.name, turn.cores) for turn in turns] == [
        ("PEARL forwards", 1),
        ("PEARL forwards with AVX2", 1),
        ("llama.cpp forwards", 1),
    ]


def test_tables_have_medians_ranges_and_equal_texts(script: Any) -> None:
    from peer_process import Report, Text

    def rounds(contender: Any, rates: list[float], text: str) -> Any:
        reports = []
        for rate in rates:
            texts = [Text(text, 10, 10 / rate, 0.5), Text("same", 30, 30 / rate, 0.25)]
            reports.append(Report("1.0", texts, {}, 100.4))
        return script.Turn(contender, 1), reports

    reports = dict(
        [
            rounds(script.Contender("PEARL", "ar"), [20.0, 30.0, 10.0], "ours"),
            rounds(script.Contender("llama.cpp", ""), [8.0, 9.0, 7.0], "theirs"),
            rounds(script.Contender("llama.cpp", "ngram-mod"), [5.0], "theirs"),
        ]
    )
    timed = Report("1.0", forwards={1: 2.0, 8: 4.04, 16: 9.0})
    reports[script.Turn(script.Contender("PEARL", script.FORWARDS), 1)] = [timed]
    assert script.table_of_texts(reports, (1, 2)) == [
        "|  | on 1 | on 2 | MB | as PEARL ar | as itself alone |",
        "|---|---|---|---|---|---|",
        "| PEARL ar | 20.0 (10.0 to 30.0), 375 ms |  | 100 | 2 of 2 | 2 of 2 |",
        "| llama.cpp | 8.0 (7.0 to 9.0), 375 ms |  | 100 | 1 of 2 | 2 of 2 |",
        "| llama.cpp ngram-mod | 5.0 (5.0 to 5.0), 375 ms |  | 100 | 1 of 2 | 2 of 2 |",
    ]
    assert script.table_of_forwards(reports) == [
        "| tokens | 1 | 8 | 16 |",
        "|---|---|---|---|",
        "| PEARL forwards | 2.0 | 4.0 | 9.0 |",
    ]


def test_an_interrupted_round_leaves_no_row_without_figures(script: Any) -> None:
    """Ctrl-C in a system's first turn was an error in the table, and all figures were lost."""

    class Interrupted:
        def run(self, turn: Any) -> Any:
            raise KeyboardInterrupt

    reports: dict[Any, Any] = {}
    turns = script.turns_of((1,), script.FORWARDS, has_draft=True, avx2=False)
    with pytest.raises(KeyboardInterrupt):
        script.take_turns(Interrupted(), turns, 1, reports)
    assert script.table_of_forwards(reports) == []


def test_a_copy_held_to_avx2_has_no_larger_library(script: Any) -> None:
    with script.held_to_avx2() as folder:
        libraries = sorted(path.name for path in folder.glob("pearl/models/cpu/*.so"))
        assert (folder / "pearl" / "models" / "cpu" / "native.py").is_file()
    names = {name.partition(".")[0] for name in libraries}
    assert names <= {"_native", "_native_v3"}


@pytest.mark.slow
def test_the_embedded_draft_in_a_file_is_the_draft(script: Any, tmp_path: Path) -> None:
    """llama.cpp is given the same weights in the same bits, and the tokenizer of the target."""
    file = tmp_path / "draft.gguf"
    script.write_draft(file)
    logits = []
    for name in ("embedded-draft", str(file)):
        runner = load_runner(ModelConfig(name, max_context=64), torch.device("cpu"))
        logits.append(feed_chain(runner, list(range(500, 540)), 40))
    assert torch.equal(*logits)


@pytest.mark.slow
@pytest.mark.skipif(not PEERS, reason="needs PEARL_PEERS: see scripts/setup_peers")
def test_all_three_decode_the_embedded_pair(tmp_path: Path) -> None:
    arguments = ["--max-tokens", "8", "--rounds", "1", "--cores", "1", "--prompts", "questions"]
    printed = output(
        sys.executable,
        SCRIPTS / "bench_peers.py",
        PEERS,
        *arguments,
        "--json",
        tmp_path / "figures.json",
        timeout=900,
    )
    measured = json.loads((tmp_path / "figures.json").read_text())["measured"]
    for turn in measured:
        for report in turn["rounds"]:
            assert report["forwards"] or report["megabytes"] > 50
            for text in report["texts"]:
                assert text["tokens"] == 7
                assert text["seconds"] > 0
    rows = printed.splitlines()
    assert any(row.startswith("| llama.cpp draft-simple |") for row in rows)
    assert any(row.startswith("| OpenVINO prompt-lookup |") for row in rows)
