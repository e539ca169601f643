"""Trackers: other people's dashboards that a run can be followed in. One file each."""

from penstock.registry import Registry
from penstock.trackers.base import Tracker

TRACKERS = Registry(
    "tracker",
    {
        "tensorboard": "penstock.trackers.tensorboard:TensorboardTracker",
        "wandb": "penstock.trackers.wandb:WandbTracker",
        "mlflow": "penstock.trackers.mlflow:MlflowTracker",
        "trackio": "penstock.trackers.trackio:TrackioTracker",
    },
    base=Tracker,
)
