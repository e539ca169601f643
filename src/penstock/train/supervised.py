"""Supervised training: a model folder from another one and from good rollouts of a run, or from a file of conversations.

A warm start for reinforcement learning: a policy that never succeeds has nothing to learn from its own rollouts.
"""

import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import orjson
import torch

from penstock.chat.renderer import Renderer
from penstock.config import TrainSection
from penstock.engines.embedded.engine import pick_device, pick_dtype
from penstock.engines.embedded.weights import load_decoder, read_weights
from penstock.errors import ConfigError, PenstockError
from penstock.records import Group
from penstock.records import Sequence as TrainingSequence
from penstock.train.learner import Learner
from penstock.train.policy import write_model
from penstock.train.sequences import sequences

PART = ".part"

OnUpdate = Callable[[int, int, float], None]
"""Takes the number of updates done, their total, and the loss of the last."""


class Examples(NamedTuple):
    """What is learnt from: the sequences of each conversation."""

    conversations: list[list[TrainingSequence]]
    left_out: Counter[str]
    """Conversations that are not among them, by reason."""


class SupervisedResult(NamedTuple):
    conversations: int
    tokens: int
    updates: int
    first_loss: float
    """Of the first update: the mean over conversations of the negative log-likelihood of a token."""
    last_loss: float
    left_out: dict[str, int]


async def good_rollouts(pages: AsyncIterator[list[Group]], *, min_reward: float) -> Examples:
    """Returns the rollouts with at least this reward, token by token as they were sampled."""
    found, left_out = list[list[TrainingSequence]](), Counter[str]()
    async for groups in pages:
        for group in groups:
            credit = [float(reward >= min_reward) for reward in group.rewards]
            left_out["ungraded"] += len(group.attempts) - len(credit)
            left_out[f"reward below {min_reward:g}"] += credit.count(0.0)
            by_rollout: dict[str, list[TrainingSequence]] = {}
            for sequence in sequences(group, credit).sequences:
                by_rollout.setdefault(sequence.rollout_id, []).append(sequence)
            left_out["no token to train"] += int(sum(credit)) - len(by_rollout)
            found += by_rollout.values()
    return Examples(found, +left_out)


def conversations(file: Path, renderer: Renderer) -> Examples:
    """Reads a JSONL file with `messages`, and `tools` where there are any, in each line; every assistant message is learnt.

    ConfigError for a line that is no conversation.
    """
    found, left_out = list[list[TrainingSequence]](), Counter[str]()
    for number, (messages, tools) in enumerate(_rows(file), 1):
        try:
            replies = list(_replies(messages, tools, renderer))
        except PenstockError as cause:
            raise ConfigError(f"{file}, line {number}: {cause}") from cause
        size = sum(len(reply) for _, reply in replies)
        if not size:
            left_out["no assistant message that the chat template keeps as it is"] += 1
        else:
            found.append([_sequence(f"line-{number}", prompt, reply, weight=1.0 / size) for prompt, reply in replies])
    return Examples(found, left_out)


def _rows(file: Path) -> Iterator[tuple[list[Any], list[Any]]]:
    try:
        lines = file.read_bytes().splitlines()
    except OSError as cause:
        raise ConfigError(f"{file}: cannot be read: {cause.strerror}") from cause
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row: Any = orjson.loads(line)
            messages, tools = row["messages"], cast("list[Any]", row.get("tools") or [])
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as cause:
            raise ConfigError(f'{file}, line {number}: must be a JSON object with "messages"') from cause
        if not (
            isinstance(messages, list) and all(isinstance(each, dict) and "role" in each for each in cast("list[Any]", messages))
        ):
            raise ConfigError(f'{file}, line {number}: "messages" must be a list of objects with a "role"')
        yield cast("list[Any]", messages), tools


def _replies(messages: list[Any], tools: list[Any], renderer: Renderer) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields prompt and reply of each assistant message that the template does not rewrite."""
    for at, message in enumerate(messages):
        if message["role"] != "assistant" or not at:
            continue
        prompt, whole = renderer.root(messages[:at], tools), renderer.root(messages[: at + 1], tools)
        ends = [place for place in range(len(prompt), len(whole)) if whole[place] in renderer.stop_ids]
        if whole[: len(prompt)] == prompt and ends:
            yield prompt, whole[len(prompt) : ends[0] + 1]


def _sequence(name: str, prompt: tuple[int, ...], reply: tuple[int, ...], *, weight: float) -> TrainingSequence:
    size, before = len(prompt) + len(reply), len(prompt)
    return TrainingSequence(
        rollout_id=name,
        group_id=name,
        token_ids=prompt + reply,
        trained=(False,) * before + (True,) * len(reply),
        logprobs=(0.0,) * size,
        temperatures=(1.0,) * size,
        advantages=(0.0,) * before + (1.0,) * len(reply),
        weight=weight,
    )


def train_supervised(
    model: Path,
    out: Path,
    examples: Examples,
    section: TrainSection,
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    on_update: OnUpdate,
) -> SupervisedResult:
    """Writes to `out` the model that `model` becomes. ConfigError if there is nothing to learn from, or `out` is there already."""
    if not examples.conversations:
        why = ", ".join(f"{count} x {reason}" for reason, count in examples.left_out.items()) or "there are none"
        raise ConfigError(f"there is no conversation to learn from ({why})")
    if out.exists():
        raise ConfigError(f"{out} is there already; name another folder")
    device = pick_device(section.device, "train.device")
    decoder = load_decoder(model, device=device, dtype=pick_dtype(section.dtype, device))
    half = decoder.embed.weight.dtype == torch.bfloat16
    rounds = list(_batches(examples.conversations, epochs=epochs, size=batch_size, seed=seed))
    whole = section.model_copy(update={"steps": len(rounds), "loss": "likelihood", "updates_per_step": 1})
    learner, losses = Learner(decoder, whole, exact=read_weights(model) if half else None, seed=seed), list[float]()
    for done, chosen in enumerate(rounds, 1):
        batch = learner.pack([sequence for each in chosen for sequence in each], rollouts=len(chosen))
        losses.append(learner.compute(batch).metrics.loss)
        learner.apply()
        on_update(done, len(rounds), losses[-1])
    part = out.with_name(out.name + PART)
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    write_model(part, decoder, model)
    part.rename(out)
    tokens = sum(sum(sequence.trained) for each in examples.conversations for sequence in each)
    return SupervisedResult(len(examples.conversations), tokens, len(rounds), losses[0], losses[-1], dict(examples.left_out))


def _batches(
    conversations: Sequence[list[TrainingSequence]], *, epochs: int, size: int, seed: int
) -> Iterable[list[list[TrainingSequence]]]:
    order = random.Random(seed)
    for _ in range(epochs):
        shuffled = order.sample(conversations, len(conversations))
        yield from (shuffled[at : at + size] for at in range(0, len(shuffled), size))
