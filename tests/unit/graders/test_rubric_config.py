"""`[grader]` with a rubric: what names it, what it needs, and mistakes in it."""

import pytest

from penstock.config import AgentSection
from penstock.errors import ConfigError
from penstock.graders.rubric import RubricGrader
from penstock.sdk.discovery import check_constructors, open_agent

WORKFLOW = "from penstock import AgentWorkflow, Grader\nclass W(AgentWorkflow):\n    async def run(self, ctx): ...\n"
GRADER = "class G(Grader):\n    async def grade(self, ctx): ...\n"
TABLE = {"name": "rubric", "rubric": "Be right.", "model": "m", "url": "http://127.0.0.1:9/v1"}


def opened(place, table, code=WORKFLOW, **source):
    (place / "agent.py").write_text(code)
    agent = open_agent(AgentSection(entry=place / "agent.py", **source), {}, table)
    check_constructors(agent)
    return agent


@pytest.mark.parametrize("code", [WORKFLOW, WORKFLOW + GRADER])
def test_its_name_goes_before_whatever_grader_the_file_has(tmp_path, code):
    assert (opened(tmp_path, TABLE, code).grader, opened(tmp_path, TABLE, code).grader_name) == (RubricGrader, "rubric")


def test_a_program_and_a_flow_are_judged_too(tmp_path):
    assert opened(tmp_path, TABLE, "", command=("true",), folder=tmp_path).grader is RubricGrader
    flow = (
        "from penstock.sdk.flow import AgentFlowBase\nclass F(AgentFlowBase):\n    async def run(self, sampling, **row): return 1\n"
    )
    assert opened(tmp_path, TABLE, flow).grader is RubricGrader


def test_its_file_lies_next_to_the_agents(tmp_path):
    (tmp_path / "rubric.md").write_text("Be right.")
    table = {key: value for key, value in TABLE.items() if key != "rubric"} | {"path": "rubric.md"}
    assert opened(tmp_path, table).grader_config.path == tmp_path / "rubric.md"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rubric": "", "path": "none.md"}, "none.md: the rubric cannot be read"),
        ({"rubric": "  "}, "one of the two"),
        ({"path": "rubric.md"}, "one of the two"),
        ({"score_max": 0}, "score_min must be below score_max"),
        ({"modle": "x"}, "did you mean 'model'?"),
        ({"url": "", "model": "nobody/x"}, "no provider 'nobody' is known"),
        ({"url": "127.0.0.1:9"}, "write an address"),
        ({"api_key_env": "NO_SUCH_KEY"}, "the environment has no NO_SUCH_KEY; set it"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, change, said):
    with pytest.raises(ConfigError) as raised:
        opened(tmp_path, TABLE | change)
    assert said in str(raised.value) and "\n" not in str(raised.value)
