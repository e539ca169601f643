"""Losses: from log-probabilities and advantages to one number per trained token, one small pure file each."""

from penstock.registry import Registry

LOSSES = Registry("loss", {"clip": "penstock.train.losses.clip:clip"})
