"""White-box flows over HTTP: what is sampled, what is submitted, and what is refused."""

import pytest
from gateway_cases import TOOL, USER, renderer
from gateway_flow_cases import gateway, generate, open_gateway, opened, step_of, submit

from penstock.errors import GraderError
from penstock.pool import POOLS
from penstock.pool.export.histories import iterate_groups
from penstock.records import End, Group, Sampling
from penstock.train.sequences import exactness, sequences
from penstock_compat.flow import MultiStepAgentFlow, SingleStepSingleTurnAgentFlow
from penstock_compat.gateway.routes import reward_by_rule

TALK = [{"role": "system", "content": "Be brief."}, USER]


async def test_answer_has_the_fields_of_both_forms():
    async with gateway(["It is 42."], engine={"version": 3}) as (bench, session, engine):
        body = {"trajectory_uid": session.rollout_id, "prompt_uid": "p1", "messages": [USER], "max_tokens": 9, "temperature": 0.8}
        answer = (await bench.http(session.token).post("/generate", json=body)).json()
        recorded = (await bench.attempt(session)).steps[0]
        assert (answer["trajectory_uid"], answer["prompt_uid"], answer["step_index"]) == (session.rollout_id, "p1", 0)
        assert (answer["response_text"], answer["stop_reason"], answer["policy_version"]) == ("It is 42.", "stop", 3)
        assert answer["response_ids"] == answer["token_ids"] == list(recorded.completion_ids)
        assert tuple(answer["prompt_ids"]) == engine.prompts[0]
        assert answer["log_probs"] == list(recorded.logprobs) and answer["policy_versions"] == [3] * len(answer["token_ids"])
        assert (engine.samplings[0].max_tokens, engine.samplings[0].temperature) == (9, 0.8)


async def test_sampled_ids_are_returned_and_recorded_unchanged():
    spelt = [*map(ord, "42"), renderer().tokenizer.eos_ids[0]]  # not how "42" would be encoded

    async with open_gateway([spelt]) as (http, bench, _):
        answer = await generate(http)
        assert answer["response_ids"] == spelt and len(answer["log_probs"]) == len(spelt)
        assert (await bench.pool.rollout("t1")).steps[0].completion_ids == tuple(spelt)


async def test_token_ids_are_used_without_a_template():
    async with gateway(["so on"]) as (bench, session, engine):
        params = {"temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.0, "max_tokens": 5, "logprobs": True}
        body = {"prompt_ids": [5, 6, 7], "sampling_params": params}
        answer = (await bench.http(session.token).post("/generate", json=body)).json()
        assert engine.prompts == [(5, 6, 7)] and answer["prompt_ids"] == [5, 6, 7]
        assert set(answer) >= {"token_ids", "log_probs", "stop_reason"}
        assert (engine.samplings[0].temperature, engine.samplings[0].top_p, engine.samplings[0].max_tokens) == (0.5, 0.9, 5)


async def test_missing_sampling_fields_come_from_the_session():
    async with gateway(["Hi."]) as (bench, session, engine):
        session = bench.reopen(session.rollout, sampling=Sampling(temperature=0.25, top_p=0.5, max_tokens=17))
        await generate(bench.http(session.token), session.rollout_id)
        assert (engine.samplings[0].temperature, engine.samplings[0].top_p, engine.samplings[0].max_tokens) == (0.25, 0.5, 17)


async def test_content_that_is_a_conversation_stands_for_its_messages():
    async with open_gateway(["a", "b"]) as (http, _, engine):
        await generate(http, "t1", {"role": "user", "content": TALK})
        await generate(http, "t2", *TALK)
        assert engine.prompts[0] == engine.prompts[1]


async def test_tool_calls_stay_in_the_text():
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6}}\n</tool_call>'

    async with open_gateway([call, "It is 42."]) as (http, _, _):
        first = await generate(http, "t1", USER, tools=[TOOL])
        said = [{"role": "assistant", "content": first["response_text"]}, {"role": "tool", "content": "42"}]
        second = await generate(http, "t1", USER, *said, tools=[TOOL])
        context = first["prompt_ids"] + first["response_ids"]
        assert first["response_text"] == call
        assert second["prompt_ids"][: len(context)] == context and second["step_index"] == 1


async def test_submitted_step_matches_its_record():
    async with gateway(["Hi."]) as (bench, session, _):
        answer = await generate(bench.http(session.token), session.rollout_id)
        false = {"rollout_log_probs": [-9.0] * len(answer["response_ids"]), "policy_version": 77}
        response = await submit(bench.http(session.flow_token), step_of(answer, reward=0.5, **false))
        attempt = await bench.attempt(session)
        assert (response.status_code, response.json()) == (200, {"accepted": 1})
        assert (attempt.grades[0].reward, attempt.grades[0].step, attempt.grades[0].source) == (0.5, 0, "flow")
        assert attempt.steps[0].logprobs == tuple(answer["log_probs"]) and set(attempt.steps[0].versions) == {0}
        assert bench.gateway.counts["replaced:rollout_log_probs"] == bench.gateway.counts["replaced:policy_version"] == 1


async def test_step_that_was_not_sampled_here_is_refused():
    async with gateway(["Hi there."]) as (bench, session, _):
        answer = await generate(bench.http(session.token), session.rollout_id)
        http, right = bench.http(session.flow_token), step_of(answer, reward=1.0)
        cases = {
            "response_ids[0]": right | {"response_ids": [1, *answer["response_ids"][1:]]},
            "prompt_ids[2]": right | {"prompt_ids": [*answer["prompt_ids"][:2], 0, *answer["prompt_ids"][3:]]},
            "are its prompt, not": right
            | {"prompt_ids": [*answer["prompt_ids"], answer["response_ids"][0]], "response_ids": answer["response_ids"][1:]},
            f"response_ids[{len(answer['response_ids'])}]": right | {"response_ids": [*answer["response_ids"], 5]},
        }
        for what, wrong in cases.items():
            response = await submit(http, right, wrong)
            assert (response.status_code, response.json()["code"]) == (409, "not_sampled"), what
            assert what in response.json()["detail"]
        assert (await bench.attempt(session)).grades == ()


ELSEWHERE = {"prompt_ids": [3, 4, 5], "response_ids": [6, 7], "trajectory_uid": "far-1", "prompt_uid": "p7", "policy_version": 2}
NEXT = {**ELSEWHERE, "prompt_ids": [3, 4, 5, 6, 7, 8], "response_ids": [9], "step_index": 1, "is_last": True}


async def test_steps_of_an_unknown_trajectory_are_imported():
    async with open_gateway() as (http, bench, _):
        first = ELSEWHERE | {"rollout_log_probs": [-0.5, -0.25]}
        last = NEXT | {"rollout_log_probs": [-1.0], "reward": 1.0}
        assert (await submit(http, first, channel="val")).json() == {"accepted": 1}
        assert (await submit(http, last)).status_code == (await submit(http, last)).status_code == 200
        attempt = await bench.pool.rollout("far-1")
        one, two = attempt.steps
        assert (attempt.ref.channel, attempt.end, attempt.reward) == ("val", End.COMPLETED, 1.0)
        assert [mark.note for mark in attempt.marks if mark.step is None] == ["imported"]
        assert (one.completion_ids, one.logprobs, one.versions, one.behaviour_known) == ((6, 7), (-0.5, -0.25), (2, 2), True)
        assert [(node.parent, node.token_ids) for node in attempt.nodes] == [(None, (3, 4, 5)), (0, (8,))]
        assert (two.completion_ids, exactness(attempt).rate) == ((9,), 1.0)


async def test_imported_steps_without_logprobs_are_not_trained():
    async with open_gateway() as (http, bench, _):
        given = ELSEWHERE | {"rollout_log_probs": [-0.5, -0.25]}
        assert (await submit(http, given, NEXT | {"reward": 1.0})).status_code == 200
        attempt = await bench.pool.rollout("far-1")
        group = Group(id="g", seq=0, task=await bench.pool.task("far-1"), channel="train", rollouts=(attempt,))
        (only,) = sequences(group, [1.0], recompute=True).sequences
        assert (only.token_ids, only.trained) == ((3, 4, 5, 6, 7), (False, False, False, True, True))
        assert {mark.note for mark in attempt.marks if not mark.trainable} == {"imported without log-probabilities"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt_ids": []}, "prompt_ids are empty"),
        ({"response_ids": [99999]}, "token 99999"),
        ({"policy_version": -1}, "counted from 0"),
    ],
)
async def test_bad_imported_steps_are_refused(change, words):
    async with open_gateway() as (http, bench, _):
        response = await submit(http, ELSEWHERE | change)
        assert response.status_code == 422 and words in response.json()["detail"]
        assert not await bench.pool.channels()


async def test_last_step_completes_the_rollout():
    async with open_gateway(["A", "B", "C"]) as (http, bench, _):
        answers = [await generate(http, "t1", {"role": "user", "content": text}) for text in ("a", "b", "c")]
        assert (await submit(http, step_of(answers[0]))).status_code == 200
        assert (await submit(http, step_of(answers[2], reward=1.0, is_last=True))).status_code == 200
        attempt = await bench.pool.rollout("t1")
        assert (attempt.end, attempt.reward) == (End.COMPLETED, 1.0)
        assert {mark.step: (mark.trainable, mark.note) for mark in attempt.marks} == {
            0: (True, "submitted by its flow"),
            1: (False, "not submitted by its flow"),
        }
        assert (await http.post("/generate", json={"trajectory_uid": "t1", "messages": [USER]})).status_code == 410


async def test_runner_ends_its_own_rollout():
    async with gateway(["Hi."]) as (bench, session, _):
        answer = await generate(bench.http(session.token), session.rollout_id)
        flow = bench.http(session.flow_token)
        assert (await submit(flow, step_of(answer, is_last=True))).status_code == 200
        assert (await bench.attempt(session)).end is None
        late = await bench.http(session.token).post("/v1/chat/completions", json={"messages": [USER]})
        assert (late.status_code, late.json()["error"]["code"]) == (410, "rollout_complete")
        assert (await flow.post(f"/complete_trajectory/{session.rollout_id}", json={"reward": 1})).status_code == 410
        assert (await bench.attempt(session)).grades == ()


async def test_repeated_submission_is_accepted_once():
    async with open_gateway(["Hi."]) as (http, bench, _):
        answer = await generate(http)
        last = step_of(answer, reward=1.0, is_last=True)
        assert [(await submit(http, last)).json() for _ in range(3)] == [{"accepted": 1}] * 3
        assert (await submit(http, last | {"reward": 0.0})).status_code == 410
        attempt = await bench.pool.rollout("t1")
        assert (len(attempt.steps), len(attempt.grades), attempt.reward) == (1, 1, 1.0)


async def test_two_rewards_for_one_step_conflict_and_the_first_stays():
    async with open_gateway(["Hi."]) as (http, bench, _):
        answer = await generate(http)
        assert (await submit(http, step_of(answer, reward=1.0))).status_code == 200
        assert (await submit(http, step_of(answer, reward=0.0))).status_code == 409
        assert (await bench.pool.rollout("t1")).grades[0].reward == 1.0


async def test_reward_above_limit_is_rejected():
    async with open_gateway(["Hi."]) as (http, bench, _):
        answer = await generate(http)
        for response in (
            await submit(http, step_of(answer, reward=1e308)),
            await http.post("/complete_trajectory/t1", json={"reward": 1e308}),
        ):
            assert (response.status_code, "1000000000" in response.text) == (422, True)
        assert (await bench.pool.rollout("t1")).grades == ()


async def test_equal_steps_are_matched_by_index():
    async with open_gateway(["Same.", "Same."]) as (http, bench, _):
        first, second = await generate(http), await generate(http)
        assert first["response_ids"] == second["response_ids"]
        await submit(http, step_of(first, reward=0.0, step_index=0), step_of(second, reward=1.0, step_index=1))
        assert {grade.step: grade.reward for grade in (await bench.pool.rollout("t1")).grades} == {0: 0.0, 1: 1.0}


async def test_submission_of_several_rollouts_is_atomic():
    async with open_gateway(["Hi.", "Ho."]) as (http, bench, _):
        one, other = await generate(http, "t1"), await generate(http, "t2")
        wrong = step_of(other, reward=1.0) | {"response_ids": [1]}
        assert (await submit(http, step_of(one, reward=1.0, is_last=True), wrong)).status_code == 409
        assert (await bench.pool.rollout("t1")).grades == ()
        both = [step_of(one, reward=1.0, is_last=True), step_of(other, reward=0.0)]
        assert (await submit(http, *both)).json() == {"accepted": 2}
        assert ((await bench.pool.rollout("t1")).end, (await bench.pool.rollout("t2")).end) == (End.COMPLETED, None)
        assert (await submit(http, step_of(one | {"trajectory_uid": "elsewhere"}), wrong)).status_code == 409
        assert "elsewhere" not in {group.rollouts[0].ref.id async for group in iterate_groups(bench.pool, "train")}


async def test_submitting_nothing_accepts_nothing():
    async with open_gateway() as (http, _, _):
        assert (await submit(http)).json() == {"accepted": 0}


async def test_retried_generation_makes_one_step():
    async with gateway(["Hi."]) as (bench, session, engine):
        http = bench.http(session.token)
        http.headers["idempotency-key"] = "turn-1"
        answers = [await generate(http, session.rollout_id) for _ in range(3)]
        assert answers[0] == answers[1] == answers[2] and len(engine.prompts) == 1
        assert len((await bench.attempt(session)).steps) == 1


async def test_body_that_names_another_rollout_is_refused():
    async with gateway(["Hi."]) as (bench, session, _):
        other = await bench.rollout("train-1")
        body = {"trajectory_uid": other.rollout_id, "messages": [USER]}
        response = await bench.http(session.token).post("/generate", json=body)
        assert (response.status_code, response.json()["code"]) == (403, "rollout_mismatch")
        flow = bench.http(session.flow_token)
        answer = await generate(bench.http(other.token), other.rollout_id)
        assert (await submit(flow, step_of(answer, reward=1.0))).status_code == 403
        for path in (f"/complete_trajectory/{other.rollout_id}", f"/{other.token}/1/v1/complete_trajectory"):
            assert (await flow.post(path, json={"reward": 1})).status_code == 403
        assert (await flow.post(f"/{other.rollout_id}/1/register_trajectory")).status_code == 403
        assert (await bench.attempt(other)).grades == ()


async def test_reward_is_asked_of_the_judge_in_both_forms():
    async with gateway(["Hi."]) as (bench, session, _):
        asked = []

        async def judge(rollout_id, messages, fields):
            asked.append((rollout_id, [message["content"] for message in messages], dict(fields)))
            return 0.75

        reply = await generate(bench.http(session.token), session.rollout_id)
        flow = bench.http(session.flow_token)
        by_words = {"trajectory_uid": session.rollout_id, "messages": TALK, "dataset_fields": {"ground_truth": "42"}}
        assert (await flow.post("/compute_reward", json=by_words)).status_code == 503
        bench.gateway.reward_function = judge
        answer = (await flow.post("/compute_reward", json=by_words)).json()
        assert answer == {"reward": 0.75, "reward_score": 0.75, "reward_extra_info": {}}
        by_ids = {"prompt_ids": reply["prompt_ids"], "response_ids": reply["response_ids"], "extra_fields": {"a": 1}}
        assert (await flow.post("/compute_reward", json=by_ids)).status_code == 200
        assert asked == [
            (session.rollout_id, ["Be brief.", USER["content"]], {"ground_truth": "42"}),
            (session.rollout_id, [USER["content"], "Hi."], {"a": 1}),
        ]


@pytest.mark.parametrize(("error", "status"), [(GraderError("no rule"), 422), (TimeoutError(), 503)])
async def test_failing_reward_function_has_its_own_status(error, status):
    async with gateway() as (bench, session, _):

        async def judge(rollout_id, messages, fields):
            raise error

        bench.gateway.reward_function = judge
        response = await bench.http(session.flow_token).post("/compute_reward", json={"messages": [USER]})
        assert (response.status_code, response.json()["code"]) == (status, "not_judged")


async def test_what_a_flow_did_survives_a_restart_of_the_gateway(tmp_path):
    pool = POOLS.load("sqlite")(tmp_path)
    async with opened(["One.", "Two."], is_open=True, pool=pool) as (bench, _):
        first = await generate(bench.http())
        await submit(bench.http(), step_of(first, reward=0.25))
    async with opened(["Two."], is_open=True, pool=pool) as (bench, _):
        said = {"role": "assistant", "content": first["response_text"]}
        second = await generate(bench.http(), "t1", USER, said, USER)
        context = first["prompt_ids"] + first["response_ids"]
        assert second["step_index"] == 1 and second["prompt_ids"][: len(context)] == context
        await submit(bench.http(), step_of(first, reward=0.25), step_of(second, reward=0.5, is_last=True))
    async with opened(is_open=True, pool=pool) as (bench, _):
        assert (await bench.http().post("/generate", json={"trajectory_uid": "t1", "messages": [USER]})).status_code == 410
        assert (await pool.rollout("t1")).reward == 0.75
    await pool.close()


BAD_GENERATE = [
    b"",
    b"[]",
    b"not json",
    b"{}",
    b'{"messages": []}',
    b'{"messages": "hi"}',
    b'{"messages": [1]}',
    b'{"messages": [{"content": "no role"}]}',
    b'{"messages": [{"role": "user", "content": [{"role": "user"}, 1]}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "prompt_ids": [1]}',
    b'{"prompt_ids": []}',
    b'{"prompt_ids": [-1]}',
    b'{"prompt_ids": [999999]}',
    b'{"prompt_ids": [1.5]}',
    b'{"prompt_ids": [1], "sampling_params": 3}',
    b'{"prompt_ids": [1], "sampling_params": {"temperature": -1}}',
    b'{"prompt_ids": [1], "sampling_params": {"temperature": 1}, "temperature": 2}',
    b'{"prompt_ids": [1], "sampling_params": {"repetition_penalty": 1.3}}',
    b'{"prompt_ids": [1], "image_data": ["x"]}',
    b'{"prompt_ids": [1], "n": 2}',
    b'{"prompt_ids": [1], "stream": true}',
    b'{"prompt_ids": [1], "trajectory_uid": 7}',
    b'{"prompt_ids": [1], "trajectory_uid": "a/b"}',
    b'{"prompt_ids": [1], "prompt_uid": 7}',
    b'{"prompt_ids": [1], "trajectory_uid": "mk-x.y"}',
]
BAD_BODIES = [
    ("/submit_steps", b'{"steps": 1}'),
    ("/submit_steps", b"{}"),
    ("/submit_steps", b"\xff"),
    ("/submit_steps", b'{"steps": [{}]}'),
    ("/submit_steps", b'{"steps": [{"prompt_ids": [1], "response_ids": [2]}]}'),
    ("/submit_steps", b'{"steps": [{"prompt_ids": ["1"], "response_ids": [2], "trajectory_uid": "t1"}]}'),
    ("/submit_steps", b'{"steps": [{"prompt_ids": [1], "response_ids": [99999999999], "trajectory_uid": "t1"}]}'),
    ("/submit_steps", b'{"steps": [{"prompt_ids": [1], "response_ids": [2], "trajectory_uid": "t1", "reward": NaN}]}'),
    ("/submit_steps", b'{"steps": [{"prompt_ids": [1], "response_ids": [2], "trajectory_uid": "t1", "reward": true}]}'),
    ("/submit_steps", b'{"steps": [{"prompt_ids": [1], "response_ids": [2], "trajectory_uid": "t1", "rollout_log_probs": []}]}'),
    ("/compute_reward", b"{}"),
    ("/compute_reward", b'{"messages": 3}'),
    ("/compute_reward", b'{"prompt_ids": [1]}'),
    ("/t1/1/v1/register_trajectory", b'{"channel": 1}'),
    ("/t1/1/v1/register_trajectory", b'{"channel": "a b"}'),
    ("/t1/1/v1/register_trajectory", b'{"metadata": []}'),
    ("/t1/1/v1/register_trajectory", b'{"sampling": {"heat": 1}}'),
    ("/t1/1/v1/register_trajectory", b'{"metadata": {"sampling": {"temperature": "hot"}}}'),
    ("/t1/1/v1/register_trajectory", b'{"metadata": {"penstock.sampling": {"a": 1}}}'),
    ("/$/1/v1/register_trajectory", b"{}"),
    ("/t1/1/v1/complete_trajectory", b'{"reward": "1"}'),
    ("/t1/1/v1/complete_trajectory", b'{"reward": Infinity}'),
    ("/t1/1/v1/complete_trajectory", b'{"reward"'),
]


@pytest.mark.parametrize(("path", "body"), [*(("/generate", body) for body in BAD_GENERATE), *BAD_BODIES])
async def test_bad_body_is_a_422(path, body):
    async with open_gateway() as (http, bench, engine):
        response = await http.post(path, content=body)
        assert response.status_code == 422, response.text
        assert response.json()["detail"]
        assert await bench.pool.channels() in ([], ["train"]) and not engine.prompts
        assert (await bench.pool.stats()).ends == {}


async def test_schema_error_says_where_it_is():
    async with open_gateway() as (http, _, _):
        response = await submit(http, {"prompt_ids": [1], "trajectory_uid": "t1"})
        assert response.json()["detail"][0]["loc"] == ["body", "steps", 0, "response_ids"]


async def test_long_prompt_is_refused():
    async with open_gateway(engine={"context_length": 40}) as (http, _, engine):
        response = await http.post("/generate", json={"trajectory_uid": "t1", "prompt_ids": [5] * 40})
        assert (response.status_code, response.json()["code"]) == (400, "context_length_exceeded")
        assert not engine.prompts


async def test_unknown_fields_are_counted():
    async with open_gateway(["Hi."]) as (http, bench, _):
        answer = await generate(http, "t1", USER, mood="good")
        await submit(http, step_of(answer, colour="red", routed_experts=[1]), channel="val")
        names = ("mood", "colour", "routed_experts", "channel")
        assert [bench.gateway.counts[f"ignored:{name}"] for name in names] == [1] * 4


@pytest.mark.parametrize(
    ("flow", "script", "steps_taken"),
    [(SingleStepSingleTurnAgentFlow, ["42"], 1), (MultiStepAgentFlow, ["so", "#### 42"], 2)],
)
async def test_built_in_flow_started_with_a_uid_alone_works(flow, script, steps_taken):
    """As Claw-R1's worker starts it: the row's columns and `uid`, nothing else."""

    async with opened(script, is_open=True, serves=True) as (bench, _):
        bench.gateway.reward_function = reward_by_rule
        made = flow(gateway_url=bench.gateway.base_url.removesuffix("/v1"))
        row = {"raw_prompt": [USER], "uid": "group-7", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "42"}}
        assert await made.run({"temperature": 1.0}, **row) == steps_taken
        (group,) = [group async for group in iterate_groups(bench.pool, "train")]
        (attempt,) = group.rollouts
        assert (attempt.end, len(attempt.steps), group.task.metadata["prompt_uid"]) == (End.COMPLETED, steps_taken, "group-7")
