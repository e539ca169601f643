"""`python -m claw_r1.gateway.gateway`: its flags, and a gateway without Ray that serves the documented protocol without tokens."""

import json
import os
import signal
import subprocess
import sys

import httpx2
import pytest
from openai import OpenAI

from claw_r1.gateway.gateway import convert, main
from penstock.errors import ConfigError

DEADLINE_S = 120


def test_documented_flags_are_a_gateway_over_vllm_servers():
    flags = "--data-pool-name data_pool --vllm-addresses host1:8001,http://host2:8001 --tokenizer-path Qwen/Qwen3-4B"
    made, notices = convert([*flags.split(), "--prompt-length", "4096", "--response-length", "1024", "--ray-address", "auto"])
    assert made == [
        *("gateway", "--folder", "runs/data_pool", "--model", "hf:Qwen/Qwen3-4B", "--host", "127.0.0.1", "--port", "8100"),
        *("--engine", "vllm", "--url", "http://host1:8001", "--url", "http://host2:8001"),
        *("--set", "sampling.max_tokens=1024", "--open"),
    ]
    assert len(notices) == 2 and "--prompt-length 4096" in notices[0] and "--ray-address" in notices[1]


def test_other_interface_needs_a_token():
    made, (notice,) = convert(["--tokenizer-path", "tiny", "--host", "0.0.0.0"])
    assert "--open" not in made and "needs a token on 0.0.0.0" in notice


def test_path_names_the_folder_of_the_pool_itself():
    made, _ = convert(["--tokenizer-path", "tiny", "--data-pool-name", "./here"])
    assert made[1:3] == ["--folder", "here"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--tokenizer-path tiny --reward-worker-name w", "no reward worker"),
        ("--tokenizer-path tiny --nothing", "--nothing"),
        ("", "--tokenizer-path"),
        ("--tokenizer-path tiny --port many", "invalid int value"),
    ],
)
def test_bad_flag_exits_with_2(capsys, flags, words):
    with pytest.raises(ConfigError, match=words):
        convert(flags.split())
    assert main(flags.split()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and words in err


@pytest.mark.slow
def test_gateway_serves_without_ray_and_tokens(tmp_path):
    flags = ["--data-pool-name", "pool", "--tokenizer-path", "tiny", "--response-length", "16", "--port", "0"]
    command = [sys.executable, "-m", "claw_r1.gateway.gateway", *flags]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert (ready["event"], ready["mode"]) == ("ready", "open")
        _serves_a_trajectory(ready["base_url"].removesuffix("/v1"))
    finally:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert (tmp_path / "runs" / "pool" / "config.json").is_file() and "without a token" in err


def _serves_a_trajectory(root):
    with httpx2.Client(base_url=root, timeout=DEADLINE_S, trust_env=False) as http:
        assert http.get("/ready").json() == {"status": "ready"} and http.get("/docs").status_code == 200
        begun = http.post("/init_trajectory").json()
        client = OpenAI(base_url=begun["base_url"], api_key="not-needed", max_retries=0)
        said = client.chat.completions.create(model="default", messages=[{"role": "user", "content": "3*7"}])
        assert 1 <= said.usage.completion_tokens <= 16
        assert http.post(f"{begun['base_url']}/complete_trajectory", json={"reward": 1.0}).json() == {"status": "ok"}
        assert http.post(f"/complete_trajectory/{begun['trajectory_uid']}").status_code in (409, 410)
        fields = {"data_source": "openai/gsm8k", "ground_truth": "42"}
        asked = {"messages": [{"role": "assistant", "content": "#### 42"}], "dataset_fields": fields}
        assert http.post("/compute_reward", json=asked).json()["reward"] == 1.0
        client.close()
