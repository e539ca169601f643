"""AgentFlowBase and BlackBoxAgentFlowBase, which authors of flows subclass, and the results of their gateway calls."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, cast, overload
from urllib.parse import quote, urlsplit, urlunsplit
from uuid import uuid4

from penstock.errors import RequestError
from penstock.records import Message
from penstock.sdk.routing import get_rollout_context
from penstock.sdk.samples import to_json_values
from penstock_compat.flows import tools as flow_tools
from penstock_compat.flows.client import FlowClient
from penstock_compat.flows.config import ConfigTree
from penstock_compat.flows.step import SubmittedStep


class GeneratedReply(tuple[str, list[int], list[int]]):
    """A reply of the model: unpacks into `text, response_ids, prompt_ids`; the rest are attributes."""

    log_probs: list[float] | None
    """The log-probabilities of `response_ids`; None if the engine gives none."""
    stop_reason: str | None
    policy_version: int | None
    """The version that the engine served, at the last token."""
    policy_versions: list[int] | None
    """Per token."""
    step_index: int | None
    """The index of the call in the rollout."""

    def __new__(cls, answer: dict[str, Any]) -> "GeneratedReply":
        """From the body of the gateway's response."""
        reply = super().__new__(cls, (answer["response_text"], answer["response_ids"], answer["prompt_ids"]))
        for name in ("log_probs", "stop_reason", "policy_version", "policy_versions", "step_index"):
            setattr(reply, name, answer.get(name))
        return reply

    @property
    def text(self) -> str:
        """The reply in the chat template's own text: tool calls included, special tokens not."""
        return self[0]

    @property
    def response_ids(self) -> list[int]:
        """The tokens that were sampled."""
        return self[1]

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens that the model saw."""
        return self[2]


class ComputedReward(float):
    """A reward: a number that can also be read like the gateway's response, as `reward["reward"]`."""

    answer: dict[str, Any]

    def __new__(cls, answer: dict[str, Any]) -> "ComputedReward":
        """From the body of the gateway's response."""
        reward = super().__new__(cls, answer["reward"])
        reward.answer = answer
        return reward

    def __getitem__(self, name: str) -> Any:
        return self.answer[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.answer.get(name, default)


class CallForm(NamedTuple):
    """One of the two signatures of a method."""

    order: tuple[str, ...]
    required: tuple[str, ...]


GENERATE = CallForm(("trajectory_uid", "prompt_uid", "messages"), ("messages",))
GENERATE_IDS = CallForm(("prompt_ids", "sampling_params"), ("prompt_ids",))
REWARD = CallForm(("trajectory_uid", "messages", "dataset_fields"), ("messages",))
REWARD_IDS = CallForm(("prompt_ids", "response_ids", "num_turns", "extra_fields", "dataset_fields"), ("prompt_ids", "response_ids"))


class AgentFlowBase(ABC):
    """An agent. Each rollout gets its own instance; extra keys of its YAML entry are keywords of the constructor.

    The `gateway_…` methods raise RequestError, with the gateway's message, if it refuses; a rollout that does not catch it ends as
    `agent_error`.
    """

    __agent_kind__ = "flow"

    def __init__(
        self,
        *,
        trainer_config: Any = None,
        gateway_url: str = "",
        tokenizer: Any = None,
        processor: Any = None,
        dataset_cls: Any = None,
        dataset_config: Any = None,
        model_token: str = "",
        flow_token: str = "",
        apply_chat_template_kwargs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Inside a rollout, the gateway and the tokens are the rollout's; elsewhere a gateway in open mode needs its URL alone."""
        context = get_rollout_context()
        root = context.base_url.rstrip("/").removesuffix("/v1") if context else ""
        self.gateway_url = gateway_url.rstrip("/") or root
        self.config = getattr(trainer_config, "config", trainer_config) if trainer_config is not None else ConfigTree({})
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.dataset_config = dataset_config
        self.apply_chat_template_kwargs: dict[str, Any] = dict(apply_chat_template_kwargs or {})
        self.channel = context.channel if context else "train"
        """The rollout's own: `train`, or `val` in an evaluation."""
        self._tokenizer_source = tokenizer
        self._context = context
        ours = context if context and self.gateway_url == root else None
        self._client = FlowClient(
            root=self.gateway_url,
            model_token=model_token or (ours.api_key if ours else ""),
            flow_token=flow_token or (ours.flow_token if ours else ""),
            clients=context.clients if context else None,
        )

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> int:
        """Works on one row, whose columns are `kwargs`. Returns the number of steps; 0 means that it failed."""

    @cached_property
    def tokenizer(self) -> Any:
        """The model's, from `transformers`; loaded on first use."""
        return flow_tools.load_tokenizer(self._tokenizer_source)

    @cached_property
    def system_prompt(self) -> list[int]:
        """The tokens that the chat template puts before the first message."""
        return flow_tools.template_preamble(self.tokenizer, self.apply_chat_template_kwargs)

    @cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running event loop."""
        return asyncio.get_running_loop()

    @overload
    async def gateway_generate(
        self, trajectory_uid: str, prompt_uid: str, messages: Sequence[Message], **sampling: Any
    ) -> GeneratedReply: ...

    @overload
    async def gateway_generate(
        self, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any] | None = None, **media: Any
    ) -> dict[str, Any]: ...

    async def gateway_generate(self, *args: Any, **kwargs: Any) -> GeneratedReply | dict[str, Any]:
        """Samples one reply, which is recorded; unset sampling parameters are the run's.

        Messages give `text, response_ids, prompt_ids`; token ids give a dictionary with token_ids, log_probs and stop_reason.
        """
        arguments = _bind_arguments(args, kwargs, GENERATE, GENERATE_IDS, "gateway_generate")
        if "prompt_ids" not in arguments:
            return await self._reply(arguments)
        _refuse_media(arguments)
        return await self._client.generate(self._attributed({**arguments, "prompt_ids": list(arguments["prompt_ids"])}))

    def with_ids(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the keywords of `run` with `trajectory_uid` and `prompt_uid`, for callers that give `uid` alone or neither."""
        own = self._context.rollout_id if self._context else ""
        trajectory = kwargs.get("trajectory_uid") or own or uuid4().hex
        return {**kwargs, "trajectory_uid": trajectory, "prompt_uid": kwargs.get("prompt_uid") or kwargs.get("uid") or trajectory}

    async def _reply(self, request: dict[str, Any]) -> GeneratedReply:
        return GeneratedReply(
            await self._client.generate(self._attributed({**request, "messages": to_json_values(request["messages"])}))
        )

    async def gateway_submit_steps(self, steps: Sequence[SubmittedStep | Mapping[str, Any]], channel: str | None = None) -> int:
        """Submits steps, by default to the rollout's own channel. Returns how many were accepted."""
        submitted = [step if isinstance(step, SubmittedStep) else SubmittedStep(**step) for step in steps]
        return await self._client.submit([self._attributed(step.to_json()) for step in submitted], channel or self.channel)

    @overload
    async def gateway_compute_reward(
        self, trajectory_uid: str, messages: Sequence[Message], dataset_fields: Mapping[str, Any] | None = None
    ) -> ComputedReward: ...

    @overload
    async def gateway_compute_reward(
        self,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        num_turns: int = 2,
        extra_fields: Mapping[str, Any] | None = None,
        dataset_fields: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]: ...

    async def gateway_compute_reward(self, *args: Any, **kwargs: Any) -> ComputedReward | dict[str, Any]:
        """Returns the grader's reward for messages, or for one call's tokens. It is not recorded: put it into a step."""
        arguments = _bind_arguments(args, kwargs, REWARD, REWARD_IDS, "gateway_compute_reward")
        fields = {name: to_json_values(arguments.get(name) or {}) for name in ("dataset_fields", "extra_fields")}
        if "prompt_ids" in arguments:
            ids = {name: list(arguments[name]) for name in ("prompt_ids", "response_ids")}
            return await self._client.compute_reward({**arguments, **fields, **ids})
        uid = arguments.get("trajectory_uid") or (self._context.rollout_id if self._context else "")
        body = {
            "trajectory_uid": uid,
            "messages": to_json_values(arguments["messages"]),
            "dataset_fields": fields["dataset_fields"],
        }
        return ComputedReward(await self._client.compute_reward(body))

    async def process_vision_info(self, messages: Sequence[Message]) -> dict[str, Any]:
        """Returns an empty dictionary: the gateway takes text only. Raises ValueError for pictures and videos."""
        refuse_non_text(messages)
        return {}

    async def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: Any = None,
        videos: Any = None,
        remove_system_prompt: bool = False,
    ) -> list[int]:
        """Returns the token ids of messages, ready for a reply; `remove_system_prompt` leaves out `self.system_prompt`."""
        _refuse_media({"image_data": images, "video_data": videos})
        refuse_non_text(messages)
        options = {**self.apply_chat_template_kwargs, "tools": list(tools) if tools else None}
        return await asyncio.to_thread(self._render, expand_nested_messages(messages), options, remove_system_prompt)

    def _render(self, messages: list[Message], options: Mapping[str, Any], bare: bool) -> list[int]:
        ids = flow_tools.render_messages(self.tokenizer, messages, options)
        return ids[len(flow_tools.template_preamble(self.tokenizer, self.apply_chat_template_kwargs)) :] if bare else ids

    def _attributed(self, body: dict[str, Any]) -> dict[str, Any]:
        """Adds the running rollout and its group if the body names none."""
        own = {"trajectory_uid": self._context.rollout_id, "prompt_uid": self._context.group_id} if self._context else {}
        return {**body, **{name: value for name, value in own.items() if value and not body.get(name)}}


def _bind_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], by_messages: CallForm, by_ids: CallForm, what: str
) -> dict[str, Any]:
    """Returns the arguments by name, in whichever of the two forms they came."""
    ids = "prompt_ids" in kwargs or (bool(args) and not isinstance(args[0], str))
    form, other = (by_ids, "messages") if ids else (by_messages, "prompt_ids")
    arguments = dict(zip(form.order, args, strict=False))
    invalid = len(args) > len(form.order) or arguments.keys() & kwargs.keys() or other in kwargs
    arguments |= {name: value for name, value in kwargs.items() if value is not None}
    if invalid or any(name not in arguments for name in form.required):
        forms = [f"({', '.join(each.order)})" for each in (by_messages, by_ids)]
        raise TypeError(f"{what}() takes {' or '.join(forms)}; it came with {sorted(arguments)}")
    return arguments


def _refuse_media(arguments: dict[str, Any]) -> None:
    for name in ("image_data", "video_data"):
        if arguments.pop(name, None):
            raise ValueError(f"{name}: the gateway takes text; leave pictures and videos out")


# Messages and columns of a row

NOT_COLUMNS = frozenset({"raw_prompt", "uid", "prompt_uid", "trajectory_uid", "channel"})


def expand_nested_messages(messages: Sequence[Message]) -> list[Message]:
    """Replaces each message whose content is itself a list of messages by those.

    >>> expanded([{"role": "user", "content": [{"role": "user", "content": "2+2?"}]}])
    [{'role': 'user', 'content': '2+2?'}]
    """
    return [inner for message in messages for inner in _inner(message)]


def prompt_messages(kwargs: Mapping[str, Any]) -> list[Message]:
    """Returns the row's prompt as messages, from text or a list in `raw_prompt`; ValueError if there is none."""
    prompt = kwargs.get("raw_prompt")
    if not prompt:
        raise ValueError("the row has no prompt; fill its 'prompt' column, or write a flow that asks with other columns")
    return (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else expand_nested_messages(cast("list[Message]", prompt))
    )


def row_columns(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns of the row among the keywords of `run`."""
    return {name: value for name, value in kwargs.items() if name not in NOT_COLUMNS}


def refuse_non_text(messages: Sequence[Message]) -> None:
    """Raises ValueError if a message has a part that is not text."""
    for message in expand_nested_messages(messages):
        content: Any = message.get("content")
        parts = cast("list[Any]", content) if isinstance(content, list) else []
        for part in parts:
            kind = str(cast("Mapping[str, Any]", part).get("type", "text")) if isinstance(part, Mapping) else "text"
            if kind != "text":
                raise ValueError(f"a message holds {kind!r}; the gateway takes text, leave pictures and videos out")


def _inner(message: Message) -> list[Message]:
    content: Any = message.get("content")
    if not isinstance(content, list) or not content:
        return [message]
    parts = cast("list[Any]", content)
    return cast("list[Message]", parts) if all(_is_message(part) for part in parts) else [message]


def _is_message(part: Any) -> bool:
    return isinstance(part, Mapping) and "role" in part and "content" in part


NOT_REGISTERED = frozenset({"raw_prompt", "multi_modal_data", "channel", "agent_name"})
"""Columns that are not registered with the rollout."""
PROMPT_UID = "1"
"""If the row names no group."""
CLEANUP_S = 4.0
"""For completing a rollout while it is being cancelled."""


class BlackBoxAgentFlowBase(AgentFlowBase):
    """Opens the rollout, runs the agent on its `base_url`, and completes it, also when the agent fails."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> int:
        channel = kwargs.pop("channel", None) or self.channel
        endpoint = await self._client.begin()
        base_url = _with_prompt_uid(endpoint.base_url, str(kwargs.get("uid") or PROMPT_UID))
        metadata: Any = to_json_values({name: value for name, value in kwargs.items() if name not in NOT_REGISTERED})
        await self._client.register(base_url, channel, metadata)
        try:
            steps = await self._run_agent(base_url, kwargs)
            reward = await self.final_reward(base_url, kwargs)
        except BaseException as error:
            await self._complete_failed(base_url, channel, error)
            raise
        await self._client.complete(base_url, channel, reward)
        return steps

    @abstractmethod
    async def _run_agent(self, base_url: str, kwargs: dict[str, Any]) -> int:
        """Runs the agent with `base_url` as its OpenAI endpoint, with any key. Returns how many turns it took."""

    async def final_reward(self, base_url: str, kwargs: dict[str, Any]) -> float | None:
        """Returns the reward of an agent that has returned; None leaves it to the grader."""
        return None

    async def _complete_failed(self, base_url: str, channel: str, error: BaseException) -> None:
        """Completes the rollout of an agent that failed or was cancelled; a failure here must not hide the agent's error."""
        try:
            async with asyncio.timeout(CLEANUP_S):
                await self._client.complete(base_url, channel, None)
        except (RequestError, TimeoutError) as cause:
            error.add_note(f"besides, the rollout could not be completed: {cause}")


def _with_prompt_uid(base_url: str, prompt_uid: str) -> str:
    """Replaces the second path segment of `base_url`, which names the group."""
    url = urlsplit(base_url)
    first, _, *rest = [part for part in url.path.split("/") if part]
    path = "/".join([first, quote(prompt_uid, safe=""), *rest])
    return urlunsplit(url._replace(path=f"/{path}"))
