"""Postpones the import of the Python kernels of torch's meta device until they are needed.

`import torch` spends a third of its time on these kernels, which compute shapes alone. transformers
builds its models with them, and torch's compiler traces with them; our own forward never uses them.
Other parts of torch may depend on them: in 2.13, `torch.Generator()` fails without them. So they are
postponed only in releases of torch that were checked. This module must not import torch.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from types import ModuleType
from typing import Any

KERNELS = "torch._meta_registrations"
# Releases of torch that were checked: all that our forward needs works without the kernels.
CHECKED = ("2.13",)
NEED_KERNELS = ("transformers.modeling_utils", "torch._dynamo")


class _Postponed(Loader):
    """Executes a module when one of its names is first read, not when it is imported.

    `importlib.util.LazyLoader` does not serve here. A module that it postpones is also executed
    when `inspect` asks all modules for their files, and `import torch` makes `inspect` ask.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        def get(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            self.execute(module)
            return getattr(module, name)

        module.__dict__["__getattr__"] = get

    def execute(self, module: ModuleType) -> None:
        """Execute the module, unless it was executed earlier."""
        if module.__dict__.pop("__getattr__", None) is not None:
            self._loader.exec_module(module)


class _Finder(MetaPathFinder):
    """Finds the kernels, and executes them before the import of a module that needs them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in NEED_KERNELS:
            import_kernels()
        if name != KERNELS:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Postponed(spec.loader)
        return spec


def postpone_kernels() -> None:
    """Let a later `import torch` leave the kernels out, if this release of torch was checked."""
    if version("torch").rpartition(".")[0] in CHECKED:
        sys.meta_path.insert(0, _Finder())


def import_kernels() -> None:
    """Import the kernels, if they were postponed."""
    module = sys.modules.get(KERNELS)
    if module is None or module.__spec__ is None:
        return
    loader = module.__spec__.loader
    if isinstance(loader, _Postponed):
        loader.execute(module)
