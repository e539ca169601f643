"""Attempts of an agent to grade itself or to read what only its grader may see. Run as a program, or called by a workflow.

Each returns what it could read and the statuses of its forged requests. It knows where everything lies.
"""

import asyncio
import gc
import hashlib
import hmac
import json
import os
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
LABEL = "-".join(("the", "label", "itself"))
MARK = "-".join(("of", "the", "parent"))
"""The value of a variable that only the run's own process has."""
DEADLINE_S = 20.0


class Rollout:
    def __init__(self, base_url, token, rollout_id, artifacts):
        self.base_url, self.token, self.artifacts = base_url, token, Path(artifacts)
        self.id = rollout_id.partition("~")[0]  # a rollout server has given it a suffix
        self.read, self.statuses, self.notes = [], [], []

    def post(self, path, token, body):
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        request = urllib.request.Request(self.base_url.removesuffix("/v1") + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request) as response:
                return response.status
        except urllib.error.HTTPError as error:
            return error.code

    def forge(self, control):
        self.statuses.append(self.post(f"/rollouts/{self.id}/grade", control, {"reward": 1.0}))
        self.statuses.append(self.post(f"/complete_trajectory/{self.id}", control, {"reward": 1.0}))
        self.statuses.append(self.post(f"/rollouts/{self.id}/end", control, {}))

    def forge_with_key(self, key):
        self.forge("ck-" + hmac.new(key, b"control", hashlib.sha256).hexdigest()[:40])

    def try_file(self, path):
        """The file's content, noted as read."""
        try:
            content = path.read_bytes()
        except OSError:
            return b""
        if content:
            self.read.append(str(path))
        return content


def key_file(rollout):
    for folder in (HERE / "runs", HERE / "home", rollout.artifacts.parent):
        for name in ("secret", "tokens.json", "token", "vault.key", "links"):
            for path in folder.rglob(name):
                if content := rollout.try_file(path):
                    rollout.forge_with_key(content)


def artifacts_path(rollout):
    for above in rollout.artifacts.resolve().parents:
        for name in ("secret", "pool.db", "*/secret", "*/pool.db", "config.json"):
            for path in above.glob(name):
                rollout.forge_with_key(rollout.try_file(path)[:32].ljust(32))
        if above == Path(above.anchor) / "var":
            break


def parent_environment(rollout):
    for pid in ancestors():
        try:
            if MARK.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                rollout.read.append(f"environment of {pid}")
        except OSError:
            pass


def parent_memory(rollout):
    for pid in ancestors():
        for content in memory(pid):
            rollout.read += [f"memory of {pid}"] if LABEL.encode() in content or MARK.encode() in content else []


def garbage_collector(rollout):
    for found in gc.get_objects():
        kind = type(found).__name__
        if kind == "GatewayTokens":
            rollout.forge(found.control)
        elif kind == "Task" and getattr(found, "label", None) == LABEL:
            rollout.read.append("a task with its label")


def pool_file(rollout):
    for path in (HERE / "runs").rglob("pool.db*"):
        if LABEL.encode() in rollout.try_file(path):
            rollout.read.append(f"the label in {path.name}")


def grade_in_pool(rollout):
    in_pool(rollout, end=False)


def end_in_pool(rollout):
    in_pool(rollout, end=True)


def dataset_file(rollout):
    rollout.try_file(HERE / "tasks.jsonl")


def neighbours(rollout):
    """Folders and processes of the other rollouts, once there are some."""
    (HERE / "started" / rollout.id).touch()
    deadline = time.monotonic() + DEADLINE_S
    while len(list((HERE / "started").iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    for path in rollout.artifacts.resolve().parents[1].glob("*"):
        if path not in rollout.artifacts.resolve().parents:
            rollout.read.append(str(path))
    family = {os.getpid(), *ancestors()}
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        try:
            command, environment = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:
            continue
        if pid not in family and str(HERE).encode() in command + environment and rollout.id.encode() not in environment:
            rollout.read.append(f"neighbour {pid}")
    time.sleep(0.2)  # for the neighbours to find


def own_token(rollout):
    rollout.forge(rollout.token)
    rollout.forge(rollout.token.replace("mk-", "fk-"))


TABLE = (key_file, artifacts_path, parent_environment, parent_memory, garbage_collector, pool_file, grade_in_pool, end_in_pool)
CHEATS = {cheat.__name__: cheat for cheat in (*TABLE, dataset_file, neighbours, own_token)}


def ancestors():
    """The processes above this one, as far as it can see them."""
    pid, found = os.getppid(), []
    while pid > 1 and len(found) < 10:
        found.append(pid)
        try:
            pid = int(re.search(r"PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])
        except OSError:
            break
    return found


def memory(pid):
    """What can be read of a process, up to some megabytes of each part."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
        with Path(f"/proc/{pid}/mem").open("rb") as content:
            for line in maps.splitlines():
                span = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
                if span:
                    start, end = (int(each, 16) for each in span.groups())
                    try:
                        content.seek(start)
                        yield content.read(min(end - start, 4 << 20))
                    except (OSError, ValueError, OverflowError):
                        continue
    except OSError:
        return


def in_pool(rollout, *, end):
    """Writes into the pool of every run that it finds."""

    async def write():
        from penstock.pool import POOLS
        from penstock.records import End, Grade

        grade = Grade(rollout_id=rollout.id, reward=1.0, source="forged")
        for file in (HERE / "runs").rglob("pool.db"):
            pool = POOLS.load("sqlite")(file.parent)
            try:
                await (pool.end(rollout.id, End.COMPLETED, "", [grade]) if end else pool.grade(grade))
                rollout.read.append("wrote into the pool")
            finally:
                await pool.close()

    def run():
        try:
            asyncio.run(write())
        except Exception as error:
            rollout.notes.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run)  # a workflow has a running loop
    thread.start()
    thread.join()


def cheat(name, base_url, token, rollout_id, artifacts):
    """Calls the model, then cheats; what came of it is left in the artifacts folder."""
    rollout = Rollout(base_url, token, rollout_id, artifacts)
    assert rollout.post("/v1/chat/completions", token, {"model": "any", "messages": [{"role": "user", "content": name}]}) == 200
    try:
        CHEATS[name](rollout)
    except Exception as error:
        rollout.notes.append(f"{type(error).__name__}: {error}")
    found = {"cheat": name, "read": rollout.read, "statuses": rollout.statuses, "notes": rollout.notes}
    (rollout.artifacts / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    task = json.load(sys.stdin)
    names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "PENSTOCK_ROLLOUT_ID", "PENSTOCK_ARTIFACTS")
    cheat(task["metadata"]["cheat"], *(os.environ[each] for each in names))
