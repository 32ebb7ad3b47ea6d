"""One run of `pearl bench paper` in words: tables for a terminal, and the section of RESULTS.md.

Everything is made from the run's JSON document, so that no figure of a page can be of another run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pearl.errors import ConfigError
from pearl.lab.bench.machine import Taken, in_words
from pearl.lab.bench.paper import TABLES, VOCABULARY

AIM = 0.97  # of the simulator's speed
COLUMNS = ("pair", "method", "paper", "closed form", "simulator", "runtime", "runtime / paper", "of simulated")
BASELINE_COLUMNS = ("method", "texts", "times as fast as", "all", "by set")
BEGIN, END = "<!-- paper -->", "<!-- /paper -->"
NOTES = {
    "1": [
        "Acceptance is that of Table 4 and times are those of Table 7: the rows of `sd` and `pearl` are predictions. "
        "Llama 2 has no row in Table 4: its acceptance is fitted to its row of `sd`, which therefore says nothing.",
        "Ouroboros and lookahead decoding are the paper's figures alone.",
    ],
    "2": [
        "Acceptance is fitted to the row of `sd`; the rows of `pearl` are predictions.",
        "The paper disagrees with itself on GSM8K: 2.87 here, but its Table 6 has 42.20 tokens/s there and its Table 7 "
        "15.30 for the target alone, which makes 2.76.",
        "Ouroboros, lookahead decoding and DistillSpec are the paper's figures alone.",
    ],
    "3": [
        "In the paper PEARL without post-verify is slower than its `sd` on all three pairs of HumanEval (1.64 and "
        "1.69, 2.57 and 2.76, 2.37 and 2.54). The closed forms say so too: by the authors' scripts `sd` has twice the "
        "window, and a step of it twice as many tokens to win.",
        "Without either half the window is PEARL's, as in these scripts.",
    ],
    "4": [
        "The authors' code counts accepted tokens alone; theorem 2 of the paper counts what follows them too. The "
        "acceptance rates here are read from the row of PEARL as theorem 2 does, 1 - 1/M: that row is an input, and "
        "that of `sd` a prediction. By the authors' counting the rate would be M/(M + 1), at most 0.0014 higher.",
    ],
    "5": ["Below c every source is above the paper: there the target verifies fewer tokens than it has time for."],
    "7": ["The paper's column is what the emulation was given."],
    "figure 2a": ["The runtime's figures are from a trace of one text by `sd`. The paper tells them rounded."],
    VOCABULARY: [
        "Texts drawn at temperature 1 by the ratio rule, whose draft sends its distributions: dense, or with top-p "
        "0.95 the 80 to 90 tokens that are left. The pair of 128,256 ids has the vocabulary of Llama 3, and is decoded "
        "greedily too. These texts are drawn, and have the luck that they have: compare the last column.",
    ],
}


def number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:.{3 if 'idle' in unit else 2}f}"


def rows(cells: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The cells of a table as words, one for each of `COLUMNS`; a pair is named once."""
    found, before = [], None
    for cell in cells:
        figures = [number(cell[name], cell["unit"]) for name in ("paper", "theory", "simulator", "runtime")]
        share = "{:.3f} ({:.3f}-{:.3f})".format(*cell["of_simulated"]) if cell["of_simulated"] else ""
        name = cell["pair"] if cell["pair"] != before else ""
        found.append([name, cell["label"], *figures, number(cell["ratio"], ""), share])
        before = cell["pair"]
    return found


def short_cells(result: Mapping[str, Any]) -> list[str]:
    """For each cell below the aim a line that says where its time went. A run that is in two tables is told once."""
    lines = dict[str, str]()
    for cells in result["tables"].values():
        for cell in cells:
            share, lost = cell["of_simulated"], cell["lost"]
            if share and share[0] < AIM and lost:
                name = f"{cell['pair']}, {cell['label'].partition(', accepted')[0].partition(', with')[0]}"
                where = ", ".join(f"{part:.1%} {what}" for what, part in lost.items())
                lines[name] = f"{name}: {share[0]:.3f}; {where}"
    return list(lines.values())


def shares(result: Mapping[str, Any]) -> tuple[int, int]:
    """(different runs with a share of the simulator's speed, those of them that reach the aim)."""
    found = {
        (cell["pair"], *cell["of_simulated"]): cell["of_simulated"][0] >= AIM
        for cells in result["tables"].values()
        for cell in cells
        if cell["of_simulated"]
    }
    return len(found), sum(found.values())


def conditions(result: Mapping[str, Any]) -> str:
    """Settings, duration, hardware, and what others took of the cores."""
    settings = result["settings"]
    taken = Taken(result["stolen"], result["others"], result["load"])
    texts = "1 text" if settings["texts"] == 1 else f"{settings['texts']} texts"
    return (
        f"{texts} of {settings['tokens']} tokens for each row, seed {settings['seed']}; "
        f"{result['seconds'] / 60:.1f} minutes; {taken}; {in_words(result['hardware'])}"
    )


def explained() -> str:
    return (
        "EMULATION: two real processes run toys with the pair's vocabulary, whose forwards last as long as the paper's "
        "Table 7 says and whose draft tokens are accepted as often as its Table 4 says. Greedy where nothing else is "
        "said. Closed form: of i.i.d. acceptance. Simulator: the same state machines under a virtual clock, 20 texts "
        "of 1,000 tokens. Of simulated: the runtime's speed over the simulator's on the same text, median (least to "
        "most); what is missing is what the runtime itself costs. A greedy text begins with that of six prompts on "
        "which, under the virtual clock, the draft is right most nearly as often as it should be."
    )


def pair_lines(result: Mapping[str, Any]) -> list[str]:
    return [
        f"{pair['title']}: t_draft {pair['t_draft'] * 1e3:.2f} ms, t_target {pair['t_target'] * 1e3:.2f} ms, "
        f"acceptance {pair['acceptance']:.4f} ({pair['acceptance_from']}), {pair['vocabulary']:,} ids"
        for pair in result["pairs"]
    ]


def baseline_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """The measured baselines as words, one for each of `BASELINE_COLUMNS`."""
    return [
        [
            one["method"],
            str(one["texts"]),
            one["base"],
            f"{one['speedup']['value']:.2f} ({one['speedup']['low']:.2f}-{one['speedup']['high']:.2f})",
            ", ".join(f"{name} {value['value']:.2f}" for name, value in one["by_set"].items()),
        ]
        for one in result.get("baselines") or []
    ]


# ---- the page ----


def section(result: Mapping[str, Any], picture: str | None = None) -> str:
    """Markdown, without the markers. `picture`: link to the run's PNG."""
    lines = [explained(), "", f"This run: {conditions(result)}.", ""]
    lines += [f"* {line}" for line in pair_lines(result)]
    if picture is not None:
        lines += ["", f"![Bars of paper and runtime side by side, a panel for each table]({picture})"]
    for name, cells in result["tables"].items():
        lines += ["", f"**{title(name)}**", "", *_markdown(COLUMNS, rows(cells))]
        lines += ["", *(f"* {note}" for note in NOTES.get(name, []))] if NOTES.get(name) else []
    if result.get("baselines"):
        lines += ["", f"**{BASELINES}**", "", *_markdown(BASELINE_COLUMNS, baseline_rows(result))]
    every, good = shares(result)
    if every:
        aim = f"{AIM:.0%} of the simulator's speed in each cell"
        lines += ["", f"**The aim** is {aim}: {good} of {every} different runs reach it."]
    if below := short_cells(result):
        lines += ["Of the others, with the shares of their time that the simulator does not need:", ""]
        lines += [f"* {line}" for line in below]
    return "\n".join(lines)


BASELINES = "Baselines that can be run here: the embedded target, greedy, with 95% bootstrap intervals over texts"


def title(name: str) -> str:
    if name == VOCABULARY:
        return f"Sampled: {TABLES[name]}"
    return f"{'Table ' + name if name[0].isdigit() else name.capitalize()}, emulated: {TABLES[name]}"


def _markdown(columns: Sequence[str], found: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(each)} |" for each in (columns, ["---"] * len(columns), *found)]


def page_with(page: str, result: Mapping[str, Any], picture: str | None) -> str:
    """The page with its section between the markers written anew. Raises `ConfigError` where it has no markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"the page has no {BEGIN} and {END}, between which the tables go")
    return f"{before}{BEGIN}\n{section(result, picture)}\n{END}{after}"


def write_page(path: Path, result: Mapping[str, Any], picture: str | None) -> None:
    """Raises `ConfigError`."""
    try:
        path.write_text(page_with(path.read_text(encoding="utf-8"), result, picture), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
