"""A rubric as the grader: another model reads the conversation and gives a score.

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
"""In the rollout's artifacts: what the judge said."""


class RubricGraderConfig(GraderConfig):
    """`[grader]` of a run that is graded by a judge."""

    name: str = "rubric"
    rubric: str = ""
    """The text; or `path`."""
    path: Path | None = None
    """A file that has it."""
    model: str
    """`openai/gpt-5-mini` and the like; with `url`, whatever that endpoint calls it."""
    url: str = ""
    """Of an OpenAI-compatible endpoint, up to `/v1`; empty takes the provider's that the model's name begins with."""
    api_key_env: str = ""
    """The environment variable that has the key; empty takes the provider's usual one, and none with `url`."""
    score_min: float = 0.0
    score_max: float = 1.0
    timeout_s: float = Field(default=30.0, gt=0)
    """Of one answer; `rollout.grader_timeout_s` is that of the whole verdict, a second try included."""
    temperature: float | None = Field(default=None, ge=0)
    """None leaves it to the endpoint."""

    @model_validator(mode="after")
    def _one_rubric(self) -> Self:
        if bool(self.rubric.strip()) == (self.path is not None):
            raise ValueError("give the rubric's text or the path of its file, one of the two")
        if self.score_min >= self.score_max:
            raise ValueError("score_min must be below score_max")
        return self


class RubricGrader(Grader):
    """Scores a whole rollout once, all its transcripts together. What the judge said is kept as an artifact of the rollout."""

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
    """The text of a rubric's file; ConfigError where there is none."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"{path}: the rubric cannot be read: {cause}") from cause
    if not text:
        raise ConfigError(f"{path}: the rubric is empty; write what makes an answer good")
    return text


def read_verdict_file(folder: Path) -> Verdict | None:
    """What a judge said of the rollout whose artifacts are in `folder`; None where none did."""
    try:
        found: Any = orjson.loads((folder / VERDICT_FILE).read_bytes())
        return Verdict(float(found["score"]), str(found["explanation"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def judge_case(ctx: GraderContext) -> Case:
    """A rollout as a judge reads it: what was asked, then all that was said and done."""
    asked: list[str] = []
    said: list[str] = []
    for name, sample in ctx.samples.items():
        messages = sample.transcript or sample.messages
        first = next((place for place, each in enumerate(messages) if each.get("role") == "assistant"), len(messages))
        head = f"[transcript {name}]\n" if len(ctx.samples) > 1 else ""
        asked.append(head + format_conversation(messages[:first]))
        said.append(head + format_conversation(messages[first:]))
    return Case("\n\n".join(said), task="\n\n".join(asked), reference=ctx.label or "")


def format_conversation(messages: Sequence[Message]) -> str:
    """Messages as text, tool calls included."""
    return "\n".join(_line(message) for message in messages)


def _line(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
    calls: list[dict[str, Any]] = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    called = [f"calls {call.get('name')}({call.get('arguments')})" for call in calls]
    return f"{message.get('role', '?')}: " + "\n".join(filter(None, [text, *called]))
