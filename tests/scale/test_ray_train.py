"""A whole training run on a real Ray, also where its processes are killed: engine, gateway and trainer are the real ones."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from penstock.config import load_config
from penstock.errors import ConfigError
from penstock.pool import POOLS
from penstock.records import End
from penstock.run.inputs import read_inputs
from penstock.scale.run import gpu_shares, train_on_ray
from penstock.system.packages import install_command

TINY = Path(__file__).parents[1] / "helpers" / "tiny_run"
STEPS, GROUPS, SIZE = 4, 2, 4


def write_run(folder):
    for name in ("agent.py", "tasks.jsonl"):
        shutil.copy(TINY / name, folder / name)
    text = re.sub(r"(?m)^(steps|group_size|groups_per_step|checkpoint_every) = .*$", "", (TINY / "train.toml").read_text())
    text = text.replace("[rollout]", f"[rollout]\ngroup_size = {SIZE}\ngroups_per_step = {GROUPS}")
    text = text.replace("[train]", f"[train]\nsteps = {STEPS}\ncheckpoint_every = 2").replace(
        "[run]", f'[run]\nfolder = "{folder}/runs"'
    )
    (folder / "train.toml").write_text(f'{text}\n[scale]\nname = "ray"\n')
    return folder / "train.toml"


class Killer:
    """A listener that kills processes of the run with SIGKILL, each once, when a step of training has been reported."""

    def __init__(self, **after_step):
        self.after_step, self.pids, self.killed, self.reported = after_step, {}, [], []

    def __call__(self, kind, fields):
        self.reported.append((kind, fields))
        role, _, what = kind.partition(".")
        if what == "start" and "pid" in fields:
            self.pids[role] = fields["pid"]
        for role, step in self.after_step.items():
            if kind == "train.step" and fields["step"] == step and role not in self.killed:
                self.killed.append(role)
                os.kill(self.pids[role], signal.SIGKILL)

    def kinds(self):
        return [kind for kind, _ in self.reported]


def train(file, listener, *overrides):
    async def main():
        config = load_config(file, overrides)
        inputs = read_inputs(config, listener)
        async with asyncio.timeout(240):
            return await train_on_ray(config, inputs, listener=listener, stop=asyncio.Event())

    return asyncio.run(main())


def with_pool(folder, read):
    async def main():
        pool = POOLS.load("sqlite")(folder / "runs" / "tiny")
        try:
            return await read(pool)
        finally:
            await pool.close()

    return asyncio.run(main())


async def everything(pool):
    groups = await pool.groups("train", limit=1000)
    return [
        await pool.rollout(rollout.id) for group in groups for rollout in await pool.rollout_refs(group.id)
    ], await pool.trained()


def check(folder, summary):
    """All steps are trained, each group once, from tokens of versions that were published; nothing is left without an end."""
    entries = [json.loads(line) for line in (folder / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()]
    attempts, trained = with_pool(folder, everything)
    assert (summary.status, summary.steps, summary.exact_token_rate) == ("finished", STEPS, 1.0)
    assert [entry["step"] for entry in entries] == list(range(1, STEPS + 1))
    assert [group for entry in entries for group in entry["group_ids"]] == [group for group, _ in trained]
    assert len({group for group, _ in trained}) == STEPS * GROUPS
    assert all(attempt.end is not None for attempt in attempts)
    assert {v for a in attempts for step in a.steps for v in step.versions} <= set(range(summary.policy_version + 1))
    return attempts


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_actors_train_the_tiny_policy_and_report_progress(tmp_path):
    killer = Killer()
    overrides = ("rollout.executor=ray", "rollout.max_staleness=1", 'track.to=["tensorboard"]')
    file, agent = write_run(tmp_path), tmp_path / "agent.py"
    agent.write_text(agent.read_text().replace("messages=messages)", "messages=messages, max_tokens=1000)"))
    summary = train(file, killer, *overrides)
    attempts = check(tmp_path, summary)
    assert {attempt.end for attempt in attempts} == {End.COMPLETED}
    assert summary.policy_version > 0 and summary.last_reward is not None
    assert killer.kinds().count("train.step") == STEPS
    assert killer.kinds().count("rollout.end") == len(attempts)
    logged = (tmp_path / "runs" / "tiny" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in logged] == killer.kinds()[-len(logged) :]
    assert summary.notices["capped:max_tokens"] == sum(len(attempt.steps) for attempt in attempts)
    check_tracked(tmp_path / "runs" / "tiny")


def check_tracked(folder):
    """The tracker was notified of every step and of rollouts."""
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    rewards = {entry["step"]: entry["reward"] for entry in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}
    assert {each.step: each.value for each in found.Scalars("train/reward")} == pytest.approx(rewards)
    assert b"- rollout: `train-" in found.Tensors("rollouts/0/text_summary")[0].tensor_proto.string_val[0]
    ends = [
        event for event in map(json.loads, (folder / "events.jsonl").read_text().splitlines()) if event["kind"] == "tracker.end"
    ]
    assert [(end["tracker"], end["failed"], end["left_out"]) for end in ends] == [("tensorboard", 0, 0)]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_killed_rollouter_and_trainer_are_restarted(tmp_path):
    killer = Killer(rollouter=1, trainer=3)
    summary = train(write_run(tmp_path), killer)
    attempts = check(tmp_path, summary)
    assert killer.killed == ["rollouter", "trainer"]
    assert {"rollouter.lost", "trainer.lost"} <= set(killer.kinds())
    steps = [fields["step"] for kind, fields in killer.reported if kind == "train.step"]
    assert steps in ([1, 2, 3, 3, 4], [1, 2, 3, 4]), "the third step was not in a checkpoint, unless the kill came late"
    finished = {attempt.ref.successor.id: attempt.end for attempt in attempts}
    assert {end for name, end in finished.items() if name in {a.ref.id for a in attempts}} <= {End.LOST, End.CANCELLED}


MISFITS = {
    "pool.name=memory": r"pool\.name = 'memory' is for one process.*use 'sqlite' or 'postgres'",
    "executor.address=auto": r"executor\.address has no meaning .*set scale\.address",
    "scale.address=ray://head:10001": r"'ray://head:10001' is Ray Client's.*start it there",
}


@pytest.mark.parametrize("override", MISFITS)
def test_what_has_no_meaning_in_several_processes_is_refused(tmp_path, override):
    with pytest.raises(ConfigError, match=MISFITS[override]):
        train(write_run(tmp_path), Killer(), override, "rollout.executor=ray")


@pytest.mark.parametrize(
    ("gpus", "device", "shares"), [(0, "auto", (0, 0)), (1, "auto", (0.5, 0.5)), (8, "auto", (1, 1)), (8, "cpu", (0, 0))]
)
def test_rollouter_and_trainer_share_what_gpus_there_are(tmp_path, gpus, device, shares):
    assert gpu_shares(load_config(write_run(tmp_path), [f"engine.device={device}"]), gpus) == shares


@pytest.mark.slow
def test_missing_package_is_reported_in_one_line(tmp_path):
    code = "import sys; sys.modules['ray'] = None; from penstock.cli.app import main; main()"
    file = str(write_run(tmp_path))
    for overrides in ((), ("--set", "scale.name=none", "--set", "rollout.executor=ray")):
        done = subprocess.run([sys.executable, "-c", code, "train", file, *overrides], capture_output=True, text=True, timeout=120)
        said = f"{done.stdout}{done.stderr}"
        assert done.returncode == 2 and f"Ray is not installed; {install_command('ray')}" in said and "Traceback" not in said
