"""Relays: endpoints that take messages and give text. They are measured, never trained."""
