"""RubricGrader: another model, the judge, reads the conversation and scores it by a rubric.

[grader]
name = "rubric"
rubric = "1 where the answer is right and says how it was found, 0.5 where it only is right, else 0"
model = "openai/gpt-5-mini"
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import orjson
from pydantic import Field, model_validator

from penstock.errors import ConfigError
from penstock.graders.judge import Case, LlmJudge, Scale, Verdict, find_endpoint
from penstock.records import Message
from penstock.sdk.context import GraderContext
from penstock.sdk.workflow import Grader, GraderConfig

VERDICT_FILE = "verdict.json"
"""The judge's verdict, in the rollout's artifacts."""


class RubricGraderConfig(GraderConfig):
    """`[grader]` with `name = "rubric"`."""

    name: str = "rubric"
    rubric: str = ""
    """The text; alternatively `path`."""
    path: Path | None = None
    """A file with the text."""
    model: str
    """`openai/gpt-5-mini` and the like; with `url`, whatever that endpoint calls it."""
    url: str = ""
    """The address of an OpenAI-compatible endpoint, up to `/v1`; empty: the provider's that the model's name begins with."""
    api_key_env: str = ""
    """The environment variable of the key; empty: the provider's usual one, or none with `url`."""
    score_min: float = 0.0
    score_max: float = 1.0
    timeout_s: float = Field(default=30.0, gt=0)
    """How long one answer may take; `rollout.grader_timeout_s` holds for the whole verdict, with a second try."""
    temperature: float | None = Field(default=None, ge=0)
    """None leaves it to the endpoint."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.rubric.strip()) == (self.path is not None):
            raise ValueError("give the rubric's text or the path of its file, one of the two")
        if self.score_min >= self.score_max:
            raise ValueError("score_min must be below score_max")
        return self


class RubricGrader(Grader):
    """Scores a whole rollout once, all its transcripts together. The verdict is kept as an artifact of the rollout."""

    settings = RubricGraderConfig

    def __init__(self, config: RubricGraderConfig) -> None:
        super().__init__(config)
        rubric = config.rubric if config.path is None else read_rubric(config.path)
        endpoint = find_endpoint(
            config.model,
            url=config.url,
            api_key_env=config.api_key_env,
            timeout_s=config.timeout_s,
            temperature=config.temperature,
        )
        self._judge = LlmJudge(endpoint, rubric, Scale(config.score_min, config.score_max))

    async def grade(self, ctx: GraderContext) -> None:
        async with self._judge as judge:
            verdict = await judge.verdict(judge_case(ctx))
        ctx.set_reward(verdict.score)
        if ctx.artifacts_dir is not None:
            (ctx.artifacts_dir / VERDICT_FILE).write_bytes(orjson.dumps({**verdict._asdict(), "judge": self.config.model}))


def read_rubric(path: Path) -> str:
    """Returns the text of a rubric's file; ConfigError if there is none."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"{path}: the rubric cannot be read: {cause}") from cause
    if not text:
        raise ConfigError(f"{path}: the rubric is empty; write what makes an answer good")
    return text


def read_verdict_file(folder: Path) -> Verdict | None:
    """Returns the verdict on the rollout whose artifacts are in `folder`, or None."""
    try:
        found: Any = json.loads((folder / VERDICT_FILE).read_bytes())  # not orjson: a judge's text may hold half a character
        return Verdict(float(found["score"]), str(found["explanation"]))
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def judge_case(ctx: GraderContext) -> Case:
    """Makes the case of a rollout: the messages before the first reply are the task, all others the answer."""
    tasks: list[str] = []
    answers: list[str] = []
    for name, sample in ctx.samples.items():
        messages = [_marked(each, sample.replies) for each in sample.transcript or sample.messages]
        first = next((index for index, each in enumerate(messages) if each.get("role") == "assistant"), len(messages))
        head = f"[transcript {name}]\n" if len(ctx.samples) > 1 else ""
        tasks.append(head + format_conversation(messages[:first]))
        answers.append(head + format_conversation(messages[first:]))
    return Case("\n\n".join(answers), task="\n\n".join(tasks), reference=ctx.label or "")


def _marked(message: Message, replies: Sequence[Message]) -> Message:
    """Returns the message; under another role if it stands for the policy and was not sampled."""
    given = replies and message.get("role") == "assistant" and message not in replies
    return {**message, "role": "assistant (given, not sampled)"} if given else message


def format_conversation(messages: Sequence[Message]) -> str:
    """Formats messages as text, tool calls included."""
    return "\n".join(_line(message) for message in messages)


def _line(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
    calls: list[dict[str, Any]] = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    call_lines = [f"calls {call.get('name')}({call.get('arguments')})" for call in calls]
    return f"{message.get('role', '?')}: " + "\n".join(filter(None, [text, *call_lines]))
