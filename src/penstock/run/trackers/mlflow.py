"""MLflow: rollouts are traces with a span for each model call."""

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from penstock.run.trackers.base import RolloutTrace, TrackedRun, Tracker, TrackerStart, load_package

STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
MAX_PARAM = 500


class MlflowTracker(Tracker):
    modules = ("mlflow",)
    extra = "mlflow"

    _client: Any
    _experiment = _run = ""

    def start(self, run: TrackedRun) -> TrackerStart:
        # else the ids of traces come from `random`: an agent that seeds it would make the same ones again, which replace the others
        os.environ.setdefault("MLFLOW_TRACE_USE_ISOLATED_RANDOM_ID_GENERATOR", "true")
        mlflow = load_package("mlflow")
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it logs each table that it makes
        files = run.folder.resolve() / "mlflow"
        if run.offline:
            files.mkdir(exist_ok=True)
            mlflow.set_tracking_uri(f"sqlite:///{files / 'mlflow.db'}")  # also where traces go
        self._client = mlflow.MlflowClient()
        known = self._client.get_experiment_by_name(run.project)
        place = {"artifact_location": (files / "artifacts").as_uri()} if run.offline else {}
        self._experiment = known.experiment_id if known else self._client.create_experiment(run.project, **place)
        self._run = run.id or self._client.create_run(self._experiment, run_name=run.name).info.run_id
        if run.id:
            self._client.update_run(run.id, status="RUNNING")
        else:
            self._log_config(run.config)
        uri = mlflow.get_tracking_uri()
        return TrackerStart(self._run, f"mlflow ui --backend-store-uri {uri}" if uri.startswith("sqlite:") else uri)

    def _log_config(self, config: Mapping[str, Any]) -> None:
        param = load_package("mlflow.entities").Param
        params = [
            param(f"{section}.{key}", (value if isinstance(value, str) else orjson.dumps(value).decode())[:MAX_PARAM])
            for section, table in config.items()
            for key, value in table.items()
        ]
        for first in range(0, len(params), 100):  # the most that one call takes
            self._client.log_batch(self._run, params=params[first : first + 100])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        metric, now = load_package("mlflow.entities").Metric, int(time.time() * 1000)
        self._client.log_batch(self._run, metrics=[metric(_name(name), value, now, step) for name, value in metrics.items()])

    def traces(self, traces: Sequence[RolloutTrace], step: int) -> None:
        mlflow = load_package("mlflow")
        for trace in traces:
            begun = min((call.created for call in trace.calls), default=time.time())
            ended = max((call.created + call.seconds for call in trace.calls), default=begun)
            first = [message for message in trace.messages if message.get("role") != "assistant"][:1]
            root = mlflow.start_span_no_context(
                trace.rollout_id,
                span_type="AGENT",
                inputs={"messages": first},
                attributes={**trace.labels, "step": step},
                tags={"step": str(step), "reward": str(trace.reward), "end": trace.end},
                metadata={"mlflow.sourceRun": self._run},
                experiment_id=self._experiment,
                start_time_ns=int(begun * 1e9),
            )
            for call in trace.calls:
                span = mlflow.start_span_no_context(
                    call.transcript,
                    span_type="CHAT_MODEL",
                    parent_span=root,
                    attributes={"tokens": call.tokens, "finish": call.finish},
                    start_time_ns=int(call.created * 1e9),
                )
                span.set_outputs(call.message)
                span.end(end_time_ns=int((call.created + call.seconds) * 1e9))
            root.set_outputs({name: list(messages) for name, messages in trace.transcripts.items()})
            root.end(status="OK" if trace.end == "completed" else "ERROR", end_time_ns=int(ended * 1e9))

    def artifact(self, path: Path, kind: str) -> None:
        keep = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
        keep(self._run, str(path), *([kind] if path.is_dir() else []))

    def finish(self, status: str) -> None:
        mlflow = load_package("mlflow")
        mlflow.flush_trace_async_logging()
        self._client.set_terminated(self._run, STATUS[status])
        mlflow.tracing.reset()  # else it fails, with a traceback, when Python ends


def _name(metric: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", metric)
