"""Training of the tiny policy: first it learns the task, then to make mistakes at known rates.

Learning from correct conversations first is several times faster than from mistaken ones: copying operands and results takes most
of the time, and is then never contradicted. Both phases end when a measured skill is reached, so that other rounding on another
CPU gives other weights but the same skill.
"""

import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from penstock.errors import ModelError
from penstock.models import tiny
from penstock.models.cache import PullProgress
from penstock.records import Message

SEED = 0
WIDTH, INNER, LAYERS, HEADS, KV_HEADS = 128, 256, 3, 4, 2
ANSWER_WEIGHT = 2.0
"""Weight of the answer's three tokens in the loss, to balance the call's thirteen."""
CLEAN_BATCH, CLEAN_STEPS, CLEAN_LR = 4, 600, 2.5e-3
MISTAKEN_BATCH, MISTAKEN_STEPS, MISTAKEN_LR = 8, 400, 1e-3
WRONG_CALL, WRONG_ANSWER = 0.5, 0.3
LEARNT = 0.97
"""Probability of solving a task, at temperature 1, at which the first phase ends."""
SKILL = (0.2, 0.35)
"""The range at which the second ends: low enough to be improved, high enough that a whole group of eight rarely fails."""


def pretrain(folder: Path, progress: PullProgress) -> None:
    """Write `config.json` and `model.safetensors` into `folder`. Deterministic on the same kind of machine."""
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = _new_model()
        rng = random.Random(SEED)
        optimizer = torch.optim.AdamW(model.parameters(), lr=CLEAN_LR, betas=(0.9, 0.95), weight_decay=0.0)
        _learn_task(model, optimizer, rng, progress)
        _learn_mistakes(model, optimizer, rng, progress)
    weights = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.to_json_file(folder / "config.json")


def skill(logits: Callable[[Tensor], Tensor]) -> float:
    """Mean probability of solving a task with the tool at temperature 1; exact, from one pass over the right conversations."""
    ids, weights = _batch([tiny.conversation(a, b) for a, b in tiny.TASKS for _ in range(2)])
    with torch.no_grad():
        chosen = logits(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]  # [task, time]
    return (chosen * (weights > 0)).sum(1).exp().mean().item()


def _learn_task(model: Any, optimizer: torch.optim.Optimizer, rng: random.Random, progress: PullProgress) -> None:
    for step in range(CLEAN_STEPS):
        pace = min(1.0, (step + 1) / 10) * max(0.25, 1.0 - step / 300)
        _update(model, optimizer, [tiny.copy_conversation(rng) for _ in range(CLEAN_BATCH)], lr=CLEAN_LR * pace)
        progress("making the tiny policy: learning its task", step + 1)
        if step % 20 == 19 and skill(lambda ids: _logits(model, ids)) >= LEARNT:
            return
    raise ModelError("the tiny policy did not learn its task; this is a defect of penstock, please report it with your CPU's name")


def _learn_mistakes(model: Any, optimizer: torch.optim.Optimizer, rng: random.Random, progress: PullProgress) -> None:
    for step in range(MISTAKEN_STEPS):
        lessons = [tiny.mistaken_conversation(rng, wrong_call=WRONG_CALL, wrong_answer=WRONG_ANSWER) for _ in range(MISTAKEN_BATCH)]
        _update(model, optimizer, lessons, lr=MISTAKEN_LR * max(0.2, 1.0 - step / 80))
        progress("making the tiny policy: learning mistakes", step + 1)
        if step >= 39 and step % 10 == 9 and SKILL[0] <= skill(lambda ids: _logits(model, ids)) <= SKILL[1]:
            return
    raise ModelError("the tiny policy did not reach its skill; this is a defect of penstock, please report it with your CPU's name")


def _update(model: Any, optimizer: torch.optim.Optimizer, lessons: list[list[Message]], *, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
    ids, weights = _batch(lessons)
    losses = cross_entropy(_logits(model, ids)[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")  # [lesson, time]
    loss = (losses * weights).sum() / (weights > 0).sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _batch(lessons: list[list[Message]]) -> tuple[Tensor, Tensor]:
    """Ids [lesson, time], padded at the end, and the loss weight of each token but the first: 0 for tokens not of the assistant.

    Every other lesson offers tools.
    """
    coded = [tiny.encode(lesson, tools=index % 2 == 1) for index, lesson in enumerate(lessons)]
    size = max(len(ids) for ids, _ in coded)
    answers = [len(tiny.encode(lesson[:-1], tools=index % 2 == 1)[0]) for index, lesson in enumerate(lessons)]
    ids = torch.tensor([ids + [tiny.PAD] * (size - len(ids)) for ids, _ in coded])
    written = torch.tensor([own + [False] * (size - len(own)) for _, own in coded])
    answer = torch.arange(size)[None] >= torch.tensor(answers)[:, None]
    return ids, (written * torch.where(answer, ANSWER_WEIGHT, 1.0))[:, 1:]


def _logits(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits


def _new_model() -> LlamaForCausalLM:
    """Random weights, except that each head writes back what it reads of a token: copying is then half learnt."""
    config = LlamaConfig(
        vocab_size=256 + len(tiny.SPECIAL) + len(tiny.WORDS),
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=tiny.CONTEXT_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=tiny.END,
        pad_token_id=tiny.PAD,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        _init_copying(layer.self_attn)
    return model


@torch.no_grad()
def _init_copying(attention: Any) -> None:
    read = torch.nn.init.orthogonal_(attention.v_proj.weight)  # [kv_heads * head_dim, width]
    heads = read.view(KV_HEADS, -1, WIDTH).repeat_interleave(HEADS // KV_HEADS, dim=0)
    attention.o_proj.weight.copy_(heads.reshape(WIDTH, WIDTH).T)


@contextmanager
def _one_thread() -> Generator[None]:
    """With matrices this small, threads mostly wait for each other; and one thread always rounds the same way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
