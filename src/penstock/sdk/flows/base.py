"""What the gateway answers to a flow: one object for both forms in which flows read it."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, cast, overload

from penstock.records import Message
from penstock.sdk.flows import tools as tokenizers
from penstock.sdk.flows.client import FlowClient
from penstock.sdk.flows.config import ConfigTree
from penstock.sdk.flows.step import SubmittedStep
from penstock.sdk.routing import get_rollout_context
from penstock.sdk.samples import to_json_values


class GeneratedReply(tuple[str, list[int], list[int]]):
    """A reply: unpacks into `text, response_ids, prompt_ids`, and carries what else is known of the call."""

    log_probs: list[float] | None
    """Of `response_ids`; None where the engine tells none."""
    stop_reason: str | None
    policy_version: int | None
    """The version that the engine served; that of the last token where it changed within the reply."""
    policy_versions: list[int] | None
    """Per token."""
    step_index: int | None
    """Of the call among those that are recorded of the rollout."""

    def __new__(cls, answer: dict[str, Any]) -> "GeneratedReply":
        """From the body of the gateway's answer."""
        made = super().__new__(cls, (answer["response_text"], answer["response_ids"], answer["prompt_ids"]))
        for name in ("log_probs", "stop_reason", "policy_version", "policy_versions", "step_index"):
            setattr(made, name, answer.get(name))
        return made

    @property
    def text(self) -> str:
        """What was said, as the template's own text: tool calls included, special tokens not."""
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
    """A reward, to be used as the number that it is or read like the gateway's answer: `reward["reward"]`."""

    answer: dict[str, Any]

    def __new__(cls, answer: dict[str, Any]) -> "ComputedReward":
        """From the body of the gateway's answer."""
        made = super().__new__(cls, answer["reward"])
        made.answer = answer
        return made

    def __getitem__(self, name: str) -> Any:
        return self.answer[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.answer.get(name, default)


NOT_COLUMNS = frozenset({"raw_prompt", "uid", "prompt_uid", "trajectory_uid", "channel"})


def expand_nested_messages(messages: Sequence[Message]) -> list[Message]:
    """With each message whose content is itself a list of messages replaced by those.

    >>> expanded([{"role": "user", "content": [{"role": "user", "content": "2+2?"}]}])
    [{'role': 'user', 'content': '2+2?'}]
    """
    return [inner for message in messages for inner in _inner(message)]


def prompt_messages(kwargs: Mapping[str, Any]) -> list[Message]:
    """The row's prompt as messages, whichever way `raw_prompt` tells it; ValueError where the row asks nothing."""
    prompt = kwargs.get("raw_prompt")
    if not prompt:
        raise ValueError("the row has no prompt; fill its 'prompt' column, or write a flow that asks with other columns")
    return (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else expand_nested_messages(cast("list[Message]", prompt))
    )


def row_columns(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of the row among what `run` is given: what a grader may want to know."""
    return {name: value for name, value in kwargs.items() if name not in NOT_COLUMNS}


def refuse_non_text(messages: Sequence[Message]) -> None:
    """ValueError where a message holds a part that is not text."""
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


class CallForm(NamedTuple):
    """One form of a call: its arguments in their order, and those that nothing else tells."""

    order: tuple[str, ...]
    needed: tuple[str, ...]


GENERATE = CallForm(("trajectory_uid", "prompt_uid", "messages"), ("messages",))
GENERATE_IDS = CallForm(("prompt_ids", "sampling_params"), ("prompt_ids",))
REWARD = CallForm(("trajectory_uid", "messages", "dataset_fields"), ("messages",))
REWARD_IDS = CallForm(("prompt_ids", "response_ids", "num_turns", "extra_fields", "dataset_fields"), ("prompt_ids", "response_ids"))


class AgentFlowBase(ABC):
    """An agent. Each rollout gets an instance of its own; extra keys of its YAML entry come as keywords of the constructor.

    The `gateway_…` methods raise RequestError, with the gateway's own words, where it refuses; a rollout that lets it through ends
    as `agent_error`.
    """

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
        """Inside a rollout, the gateway and the tokens are its own; elsewhere a gateway in open mode needs its URL alone."""
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
        """Work on one row, whose columns are `kwargs`; the number of steps, 0 to say that it failed."""

    @cached_property
    def tokenizer(self) -> Any:
        """The model's, from `transformers`; loaded when first asked for."""
        return tokenizers.load_tokenizer(self._tokenizer_source)

    @cached_property
    def system_prompt(self) -> list[int]:
        """The tokens that the chat template puts before the first message by itself."""
        return tokenizers.template_preamble(self.tokenizer, self.apply_chat_template_kwargs)

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
        """One reply of the model, recorded; what is not said of how to sample is the run's.

        Messages give `text, response_ids, prompt_ids`; token ids give a dictionary with token_ids, log_probs and stop_reason.
        """
        given = _named(args, kwargs, GENERATE, GENERATE_IDS, "gateway_generate")
        if "prompt_ids" not in given:
            return await self._reply(given)
        _refuse_media(given)
        return await self._client.generate(self._attributed({**given, "prompt_ids": list(given["prompt_ids"])}))

    async def _reply(self, asked: dict[str, Any]) -> GeneratedReply:
        """The reply to messages; `asked` is the request as the gateway takes it."""
        return GeneratedReply(
            await self._client.generate(self._attributed({**asked, "messages": to_json_values(asked["messages"])}))
        )

    async def gateway_submit_steps(self, steps: Sequence[SubmittedStep | Mapping[str, Any]], channel: str | None = None) -> int:
        """Hand in steps; how many were taken. Without a channel it is the rollout's own."""
        made = [step if isinstance(step, SubmittedStep) else SubmittedStep(**step) for step in steps]
        return await self._client.submit([self._attributed(step.to_json()) for step in made], channel or self.channel)

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
        """What the run's grader says of messages, or of one call's tokens. Nothing is graded by it: put the reward into a step."""
        given = _named(args, kwargs, REWARD, REWARD_IDS, "gateway_compute_reward")
        told = {name: to_json_values(given.get(name) or {}) for name in ("dataset_fields", "extra_fields")}
        if "prompt_ids" in given:
            ids = {name: list(given[name]) for name in ("prompt_ids", "response_ids")}
            return await self._client.compute_reward({**given, **told, **ids})
        uid = given.get("trajectory_uid") or (self._context.rollout_id if self._context else "")
        body = {"trajectory_uid": uid, "messages": to_json_values(given["messages"]), "dataset_fields": told["dataset_fields"]}
        return ComputedReward(await self._client.compute_reward(body))

    async def process_vision_info(self, messages: Sequence[Message]) -> dict[str, Any]:
        """The pictures and videos in messages: none, since the gateway takes text; ValueError where there are some."""
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
        """The token ids of messages, ready for a reply; without what the template puts before the first one, if so wished."""
        _refuse_media({"image_data": images, "video_data": videos})
        refuse_non_text(messages)
        options = {**self.apply_chat_template_kwargs, "tools": list(tools) if tools else None}
        return await asyncio.to_thread(self._rendered, expand_nested_messages(messages), options, remove_system_prompt)

    def _rendered(self, messages: list[Message], options: Mapping[str, Any], bare: bool) -> list[int]:
        ids = tokenizers.render_messages(self.tokenizer, messages, options)
        return ids[len(tokenizers.template_preamble(self.tokenizer, self.apply_chat_template_kwargs)) :] if bare else ids

    def _attributed(self, body: dict[str, Any]) -> dict[str, Any]:
        """With the running rollout and its group where the body names none."""
        own = {"trajectory_uid": self._context.rollout_id, "prompt_uid": self._context.group_id} if self._context else {}
        return {**body, **{name: value for name, value in own.items() if value and not body.get(name)}}


def _named(args: tuple[Any, ...], kwargs: dict[str, Any], by_messages: CallForm, by_ids: CallForm, what: str) -> dict[str, Any]:
    """The arguments under their names, in whichever of the two forms they came."""
    ids = "prompt_ids" in kwargs or (bool(args) and not isinstance(args[0], str))
    form, other = (by_ids, "messages") if ids else (by_messages, "prompt_ids")
    given = dict(zip(form.order, args, strict=False))
    wrong = len(args) > len(form.order) or given.keys() & kwargs.keys() or other in kwargs
    given |= {name: value for name, value in kwargs.items() if value is not None}
    if wrong or any(name not in given for name in form.needed):
        told = [f"({', '.join(each.order)})" for each in (by_messages, by_ids)]
        raise TypeError(f"{what}() takes {' or '.join(told)}; it came with {sorted(given)}")
    return given


def _refuse_media(given: dict[str, Any]) -> None:
    for name in ("image_data", "video_data"):
        if given.pop(name, None):
            raise ValueError(f"{name}: the gateway takes text; leave pictures and videos out")
