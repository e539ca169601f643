"""Flows from row to reward: through the same runner, gateway and pool as any agent, white box and black box."""

import pytest
from flow_cases import ASK, make_task, project, ran
from gateway_cases import CORPUS

from penstock.records import End
from penstock.testing import ScriptedReply, write_tokenizer

SINGLE = """
@register("my_agent_flow")
class MyAgentFlow(SingleStepSingleTurnAgentFlow):
    async def run(self, sampling_params, **kwargs) -> int:
        messages = [{"role": "user", "content": kwargs["raw_prompt"]}]
        text, response_ids, prompt_ids = await self.gateway_generate(
            trajectory_uid=kwargs["trajectory_uid"],
            prompt_uid=kwargs["prompt_uid"],
            messages=messages,
        )
        step = Step(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            reward=0.0,
            trajectory_uid=kwargs["trajectory_uid"],
            prompt_uid=kwargs["prompt_uid"],
            step_index=0,
            is_last=True,
        )
        await self.gateway_submit_steps([step])
        return 1
"""
TOOL = """
class ToolAgentFlow(MultiStepAgentFlow):
    tools = MappingProxyType({"multiply": lambda a, b: a * b})

    async def run(self, sampling_params, **kwargs) -> int:
        messages = [{"role": "user", "content": kwargs["task"]}]
        uids = {"trajectory_uid": kwargs["trajectory_uid"], "prompt_uid": kwargs["prompt_uid"]}
        step_index = 0
        while True:
            text, response_ids, prompt_ids = await self.gateway_generate(messages=messages, **uids)
            is_last = self.is_terminal(text)
            step = Step(prompt_ids=prompt_ids, response_ids=response_ids, step_index=step_index, is_last=is_last, **uids)
            await self.gateway_submit_steps([step])
            if is_last:
                break
            messages.append({"role": "assistant", "content": text})
            tool_result = await self.execute_tool(text)
            messages.append({"role": "tool", "content": tool_result})
            step_index += 1
        return step_index + 1
"""
BLACK_BOX = """
from openai import AsyncOpenAI

class Box(BlackBoxAgentFlowBase):
    async def _run_agent(self, base_url, kwargs):
        async with AsyncOpenAI(base_url=base_url, api_key="not-needed") as client:
            messages = list(kwargs["raw_prompt"])
            for turn in (1, 2):
                answer = await client.chat.completions.create(model="default", messages=messages)
                messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "Sure?"}]
        return turn

    async def final_reward(self, base_url, kwargs):
        return kwargs.get("worth")
"""
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'


@pytest.mark.parametrize("executor", ["inline", "process"])
def test_single_step_flow_grades_itself(tmp_path, executor):
    with project(tmp_path, SINGLE) as agent:
        attempt, engine = ran(agent, ["It is 42."], executor=executor)
    (grade,) = attempt.grades
    assert (attempt.end, attempt.message, attempt.reward) == (End.COMPLETED, "", 0.0)
    assert (grade.source, grade.step, len(attempt.steps)) == ("flow", 0, 1)
    assert (engine.samplings[0].temperature, engine.samplings[0].max_tokens) == (0.8, 200)
    assert attempt.nodes[0].messages == (ASK,)


def test_tool_flow_turns_continue_with_the_same_tokens(tmp_path):
    with project(tmp_path, TOOL) as agent:
        found = ran(agent, [CALL, "#### 42"], task=make_task(prompt=(), task="What is 6 times 7?"))
    attempt = found.attempt
    assert (attempt.end, attempt.message, attempt.reward) == (End.COMPLETED, "", 1.0)
    assert [node.reason for node in attempt.nodes] == [None, None]
    assert attempt.nodes[1].parent == 0 and "<tool_response>\n42\n" in found.prompts[1]
    assert [(mark.step, mark.trainable) for mark in attempt.marks] == [(0, True), (1, True)]


def test_without_a_reward_of_the_flow_the_grader_is_asked(tmp_path):
    grader = "\nclass Judge(Grader):\n    async def grade(self, ctx):\n        return 0.25 if ctx.label == '42' else 0.0\n"
    with project(tmp_path, SINGLE.replace("reward=0.0", "reward=None") + grader) as agent:
        attempt = ran(agent, ["It is 42."]).attempt
    assert [(grade.source, grade.reward) for grade in attempt.grades] == [("Judge", 0.25)]


@pytest.mark.parametrize(("worth", "reward", "source"), [(0.5, 0.5, "flow"), (None, 1.0, "RuleGrader")])
def test_black_box_calls_base_url_and_calls_are_steps(tmp_path, worth, reward, source):
    with project(tmp_path, BLACK_BOX) as agent:
        attempt = ran(agent, ["Let me think.", "#### 42"], task=make_task(worth=worth)).attempt
    assert (attempt.end, attempt.message, attempt.reward) == (End.COMPLETED, "", reward)
    assert ([grade.source for grade in attempt.grades], len(attempt.steps)) == ([source], 2)


def test_black_box_in_process(tmp_path):
    with project(tmp_path, BLACK_BOX) as agent:
        attempt = ran(agent, ["Hm.", "#### 41"], executor="process").attempt
    assert (attempt.end, attempt.message, attempt.reward, len(attempt.steps)) == (End.COMPLETED, "", 0.0, 2)


def test_row_names_its_flow(tmp_path):
    with project(tmp_path, SINGLE + TOOL, flow="my_agent_flow") as agent:
        rewards = [
            ran(agent, ["#### 42"], task=make_task(task="6 * 7?", agent_name=name)).attempt.reward
            for name in (None, "my_agent_flow", "ToolAgentFlow", "single_step_single_turn_agent")
        ]
    assert rewards == [0.0, 0.0, 1.0, 1.0]


def test_keys_of_yaml_list_reach_constructor_wherever_it_runs(tmp_path):
    (tmp_path / "listed_patient.py").write_text(
        "from penstock_compat.flow import BlackBoxAgentFlowBase\n"
        "class Patient(BlackBoxAgentFlowBase):\n"
        "    def __init__(self, patience, words=(), **kwargs):\n"
        "        super().__init__(**kwargs)\n"
        "        self.said = f'{patience} {list(words)}'\n"
        "    async def _run_agent(self, base_url, kwargs):\n"
        "        raise RuntimeError(f\"{self.said} {kwargs['question']} {sorted(kwargs)}\")\n"
    )
    flows = tmp_path / "flows.yaml"
    flows.write_text("- name: patient\n  _target_: listed_patient.Patient\n  patience: 3\n  words: [a]\n")
    columns = ["data_source", "prompt_uid", "question", "raw_prompt", "trajectory_uid", "uid"]
    with project(tmp_path, flows=flows) as agent:
        for executor in ("inline", "process"):
            attempt = ran(agent, [], task=make_task(question="Q?"), executor=executor).attempt
            assert (attempt.end, attempt.reward) == (End.AGENT_ERROR, None)
            assert f"RuntimeError: 3 ['a'] Q? {columns} (listed_patient.py, line 7)" in attempt.message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ValueError('no idea')", "ValueError: no idea (agent.py, line"),
        ("return 0", "flow 'Bad' returned 0, which says that it failed"),
        ("return 1", "made no model call"),
        ("await self.gateway_generate('another', 'p', kwargs['raw_prompt'])", "POST /generate: 403"),
        ("await self.gateway_submit_steps([Step([1], [2], is_last=True)])", "POST /submit_steps: 409"),
        ("await self.gateway_generate([10**6], {})", "POST /generate: 422"),
        ("await self.gateway_generate(messages=[{'content': 'x'}])", "POST /generate: 422"),
    ],
)
def test_flow_that_fails_ends_its_own_rollout_with_one_line(tmp_path, body, words):
    text = f"class Bad(AgentFlowBase):\n    async def run(self, sampling_params, **kwargs):\n        {body}\n"
    with project(tmp_path, text) as agent:
        attempt = ran(agent, ["never said"]).attempt
    assert (attempt.end, attempt.reward) == (End.AGENT_ERROR, None)
    assert words in attempt.message and "\n" not in attempt.message


def test_engine_that_fails_is_not_laid_at_flows_door(tmp_path):
    with project(tmp_path, SINGLE) as agent:
        attempt = ran(agent, [ScriptedReply("never said", fail_after=1)]).attempt
    assert attempt.end is End.ENGINE_ERROR


def test_built_in_multi_step_flow_is_graded_by_the_gateway(tmp_path):
    with project(tmp_path, flow="multi_step_agent") as agent:
        attempt = ran(agent, ["I think it is 41.", "#### 42"]).attempt
    assert (attempt.end, attempt.message, attempt.reward) == (End.COMPLETED, "", 1.0)
    assert [(grade.source, grade.step) for grade in attempt.grades] == [("flow", 1)]


def test_built_in_loop_runs_subclasss_tools_within_its_turns(tmp_path):
    text = "class Calc(MultiStepAgentFlow):\n    tools = MappingProxyType({'multiply': lambda a, b: a * b})\n"
    with project(tmp_path, text) as agent:
        done = ran(agent, [CALL, "#### 42"])
        stubborn = ran(agent, [CALL] * 4).attempt
    assert (done.attempt.reward, len(done.attempt.steps), '"name": "multiply"' in done.prompts[0]) == (1.0, 2, True)
    assert (stubborn.end, stubborn.reward, len(stubborn.steps)) == (End.COMPLETED, 0.0, 3)


def test_flow_sees_validation_and_its_channel_is_kept(tmp_path):
    text = SINGLE.replace("reward=0.0", "reward=float(kwargs.get('channel') == 'val')")
    with project(tmp_path, text) as agent:
        assert ran(agent, ["42"], channel="val").attempt.reward == 1.0
        assert ran(agent, ["42"]).attempt.reward == 0.0


@pytest.mark.slow  # imports transformers
def test_flow_may_render_with_the_models_own_tokenizer(tmp_path):
    text = """
class Render(AgentFlowBase):
    async def run(self, sampling_params, **kwargs):
        ids = await self.apply_chat_template(kwargs["raw_prompt"])
        bare = await self.apply_chat_template(kwargs["raw_prompt"], remove_system_prompt=True)
        assert ids[len(self.system_prompt):] == bare and "helpful" in self.tokenizer.decode(self.system_prompt)
        answer = await self.gateway_generate(ids, sampling_params)
        step = Step(ids, answer["token_ids"], rollout_log_probs=answer["log_probs"], reward=1.0, is_last=True)
        assert await self.gateway_submit_steps([step]) == 1
        return self.config.actor_rollout_ref.rollout.n
"""
    folder = write_tokenizer(tmp_path / "model", corpus=CORPUS, vocab_size=420)
    with project(tmp_path, text) as agent:
        attempt = ran(agent.kind.with_run_settings(agent, model=folder, group_size=4), ["It is 42."]).attempt
    assert (attempt.end, attempt.message, attempt.reward) == (End.COMPLETED, "", 1.0)
