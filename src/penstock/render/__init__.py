"""Messages to token ids and back. Each name is a way in which a model family writes tool calls."""

from penstock.registry import Registry

TOOL_FORMATS = Registry("tool format", {"hermes": "penstock.render.hermes:Hermes"})
