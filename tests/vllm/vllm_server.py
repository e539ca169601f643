"""A real vLLM server on the CPU, in the environment that `install.py` made and $PENSTOCK_VLLM names."""

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

HOME = os.environ.get("PENSTOCK_VLLM", "")
PYTHON = Path(HOME).expanduser() / "bin" / "python"
START_S = 1500
"""It takes one minute on two free cores, and many on busy ones."""
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


@contextmanager
def vllm_server(
    model: Path, folder: Path, *, mode: str, context: int, arguments: Sequence[str] = (), **environment: str
) -> Iterator[str]:
    """Serve `model` with this `--logprobs-mode` and further arguments; its address. What it says goes into a file in `folder`."""
    port, log = free_port(), folder / "server.log"
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1", "--port", port]
    command += ["--max-model-len", context, "--dtype", "float32", "--enforce-eager", "--logprobs-mode", mode, *arguments]
    with log.open("wb") as out:
        env = {**os.environ, **QUIET, **environment}
        process = subprocess.Popen([str(part) for part in command], stdout=out, stderr=out, env=env)
    try:
        until_up(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(300)


def metric(server: str, name: str) -> float:
    """The sum of a metric's values, such as `num_requests_running`."""
    with urllib.request.urlopen(f"{server}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}{{"))


def free_port() -> int:
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for the server; where it ends instead, show its last words."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(1)
    pytest.fail(f"vLLM did not start: {log.read_text(errors='replace')[-2000:]}")
