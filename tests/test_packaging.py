"""What a user installs is whole, whether it is built from a checkout or from an archive that has lost its links."""

from __future__ import annotations

import ast
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

from tests.cli.conftest import clean_environment
from tests.documents import ROOT, run

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINKED = ("passes", "models", "configs")
PARTS = ("graphfuse", *LINKED, "pyproject.toml", "README.md", "LICENSE")


def files_of(*parts: str) -> list[Path]:
    """Files below these parts of the tree, links not followed."""
    found = []
    for part in parts:
        top = ROOT / part
        below = [top] if top.is_file() else sorted(p for p in top.rglob("*") if not p.is_dir() and not p.is_symlink())
        found += [path for path in below if "__pycache__" not in path.parts and path.suffix != ".pyc"]
    return found


def modules_of(part: str) -> set[str]:
    """The Python files of a part of the tree, by their place in the installed package."""
    prefix = "" if part == "graphfuse" else "graphfuse/"
    return {prefix + path.relative_to(ROOT).as_posix() for path in files_of(part) if path.suffix == ".py"}


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    """The tree as a zip archive. A link becomes a small file that holds its target: so unzip does without links."""
    path = tmp_path_factory.mktemp("archive") / "graphfuse.zip"
    with zipfile.ZipFile(path, "w") as bundle:
        for file in files_of(*PARTS):
            bundle.write(file, Path("graphfuse-main") / file.relative_to(ROOT))
        for name in LINKED:
            bundle.writestr(f"graphfuse-main/graphfuse/{name}", f"../{name}")
    return path


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """The tree with its links, as git makes it; builds leave their traces here and not in the repository."""
    folder = tmp_path_factory.mktemp("checkout")
    for file in files_of(*PARTS):
        target = folder / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    for name in LINKED:
        (folder / "graphfuse" / name).symlink_to(f"../{name}")
    return folder


def build(kind: str, source: Path, out: Path) -> Path:
    """A wheel or an sdist, built as pip does it without isolation: nothing is downloaded."""
    code = f"import sys, setuptools.build_meta as b; print('built:', b.build_{kind}(sys.argv[1]))"
    return out / run(sys.executable, "-c", code, out, folder=source).split("built: ")[1].strip()


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> Path:
    return build("wheel", checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(archive, tmp_path_factory) -> Path:
    """`pip install` of the archive into an empty folder."""
    folder = tmp_path_factory.mktemp("installed")
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--no-compile", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "install", *options, "--target", folder, archive, folder=folder)
    return folder


def in_installed(folder: Path, code: str) -> str:
    """What a Python that sees the installed package prints."""
    environment = clean_environment(PYTHONPATH=str(folder))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- the list of packages --------------------------------------------------------------------------------------------


def test_pyproject_lists_the_packages_of_the_tree():
    folders = {Path(module).parent for part in PARTS[:4] for module in modules_of(part)} | {Path("graphfuse/configs")}
    assert PYPROJECT["tool"]["setuptools"]["packages"] == sorted(".".join(folder.parts) for folder in folders)


def test_the_links_point_to_the_top_level_folders():
    for name in LINKED:
        link = ROOT / "graphfuse" / name
        assert link.is_symlink() and link.readlink().as_posix() == f"../{name}", f"{link} is not a relative link"


# --- the wheel and the sdist -----------------------------------------------------------------------------------------


def test_the_wheel_holds_every_module_and_data_file_once(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    wanted = {module for part in PARTS[:4] for module in modules_of(part)} | {"graphfuse/py.typed"}
    wanted |= {f"graphfuse/{path.relative_to(ROOT).as_posix()}" for path in files_of("configs")}
    wanted |= {path.relative_to(ROOT).as_posix() for path in files_of("graphfuse/page")}
    assert sorted(name for name in names if ".dist-info/" not in name) == sorted(wanted)
    assert sum(name.endswith(".json") for name in names) >= 8


def test_the_sdist_builds_the_same_wheel(checkout, wheel, tmp_path):
    with tarfile.open(build("sdist", checkout, tmp_path)) as bundle:
        bundle.extractall(tmp_path, filter="data")
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    out = tmp_path / "out"
    out.mkdir()
    again = build("wheel", source, out)
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as bundle:
        (name,) = (name for name in bundle.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(bundle.read(name))


def test_every_package_that_is_imported_is_a_dependency(wheel):
    def top_level(path: Path) -> set[str]:
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names.add(node.module.split(".")[0])
        return names

    sources = (path for path in files_of("graphfuse", "passes", "models") if path.suffix == ".py")
    imported = set().union(*map(top_level, sources)) - set(sys.stdlib_module_names) - {"graphfuse"}
    imported -= {"functorch"}  # part of torch
    required = metadata(wheel).get_all("Requires-Dist") or []
    always = {entry.split(";")[0].split(">")[0].strip() for entry in required if "extra ==" not in entry}
    done_without = {"flashinfer", "pynvml", "matplotlib", "xgrammar"}  # looked for, and an extra brings them
    assert imported - done_without == always
    assert sorted(entry.split(">")[0].split(";")[0].strip() for entry in required if 'extra == "cuda"' in entry) == [
        "flashinfer-python",
        "nvidia-ml-py",
    ]


def test_the_entry_points_are_declared(wheel):
    with zipfile.ZipFile(wheel) as bundle:
        (name,) = (name for name in bundle.namelist() if name.endswith("entry_points.txt"))
        text = bundle.read(name).decode()
    for group, entry in (
        ("console_scripts", "graphfuse = graphfuse.cli.main:app"),
        ("torch_dynamo_backends", "graphfuse = graphfuse.backend:graphfuse_backend"),
        ("pytest11", "graphfuse = graphfuse.testing.pytest_plugin"),
    ):
        assert f"[{group}]\n{entry}" in text


# --- installed from an archive without links -------------------------------------------------------------------------


def test_an_install_from_an_archive_without_links_is_whole(installed):
    code = (
        "import graphfuse, graphfuse.models.registry, graphfuse.testing; from graphfuse import passes\n"
        "from graphfuse.comm.table import FOLDER\n"
        "print(passes.__file__, len(passes.default_rules()), len(list(FOLDER.glob('*.json'))))"
    )
    path, num_rules, num_tables = in_installed(installed, code).split()
    assert Path(path) == installed / "graphfuse" / "passes" / "__init__.py"
    assert int(num_rules) >= 2 and int(num_tables) >= 1
    assert {p.name for p in installed.iterdir()} & {"passes", "models", "configs", "tests"} == set()
    assert (installed / "bin" / "graphfuse").is_file()


def test_its_entry_points_load(installed):
    code = (
        "from importlib.metadata import distributions\n"
        f"(own,) = [d for d in distributions(path=[{str(installed)!r}]) if d.metadata['Name'] == 'graphfuse']\n"
        "print(*sorted(e.group for e in own.entry_points if e.load()))"
    )
    assert in_installed(installed, code).split() == ["console_scripts", "pytest11", "torch_dynamo_backends"]


def test_importing_it_and_asking_for_help_do_not_load_torch(installed):
    code = (
        "import sys, graphfuse\n"
        "from graphfuse.cli.main import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "print('heavy:', sorted({'torch', 'transformers', 'triton'} & set(sys.modules)))"
    )
    assert in_installed(installed, code).endswith("heavy: []\n")


# --- the editable install that runs these tests ----------------------------------------------------------------------


def test_in_a_checkout_the_linked_folders_are_the_packages():
    for name in ("passes", "models"):
        code = f"import graphfuse.{name} as m; print(m.__file__)"
        imported = Path(run(sys.executable, "-c", code, folder=ROOT).strip())
        assert imported.resolve() == ROOT / name / "__init__.py"
