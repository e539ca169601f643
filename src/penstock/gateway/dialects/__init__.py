"""Dialects: the wire formats in which agents call the model. Each name is a class that follows `Dialect`."""

from penstock.registry import Registry

DIALECTS = Registry(
    "dialect",
    {
        "chat": "penstock.gateway.dialects.chat:ChatDialect",
        "responses": "penstock.gateway.dialects.responses:ResponsesDialect",
        "completions": "penstock.gateway.dialects.completions:CompletionsDialect",
        "messages": "penstock.gateway.dialects.messages:MessagesDialect",
        "inference": "penstock.gateway.dialects.inference:InferenceDialect",
    },
    wheels={"generate": "penstock-compat"},
)
