"""Losses: from log-probabilities and advantages to one number per trained token, one small pure file each."""

from penstock.registry import Registry

LOSSES = Registry(
    "loss",
    {
        "clip": "penstock.train.losses.clip:clip",
        "dapo": "penstock.train.losses.clip:dapo",
        "gspo": "penstock.train.losses.gspo:gspo",
        "cispo": "penstock.train.losses.cispo:cispo",
        "sapo": "penstock.train.losses.sapo:sapo",
        "icepop": "penstock.train.losses.icepop:icepop",
        "reinforce": "penstock.train.losses.reinforce:reinforce",
        "likelihood": "penstock.train.losses.reinforce:likelihood",
    },
)
