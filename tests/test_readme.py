"""The pages say what the code does: diagrams are the tables, commands can be given, links and names lead somewhere."""

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest

from pearl import errors
from pearl.cli import cli
from pearl.cli import commands as command_line
from pearl.errors import PearlError
from pearl.protocol import drafter, request_machine
from pearl.spec.methods import METHODS
from pearl.spec.rules import RULES
from pearl.spec.stops import STOPS
from tests.conftest import output, ran
from tests.layers import LAYERS

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
HOUSE = ROOT / "pearl" / "README.md"
MECHANISM = ROOT / "pearl" / "protocol" / "STATES.md"
PAGES = sorted(
    page
    for page in (
        README,
        ROOT / "SECURITY.md",
        *ROOT.glob("launch/**/*.md"),
        *ROOT.glob("pearl/**/*.md"),
    )
    if page != ROOT / "pearl" / "transport" / "WIRE.md"  # it names messages, not commands
)
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
CARDS = {"launch/hub/README.md", "pearl/models/checkpoints/embedded_draft/README.md"}  # of the hub
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def named(pattern: str) -> list[tuple[str, str]]:
    """Each page with each match of a pattern."""
    return sorted(
        {(page, one) for page, text in TEXTS.items() for one in re.findall(pattern, text)}
    )


# ---- what the pages show of the code ----


def mermaid(table: Mapping[Any, Mapping[type, frozenset[Any]]]) -> str:
    """A Mermaid state diagram: an arrow for each event that leads from one state to another (or back to itself)."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for state, events in table.items():
        for event, followers in events.items():
            for follower in sorted(followers, key=list(table).index):
                arrows.setdefault((state.name, follower.name), []).append(event.__name__)
    first = next(iter(table)).name
    lines = ["stateDiagram-v2", f"    [*] --> {first}"]
    lines += [f"    {a} --> {b}: {', '.join(events)}" for (a, b), events in arrows.items()]
    return "\n".join(lines)


def section() -> str:
    """Both diagrams as the README's Markdown."""
    parts = (("The target", request_machine.TRANSITIONS), ("The draft", drafter.TRANSITIONS))
    return "\n\n".join(f"{title}:\n\n```mermaid\n{mermaid(table)}\n```" for title, table in parts)


def methods_table() -> str:
    """The methods as the command line page's table."""
    lines = [
        "| `--method` | | takes guesses without a model | branches | stop policies |",
        "|---|---|---|---|---|",
    ]
    for i, method in enumerate(METHODS.values()):
        guesses = [
            who
            for who, most in (("target", method.look_ahead), ("draft", method.draft_lookup))
            if most
        ]
        takes = [
            " and ".join(guesses) or "no",
            *("yes" if has else "no" for has in (method.branches, method.takes_stops)),
        ]
        description = method.description + (" (default)" if i == 0 else "")
        lines.append(f"| `{method.name}` | {description} | {' | '.join(takes)} |")
    return "\n".join(lines)


def rules_table() -> str:
    """The README's table of rules."""
    lines = [
        "| `--rule` | under sampling | exact | text depends on drafts | judged by | sent per token | parameters |",
        "|---|---|---|---|---|---|---|",
    ]
    for i, spec in enumerate(RULES.values()):
        cells = [
            f"`{spec.name}`",
            spec.description + (" (default)" if i == 0 else ""),
            "yes" if spec.is_exact else "no" if spec.greedy else "at temperature 0",
            "no" if spec.is_proposal_invariant else "yes",
            "block" if spec.judges_blocks else "token",
            spec.needs.value,
            ", ".join(map(str, spec.parameters)) or "none",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def stops_table() -> str:
    """The policies as the README's table."""
    lines = ["| `--draft-stop` | ends a window | looks at | parameters |", "|---|---|---|---|"]
    for i, spec in enumerate(STOPS.values()):
        takes = ", ".join(map(str, spec.parameters)) or (
            "a file, `--disco FILE`" if spec.is_trained else "none"
        )
        what = spec.description + (" (default)" if i == 0 else "")
        lines.append(f"| `{spec.name}` | {what} | {spec.looks_at} | {takes} |")
    return "\n".join(lines)


# ---- the first page ----


def test_each_page_is_linked_once_from_the_table_of_the_first() -> None:
    pages = sorted(page for page in TEXTS if page.endswith("/README.md") and page not in CARDS)
    table = TEXTS["README.md"].split("## Where to read on")[1].split("\n## ")[0]
    for links in (
        LINK.findall(table),
        [link.partition("#")[0] for link in LINK.findall(TEXTS["README.md"])],
    ):
        assert sorted(link for link in links if link in pages) == pages


def test_the_methods_are_listed_from_their_declarations() -> None:
    assert methods_table() in TEXTS["pearl/cli/README.md"]


# ---- what is named exists ----


def test_the_diagrams_are_drawn_from_the_tables() -> None:
    shown = MECHANISM.read_text().split("<!-- diagram -->")[1].split("<!-- /diagram -->")[0].strip()
    assert shown == section(), f"{MECHANISM} is stale: put in\n{section()}"


def test_the_house_has_the_rooms_that_the_layers_have() -> None:
    """Each once, and within a ring in their order from top to bottom."""
    rooms = []
    for ring in HOUSE.read_text().split("\n## "):
        in_ring = re.findall(r"^\| \[?`(pearl[\w.]*)`", ring, re.MULTILINE)
        rooms += in_ring
        depths = []
        for room in in_ring:
            depths.append(next(depth for depth, names in enumerate(LAYERS) if room in names))
        assert depths == sorted(depths), "a room stands above one that is in a higher layer"
    assert len(rooms) == len(set(rooms))
    assert set(rooms) == set().union(*LAYERS)


def test_rules_and_stop_policies_are_listed_from_their_registries() -> None:
    for room, name, table in (
        ("decoding", "rules", rules_table),
        ("drafting", "stops", stops_table),
    ):
        page = f"pearl/{room}/README.md"
        shown = TEXTS[page].split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0].strip()
        assert shown == table(), f"{page} is stale: put in\n{table()}"


def flags(command: click.Command) -> set[str]:
    """Of a command and all those below it."""
    context = click.Context(command)
    names = command.list_commands(context) if isinstance(command, click.Group) else []
    below = [command.get_command(context, name) for name in names]
    own = {
        flag
        for parameter in command.params
        for flag in (*parameter.opts, *parameter.secondary_opts)
    }
    return own.union(*(flags(one) for one in below if one is not None))


def test_every_flag_named_is_a_flag() -> None:
    torchrun = {"--nproc-per-node", "--master-port", "--rdzv-endpoint"}
    vllm = {"--additional-config", "--speculative-config"}
    pip = {"--no-deps"}
    scripts = {"--help", "--help-all", "--dry-run", "--model", "--run", "--faults", "--rehearse"}
    known = flags(cli) | torchrun | vllm | pip | scripts
    wrong = [one for one in named(r"(?<![\w-])--[a-z][a-z-]+") if one[1] not in known]
    assert not wrong, wrong


def test_every_error_is_listed_with_its_exit_code() -> None:
    kinds = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, PearlError)
    ]
    page = (MECHANISM.parent / "README.md").read_text()
    wrong = [e for e in kinds if not re.search(rf"(?m)^\| {e.exit_code} \| .*`{e.__name__}`", page)]
    assert not wrong, wrong


def leads(page: str, link: str) -> bool:
    """To a file, and where it names a heading to that."""
    path, _, anchor = link.partition("#")
    file = ((ROOT / page).parent / path) if path else ROOT / page
    if link.startswith("http") or not (file.exists() and anchor):
        return link.startswith("http") or file.exists()
    headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
    return anchor in {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
    }


def test_every_link_leads_somewhere() -> None:
    wrong = [one for one in named(LINK.pattern) if not leads(*one)]
    assert not wrong, wrong


# ---- commands ----


def commands(text: str) -> Iterator[str]:
    """The command lines of a page's blocks, one by one, without a prompt or a comment behind them."""
    for language, block in FENCE.findall(text):
        if language:
            continue
        for line in block.replace("\\\n", " ").splitlines():
            for command in re.split(r" && ", line.removeprefix("$ ")):
                words = command.split()
                while words and re.fullmatch(r"[A-Z]+=\S+", words[0]):
                    words.pop(0)
                if words and (words[0] in STARTS or words[0].startswith(("scripts/", "launch/"))):
                    yield " ".join(words)


STARTS = {"pearl", ".venv/bin/pearl", "torchrun", "python", "sbatch"}
COMMANDS = sorted({(page, one) for page, text in TEXTS.items() for one in commands(text)})


def test_the_commands_are_found() -> None:
    assert len(COMMANDS) > 40
    assert list(
        commands("```\n$ pearl keys f && scp f x: # once\nA=b launch/x.sh\n    hello\n```\n")
    ) == [
        "pearl keys f",
        "launch/x.sh",
    ]


def parsed(words: list[str]) -> None:
    """As the command line reads it, with its values; nothing runs. Raises `click.UsageError`."""
    command: click.Command = cli
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(click.Context(command), words[0])
        assert found is not None, f"no command {words[0]}"
        command, words = found, words[1:]
    command.make_context(command.name, words)


def problem(command: str) -> str:
    """What is wrong with it: it does not exist or take these flags, or a script or configuration is not there."""
    words = shlex.split(command.replace("$pair", "").partition(" < ")[0], comments=True)
    given = words[words.index("-m") + 1 :] if "-m pearl " in command else words
    try:
        if given[0].endswith("pearl"):
            parsed(given[1:])
    except (click.UsageError, AssertionError) as error:
        return str(error)
    paths = [word for word in words if word.startswith(("scripts/", "launch/", "configs/"))]
    return " ".join(f"no {path}" for path in paths if not (ROOT / path).exists())


def test_every_command_can_be_given() -> None:
    wrong = [(*one, fault) for one in COMMANDS if (fault := problem(one[1]))]
    assert not wrong, wrong


def test_launchers_give_flags_that_exist() -> None:
    """As they show with --dry-run. Slurm's calls that for two hosts."""
    values = {"PYTHON": "python", "RANK": "0", "HOST": "10.0.0.1", "KEYS": "/dev/null"}
    given = {}
    for launcher in (ROOT / "launch").glob("*.s[hb]*"):
        shown = output("bash", launcher, "--dry-run", env=os.environ | values).splitlines()[0]
        if " -m pearl " in shown:
            given[launcher.name] = shlex.split(shown.partition(" -m pearl ")[2])
    assert len(given) == 5
    for words in given.values():
        parsed(words)


def test_the_help_of_a_command_ends_with_an_example_that_it_takes() -> None:
    for name in command_line.COMMANDS:
        example = ran(name, "--help").output.splitlines()[-1].strip()
        assert example.startswith(f"pearl {name}")
        assert not problem(example), example


@pytest.mark.slow
def test_the_first_example_in_python_shows_steps_of_several_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the embedded pair, as the page has it. It wrote "Hello!", and ended."""
    (example,) = (
        block for language, block in FENCE.findall(TEXTS["README.md"]) if language == "python"
    )
    exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})
    *steps, last = capsys.readouterr().out.splitlines()
    assert max(int(step.split()[0]) for step in steps if step.strip()) > 1
    assert last.endswith(" tokens a step")
    assert float(last.split()[0]) > 1
