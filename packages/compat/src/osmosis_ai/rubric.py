"""`evaluate_rubric` with its result and errors, on Penstock's judge."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.records import Message

if TYPE_CHECKING:
    from penstock.graders.judge import Endpoint


@dataclass
class RubricResult:
    score: float
    explanation: str
    raw: Any = None


class MissingAPIKeyError(RuntimeError):
    """Neither the arguments nor the environment contain a key for the judge."""


class ProviderRequestError(RuntimeError):
    """The judge's provider refused, could not be reached, or returned an unusable reply."""

    def __init__(self, provider: str, model: str, detail: str) -> None:
        self.provider, self.model, self.detail = provider, model, detail.strip() or "no reason was given"
        super().__init__(f"{provider}, model {model!r}: {self.detail}")


class ModelNotFoundError(ProviderRequestError):
    """The provider has no such model."""


async def evaluate_rubric(
    solution_str: str | list[Message],
    rubric: str,
    model: str,
    *,
    ground_truth: str | None = None,
    original_input: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    score_min: float = 0.0,
    score_max: float = 1.0,
    api_key: str | None = None,
    timeout: float | None = None,
) -> RubricResult:
    """Lets `model`, such as `openai/gpt-5-mini`, score an answer or a conversation by `rubric`.

    A score outside the bounds is an error and is never clamped. OPENAI_BASE_URL redirects OpenAI models to another server.
    """
    from penstock.graders.judge import Case, JudgeError, LlmJudge, Scale
    from penstock.graders.rubric import format_conversation

    if not rubric.strip() or score_min >= score_max:
        raise ValueError("give a rubric, and a score_min below score_max")
    case = Case(
        solution_str if isinstance(solution_str, str) else format_conversation(solution_str),
        task=original_input or "",
        reference=ground_truth or "",
        context=json.dumps(metadata, default=str) if metadata else "",
    )
    endpoint = _endpoint(model, api_key or "", timeout or 60.0)
    try:
        async with LlmJudge(endpoint, rubric, Scale(score_min, score_max)) as judge:
            verdict = await judge.verdict(case)
    except JudgeError as error:
        kind = ModelNotFoundError if error.status == 404 else ProviderRequestError
        raise kind(_provider(model), endpoint.model, str(error)) from error
    return RubricResult(verdict.score, verdict.explanation, verdict._asdict())


def _endpoint(model: str, key: str, timeout_s: float) -> "Endpoint":
    from penstock.graders.judge import find_endpoint

    url = os.environ.get("OPENAI_BASE_URL", "") if _provider(model) == "openai" else ""
    named = model.removeprefix("openai/") if url else model
    try:
        if url:
            return find_endpoint(named, url=url, key=key, api_key_env="" if key else "OPENAI_API_KEY", timeout_s=timeout_s)
        return find_endpoint(named, key=key, timeout_s=timeout_s)
    except ConfigError as error:
        if "the key of" in str(error):
            raise MissingAPIKeyError(str(error)) from error
        raise ProviderRequestError(_provider(model), model, str(error)) from error


def _provider(model: str) -> str:
    provider, slash, _ = model.partition("/")
    return provider if slash else "openai"
