"""Upstream keeps its own parts here; no name of it is documented, and none is offered."""
