"""A submitted project looked at in a process of its own: the author's file is loaded there, with the variables of the run.

As a module that is run, it is that process: the config comes in on stdin, and its verdict goes to the file that it is given.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from penstock.controller.jobs import process_environment
from penstock.controller.runlog import SecretRedactor
from penstock.controller.runs import RunKind
from penstock.errors import ConfigError, DatasetError, Issue, ModelError
from penstock.sdk.agent_spec import module_command
from penstock.system.process_group import how_ended

TIMEOUT_S = 240.0
"""For all of it; a dataset is read as a whole."""
ERROR_TYPES = {kind.__name__: kind for kind in (ConfigError, DatasetError, ModelError)}


def validate_submission(
    tree: Mapping[str, Any], kind: RunKind, *, code: Path, env: Mapping[str, str], secrets: Mapping[str, str]
) -> None:
    """ConfigError with everything that is wrong with a run of `tree`; its texts name files as they are in the snapshot `code`."""
    task = orjson.dumps({"tree": tree, "kind": kind, "where": "the submission"})
    with tempfile.TemporaryFile() as verdict, tempfile.TemporaryFile() as output:
        ended = _run_process(task, verdict.fileno(), output.fileno(), code, process_environment(os.environ, env, secrets))
        verdict.seek(0)
        output.seek(0)
        told, said = verdict.read(), output.read().decode("utf-8", "replace").strip()
    strike = SecretRedactor(secrets.values())

    def clean(text: str) -> str:
        return strike(text.replace(f"{code.resolve()}/", "").replace(f"{code}/", ""))

    if not told:
        last = clean(said.splitlines()[-1][:300]) if said else "nothing"
        how = f"took longer than {TIMEOUT_S:g} s" if ended is None else how_ended(ended)
        raise ConfigError(f"the submission could not be checked: the process that did {how} and had said: {last}")
    found = orjson.loads(told)
    if found:
        issues = [Issue(key, clean(message), correction) for key, message, correction in found["issues"]]
        raise ERROR_TYPES[found["error"]](clean(found["message"]), issues)


def _run_process(task: bytes, verdict: int, output: int, code: Path, env: Mapping[str, str]) -> int | None:
    """The exit code; None where it had to be killed. Nothing of it is left."""
    process = subprocess.Popen(
        [*module_command(__name__), str(verdict)],
        cwd=code,
        env=env,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        pass_fds=[verdict],
        start_new_session=True,
    )
    try:
        process.communicate(task, timeout=TIMEOUT_S)
        return process.returncode
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _find_error(task: Mapping[str, Any]) -> dict[str, Any]:
    """What that process finds; empty where nothing is wrong."""
    from penstock.config import make_config
    from penstock.evals.run import evaluation_config
    from penstock.workspace.preflight import check_kind, check_project

    try:
        config = make_config(task["tree"], task["where"])
        check_kind(config, task["kind"])
        check_project(evaluation_config(config) if task["kind"] == "eval" else config, task["where"])
    except ConfigError as error:
        known = next((name for name, kind in ERROR_TYPES.items() if type(error) is kind), "ConfigError")
        return {"error": known, "message": str(error), "issues": [list(issue) for issue in error.issues]}
    return {}


if __name__ == "__main__":
    os.write(int(sys.argv[1]), orjson.dumps(_find_error(orjson.loads(sys.stdin.buffer.read()))))
