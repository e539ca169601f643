"""Engines behind HTTP that take token ids: vLLM and SGLang."""
