"""Which URLs a rollout server may call, and what validation says of workflows and graders."""

import pytest

from penstock import AgentWorkflow, AgentWorkflowConfig, Grader
from penstock.errors import ConfigError
from penstock_compat.rollout_server.backend import validate_backend
from penstock_compat.rollout_server.requests import AllowedHosts


@pytest.mark.parametrize("url", ["http://127.0.0.1:8/v1", "http://localhost/x?y=1", "https://[::1]:9/", "HTTP://LOCALHOST./"])
def test_this_machine_may_be_called_by_default(url):
    assert AllowedHosts().refusal(url) is None


@pytest.mark.parametrize(
    ("allowed", "url"),
    [
        ("example.com", "https://example.com/v1"),
        ("Example.com:8000", "http://example.com:8000/v1"),
        ("example.com:443", "https://example.com/v1"),
        ("*.example.com", "http://a.b.example.com/"),
        ("10.0.0.0/8", "http://10.255.0.1:80/"),
        ("[fd00::7]", "http://[fd00::7]:1/"),
        ("fd00::/8", "http://[fd00::7]:1/"),
    ],
)
def test_named_host_may_be_called(allowed, url):
    assert AllowedHosts([allowed]).refusal(url) is None


@pytest.mark.parametrize(
    ("allowed", "url"),
    [
        ("example.com", "http://a.example.com/"),
        ("example.com:8000", "http://example.com/"),
        ("*.example.com", "http://example.com/"),
        ("*.example.com", "http://evilexample.com/"),
        ("10.0.0.0/8", "http://11.0.0.1/"),
        ("10.0.0.0/8", "http://10.0.0.1.example/"),
        ("example.com", "http://127.0.0.1/"),
    ],
)
def test_other_host_may_not(allowed, url):
    assert "may not call" in (AllowedHosts([allowed]).refusal(url) or "")


@pytest.mark.parametrize("entry", ["", "http://example.com", "user@host", "a*.example.com", "10.0.0.0/99", "*"])
def test_bad_host_is_refused(entry):
    with pytest.raises(ConfigError, match="hosts"):
        AllowedHosts([entry])


class Work(AgentWorkflow):
    async def run(self, ctx):
        pass


class Check(Grader):
    async def grade(self, ctx):
        pass


class SyncWork(AgentWorkflow):
    def run(self, ctx):
        pass

    def __init__(self, config=None):
        raise RuntimeError("no")


class SyncCheck(Grader):
    def grade(self, ctx):
        pass

    def __init__(self, config=None):
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("given", "codes"),
    [
        ((Work, None, Check, None), []),
        ((Work, AgentWorkflowConfig(name="w"), None, None), ["MISSING_GRADER"]),
        ((int, None, "x", None), ["INVALID_WORKFLOW_CLASS", "INVALID_GRADER_CLASS"]),
        (
            (SyncWork, AgentWorkflowConfig(name="n" * 257), SyncCheck, None),
            [
                "WORKFLOW_RUN_NOT_ASYNC",
                "WORKFLOW_INIT_FAILED",
                "INVALID_AGENT_NAME",
                "GRADER_GRADE_NOT_ASYNC",
                "GRADER_INIT_FAILED",
            ],
        ),
        ((Work, AgentWorkflowConfig(name=""), Check, None), ["INVALID_AGENT_NAME"]),
    ],
)
def test_everything_that_is_wrong_is_found_at_once(given, codes):
    found = validate_backend(*given)
    assert [problem.code for problem in found] == codes
    assert all(len(problem.message) > 20 for problem in found)
