"""The trainer: from complete groups to the next policy version."""

from penstock.train.advantages import ADVANTAGES
from penstock.train.losses import LOSSES

REGISTRIES = {"train.advantage": ADVANTAGES, "train.loss": LOSSES}
"""By the config key that names one of their entries; see `read_inputs`."""
