"""Graders by rule and by function, and the rules that score rows of known datasets."""

from penstock.registry import Registry

RULES = Registry("rule", {"openai/gsm8k": "penstock_compat.graders.gsm8k:score"})
"""By a row's `data_source`: a function of `(text, truth)`, the policy's text and the row's ground truth, that returns a reward."""
