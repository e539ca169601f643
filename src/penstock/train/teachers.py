"""Teachers for distillation: the log-probabilities that another model gives to tokens that the policy sampled."""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from itertools import compress
from pathlib import Path
from typing import Any

import orjson
import torch

from penstock.engines.embedded.decoder import Decoder
from penstock.engines.embedded.lora import load_policy
from penstock.errors import ConfigError, EngineError, TrainError
from penstock.models.pull import resolve
from penstock.records import Sequence

AT_ONCE = 8
"""Requests to a server at a time."""
TIMEOUT_S = 300.0


def open_teacher(settings: Any, student: Path, *, like: torch.Tensor) -> "Decoder | ServedTeacher":
    """Returns the teacher that the settings of an advantage name. ConfigError if it has another tokenizer than `student`.

    A model is loaded into this process, where the learner computes with it as with its own, in the precision of `like`.
    """
    name = getattr(settings, "teacher", "")
    if not name:
        raise ConfigError(
            "this train.advantage needs a teacher: set train.advantage_settings.teacher to a model, such as hf:ORG/NAME "
            "or a folder, or to the URL of a vLLM server"
        )
    if name.startswith(("http://", "https://")):
        return ServedTeacher(name, getattr(settings, "model", ""))
    folder = resolve(name).path
    if vocabulary(folder) != vocabulary(student):
        raise ConfigError(f"train.advantage_settings.teacher = {name!r}: its tokenizer is not the policy's, so it cannot judge it")
    return load_policy(folder, device=like.device, dtype=like.dtype).requires_grad_(False)


def vocabulary(folder: Path) -> dict[str, int]:
    """Returns the ids of a model folder's tokens; empty if they are not in a `tokenizer.json`."""
    try:
        read = orjson.loads((folder / "tokenizer.json").read_bytes())
        known = read["model"]["vocab"]
        added = {one["content"]: one["id"] for one in read.get("added_tokens", [])}
        return {**(known if isinstance(known, dict) else {str(token): at for at, (token, *_) in enumerate(known)}), **added}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


class ServedTeacher:
    """A vLLM server, asked for the log-probabilities of a prompt."""

    def __init__(self, url: str, model: str = "") -> None:
        self._url, self._model = url.rstrip("/").removesuffix("/v1"), model

    def logprobs(self, sequences: SequenceOf[Sequence]) -> list[list[float]]:
        """Returns the log-probabilities of the trained tokens of each sequence."""
        self._model = self._model or self._ask("/v1/models", None)["data"][0]["id"]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return list(threads.map(self._score, sequences))

    def _score(self, sequence: Sequence) -> list[float]:
        if set(compress(sequence.temperatures, sequence.trained)) - {1.0}:
            raise TrainError(
                f"rollout {sequence.rollout_id} was sampled at another temperature than 1, for which a served teacher has no "
                "log-probabilities; sample at temperature 1, or name a model for train.advantage_settings.teacher"
            )
        body = {"model": self._model, "prompt": list(sequence.token_ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = self._ask("/v1/completions", body)
        try:
            reported = answer["choices"][0]["prompt_logprobs"]
            pairs = zip(sequence.token_ids, reported, sequence.trained, strict=True)
            return [float(each[str(token)]["logprob"]) for token, each, trained in pairs if trained]
        except (LookupError, TypeError, ValueError) as cause:
            raise EngineError(
                f"teacher at {self._url}: its answer has no log-probabilities of the prompt ({cause!r}); it must be a vLLM server"
            ) from cause

    def _ask(self, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data=data, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as cause:
            text = cause.read(500).decode(errors="replace")
            raise EngineError(f"teacher at {self._url}{path} answered {cause.code}: {text}") from cause
        except (OSError, ValueError) as cause:
            raise EngineError(f"teacher at {self._url} cannot be asked: {cause}; start it, the same command resumes") from cause
