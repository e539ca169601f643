"""Engines: token ids in; ids, log-probabilities and versions out; relays: messages in, text out. A name opens one."""

from penstock.registry import Registry

ENGINES = Registry(
    "engine",
    {
        "anthropic": "penstock.engines.relay.anthropic:open_engine",
        "embedded": "penstock.engines.embedded:open_engine",
        "litellm": "penstock.engines.relay.litellm:open_engine",
        "openai": "penstock.engines.relay.openai:open_engine",
        "sglang": "penstock.engines.sglang:open_engine",
        "vllm": "penstock.engines.vllm:open_engine",
    },
)

SECTIONS = Registry(
    "engine section",
    {
        "anthropic": "penstock.engines.relay.anthropic:AnthropicSection",
        "embedded": "penstock.config:EngineSection",
        "litellm": "penstock.engines.relay.litellm:LitellmSection",
        "openai": "penstock.engines.relay.openai:OpenAISection",
        "sglang": "penstock.engines.sglang:SglangSection",
        "vllm": "penstock.engines.vllm:VllmSection",
    },
)
"""What each takes under `[engine]`; one that is not listed takes what the embedded one does."""
