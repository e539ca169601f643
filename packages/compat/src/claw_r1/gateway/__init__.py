"""The gateway command, `python -m claw_r1.gateway.gateway`."""
