"""Messages to token ids and back. Each name is a way in which a model family writes tool calls."""

from penstock.registry import Registry

TOOL_FORMATS = Registry(
    "tool format",
    {
        "hermes": "penstock.render.hermes:Hermes",
        "qwen_xml": "penstock.render.qwen_xml:QwenXml",
        "llama": "penstock.render.llama:Llama",
        "mistral": "penstock.render.mistral:Mistral",
        "mistral_named": "penstock.render.mistral:MistralNamed",
        "deepseek": "penstock.render.deepseek:DeepSeek",
        "deepseek_plain": "penstock.render.deepseek:DeepSeekPlain",
        "harmony": "penstock.render.harmony:Harmony",
        "pythonic": "penstock.render.pythonic:Pythonic",
    },
)
