"""The gateway's routes and dialect for Agent Flows."""
