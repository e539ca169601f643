"""Preflight: an author's file is tried in another process first, and whatever it does there becomes one line with a remedy."""

import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from penstock.config import AgentSection
from penstock.errors import ConfigError
from penstock.run.inputs import preflight
from penstock.sdk.discovery import load_agent

pytestmark = pytest.mark.slow  # each case starts a process

AGENT = """
from penstock import AgentWorkflow, AgentWorkflowConfig, Grader

class Work(AgentWorkflow):
    async def run(self, ctx):
        pass

class Check(Grader):
    async def grade(self, ctx):
        pass
"""
GUARD = "under `if __name__ == '__main__':` or into run()"
DEADLINE_S = 60


def write(folder, text):
    entry = folder / "agent.py"
    entry.write_text(textwrap.dedent(text), encoding="utf-8")
    return entry


def refused(entry, workflow=None, grader=None, **options):
    with pytest.raises(ConfigError) as caught:
        preflight(AgentSection(entry=entry), workflow or {}, grader or {}, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_good_file_passes_and_is_not_imported_here(tmp_path, capfd):
    entry = write(tmp_path, f"print('imported')\nimport os\nprint(os.getpid(), file=open('{tmp_path}/pid', 'w'))\n{AGENT}")
    preflight(AgentSection(entry=entry), {"name": "x"}, {})
    assert int((tmp_path / "pid").read_text()) != os.getpid()
    assert str(tmp_path) not in sys.path
    assert capfd.readouterr() == ("", "")


FLAWS = {
    "missing module": ("import no_such_module_at_all\n", {}),
    "exits": ("import sys\nsys.exit(3)\n", {}),
    "syntax, not ASCII": ("ü = (\n", {}),
    "unknown key": (AGENT + "class Config(AgentWorkflowConfig):\n    turns: int = 1\n", {"turn": 3}),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_what_loading_would_refuse_is_refused_in_the_same_words(tmp_path, flaw):
    text, table = FLAWS[flaw]
    entry = write(tmp_path, text)
    with pytest.raises(ConfigError) as loading:
        load_agent(entry, table, {})
    assert refused(entry, table) == str(loading.value)


def test_missing_file_is_refused(tmp_path):
    assert "no such Python file; set [agent] entry" in refused(tmp_path / "absent.py")


INITS = {
    "takes no config": ("def __init__(self):\n        pass", ": Work(config) raised TypeError: "),
    "fails": ("def __init__(self, config):\n        raise OSError('no\\nway')", ", line 6: Work(config) raised OSError: no way; "),
    "exits": ("def __init__(self, config):\n        raise SystemExit(1)", ", line 6: Work(config) raised SystemExit: 1; "),
}


@pytest.mark.parametrize("flaw", INITS)
def test_workflow_that_cannot_be_made_is_refused(tmp_path, flaw):
    init, expected = INITS[flaw]
    entry = write(tmp_path, AGENT.replace("async def run", f"{init}\n    async def run"))
    message = refused(entry)
    assert f"{entry}{expected}" in message
    assert message.endswith("; let __init__ take the config and do little else")


def test_grader_that_cannot_be_made_is_refused(tmp_path):
    entry = write(tmp_path, AGENT.replace("async def grade", "def __init__(self, config):\n        1 / 0\n    async def grade"))
    assert "line 10: Check(config) raised ZeroDivisionError" in refused(entry)


HANGS = {
    "in Python": "while True:\n    pass\n",
    "in C, holding the interpreter": "import ctypes; ctypes.PyDLL(None).pause()\n",
}


@pytest.mark.parametrize("hang", HANGS)
def test_import_that_hangs_is_refused_with_its_line(tmp_path, hang):
    entry = write(tmp_path, AGENT + HANGS[hang])
    message = refused(entry, timeout_s=0.2)
    assert message.startswith(f"{entry}, line 1")
    assert message.endswith(f": importing it took longer than 0.2 s; move long work {GUARD}")


def test_import_that_hangs_in_a_sibling_names_the_importing_line(tmp_path):
    (tmp_path / "slow_sibling.py").write_text("import threading; threading.Event().wait()")
    assert f"{tmp_path}/agent.py, line 2: importing it took longer" in refused(
        write(tmp_path, "\nimport slow_sibling\n"), timeout_s=0.2
    )


DEATHS = {
    "exit": (
        "import os\nprint('why')\nos._exit(3)\n",
        "agent.py: importing it failed: its process ended with exit code 3 and had said 'why'",
    ),
    "exit as if well": ("import os\nos._exit(0)\n", "agent.py: importing it failed: its process ended with exit code 0; move"),
    "segfault": (
        "import ctypes\nctypes.string_at(0)\n",
        "agent.py, line 2: importing it failed: its process was killed by SIGSEGV; move",
    ),
    "killed": (
        "import os\nos.kill(os.getpid(), 9)\n",
        "its process was killed by SIGKILL, by the user or for want of memory; move",
    ),
}


@pytest.mark.parametrize("death", DEATHS)
def test_import_that_ends_the_process_is_refused_and_says_how(tmp_path, death):
    text, expected = DEATHS[death]
    message = refused(write(tmp_path, text))
    assert expected in message
    assert message.endswith(f"move what did that {GUARD}")


def test_nothing_that_the_file_started_is_left(tmp_path):
    text = "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
    entry = write(tmp_path, AGENT + text + f"print(child.pid, file=open('{tmp_path}/pid', 'w'))\n")
    preflight(AgentSection(entry=entry), {}, {})
    pid = int((tmp_path / "pid").read_text())
    _, alive = psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=DEADLINE_S)
    assert not alive


def test_interrupt_ends_the_other_process_too(tmp_path):
    os.mkfifo(tmp_path / "bell")
    entry = write(
        tmp_path, f"import os, signal\nprint(os.getpid(), file=open('{tmp_path}/bell', 'w'), flush=True)\nsignal.pause()\n"
    )
    imports = "from penstock.config import AgentSection\nfrom penstock.run.inputs import preflight"
    code = f"{imports}\npreflight(AgentSection(entry={str(entry)!r}), {{}}, {{}})"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as ours:
        with (tmp_path / "bell").open() as bell:
            theirs = psutil.Process(int(bell.readline()))
        ours.send_signal(signal.SIGINT)
        assert ours.wait(DEADLINE_S) == -signal.SIGINT
        _, alive = psutil.wait_procs([theirs], timeout=DEADLINE_S)
        assert not alive


def test_nothing_heavy_is_loaded_for_it(tmp_path):
    entry = write(
        tmp_path,
        AGENT + "import sys\nheavy = {'torch', 'transformers', 'openai', 'aiohttp'} & set(sys.modules)\nassert not heavy, heavy\n",
    )
    preflight(AgentSection(entry=entry), {}, {})
