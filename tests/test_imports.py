"""The layers of the design, as data: every import of pearl.* points to the same layer or to a lower one."""

import ast
from collections.abc import Iterator
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
    {"pearl.lab.studies.estimate", "pearl.lab.studies.recorded_texts"},
    {"pearl.lab.distill", "pearl.lab.studies.simulate", "pearl.lab.studies.theory"},
    {"pearl", "pearl.lab"},
    {"pearl.engine"},
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
SHELLS = {"pearl", "pearl.lab"}  # packages whose rooms are in layers of their own
SOLE_USERS = {"zmq": "pearl.transport.zeromq", "torch.distributed": "pearl.transport.torch_dist"}
IMPURE = {
    "torch",
    "time",
    "socket",
    "random",
    "threading",
    "asyncio",
    "zmq",
    "os",
    "numpy",
    "secrets",
    "datetime",
}


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted((ROOT / "pearl").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(), str(path))
    return found


def imported(name: str, tree: ast.Module) -> Iterator[str]:
    """What a module imports, at its head or lazily: `from pearl import errors` is pearl.errors."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} imports relatively: write the whole name"
            assert node.module is not None
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in modules() or not whole.startswith("pearl.") else node.module


def place(module: str) -> tuple[int, str]:
    """Layer, 0 at the top, and room. Fails for a module that no layer names: put it into one."""
    room = module
    while True:
        for depth, names in enumerate(LAYERS):
            if room in names and (room not in SHELLS or module == room):
                return depth, room
        assert "." in room, f"{module} is in no layer: add it to LAYERS, and to pearl/README.md"
        room = room.rpartition(".")[0]


def violations(name: str, tree: ast.Module) -> list[str]:
    """Imports that point upwards, or to a sibling."""
    depth, room = place(name)
    ours = [m for m in imported(name, tree) if m == "pearl" or m.startswith("pearl.")]
    return [
        f"{name} imports {m}" for m in ours if place(m) != (depth, room) and place(m)[0] <= depth
    ]


def belongs(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_imports_point_downwards() -> None:
    wrong = [found for name, tree in modules().items() for found in violations(name, tree)]
    assert not wrong, wrong


def test_every_layer_is_there() -> None:
    """A renamed module must not leave a hole in the table."""
    assert set().union(*LAYERS) <= set(modules())


def test_one_module_alone_uses() -> None:
    for package, user in SOLE_USERS.items():
        users = {
            name
            for name, tree in modules().items()
            if any(belongs(m, package) for m in imported(name, tree))
        }
        assert users == {user}


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
            assert not {
                m for m in imported(name, tree) if any(belongs(m, one) for one in impure)
            }, name


def test_the_rules_are_declared_without_torch() -> None:
    """Configuration reads the declarations, and starts without it."""
    name = "pearl.spec.rules"
    assert set(imported(name, modules()[name])) & {"torch", "numpy"} == set()
