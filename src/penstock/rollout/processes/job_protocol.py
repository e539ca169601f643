"""The protocol between an executor and the process of a job: frames of JSON on a Unix socket.

executor ── agent spec, job, samples ──▶ process
executor ◀─ STARTED, then its result ─── process
"""

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.errors import EngineError, GraderError, WorkerLost, WorkflowError, one_line
from penstock.records import Message, Task
from penstock.rollout.executors.base import SessionSpec
from penstock.rollout.in_process import Reward
from penstock.sdk.samples import RolloutSample

MAX_FRAME_BYTES = 1 << 30
STARTED = b"{}"
"""Sent by the job's process when the author's code is about to run."""
_CHUNK = 1 << 20
_LENGTH = struct.Struct("!Q")

JobKind = Literal["workflow", "grader"]
JobSandboxName = Literal["namespaces", "user", "off"]
ERRORS: dict[str, type[Exception]] = {
    "timeout": TimeoutError,
    "engine": EngineError,
    "workflow": WorkflowError,
    "grader": GraderError,
    "lost": WorkerLost,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSandbox:
    """How a job is confined before the author's code runs."""

    name: JobSandboxName
    hidden: tuple[str, ...] = ()
    readonly: tuple[str, ...] = ()
    visible: tuple[str, ...] = ()
    user: int = 0
    """The user id to take on under `user`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentJob:
    """One run of the workflow or of the grader."""

    kind: JobKind
    task: Task
    """Without its label in a workflow's job."""
    session: SessionSpec | None
    """None for a grader, which must not call the model."""
    timeout_s: float
    grace_s: float
    memory_mb: int | None
    artifacts_dir: str | None
    log: str | None
    """The file for its output; None: our stderr."""
    sandbox: JobSandbox | None = None
    """None for a grader, which is trusted."""


class JobResult(BaseModel):
    """The result of a job. It comes from a process that runs the author's code, so it is validated."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    error_kind: Literal["", "timeout", "engine", "workflow", "grader", "lost"] = ""
    message: str = ""
    samples: dict[str, list[Message]] = {}
    direct_calls: tuple[str, ...] = ()
    returned: list[Message] | None = None
    rewards: list[Reward] = []

    @classmethod
    def read(cls, frame: bytes) -> "JobResult":
        """Raises ValueError if the frame is not a result."""
        try:
            return cls.model_validate(json.loads(frame))
        except (RecursionError, ValidationError) as cause:
            raise ValueError(f"not a job's result: {cause}") from cause

    def error(self) -> Exception | None:
        """Returns the error to raise, or None."""
        return ERRORS[self.error_kind](self.message) if self.error_kind else None


def failure_result(error: Exception, kind: JobKind) -> dict[str, Any]:
    """Returns the result that reports `error`; an error of an unknown class counts as one of the `kind` of job."""
    error_kind = next((name for name, cls in ERRORS.items() if isinstance(error, cls)), kind)
    return {"error_kind": error_kind, "message": "" if error_kind == "timeout" else one_line(error)}


def write_samples(samples: Mapping[str, RolloutSample]) -> bytes:
    # json, not orjson: it also takes the lone surrogates and big integers that a framework's messages may hold.
    return json.dumps({name: vars(sample) for name, sample in samples.items()}, default=str).encode()


def read_samples(frame: bytes) -> dict[str, RolloutSample]:
    samples: dict[str, dict[str, Any]] = json.loads(frame)
    return {name: replace(RolloutSample(**fields), steps=tuple(fields["steps"])) for name, fields in samples.items()}


def send(sock: socket.socket, frame: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(frame)) + frame)


def receive(sock: socket.socket) -> bytes:
    """Reads one frame; EOFError if the other end has closed."""
    (length,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size))
    return _receive_exactly(sock, length)


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(min(size - len(parts), _CHUNK))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


async def send_async(sock: socket.socket, *frames: bytes) -> None:
    """As `send`, for a non-blocking socket."""
    for frame in frames:
        await asyncio.get_running_loop().sock_sendall(sock, _LENGTH.pack(len(frame)) + frame)


async def receive_async(sock: socket.socket) -> bytes:
    """As `receive`, for a non-blocking socket. Raises ValueError for a frame longer than MAX_FRAME_BYTES."""
    (length,) = _LENGTH.unpack(await _receive_exactly_async(sock, _LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return await _receive_exactly_async(sock, length)


async def _receive_exactly_async(sock: socket.socket, size: int) -> bytes:
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
