"""Ready-made graders, one file each, and the rules by which rows of known datasets are scored."""

from penstock.registry import Registry

RULES = Registry("rule", {"openai/gsm8k": "penstock.graders.gsm8k:score"})
"""By a row's `data_source`: what gives a reward for `(text, truth)`, the policy's words and the row's ground truth."""
