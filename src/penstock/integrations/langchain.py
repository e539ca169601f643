"""LangChain and LangGraph in a rollout: `chat_model()` is a `ChatOpenAI` whose calls the gateway serves and records.

agent = create_agent(chat_model(temperature=1.0), tools=[search])
await agent.ainvoke({"messages": ctx.prompt})
"""

from typing import Any, cast

from langchain_openai import ChatOpenAI

from penstock.sdk.clients import openai_blocking_client
from penstock.sdk.routing import MAIN, REQUEST_MODEL, get_rollout_context

ROUTING = frozenset(
    {"api_key", "openai_api_key", "base_url", "openai_api_base", "organization", "openai_organization", "openai_proxy"}
    | {"default_headers", "http_client", "http_async_client", "client", "async_client", "root_client", "root_async_client"}
)
"""Settings of `ChatOpenAI` that the rollout sets and users may not."""


class RolloutChat(ChatOpenAI):
    """The policy, as one transcript of a rollout."""

    def with_structured_output(self, schema: Any = None, *, method: Any = "function_calling", **options: Any) -> Any:
        """Forces a tool call by default, which works with any policy; see `ChatOpenAI.with_structured_output`."""
        return cast("Any", super()).with_structured_output(schema, method=method, **options)


def chat_model(transcript: str = MAIN, **settings: Any) -> RolloutChat:
    """Returns a chat model for the running rollout, recorded as `transcript`; `settings` are those of `ChatOpenAI`."""
    context = get_rollout_context()
    if context is None:
        raise RuntimeError("chat_model() requires an active RolloutContext; call it inside AgentWorkflow.run()")
    if taken := sorted(ROUTING & settings.keys()):
        raise ValueError(f"chat_model() was given {taken}, which the rollout decides; leave them out")
    awaited, blocking = context.openai(transcript), openai_blocking_client(context, transcript)
    bound: dict[str, Any] = {
        "model": REQUEST_MODEL,
        "stream_usage": True,
        "disabled_params": {
            "parallel_tool_calls": None
        },  # LangChain adds it unasked, and the gateway refuses it, as it cannot guarantee it
        **settings,
        "api_key": awaited.api_key,
        "base_url": context.base_url,
        "openai_proxy": "",
        "root_async_client": awaited,
        "async_client": awaited.chat.completions,
        "root_client": blocking,
        "client": blocking.chat.completions,
    }
    return RolloutChat(**bound)
