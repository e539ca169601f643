"""Every executor runs the same agents to the same outcome: what is recorded, what the grader sees, how it ends, in which words."""

import importlib.util
import re
from contextlib import ExitStack
from functools import cache

import pytest
from executor_cases import Case, outcomes

from penstock.records import End
from penstock.rollout.executors import EXECUTORS

CASES = {
    "answers": Case(),
    "talks": Case(do="talks", grade="each_step"),
    "two-agents": Case(do="two_agents", grade="each"),
    "everything": Case(do="two_agents", grade="everything"),
    "parts": Case(grade="adds_parts"),
    "parts-of-two": Case(do="two_agents", grade="adds_parts_to_each"),
    "parts-alone": Case(grade="only_adds_parts"),
    "parts-of-number": Case(grade="returns_and_adds"),
    "parts-str": Case(grade="adds_words"),
    "number": Case(grade="returns"),
    "unicode": Case(say="☃ été 数学 🎲 \u202e"),
    "own-words": Case(do="returns_messages", grade="each"),
    "returns-answer": Case(do="returns_the_answer"),
    "reports-answer": Case(do="reports_the_answer"),
    "reports-user": Case(do="reports_the_answer_as_the_users"),
    "reports-earlier": Case(do="reports_what_it_asked_before"),
    "own-mouth": Case(do="puts_words_into_its_mouth", grade="by_replies"),
    "ghost": Case(do="reports_an_agent_that_never_was", grade="by_sample"),
    "no-call": Case(do="returns_without_a_call"),
    "file": Case(do="leaves_a_file", grade="reads_the_file"),
    "meddles": Case(do="meddles"),
    "stray": Case(do="strays"),
    "stray-and-answer": Case(do="strays_and_answers"),
    "silent": Case(do="is_silent"),
    "raises": Case(do="raises"),
    "raises-in-group": Case(do="raises_in_a_group"),
    "exits": Case(do="exits"),
    "engine-fails": Case(say="FAIL"),
    "refused-call": Case(do="asks_nonsense"),
    "own-timeout": Case(do="times_out_itself"),
    "graders-own-timeout": Case(grade="grader_times_out_itself"),
    "hangs": Case(do="hangs", agent_timeout_s=0.5),
    "swallows": Case(do="swallows", agent_timeout_s=0.5),
    "grader-fails": Case(grade="fails"),
    "grader-waits": Case(grade="waits", grader_timeout_s=0.5),
    "grader-forgets": Case(grade="forgets"),
    "grader-forgets-one": Case(do="two_agents", grade="forgets_one"),
    "unknown-sample": Case(grade="unknown_sample"),
    "unknown-step": Case(grade="unknown_step"),
    "nan": Case(grade="not_a_number"),
    "inf": Case(grade="infinite"),
    "too-much": Case(grade="too_much"),
    "too-much-in-all": Case(do="talks", grade="too_much_in_all"),
    "str": Case(grade="words"),
    "returned-str": Case(grade="returns_words"),
    "past-the-setter": Case(grade="past_the_setter"),
}

WHOLE = [(None, None, 1.0)]
GRADED = {
    "answers": WHOLE,
    "talks": [(None, 0, 0.0), (None, 1, 0.25), (None, 2, 0.5)],
    "two-agents": [("planner", None, 0.5), ("executor", None, 1.5)],
    "parts": [(None, None, 0.75)],
    "parts-of-two": [(None, None, 1.25), ("planner", None, 0.5), ("executor", None, 1.5)],
    "parts-alone": [(None, None, 0.25)],
    "parts-of-number": [(None, None, 0.75)],
    "number": [(None, None, 0.75)],
    "unicode": WHOLE,
    "own-words": [("main", None, 0.5)],
    "returns-answer": [(None, None, 0.0)],
    "reports-answer": [(None, None, 0.0)],
    "reports-user": [(None, None, 0.0)],
    "reports-earlier": [(None, None, 0.0)],
    "own-mouth": [(None, None, 0.0)],
    "file": WHOLE,
    "meddles": WHOLE,
    "stray-and-answer": WHOLE,
}

ENDED = {
    "stray": (End.AGENT_ERROR, r"made no model call through penstock, but called api\.openai\.com directly; use ctx\.openai\(\)"),
    "silent": (End.AGENT_ERROR, r"made no model call through penstock; use ctx\.openai\(\)"),
    "ghost": (End.GRADER_ERROR, r"grader 'check': IndexError: list index out of range"),
    "no-call": (End.AGENT_ERROR, r"made no model call through penstock; use ctx\.openai\(\)"),
    "raises": (End.AGENT_ERROR, r"workflow 'Plain': ValueError: no luck: ☃ at all \(plain\.py, line \d+\)"),
    "raises-in-group": (End.AGENT_ERROR, r"workflow 'Plain': ValueError: no luck: ☃ at all \(plain\.py, line \d+\)"),
    "exits": (End.AGENT_ERROR, r"workflow 'Plain': called sys\.exit\(3\)"),
    "engine-fails": (End.ENGINE_ERROR, r"workflow 'Plain': .*the scripted engine failed after 2 tokens"),
    "refused-call": (End.AGENT_ERROR, r"workflow 'Plain': BadRequestError: .*temperature"),
    "own-timeout": (End.AGENT_ERROR, r"workflow 'Plain': TimeoutError: the tool took too long \(plain\.py, line \d+\)"),
    "graders-own-timeout": (End.GRADER_ERROR, r"grader 'check': TimeoutError: the judge took too long"),
    "hangs": (End.TIMEOUT, r"ran longer than rollout\.agent_timeout_s = 0\.5; raise it"),
    "swallows": (End.TIMEOUT, r"ran longer than rollout\.agent_timeout_s = 0\.5; raise it"),
    "grader-fails": (End.GRADER_ERROR, r"grader 'check': KeyError: 'no such ☃' \(plain\.py, line \d+\)"),
    "grader-waits": (End.GRADER_ERROR, r"ran longer than rollout\.grader_timeout_s = 0\.5; raise it"),
    "grader-forgets": (End.GRADER_ERROR, r"grader 'check': gave no reward for \['main'\]"),
    "grader-forgets-one": (End.GRADER_ERROR, r"grader 'check': gave no reward for \['executor'\]"),
    "unknown-sample": (End.GRADER_ERROR, r"grader 'check': ValueError: unknown sample 'critic'; this rollout has \['main'\]"),
    "unknown-step": (End.GRADER_ERROR, r"grader 'check': ValueError: unknown step 7; this rollout has \[0\]"),
    "nan": (End.GRADER_ERROR, r"grader 'check': reward nan is not a finite number"),
    "inf": (End.GRADER_ERROR, r"grader 'check': reward inf is not a finite number"),
    "too-much": (End.GRADER_ERROR, r"grader 'check': reward 1e\+308 is not between -1e\+09 and 1e\+09"),
    "too-much-in-all": (End.GRADER_ERROR, r"grader 'check': reward 2\.7e\+09 is not between"),
    "str": (End.GRADER_ERROR, r"grader 'check': reward 'high' is not a finite number"),
    "parts-str": (End.GRADER_ERROR, r"grader 'check': reward 'high' is not a finite number"),
    "returned-str": (End.GRADER_ERROR, r"grader 'check': reward '0\.5' is not a finite number"),
    "past-the-setter": (End.GRADER_ERROR, r"grader 'check': reward -inf is not a finite number"),
}

FRAMEWORKS = {"strands": "strands_agent.py", "agents": "openai_agent.py"}


SLOW = {"process": [pytest.mark.slow], "ray": [pytest.mark.slow]}
NAMES = [pytest.param(name, marks=SLOW.get(name, ())) for name in EXECUTORS]
"""A process for each workflow and grader takes its time, and so does a cluster."""


@pytest.fixture(scope="module")
def ready():
    """Call it with an executor's name: what all of that executor's runs share is started, once."""
    with ExitStack() as stack:

        @cache
        def start(name):
            if name == "ray":
                from penstock.scale.cluster import open_cluster

                stack.enter_context(open_cluster("", namespace="tests"))

        yield start


@pytest.fixture(scope="module", params=NAMES)
def executor(request, ready):
    ready(request.param)
    return request.param


@pytest.fixture(scope="module")
def run(renderer, tmp_path_factory, ready):
    """What came of every case on an executor, which runs them once."""

    def first(name):
        ready(name)
        return outcomes(name, "plain.py", CASES, tmp_path_factory.mktemp(name), renderer)

    return cache(first)


@pytest.fixture
def came(executor, run):
    return run(executor)


@pytest.mark.parametrize("name", [name for name in NAMES if name.values != ("inline",)])
@pytest.mark.parametrize("case", CASES)
def test_outcome_does_not_depend_on_the_executor(case, name, run):
    assert run(name)[case].compared == run("inline")[case].compared


@pytest.mark.parametrize("case", GRADED)
def test_graded_case_completes_with_its_rewards(case, came):
    attempt = came[case].attempt
    assert (attempt.end, attempt.message) == (End.COMPLETED, "")
    assert came[case].grades == GRADED[case]
    assert {grade.source for grade in attempt.grades} == {"check"}


def test_named_parts_of_a_reward_are_stored_with_its_grade(came):
    parts = {"format": 0.25}
    assert came["parts"].attempt.components == {"format": 0.25, "length": -0.5}
    assert [came[case].attempt.components for case in ("parts-of-two", "parts-alone", "parts-of-number")] == [parts] * 3
    assert came["answers"].attempt.components == {}


def test_rewards_of_all_three_kinds_come_together(came):
    assert came["everything"].grades == [(None, None, 2.0), ("planner", None, 0.25), (None, 1, -1.0)]
    assert came["everything"].attempt.reward == 2.0


@pytest.mark.parametrize("case", ENDED)
def test_failed_case_ends_once_with_its_reason(case, came):
    end, words = ENDED[case]
    attempt = came[case].attempt
    assert (attempt.end, attempt.grades) == (end, ())
    assert re.search(words, attempt.message), attempt.message
    assert "\n" not in attempt.message
    assert [kind for kind, _ in came[case].reported].count("rollout.end") == 1


def test_transcripts_are_recorded_and_seen_apart(came):
    samples = came["two-agents"].seen["samples"]
    assert list(samples) == ["planner", "executor"]
    assert [message["content"] for message in samples["executor"]["messages"]] == ["say: did six", "did six"]
    assert [samples[name]["steps"] for name in samples] == [[0], [1]]


def test_conversation_is_seen_whole(came):
    (sample,) = came["talks"].seen["samples"].values()
    assert [each["content"] for each in sample["messages"]] == ["say: six", "six", "say: more", "more", "say: most", "most"]
    assert sample["steps"] == [0, 1, 2]


def test_messages_that_workflow_returns_stand_next_to_recorded_ones(came):
    (sample,) = came["own-words"].seen["samples"].values()
    assert sample["claims"] == [{"role": "assistant", "content": "in my own words"}]
    assert [each["content"] for each in sample["messages"]] == ["say: six", "six"]
    assert sample["transcript"] == sample["messages"]


@pytest.mark.parametrize("case", ["reports-answer", "reports-user", "reports-earlier"])
def test_conversation_that_was_not_sampled_like_that_is_reported(case, came):
    shown = [fields["transcripts"] for kind, fields in came[case].reported if kind == "rollout.misreported"]
    assert shown == [["main"]]
    assert came[case].seen["samples"]["main"]["claims"]


def test_grader_sees_the_original_metadata(came):
    assert "hint" not in came["meddles"].seen["metadata"]


def test_direct_call_to_provider_is_reported_though_rollout_completes(came):
    shown = [fields["providers"] for kind, fields in came["stray-and-answer"].reported if kind == "rollout.direct_calls"]
    assert shown == [["api.openai.com"]]


@pytest.mark.slow  # each imports its framework
@pytest.mark.parametrize("package", FRAMEWORKS)
def test_framework_reports_the_grader_its_own_messages(package, executor, renderer, tmp_path):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    cases = {"talk": Case(grade="each")}
    here = outcomes("inline", FRAMEWORKS[package], cases, tmp_path / "inline", renderer)["talk"]
    there = outcomes(executor, FRAMEWORKS[package], cases, tmp_path / executor, renderer)["talk"]
    assert here.attempt.end is End.COMPLETED, here.attempt.message
    assert there.compared == here.compared
    sample = there.seen["samples"]["talker"]
    assert sample["messages"] != sample["transcript"]
    assert [each["content"] for each in sample["transcript"] if each["role"] == "assistant"] == ["six", "more"]


def test_config_tables_reach_workflow_and_grader(executor, renderer, tmp_path):
    tables = ({"greeting": "salut"}, {"factor": 3.0})
    cases = {"greets": Case(do="greets", say="salut")}
    came = outcomes(executor, "plain.py", cases, tmp_path, renderer, tables=tables)["greets"]
    assert (came.attempt.reward, came.seen["factor"]) == (1.0, 3.0)


def test_no_more_workflows_run_at_once_than_the_config_allows(executor, renderer, tmp_path):
    cases = {f"r{number}": Case(do="counts") for number in range(6)}
    tables = ({"concurrency": {"max_concurrent": 2}}, {})
    came = outcomes(executor, "plain.py", cases, tmp_path, renderer, tables=tables)
    assert {outcome.attempt.end for outcome in came.values()} == {End.COMPLETED}
    assert max(int(path.read_text()) for path in tmp_path.glob("*.peak")) <= 2
