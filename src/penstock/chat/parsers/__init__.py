"""Tool formats: the ways in which model families write tool calls. The first that matches a chat template is used."""

from penstock.registry import Registry

TOOL_FORMATS = Registry(
    "tool format",
    {
        "hermes": "penstock.chat.parsers.hermes:Hermes",
        "qwen_xml": "penstock.chat.parsers.qwen_xml:QwenXml",
        "llama": "penstock.chat.parsers.llama:Llama",
        "mistral": "penstock.chat.parsers.mistral:Mistral",
        "mistral_named": "penstock.chat.parsers.mistral:MistralNamed",
        "deepseek": "penstock.chat.parsers.deepseek:DeepSeek",
        "deepseek_plain": "penstock.chat.parsers.deepseek:DeepSeekPlain",
        "harmony": "penstock.chat.parsers.harmony:Harmony",
        "pythonic": "penstock.chat.parsers.pythonic:Pythonic",
    },
)
