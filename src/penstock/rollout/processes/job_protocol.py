"""What is said between us and the process of a job, as frames of JSON on a Unix socket: the job, that it began, its answer."""

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.errors import EngineError, GraderError, WorkflowError
from penstock.records import Message, Task
from penstock.rollout.author_tasks import one_line
from penstock.rollout.execution import Reward
from penstock.rollout.executors.base import Seat
from penstock.sdk.samples import RolloutSample

LARGEST = 1 << 30
"""Bytes of one frame."""
BEGUN = b"{}"
"""Said by the job's process when the author's code is about to run."""
_CHUNK = 1 << 20
_LENGTH = struct.Struct("!Q")

Kind = Literal["workflow", "grader"]
FAILURES: dict[str, type[Exception]] = {
    "timeout": TimeoutError,
    "engine": EngineError,
    "workflow": WorkflowError,
    "grader": GraderError,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of the workflow or of the grader."""

    kind: Kind
    task: Task
    """Without its label, where it is for the workflow."""
    seat: Seat | None
    """None for a grader: it has no business with the model."""
    timeout_s: float
    grace_s: float
    memory_mb: int | None
    artifacts_dir: str | None
    log: str | None
    """Where its output goes; None is our stderr."""


class Answer(BaseModel):
    """What came of a job. It comes out of the author's process, so it is checked."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    failed: Literal["", "timeout", "engine", "workflow", "grader"] = ""
    message: str = ""
    samples: dict[str, list[Message]] = {}
    strays: tuple[str, ...] = ()
    rewards: list[Reward] = []

    @classmethod
    def read(cls, frame: bytes) -> "Answer":
        """ValueError where it is none."""
        try:
            return cls.model_validate(json.loads(frame))
        except (RecursionError, ValidationError) as cause:
            raise ValueError(f"not an answer: {cause}") from cause

    def failure(self) -> Exception | None:
        """The error to raise; None where it went well."""
        return FAILURES[self.failed](self.message) if self.failed else None


def failed(error: Exception, kind: Kind) -> dict[str, Any]:
    """The answer that says `error`; one that has no category is laid at the door of `kind`."""
    category = next((name for name, cls in FAILURES.items() if isinstance(error, cls)), kind)
    return {"failed": category, "message": "" if category == "timeout" else one_line(error)}


def write_samples(samples: Mapping[str, RolloutSample]) -> bytes:
    """By name. Python's own writer takes whatever text and numbers a framework's messages hold."""
    return json.dumps({name: vars(sample) for name, sample in samples.items()}, default=str).encode()


def read_samples(frame: bytes) -> dict[str, RolloutSample]:
    told: dict[str, dict[str, Any]] = json.loads(frame)
    return {name: replace(RolloutSample(**fields), steps=tuple(fields["steps"])) for name, fields in told.items()}


def send(sock: socket.socket, frame: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(frame)) + frame)


def receive(sock: socket.socket) -> bytes:
    """Read one frame; EOFError where the other end has gone."""
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    return _exactly(sock, length)


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(min(size - len(parts), _CHUNK))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


async def send_async(sock: socket.socket, *frames: bytes) -> None:
    """The same for a socket that does not block."""
    for frame in frames:
        await asyncio.get_running_loop().sock_sendall(sock, _LENGTH.pack(len(frame)) + frame)


async def receive_async(sock: socket.socket) -> bytes:
    """The same for a socket that does not block; ValueError for a frame that no job of ours would write."""
    (length,) = _LENGTH.unpack(await _exactly_async(sock, _LENGTH.size))
    if length > LARGEST:
        raise ValueError(f"a frame of {length} bytes")
    return await _exactly_async(sock, length)


async def _exactly_async(sock: socket.socket, size: int) -> bytes:
    loop, parts = asyncio.get_running_loop(), bytearray()
    while len(parts) < size:
        try:
            part = await loop.sock_recv(sock, min(size - len(parts), _CHUNK))
        except ConnectionError:
            part = b""
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
