"""Engines by name. Most take and return token ids; text endpoints take messages and return text."""

from penstock.registry import Registry

ENGINES = Registry(
    "engine",
    {
        "anthropic": "penstock.engines.text_endpoints.anthropic:open_engine",
        "embedded": "penstock.engines.embedded:open_engine",
        "litellm": "penstock.engines.text_endpoints.litellm:open_engine",
        "openai": "penstock.engines.text_endpoints.openai:open_engine",
        "sglang": "penstock.engines.servers.sglang:open_engine",
        "vllm": "penstock.engines.servers.vllm:open_engine",
    },
)

SECTIONS = Registry(
    "engine section",
    {
        "anthropic": "penstock.engines.text_endpoints.anthropic:AnthropicSection",
        "embedded": "penstock.config:EmbeddedSection",
        "litellm": "penstock.engines.text_endpoints.litellm:LitellmSection",
        "openai": "penstock.engines.text_endpoints.openai:OpenAISection",
        "sglang": "penstock.engines.servers.sglang:SglangSection",
        "vllm": "penstock.engines.servers.vllm:VllmSection",
    },
)
"""The settings class of each engine, and what others may ask about it (`trainable`, `in_process`, ...).

An engine that is not listed has `config.EngineSection`.
"""
