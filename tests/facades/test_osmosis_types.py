"""The types of `osmosis_ai`: their defaults and rules."""

import asyncio
import importlib
import inspect

import pytest
from pydantic import ValidationError

import penstock
from osmosis_ai.rollout import (
    AgentWorkflow,
    AgentWorkflowConfig,
    AgentWorkflowContext,
    AgentWorkflowOutput,
    ConcurrencyConfig,
    ControllerAuth,
    ExecutionBackend,
    ExecutionRequest,
    ExecutionResult,
    Grader,
    GraderConfig,
    GraderContext,
    GraderStatus,
    HarborAgentWorkflowContext,
    LocalBackend,
    MultiTurnMode,
    RolloutContext,
    RolloutErrorCategory,
    RolloutInitRequest,
    RolloutSample,
    RolloutStatus,
    get_rollout_context,
)
from osmosis_ai.rollout.context import SampleSource
from osmosis_ai.rollout.driver import RolloutDriver, RolloutOutcome
from osmosis_ai.rollout.types import BaseConfig
from osmosis_ai.rollout.validator import validate_backend


@pytest.mark.parametrize("name", ["AgentWorkflow", "AgentWorkflowConfig", "AgentWorkflowContext", "Grader", "GraderContext"])
def test_what_authors_subclass_and_are_given_is_the_cores_own(name):
    assert getattr(importlib.import_module("osmosis_ai.rollout"), name) is getattr(penstock, name)


def test_rubric_and_its_errors_are_there_when_asked_for():
    module = importlib.import_module("osmosis_ai")
    assert issubclass(module.ModelNotFoundError, module.ProviderRequestError) and issubclass(
        module.MissingAPIKeyError, RuntimeError
    )
    assert (module.RubricResult(0.5, "half").score, callable(module.evaluate_rubric)) == (0.5, True)


def test_configs_need_a_name_and_keep_other_fields():
    with pytest.raises(ValidationError, match="name"):
        BaseConfig()
    config = AgentWorkflowConfig(name="w", tries=3, tool=print)
    assert (config.description, config.tries, config.tool, config.concurrency.max_concurrent) == (None, 3, print, None)
    with pytest.raises(ValidationError, match="name"):
        config.name = 7
    assert GraderConfig(name="g").concurrency is not GraderConfig(name="g").concurrency


def test_limit_is_at_least_one():
    assert (ConcurrencyConfig().max_concurrent, ConcurrencyConfig(max_concurrent=1).max_concurrent) == (None, 1)
    with pytest.raises(ValidationError):
        ConcurrencyConfig(max_concurrent=0)


@pytest.mark.parametrize(("base", "method"), [(AgentWorkflow, "run"), (Grader, "grade")])
def test_base_classes_have_one_abstract_method(base, method):
    assert base.__abstractmethods__ == {method}
    made = type("Own", (base,), {method: lambda self, ctx: None})
    assert (made().config, made(7).config, made(config=8).config) == (None, 7, 8)


def test_workflow_context_has_no_label():
    ctx = AgentWorkflowContext([{"role": "user", "content": "?"}])
    assert (ctx.config, ctx.metadata, ctx.artifacts_dir, hasattr(ctx, "label")) == (None, None, None, False)
    assert HarborAgentWorkflowContext(prompt=[], environment="box").environment == "box"


def test_grader_context_takes_rewards_for_samples():
    ctx = GraderContext("6", {"a": RolloutSample(id="a")})
    assert ctx.get_samples() is ctx.samples
    assert (ctx.metadata, ctx.artifacts_dir, ctx.project_path, GraderContext().samples) == (None, None, None, {})
    ctx.set_sample_reward("a", 1)
    assert (ctx.sample.reward, ctx.samples["a"].reward) == (1.0, 1.0)
    with pytest.raises(ValueError, match="unknown"):
        ctx.set_sample_reward("b", 1.0)


@pytest.fixture
def no_environment(monkeypatch):
    for name in ("OSMOSIS_CHAT_COMPLETIONS_URL", "OSMOSIS_API_KEY", "OSMOSIS_ROLLOUT_ID"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_empty_context_is_filled_from_the_environment(no_environment):
    empty = RolloutContext()
    assert (empty.chat_completions_url, empty.api_key, empty.rollout_id, empty.sample_sources) == ("", None, "", {})
    no_environment.setenv("OSMOSIS_CHAT_COMPLETIONS_URL", "http://env/v1")
    no_environment.setenv("OSMOSIS_API_KEY", "env-key")
    no_environment.setenv("OSMOSIS_ROLLOUT_ID", "env-id")
    filled = RolloutContext()
    assert (filled.chat_completions_url, filled.api_key, filled.rollout_id) == ("http://env/v1", "env-key", "env-id")
    given = RolloutContext("http://own/v1", "own-key", "own-id", {})
    assert (given.base_url, given.api_key, given.rollout_id) == ("http://own/v1", "own-key", "own-id")


def test_core_context_has_the_names_of_this_api():
    class Source(SampleSource):
        async def get_sample(self, name):
            return RolloutSample(id=name, messages=[{"role": "user", "content": "hi"}])

    assert get_rollout_context() is None
    with penstock.RolloutContext(base_url="http://own/v1", api_key="k", rollout_id="r") as core:
        seen = get_rollout_context()
        assert isinstance(seen, RolloutContext) and seen == get_rollout_context()
        assert (seen.chat_completions_url, seen.api_key, seen.rollout_id) == ("http://own/v1", "k", "r")
        seen.register_sample_source("a", Source())
        with pytest.raises(ValueError, match="registered"):
            seen.register_sample_source("a", Source())
        assert [s.messages[0]["content"] for s in asyncio.run(core.get_samples()).values()] == ["hi"]
    with RolloutContext("http://own/v1") as own:
        assert get_rollout_context() is own is penstock.get_rollout_context()


def test_source_must_tell_its_sample():
    with pytest.raises(TypeError, match="abstract"):
        SampleSource()


def test_sample_is_checked_and_dumped_as_pydantic_does():
    messages = [{"role": "user", "content": "hi"}]
    sample = RolloutSample(id="a", messages=messages)
    assert (sample.label, sample.reward, sample.remove_sample, sample.metrics, sample.extra_fields) == (None, None, False, {}, {})
    assert sample.trajectory_messages == messages and sample.trajectory_messages is not sample.messages
    assert RolloutSample(id="a", messages=messages, trajectory_messages=None).trajectory_messages is None
    assert sample.model_dump(mode="json", include={"id", "messages"}) == {"id": "a", "messages": messages}
    assert RolloutSample.model_validate({"id": "b", "reward": 1}).reward == 1.0
    assert sample.model_copy(update={"reward": 0.5}).reward == 0.5 and sample.reward is None
    for wrong in ({}, {"id": 3}, {"id": "a", "reward": "much"}, {"id": "a", "reward": float("nan")}, {"id": "a", "rewards": 1.0}):
        with pytest.raises(ValidationError):
            RolloutSample(**wrong)


def test_sample_that_a_grader_is_given_can_be_dumped():
    core = penstock.RolloutSample(id="a", messages=[{"role": "user"}], reward=1.0)
    assert core.model_dump()["messages"] == [{"role": "user"}]
    assert '"reward":1.0' in core.model_dump_json(exclude={"messages"})


def test_closed_sets_are_spelled_as_on_the_wire():
    assert [*RolloutStatus] == [*GraderStatus] == ["pending", "success", "failure"]
    assert [*RolloutErrorCategory] == ["timeout", "validation_error", "http_error", "agent_error"]
    assert [*MultiTurnMode] == ["multi_sample", "single_sample"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", "a\0b"])
def test_ids_that_are_no_path_segment_are_refused(name):
    with pytest.raises(ValidationError, match="id"):
        ExecutionRequest(id=name, prompt=[])
    with pytest.raises(ValidationError, match="rollout_id"):
        RolloutInitRequest(rollout_id=name, initial_messages=[], chat_completions_url="u", completion_callback_url="u")


def test_requests_and_results_have_their_defaults():
    request = ExecutionRequest(id="r", prompt=[])
    assert (request.label, request.metadata, request.agent_timeout_sec, request.grader_timeout_sec) == (None, None, None, None)
    result = ExecutionResult(status=RolloutStatus.SUCCESS)
    assert (result.samples, result.err_message, result.err_category) == ({}, None, None)
    output = AgentWorkflowOutput(messages=[{"role": "assistant"}])
    assert (output.metrics, output.info, AgentWorkflowOutput().messages) == ({}, {}, None)


def test_backend_defaults_to_no_limit_and_healthy():
    class Own(ExecutionBackend):
        async def execute(self, request, on_workflow_complete, on_grader_complete=None):
            pass

    assert (Own().max_concurrency, Own().health()) == (0, {"status": "ok"})
    with pytest.raises(TypeError, match="abstract"):
        ExecutionBackend()


class Work(AgentWorkflow):
    async def run(self, ctx):
        pass


class Check(Grader):
    async def grade(self, ctx):
        pass


def test_local_back_end_takes_objects_or_references():
    assert list(inspect.signature(LocalBackend).parameters) == ["workflow", "workflow_config", "grader", "grader_config"]
    config = AgentWorkflowConfig(name="w", concurrency=ConcurrencyConfig(max_concurrent=3))
    own = LocalBackend(workflow=Work, workflow_config=config, grader=Check)
    assert own.max_concurrency == 3
    assert own.health() == {"status": "ok", "concurrency": {"max_concurrent": 3, "queued": 0, "running": 0}}
    assert LocalBackend(workflow=f"{__name__}:Work").max_concurrency == 0
    with pytest.raises(ValueError, match="module:attribute"):
        LocalBackend(workflow="nothing")
    with pytest.raises(ImportError, match="Nothing"):
        LocalBackend(workflow=f"{__name__}:Nothing")


def test_everything_that_is_wrong_is_reported_at_once_by_code():
    class Late(AgentWorkflow):
        def __init__(self, config=None):
            raise RuntimeError("no")

        def run(self, ctx):
            pass

    assert validate_backend(Work, None, Check, None).valid
    found = validate_backend(Late, AgentWorkflowConfig(name="x" * 257))
    codes = {error.code for error in found.errors}
    assert codes == {"WORKFLOW_RUN_NOT_ASYNC", "WORKFLOW_INIT_FAILED", "INVALID_AGENT_NAME", "MISSING_GRADER"}
    assert not found.valid and found.warnings == []
    assert [error.code for error in validate_backend(int, None, int).errors] == ["INVALID_WORKFLOW_CLASS", "INVALID_GRADER_CLASS"]


def test_key_is_sent_but_not_shown():
    assert ControllerAuth("secret").as_bearer_headers() == {"Authorization": "Bearer secret"}
    assert "secret" not in repr(ControllerAuth("secret")) and ControllerAuth().as_bearer_headers() is None


def test_driver_has_one_abstract_method():
    outcome = RolloutOutcome(status=RolloutStatus.FAILURE)
    assert (outcome.samples, outcome.error, outcome.duration_ms, outcome.tokens, outcome.systemic_error) == ({}, None, 0.0, 0, None)
    assert RolloutDriver.__abstractmethods__ == {"run"}
    assert list(inspect.signature(RolloutDriver.run).parameters) == ["self", "messages", "label", "rollout_id"]


def test_server_is_made_of_a_back_end(tmp_path, monkeypatch):
    from starlette.testclient import TestClient

    from osmosis_ai.rollout import create_rollout_server

    given = {name: each.default for name, each in inspect.signature(create_rollout_server).parameters.items()}
    assert {"backend": inspect.Parameter.empty, "lifespan": None, "configure_logging": True}.items() <= given.items()
    monkeypatch.chdir(tmp_path)
    with TestClient(create_rollout_server(backend=LocalBackend(workflow=Work, grader=Check), configure_logging=False)) as client:
        assert client.get("/health").json()["status"] == "ok"
        assert client.post("/rollout", json={"rollout_id": "r"}).status_code == 422
