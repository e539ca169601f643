"""The multiply agent, two turns, trained through a real vLLM on the same GPU: `python -m bench.gpu.vllm_train MODEL_FOLDER`.

Two servers, one with vLLM's weight transfer. Whole weights reach them by CUDA IPC, by a folder in shared memory and by one on disk;
printed are reward, largest gap of log-probabilities and seconds of a publication. One server is killed in the middle of a run and
started again, one run is killed while its server is paused. `--one` leaves the second server out; `--cpu` tries the script itself
where there is no GPU.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1"}
BEGUN = time.monotonic()
CPU = "--cpu" in sys.argv
PYTHON = os.environ.get("VLLM_PYTHON", sys.executable)
SHARE = os.environ.get("VLLM_SHARE", "0.12")
STEPS = int(os.environ.get("VLLM_STEPS", "10"))


def tell(text: str) -> None:
    print(f"{time.monotonic() - BEGUN:6.1f} s  {text}", flush=True)


class Server:
    """One vLLM server, in a process group of its own."""

    def __init__(self, folder: Path, model: Path, port: int, *options: str) -> None:
        self.url, self.log = f"http://127.0.0.1:{port}", folder / f"server-{port}.log"
        size = ["--gpu-memory-utilization", SHARE, "--dtype", "bfloat16"] if not CPU else ["--dtype", "float32"]
        self._command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
        self._command += ["--max-model-len", "1024", "--enforce-eager", "--logprobs-mode", "processed_logprobs", *size, *options]
        self.start()

    def start(self) -> None:
        insecure = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                self._command, stdout=out, stderr=out, env={**os.environ, **QUIET, **insecure}, start_new_session=True
            )

    def wait_up(self, limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while time.monotonic() < end and self._process.poll() is None:
            if ask(f"{self.url}/health", limit_s=5) is not None:
                return True
            time.sleep(0.5)
        tell(f"{self.url} did not start: " + self.log.read_text(errors="replace")[-1500:])
        return False

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Run:
    """One training run, in a process."""

    def __init__(self, folder: Path, model: Path, name: str, server: Server, *settings: str) -> None:
        self.name, self.folder = name, folder / name
        config = [f'run.name="{name}"', f'run.folder="{folder}"', f'model.name="{model}"', f"train.steps={STEPS}"]
        config += ["rollout.agent_timeout_s=900"]  # longer than a server takes to start again
        config += ['engine.name="vllm"', f'engine.url=["{server.url}"]', "train.checkpoint_every=100", *settings]
        small = ["rollout.group_size=2", "rollout.groups_per_step=1", "rollout.concurrency=2"] if CPU else []
        self.log = folder / f"{name}.log"
        command = [sys.executable, "-m", "penstock", "train", str(HERE / "two_turns.toml")]
        for setting in [*config, *small]:
            command += ["--set", setting]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)

    def steps(self) -> list[dict[str, Any]]:
        try:
            lines = (self.folder / "metrics.jsonl").read_bytes().splitlines()
        except OSError:
            return []
        found: list[dict[str, Any]] = []
        for line in lines:
            text = line.decode(errors="replace")
            found.append(json.JSONDecoder().raw_decode(text[text.index("{") :])[0])
        return found

    def wait_steps(self, count: int, limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while time.monotonic() < end and self.process.poll() is None:
            if len(self.steps()) >= count:
                return True
            time.sleep(0.2)
        return False

    def finish(self, limit_s: float) -> None:
        try:
            code: int | str = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = f"not done after {limit_s:.0f} s"
        steps = self.steps()
        rewards = " ".join(f"{step['reward']:.2f}" for step in steps)
        gaps = max((step["logprob_gap"] for step in steps), default=float("nan"))
        ways = {step.get("publish_way") for step in steps}
        seconds = sorted(step["publish_s"] for step in steps if "publish_s" in step)
        median = seconds[len(seconds) // 2] if seconds else float("nan")
        size = max((step.get("publish_bytes", 0) for step in steps), default=0) / 1e6
        tell(
            f"{self.name}: exit {code}; rewards {rewards}; by {ways}; a publication of {size:.0f} MB takes {median:.3f} s "
            f"(median; most {max(seconds, default=0):.3f}); largest log-probability gap {gaps:.1e}"
        )
        for line in (self.folder / "events.jsonl").read_text().splitlines() if self.folder.exists() else []:
            if '"stage"' in line or "publish." in line:
                tell("    " + str(json.loads(line[line.index("{") :]).get("text")))
        if code != 0:
            tell(self.log.read_text(errors="replace")[-1500:])


def ask(url: str, body: dict[str, Any] | None = None, limit_s: float = 30) -> bytes | None:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=limit_s) as answer:
            return answer.read()
    except OSError:
        return None


def kill_run(run: Run, server: Server, model: Path) -> None:
    """Kill a run while it keeps its server paused, and see when the server serves others."""
    run.wait_steps(1, 60)
    end = time.monotonic() + 30
    caught = False
    while time.monotonic() < end and not caught:
        caught = b"true" in (ask(f"{server.url}/is_paused") or b"")
    run.process.kill()
    begun = time.monotonic()
    answer = ask(f"{server.url}/v1/completions", {"model": str(model), "prompt": [1, 2, 3], "max_tokens": 2})
    took = time.monotonic() - begun
    when = "while its server was paused" if caught else "between two publications"
    tell(f"kill -9 of the run {when}: another client's answer came after {took:.2f} s: {answer is not None}")


def first_server(folder: Path, model: Path, server: Server) -> None:
    script = ROOT / "tests" / "vllm" / "record.py"
    record = folder / "record.json"
    options = [] if CPU else ["--ipc"]
    try:
        subprocess.run([sys.executable, script, server.url, model, record, *options], timeout=30 if not CPU else 300, check=False)
    except subprocess.TimeoutExpired:
        tell("the recording was not done in time")
    print("=== record\n" + (record.read_text() if record.exists() else "none"), flush=True)
    for way in ("memory",) if CPU else ("ipc", "memory"):
        Run(folder, model, f"by-{way}", server, f'engine.weights="{way}"').finish(45 if not CPU else 900)
    kill_run(Run(folder, model, "killed", server), server, model)


def second_server(folder: Path, model: Path, server: Server) -> None:
    if not server.wait_up(150 if not CPU else 900):
        return
    tell(f"{server.url} is up")
    run = Run(folder, model, "by-folder", server, 'engine.weights="folder"')
    if run.wait_steps(2, 60 if not CPU else 600):
        server.kill()
        tell(f"kill -9 of the server after step {len(run.steps())}")
        server.start()
        if server.wait_up(120 if not CPU else 600):
            tell(f"the server is up again; {len(run.steps())} steps are done")
    run.finish(100 if not CPU else 900)


def stop(number: int, frame: object) -> None:
    """End, but leave no server behind."""
    sys.exit(128 + number)


def main(model: Path) -> None:
    signal.signal(signal.SIGTERM, stop)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        folder = Path(made)
        transfer = [] if CPU else ["--weight-transfer-config", '{"backend": "ipc"}']
        one = Server(folder, model, 8711, *transfer)
        servers = [one]
        try:
            if not one.wait_up(150 if not CPU else 900):
                return
            tell(f"{one.url} is up")
            threads = [threading.Thread(target=first_server, args=(folder, model, one), daemon=True)]
            if "--one" not in sys.argv:
                servers.append(two := Server(folder, model, 8712))
                threads.append(threading.Thread(target=second_server, args=(folder, model, two), daemon=True))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for server in servers:
                server.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
