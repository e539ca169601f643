"""Engines: token ids in; ids, log-probabilities and versions out. Each name opens one with `open(folder, name, section)`."""

from penstock.registry import Registry

ENGINES = Registry(
    "engine",
    {
        "embedded": "penstock.engines.embedded:open_engine",
        "sglang": "penstock.engines.sglang:open_engine",
        "vllm": "penstock.engines.vllm:open_engine",
    },
)

SECTIONS = Registry(
    "engine section",
    {
        "embedded": "penstock.config:EngineSection",
        "sglang": "penstock.engines.sglang:SglangSection",
        "vllm": "penstock.engines.vllm:VllmSection",
    },
)
"""What each takes under `[engine]`; one that is not listed takes what the embedded one does."""
