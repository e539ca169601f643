"""What the documents say is so: their samples run, their tables are complete."""

import re
import subprocess
from pathlib import Path

import pytest

from penstock.config import RunConfig, load_config
from penstock.sdk.dataset import load_tasks
from penstock.sdk.discovery import load_agent

ROOT = Path(__file__).parents[3]


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def test_readme_sample_is_a_run_that_loads(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(blocks("README.md", "python")[0])
    (tmp_path / "tasks.jsonl").write_text(blocks("README.md", "json")[0])
    (tmp_path / "train.toml").write_text(blocks("README.md", "toml")[0])
    config = load_config(tmp_path / "train.toml")
    agent = load_agent(config.agent.entry, config.workflow, config.grader)
    [task] = load_tasks(config.dataset.train)
    assert (agent.workflow.__name__, agent.grader.__name__, task.label) == ("Ask", "Exact", "7")


def test_guide_sample_takes_its_settings_from_the_toml_table(tmp_path: Path) -> None:
    grader = blocks("README.md", "python")[0].split("class Exact")[1]
    text = f"{blocks('docs/guide.md', 'python')[0]}\nfrom penstock import Grader, GraderContext\nclass Exact{grader}"
    (tmp_path / "guided.py").write_text(text)
    (tmp_path / "train.toml").write_text(f'{blocks("docs/guide.md", "toml")[0]}[dataset]\ntrain = "tasks.jsonl"\n')
    config = load_config(tmp_path / "train.toml")
    agent = load_agent(tmp_path / "guided.py", config.workflow, config.grader)
    assert getattr(agent.workflow_config, "tries") == 2  # noqa: B009


@pytest.mark.parametrize(
    "section", [name for name, field in RunConfig.model_fields.items() if hasattr(field.annotation, "model_fields")]
)
def test_guide_lists_every_setting_with_its_default(section: str) -> None:
    guide = (ROOT / "docs/guide.md").read_text()
    for key, field in RunConfig.model_fields[section].annotation.model_fields.items():  # type: ignore[union-attr]
        default = "required" if field.is_required() else f"`{field.default}`"
        assert f"| `{section}.{key}` | {default} |" in guide


def test_every_link_in_the_readme_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_every_test_that_the_fault_page_names_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "faults.md").read_text()))
    known = {name for file in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", file.read_text())}
    assert len(named) > 20
    assert named - known == set()


def test_the_index_lists_every_page_once() -> None:
    docs = ROOT / "docs"
    linked = [link for link in re.findall(r"\]\(([^)#]+)\)", (docs / "README.md").read_text()) if not link.startswith("../")]
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")} - {"README.md"}
    assert len(linked) == len(set(linked))
    assert set(linked) == pages


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in (*(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md"):
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
        assert [link for link in links if not (page.parent / link).exists()] == [], page


def test_every_source_file_that_a_page_names_is_there() -> None:
    rooms = {path.name for path in (ROOT / "src" / "penstock").iterdir() if path.is_dir()}
    for page in (*(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md"):
        named = {name for name in re.findall(r"`(\w+(?:/\w+)+\.py)", page.read_text()) if name.split("/")[0] in rooms}
        assert [name for name in named if not (ROOT / "src" / "penstock" / name).exists()] == [], page


def test_the_architecture_page_has_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {path.stem for path in (ROOT / "src" / "penstock").iterdir() if path.name[0] != "_" and path.suffix in ("", ".py")}
    listed = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE))))
    assert rooms - {"templates"} <= listed


def test_no_file_has_marks_of_an_unsolved_merge():
    files = subprocess.run(
        ["git", "ls-files", "*.md", "*.toml", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    marked = [name for name in files.splitlines() if re.search(r"^(<{7}|>{7}) ", (ROOT / name).read_text(), re.MULTILINE)]
    assert not marked
