"""The OpenAI Agents SDK in a rollout: agents call the policy, sessions are transcripts, and the SDK's own Runner runs them.

    agent = RolloutAgent(name="solver", instructions="…", model=RolloutModel(), tools=[…])
    session = RolloutSession(name="solver")
    await Runner.run(agent, ctx.prompt, session=session)

A model call is recorded in the session of the run that makes it, until that run ends. A nested run without its own session
(an agent as a tool, a guardrail's agent) uses the session of the outer run. A call without a session raises RuntimeError.
"""

import json
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, ClassVar, Never, Unpack, cast
from uuid import uuid4

from agents import (
    Agent,
    AgentOutputSchemaBase,
    Handoff,
    Model,
    ModelResponse,
    ModelSettings,
    ModelTracing,
    OpenAIChatCompletionsModel,
    RunConfig,
    RunResult,
    RunResultStreaming,
    RunState,
    TContext,
    Tool,
    TResponseInputItem,
)
from agents.items import TResponseStreamEvent
from agents.memory import SessionABC
from agents.run import AgentRunner, RunOptions, get_default_agent_runner, set_default_agent_runner
from agents.tracing import get_trace_provider
from openai.types.responses.response_prompt_param import ResponsePromptParam

from penstock.sdk.routing import PLACEHOLDER_MODEL, REQUEST_MODEL, RolloutContext, get_rollout_context
from penstock.sdk.samples import RolloutSample, to_json_values

LONGEST_NAME = 200

Input = str | list[TResponseInputItem]


class RolloutModel(Model):
    """Placeholder for the policy. RolloutAgent, or a run with `RunConfig(model=…)`, replaces it with the running rollout's model.

    Takes fields of `ModelSettings` as defaults; the agent's own settings override them.
    """

    agent_name: ClassVar[str] = "RolloutAgent"
    """Name of the agent class in error messages; a facade sets its own."""
    session_name: ClassVar[str] = "RolloutSession"
    """Name of the session class in error messages."""

    def __init__(self, **settings: Any) -> None:
        known = {field.name for field in fields(ModelSettings)}
        if unknown := sorted(settings.keys() - known):
            raise TypeError(
                f"{type(self).__name__} takes the fields of ModelSettings, not {', '.join(unknown)}; "
                "the policy's address and key are the rollout's own"
            )
        self.settings = ModelSettings(**settings) if settings else None
        _install()

    def bind(self, context: RolloutContext) -> "BoundModel":
        """Returns a model that calls the policy in this rollout."""
        return BoundModel(context, self)

    async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
        self._refuse()

    def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[TResponseStreamEvent]:
        self._refuse()

    def _refuse(self) -> Never:
        name = type(self).__name__
        raise NotImplementedError(
            f"{name} only stands for the policy and cannot be called; "
            f"give it to {self.agent_name}(model={name}()) inside the workflow's run()"
        )


class BoundModel(OpenAIChatCompletionsModel):
    """Calls the policy through the gateway. The name of the run's session is the name of the transcript."""

    def __init__(self, context: RolloutContext, placeholder: RolloutModel | None = None) -> None:
        super().__init__(PLACEHOLDER_MODEL, context.openai(), strict_feature_validation=True)
        self.context = context
        self._placeholder = placeholder or RolloutModel()
        _install()

    async def get_response(
        self,
        system_instructions: str | None,
        input: Input,  # noqa: A002
        model_settings: ModelSettings,
        tools: list[Tool],
        output_schema: AgentOutputSchemaBase | None,
        handoffs: list[Handoff[Any, Any]],
        tracing: ModelTracing,
        previous_response_id: str | None = None,
        conversation_id: str | None = None,
        prompt: ResponsePromptParam | None = None,
    ) -> ModelResponse:
        return await super().get_response(
            _with_schema(system_instructions, output_schema),
            input,
            self._settings(model_settings),
            tools,
            None,
            handoffs,
            ModelTracing.DISABLED,
            previous_response_id,
            conversation_id,
            prompt,
        )

    def stream_response(
        self,
        system_instructions: str | None,
        input: Input,  # noqa: A002
        model_settings: ModelSettings,
        tools: list[Tool],
        output_schema: AgentOutputSchemaBase | None,
        handoffs: list[Handoff[Any, Any]],
        tracing: ModelTracing,
        previous_response_id: str | None = None,
        conversation_id: str | None = None,
        prompt: ResponsePromptParam | None = None,
    ) -> AsyncIterator[TResponseStreamEvent]:
        return super().stream_response(
            _with_schema(system_instructions, output_schema),
            input,
            self._settings(model_settings),
            tools,
            None,
            handoffs,
            ModelTracing.DISABLED,
            previous_response_id,
            conversation_id,
            prompt,
        )

    def _transcript(self) -> str:
        run = _running.get()
        if run is None or not run.live:
            name = self._placeholder.session_name
            raise RuntimeError(
                f"the policy was called without a session, so nobody knows which transcript the call belongs to; "
                f"pass one to the run: Runner.run(agent, …, session={name}(name=…))"
            )
        if run.context is not self.context:
            raise RuntimeError(
                f"this agent was made in rollout {self.context.rollout_id!r} and runs in rollout {run.context.rollout_id!r}; "
                "make it inside the workflow's run()"
            )
        return run.transcript

    def _settings(self, given: ModelSettings) -> ModelSettings:
        """Adds the transcript's headers, the policy's name, and token usage in streams unless the settings decide it."""
        settings = self._placeholder.settings.resolve(given) if self._placeholder.settings else given
        headers = {**(settings.extra_headers or {}), **self.context.headers(self._transcript())}
        usage = True if settings.include_usage is None else settings.include_usage
        body = {"model": REQUEST_MODEL, **cast("dict[str, Any]", settings.extra_body or {})}
        return replace(settings, extra_headers=headers, extra_body=body, include_usage=usage)


class RolloutAgent(Agent[TContext]):
    """An `Agent` that replaces a RolloutModel with the policy of the running rollout. Other models are kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.model, RolloutModel):
            name, context = type(self.model).__name__, get_rollout_context()
            if context is None:
                raise RuntimeError(
                    f"{type(self).__name__}(model={name}()) requires an active RolloutContext; "
                    "make the agent inside the workflow's run()"
                )
            self.model = self.model.bind(context)


class RolloutSession(SessionABC):
    """A conversation in memory. In a rollout, its name is the transcript's, and the grader gets its items."""

    def __init__(self, name: str | None = None) -> None:
        name = uuid4().hex if name is None else name
        if not (name.isascii() and name.isprintable() and name == name.strip() and 0 < len(name) <= LONGEST_NAME):
            raise ValueError(f"session name {name!r} cannot be sent as a header; use up to {LONGEST_NAME} plain ASCII characters")
        self.name = self.session_id = name
        self._items: list[TResponseInputItem] = []
        self._context = get_rollout_context()
        if self._context is not None:
            self._context.register_sample_source(name, self)
        _install()

    async def get_items(self, limit: int | None = None) -> list[TResponseInputItem]:
        """Returns copies of all items, or of the last `limit`."""
        self._check()
        start = 0 if limit is None else max(len(self._items) - max(limit, 0), 0)
        return cast(list[TResponseInputItem], to_json_values(self._items[start:]))

    async def add_items(self, items: list[TResponseInputItem]) -> None:
        """Appends copies of `items`."""
        self._check()
        self._items += cast(list[TResponseInputItem], to_json_values(items))

    async def pop_item(self) -> TResponseInputItem | None:
        """Removes and returns the last item, or returns None if there is none."""
        self._check()
        return self._items.pop() if self._items else None

    async def clear_session(self) -> None:
        self._check()
        self._items.clear()

    async def get_sample(self, name: str) -> RolloutSample:
        """Returns the items as the runner stored them; see `SampleSource.get_sample`."""
        return RolloutSample(id=name, messages=to_json_values(self._items))

    def _check(self) -> None:
        context = get_rollout_context()
        if context is not None and context is not self._context:
            origin = f"in rollout {self._context.rollout_id!r}" if self._context else "outside of any rollout"
            raise RuntimeError(
                f"session {self.name!r} was made {origin} and is used in rollout {context.rollout_id!r}, which would not see it; "
                "make it inside the workflow's run()"
            )


@dataclass(slots=True)
class _Run:
    """A run inside a rollout. Until it ends, its model calls are recorded in `transcript`."""

    context: RolloutContext
    transcript: str
    outer: "_Run | None" = None
    ended: bool = False

    @property
    def live(self) -> bool:
        return not self.ended and (self.outer is None or self.outer.live)


_running: ContextVar[_Run | None] = ContextVar("penstock_agents_run", default=None)


class _RolloutRunner(AgentRunner):
    """Wraps the previous default runner to track, inside a rollout, which run a model call belongs to. Otherwise only delegates."""

    def __init__(self, inner: AgentRunner) -> None:
        self._inner = inner

    async def run(
        self,
        starting_agent: Agent[TContext],
        input: Input | RunState[TContext],  # noqa: A002
        **kwargs: Unpack[RunOptions[TContext]],
    ) -> RunResult:
        with _entered(kwargs) as run:
            try:
                return await self._inner.run(starting_agent, input, **kwargs)
            finally:
                _end(run)

    def run_sync(
        self,
        starting_agent: Agent[TContext],
        input: Input | RunState[TContext],  # noqa: A002
        **kwargs: Unpack[RunOptions[TContext]],
    ) -> RunResult:
        with _entered(kwargs) as run:
            try:
                return self._inner.run_sync(starting_agent, input, **kwargs)
            finally:
                _end(run)

    def run_streamed(
        self,
        starting_agent: Agent[TContext],
        input: Input | RunState[TContext],  # noqa: A002
        **kwargs: Unpack[RunOptions[TContext]],
    ) -> RunResultStreaming:
        """The run continues in its own task, which copies the context variables set here, so they may be reset before it ends."""
        with _entered(kwargs) as run:
            result = self._inner.run_streamed(starting_agent, input, **kwargs)
        if result.run_loop_task is not None:
            result.run_loop_task.add_done_callback(lambda _: _end(run))
        return result


@contextmanager
def _entered(options: RunOptions[TContext]) -> Generator[_Run | None]:
    """Sets the current run for the block, or None without rollout or session; binds a RolloutModel in the options."""
    context = get_rollout_context()
    run = _run_of(context, options.get("session")) if context is not None else None
    if context is not None:
        options["run_config"] = _bound(options.get("run_config"), context)
    token = _running.set(run)
    try:
        yield run
    finally:
        _running.reset(token)


def _run_of(context: RolloutContext, session: object) -> _Run | None:
    if isinstance(session, RolloutSession):
        return _Run(context, session.name)
    outer = _running.get()
    if outer is None or not outer.live or outer.context is not context:
        return None
    return _Run(context, outer.transcript, outer)


def _end(run: _Run | None) -> None:
    if run is not None:
        run.ended = True


def _bound(config: RunConfig | dict[str, Any] | None, context: RolloutContext) -> RunConfig | dict[str, Any] | None:
    model = config.get("model") if isinstance(config, dict) else config and config.model
    if config is None or not isinstance(model, RolloutModel):
        return config
    bound = model.bind(context)
    return {**config, "model": bound} if isinstance(config, dict) else replace(config, model=bound)


def _with_schema(instructions: str | None, schema: AgentOutputSchemaBase | None) -> str | None:
    """Adds the output schema to the instructions, since sampling is not constrained to it."""
    if schema is None or schema.is_plain_text():
        return instructions
    asked = f"Your final answer must be JSON that matches this schema, and nothing else:\n{json.dumps(schema.json_schema())}"
    return f"{instructions}\n\n{asked}" if instructions else asked


def _install() -> None:
    """Wraps the default runner, and disables traces in rollouts: the SDK would send them to OpenAI with the user's own key."""
    runner, provider = get_default_agent_runner(), get_trace_provider()
    if not isinstance(runner, _RolloutRunner):
        set_default_agent_runner(_RolloutRunner(runner))
    if "create_trace" not in vars(provider):
        for create in (provider.create_trace, provider.create_span):
            setattr(provider, create.__name__, _quiet(create))


def _quiet(create: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(create)
    def created(*args: Any, **kwargs: Any) -> Any:
        return create(*args, **kwargs | ({"disabled": True} if get_rollout_context() is not None else {}))

    return created
