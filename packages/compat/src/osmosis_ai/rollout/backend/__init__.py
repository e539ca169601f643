"""Back ends, which run the rollouts of a rollout server."""
