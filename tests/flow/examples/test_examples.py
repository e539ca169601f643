"""Every example in every form, from its files to graded rollouts, over HTTP, with an engine that says what a policy might say."""

import asyncio
import json
import runpy
import shutil

import pytest
from example_cases import EXAMPLES, REPORTED, attempts, multiplier, written_call

from penstock.chat.renderer import Renderer
from penstock.config import load_config
from penstock.records import End
from penstock.rollout.transcripts import transcripts
from penstock.sdk.dataset import load_tasks
from penstock.sdk.discovery import open_agent
from penstock.testing import write_tokenizer

CONFIGS = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.glob("*/*.toml"))
ENTRIES = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.glob("*/*agent.py"))


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    corpus = [path.read_text() for path in EXAMPLES.glob("*/*.py")]
    return Renderer.load(write_tokenizer(tmp_path_factory.mktemp("model"), corpus=corpus))


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def searcher(renderer, label):
    """A script that plans, searches for the question, hands over where there is someone to hand over to, and answers."""

    def reply(prompt):
        text = renderer.tokenizer.decode(prompt)
        reported = REPORTED.findall(text)
        if "Name in a few words" in text:
            return "the Orrin lighthouse"
        if not reported:
            return call("search", query=text.rpartition("\nuser\n" if "\nuser\n" in text else "user\n")[2])
        return call("transfer_to_writer") if "hand over to the writer" in text else f"It is {label}."

    return reply


def policy(renderer, entry, task):
    return multiplier(renderer) if entry.startswith("multiply") else searcher(renderer, task.label)


def first_task(entry):
    return load_tasks(EXAMPLES / entry.partition("/")[0] / "tasks.jsonl", limit=1)[0]


def rollout(renderer, entry, script=None, **settings):
    """One attempt at the example's first task."""
    task = first_task(entry)
    (attempt,), _ = asyncio.run(attempts(renderer, script or policy(renderer, entry, task), [task], entry, **settings))
    return attempt


def reported(messages):
    return [message["content"] for message in messages if message["role"] == "tool"]


def calls(messages):
    return [each["function"]["name"] for message in messages for each in message.get("tool_calls") or ()]


def test_there_is_a_file_for_each_form_of_each_example():
    forms = ("agent.py", "openai_agent.py", "strands_agent.py")
    assert [f"{example}/{form}" for example in ("multiply", "search") for form in forms] == ENTRIES


@pytest.mark.parametrize("name", CONFIGS)
def test_files_that_a_config_names_fit_together(name):
    config = load_config(EXAMPLES / name)
    if config.agent.command and shutil.which(config.agent.command[0]) is None:
        pytest.skip(f"there is no {config.agent.command[0]} here")
    agent = open_agent(config.agent, config.workflow, config.grader)
    assert agent.grader is not None
    for rows in (config.dataset.train, config.dataset.eval):
        tasks = load_tasks(rows, columns=agent.kind.keeps_columns)
        assert len(tasks) >= 8 and all(task.label for task in tasks)


def test_every_run_of_example_has_name_and_every_form_config():
    configs = [load_config(EXAMPLES / name) for name in CONFIGS]
    assert len({config.run.name for config in configs}) == len(configs)
    forms = [config for config in configs if not config.agent.command and not config.agent.flow and not config.policies]
    written = [config.agent.entry for config in forms]
    assert {entry.relative_to(EXAMPLES).as_posix() for entry in written} == set(ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_example_calls_its_tool_and_is_graded(renderer, entry):
    attempt = rollout(renderer, entry)
    assert (attempt.end, attempt.message, attempt.reward) == (End.COMPLETED, "", 1.0)
    *_, last = transcripts(attempt).values()
    tool = "multiply" if entry.startswith("multiply") else "search"
    assert calls(last.messages[-4:] if tool == "multiply" else last.messages)[0] == tool
    assert any(first_task(entry).label in each for each in reported(last.messages))


@pytest.mark.parametrize("entry", ENTRIES)
def test_conversation_of_example_continues_by_exact_tokens(renderer, entry):
    attempt = rollout(renderer, entry)
    roots = {"search/openai_agent.py": 3}  # planner, executor, and the writer, who has its own instructions
    assert sum(node.parent is None for node in attempt.nodes) == roots.get(entry, 1)
    assert len(attempt.steps) == {"search/openai_agent.py": 4}.get(entry, 2)


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES)
def test_example_does_same_in_process(renderer, entry):
    inline, isolated = rollout(renderer, entry), rollout(renderer, entry, executor="process")
    assert (isolated.end, isolated.message, isolated.reward) == (End.COMPLETED, "", 1.0)
    assert [step.message["content"] for step in isolated.steps] == [step.message["content"] for step in inline.steps]


def test_planner_and_executor_are_transcripts_and_the_handoff_is_recorded(renderer):
    recorded = transcripts(rollout(renderer, "search/openai_agent.py"))
    assert list(recorded) == ["planner", "executor"]
    assert recorded["planner"].messages[-1]["content"] == "the Orrin lighthouse"
    system, *_, answer = said = recorded["executor"].messages
    assert system["content"] == "Answer the question in one short sentence."
    assert [m["content"] for m in said if m["role"] == "user"][1] == "The plan: the Orrin lighthouse"
    assert calls(said) == ["search", "transfer_to_writer"]
    assert answer["content"] == "It is Maud Tesk."


WRONG = {
    "another tool": lambda a, b: written_call(a, b, "divide"),
    "a name that no tool can have": lambda a, b: written_call(a, b, "\u00e9 !"),
    "other arguments": lambda a, b: call("multiply", x=1) + call("search", x=1),
    "no arguments": lambda a, b: call("multiply") + call("search"),
    "text for numbers": lambda a, b: written_call('"seven"', "[]"),
    "a broken call": lambda a, b: written_call(a, b).replace("}", ""),
    "a broken call among good ones": lambda a, b: written_call(a, b) + call("search", query="Orrin") + written_call(a, "null"),
    "nothing": lambda a, b: "",
    "no call": lambda a, b: "twelve",
    "too much": lambda a, b: "so " * 200,
    "a call that is cut off": lambda a, b: "so " * 40 + written_call(a, b) * 3,
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("saying", WRONG)
def test_whatever_the_policy_says_the_rollout_completes_and_is_graded(renderer, entry, saying):
    attempt = rollout(renderer, entry, lambda _: WRONG[saying](7, 8), workflow={"max_tokens": 60})
    assert (attempt.end, attempt.message, attempt.reward) == (End.COMPLETED, "", 0.0)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_policy_that_never_stops_calling_is_stopped(renderer, entry):
    attempt = rollout(
        renderer, entry, lambda _: call("multiply", a=1, b=1) if "multiply" in entry else call("search", query="mill")
    )
    assert (attempt.end, attempt.message, attempt.reward) == (End.COMPLETED, "", 0.0)
    assert len(attempt.steps) == (2 if "multiply" in entry else 5 if "openai" in entry else 4)


def test_search_answers_every_question_without_held_out_entries():
    library = runpy.run_path(str(EXAMPLES / "search/library.py"))
    found = {"tasks.jsonl": set(), "heldout.jsonl": set()}
    for name, titles in found.items():
        for task in load_tasks(EXAMPLES / "search" / name):
            entry = library["lookup"](task.prompt[0]["content"])
            assert task.label.lower() in entry.lower(), task.prompt
            titles.add(entry.partition(":")[0])
    assert found["tasks.jsonl"] | found["heldout.jsonl"] == set(library["ENTRIES"])
    assert not found["tasks.jsonl"] & found["heldout.jsonl"]
    assert library["lookup"]("") == library["lookup"]("zzzz xy") == library["NOTHING"]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("Maud Tesk", 1.0), ("It was maud tesk.", 1.0), ("", 0.0), ("Piet Anslow", 0.0), ("Maud Tesk " + "and others " * 10, 0.0)],
)
def test_answer_is_right_if_it_holds_label_in_few_words(renderer, answer, reward):
    attempt = rollout(renderer, "search/agent.py", lambda _: answer)
    assert (attempt.end, attempt.reward) == (End.COMPLETED, reward)
