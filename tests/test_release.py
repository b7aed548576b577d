"""What a release promises: one version, the stated bounds, and a wheel that works by itself."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import lmgeom

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = sorted((ROOT / "lmgeom").rglob("*.py"))
PYTHONS = [c.split()[-1] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]


def test_version_is_the_same_everywhere():
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^## (\S+)", changes, flags=re.MULTILINE)[1] == lmgeom.__version__
    assert re.search(r"^version: (\S+)", citation, flags=re.MULTILINE)[1] == lmgeom.__version__


def test_stated_bounds_are_those_of_the_package():
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    stated = re.search(r"Python (3\.\d+) to (3\.\d+) and PyTorch 2\.(\d+) to 2\.(\d+)", readme)
    low, high, torch_low, torch_high = stated.groups()
    assert (low, high) == (PYTHONS[0], PYTHONS[-1])
    assert PROJECT["requires-python"] == f">={low}"
    assert f"torch>=2.{torch_low},<2.{int(torch_high) + 1}" in PROJECT["dependencies"]


def test_every_module_is_written_in_the_oldest_python():
    version = tuple(map(int, PYTHONS[0].split(".")))
    for path in MODULES:
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=version)


def interpreter(version: str) -> str | None:
    """Find a Python of a version on this machine, among pyenv's, too."""
    if f"{sys.version_info.major}.{sys.version_info.minor}" == version:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    kept = sorted(pyenv.glob(f"{version}.*/bin/python{version}"))
    return str(kept[-1]) if kept else shutil.which(f"python{version}")


@pytest.mark.parametrize("version", PYTHONS)
def test_every_module_compiles_without_a_warning(version):
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    code = (
        "import sys; [compile(open(p, encoding='utf-8').read(), p, 'exec') for p in sys.argv[1:]]"
    )
    subprocess.run([python, "-I", "-W", "error", "-c", code, *map(str, MODULES)], check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, unpacked."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "lmgeom", copy / "lmgeom", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out, copy]
    subprocess.run(command, check=True)
    [file] = out.glob("lmgeom-*.whl")
    with zipfile.ZipFile(file) as packed:
        packed.extractall(out / "unpacked")
    return out / "unpacked"


def away(wheel: Path, folder: Path, code: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run some code in a folder of its own, with the package of the wheel."""
    start = f"import sys; sys.path.insert(0, {str(wheel)!r}); import lmgeom"
    start += f"; assert lmgeom.__file__.startswith({str(wheel)!r}), lmgeom.__file__\n"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LMGEOM_ROOT")}
    return subprocess.run(
        [sys.executable, "-I", "-c", start + code, *arguments],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


COMMAND = "from lmgeom.cli import main; sys.exit(main(sys.argv[1:]))"


def test_wheel_has_every_module_and_says_that_it_is_typed(wheel):
    packed = {path.relative_to(wheel) for path in (wheel / "lmgeom").rglob("*.py")}
    assert packed == {path.relative_to(ROOT) for path in MODULES}
    assert (wheel / "lmgeom" / "py.typed").is_file()
    assert list((wheel / "lmgeom").glob("*.mplstyle"))
    assert not (wheel / "nbs").exists()


def test_wheel_trains_a_model_without_a_checkout(wheel, tmp_path):
    code = """
from lmgeom.data import synthetic
from lmgeom.lm import Config, LanguageModel, TrainConfig, train
from lmgeom import head, lev, mixers, study, taper
model = LanguageModel(Config(64, 16, 1, 2, 16, 32, input='lev', head='untied',
    input_options=dict(seed_dim=8, n_knots=4, rank=4, heads=2)))
run = TrainConfig(steps=2, batch_size=2, context=8, warmup=1, compile=False)
print(len(train(model, synthetic(64), run, quiet=True).history))
"""
    done = away(wheel, tmp_path, code)
    assert done.stdout.strip() == "2", done.stderr
    assert not list(tmp_path.iterdir())


def test_command_of_the_wheel_counts_parameters_without_a_checkout(wheel, tmp_path):
    done = away(wheel, tmp_path, COMMAND, "params", "tied-small")
    assert done.returncode == 0, done.stderr
    assert "total" in done.stdout


def test_command_that_needs_the_checkout_says_so_in_one_line(wheel, tmp_path):
    done = away(wheel, tmp_path, COMMAND, "study", "claims")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "Traceback" not in done.stderr
