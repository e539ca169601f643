"""Trackers: other people's dashboards that a run can be followed in. One file each."""

from penstock.registry import Registry
from penstock.run.trackers.base import Tracker

TRACKERS = Registry(
    "tracker",
    {
        "tensorboard": "penstock.run.trackers.tensorboard:TensorboardTracker",
        "wandb": "penstock.run.trackers.wandb:WandbTracker",
        "mlflow": "penstock.run.trackers.mlflow:MlflowTracker",
        "trackio": "penstock.run.trackers.trackio:TrackioTracker",
    },
    base=Tracker,
)
