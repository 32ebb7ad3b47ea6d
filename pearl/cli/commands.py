"""The list of `pearl`'s commands, so that `pearl --help` need not import all of them, which would take seconds.

To add a command, write a function in a module of this package and a line in `COMMANDS`.
"""

from __future__ import annotations

from typing import NamedTuple


class Listing(NamedTuple):
    """A line of `pearl --help`.

    Attributes:
        place: the command's function, as "module:function" below `pearl.cli`.
        summary: the first sentence of the command's docstring.
    """

    section: str
    place: str
    summary: str


_USE = "Use it"
_GUESS = "Guess without a model"
_CHECK = "See and check"
_MEASURE = "Measure"
_MAKE = "Make a draft"

# In the order of `pearl --help`.
COMMANDS = {
    "chat": Listing(_USE, "chat:chat", "Talk with the model."),
    "draft": Listing(_USE, "draft:draft", "Draft for engines of other kinds, such as vLLM."),
    "generate": Listing(_USE, "generate:generate", "Generate one text from a prompt."),
    "keys": Listing(
        _USE, "engines:keys", "Make the keys that secure a control channel between two hosts."
    ),
    "list": Listing(_USE, "models:list_models", "List the models on this machine's disk."),
    "ps": Listing(_USE, "engines:ps", "List your engines on this machine."),
    "pull": Listing(_USE, "models:pull", "Download a model from the hub into its cache."),
    "rm": Listing(_USE, "models:rm", "Remove a model from the caches."),
    "serve": Listing(_USE, "serve:serve", "Keep an engine running for others to connect to."),
    "show": Listing(_USE, "models:show", "Show what a model is, and how it would run here."),
    "stop": Listing(_USE, "engines:stop", "Stop an engine of yours on this machine."),
    "datastore": Listing(
        _GUESS,
        "datastore:datastore",
        "Make datastores: texts that guesses come from, with no draft model.",
    ),
    "check": Listing(
        _CHECK, "bench:check_bits", "Compare logits and texts of all methods bit for bit."
    ),
    "trace": Listing(_CHECK, "trace:trace", "Report or draw the recordings of --trace FILE."),
    "bench": Listing(
        _MEASURE, "bench:bench", "Compare methods, rules and stop policies on the same prompts."
    ),
    "calibrate": Listing(
        _MEASURE, "bench:calibrate_pair", "Measure a pair on this machine: which method to use."
    ),
    "paper": Listing(
        _MEASURE, "paper:paper", "Tables and figures of the five papers, by runs of this runtime."
    ),
    "disco": Listing(
        _MAKE, "distill:disco", "Train the classifier that tells a draft where to stop."
    ),
    "distill": Listing(
        _MAKE, "distill:distill", "Make a draft for a target, out of the target's own answers."
    ),
}
SECTIONS = tuple(dict.fromkeys(listing.section for listing in COMMANDS.values()))


def example(line: str) -> str:
    """Return an example for the end of a command's help, as in `@click.command(epilog=example("pearl ps"))`."""
    return f"Example:\n\n\b\n  {line}"
