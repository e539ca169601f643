"""Agent Flows of Claw-R1 and the rollout server of Osmosis, which plug into Penstock through entry points."""
