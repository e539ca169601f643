"""What a flow says to the gateway, and how it takes the answers: both forms of each call, each token on its own routes."""

import asyncio
import contextlib
import json

import pytest
from aiohttp import web

from penstock.errors import ConfigError, RequestError
from penstock.sdk.clients import Clients
from penstock.sdk.routing import RolloutContext
from penstock_compat.flow import AgentFlowBase, BlackBoxAgentFlowBase, SubmittedStep

MESSAGES = [{"role": "user", "content": "?"}]
REPLY = {
    "response_text": "four",
    "response_ids": [7, 8],
    "prompt_ids": [1, 2],
    "token_ids": [7, 8],
    "log_probs": [-0.5, -0.25],
    "stop_reason": "stop",
    "policy_version": 3,
    "policy_versions": [3, 3],
    "step_index": 0,
}
ANSWERS = {
    "/generate": REPLY,
    "/submit_steps": {"accepted": 1},
    "/compute_reward": {"reward": 0.5, "reward_score": 0.5, "reward_extra_info": {"by": "rule"}},
    "/mk-r/train-0/v1/register_trajectory": {"status": "ok"},
    "/mk-r/train-0/v1/complete_trajectory": {"status": "ok"},
}


class Flow(AgentFlowBase):
    async def run(self, sampling_params, **kwargs):
        return 1


class Double:
    """A server that speaks the gateway's wire, and remembers what it received."""

    def __init__(self, answers=ANSWERS):
        self.answers = dict(answers)
        self.calls = []
        self.url = ""

    async def answer(self, request):
        body = await request.json() if request.can_read_body else None
        self.calls.append((request.path_qs, request.headers.get("authorization"), body))
        answer = self.answers.get(request.path, {})
        if request.path == "/init_trajectory":
            answer = {"trajectory_uid": "train-0.0.1", "base_url": f"{self.url}/mk-r/1/v1"}
        if isinstance(answer, list):
            answer = answer.pop(0)
        if isinstance(answer, web.Response):
            return answer
        return web.json_response(answer)

    @property
    def reported(self):
        """The last body."""
        return self.calls[-1][2]


@contextlib.asynccontextmanager
async def serving(double):
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", double.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    double.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    try:
        yield double
    finally:
        await runner.cleanup()


def refusal(status, **body):
    return web.Response(status=status, body=json.dumps(body), content_type="application/json", headers={"retry-after": "0"})


def play(act, *, answers=None, channel="train", flow=Flow):
    """Run `act(flow)` in a rollout against the double; what it gave, and the double."""

    async def main():
        async with asyncio.timeout(30), serving(Double({**ANSWERS, **(answers or {})})) as double:
            clients = Clients()
            context = RolloutContext(
                base_url=f"{double.url}/v1",
                api_key="mk-r",
                rollout_id="train-0.0.1",
                group_id="train-0",
                channel=channel,
                flow_token="fk-r",
                clients=clients,
            )
            try:
                with context:
                    return await act(flow()), double
            finally:
                await clients.close()

    return asyncio.run(main())


def test_seeds_form_of_generate_unpacks_into_three_and_carries_rest():
    reply, double = play(lambda flow: flow.gateway_generate("train-0.0.1", "train-0", MESSAGES, max_tokens=5, stop=None))
    text, response_ids, prompt_ids = reply
    assert (text, response_ids, prompt_ids) == ("four", [7, 8], [1, 2])
    assert (reply.log_probs, reply.stop_reason, reply.policy_version, reply.step_index) == ([-0.5, -0.25], "stop", 3, 0)
    shown = {"trajectory_uid": "train-0.0.1", "prompt_uid": "train-0", "messages": MESSAGES, "max_tokens": 5}
    assert double.calls == [("/generate", "Bearer mk-r", shown)]


@pytest.mark.parametrize("positional", [True, False])
def test_codes_form_of_generate_gives_a_dictionary(positional):
    params = {"temperature": 0.5}

    async def act(flow):
        if positional:
            return await flow.gateway_generate((1, 2), params)
        return await flow.gateway_generate(prompt_ids=[1, 2], sampling_params=params, image_data=None)

    answer, double = play(act)
    assert (answer["token_ids"], answer["log_probs"], answer["stop_reason"]) == ([7, 8], [-0.5, -0.25], "stop")
    assert (double.reported["prompt_ids"], double.reported["sampling_params"]) == ([1, 2], params)


def test_call_that_names_no_rollout_is_the_running_ones():
    _, double = play(lambda flow: flow.gateway_generate(messages=MESSAGES))
    assert (double.reported["trajectory_uid"], double.reported["prompt_uid"]) == ("train-0.0.1", "train-0")


@pytest.mark.parametrize(
    "call",
    [
        lambda flow: flow.gateway_generate(),
        lambda flow: flow.gateway_generate("t", "p"),
        lambda flow: flow.gateway_generate("t", "p", MESSAGES, 5),
        lambda flow: flow.gateway_generate("t", trajectory_uid="t", messages=MESSAGES),
        lambda flow: flow.gateway_generate([1], messages=MESSAGES),
        lambda flow: flow.gateway_compute_reward([1]),
        lambda flow: flow.gateway_compute_reward("t"),
    ],
)
def test_arguments_that_fit_neither_form_are_type_error_with_both(call):
    with pytest.raises(TypeError, match="trajectory_uid"):
        play(call)


def test_pictures_are_refused_instead_of_dropped():
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    for call in (
        lambda flow: flow.gateway_generate([1], {}, image_data=["x"]),
        lambda flow: flow.process_vision_info(picture),
        lambda flow: flow.apply_chat_template(MESSAGES, images=["x"]),
    ):
        with pytest.raises(ValueError, match="text"):
            play(call)
    assert play(lambda flow: flow.process_vision_info(MESSAGES))[0] == {}


def test_steps_go_with_flow_token_and_rollouts_own_channel():
    step = SubmittedStep([1, 2], [7], is_last=True)
    accepted, double = play(lambda flow: flow.gateway_submit_steps([step, {"prompt_ids": [1], "response_ids": []}]), channel="val")
    path, token, body = double.calls[0]
    assert (accepted, path, token) == (1, "/submit_steps?channel=val", "Bearer fk-r")
    assert [(each["trajectory_uid"], each["prompt_uid"]) for each in body["steps"]] == [("train-0.0.1", "train-0")] * 2
    _, double = play(lambda flow: flow.gateway_submit_steps([], channel="other"))
    assert double.calls[0][0] == "/submit_steps?channel=other"


def test_seeds_form_of_reward_is_number_that_reads_like_answer():
    reward, double = play(lambda flow: flow.gateway_compute_reward("train-0.0.1", MESSAGES, {"ground_truth": "4"}))
    assert (reward, reward["reward_score"], reward.get("nothing", 1), reward + 1) == (0.5, 0.5, 1, 1.5)
    assert double.reported == {"trajectory_uid": "train-0.0.1", "messages": MESSAGES, "dataset_fields": {"ground_truth": "4"}}


def test_codes_form_of_reward_gives_the_answer():
    answer, double = play(lambda flow: flow.gateway_compute_reward([1], [2], extra_fields={"a": 1}))
    assert answer == ANSWERS["/compute_reward"]
    assert (double.reported["prompt_ids"], double.reported["extra_fields"], double.calls[0][1]) == ([1], {"a": 1}, "Bearer fk-r")


@pytest.mark.parametrize(
    ("body", "words", "code"),
    [
        ({"detail": "not sampled here", "code": "not_sampled"}, "POST /submit_steps: 409: not sampled here", "not_sampled"),
        ({"error": {"message": "no", "code": "engine_error"}}, "409: no", "engine_error"),
        ({"detail": [{"loc": ["body", "steps"], "msg": "wrong"}]}, "409: body.steps: wrong", "refused"),
        ({}, "409: {}", "refused"),
    ],
)
def test_refusal_is_reported_in_gateways_own_words(body, words, code):
    with pytest.raises(RequestError) as caught:
        play(lambda flow: flow.gateway_submit_steps([]), answers={"/submit_steps": refusal(409, **body)})
    assert words in str(caught.value)
    assert (caught.value.status, caught.value.code) == (409, code)


def test_busy_engine_is_asked_again_but_not_for_ever():
    busy = {"detail": "busy", "code": "engine_busy"}
    _, double = play(
        lambda flow: flow.gateway_generate([1]), answers={"/generate": [refusal(503, **busy), refusal(429, **busy), REPLY]}
    )
    assert len(double.calls) == 3
    with pytest.raises(RequestError, match="503"):
        play(lambda flow: flow.gateway_generate([1]), answers={"/generate": [refusal(503, **busy) for _ in range(3)]})


def test_reward_that_nobody_can_give_is_asked_for_once():
    with pytest.raises(RequestError, match="503"):
        play(
            lambda flow: flow.gateway_compute_reward("t", MESSAGES), answers={"/compute_reward": [refusal(503, detail="no judge")]}
        )


def test_gateway_that_is_not_there_is_named():
    flow = Flow(gateway_url="http://127.0.0.1:9/")
    assert flow.gateway_url == "http://127.0.0.1:9"
    with pytest.raises(RequestError, match=r"http://127\.0\.0\.1:9"):
        asyncio.run(flow.gateway_generate([1]))
    with pytest.raises(ConfigError, match="gateway"):
        asyncio.run(Flow().gateway_generate([1]))


def test_flow_outside_of_rollouts_sends_no_token():
    async def once():
        async with serving(Double()) as double:
            reply = await Flow(gateway_url=double.url).gateway_generate("t", "p", MESSAGES)
            return reply.text, double.calls[0][1]

    assert asyncio.run(once()) == ("four", None)


def test_connections_of_one_event_loop_are_not_used_in_another():
    async def once(clients):
        async with serving(Double()) as double:
            context = RolloutContext(base_url=f"{double.url}/v1", api_key="mk-r", clients=clients)
            with context:
                flow = Flow()
                replies = [await flow.gateway_generate(messages=MESSAGES) for _ in range(2)]
            await clients.close()
            return [reply.text for reply in replies]

    shared = Clients()
    assert [asyncio.run(once(shared)) for _ in range(2)] == [["four", "four"]] * 2


def test_rollouts_tokens_are_not_sent_to_another_gateway():
    async def act(flow):
        async with serving(Double()) as other:
            await Flow(gateway_url=other.url).gateway_generate("t", "p", MESSAGES)
            await Flow(gateway_url=other.url, model_token="given").gateway_generate("t", "p", MESSAGES)
            return [token for _, token, _ in other.calls]

    assert play(act)[0] == [None, "Bearer given"]


class BlackBox(BlackBoxAgentFlowBase):
    async def _run_agent(self, base_url, kwargs):
        self.seen = (base_url, kwargs)
        if kwargs.get("fails"):
            raise KeyError("the agent failed")
        return 2

    async def final_reward(self, base_url, kwargs):
        return kwargs.get("worth")


def test_black_box_is_opened_registered_run_and_completed():
    row = {"raw_prompt": MESSAGES, "uid": "train-0", "task": "t", "channel": "val", "agent_name": "b", "worth": 0.5}
    (turns, seen), double = play(lambda flow: ran(flow, row), flow=BlackBox)
    assert (turns, seen[0]) == (2, f"{double.url}/mk-r/train-0/v1")
    assert seen[1] == {name: value for name, value in row.items() if name != "channel"}
    assert [path for path, *_ in double.calls] == [
        "/init_trajectory",
        "/mk-r/train-0/v1/register_trajectory",
        "/mk-r/train-0/v1/complete_trajectory",
    ]
    assert {token for _, token, _ in double.calls} == {"Bearer fk-r"}
    assert double.calls[1][2] == {"channel": "val", "metadata": {"uid": "train-0", "task": "t", "worth": 0.5}}
    assert double.calls[2][2] == {"channel": "val", "reward": 0.5}


async def ran(flow, row):
    return await flow.run({}, **row), flow.seen


def test_black_box_that_fails_is_completed_without_reward_and_fails():
    async def act(flow):
        with pytest.raises(KeyError, match="failed"):
            await flow.run({}, uid="train-0", fails=True, worth=1.0)

    _, double = play(act, flow=BlackBox)
    assert double.calls[-1][::2] == ("/mk-r/train-0/v1/complete_trajectory", {"channel": "train", "reward": None})


def test_completion_that_is_rejected_is_error_but_hides_none():
    late = {"/mk-r/train-0/v1/complete_trajectory": [refusal(410, detail="over"), refusal(410, detail="over")]}

    async def act(flow):
        with pytest.raises(RequestError, match="410"):
            await flow.run({}, uid="train-0")
        with pytest.raises(KeyError) as caught:
            await flow.run({}, uid="train-0", fails=True)
        assert "410: over" in caught.value.__notes__[0]

    play(act, answers=late, flow=BlackBox)


def test_agent_does_not_run_where_rollout_could_not_be_registered():
    async def act(flow):
        with pytest.raises(RequestError, match="409"):
            await flow.run({}, uid="train-0")
        assert not hasattr(flow, "seen")

    play(act, answers={"/mk-r/train-0/v1/register_trajectory": refusal(409, detail="taken")}, flow=BlackBox)
