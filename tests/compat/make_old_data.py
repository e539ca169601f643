"""Makes the archives of this folder, with the version of penstock that is installed. See README.md before running it.

python tests/compat/make_old_data.py NEW_FOLDER
"""

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.models import tiny
from penstock.pool.sqlite import SqlitePool

AGENT = """\
from penstock import AgentWorkflow, Grader


class Talk(AgentWorkflow):
    async def run(self, ctx):
        if (ctx.metadata or {}).get("broken"):
            raise ValueError("this task is broken")
        messages = list(ctx.prompt)
        for question in ("And?", None):
            reply = await ctx.openai().chat.completions.create(model="policy", messages=messages, max_tokens=4)
            messages += [{"role": "assistant", "content": reply.choices[0].message.content or ""}]
            messages += [{"role": "user", "content": question}] if question else []


class Odd(Grader):
    async def grade(self, ctx):
        ctx.set_reward(float(sum(map(ord, ctx.sample.messages[-1].get("content") or "")) % 2))
"""
TRAIN = """\
[run]
name = "train"
[model]
name = "model"
[dataset]
train = "tasks.jsonl"
eval = "heldout.jsonl"
[rollout]
group_size = 4
groups_per_step = 2
[train]
steps = 2
lr = 1e-3
eval_every = 1
"""
WARM = ("--set", "eval.temperature=1.0")
SECRETS = (
    ("SEARCH_KEY", "personal", "old personal value"),
    ("SEARCH_KEY", "workspace", "old workspace value"),
    ("JUDGE_KEY", "workspace", "two lines\nand ünïcode"),
    ("LONG_KEY", "personal", "0123456789" * 30),
)


def main(folder: Path) -> None:
    folder.mkdir()
    os.chdir(folder)
    project, home = Path("project"), Path("home")
    make_project(project)
    make_home(project, home)
    make_runs(project)
    make_gateway(project)
    for made in (project, home):
        pack(made, folder / f"{made}.tar.gz")


def penstock(*arguments: Any, at: Path = Path(), **variables: str) -> None:
    subprocess.run([sys.executable, "-m", "penstock", *map(str, arguments)], cwd=at, env=os.environ | variables, check=True)


def make_project(project: Path) -> None:
    """An agent, its tasks, and a model with random weights that is small enough to be kept with its optimizer."""
    project.mkdir()
    (project / "agent.py").write_text(AGENT)
    (project / "train.toml").write_text(TRAIN)
    write_rows(project / "tasks.jsonl", [{"prompt": f"{n}?", "label": "x"} for n in range(4)])
    held_out = [{"prompt": f"{n}!", "label": "x", "metadata": {"broken": n == 2}} for n in range(3)]
    write_rows(project / "heldout.jsonl", held_out)
    write_model(project / "model")


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    tokens = {"bos_token_id": None, "eos_token_id": tiny.END, "pad_token_id": tiny.PAD, "max_position_embeddings": 256}
    vocabulary = 256 + len(tiny.SPECIAL) + len(tiny.WORDS)
    config = LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=True, dtype="float32", **size, **tokens)
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny.write_tokenizer(folder)


def make_runs(project: Path) -> None:
    penstock("train", "train.toml", at=project)
    for name, model in (("before", "model"), ("after", "runs/train/checkpoints/000002")):
        penstock("eval", "run", "train.toml", "--name", name, "--model", model, "--samples", "2", *WARM, at=project)


def make_gateway(project: Path) -> None:
    """Of three groups, the first is trained, the second complete and the third open; an export is next to the folder."""
    command = [sys.executable, "-m", "penstock", "gateway", "--model", "model", "--folder", "runs/gateway"]
    process = subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    tokens = json.loads((project / ready["tokens"]).read_text())
    opened: dict[str, Any] = {}
    for number, reward in enumerate((1.0, 0.25, None)):
        opened = post(ready, "/rollouts", tokens["control"], {"rollout_id": f"call-{number}", "channel": "train"})
        message = {"role": "user", "content": f"{number}?"}
        post(ready, "/v1/chat/completions", opened["token"], {"model": "any", "max_tokens": 4, "messages": [message]})
        if reward is not None:
            post(ready, f"/rollouts/{opened['rollout_id']}/grade", tokens["control"], {"reward": reward})
            post(ready, f"/rollouts/{opened['rollout_id']}/end", tokens["control"], {"end": "completed"})
    mark = {"key": "call-1:0", "trainable": False, "quality": 0.5, "note": "too short"}
    post(ready, "/api/curation", tokens["admin"], {"updates": [mark]})
    (project / "open_rollout.json").write_text(json.dumps({"rollout_id": opened["rollout_id"], "token": opened["token"]}))
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
    asyncio.run(train_one(project / "runs" / "gateway"))
    penstock("pool", "export", "runs/gateway", "--out", "gateway.jsonl", at=project)


def post(ready: dict[str, Any], path: str, token: str, body: dict[str, Any]) -> dict[str, Any]:
    connection = http.client.HTTPConnection(urlsplit(ready["base_url"]).netloc, timeout=60)
    connection.request("POST", path, json.dumps(body), {"authorization": f"Bearer {token}", "content-type": "application/json"})
    response = connection.getresponse()
    content = response.read()
    assert response.status == 200, content
    return json.loads(content)


async def train_one(folder: Path) -> None:
    """What a trainer does with the oldest group, but for the training."""
    pool = SqlitePool(folder)
    lease = await pool.claim(1, version=0, max_staleness=0, lease_s=60)
    assert lease is not None
    await pool.ack(lease.id, 1)
    await pool.close()


def make_home(project: Path, home: Path) -> None:
    """Secrets in both scopes, an uploaded dataset and a submitted evaluation that has finished."""
    place = {"PENSTOCK_HOME": str(home.absolute())}
    for name, scope, value in SECRETS:
        penstock("secret", "set", name, "--scope", scope, "--env", "VALUE", VALUE=value, **place)
    penstock("dataset", "upload", "tasks.jsonl", at=project, **place)
    penstock("eval", "submit", "train.toml", "--yes", "--name", "submitted", *WARM, at=project, **place)
    penstock("eval", "logs", "submitted", "-f", at=project, **place)
    penstock("controller", "down", **place)
    for file in ("controller.json", "controller.log"):
        (home / file).unlink(missing_ok=True)
    for job in home.glob("runs/*/job.json"):
        job.write_text(job.read_text().replace(sys.executable, "python3"))


def pack(folder: Path, archive: Path) -> None:
    def neutral(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return None if entry.name.endswith((".lock", "__pycache__")) else entry

    with tarfile.open(archive, "w:gz") as out:
        out.add(folder, folder.name, filter=neutral)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
