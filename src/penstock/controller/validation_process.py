"""Validates a submitted project in a separate process, which loads the author's code with the run's variables.

Run as a module, this is that process: it reads the config from stdin and writes its result to the given file descriptor.
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
"""For the whole validation, which reads all rows of the datasets."""
ERROR_TYPES = {kind.__name__: kind for kind in (ConfigError, DatasetError, ModelError)}


def validate_submission(
    tree: Mapping[str, Any], kind: RunKind, *, code: Path, env: Mapping[str, str], secrets: Mapping[str, str]
) -> None:
    """Raises a ConfigError with everything that is wrong with a run of `tree`. Paths in it are relative to the snapshot `code`."""
    task = orjson.dumps({"tree": tree, "kind": kind, "where": "the submission"})
    with tempfile.TemporaryFile() as result_file, tempfile.TemporaryFile() as output_file:
        environment = process_environment(os.environ, env, secrets)
        exit_code = _run_process(task, result_file.fileno(), output_file.fileno(), code, environment)
        result_file.seek(0)
        output_file.seek(0)
        result, output = result_file.read(), output_file.read().decode("utf-8", "replace").strip()
    redact = SecretRedactor(secrets.values())

    def clean(text: str) -> str:
        return redact(text.replace(f"{code.resolve()}/", "").replace(f"{code}/", ""))

    if not result:
        last = clean(output.splitlines()[-1][:300]) if output else "nothing"
        how = f"took longer than {TIMEOUT_S:g} s" if exit_code is None else how_ended(exit_code)
        raise ConfigError(f"the submission could not be checked: the process that did {how} and had said: {last}")
    error = orjson.loads(result)
    if error:
        issues = [Issue(key, clean(message), correction) for key, message, correction in error["issues"]]
        raise ERROR_TYPES[error["error"]](clean(error["message"]), issues)


def _run_process(task: bytes, result_fd: int, output_fd: int, code: Path, env: Mapping[str, str]) -> int | None:
    """Returns the exit code, or None after a timeout. Kills the whole session: the author's code may have started processes."""
    process = subprocess.Popen(
        [*module_command(__name__), str(result_fd)],
        cwd=code,
        env=env,
        stdin=subprocess.PIPE,
        stdout=output_fd,
        stderr=output_fd,
        pass_fds=[result_fd],
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
    """Returns the error of a task as JSON; empty if nothing is wrong."""
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
