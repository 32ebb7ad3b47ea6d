"""The layers of the design, as data: every import of pearl.* points to the same layer or to a lower one."""

import ast
from collections.abc import Iterator
from functools import cache

import pytest

from pearl.drafting.fused_guesses import index_factory
from pearl.spec.methods import METHODS
from tests.layers import INTERFACE, KNOW_MODELS, LAYERS, modules

pytestmark = pytest.mark.xdist_group("modules")  # they are parsed once
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
def imported(name: str) -> frozenset[str]:
    """What a module imports, at its head or lazily: `from pearl import errors` is pearl.errors."""
    return frozenset(imports_of(name, modules()[name]))


def imports_of(name: str, tree: ast.Module) -> Iterator[str]:
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


def violations(name: str) -> list[str]:
    """Imports that point upwards, or to a sibling."""
    depth, room = place(name)
    ours = [m for m in sorted(imported(name)) if m == "pearl" or m.startswith("pearl.")]
    return [
        f"{name} imports {m}" for m in ours if place(m) != (depth, room) and place(m)[0] <= depth
    ]


def belongs(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_imports_point_downwards() -> None:
    wrong = [found for name in modules() for found in violations(name)]
    assert not wrong, wrong


def test_every_layer_is_there() -> None:
    """A renamed module must not leave a hole in the table."""
    assert set().union(*LAYERS) <= set(modules())


def test_the_runtime_knows_models_by_their_interface() -> None:
    """Ring 1 imports of ring 2 the interface; what knows more is listed, and used."""
    knowing = set()
    for name in modules():
        if belongs(name, "pearl.models") or belongs(name, "pearl.lab"):
            continue
        for module in imported(name):
            if belongs(module, "pearl.models") and module not in INTERFACE:
                assert name in KNOW_MODELS, f"{name} imports {module}"
                knowing.add(name)
    assert knowing == set(KNOW_MODELS), "listed without need"


def test_commands_alone_run_the_lab() -> None:
    """Ring 3: nothing imports the lab but its own commands."""
    for name in modules():
        if not belongs(name, "pearl.lab") and not belongs(name, "pearl.cli"):
            assert not any(belongs(module, "pearl.lab") for module in imported(name)), name


def test_the_registry_alone_leads_to_guesses_of_the_lab() -> None:
    """Below the lab nothing imports them: a method names the factory of its index, as `module:name`."""
    room = "pearl.lab.guesses"
    for name in modules():
        if any(belongs(module, room) for module in imported(name)):
            assert belongs(name, "pearl.lab"), name
    named = {method.guesses for method in METHODS.values() if method.guesses}
    assert {factory.partition(":")[0] for factory in named} == {
        name for name in modules() if belongs(name, room) and name != room
    }
    assert all(callable(index_factory(factory)) for factory in named)


def test_one_module_alone_uses() -> None:
    for package, user in SOLE_USERS.items():
        users = {name for name in modules() if any(belongs(m, package) for m in imported(name))}
        assert users == {user}


def test_the_protocol_is_sans_io() -> None:
    """No clock, process, socket, tensor or random number."""
    for name in modules():
        if belongs(name, "pearl.protocol"):
            assert {m.partition(".")[0] for m in imported(name)} & IMPURE == set(), name


def test_decoding_is_pure_functions_of_tensors_and_keys() -> None:
    """No clock, process, socket or thread, and randomness only by key."""
    impure = IMPURE - {"torch", "numpy"} | {"torch.distributed", "multiprocessing", "subprocess"}
    for name in modules():
        if belongs(name, "pearl.decoding"):
            assert not {m for m in imported(name) if any(belongs(m, one) for one in impure)}, name


def test_the_rules_are_declared_without_torch() -> None:
    """Configuration reads the declarations, and starts without it."""
    name = "pearl.spec.rules"
    assert imported(name) & {"torch", "numpy"} == set()


def test_no_files_of_models_import_each_other() -> None:
    """Nor over others: imports inside of functions and of types count, too."""
    imports: dict[str, frozenset[str]] = {}
    for name in modules():
        if belongs(name, "pearl.models"):
            imports[name] = imported(name) - {name}
    while free := {name for name, needs in imports.items() if not needs & imports.keys()}:
        for name in free:
            del imports[name]
    assert not imports, imports


def test_forwards_do_not_know_where_weights_come_from() -> None:
    """Checkpoints import the forwards: an import the other way round, even of a type, would be a circle."""
    forwards = ("pearl.models.forward", "pearl.models.cpu", "pearl.models.gpu")
    wrong = []
    for name in modules():
        if any(belongs(name, package) for package in forwards):
            for module in imported(name):
                if belongs(module, "pearl.models.checkpoints"):
                    wrong.append(f"{name} imports {module}")
    assert not wrong, wrong
