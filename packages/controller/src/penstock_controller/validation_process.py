"""Validates a submitted project in a separate process, which loads the author's code with the run's variables.

Run as a module, this is that process: it reads the config from stdin and writes its result to the given file descriptor.
"""

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from penstock.config import RunKind
from penstock.errors import ConfigError, DatasetError, Issue, ModelError
from penstock.system.processes import describe_exit, last_line, run_module
from penstock_controller.isolation import RunIsolation
from penstock_controller.runlog import SecretRedactor
from penstock_controller.runs import process_environment

TIMEOUT_S = 240.0
"""For the whole validation, which reads all rows of the datasets."""
ERROR_TYPES = {kind.__name__: kind for kind in (ConfigError, DatasetError, ModelError)}


def validate_submission(
    tree: Mapping[str, Any],
    kind: RunKind,
    *,
    code: Path,
    env: Mapping[str, str],
    secrets: Mapping[str, str],
    isolation: RunIsolation,
) -> None:
    """Raises a ConfigError with everything that is wrong with a run of `tree`. Paths in it are relative to the snapshot `code`."""
    task = orjson.dumps({"tree": tree, "kind": kind, "where": "the submission"})
    with tempfile.TemporaryFile() as result_file, tempfile.TemporaryFile() as output_file:
        exit_code = run_module(
            __name__,
            str(result_file.fileno()),
            stdin=task,
            output=output_file.fileno(),
            timeout_s=TIMEOUT_S,
            pass_fds=[result_file.fileno()],
            cwd=code,
            env=process_environment(os.environ, env, secrets),
            wrap=isolation.command,
        )
        exit_code = exit_code and isolation.sandbox.exit_code(exit_code)
        result_file.seek(0)
        output_file.seek(0)
        result, output = result_file.read(), output_file.read().decode("utf-8", "replace")
    redact = SecretRedactor(secrets.values())

    def clean(text: str) -> str:
        return redact(text.replace(f"{code.resolve()}/", "").replace(f"{code}/", ""))

    if not result:
        last = clean(last_line(output)[:300]) or "nothing"
        how = f"took longer than {TIMEOUT_S:g} s" if exit_code is None else describe_exit(exit_code)
        raise ConfigError(f"the submission could not be checked: the process that did {how} and had said: {last}")
    error = orjson.loads(result)
    if error:
        issues = [Issue(key, clean(message), correction) for key, message, correction in error["issues"]]
        raise ERROR_TYPES[error["error"]](clean(error["message"]), issues)


def _find_error(task: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the error of a task as JSON; empty if nothing is wrong."""
    from penstock.config import make_config
    from penstock.evals.run import evaluation_config
    from penstock.run.inputs import check_kind
    from penstock.run.preflight import check_project
    from penstock.train.algorithm import check_algorithm

    try:
        config = make_config(task["tree"], task["where"])
        check_kind(config, task["kind"])
        check_project(evaluation_config(config) if task["kind"] == "eval" else config, task["where"], check_algorithm)
    except ConfigError as error:
        known = next((name for name, kind in ERROR_TYPES.items() if type(error) is kind), "ConfigError")
        return {"error": known, "message": str(error), "issues": [list(issue) for issue in error.issues]}
    return {}


if __name__ == "__main__":
    os.write(int(sys.argv[1]), orjson.dumps(_find_error(orjson.loads(sys.stdin.buffer.read()))))
