"""Integrations: one file per agent framework."""
