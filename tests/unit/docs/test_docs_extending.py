"""Every extension of docs/extending.md is made on a copy of the source, in the files that the page names, and its commands run."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "extending.md").read_text()
PROJECT = "A project to try things with"


class Block(NamedTuple):
    language: str
    title: str
    text: str


def read_page() -> dict[str, list[Block]]:
    """The code blocks of each section."""
    found: dict[str, list[Block]] = {}
    for part in PAGE.split("\n## ")[1:]:
        blocks = re.findall(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', part, re.DOTALL | re.MULTILINE)
        found[part.split("\n", 1)[0]] = [Block(*block) for block in blocks]
    return found


SECTIONS = read_page()
EXTENSIONS = [name for name in SECTIONS if name != PROJECT]


def make_checkout(folder: Path) -> None:
    """What a checkout holds, as far as an extension touches or reads it."""
    shutil.copytree(ROOT / "src" / "penstock", folder / "src" / "penstock")
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "tests").symlink_to(ROOT / "tests")


def apply_change(file: Path, change: str) -> None:
    lines = [(line[:1], line[1:]) for line in change.splitlines()]
    old = "".join(f"{text}\n" for sign, text in lines if sign != "+")
    new = "".join(f"{text}\n" for sign, text in lines if sign != "-")
    source = file.read_text()
    assert source.count(old) == 1, f"{file.name} does not have these lines once:\n{old}"
    file.write_text(source.replace(old, new))


def write_block(block: Block, folder: Path) -> None:
    file = folder / block.title
    if block.language == "diff":
        apply_change(file, block.text)
        return
    assert not file.exists(), f"{block.title} is there already"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(block.text)


def install_plugin(folder: Path) -> None:
    """What `pip install ./plugin` leaves behind, as far as entry points need it."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    metadata = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = [
        f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in names.items()) for group, names in project["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(groups))


def run_commands(commands: str, folder: Path) -> str:
    python_path = os.pathsep.join(map(str, (folder / "src", folder / "plugin", folder)))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PYTHONPATH": python_path, "PATH": path}
    done = subprocess.run(["bash", "-euc", commands], cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{commands}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def make_extension(name: str, folder: Path) -> None:
    """A checkout with a project to try things with, and the extension's files in both."""
    make_checkout(folder)
    for block in (*SECTIONS[PROJECT], *SECTIONS[name]):
        if block.title:
            write_block(block, folder)


def names_of(file: Path) -> set[str]:
    """What can be imported from a module: what its top level defines or imports."""
    tree = ast.parse(file.read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
    imported = [alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    assigned = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return {*(node.name for node in nodes), *imported, *assigned}


@pytest.mark.parametrize("name", EXTENSIONS)
def test_an_extension_fits_the_source(name: str, tmp_path: Path) -> None:
    for block in (*SECTIONS[PROJECT], *SECTIONS[name]):
        if block.title and (ROOT / block.title).exists():
            (tmp_path / block.title).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / block.title, tmp_path / block.title)
        if block.title:
            write_block(block, tmp_path)
    for block in SECTIONS[name]:
        for node in ast.walk(ast.parse(block.text if block.language == "python" else "")):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock."):
                file = Path("src", f"{node.module.replace('.', '/')}.py")
                if (ROOT / file.with_suffix("")).is_dir():
                    file = file.with_suffix("") / "__init__.py"
                source = tmp_path / file if (tmp_path / file).exists() else ROOT / file
                assert {alias.name for alias in node.names} <= names_of(source), f"{node.module} has other names"


@pytest.mark.slow
@pytest.mark.parametrize("name", EXTENSIONS)
def test_an_extension_works_as_the_page_says(name: str, tmp_path: Path) -> None:
    make_extension(name, tmp_path)
    if (tmp_path / "plugin").exists():
        install_plugin(tmp_path / "plugin")
    output = "".join(run_commands(block.text, tmp_path) for block in SECTIONS[name] if block.language == "sh")
    expected = [line for block in SECTIONS[name] if block.language == "text" for line in block.text.splitlines()]
    assert expected and [line for line in expected if line not in output] == [], output


@pytest.mark.parametrize("name", EXTENSIONS)
def test_an_extension_touches_few_files(name: str) -> None:
    files = {block.title for block in SECTIONS[name] if block.title.startswith("src/")}
    assert len(files) <= 2
    assert any(block.language == "sh" for block in SECTIONS[name])


def test_the_page_has_every_table() -> None:
    kinds = set(re.findall(r'Registry\(\s*"([^"]+)"', "".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))))
    named = set(re.findall(r"`penstock\.(\w+)`", PAGE))
    assert {kind.replace(" ", "_") for kind in kinds} - named <= {"flow", "kind_of_agent"}, "flows are registered by a decorator"
