"""The wheel, installed where none of the sources are: it is whole, and says what it is."""

import os
import re
import shutil
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from tests.conftest import output

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")  # tests marked slow come first, and other modules in between
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the package and nothing else; built of a copy, for building leaves files beside the sources."""
    pytest.importorskip("setuptools", minversion="77")
    pytest.importorskip("pip")
    place = tmp_path_factory.mktemp("wheel")
    source, site = place / "source", place / "site"
    source.mkdir()
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    described = (ROOT / "pyproject.toml").read_text()
    # Without our C products, which take 20 s to compile: a wheel does without them where there is no compiler.
    (source / "pyproject.toml").write_text(
        re.sub(r"\[\[tool.setuptools.ext-modules\]\]\n(\S.*\n)+", "", described)
    )
    shutil.copytree(ROOT / "pearl", source / "pearl", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(
        *pip,
        "wheel",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "-w",
        str(place),
        str(source),
    )
    (wheel,) = place.glob("*.whl")
    install = ("install", "--no-deps", "--no-index", "--no-compile", "--target", str(site))
    run(*pip, *install, str(wheel))
    shutil.rmtree(source)
    return site


def run(*command: str, site: Path | None = None) -> str:
    """What it printed."""
    place = {} if site is None else {"PYTHONPATH": str(site)}
    return output(*command, cwd=site and site.parent, env=os.environ | place, timeout=240)


def test_it_writes_a_text(installed: Path) -> None:
    python = [sys.executable, "-P"]
    said = run(*python, "-c", "import pearl; print(pearl.__file__)", site=installed)
    assert Path(said.strip()).is_relative_to(installed)
    assert "Examples:" in run(*python, "-m", "pearl", "--help", site=installed)
    assert run(
        *python,
        "-m",
        "pearl",
        "generate",
        "123",
        "--config",
        "toy",
        "--max-tokens",
        "5",
        site=installed,
    )


def test_it_has_what_belongs_to_it(installed: Path) -> None:
    for name in (
        "py.typed",
        "config/toy.yaml",
        "server/page.html",
        "server/series.yaml",
        "models/checkpoints/embedded_draft/README.md",
    ):
        assert (installed / "pearl" / name).is_file(), name
    assert not (installed / "tests").exists()
    (found,) = installed.glob("pearl_runtime-*.dist-info")
    metadata = PathDistribution(found).metadata
    assert metadata.get_all("Project-URL")
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert "# PEARL" in metadata.get_payload()
