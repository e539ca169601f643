"""A LiteLLM proxy before the gateway, and the vendors' own packages before the proxy: `DIALECT` is the API on both sides."""

import os
import runpy
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from conversation import DIALECT, MODEL

CONFIG = """
model_list:
  - model_name: {model}
    litellm_params: {{model: {provider}/{model}, api_base: {address}, api_key: {key}}}
litellm_settings: {{telemetry: false}}
"""
PROGRAMS = {"chat": "openai_chat", "responses": "openai_responses", "messages": "anthropic_messages"}
KEY = f"sk-{secrets.token_hex(32)}"
VENDOR = "ANTHROPIC" if DIALECT == "messages" else "OPENAI"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for(address, process):
    end = time.monotonic() + 150
    while process.poll() is None and time.monotonic() < end:
        try:
            return urllib.request.urlopen(f"{address}/health/liveliness", timeout=5).read()
        except OSError:
            time.sleep(0.5)
    raise SystemExit(Path("proxy.log").read_text())


Path("proxy.yaml").write_text(
    CONFIG.format(
        model=MODEL, provider=VENDOR.lower(), address=os.environ[f"{VENDOR}_BASE_URL"], key=os.environ[f"{VENDOR}_API_KEY"]
    )
)
address = f"http://127.0.0.1:{(port := free_port())}"
litellm = Path(sys.executable).parent / "litellm"
with Path("proxy.log").open("w") as log:
    proxy = subprocess.Popen(
        [litellm, "--config", "proxy.yaml", "--port", str(port)],
        env=os.environ | {"LITELLM_MASTER_KEY": KEY},
        stdout=log,
        stderr=log,
    )
try:
    wait_for(address, proxy)
    os.environ["OPENAI_BASE_URL"], os.environ["ANTHROPIC_BASE_URL"] = f"{address}/v1", address
    os.environ["OPENAI_API_KEY"] = os.environ["ANTHROPIC_API_KEY"] = KEY
    runpy.run_module(PROGRAMS[DIALECT], run_name="__main__")
finally:
    proxy.terminate()
    proxy.wait()
