"""The flows on their page run as they stand there."""

import re
from pathlib import Path

from flow_cases import make_task, project, ran

from penstock.records import End

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "claw-r1.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_white_box_flow_grades_itself(tmp_path):
    task = make_task(reward_model={"ground_truth": "42"})
    for reply, reward in (("It is 42", 1.0), ("It is 41", 0.0)):
        with project(tmp_path, BLOCKS[0]) as agent:
            done = ran(agent, [reply], task=task).attempt
        assert (done.end, done.message, done.reward) == (End.COMPLETED, "", reward)


def test_black_box_flow_is_graded_by_rule_of_its_row(tmp_path):
    with project(tmp_path, BLOCKS[1]) as agent:
        done = ran(agent, ["6 times 7 is #### 42"]).attempt
    assert (done.end, done.reward, len(done.steps)) == (End.COMPLETED, 1.0, 1)


def test_listed_flow_is_picked_by_its_name(tmp_path):
    (tmp_path / "flows.yaml").write_text(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0])
    with project(tmp_path, flows=tmp_path / "flows.yaml", flow="gsm8k") as agent:
        done = ran(agent, ["#### 42"], task=make_task(reward_model={"ground_truth": "42"})).attempt
    assert (done.end, done.reward) == (End.COMPLETED, 1.0)


def test_every_flow_of_the_page_is_run():
    assert len(BLOCKS) == 2
