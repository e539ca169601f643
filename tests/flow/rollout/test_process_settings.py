"""What surrounds an agent in its own process: its environment, output, limits, and the interpreter that it starts from."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest
from process_cases import SESSION, TASK, opened, write_agent

from penstock.errors import ConfigError, WorkflowError
from penstock.events import Events
from penstock.rollout.author_tasks import AuthorTasks
from penstock.rollout.executors.base import ExecutorContext, read_section
from penstock.rollout.executors.process import ProcessExecutor, ProcessSection
from penstock.rollout.processes.fork_server import why_no_namespaces
from penstock.sdk.discovery import load_agent

THREAD = "threading.Thread(target=threading.Event().wait, daemon=True).start()"


def said(folder, run, *, name="r", **options):
    """The one message that a workflow returns."""

    async def main():
        async with opened(folder, run, **options) as stage:
            return (await stage.run(name)).returned[0]

    return asyncio.run(main())


def test_environment_leads_both_vendors_clients_to_the_session(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own")
    monkeypatch.setenv("OTHER_API_KEY", "another's")
    found = said(tmp_path, "return [dict(os.environ)]", name="any")
    assert (found["OPENAI_BASE_URL"], found["OPENAI_API_BASE"]) == (SESSION.base_url, SESSION.base_url)
    assert found["ANTHROPIC_BASE_URL"] == SESSION.base_url.removesuffix("/v1")
    keys = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
    assert {found[key] for key in keys} == {SESSION.token}
    assert (found["PENSTOCK_ROLLOUT_ID"], found["OTHER_API_KEY"]) == (SESSION.rollout.id, "another's")
    assert "127.0.0.1" in found["NO_PROXY"].split(",")


THREADS_AFTER_FORK = {
    "a tracer": (
        "from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter\n"
        "TRACER = BatchSpanProcessor(ConsoleSpanExporter())"
    ),
    "a handler of forks": f"os.register_at_fork(after_in_child=lambda: {THREAD})",
}


@pytest.mark.skipif(bool(why_no_namespaces()), reason="no namespaces here")
@pytest.mark.parametrize("top", THREADS_AFTER_FORK.values(), ids=THREADS_AFTER_FORK)
def test_agent_whose_libraries_start_threads_in_forks_is_confined_anyway(tmp_path, top):
    """A process must have one thread to confine itself."""
    found = said(tmp_path, "return [{'mounts': os.readlink('/proc/self/ns/mnt')}]", top=top)
    assert found["mounts"] != str(Path("/proc/self/ns/mnt").readlink())


def test_grader_has_users_environment_and_no_key_of_rollout(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own")
    grade = "assert os.environ['OPENAI_API_KEY'] == \"the user's own\"\nassert 'the-token' not in str(os.environ)\nreturn 1.0"

    async def main():
        async with opened(tmp_path, grade=grade) as stage:
            await stage.run()
            await stage.grade()

    asyncio.run(main())


def test_nothing_that_we_hold_open_reaches_the_agent(tmp_path):
    held = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(held, True)
    try:
        found = said(tmp_path, "return [{fd: os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')[:-1]}]")
    finally:
        os.close(held)
    assert str(tmp_path) not in found.values()
    assert found["0"] == os.devnull
    assert sum(name.startswith("socket:") for name in found.values()) == 3  # its own to us, and two of its event loop


@pytest.mark.parametrize("output", ["print('ü')", "os.system('echo ü')", "os.write(2, 'ü\\n'.encode())"])
def test_output_goes_to_a_log_among_the_artifacts(tmp_path, output):
    async def main():
        async with opened(tmp_path, output, "print('graded')\nreturn 1.0", artifacts=tmp_path / "artifacts") as stage:
            await stage.run("r1")
            await stage.grade(name="r1")

    asyncio.run(main())
    folder = tmp_path / "artifacts" / "r1"
    assert (folder / "workflow-output.log").read_text("utf-8") == "ü\n"
    assert (folder / "grader-output.log").read_text("utf-8") == "graded\n"


def test_silent_agent_leaves_no_artifacts_and_crash_leaves_its_stack(tmp_path):
    async def main():
        async with opened(tmp_path, "ctx.metadata or ctypes.string_at(0)", artifacts=tmp_path / "artifacts") as stage:
            await stage.run("silent")
            with pytest.raises(WorkflowError) as caught:
                await stage.run("crash", task=replace(TASK, metadata=None))
            return str(caught.value)

    message = asyncio.run(main())
    log = tmp_path / "artifacts" / "crash" / "workflow-output.log"
    assert message.endswith(f"was killed by SIGSEGV; its output is in {log}")
    assert 'agent.py", line ' in log.read_text()
    assert [folder.name for folder in (tmp_path / "artifacts").iterdir()] == ["crash"]


def test_memory_limit_is_reported_with_the_setting(tmp_path):
    async def main():
        async with opened(tmp_path, "bytearray(200 << 20)", "bytearray(10 << 20)\nreturn 1.0", memory_mb=100) as stage:
            await stage.grade()
            with pytest.raises(WorkflowError, match=r"executor\.memory_mb"):
                await stage.run()

    asyncio.run(main())


@pytest.mark.parametrize("part", ["run", "grade"])
def test_limit_of_concurrency_holds_across_processes(tmp_path, part):
    body = "ring('in')\nos.read(os.open(FOLDER / 'gate', os.O_RDONLY), 1)\nring('out')\nreturn 1.0"
    limit = {"concurrency": {"max_concurrent": 2}}
    os.mkfifo(tmp_path / "gate")
    gate = os.open(tmp_path / "gate", os.O_RDWR)

    async def main():
        async with opened(tmp_path, body, body, tables=(limit, limit)) as stage:
            running = [asyncio.create_task(getattr(stage, part)(name=f"r{place}")) for place in range(4)]
            heard = [await stage.bell.line(), await stage.bell.line()]
            os.write(gate, b"xxxx")
            heard += [await stage.bell.line() for _ in range(6)]
            await asyncio.wait(running)
            inside = [heard[:place].count("in") - heard[:place].count("out") for place in range(9)]
            assert (heard.count("in"), max(inside)) == (4, 2)

    asyncio.run(main())
    os.close(gate)


@pytest.mark.parametrize("options", [{"top": THREAD}, {"fresh": True}])
def test_agent_that_cannot_be_forked_gets_fresh_interpreters(tmp_path, options):
    top = options.pop("top", "") + "\nIMPORTED = (os.getpid(), os.environ.get('OPENAI_API_KEY'))"
    found = said(tmp_path, "return [{'pid': os.getpid(), 'imported': IMPORTED}]", top=top, **options)
    assert found["imported"] == [found["pid"], SESSION.token]


def test_forked_rollouts_differ_in_their_random_numbers(tmp_path):
    run = "import random\nreturn [{'python': random.random(), 'numpy': float(numpy.random.random())}]"

    async def main():
        async with opened(tmp_path, run, top="import numpy") as stage:
            return [(await stage.run()).returned[0] for _ in range(2)]

    first, second = asyncio.run(main())
    assert first["python"] != second["python"]
    assert first["numpy"] != second["numpy"]


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        ("if 'fork_server' in sys.argv[0]: os._exit(7)", "the process that imports it ended with exit code 7"),
        ("if 'fork_server' in sys.argv[0]: raise ValueError('x')", "agent.py, line 12: ValueError: x; fix what the file does"),
        ("if 'fork_server' in sys.argv[0]: signal.pause()", "importing it took longer than executor.start_s = 2; raise it"),
    ],
)
def test_file_that_fails_to_load_there_is_rejected(tmp_path, top, expected):
    async def main():
        async with opened(tmp_path, top=top, start_s=2 if "pause" in top else 60):
            pass

    with pytest.raises(ConfigError) as caught:
        asyncio.run(main())
    assert expected in str(caught.value)


def test_agent_put_together_by_hand_is_refused(tmp_path):
    agent = load_agent(write_agent(tmp_path), {}, {})
    other = replace(agent, workflow=type("Other", (agent.workflow,), {}))
    given = ExecutorContext(agent=other, author_tasks=AuthorTasks(tmp_path, Events()), section=None, load_transcripts=None)
    with pytest.raises(ConfigError, match="executor"):
        asyncio.run(ProcessExecutor(given).__aenter__())


def test_tables_of_the_toml_hold_in_the_other_process(tmp_path):
    run = "return [{'config': self.config.model_dump(), 'type': type(ctx.config).__name__}]"
    top = "class Settings(AgentWorkflowConfig):\n    name: str = 'own'\n    turns: int = 1\n"
    found = said(tmp_path, run, top=top, tables=({"turns": 5}, {}))
    assert (found["type"], found["config"]["turns"], found["config"]["name"]) == ("Settings", 5, "own")


def test_settings_are_read_and_refused():
    assert read_section("process", {"memory_mb": 512, "fresh": True}) == ProcessSection(memory_mb=512, fresh=True)
    with pytest.raises(ConfigError, match="memory_mb"):
        read_section("process", {"memory": 512})
