"""The layers of the design as data, and the modules of the package as syntax trees."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
# From top to bottom; a name covers a module, or a package with all that is in it. The rooms of one layer are siblings:
# they do not import each other.
LAYERS: list[set[str]] = [
    {"pearl.__main__"},
    {"pearl.cli"},
    {"pearl.server"},
    {"pearl.lab.studies"},
    {"pearl.lab.bench"},
    {"pearl.lab.studies.recorded_texts"},
    {"pearl.lab.studies.estimate"},
    {"pearl.lab.distill", "pearl.lab.studies.simulate", "pearl.lab.studies.theory"},
    {"pearl.lab.guesses"},  # named by the registry of methods, loaded when a request uses one
    {"pearl", "pearl.lab"},
    {"pearl.engine", "pearl.vllm"},
    {"pearl.worker"},
    {"pearl.trace"},
    {"pearl.metrics"},
    {"pearl.execution"},
    {"pearl.drafting", "pearl.transport"},
    {"pearl.models"},
    {"pearl.text"},
    {"pearl.decoding"},
    {"pearl.cache", "pearl.protocol"},
    {"pearl.config"},
    {"pearl.spec"},
    {"pearl.device", "pearl.document"},
    {"pearl.colours"},
    {"pearl.errors", "pearl.printable", "pearl.silence", "pearl.steps", "pearl.version"},
]

# What the runtime may import of models: the interface; how fast a runner is; and, without torch, what a name means.
INTERFACE = {
    "pearl.models.calibrate",
    "pearl.models.feeds",
    "pearl.models.heads.head",
    "pearl.models.out_of_memory",
    "pearl.models.runner",
    "pearl.models.threads",
    "pearl.models.checkpoints.checkpoint",
    "pearl.models.checkpoints.tokenizers",
}
# Modules that know more of models, and why.
KNOW_MODELS = {
    "pearl.worker.build": "the one place that builds a runner",
    "pearl.worker.__main__": "leaves out what our own forward does not need, before torch is imported",
    "pearl.engine.preflight": "reads what a GGUF file is, before a worker starts",
    "pearl.engine.custom_generate": "gets models from its caller",
    "pearl.cli.draft": "as pearl.worker.__main__",
    "pearl.cli.models": "lists, fetches and removes checkpoints",
    "pearl.drafting.proposer": "asks whether its runner is a head",
}


@cache
def modules() -> dict[str, ast.Module]:
    """Return the syntax tree of every module of the package, by the module's dotted name."""
    found = {}
    for path in sorted((ROOT / "pearl").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(), str(path))
    return found
