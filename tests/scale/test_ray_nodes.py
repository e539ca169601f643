"""A cluster of several nodes: it must ask for a token, and the gateway must be where the others can reach it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.scale.cluster import is_loopback

HERE = Path(__file__).parent


def two_nodes(folder, **environment):
    command = [sys.executable, str(HERE / "two_nodes.py"), str(folder)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_gateway_uses_its_node_address_and_loopback_is_rejected(tmp_path):
    came = two_nodes(tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="of-two-nodes-" + "x" * 32)
    assert (came["nodes"], came["0.0.0.0"]) == (2, "completed over 2 nodes")
    assert 'cannot be reached from the others; set gateway.host = "0.0.0.0"' in came["127.0.0.1"]


@pytest.mark.slow
def test_several_nodes_without_a_token_are_refused(tmp_path):
    came = two_nodes(tmp_path, RAY_AUTH_MODE="disabled")
    assert (
        "has 2 nodes and lets in whoever reaches it; start every node and this command with RAY_AUTH_MODE=token" in came["refused"]
    )


@pytest.mark.parametrize(
    ("host", "is_one"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("head", False)],
)
def test_loopback_is_separated_from_other_hosts(host, is_one):
    assert is_loopback(host) is is_one
