"""An agent that solves GSM8K problems with a plain OpenAI client."""

from penstock_compat.flows.gsm8k import GSM8KAgent

__all__ = ["GSM8KAgent"]
