"""Rollouts in processes of their own: a fork server, which has the agent loaded, forks one for each job."""
