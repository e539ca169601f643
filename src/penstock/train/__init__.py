"""The trainer: from complete groups to the next policy version."""

from penstock.registry import Registry

LOSSES = Registry("loss", {"clip": "penstock.train.losses:clip"})
