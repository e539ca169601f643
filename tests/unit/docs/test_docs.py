"""What the documents say is so: their samples run, their tables are complete."""

import re
import shlex
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

import pytest
import typer
from doc_pages import DOCS, blocks, page, section
from pydantic import BaseModel

from penstock.cli.app import app
from penstock.config import RunConfig, load_config
from penstock.sdk.dataset import load_tasks
from penstock.sdk.discovery import load_agent

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(DOCS / "hooks"))
from reference import config_reference  # noqa: E402


def written(folder: Path, document: str, **names: str) -> None:
    """Writes the first block of each language of a document."""
    for language, name in names.items():
        (folder / name).write_text(blocks((ROOT / document).read_text(), language)[0])


def test_quickstart_sample_loads(tmp_path: Path) -> None:
    written(tmp_path, "docs/quickstart.md", python="agent.py", json="tasks.jsonl", toml="train.toml")
    config = load_config(tmp_path / "train.toml")
    agent = load_agent(config.agent.entry, config.workflow, config.grader)
    labels = {task.label for task in load_tasks(config.dataset.train)}
    assert (agent.workflow.__name__, agent.grader.__name__) == ("Classify", "RightAndShort")
    assert labels == {"positive", "negative"}


@pytest.mark.slow
def test_readme_sample_trains(tmp_path: Path) -> None:
    [sample] = blocks((ROOT / "README.md").read_text(), "python")
    assert len(sample.splitlines()) <= 15
    small = sample.replace('train={"steps": 8}', 'train={"steps": 1}, model="tiny"')
    ran = subprocess.run([sys.executable, "-c", small], cwd=tmp_path, capture_output=True, text=True)
    assert small != sample and ran.returncode == 0, ran.stderr
    assert "step 1/1  reward" in ran.stderr + ran.stdout


@pytest.mark.slow
def test_quickstart_runs_from_python(tmp_path: Path) -> None:
    written(tmp_path, "docs/quickstart.md", python="agent.py", json="tasks.jsonl")
    sample = blocks(page("quickstart.md"), "python")[1]
    small = sample.replace("model=summary.checkpoint", 'model="tiny"').replace('"steps": 8', '"steps": 1')
    small = small.replace('folder="runs/reviews",', 'folder="runs/reviews", model="tiny",')
    small = small if find_spec("pandas") else small.partition("frame = ")[0]
    ran = subprocess.run([sys.executable, "-c", small], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_settings_come_from_the_toml_table(tmp_path: Path) -> None:
    [code] = blocks(section("agents.md", "Settings of your own"), "python")
    [table] = blocks(section("agents.md", "Settings of your own"), "toml")
    [grader] = blocks(page("graders.md"), "python")
    (tmp_path / "settings.py").write_text(f"{code}\n{grader}")
    (tmp_path / "train.toml").write_text(f'{table}[dataset]\ntrain = "tasks.jsonl"\n')
    config = load_config(tmp_path / "train.toml")
    agent = load_agent(tmp_path / "settings.py", config.workflow, config.grader)
    assert getattr(agent.workflow_config, "tries") == 2  # noqa: B009


@pytest.mark.parametrize("name", ["train.md", "algorithms.md", "graders.md", "dashboard.md", "environments.md", "scale.md"])
def test_toml_samples_load(name: str, tmp_path: Path) -> None:
    for place, sample in enumerate(blocks(page(name), "toml")):
        tables = tomllib.loads(sample)
        (tmp_path / f"{place}.toml").write_text(sample if "dataset" in tables else f'dataset.train = "tasks.jsonl"\n{sample}')
        if "experiment" not in tables:
            load_config(tmp_path / f"{place}.toml")


def test_config_reference_lists_every_key() -> None:
    text = config_reference()
    keys = [f"{name}.{key}" for name, kind in sections() for key in kind.model_fields]
    assert len(keys) > 100
    assert [key for key in keys if f"| `{key}` |" not in text] == []


def sections() -> list[tuple[str, type[BaseModel]]]:
    fields = RunConfig.model_fields.items()
    return [(name, field.annotation) for name, field in fields if hasattr(field.annotation, "model_fields")]  # type: ignore[misc]


def test_every_link_in_the_readme_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links and [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("name", [each.name for each in sorted(DOCS.glob("*.md"))])
def test_commands_of_a_page_exist(name: str) -> None:
    """Every `penstock` line of a shell block names a command and options that exist."""
    lines = [line for block in blocks(page(name), "(?:bash|sh)") for line in block.replace("\\\n", " ").splitlines()]
    for line in (line.removeprefix("PENSTOCK_ROLLOUT_TOKEN=… ") for line in lines):
        if not line.startswith("penstock "):
            continue
        words = shlex.split(line.partition(" && ")[0], comments=True)
        command = typer.main.get_command(app)
        while words[1:] and words[1] in getattr(command, "commands", {}):
            command, words = command.commands[words[1]], words[1:]  # type: ignore[attr-defined]
        command = getattr(command, "commands", {}).get("run", command)
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        given = {word.partition("=")[0] for word in takewhile(lambda word: word != "--", words) if word.startswith("-")}
        assert given <= known | {"--help", "--version", "--install-completion"}, line


def test_navigation_has_every_page() -> None:
    pages = {str(each.relative_to(DOCS)) for each in DOCS.rglob("*.md") if "design" not in each.parts}
    assert set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)) == pages


def test_pages_are_short() -> None:
    texts = {
        each: re.sub(r"<!-- train\.\w+ -->.*?<!-- end of", "", each.read_text(), flags=re.DOTALL) for each in DOCS.rglob("*.md")
    }
    words = {each: len(text.split()) for each, text in texts.items()}
    assert sum(count for each, count in words.items() if each.parent == DOCS) <= 25_000
    assert [each.name for each, count in words.items() if each.parent.name == "design" and count > 600] == []


def test_lines_wrap() -> None:
    for each in DOCS.rglob("*.md"):
        text = re.sub(r"^ *```.*?^ *```", "", each.read_text(), flags=re.DOTALL | re.MULTILINE)
        long = [line for line in text.splitlines() if len(line) > 120 and not line.startswith(("|", "!["))]
        assert long == [], each


def test_every_link_between_pages_leads_somewhere() -> None:
    for each in (*DOCS.rglob("*.md"), ROOT / "CONTRIBUTING.md"):
        text = re.sub(r"```.*?```", "", each.read_text(), flags=re.DOTALL)
        links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
        assert [link for link in links if not (each.parent / link).exists()] == [], each


def test_every_source_file_that_a_page_names_is_there() -> None:
    rooms = {path.name for path in (ROOT / "src" / "penstock").iterdir() if path.is_dir()}
    for each in (*DOCS.rglob("*.md"), ROOT / "CONTRIBUTING.md"):
        named = {name for name in re.findall(r"`(\w+(?:/\w+)+\.py)", each.read_text()) if name.split("/")[0] in rooms}
        assert [name for name in named if not (ROOT / "src" / "penstock" / name).exists()] == [], each


def test_the_architecture_page_has_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {path.stem for path in (ROOT / "src" / "penstock").iterdir() if path.name[0] != "_" and path.suffix in ("", ".py")}
    listed = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE))))
    assert rooms - {"templates", "controller", "workspace", "reports", "trackers"} <= listed


def test_no_file_has_marks_of_an_unsolved_merge():
    files = subprocess.run(
        ["git", "ls-files", "*.md", "*.toml", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    marked = [name for name in files.splitlines() if re.search(r"^(<{7}|>{7}) ", (ROOT / name).read_text(), re.MULTILINE)]
    assert not marked
