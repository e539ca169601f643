"""Trackio: rollouts are its own traces."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from penstock.config import TrackSection, first_variable
from penstock.errors import ConfigError
from penstock.run.trackers.base import RolloutTrace, TrackedRun, Tracker, TrackerStart, load_package

SERVERS = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class TrackioTracker(Tracker):
    modules = ("trackio",)
    extra = "trackio"

    _run: Any

    @classmethod
    def check(cls, section: TrackSection) -> None:
        super().check(section)
        if section.mode == "offline" and (variable := first_variable(*SERVERS)):
            raise ConfigError(f"track.mode = 'offline': {variable} names a server for trackio; unset it")

    def start(self, run: TrackedRun) -> TrackerStart:
        trackio = load_package("trackio")
        self._run = trackio.init(
            run.project,
            name=run.name,
            resume="allow" if run.id else "never",
            config=dict(run.config),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        return TrackerStart(self._run.id, f"trackio show --project {quote(run.project)}")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def traces(self, traces: Sequence[RolloutTrace], step: int) -> None:
        trackio = load_package("trackio")
        for place, trace in enumerate(traces):
            spans = [
                {
                    "id": str(number),
                    "name": call.transcript,
                    "kind": "generation",
                    "start_time": call.created,
                    "duration_ms": round(call.seconds * 1000, 3),
                    "output": call.message,
                    "usage": {"completion_tokens": call.tokens},
                }
                for number, call in enumerate(trace.calls)
            ]
            status = "ok" if trace.end == "completed" else "error"
            metadata = {**trace.labels, "status": status}
            self._run.log({f"rollouts/{place}": trackio.Trace(trace.messages, metadata=metadata, spans=spans)}, step=step)

    def artifact(self, path: Path, kind: str) -> None:
        trackio = load_package("trackio")
        artifact = trackio.Artifact(f"{self._run.id}-{kind}", type=kind)
        artifact.add_dir(path) if path.is_dir() else artifact.add_file(path)
        self._run.log_artifact(artifact)

    def finish(self, status: str) -> None:
        self._run.finish()
