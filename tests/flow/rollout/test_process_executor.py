"""The process executor: agents that crash, hang, fork or leak end alone, with a reason, and leave no process behind."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from process_cases import DEADLINE_S, SESSION, TASK, below, gone, named, opened

from penstock.errors import EngineError, GraderError, WorkflowError
from penstock.events import Events
from penstock.rollout.author_tasks import AuthorTasks
from penstock.rollout.executors.base import ExecutorContext
from penstock.rollout.executors.inline import InlineExecutor
from penstock.sdk.discovery import load_agent
from penstock.sdk.samples import RolloutSample

THREAD = "threading.Thread(target=threading.Event().wait, daemon=True).start()"
HANG = "ring(os.getpid())\nawait asyncio.Event().wait()"


def reported(folder, run, **options):
    """What comes of one workflow."""

    async def main():
        async with opened(folder, run, **options) as stage:
            return await stage.run()

    return asyncio.run(main())


def failure(folder, run="pass", *, error=WorkflowError, timeout_s=DEADLINE_S, grade=None, **options):
    """The message with which one workflow, or one grader, fails."""

    async def main():
        async with opened(folder, run, grade or "pass", **options) as stage:
            with pytest.raises(error) as caught:
                await (stage.grade(timeout_s=timeout_s) if grade else stage.run(timeout_s=timeout_s))
            return str(caught.value)

    return asyncio.run(main())


def test_workflow_and_grader_run_in_processes_of_their_own(tmp_path):
    async def main():
        async with opened(tmp_path, "ring(os.getpid())", "ring(os.getpid())\nreturn 0.5") as stage:
            await stage.run()
            rewards = await stage.grade()
            pids = {int(await stage.bell.line()), int(await stage.bell.line()), os.getpid()}
            assert (len(pids), [tuple(each) for each in rewards]) == (3, [(None, 0.5, None, {})])

    asyncio.run(main())


def test_messages_come_back_as_plain_values_however_large_or_odd(tmp_path):
    run = """
    class Thing:
        def __str__(self):
            return "a thing"

    large = "ü🎲" * 2_000_000
    return [{"role": "user", "content": large, "thing": Thing(), "set": {1}, "big": 1 << 80, "half": "\\ud800"}]
    """
    (message,) = reported(tmp_path, run).returned
    assert message["content"] == "ü🎲" * 2_000_000
    assert (message["big"], message["half"], message["thing"]) == (1 << 80, "\ud800", "a thing")


def test_samples_reach_the_grader_as_they_are(tmp_path):
    sample = RolloutSample(id="main", messages=[{"content": "ü" * 5_000_000, "big": 1 << 80, "half": "\ud800"}], steps=(0, 2))
    grade = """
    (message,) = ctx.samples["main"].messages
    assert message == {"content": "ü" * 5_000_000, "big": 1 << 80, "half": "\\ud800"}
    assert (ctx.label, ctx.metadata, ctx.samples["main"].steps) == ("6", {"seen": []}, (0, 2))
    ctx.set_step_reward(2, 0.25)
    """

    async def main():
        async with opened(tmp_path, grade=grade) as stage:
            assert [tuple(each) for each in await stage.grade({"main": sample})] == [(None, 0.25, 2, {})]

    asyncio.run(main())


def test_the_label_is_nowhere_in_the_workflows_process(tmp_path):
    run = """
    import gc
    from penstock.records import Task
    return [{"labels": [each.label for each in gc.get_objects() if isinstance(each, Task)]}]
    """
    grade = "assert ctx.label == '6'\nreturn 1.0"

    async def main():
        async with opened(tmp_path, run, grade) as stage:
            await stage.grade()
            assert (await stage.run()).returned == [{"labels": [None]}]

    asyncio.run(main())


DEATHS = {
    "segfault": ("ctypes.string_at(0)", "its process was killed by SIGSEGV"),
    "exit": ("os._exit(3)", "its process ended with exit code 3"),
    "exit as if well": ("os._exit(0)", "its process ended with exit code 0"),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "its process was killed by SIGKILL, by the user or for want of memory"),
    "abort": ("os.abort()", "its process was killed by SIGABRT"),
    "sys.exit in a task": ("async def quit():\n    sys.exit(4)\nawait asyncio.create_task(quit())", "exit code 4"),
}


def chosen(cases):
    """A workflow that does what the task names, and the tasks."""
    run = "".join(f"if ctx.metadata['case'] == {name!r}:\n{textwrap.indent(text, '    ')}\n" for name, text in cases.items())
    return run, {name: replace(TASK, metadata={"case": name}) for name in cases}


async def settled(stage, tasks, **options):
    """What each of the tasks comes to, all running at once."""
    async with asyncio.TaskGroup() as group:
        running = {name: group.create_task(caught(stage.run(name, task=task, **options))) for name, task in tasks.items()}
    return {name: each.result() for name, each in running.items()}


async def caught(work):
    try:
        return await work
    except (WorkflowError, TimeoutError) as error:
        return error


def test_process_that_dies_says_how_and_disturbs_no_neighbour(tmp_path):
    async def main():
        run, tasks = chosen({"fine": "return [{'said': 'fine'}]", **{name: text for name, (text, _) in DEATHS.items()}})
        async with opened(tmp_path, run) as stage:
            results = await settled(stage, tasks)
        assert results.pop("fine").returned == [{"said": "fine"}]
        for name, error in results.items():
            assert str(error).startswith("workflow 'Work': its process "), name
            assert DEATHS[name][1] in str(error), name

    asyncio.run(main())


def test_grader_that_dies_is_the_graders_error(tmp_path):
    assert failure(tmp_path, grade="os._exit(3)", error=GraderError) == "grader 'Check': its process ended with exit code 3"


FAILURES = {
    "raises": ("raise KeyError('x')", WorkflowError),
    "in a group": ("async with asyncio.TaskGroup() as group:\n    group.create_task(asyncio.wait_for(1, 1))", WorkflowError),
    "exits": ("sys.exit(2)", WorkflowError),
    "cancels itself": ("asyncio.current_task().cancel()\nawait asyncio.Event().wait()", WorkflowError),
    "engine": ("error = RuntimeError('down')\nerror.code = 'engine_error'\nraise error", EngineError),
}


@pytest.mark.parametrize("flaw", FAILURES)
def test_error_has_category_and_words_that_inline_gives_it(tmp_path, flaw):
    run, error = FAILURES[flaw]
    message = failure(tmp_path, run, error=error)
    agent = load_agent(tmp_path / "agent.py", {}, {})
    given = ExecutorContext(agent=agent, author_tasks=AuthorTasks(tmp_path, Events()), section=None, load_transcripts=None)
    with pytest.raises(error) as inline:
        asyncio.run(InlineExecutor(given).run(TASK, SESSION, rollout_id="r", timeout_s=DEADLINE_S))
    assert str(inline.value) == message
    assert message.startswith("workflow 'Work': ")


def test_reward_that_is_none_is_the_graders_error(tmp_path):
    assert "reward nan is not a finite number" in failure(tmp_path, grade="return float('nan')", error=GraderError)


SWALLOWS = """
while True:
    try:
        await asyncio.Event().wait()
    except BaseException:
        pass
"""
HANGS = {
    "awaits": "await asyncio.Event().wait()",
    "blocks the loop": "signal.pause()",
    "holds the interpreter": "ctypes.PyDLL(None).pause()",
    "swallows its cancellation": SWALLOWS,
    "ignores SIGTERM": "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsignal.pause()",
    "waits for a thread": "await asyncio.to_thread(threading.Event().wait)",
}


def test_workflow_that_hangs_is_killed_at_its_deadline(tmp_path):
    async def main():
        run, tasks = chosen(HANGS)
        async with opened(tmp_path, f"ring(os.getpid())\n{run}", grace_s=0.2) as stage:
            running = asyncio.create_task(settled(stage, tasks, timeout_s=1))
            processes = [process for _ in tasks for process in named(await stage.bell.line())]
            assert {name: type(result) for name, result in (await running).items()} == dict.fromkeys(HANGS, TimeoutError)
            assert not any(process.is_running() for process in processes)

    asyncio.run(main())


def test_grader_that_hangs_is_killed_at_its_deadline(tmp_path):
    hang = HANGS["holds the interpreter"]
    assert failure(tmp_path, grade=hang, error=TimeoutError, timeout_s=0.3, grace_s=0.2) == ""


def test_late_workflow_may_clean_up_first(tmp_path):
    async def main():
        run = "try:\n    await asyncio.Event().wait()\nfinally:\n    ring('cleaned up')"
        async with opened(tmp_path, run, grace_s=DEADLINE_S) as stage:
            with pytest.raises(TimeoutError):
                await stage.run(timeout_s=0.1)
            assert await stage.bell.line() == "cleaned up"

    asyncio.run(main())


CHILDREN = """
stay = [sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"]
child, hidden = subprocess.Popen(stay), subprocess.Popen(stay, start_new_session=True)
forked = os.fork()
if not forked:
    signal.pause()
ring(f"{os.getpid()} {child.pid} {hidden.pid} {forked}")
"""

FORKED = CHILDREN.replace(", start_new_session=True", "")


@pytest.mark.parametrize("end", ["pass", "os._exit(1)", "await asyncio.Event().wait()"])
def test_what_an_agent_started_dies_with_it(tmp_path, end):
    async def main():
        async with opened(tmp_path, CHILDREN + end) as stage:
            running = asyncio.create_task(stage.run(timeout_s=2))
            processes = named(await stage.bell.line())
            await asyncio.wait({running})
            assert isinstance(running.exception(), WorkflowError | TimeoutError | None)
            assert await asyncio.to_thread(gone, processes)

    asyncio.run(main())


def test_forked_child_that_returns_from_run_says_nothing_in_name(tmp_path):
    async def main():
        run = "if not os.fork():\n    return [{'said': 'by the child'}]\nos.wait()\nreturn [{'said': 'by the agent'}]"
        async with opened(tmp_path, run) as stage:
            assert (await stage.run()).returned == [{"said": "by the agent"}]

    asyncio.run(main())


def test_cancelled_run_asks_then_kills(tmp_path):
    async def main():
        run = "ring(os.getpid())\ntry:\n    await asyncio.Event().wait()\nfinally:\n    ring('asked')\n    signal.pause()"
        async with opened(tmp_path, run) as stage:
            running = asyncio.create_task(stage.run())
            process = psutil.Process(int(await stage.bell.line()))
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert (await stage.bell.line(), process.is_running()) == ("asked", False)

    asyncio.run(main())


def test_leaving_the_executor_ends_every_process(tmp_path):
    async def main():
        async with opened(tmp_path, HANG) as stage:
            running = [asyncio.create_task(stage.run(f"r{place}")) for place in range(3)]
            processes = [process for _ in running for process in named(await stage.bell.line())]
            processes.append(processes[0].parent())
        await asyncio.wait(running)
        assert all(isinstance(each.exception(), WorkflowError) for each in running)
        assert await asyncio.to_thread(gone, processes)

    asyncio.run(main())


def test_killed_fork_server_fails_rollouts_with_reason_and_is_replaced(tmp_path):
    async def main():
        async with opened(tmp_path, f"if ctx.metadata['quick']:\n    return\n{FORKED}\nawait asyncio.Event().wait()") as stage:
            running = asyncio.create_task(stage.run(task=replace(TASK, metadata={"quick": False})))
            processes = named(await stage.bell.line())
            processes[0].parent().kill()
            with pytest.raises(WorkflowError, match="process"):
                await running
            assert await asyncio.to_thread(gone, processes)
            await stage.run(task=replace(TASK, metadata={"quick": True}))

    asyncio.run(main())


PARENT = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from process_cases import opened

async def main():
    async with opened(sys.argv[2], {run!r}, top={top!r}) as stage:
        running = asyncio.create_task(stage.run())
        print(await stage.bell.line(), flush=True)
        await running

asyncio.run(main())
"""


@pytest.mark.parametrize("top", ["", THREAD], ids=["forked", "fresh"])
def test_killed_parent_leaves_no_process(tmp_path, top):
    code = PARENT.format(run=f"{CHILDREN}\nctypes.PyDLL(None).pause()", top=top)
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with parent:
        pids = parent.stdout.readline().split()
        processes = below(parent.pid)
        assert {int(pid) for pid in pids} < {process.pid for process in processes}
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(DEADLINE_S)
        assert gone(processes[1:])


def test_parent_killed_during_the_import_leaves_no_process(tmp_path):
    top = (
        "if 'fork_server' in sys.argv[0]:\n    print(os.getpid(), file=open(FOLDER / 'bell', 'w'), flush=True)\n"
        "    while True: pass"
    )
    code = PARENT.format(run="pass", top=top)
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)]
    os.mkfifo(tmp_path / "bell")
    with subprocess.Popen(command) as parent:
        with (tmp_path / "bell").open() as bell:
            processes = named(bell.readline())
        parent.kill()
        assert processes
        assert gone(processes)
