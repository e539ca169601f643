"""Rollouts in processes of their own: a zygote that has the agent loaded forks one for each job."""
