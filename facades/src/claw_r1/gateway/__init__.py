"""The gateway: `python -m claw_r1.gateway.gateway`."""
