"""Weights & Biases: rollouts are rows of a `wandb.Table`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from penstock.config import TrackSection
from penstock.errors import ConfigError
from penstock.run.trackers.base import RolloutTrace, TrackedRun, Tracker, TrackerStart, load_package

COLUMNS = ("step", "rollout", "group", "task", "end", "reward", "policy_version", "conversation", "messages")


class WandbTracker(Tracker):
    modules = ("wandb",)
    extra = "wandb"

    _run: Any

    @classmethod
    def check(cls, section: TrackSection) -> None:
        super().check(section)
        if section.mode == "offline":
            return
        wandb = load_package("wandb")
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
            raise ConfigError(
                "track.to: wandb knows no key; run `wandb login`, set WANDB_API_KEY, or set track.mode = 'offline' and sync later"
            )

    def start(self, run: TrackedRun) -> TrackerStart:
        wandb = load_package("wandb")
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id or None,
            resume="allow" if run.id else None,
            dir=str(run.folder),
            mode="offline" if run.offline else None,
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True),
        )
        # W&B drops a step that is not above the last one, and a resumed run repeats some: so steps are a column.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        online = self._run.settings.mode == "online"
        return TrackerStart(self._run.id, self._run.url if online else f"wandb sync {self._run.settings.sync_dir}")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "step": step})

    def traces(self, traces: Sequence[RolloutTrace], step: int) -> None:
        wandb = load_package("wandb")
        rows = [
            [
                *(step, trace.rollout_id, trace.group_id, trace.task_id, trace.end, trace.reward, trace.version),
                *(trace.text(), orjson.dumps(dict(trace.transcripts)).decode()),
            ]
            for trace in traces
        ]
        self._run.log({"rollouts": wandb.Table(columns=list(COLUMNS), data=rows), "step": step})

    def artifact(self, path: Path, kind: str) -> None:
        wandb = load_package("wandb")
        artifact = wandb.Artifact(f"{self._run.id}-{kind}", type=kind)
        artifact.add_dir(str(path)) if path.is_dir() else artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def finish(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=int(status == "failed"))
