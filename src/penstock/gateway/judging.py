"""The judge of a gateway that stands alone: a rule for the row's data source, on what the policy said."""

from collections.abc import Mapping
from typing import Any

from penstock.graders.rule import rule_reward, said
from penstock.records import Message


async def judge_by_rule(rollout_id: str, messages: list[Message], fields: Mapping[str, Any]) -> float:
    """See `Judge`."""
    return rule_reward(said(messages), fields)
