"""Attacks on the author's grader, in a child process: a grader that hangs, leaks or crashes costs a finding, not the run.

Run as a module, this is the child: it reads an agent spec and tasks from stdin and writes a line for each try to an inherited file.
"""

import asyncio
import faulthandler
import inspect
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from penstock.config import RunConfig
from penstock.errors import ConfigError, EngineError, GraderError
from penstock.events import Events, Listener
from penstock.graders import RULES
from penstock.graders.attack import AttackReport, Outcome, TryKey, common_labels, judge_tries, tries
from penstock.graders.rule import RuleGrader
from penstock.records import Attempt, End, Grade, Message, Task, make_rollout
from penstock.rollout.author_tasks import AuthorTasks
from penstock.rollout.in_process import InProcessAgent, Reward
from penstock.rollout.transcripts import Transcript, make_samples
from penstock.run.agent_preflight import preflight
from penstock.run.inputs import Inputs
from penstock.sdk.agent_spec import AgentSpec
from penstock.sdk.dataset import load_tasks
from penstock.sdk.discovery import Agent
from penstock.sdk.routing import MAIN
from penstock.system.processes import describe_exit, last_line, run_module

TASKS = 8
PREFLIGHT_S = 6.0
"""That the attack before a training run takes at most, besides the start of its process."""
STARTUP_S = 60.0
ASKS_OTHERS = ("judge", "openai", "anthropic", "litellm", "httpx", "aiohttp", "requests", "urllib")
"""Words in a grader's code by which it may ask a service that costs money: it is not attacked without being told to."""


def attack_grader(config: RunConfig, tasks: Sequence[Task], *, count: int = TASKS, limit_s: float = 600.0) -> AttackReport:
    """Try everything on `count` of the tasks, for `limit_s` seconds at most: what was not tried then is left out.

    Raises ConfigError if nothing can be tried.
    """
    chosen, ends = spread(tasks, count), time.monotonic() + limit_s
    labels, outcomes = common_labels(tasks), dict[TryKey, Outcome]()
    names = [label for label, _ in labels]
    planned = list(tries(chosen, names))
    spec = AgentSpec.from_config(config.agent, config.workflow, config.grader).write().decode()
    while len(outcomes) < len(planned) and (left := ends - time.monotonic()) > 0:
        timeout_s = min(config.rollout.grader_timeout_s, max(2.0, limit_s / 20))
        request = {
            "spec": spec,
            "tasks": [asdict(task) for task in chosen],
            "labels": names,
            "transcripts": list(config.policies) or [MAIN],
            "skip": len(outcomes),
            "limit_s": left,
            "timeout_s": timeout_s,
        }
        found = _run_child(request, left)
        if not found:
            break
        outcomes |= found  # where the grader hung or crashed, the next child goes on behind that try
    return judge_tries(chosen, planned, outcomes, commonest=max((share for _, share in labels), default=0.0))


def _run_child(request: Mapping[str, Any], left_s: float) -> dict[TryKey, Outcome]:
    with tempfile.TemporaryFile() as answers, tempfile.TemporaryFile() as output:
        code = run_module(
            __name__,
            str(answers.fileno()),
            stdin=json.dumps(request, default=str).encode(),
            output=output.fileno(),
            timeout_s=left_s + STARTUP_S,
            pass_fds=(answers.fileno(),),
        )
        outcomes = _read_outcomes(answers)
        printed = last_line(_text(output))
    if not outcomes and code:
        said = f" and said {printed[:200]!r}" if printed else ""
        raise ConfigError(
            f"the grader could not be attacked: its process {describe_exit(code)}{said}; see: penstock train --dry-run"
        )
    return outcomes


def read_tasks(config: RunConfig) -> list[Task]:
    """The tasks to train on, after the checks of the agent that a run makes."""
    traits = preflight(config.agent, config.workflow, config.grader)
    return load_tasks(config.dataset.train, columns=traits.columns)


def spread(tasks: Sequence[Task], count: int) -> list[Task]:
    """Up to `count` tasks from the whole file, with different labels as far as there are."""
    first = list({task.label: task for task in reversed(tasks)}.values())[::-1]
    rest = [task for task in tasks if task not in first] if len(first) < count else []
    found = [*first, *rest]
    return [found[number * len(found) // min(count, len(found))] for number in range(min(count, len(found)))]


def may_ask_others(agent: Agent) -> bool:
    """Returns whether the grader's code looks as if it asked a service, such as a judge."""
    try:
        source = inspect.getsource(agent.grader) if agent.grader else ""
    except (OSError, TypeError):
        return True
    module = getattr(agent.grader, "__module__", "")
    return module.endswith((".rubric", ".judge")) or any(word in source.lower() for word in ASKS_OTHERS)


def warn_of_holes(config: RunConfig, inputs: Inputs, listener: Listener, *, see: str) -> None:
    """Before the first step of a run: attack its grader for some seconds, and give notice of what it rewards.

    `see` is the command that shows all of it.
    """
    folder, agent = config.run.folder / config.run.name, inputs.agent
    if not config.train.attack_grader or folder.exists() or not agent.graded_by_run or may_ask_others(agent):
        return
    listener("stage", {"text": "trying worthless replies on the grader"})
    try:
        report = attack_grader(config, inputs.tasks, limit_s=PREFLIGHT_S)
    except ConfigError:  # the run itself will tell
        return
    if report.holes:
        first, *others = report.holes
        more = f" (and {len(others)} more)" if others else ""
        what = f"{first.reward:.3g} for {first.kind}, {first.name}{more}"
        text = f"the grader rewards worthless replies: {what}; a policy will find that"
        remedy = f"see all with: {see}, or do without this check: --set train.attack_grader=false"
        listener("notice", {"text": f"{text}; {remedy}"})


def _read_outcomes(file: IO[bytes]) -> dict[TryKey, Outcome]:
    """ConfigError if the child refused to begin."""
    outcomes = dict[TryKey, Outcome]()
    for line in _text(file).splitlines():
        found: dict[str, Any] = json.loads(line)
        if "refused" in found:
            raise ConfigError(found["refused"])
        kind, name, task = found["try"]
        outcomes[kind, name, task] = Outcome(found["reward"], found["error"])
    return outcomes


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


async def _attack(request: Mapping[str, Any], answers: IO[str]) -> None:
    agent = AgentSpec.read(request["spec"].encode()).load()
    made: list[Task] = [Task(**fields) for fields in request["tasks"]]
    tasks = [replace(task, prompt=tuple(task.prompt)) for task in made]
    if not agent.graded_by_run:
        agent = _graded_by_rule(agent, tasks)
    work, ends = InProcessAgent(agent, AuthorTasks(agent.entry.parent, Events())), time.monotonic() + request["limit_s"]
    timeout_s = request["timeout_s"]
    late = f"it ran longer than {timeout_s:g} s"
    with tempfile.TemporaryDirectory(prefix="penstock-attack-") as scratch:
        for number, each in enumerate(tries(tasks, request["labels"])):
            if number < request["skip"]:
                continue
            if time.monotonic() > ends:
                return
            # A grader that blocks or crashes takes the process along: what stands in the file then counts.
            _write(answers, each.key, Outcome(None, f"{late}, or ended its process"))
            faulthandler.dump_traceback_later(timeout_s + 1, exit=True)
            said = _transcript(tasks[each.task], each.messages)
            samples = make_samples(dict.fromkeys(request["transcripts"], said), {})
            try:
                folder = Path(scratch) / str(number)
                rewards = await work.grade(tasks[each.task], samples, timeout_s=timeout_s, artifacts_dir=folder)
                outcome = Outcome(_total(rewards))
            except TimeoutError:
                outcome = Outcome(None, late)
            except (GraderError, EngineError) as error:
                outcome = Outcome(None, str(error))
            faulthandler.cancel_dump_traceback_later()
            _write(answers, each.key, outcome)


def _graded_by_rule(agent: Agent, tasks: Sequence[Task]) -> Agent:
    """A flow grades its own rollouts, mostly by the rule of its rows: that can be attacked."""
    if not all(str((task.metadata or {}).get("data_source")) in RULES for task in tasks):
        raise ConfigError("this agent grades its own rollouts: there is no grader to attack; define a Grader")
    return replace(agent, grader=RuleGrader, grader_config=None, trusted=False)


def _transcript(task: Task, messages: list[Message]) -> Transcript:
    replies = [message for message in messages if message["role"] == "assistant"]
    return Transcript([*task.prompt, *messages], [], tuple(range(len(replies))), replies)


def _total(rewards: Sequence[Reward]) -> float | None:
    rollout = make_rollout("attack", "attack", 0)
    grades = tuple(
        Grade(rollout_id=rollout.id, reward=r.value, source="grader", transcript=r.transcript, step=r.step) for r in rewards
    )
    return Attempt(rollout=rollout, end=End.COMPLETED, grades=grades).grades_total


def _write(file: IO[str], which: TryKey, outcome: Outcome) -> None:
    file.write(json.dumps({"try": which, "reward": outcome.reward, "error": outcome.error}) + "\n")
    file.flush()


def _child_main(answers: int) -> None:
    request = json.loads(sys.stdin.buffer.read())
    with open(answers, "w", encoding="utf-8", closefd=False) as file:
        try:
            asyncio.run(_attack(request, file))
        except ConfigError as error:
            file.write(json.dumps({"refused": str(error)}) + "\n")
            file.flush()
        os._exit(0)  # without waiting for threads of the author's file


if __name__ == "__main__":
    _child_main(int(sys.argv[1]))
