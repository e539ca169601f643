"""The multiply agent, two turns, trained through a real vLLM on the same GPU: `python -m bench.gpu.vllm_train MODEL_FOLDER`.

Four servers start at once, and each has its own part of the story, all at the same time:
  transfer  whole weights by CUDA IPC, then by a folder in shared memory; by each, a second run is killed while its server is paused
  folder    whole weights by a folder on disk; the server is killed in the middle and started again
  sleep     the server sleeps while an update is computed, and `penstock verify` recomputes the tokens; a run is killed while it
            sleeps, and the next one finds it awake
  adapters  LoRA, each version under its own name; a run is killed in the middle, then the server in the middle of another
Printed are rewards, the largest gap of log-probabilities, and seconds and bytes of a publication. Names after the folder choose
parts. `--cpu` tries the script itself where there is no GPU: $VLLM_PYTHON then is the interpreter that has vLLM.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1"}
ALLOWED = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
BEGUN = time.monotonic()
CPU = "--cpu" in sys.argv
PYTHON = os.environ.get("VLLM_PYTHON", sys.executable)
SHARE = os.environ.get("VLLM_SHARE", "0.05")
"""Of the GPU's memory, which must be free when a server starts."""
STEPS = int(os.environ.get("VLLM_STEPS", "10"))
PATIENCE = 8 if CPU else 1
"""All limits are multiplied by it."""
RUNS: list[subprocess.Popen[bytes]] = []


def tell(text: str) -> None:
    print(f"{time.monotonic() - BEGUN:6.1f} s  {text}", flush=True)


class Server:
    """One vLLM server, in a process group of its own."""

    def __init__(self, folder: Path, model: Path, port: int, *options: str) -> None:
        self.url, self.log = f"http://127.0.0.1:{port}", folder / f"server-{port}.log"
        # Its cache is given in bytes: servers that start together, and measure free memory, would count each other's.
        size = ["--gpu-memory-utilization", SHARE, "--kv-cache-memory-bytes", str(2 << 30), "--dtype", "bfloat16"]
        self._command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
        self._command += ["--max-model-len", "1024", "--enforce-eager", "--logprobs-mode", "processed_logprobs", *options]
        self._command += ["--dtype", "float32"] if CPU else size
        self.start()

    def start(self) -> None:
        environment = {**os.environ, **QUIET, **ALLOWED}
        if CPU:
            environment.pop("PYTHONPATH", None)
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(self._command, stdout=out, stderr=out, env=environment, start_new_session=True)

    def wait_up(self, limit_s: float = 240) -> None:
        end = time.monotonic() + limit_s * PATIENCE
        while time.monotonic() < end and self._process.poll() is None:
            if ask(f"{self.url}/health", limit_s=5) is not None:
                return
            time.sleep(0.5)
        said = self.log.read_text(errors="replace")
        causes = [line for line in said.splitlines() if "Error: " in line][:5]
        raise RuntimeError("\n".join([f"{self.url} did not start:", *causes, said[-1000:]]))

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()
        self.wait_up()


class Run:
    """One training run, in a process."""

    def __init__(self, folder: Path, model: Path, name: str, url: str, *settings: str) -> None:
        self.name, self.folder, self.log = name, folder / name, folder / f"{name}.log"
        config = [f'run.name="{name}"', f'run.folder="{folder}"', f'model.name="{model}"', f"train.steps={STEPS}"]
        config += ["rollout.agent_timeout_s=900"]  # longer than a server takes to start again
        config += ['engine.name="vllm"', f'engine.url=["{url}"]', "train.checkpoint_every=100", *settings]
        small = ["rollout.group_size=2", "rollout.groups_per_step=1", "rollout.concurrency=2"] if CPU else []
        command = [sys.executable, "-m", "penstock", "train", str(HERE / "two_turns.toml")]
        for setting in [*config, *small]:
            command += ["--set", setting]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
        RUNS.append(self.process)

    def steps(self) -> list[dict[str, Any]]:
        try:
            lines = (self.folder / "metrics.jsonl").read_bytes().splitlines()
        except OSError:
            return []
        texts = [line.decode(errors="replace") for line in lines]
        return [json.JSONDecoder().raw_decode(text[text.index("{") :])[0] for text in texts if text.endswith("}")]

    def wait_steps(self, count: int, limit_s: float = 60) -> bool:
        """Whether it makes so many steps."""
        end = time.monotonic() + limit_s * PATIENCE
        while time.monotonic() < end and self.process.poll() is None:
            if len(self.steps()) >= count:
                return True
            time.sleep(0.1)
        tell(f"{self.name} made {len(self.steps())} steps instead of {count}: " + self.log.read_text(errors="replace")[-2500:])
        return False

    def verify(self) -> None:
        """Tell what `penstock verify` finds."""
        begun = time.monotonic()
        command = [sys.executable, "-m", "penstock", "verify", str(self.folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120 * PATIENCE, check=False)
        tell(f"penstock verify {self.name}: exit {done.returncode} after {time.monotonic() - begun:.1f} s")
        for line in filter(None, (done.stdout or done.stderr).splitlines()[:20]):
            tell("    " + line)

    def remove(self) -> None:
        """Its checkpoints are larger than its use."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def finish(self, limit_s: float = 60) -> None:
        """Wait for its end, and tell what came of it."""
        try:
            code: int | str = self.process.wait(limit_s * PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = f"not done after {limit_s * PATIENCE:.0f} s"
        steps = self.steps()
        rewards = " ".join(f"{step['reward']:.2f}" for step in steps)
        gaps = max((step["logprob_gap"] for step in steps), default=float("nan"))
        drift = max((step["kl_behaviour"] for step in steps), default=float("nan"))
        exact = min((step["exact_token_rate"] for step in steps), default=float("nan"))
        ways = sorted({str(step.get("publish_way")) for step in steps})
        seconds = sorted(step["publish_s"] for step in steps if "publish_s" in step)
        median = seconds[len(seconds) // 2] if seconds else float("nan")
        size = max((step.get("publish_bytes", 0) for step in steps), default=0) / 1e6
        tell(
            f"{self.name}: exit {code}; rewards {rewards}; by {', '.join(ways)}; a publication of {size:.0f} MB takes "
            f"{median:.3f} s (median; most {max(seconds, default=0):.3f}); log-probability gap {gaps:.1e} at most, "
            f"kl {drift:.1e}; exact {exact}"
        )
        for line in (self.folder / "events.jsonl").read_text().splitlines() if self.folder.exists() else []:
            if '"stage"' in line or "publish." in line:
                tell("    " + str(json.loads(line[line.index("{") :]).get("text")))
        if code != 0:
            tell(self.log.read_text(errors="replace")[-2500:])


def ask(url: str, body: dict[str, Any] | None = None, limit_s: float = 30) -> bytes | None:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=limit_s) as answer:
            return answer.read()
    except OSError:
        return None


def kill_run(run: Run, server: Server, model: Path, question: str = "") -> None:
    """Kill a run, at once or when the server says yes to a question, and see when and with which weights it serves others."""
    if not run.wait_steps(2):
        return
    end = time.monotonic() + 30 * PATIENCE
    while question and b"true" not in (ask(f"{server.url}/{question}") or b"") and time.monotonic() < end:
        time.sleep(0.001)
    was = bool(question) and b"true" in (ask(f"{server.url}/{question}") or b"")
    run.process.kill()
    begun = time.monotonic()
    answer = ask_tokens(server, model)
    took = time.monotonic() - begun
    run.process.wait()
    when = f"({question}: true)" if was else "between two publications"
    tell(f"kill -9 of {run.name} {when}, after {len(run.steps())} steps: another client's answer came after {took:.2f} s")
    if answer is None:
        tell(f"no answer: {server.log.read_text(errors='replace')[-2500:]}")
    else:
        choice = json.loads(answer)["choices"][0]
        tell(f"    it is {choice['text']!r}, sampled with " + nearest(run, model, choice))
    run.remove()


PROMPT = list(range(500, 540))


def ask_tokens(server: Server, model: Path) -> bytes | None:
    """What another client gets: a greedy reply with log-probabilities."""
    body = {"model": str(model), "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "logprobs": 0, "return_token_ids": True}
    return ask(f"{server.url}/v1/completions", body, limit_s=60 * PATIENCE)


def nearest(run: Run, model: Path, choice: dict[str, Any]) -> str:
    """The version whose log-probabilities of a reply are nearest to those told, and how far off each version's are on average."""
    import torch

    from penstock.engines.embedded.decoder import causal
    from penstock.engines.embedded.lora import load_policy

    ids, given = choice["token_ids"], torch.tensor(choice["logprobs"]["token_logprobs"])
    every = torch.tensor([*PROMPT, *ids])
    gaps: dict[str, float] = {}
    for folder in [model, *sorted((run.folder / "checkpoints").glob("*[0-9]"))]:
        with torch.no_grad():
            decoder = load_policy(folder)
            hidden = decoder(every[None], torch.arange(len(every))[None], causal)
            scores = decoder.logits(hidden[0, len(PROMPT) - 1 : -1]).log_softmax(-1)
        gaps[folder.name] = float((scores.gather(-1, torch.tensor(ids)[:, None])[:, 0] - given).abs().mean())
    return f"{min(gaps, key=lambda name: gaps[name])} (mean gap by version: { ({k: round(v, 3) for k, v in gaps.items()}) })"


def kill_server(run: Run, server: Server) -> None:
    """Kill a run's server in the middle, and start it again."""
    if run.wait_steps(3):
        done = len(run.steps())
        tell(f"kill -9 of the server of {run.name} after step {done}")
        server.restart()
        tell(f"the server of {run.name} is up again; {len(run.steps())} steps are done")
    run.finish(100)


KEPT = ("train.checkpoint_every=1", "train.checkpoints_kept=30")


def transfer(folder: Path, model: Path, server: Server) -> None:
    for way in ("memory",) if CPU else ("ipc", "memory"):
        Run(folder, model, f"by-{way}", server.url, f'engine.weights="{way}"').finish()
        run = Run(folder, model, f"killed-by-{way}", server.url, f'engine.weights="{way}"', *KEPT)
        kill_run(run, server, model, "is_paused")
    if not CPU:
        kill_server(Run(folder, model, "by-ipc-restarted", server.url, 'engine.weights="ipc"'), server)


def sleep(folder: Path, model: Path, server: Server) -> None:
    run = Run(folder, model, "asleep", server.url, "engine.sleep=true", *KEPT)
    watch_memory(run, server)
    run.finish()
    freed = [line for line in server.log.read_text(errors="replace").splitlines() if "Sleep mode freed" in line]
    tell(f"{len(freed)} times the server says: {freed[-1] if freed else 'nothing'}")
    run.verify()
    run.remove()
    run = Run(folder, model, "killed-asleep", server.url, "engine.sleep=true", "train.lr=1e-4", *KEPT)
    kill_run(run, server, model, "is_sleeping")
    Run(folder, model, "awake-again", server.url, "train.steps=2").finish()


def watch_memory(run: Run, server: Server) -> None:
    """Tell how much of the GPU's memory is used while the server is awake and while it sleeps, until the run ends."""
    if CPU:
        return
    import torch

    used: dict[bytes, list[int]] = {b"false": [], b"true": []}
    while run.process.poll() is None:
        before = ask(f"{server.url}/is_sleeping", limit_s=5) or b""
        free, total = torch.cuda.mem_get_info()
        if ask(f"{server.url}/is_sleeping", limit_s=5) == before:  # it did not change meanwhile
            for answer, values in used.items():
                values += [(total - free) >> 20] if answer in before else []
        time.sleep(0.02)
    for name, values in zip(("awake", "asleep"), used.values(), strict=True):
        tell(f"MiB of the GPU that all hold while the server is {name}: {min(values, default=0)} to {max(values, default=0)}")


def folders(folder: Path, model: Path, server: Server) -> None:
    kill_server(Run(folder, model, "by-folder-restarted", server.url, 'engine.weights="folder"'), server)


def adapters(folder: Path, model: Path, server: Server) -> None:
    lora = ['train.method="lora"', "train.lr=5e-4", *KEPT]
    kill_run(Run(folder, model, "killed-lora", server.url, *lora), server, model)
    run = Run(folder, model, "lora-restarted", server.url, *lora)
    kill_server(run, server)
    run.verify()
    models = json.loads(ask(f"{server.url}/v1/models") or b'{"data": []}')
    tell("the server holds " + ", ".join(each["id"] for each in models["data"]))


PARTS: dict[str, tuple[Callable[[Path, Path, Server], None], list[str]]] = {
    "transfer": (transfer, [] if CPU else ["--weight-transfer-config", '{"backend": "ipc"}']),
    "folder": (folders, []),
    "sleep": (sleep, ["--enable-sleep-mode"]),
    "adapters": (adapters, ["--enable-lora", "--max-loras", "4", "--max-lora-rank", "16"]),
}


def play(name: str, folder: Path, model: Path, server: Server) -> None:
    try:
        server.wait_up()
        tell(f"the server for {name} is up, vLLM {json.loads(ask(f'{server.url}/version') or b'{}').get('version')}")
        PARTS[name][0](folder, model, server)
        tell(f"{name}: done")
    except Exception:
        tell(f"{name}: {traceback.format_exc()}\n{server.log.read_text(errors='replace')[-2500:]}")


def stop(number: int, frame: object) -> None:
    """End, but leave no server behind."""
    sys.exit(128 + number)


def main(model: Path, names: list[str]) -> None:
    signal.signal(signal.SIGTERM, stop)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        folder, servers = Path(made), list[Server]()
        try:
            threads = list[threading.Thread]()
            for port, name in enumerate(names, start=8711):
                servers.append(Server(folder, model, port, *PARTS[name][1]))
                threads.append(threading.Thread(target=play, args=(name, folder, model, servers[-1]), daemon=True))
                threads[-1].start()
            for thread in threads:
                thread.join()
        finally:
            for process in RUNS:
                process.kill()
            for server in servers:
                server.kill()


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    main(Path(given[0]), given[1:] or list(PARTS))
