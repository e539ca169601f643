"""Integrations of agent frameworks."""
