"""Advantages: from a group's rewards to the credit of each graded rollout, one small pure file each."""

from penstock.registry import Registry

ADVANTAGES = Registry(
    "advantage",
    {
        "grpo": "penstock.train.advantages.grpo:grpo",
        "dr_grpo": "penstock.train.advantages.dr_grpo:dr_grpo",
        "rloo": "penstock.train.advantages.rloo:rloo",
        "reinforce_pp": "penstock.train.advantages.reinforce_pp:reinforce_pp",
        "opo": "penstock.train.advantages.opo:opo",
        "maxrl": "penstock.train.advantages.maxrl:maxrl",
        "pass_at_k": "penstock.train.advantages.pass_at_k:pass_at_k",
        "rewards_to_go": "penstock.train.advantages.rewards_to_go:rewards_to_go",
        "turn_grpo": "penstock.train.advantages.turn_grpo:turn_grpo",
        "transcript_grpo": "penstock.train.advantages.turn_grpo:transcript_grpo",
        "vine": "penstock.train.advantages.vine:vine",
        "gae": "penstock.train.advantages.gae:gae",
        "distill": "penstock.train.advantages.distill:distill",
    },
)
