"""`penstock rollout serve` in its own process: one ready line, one line for what cannot be served."""

import json
import signal
import subprocess

import pytest
from cli_cases import called, environment, penstock

AGENT = """
from penstock import AgentWorkflow, Grader

class Work(AgentWorkflow):
    async def run(self, ctx): ...

class Check(Grader):
    async def grade(self, ctx): ...
"""


@pytest.fixture
def agent(tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    return tmp_path / "agent.py"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_server_says_once_where_it_serves_and_stops_on_signal(agent, tmp_path, number, code):
    command = penstock("rollout", "serve", agent, "--port", 0, "--journal", tmp_path / "j.db")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        ready = json.loads(process.stdout.readline())
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (ready["event"], ready["agent"], ready["url"].startswith("http://127.0.0.1:")) == ("ready", str(agent), True)
    assert (process.returncode, out, "stopping" in err) == (code, "", True)
    assert (tmp_path / "j.db").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent.py"], "no such Python file"),
        (["agent.py", "--host", "0.0.0.0"], "PENSTOCK_ROLLOUT_TOKEN"),
        (["agent.py", "--token-env", "NOT_SET_HERE"], "NOT_SET_HERE"),
        (["agent.py", "--hosts", "http://x"], "is no host"),
        (["agent.py", "--journal", "agent.py/j.db"], "give another journal"),
        (["agent.py", "--port", "70000"], "--port"),
    ],
)
def test_unservable_input_is_one_line_and_exit_code_2(agent, tmp_path, arguments, words):
    done = called(tmp_path, "rollout", "serve", *arguments, *([] if "--port" in arguments else ["--port", 0]), "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert words in json.loads(done.stderr)["error"]["message"]


def test_port_that_is_taken_is_said_with_a_remedy(agent, tmp_path):
    from penstock.http.listen import bind

    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        done = called(tmp_path, "rollout", "serve", agent, "--port", taken.getsockname()[1])
    assert (done.returncode, "give another --port" in done.stderr) == (2, True)
