"""The rollout server: an agent behind HTTP. A controller gives it tasks and is called back with what came of them."""
