"""Evaluation: what a run came to, for people."""
