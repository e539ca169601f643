"""The cost of drift: the same stored rollouts, trained as they were sampled and as others put them together again.

    python -m bench.drift small [--task letters] [--seeds 3] [--batches 8] [--epochs 4] [--eval-every 8] [--json FILE]
    python -m bench.drift MODEL --task multiply --epochs 3 --eval-every 6 --eval-limit 32 --at-once 8     # on a GPU

`small` is a decoder of two layers with random weights and a tokenizer of single characters and 160 merges: most of what it says
could be tokenized in many ways.

Groups of the start policy are sampled and stored once for each seed. Every rule then makes training sequences from the same pool:

- `exact`: the recorded tokens, each under the context that it was sampled under (Penstock).
- `re-tokenized`: the messages, rendered by the chat template and encoded again; assistant messages are trained. Their tokens have
  no recorded log-probabilities: the trainer's own stand for them.
- `prefix merging`: the sampled tokens of each call after its prompt, encoded again; calls are merged where the next prompt begins
  with the tokens of the last call, and are sequences of their own where it does not.
- `last turn`: the last call of a rollout alone, as it was sampled.
- `without log-probabilities`: no rule of others, but what tells the two faults of `re-tokenized` apart: the recorded tokens and
  contexts, with the trainer's own log-probabilities.

Each rule starts from the same weights and takes an update per batch, in every epoch. Rewards are of new rollouts at temperature 1,
each task of `dataset.eval` twice; for `letters` these are the trained prompts. What is not done by `--limit-s` is told as missing;
the same command goes on with what the file of `--json` lacks.
"""

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import shutil
import string
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HfTokenizer

from bench.algorithms import AGENTS, ONE_THREAD, run_config, wait_asleep
from penstock.chat.renderer import Renderer
from penstock.config import TrainSection, load_config
from penstock.engines.embedded.decoder import Decoder, load_decoder, read_decoder_shape, save_decoder
from penstock.engines.embedded.engine import pick_device, pick_dtype
from penstock.models.pull import resolve
from penstock.pool.sqlite import SqlitePool
from penstock.records import Group, Message, Rollout, Sequence, Step
from penstock.testing import SPECIAL, write_tokenizer
from penstock.train.advantages.grpo import grpo
from penstock.train.checkpoints import write_model
from penstock.train.learner import Learner, make_learner

GROUPS_PER_BATCH = 4


class Call(NamedTuple):
    """One call of a rollout: what the engine saw and sampled, and the messages that say the same."""

    step: Step
    prompt: tuple[int, ...]
    before: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]


class TrainedCall(NamedTuple):
    """What a rule trains of one call."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Infinite where none is recorded."""
    exact: int
    """Sampled tokens that are trained as such, under the context that they were sampled under."""


Rule = Callable[[list[Call], Renderer], Iterator[TrainedCall]]


def calls(attempt: Rollout) -> list[Call]:
    """Returns the calls of a rollout with one conversation."""
    nodes, steps = {node.id: node for node in attempt.nodes}, {step.index: step for step in attempt.steps}
    found: list[Call] = []
    for step in sorted(attempt.steps, key=lambda step: step.index):
        prompt, before, tools = list[int](), list[Message](), tuple[dict[str, Any], ...]()
        at: int | None = step.index
        while at is not None:
            node = nodes[steps[at].node]
            said = [steps[at].message] if at != step.index else []
            prompt[:0] = [*node.token_ids, *(steps[at].completion_ids if said else ())]
            before[:0] = [*node.messages, *said]
            tools, at = node.tools or tools, node.parent
        found.append(Call(step, tuple(prompt), tuple(before), tools))
    return found


def exact(made: list[Call], renderer: Renderer) -> Iterator[TrainedCall]:
    for call in made:
        yield TrainedCall(call.prompt, call.step.completion_ids, call.step.logprobs, len(call.step.completion_ids))


def without_logprobs(made: list[Call], renderer: Renderer) -> Iterator[TrainedCall]:
    for call in exact(made, renderer):
        yield call._replace(logprobs=(math.inf,) * len(call.reply))


def last_turn(made: list[Call], renderer: Renderer) -> Iterator[TrainedCall]:
    yield from exact(made[-1:], renderer)


def prefix_merging(made: list[Call], renderer: Renderer) -> Iterator[TrainedCall]:
    for call in made:
        prompt, ids = renderer.root(call.before, call.tools), call.step.completion_ids
        yield TrainedCall(prompt, ids, call.step.logprobs, len(ids) * (prompt == call.prompt))


def re_tokenized(made: list[Call], renderer: Renderer) -> Iterator[TrainedCall]:
    for call in made:
        prompt, whole = renderer.root(call.before, call.tools), renderer.root([*call.before, call.step.message], call.tools)
        ends = [place for place in range(len(prompt), len(whole)) if whole[place] in renderer.stop_ids]
        reply = whole[len(prompt) : ends[0] + 1] if ends and whole[: len(prompt)] == prompt else ()
        pairs = enumerate(zip(reply, call.step.completion_ids, strict=False))
        same = next((at for at, (new, sampled) in pairs if new != sampled), min(len(reply), len(call.step.completion_ids)))
        yield TrainedCall(prompt, reply, (math.inf,) * len(reply), same * (prompt == call.prompt))


RULES: dict[str, Rule] = {
    "exact": exact,
    "re-tokenized": re_tokenized,
    "prefix merging": prefix_merging,
    "last turn": last_turn,
    "without log-probabilities": without_logprobs,
}


@dataclass
class RuleCounts:
    sampled: int = 0
    trained: int = 0
    exact: int = 0
    """Of the trained ones."""
    calls: int = 0
    merged: int = 0
    """Calls whose prompt begins with all tokens of the call before."""

    def add(self, made: list[Call], kept: list[TrainedCall]) -> None:
        self.sampled += sum(len(call.step.completion_ids) for call in made)
        self.trained += sum(len(call.reply) for call in kept)
        self.exact += sum(call.exact for call in kept)
        self.calls += len(kept)
        self.merged += sum(new.prompt[: len(old.prompt) + len(old.reply)] == old.prompt + old.reply for old, new in pairwise(kept))


def project(groups: Iterable[Group], rule: Rule, renderer: Renderer, counts: RuleCounts) -> tuple[list[Sequence], int]:
    """Returns the training sequences that a rule makes of groups, and how many rollouts are in the mean."""
    made, rollouts = list[Sequence](), 0
    for group in groups:
        credit = grpo(group)
        rollouts += len(credit) * any(credit)
        for attempt, advantage in zip(group.graded, credit, strict=True):
            of_rollout = calls(attempt)
            kept = [call for call in rule(of_rollout, renderer) if call.reply]
            counts.add(of_rollout, kept)
            size = sum(len(call.reply) for call in kept)
            made += [_sequence(attempt, call, float(advantage), 1.0 / size) for call in kept if advantage]
    return made, rollouts


def _sequence(attempt: Rollout, call: TrainedCall, advantage: float, weight: float) -> Sequence:
    before, size = len(call.prompt), len(call.reply)
    return Sequence(
        rollout_id=attempt.ref.id,
        group_id=attempt.ref.group_id,
        token_ids=call.prompt + call.reply,
        trained=(False,) * before + (True,) * size,
        logprobs=(0.0,) * before + call.logprobs,
        temperatures=(1.0,) * (before + size),
        advantages=(0.0,) * before + (advantage,) * size,
        weight=weight,
    )


def held_out(options: argparse.Namespace, model: Path | str, seed: int) -> float:
    """Returns the mean reward of the held-out tasks, each tried twice."""
    with tempfile.TemporaryDirectory() as folder:
        given = [f'model.name="{model}"', "train.steps=0", f"dataset.eval_limit={options.eval_limit}", f"run.seed={seed}"]
        summary = run_config(options.task, [*given, *options.set], Path(folder))
        return fmean([summary.eval_before, summary.eval_after])


def make_groups(options: argparse.Namespace, seed: int) -> None:
    """Store the groups of a run without learning, unless they are there."""
    folder = group_folder(options, seed)
    if (folder / "done").exists():
        return
    run = [f'model.name="{options.model}"', f"run.seed={seed}", "dataset.eval_limit=1"]
    given = [*run, "train.lr=0.0", f"train.steps={options.batches}", f"rollout.groups_per_step={GROUPS_PER_BATCH}"]
    run_config(options.task, [*given, *options.set], folder)
    shutil.rmtree(folder / options.task / "checkpoints", ignore_errors=True)
    (folder / "done").touch()


def group_folder(options: argparse.Namespace, seed: int) -> Path:
    return Path(options.json).parent / f"{options.task}-{seed}"


def stored_groups(options: argparse.Namespace, seed: int) -> list[Group]:
    folder, task = group_folder(options, seed), options.task

    async def read() -> list[Group]:
        pool = SqlitePool(folder / task)
        try:
            return [group for group in await pool.groups("train") if group.graded]
        finally:
            await pool.close()

    return asyncio.run(read())


def train_rule(name: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Trains by a rule; returns its counts, and the held-out rewards."""
    model, groups = resolve(options.model).path, stored_groups(options, seed)
    section, renderer = load_config(AGENTS / f"{options.task}.toml", options.set).train, Renderer.load(model)
    learner, counts, rewards, seconds = open_learner(model, section, seed), RuleCounts(), dict[int, float](), list[float]()
    for number in range(options.epochs * options.batches):
        before, first = time.perf_counter(), number % options.batches * GROUPS_PER_BATCH
        made, rollouts = project(groups[first : first + GROUPS_PER_BATCH], RULES[name], renderer, counts)
        if made:
            learner.compute(learner.pack(made, rollouts=rollouts))
            learner.apply()
        seconds.append(time.perf_counter() - before)
        if (number + 1) % options.eval_every == 0:
            with tempfile.TemporaryDirectory() as folder:
                write_model(Path(folder) / "model", learner.decoder, model)
                rewards[number + 1] = held_out(options, Path(folder) / "model", seed)
    return {"rule": name, "seed": seed, "task": options.task, "rewards": rewards, "update_s": median(seconds), **vars(counts)}


def open_learner(model: Path, section: TrainSection, seed: int) -> Learner:
    """On a GPU where there is one, in the precision that the engine sampled in."""
    device = pick_device("auto")
    return make_learner(load_decoder(model, device=device, dtype=pick_dtype("auto", device)), section, model, seed=seed)


def start(name: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    return {"rule": name, "seed": seed, "task": options.task, "rewards": {0: held_out(options, options.model, seed)}}


def rates(groups: list[Group], model: Path) -> list[dict[str, Any]]:
    """Returns what each rule makes of the groups, without training."""
    renderer, found = Renderer.load(model), list[dict[str, Any]]()
    for name, rule in RULES.items():
        counts = RuleCounts()
        project(groups, rule, renderer, counts)
        found.append({"rule": name, **vars(counts)})
    return found


def make_small(folder: Path) -> Path:
    """Writes the small policy, unless it is there."""
    if (folder / "model.safetensors").exists():
        return folder
    core = HfTokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = sorted({piece for char in string.printable for piece, _ in core.pre_tokenizer.pre_tokenize_str(char)})
    trainer = trainers.BpeTrainer(vocab_size=len(letters) + 160, initial_alphabet=letters, show_progress=False)
    core.train_from_iterator([file.read_text() for file in sorted(AGENTS.glob("*.py"))], trainer)
    write_tokenizer(folder)  # for its settings
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    core.save(str(folder / "tokenizer.json"))
    sizes = {"vocab_size": core.get_vocab_size(), "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 512}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    config = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, **sizes, **layers}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    decoder = Decoder(read_decoder_shape(folder))
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.1)
    save_decoder(decoder, folder)
    return folder


def main() -> None:
    options = _options()
    kept = Path(options.json)
    kept.parent.mkdir(parents=True, exist_ok=True)
    if options.model == "small":
        options.model = str(make_small(kept.parent / "small"))
    os.environ.update({name: os.environ.get(name, "1") for name in ONE_THREAD} if options.at_once > 1 else {})
    pool = ProcessPoolExecutor(options.at_once, multiprocessing.get_context("spawn"), wait_asleep)
    deadline = time.monotonic() + options.limit_s
    try:
        for made in as_completed([pool.submit(make_groups, options, seed) for seed in range(options.seeds)], options.limit_s):
            made.result()
        for seed in range(options.seeds):
            for result in rates(stored_groups(options, seed), resolve(options.model).path):
                print(json.dumps({"seed": seed, **result}), flush=True)
        if not options.rates_only:
            keep_results(pool, options, deadline)
    except TimeoutError:
        print(f"stopped after {options.limit_s} s; the same command makes what is missing", flush=True)
    for process in list((pool._processes or {}).values()):  # a run that is over the limit does not end by itself
        process.terminate()


def keep_results(pool: ProcessPoolExecutor, options: argparse.Namespace, deadline: float) -> None:
    """Makes what the file of results lacks, seed by seed."""
    kept = Path(options.json)
    known = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {(each["task"], each["rule"], each["seed"]) for each in known}
    work = [(name, seed) for seed in range(options.seeds) for name in ("start", *RULES)]
    started = dict[Future[dict[str, Any]], tuple[str, int]]()
    for name, seed in work:
        if (options.task, name, seed) not in done:
            started[pool.submit(train_rule if name in RULES else start, name, options, seed)] = name, seed
    for future in as_completed(started, max(0.0, deadline - time.monotonic())):
        if (error := future.exception()) is not None:
            print(f"{started[future]}: failed: {str(error)[-300:]}", flush=True)
            continue
        print(json.dumps(future.result()), flush=True)
        with kept.open("a") as file:
            file.write(json.dumps(future.result()) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a model folder, or a name that `model.name` takes")
    parser.add_argument("--task", default="letters")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=8, help="each of four groups of eight rollouts")
    parser.add_argument("--epochs", type=int, default=4, help="how often each batch is trained")
    parser.add_argument("--eval-every", type=int, default=8, help="updates between two held-out evaluations")
    parser.add_argument("--eval-limit", type=int, default=16)
    parser.add_argument("--at-once", type=int, default=1, help="processes; each has the model, a learner and an engine")
    parser.add_argument("--limit-s", type=float, default=24 * 3600.0)
    parser.add_argument("--set", action="append", default=[], help="settings for all runs, such as engine.cache_tokens=16384")
    parser.add_argument("--rates-only", action="store_true", help="count what each rule keeps, and train nothing")
    parser.add_argument("--json", default="drift/results.jsonl", help="results, a line each; rollouts are stored beside it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
