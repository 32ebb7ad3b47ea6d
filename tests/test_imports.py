"""The layers of the design, as data: every import of pearl.* points to the same layer or to a lower one."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS: list[set[str]] = [  # from top to bottom; a name covers a module, or a package with all that is in it
    {"pearl", "pearl.cli", "pearl.__main__"},
    {"pearl.bench"},
    {"pearl.attach", "pearl.torchrun", "pearl.conversation"},
    {"pearl.experiments"},
    {"pearl.engine", "pearl.processes", "pearl.simulate", "pearl.theory"},
    {"pearl.stream", "pearl.request"},
    {"pearl.worker"},
    {"pearl.trace", "pearl.metrics"},
    {"pearl.transport"},
    {"pearl.distill"},
    {"pearl.models"},
    {"pearl.text"},
    {"pearl.decoding"},
    {"pearl.protocol"},
    {"pearl.config"},
    {"pearl.decoding.registry"},  # of the package above, what configuration and codec read: no torch
    {"pearl.document", "pearl.errors", "pearl.printable", "pearl.silence", "pearl.version"},
]
SOLE_USERS = {"zmq": "pearl.transport.zeromq", "torch.distributed": "pearl.transport.torch_dist"}
IMPURE = {"torch", "time", "socket", "random", "threading", "asyncio", "zmq", "os", "numpy", "secrets", "datetime"}


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted((ROOT / "pearl").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(), str(path))
    return found


def imported(name: str, tree: ast.Module, known: set[str] | None = None) -> Iterator[str]:
    """What a module imports, at its head or lazily: `from pearl import errors` is pearl.errors."""
    known = known if known is not None else set(modules())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} imports relatively: write the whole name"
            assert node.module is not None
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in known or not whole.startswith("pearl.") else node.module


def layer(module: str) -> int:
    """0 is the top. Fails for a module that no layer names: put it into one."""
    parent = module
    while True:
        for depth, names in enumerate(LAYERS):
            if parent in names and (parent != "pearl" or module == "pearl"):
                return depth
        assert "." in parent, f"{module} is in no layer: add it to LAYERS, and to section 5 of the design"
        parent = parent.rpartition(".")[0]


def violations(name: str, tree: ast.Module, known: set[str] | None = None) -> list[str]:
    ours = [m for m in imported(name, tree, known) if m == "pearl" or m.startswith("pearl.")]
    return [f"{name} imports {m}" for m in ours if layer(m) < layer(name)]


def belongs(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("name", modules())
def test_imports_point_downwards(name: str) -> None:
    assert violations(name, modules()[name]) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("pearl.protocol.window", "import pearl.models.toy"),
        ("pearl.protocol.window", "def f():\n    from pearl import simulate"),
        ("pearl.decoding.sampling", "from pearl.text import TextStream"),
        ("pearl.models.toy", "from pearl import Engine"),
    ],
)
def test_an_import_upwards_is_noticed(name: str, source: str) -> None:
    """Even one inside a function, and of a name rather than a module."""
    assert len(violations(name, ast.parse(source), set(modules()))) == 1


def test_a_module_without_a_layer_is_noticed() -> None:
    with pytest.raises(AssertionError, match="in no layer"):
        layer("pearl.utils")


def test_every_layer_is_there() -> None:
    """A renamed module must not leave a hole in the table."""
    assert set().union(*LAYERS) <= set(modules())


@pytest.mark.parametrize("package", SOLE_USERS)
def test_one_module_alone_uses(package: str) -> None:
    users = {name for name, tree in modules().items() if any(belongs(m, package) for m in imported(name, tree))}
    assert users == {SOLE_USERS[package]}


def test_the_protocol_is_sans_io() -> None:
    """No clock, process, socket, tensor or random number."""
    for name, tree in modules().items():
        if belongs(name, "pearl.protocol"):
            assert {m.partition(".")[0] for m in imported(name, tree)} & IMPURE == set(), name


def test_decoding_is_pure_functions_of_tensors_and_keys() -> None:
    """No clock, process, socket or thread, and randomness only by key."""
    impure = IMPURE - {"torch", "numpy"} | {"torch.distributed", "multiprocessing", "subprocess"}
    for name, tree in modules().items():
        if belongs(name, "pearl.decoding"):
            assert not {m for m in imported(name, tree) if any(belongs(m, one) for one in impure)}, name


def test_the_rules_are_declared_without_torch() -> None:
    """Configuration reads the declarations, and starts without it."""
    name = "pearl.decoding.registry"
    assert set(imported(name, modules()[name])) & {"torch", "numpy"} == set()


def test_the_command_line_starts_without_torch() -> None:
    """Importing it takes seconds, and a front speaks to its engine without it."""
    code = "import sys, pearl.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
