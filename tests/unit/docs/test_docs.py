"""What the documents say is so: their samples run, their tables are complete."""

import re
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
