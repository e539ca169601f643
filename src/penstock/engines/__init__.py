"""Engines: token ids in; ids, log-probabilities and versions out; relays: messages in, text out. A name opens one."""

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
        "embedded": "penstock.config:EngineSection",
        "litellm": "penstock.engines.text_endpoints.litellm:LitellmSection",
        "openai": "penstock.engines.text_endpoints.openai:OpenAISection",
        "sglang": "penstock.engines.servers.sglang:SglangSection",
        "vllm": "penstock.engines.servers.vllm:VllmSection",
    },
)
"""What each takes under `[engine]`; one that is not listed takes what the embedded one does."""
