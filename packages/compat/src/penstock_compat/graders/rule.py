"""RuleGrader: scores a rollout by the rule of its row's `data_source`."""

from collections.abc import Mapping
from typing import Any, cast

from penstock.errors import ConfigError, GraderError
from penstock.sdk.context import GraderContext
from penstock.sdk.routing import MAIN
from penstock.sdk.samples import assistant_text, policy_messages
from penstock.sdk.workflow import Grader
from penstock_compat.graders import RULES


class RuleGrader(Grader):
    """Scores the whole rollout once, by its `assistant_text`."""

    async def grade(self, ctx: GraderContext) -> None:
        sample = ctx.samples.get(MAIN) or ctx.sample
        fields = {**(ctx.metadata or {}), "ground_truth": ctx.label}
        ctx.set_reward(rule_reward(assistant_text(policy_messages(sample)), fields))


def rule_reward(text: str, fields: Mapping[str, Any]) -> float:
    """Scores `text` by the rule of `fields["data_source"]`, against `ground_truth` or `reward_model.ground_truth`.

    Raises GraderError if one of them is missing, or if there is no such rule.
    """
    source, truth = fields.get("data_source"), _truth(fields)
    known = ", ".join(RULES)
    if not isinstance(source, str) or not source:
        raise GraderError(f"no rule: the row has no 'data_source'; add it (known: {known}), or define a Grader")
    if truth is None:
        raise GraderError(f"rule {source!r}: the row has no ground truth; add 'reward_model': {{'ground_truth': '…'}}")
    if ":" in source:  # `load` would import it, and datasets must not name code
        raise GraderError(f"unknown data source {source!r}; known: {known}")
    try:
        rule = RULES.load(source)
    except ConfigError as cause:
        raise GraderError(f"unknown data source {source!r}; known: {known}; or define a Grader") from cause
    return float(rule(text, truth))


def _truth(fields: Mapping[str, Any]) -> str | None:
    truth = fields.get("ground_truth")
    model = fields.get("reward_model")
    if truth is None and isinstance(model, Mapping):
        truth = cast("Mapping[str, Any]", model).get("ground_truth")
    return None if truth is None else str(truth)
