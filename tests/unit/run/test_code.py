"""A run continues with the code that it was started with, or is reported to continue with other code, which is marked."""

import sys
from pathlib import Path

import pytest

from penstock.config import AgentSection, make_config
from penstock.errors import ConfigError
from penstock.events import Events
from penstock.run.folder import RunFolder, author_files, code_changes, open_run_folder, use_code
from penstock.sdk.discovery import Agent, load_agent

AGENT = """
from {helper} import score
from penstock import AgentWorkflow, Grader

class Short(AgentWorkflow):
    async def run(self, ctx):
        return None

class Even(Grader):
    async def grade(self, ctx):
        return score(ctx)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    helper = f"helper_{abs(hash(tmp_path))}"
    (tmp_path / f"{helper}.py").write_text("def score(ctx):\n    return 1.0\n")
    (tmp_path / "unrelated.py").write_text("x = 1\n")
    (tmp_path / "agent.py").write_text(AGENT.format(helper=helper))
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "2*3"}\n')
    yield Project(tmp_path, helper)
    sys.modules.pop(helper, None)


class Project:
    def __init__(self, folder: Path, helper: str) -> None:
        self.path, self.helper = folder, folder / f"{helper}.py"
        settings = {"run": {"name": "r", "folder": str(folder / "runs")}, "dataset": {"train": str(folder / "tasks.jsonl")}}
        self.config = make_config(settings, "here")
        self.reported: list[str] = []

    def agent(self) -> Agent:
        return load_agent(AgentSection(entry=self.path / "agent.py"), {}, {})

    def use(self, **options: bool) -> RunFolder:
        folder, events = open_run_folder(self.config, fresh=False), Events()
        events.listen(lambda kind, fields: self.reported.append(fields["text"]))
        use_code(folder, self.agent(), events, **{"allow_change": False, **options})
        return folder


def test_agents_files_are_entry_and_what_it_imports_from_folder(project):
    assert set(author_files(project.agent())) == {"agent.py", project.helper.name}


def test_edited_code_is_refused_with_the_lines_that_changed(project):
    project.use().add_metrics({"step": 1})
    project.helper.write_text("def score(ctx):\n    return 0.5\n")
    with pytest.raises(ConfigError, match="--allow-code-change") as refused:
        project.use()
    name = project.helper.name
    assert [issue.message for issue in refused.value.issues] == [
        f"{name}, line 2: -     return 1.0",
        f"{name}, line 2: +     return 0.5",
    ]
    assert len(RunFolder(project.path / "runs/r", resumed=True).code_versions()) == 1


def test_a_file_that_nothing_imports_may_change(project):
    project.use().add_metrics({"step": 1})
    (project.path / "unrelated.py").write_text("x = 2\n")
    project.use()


def test_an_allowed_change_is_kept_and_named(project):
    project.use().add_metrics({"step": 1})
    project.helper.write_text("def score(ctx):\n    return 0.5\n")
    folder = project.use(allow_change=True)
    assert [(change.after_step, change.files) for change in code_changes(folder)] == [(1, [project.helper.name])]
    assert project.reported[0].startswith(f"the code changed after step 1 ({project.helper.name})")
    project.use()  # it is the run's code now


def test_code_may_change_before_the_first_step(project):
    project.use().add_evaluation("before-0", 0.5)
    project.helper.write_text("def score(ctx):\n    return 0.5\n")
    assert project.use().evaluations() == {}


def test_older_run_resumes_and_records_its_code(project):
    folder = project.use()
    folder.add_metrics({"step": 1})
    (folder.path / "code.json").unlink()
    assert [version.after_step for version in project.use().code_versions()] == [1]


def test_damaged_record_of_code_does_not_end_run(project):
    folder = project.use()
    (folder.path / "code.json").write_text("{")
    project.use()
    assert "code.json is damaged" in project.reported[0]
    assert len(folder.code_versions()) == 1
