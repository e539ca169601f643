"""Tasks become rollouts, rollouts become graded records."""
