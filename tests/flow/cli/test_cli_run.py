"""`penstock run -- COMMAND`: any program, recorded; its input, output and exit code are its own."""

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest
from cli_cases import ENDLESS, ENGINE, environment, penstock

from penstock.pool.sqlite import SqlitePool
from penstock.records import Rollout
from penstock.testing import write_tokenizer

TALK = """
    import sys
    from openai import OpenAI
    client, talk = OpenAI(), [{"role": "user", "content": "Hello"}]
    for turn in range(2):
        answer = client.chat.completions.create(model="any", messages=talk).choices[0].message
        talk += [answer.model_dump(exclude_none=True), {"role": "user", "content": "And?"}]
"""


def command(tmp_path: Path, code: str, *options: Any) -> list[str]:
    if not (tmp_path / "model").exists():
        write_tokenizer(tmp_path / "model")
    arguments = ["--engine", ENGINE, "--model", tmp_path / "model", "--folder", tmp_path / "run", *options]
    return penstock("run", *arguments, "--", sys.executable, "-c", textwrap.dedent(code))


def ran(tmp_path: Path, code: str, *options: Any, **more: Any) -> subprocess.CompletedProcess[str]:
    call = command(tmp_path, code, *options)
    return subprocess.run(call, capture_output=True, text=True, timeout=120, env=environment(), **more)


def attempts(tmp_path: Path) -> list[Rollout]:
    async def look() -> list[Rollout]:
        pool = SqlitePool(tmp_path / "run")
        try:
            return [attempt for group in await pool.groups("adhoc") for attempt in group.rollouts]
        finally:
            await pool.close()

    return asyncio.run(look())


def test_a_program_is_recorded_and_summed_up(tmp_path):
    result = ran(tmp_path, TALK, "--json")
    summary = json.loads(result.stderr)
    [attempt] = attempts(tmp_path)
    assert (result.returncode, result.stdout, attempt.end) == (0, "", "completed")
    assert [node.parent for node in attempt.nodes] == [None, 0]
    tokens = sum(len(step.completion_ids) for step in attempt.steps)
    assert (summary["calls"], summary["sampled_tokens"], summary["exact_token_rate"], summary["breaks"]) == (2, tokens, 1.0, {})
    assert (summary["end"], summary["exit_code"], summary["rollout_id"]) == ("completed", 0, attempt.ref.id)
    assert summary["folder"] == str(tmp_path / "run")


def test_program_without_call_is_reported_how_to_reach_gateway(tmp_path):
    result = ran(tmp_path, "pass")
    assert "no call reached the gateway" in result.stderr
    assert "OPENAI_BASE_URL" in result.stderr
    assert "OPENAI_BASE_URL" in json.loads(ran(tmp_path, "pass", "--json").stderr)["hint"]


def test_the_report_of_a_recording_shows_it(tmp_path):
    summary = json.loads(ran(tmp_path, TALK, "--json").stderr)
    written = subprocess.run(penstock("report", tmp_path / "run"), capture_output=True, text=True, timeout=60, env=environment())
    assert (written.returncode, written.stderr) == (0, "")
    page = Path(written.stdout.strip()).read_text()
    assert "And?" in page and summary["rollout_id"] in page


def test_input_output_and_exit_code_are_the_commands(tmp_path):
    code = "import sys; sys.stdout.write(sys.stdin.read() * 2); sys.stderr.write('told'); sys.exit(3)"
    result = ran(tmp_path, code, input="öhm\n")
    assert (result.returncode, result.stdout) == (3, "öhm\nöhm\n")
    said = re.sub("^penstock: the command runs without a sandbox.*\n", "", result.stderr)  # where this machine has none
    assert said.startswith("told") and "ended as agent_error" in said
    [attempt] = attempts(tmp_path)
    assert (attempt.end, attempt.message) == ("agent_error", "the command ended with exit code 3")


def test_command_ended_by_a_signal_gets_the_shell_exit_code(tmp_path):
    result = ran(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert (result.returncode, attempts(tmp_path)[0].end) == (128 + signal.SIGTERM, "agent_error")


def test_the_command_finds_the_model_and_nothing_that_opens_more(tmp_path):
    result = ran(tmp_path, "import json, os, sys; json.dump({'environment': dict(os.environ), 'arguments': sys.argv}, sys.stdout)")
    reported = json.loads(result.stdout)["environment"]
    url, token = reported["OPENAI_BASE_URL"], reported["OPENAI_API_KEY"]
    assert url.startswith("http://127.0.0.1:") and url.endswith("/v1")
    assert (reported["OPENAI_API_BASE"], reported["ANTHROPIC_BASE_URL"]) == (url, url.removesuffix("/v1"))
    assert token == reported["ANTHROPIC_API_KEY"] == reported["ANTHROPIC_AUTH_TOKEN"]
    assert token.startswith(f"mk-{reported['PENSTOCK_ROLLOUT_ID']}.")
    assert {"127.0.0.1", "localhost"} <= set(reported["NO_PROXY"].split(",")) == set(reported["no_proxy"].split(","))
    assert not re.search(r"(?<![a-z])(ck|ak)-", result.stdout)  # within a word they are no token
    assert not [file for file in (tmp_path / "run").iterdir() if b"ck-" in file.read_bytes()]


def test_the_anthropic_client_is_recorded_too(tmp_path):
    pytest.importorskip("anthropic")
    code = """
        from anthropic import Anthropic
        body = {"model": "any", "max_tokens": 40, "messages": [{"role": "user", "content": "Hello"}]}
        print(Anthropic().messages.create(**body).content[0].text)
    """
    result = ran(tmp_path, code)
    assert (result.returncode, "tokens" in result.stdout, len(attempts(tmp_path)[0].steps)) == (0, True, 1), result.stderr


def test_commands_recorded_into_one_folder_are_rollouts_of_one_pool(tmp_path):
    for _ in range(2):
        ran(tmp_path, TALK)
    first, second = attempts(tmp_path)
    assert (len(first.steps), len(second.steps)) == (2, 2)
    assert first.ref.id != second.ref.id


def test_settings_of_sampling_hold_for_the_command(tmp_path):
    ran(tmp_path, TALK, "--set", "sampling.max_tokens=3", "--set", "sampling.temperature=0.5")
    assert {(step.sampling.temperature, len(step.completion_ids)) for step in attempts(tmp_path)[0].steps} == {(0.5, 3)}


def test_options_of_the_command_are_its_own(tmp_path):
    result = ran(tmp_path, "import sys; print(sys.argv[1:])")
    assert result.stdout == "[]\n"
    model = ["--engine", ENGINE, "--model", tmp_path / "model", "--folder", tmp_path / "run"]
    call = penstock("run", *model, sys.executable, "-c", "import sys; print(sys.argv[1:])", "--json", "--model", "x", "--", "y")
    result = subprocess.run(call, capture_output=True, text=True, timeout=60, env=environment())
    assert result.stdout == "['--json', '--model', 'x', '--', 'y']\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_and_all_that_it_started(tmp_path, number):
    code = """
        import subprocess, sys, time
        stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
        child.stdout.readline()
        print("up", flush=True)
        time.sleep(600)
    """
    process = subprocess.Popen(command(tmp_path, code), stdout=-1, stderr=-1, text=True, env=environment())
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 2
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(started, 30)
    assert alive == []
    [attempt] = attempts(tmp_path)
    assert (attempt.end, attempt.message) == ("cancelled", f"stopped by {number.name}")


def test_command_past_timeout_is_ended_with_that_it_started(tmp_path):
    seconds = f"600.{os.getpid()}"
    stubborn = f"trap '' TERM; sleep {seconds} & echo up; trap 'exit 7' TERM; wait"
    call = [*command(tmp_path, "", "--timeout", "2", "--json")[:-3], "sh", "-c", stubborn]
    result = subprocess.run(call, stdout=-1, stderr=-1, text=True, timeout=120, env=environment())
    left = [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", seconds]]
    assert (result.stdout, psutil.wait_procs(left, 30)[1]) == ("up\n", [])
    [attempt], reported = attempts(tmp_path), json.loads(result.stderr)
    assert (result.returncode, reported["exit_code"], attempt.end) == (124, 124, "timeout")
    assert attempt.message == "the command ran longer than --timeout allows, and was ended with exit code 7"


def test_program_may_read_from_terminal_that_it_is_started_on(tmp_path):
    ours, theirs = pty.openpty()
    code = "print('name?', flush=True); print('got ' + input(), flush=True)"
    options = {"stdin": theirs, "stdout": theirs, "stderr": subprocess.PIPE, "env": environment(), "start_new_session": True}
    call = command(tmp_path, code)
    become = f"import fcntl, os, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv({call[0]!r}, {call!r})"
    with subprocess.Popen([sys.executable, "-c", become], **options) as process:
        os.close(theirs)
        heard = b""
        while b"name?" not in heard:
            heard += os.read(ours, 1000)
        os.write(ours, b"Ada\n")
        while b"got Ada" not in heard:
            heard += os.read(ours, 1000)
        assert process.wait(60) == 0
    os.close(ours)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--", "no-such-command"], "no such command"),
        (["--engine", "vlm", "--", "true"], "did you mean 'vllm'?"),
        (["--model", "tinny", "--", "true"], "did you mean 'tiny'?"),
        ([], "COMMAND"),
    ],
)
def test_unrunnable_command_is_one_line_and_exit_code_2(tmp_path, arguments, words):
    result = subprocess.run(
        penstock("run", *arguments), capture_output=True, text=True, timeout=60, env=environment(), cwd=tmp_path
    )
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.stderr
    assert words in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_was_recorded_with_weights_can_be_verified(tmp_path):
    call = penstock(
        "run", "--json", "--model", "tiny", "--folder", tmp_path / "run", "--", sys.executable, "-c", textwrap.dedent(TALK)
    )
    recorded = subprocess.run(call, capture_output=True, text=True, timeout=200, env=environment())
    advice = json.loads(recorded.stderr.splitlines()[-1])["next"].split()
    assert advice[:2] == ["penstock", "verify"]
    verified = subprocess.run(penstock(*advice[1:], "--json"), capture_output=True, text=True, timeout=200, env=environment())
    assert (verified.returncode, json.loads(verified.stdout)["status"]) == (0, "exact")


LONG = """
    from openai import OpenAI
    ask = {"model": "any", "messages": [{"role": "user", "content": "Hello"}]}
    OpenAI().chat.completions.create(**ask, max_tokens=600)
    OpenAI().chat.completions.create(**ask, max_tokens=10**6)
    OpenAI().chat.completions.create(**ask)
"""


def test_callers_limit_holds_up_to_the_context(tmp_path):
    result = ran(tmp_path, LONG, "--engine", ENDLESS, "--json")
    [attempt] = attempts(tmp_path)
    wished, most, default = (len(step.completion_ids) for step in attempt.steps)
    assert wished == 600 and most == default > 600
    assert json.loads(result.stderr)["notices"] == {"capped:max_tokens": 1, "finish:length": 3}


def test_summary_for_people_reports_of_cuts(tmp_path):
    result = ran(tmp_path, LONG, "--engine", ENDLESS, "--set", "sampling.max_tokens=5")
    assert {len(step.completion_ids) for step in attempts(tmp_path)[0].steps} == {5}
    assert "not done    3 finish:length, 2 capped:max_tokens" in result.stderr
