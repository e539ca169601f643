"""Contexts: where calls go, what a grader may set, and what it may not."""

import asyncio
import contextlib
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import AgentWorkflowContext, GraderContext, RolloutContext, get_rollout_context
from penstock.errors import ConfigError, GraderError
from penstock.records import MAX_REWARD
from penstock.sdk.clients import Clients
from penstock.sdk.context import finite_reward, remove_empty_artifacts_dir
from penstock.sdk.routing import is_provider
from penstock.sdk.samples import RolloutSample, to_json_values


def context(name="r1"):
    return RolloutContext(base_url="http://127.0.0.1:1/v1", api_key=f"key-{name}", rollout_id=name)


def samples(*names):
    return {name: RolloutSample(id=name, messages=[]) for name in names}


@pytest.mark.parametrize("name", ["", "a" * 65, "two\nlines", 7, None])
def test_part_of_reward_needs_name_that_can_head_curve(name):
    with pytest.raises(ValueError, match=r"ctx\.add_reward"):
        GraderContext().add_reward(name, 0.5)


def test_too_many_parts_of_a_reward_are_refused():
    ctx = GraderContext()
    for number in range(32):
        ctx.add_reward(f"part {number}", 0.1)
    ctx.add_reward("part 0", 0.1)
    with pytest.raises(ValueError, match="task"):
        ctx.add_reward("task 33", 0.1)


def test_contexts_nest_and_the_outer_one_comes_back():
    with context("outer") as outer:
        with context("inner") as inner:
            assert get_rollout_context() is inner
        assert get_rollout_context() is outer
    assert get_rollout_context() is None


def test_parallel_tasks_each_see_their_own_context():
    async def one(name, together):
        with context(name):
            await together.wait()
            return await asyncio.to_thread(lambda: get_rollout_context().rollout_id)

    async def main():
        together = asyncio.Barrier(20)
        async with asyncio.TaskGroup() as group:
            tasks = {f"r{i}": group.create_task(one(f"r{i}", together)) for i in range(20)}
        assert {name: task.result() for name, task in tasks.items()} == {name: name for name in tasks}

    asyncio.run(main())


@pytest.mark.parametrize("package", ["openai", "anthropic"])
def test_clients_of_one_gateway_do_not_share_rollouts(package: str):
    async def main():
        clients = Clients()
        url, name = "http://a/v1", {"openai": "chat", "anthropic": "messages"}[package]
        contexts = [RolloutContext(base_url=url, api_key=key, rollout_id=key, clients=clients) for key in ("k1", "k2")]
        first, second = (getattr(context, package)() for context in contexts)
        assert getattr(first, name)._client is first and getattr(second, name)._client is second
        assert [one.api_key for one in (first, second)] == ["k1", "k2"]
        assert [one.default_headers["x-rollout-id"] for one in (first, second)] == ["k1", "k2"]
        assert first._platform is second._platform is not None  # else each would find it out in a thread
        await clients.close()

    asyncio.run(main())


def test_another_event_loop_gets_connections():
    """Connections belong to the loop they were opened in: a workflow that runs a second loop in a thread must not use them."""

    async def main():
        clients = Clients()
        where = RolloutContext(base_url="http://a/v1", api_key="k", clients=clients)
        here = where.openai()

        async def there():
            async with where.openai() as client:
                return client._client

        assert await asyncio.to_thread(asyncio.run, there()) is not here._client
        await clients.close()

    asyncio.run(main())


def ids_in(run):
    """The rollout's id as seen by code that `run(work)` runs somewhere."""
    seen = []
    run(lambda: seen.append(getattr(get_rollout_context(), "rollout_id", None)))
    return seen


def in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def in_a_subclass(work):
    class Worker(threading.Thread):
        def run(self):
            work()

    thread = Worker()
    thread.start()
    thread.join()


@pytest.mark.parametrize("run", [in_a_thread, in_a_subclass])
def test_a_thread_belongs_to_the_rollout_that_starts_it(run):
    with context("r1"):
        assert ids_in(run) == ["r1"]
    assert ids_in(run) == [None]


def test_a_pooled_thread_belongs_to_whoever_submits():
    with ThreadPoolExecutor(1) as pool:
        with context("r1"):
            first = ids_in(lambda work: pool.submit(work).result())
        with context("r2"):
            second = ids_in(lambda work: list(pool.map(lambda _: work(), [0])))
        third = ids_in(lambda work: pool.submit(work).result())
    assert (first, second, third) == (["r1"], ["r2"], [None])


def test_call_to_provider_is_noticed_in_rollout_that_makes_it():
    async def look_up(host):
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().getaddrinfo(host, 443)

    async def main():
        with context("r1") as first:
            await look_up("api.openai.com")
            with context("r2") as second:
                await look_up("localhost")
        await look_up("api.anthropic.com")
        return first.direct_calls, second.direct_calls

    assert asyncio.run(main()) == ({"api.openai.com"}, set())


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("api.openai.com", True),
        ("my.openai.azure.com", True),
        ("bedrock-runtime.us-east-1.amazonaws.com", True),
        ("API.Anthropic.com.", True),
        ("notopenai.com", False),
        ("s3.amazonaws.com", False),
        ("127.0.0.1", False),
    ],
)
def test_which_hosts_serve_models(host, expected):
    assert is_provider(host) is expected


def test_nothing_of_the_environment_reaches_the_policy(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.setenv(name, "leak")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "x-secret: leak")
    monkeypatch.setenv("ANTHROPIC_CUSTOM_HEADERS", "x-secret: leak")
    where = context("r1")
    for client in (where.openai(), where.anthropic()):
        headers = {**client.default_headers, **client.auth_headers}
        assert "leak" not in str(headers) and "key-r1" in str(headers)
        assert (headers["x-rollout-id"], headers["x-sample-id"]) == ("r1", "main")
        asyncio.run(client.close())


def test_samples_come_from_their_sources_in_the_order_of_registration():
    class Source:
        async def get_sample(self, name):
            return RolloutSample(id=name, messages=[{"role": "user", "content": name}])

    where = context()
    where.register_sample_source("b", Source())
    where.set_sample_source(Source())
    with pytest.raises(ValueError, match="registered"):
        where.register_sample_source("b", Source())
    reported = asyncio.run(where.get_samples())
    assert [(name, sample.messages[0]["content"]) for name, sample in reported.items()] == [("b", "b"), ("main", "main")]


def test_a_grader_rewards_steps_that_there_are():
    ctx = GraderContext(samples={"main": RolloutSample(id="main", steps=(0, 2))})
    ctx.set_step_reward(2, 1)
    assert ctx.step_rewards == {2: 1.0}
    with pytest.raises(ValueError, match="unknown"):
        ctx.set_step_reward(1, 1.0)
    with pytest.raises(GraderError, match="finite"):
        ctx.set_step_reward(0, float("nan"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({1: b"hi"}, {"1": "aGk="}),
        ({"a": (1, {2})}, {"a": [1, [2]]}),
        ({"a": object}, {"a": str(object)}),
        ({"a": 2**70}, {"a": 2**70}),
    ],
)
def test_messages_of_any_framework_become_plain_values(value, expected):
    assert to_json_values([value]) == [expected]


@pytest.mark.parametrize("use", [lambda c: c.openai(), lambda c: c.anthropic(), lambda c: c.base_url, lambda c: c.api_key])
def test_model_access_outside_a_rollout_says_how_to_run(use):
    with pytest.raises(ConfigError, match="workflow"):
        use(AgentWorkflowContext(prompt=[]))


def test_grader_sets_rewards_by_transcript_and_for_the_whole():
    ctx = GraderContext(samples=samples("planner", "executor"))
    ctx.set_sample_reward("planner", 1)
    ctx.set_reward(0.25)
    assert (ctx.get_samples()["planner"].reward, ctx.samples["executor"].reward, ctx.reward) == (1.0, None, 0.25)


def test_unknown_transcript_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="unknown"):
        GraderContext(samples=samples("main")).set_sample_reward("x", 1.0)


def test_the_only_sample_is_at_hand_and_several_are_named():
    assert GraderContext(samples=samples("main")).sample.id == "main"
    with pytest.raises(GraderError, match=r"ctx\.samples"):
        _ = GraderContext(samples=samples("b", "a")).sample


def test_grader_gets_its_own_copy_of_the_metadata():
    metadata = {"list": [1]}
    GraderContext(metadata=metadata).metadata["list"].append(2)
    assert metadata == {"list": [1]}


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, None, "1.0", True, [1.0], 10**400, 1j])
def test_reward_that_is_no_finite_number_is_named(reward):
    with pytest.raises(GraderError, match="finite"):
        GraderContext(samples=samples("main")).set_sample_reward("main", reward)
    with pytest.raises(GraderError):
        GraderContext().set_reward(reward)


@pytest.mark.parametrize("reward", [1e308, -1e308, 10**10, 1.001e9])
def test_reward_above_limit_is_rejected(reward):
    with pytest.raises(GraderError, match=r"1e\+09"):
        GraderContext(samples=samples("main")).set_sample_reward("main", reward)
    assert finite_reward(-MAX_REWARD) == -1e9


@given(st.floats() | st.integers() | st.fractions())
def test_bounded_numbers_and_no_others_become_floats(number):
    if not abs(number) <= MAX_REWARD:
        with pytest.raises(GraderError):
            finite_reward(number)
    else:
        assert finite_reward(number) == float(number)


def test_artifacts_folder_is_made_on_use_and_removed_if_empty(tmp_path):
    context = AgentWorkflowContext(prompt=[], artifacts_dir=tmp_path / "runs" / "one")
    remove_empty_artifacts_dir(context)
    assert not (tmp_path / "runs").exists()
    assert context.artifacts_dir == tmp_path / "runs" / "one" and context.artifacts_dir.is_dir()
    remove_empty_artifacts_dir(context)
    assert not (tmp_path / "runs" / "one").exists()
    (context.artifacts_dir / "kept").touch()
    remove_empty_artifacts_dir(context)
    assert (tmp_path / "runs" / "one" / "kept").exists()


def test_no_artifacts_folder_if_none_can_be_made(tmp_path):
    (tmp_path / "file").touch()
    assert AgentWorkflowContext(prompt=[]).artifacts_dir is None
    assert GraderContext(artifacts_dir=tmp_path / "file" / "below").artifacts_dir is None
