"""The paper on PEARL (Liu et al. 2024) as data: its pairs, figures, and cells of tables.

The forward times and the acceptance rate of a pair are the paper's own measurements (Tables 7 and
4). `emulate` predicts the paper's results of each method (Tables 1 to 3, 5 and 6) from these. This
module does not import torch.
"""

from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

from msgspec import Struct, yaml

from pearl.config import RequestOptions
from pearl.lab.studies import theory
from pearl.spec.methods import AS_PUBLISHED

# Methods for which a table has only the paper's figures. On an emulated pair the first two find
# nothing to guess, and the third is not implemented here.
OTHERS = ("ouroboros", "lookahead", "distillspec")
HUMANEVAL = "HumanEval"
Unit = Literal["speed-up", "tokens/s", "accepted", "run", "draft idle", "target idle"]


class Published(Struct, frozen=True, forbid_unknown_fields=True):
    """The paper's results of one pair on one benchmark, as far as the paper prints them.

    Attributes:
        speedup: method -> speedup over the target alone. Methods: sd, pearl, the two ablations, and
            `OTHERS`.
        mean_accepted: method (sd, pearl) -> mean accepted tokens.
        windows: window in tokens -> tokens per second of PEARL.
        idle: model ("draft", "target") -> seconds per step of sd in which this model is idle.
    """

    speedup: dict[str, float] = {}
    mean_accepted: dict[str, float] = {}
    windows: dict[int, float] = {}
    idle: dict[str, float] = {}


class Pair(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One pair of the paper on one benchmark.

    Attributes:
        set: the benchmark.
        tables: names of the tables that have the pair, besides Table 7.
        config: name of the file in configs/ for running this pair with its real models.
        vocabulary: number of token ids.
        draft_speed, target_speed: tokens per second of each model alone.
        window: PEARL's window in tokens: the paper's c, a whole number.
        gamma: the authors' window for sd, in tokens.
        fitted: the acceptance rate for which `theory.sd_improvement` gives the paper's speedup of
            sd. None if the acceptance rate is known from Table 4.
        published: the paper's results.
    """

    name: str
    set: str = HUMANEVAL
    tables: list[str] = []
    config: str
    vocabulary: int = 32000
    draft_speed: float
    target_speed: float
    window: int
    gamma: int
    fitted: float | None = None
    published: Published = Published()

    @property
    def title(self) -> str:
        """The pair's name, and the benchmark's unless it is HumanEval."""
        if self.set == HUMANEVAL:
            return self.name
        return f"{self.name}, {self.set}"

    @property
    def t_draft(self) -> float:
        """Seconds of a draft forward of one token."""
        return 1 / self.draft_speed

    @property
    def t_target(self) -> float:
        """Seconds of a target forward of one token."""
        return 1 / self.target_speed

    def acceptance(self) -> tuple[float, str]:
        """Return (acceptance rate, how it was derived, in words)."""
        if self.fitted is not None:
            return self.fitted, "fitted to the row of sd"
        return theory.acceptance_of(self.published.mean_accepted["pearl"]), "from Table 4"


class Shown(Struct, frozen=True, forbid_unknown_fields=True):
    """A table's caption and notes."""

    shows: str
    notes: list[str] = []


TABLES = yaml.decode(
    (files("pearl.lab.studies") / "tables.yaml").read_bytes(), type=dict[str, Shown]
)


def pairs() -> list[Pair]:
    """Return the pairs of the paper."""
    return yaml.decode((files("pearl.lab.studies") / "paper.yaml").read_bytes(), type=list[Pair])


@dataclass(frozen=True)
class Run:
    """A method with its window, as the runtime and the simulator run it.

    Attributes:
        window: in tokens, the gamma of sd or PEARL's fixed window; None for `ar` and for PEARL with
            stream windows.
    """

    method: str
    window: int | None = None

    @property
    def name(self) -> str:
        if self.method == "pearl":
            return f"pearl, {self._window_kind}"
        return self.method

    @property
    def label(self) -> str:
        """The name, and the window if it is fixed, such as "pearl, fixed(4)"."""
        if self.window is None:
            return self.name
        return f"{self.name}({self.window})"

    @property
    def _window_kind(self) -> Literal["stream", "fixed"]:
        return "stream" if self.window is None else "fixed"

    def decoding(self) -> RequestOptions:
        options = RequestOptions(method=self.method, window=self._window_kind, gamma=self.window)
        if self.method == "pearl":
            return options.changed(**AS_PUBLISHED)
        return options


@dataclass
class Cell:
    """A figure in a table, from up to three sources; None for a source that does not have it.

    Attributes:
        pair: the pair's title.
        run: the method and window that give the figure; None if only the paper has it.
        label: title of the cell's column.
        paper: the published figure.
        simulator: the figure in virtual time, over many texts.
        runtime: the measured figure. Rates and speedups are medians over the texts; mean accepted
            tokens and idle times are over all texts together.
    """

    pair: str
    run: Run | None
    label: str
    unit: Unit
    paper: float | None = None
    simulator: float | None = None
    runtime: float | None = None


def cells_of(pair: Pair, table: str) -> list[Cell]:
    """Return the cells of a pair in a table, with the paper's figures; none if the table does not have the pair."""
    published = pair.published
    sd = Run("sd", pair.gamma)
    fixed = Run("pearl", pair.window)
    cells = []

    def add(run: Run | None, label: str, unit: Unit, paper: float | None) -> None:
        cells.append(Cell(pair.title, run, label, unit, paper))

    def add_speedup(run: Run) -> None:
        add(run, run.name, "speed-up", published.speedup.get(run.method))

    if table not in pair.tables and table != "7":
        return cells
    match table:
        case "1" | "2":
            for run in (sd, fixed, Run("pearl")):
                add_speedup(run)
            for method in OTHERS:
                if method in published.speedup:
                    add(None, method, "speed-up", published.speedup[method])
        case "3":
            for method in ("pearl-no-pre-verify", "pearl-no-post-verify"):
                add_speedup(Run(method, pair.window))
            add_speedup(fixed)
        case "4":
            # Without the correction or bonus, as the authors count; with it, as their theorem 2 does.
            for run in (sd, fixed):
                paper = published.mean_accepted.get(run.method)
                add(run, f"{run.name}, accepted", "accepted", paper)
                add(run, f"{run.name}, correction included", "run", paper)
        case "5" | "6":
            for window, speed in published.windows.items():
                run = Run("pearl", window)
                add(run, run.label, "tokens/s", speed)
        case "7":
            add(Run("ar"), "ar", "tokens/s", pair.target_speed)
        case "figure 2a":
            add(sd, "the draft idles", "draft idle", published.idle.get("draft"))
            add(sd, "the target idles", "target idle", published.idle.get("target"))
    return cells
