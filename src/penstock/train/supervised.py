"""Supervised training: a model folder from another one and from good rollouts of a run, or from a file of conversations.

A warm start for reinforcement learning: a policy that never succeeds has nothing to learn from its own rollouts.
"""

import random
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, cast

import orjson

from penstock.chat.renderer import Renderer
from penstock.config import TrainSection
from penstock.engines.checkpoint_files import model_digest
from penstock.engines.embedded.decoder import load_decoder
from penstock.engines.embedded.engine import pick_device, pick_dtype
from penstock.engines.embedded.lora import merge_adapter
from penstock.errors import ConfigError, PenstockError
from penstock.records import Group, PolicyVersion
from penstock.records import Sequence as TrainingSequence
from penstock.system.files import FileLock, write_file
from penstock.train.checkpoints import find_intact, restore, save, write_model
from penstock.train.learner import Learner, make_learner
from penstock.train.sequences import sequences

PART, LOSSES = ".part", "losses.json"
SAVE_S = 60.0
"""Between checkpoints."""

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
    updates_before: int
    """Those of an earlier call, which this one went on from."""
    updates_left: int
    """More than 0 if it was stopped."""
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
            left_out["ungraded"] += len(group.rollouts) - len(credit)
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
    for number, messages, tools in _rows(file):
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


def _rows(file: Path) -> Iterator[tuple[int, list[Any], list[Any]]]:
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
        yield number, cast("list[Any]", messages), tools


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
    tell: Callable[[str], None] = lambda text: None,
    stopped: Callable[[], bool] = lambda: False,
    save_s: float = SAVE_S,
) -> SupervisedResult:
    """Writes to `out` the model that `model` becomes; an adapter is merged into it.

    It is saved every `save_s` seconds and once `stopped`; the same call resumes there. ConfigError if there is nothing to
    learn from, `out` is there already, or another process is making it.
    """
    if not examples.conversations:
        why = ", ".join(f"{count} x {reason}" for reason, count in examples.left_out.items()) or "there are none"
        raise ConfigError(f"there is no conversation to learn from ({why})")
    if out.exists():
        raise ConfigError(f"{out} is there already; name another folder")
    rounds = list(_batches(examples.conversations, epochs=epochs, size=batch_size, seed=seed))
    section = section.model_copy(update={"steps": len(rounds), "loss": "likelihood", "updates_per_step": 1})
    part = out.with_name(out.name + PART)
    part.mkdir(parents=True, exist_ok=True)
    with FileLock(part / "lock") as lock:
        if not lock.try_acquire():
            raise ConfigError(f"another process is making {out}; wait for it, or name another folder")
        device = pick_device(section.device, "train.device")
        decoder = load_decoder(model, device=device, dtype=pick_dtype(section.dtype, device))
        learner = make_learner(decoder, section, model, seed=seed)
        saved = _Saved(part, learner, model, run=_identity(model, rounds, section, seed))
        losses = saved.restore(tell)
        begun, last_saved = len(losses), time.monotonic()
        for done, chosen in enumerate(rounds[begun:], begun + 1):
            batch = learner.pack([sequence for each in chosen for sequence in each], rollouts=len(chosen))
            losses.append(learner.compute(batch).metrics.loss)
            learner.apply()
            on_update(done, len(rounds), losses[-1])
            stop = stopped() and done < len(rounds)
            if stop or time.monotonic() - last_saved >= save_s:
                saved.save(losses)
                last_saved = time.monotonic()
            if stop:
                break
        else:
            _write(learner, model, part, out)
    return SupervisedResult(
        conversations=len(examples.conversations),
        tokens=sum(sum(sequence.trained) for each in examples.conversations for sequence in each),
        updates=len(losses),
        updates_before=begun,
        updates_left=len(rounds) - len(losses),
        first_loss=losses[0],
        last_loss=losses[-1],
        left_out=dict(examples.left_out),
    )


class _Saved:
    """Checkpoints of a training in progress, with the losses so far."""

    def __init__(self, folder: Path, learner: Learner, model: Path, *, run: str) -> None:
        self._folder, self._learner, self._model, self._run = folder, learner, model, run

    def restore(self, tell: Callable[[str], None]) -> list[float]:
        """Returns the losses of the updates that the learner has behind it."""
        found = find_intact(self._folder, self._run)
        if found.damaged:
            why = "; ".join(f"{folder.name}: {problem}" for folder, problem in found.damaged.items())
            tell(f"checkpoints in {self._folder} are not used ({why})")
            for folder in found.damaged:
                shutil.rmtree(folder)
        if found.version is None:
            return []
        losses: list[float] = orjson.loads((self._folder / LOSSES).read_bytes())
        restore(self._folder, found.version, self._learner)
        tell(f"going on after update {found.version.number}")
        return losses[: found.version.number]

    def save(self, losses: list[float]) -> None:
        write_file(self._folder / LOSSES, orjson.dumps(losses))  # before the checkpoint that counts on it
        version = PolicyVersion(number=len(losses), step=len(losses))
        save(self._folder, version, self._learner, self._model, run=self._run, kept=1)


def _identity(model: Path, rounds: Iterable[list[list[TrainingSequence]]], section: TrainSection, seed: int) -> str:
    """Of all that decides the result, so that only the same training resumes from a checkpoint."""
    digest = blake2b(f"{model_digest(model)} {seed} {section.model_dump_json()}".encode(), digest_size=16)
    for chosen in rounds:
        digest.update(orjson.dumps([[(each.token_ids, each.trained, each.weight) for each in one] for one in chosen]))
    return digest.hexdigest()


def _write(learner: Learner, model: Path, part: Path, out: Path) -> None:
    """Makes the model folder next to the checkpoints, then puts it in place of them."""
    adapter, whole = part / "adapter", part / "model"
    for folder in (adapter, whole):
        shutil.rmtree(folder, ignore_errors=True)
    if learner.adapter is None:
        write_model(whole, learner.decoder, model)
    else:
        adapter.mkdir()
        learner.save_weights(adapter)
        merge_adapter(adapter, whole, base=model)
    whole.rename(out)
    shutil.rmtree(part)


def _batches(
    conversations: Sequence[list[TrainingSequence]], *, epochs: int, size: int, seed: int
) -> Iterable[list[list[TrainingSequence]]]:
    order = random.Random(seed)
    for _ in range(epochs):
        shuffled = order.sample(conversations, len(conversations))
        yield from (shuffled[at : at + size] for at in range(0, len(shuffled), size))
