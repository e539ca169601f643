"""Where a rollout server runs its rollouts."""
