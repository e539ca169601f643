"""The trainer's side of vLLM's weight-transfer API: CUDA IPC on one GPU, NCCL across GPUs."""

import base64
import pickle
import socket
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from penstock.engines.embedded.decoder import Decoder
from penstock.engines.embedded.weights import public_tensors
from penstock.engines.servers.transfer import TransferRound


def describe(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        "names": list(weights),
        "dtype_names": [str(value.dtype).removeprefix("torch.") for value in weights.values()],
        "shapes": [list(value.shape) for value in weights.values()],
    }


class IpcSender:
    """Hands a server on the same GPU the addresses of the learner's own tensors, which it copies.

    vLLM takes the addresses as a pickle, and only where VLLM_ALLOW_INSECURE_SERIALIZATION=1 allows it.
    """

    backend = "ipc"

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._kept: dict[str, Tensor] = {}
        """What was sent last: nothing else keeps copies alive that the server may still read."""

    def connect(self, url: str, world_size: int) -> TransferRound:
        return TransferRound({})

    def send(self, url: str) -> TransferRound:
        torch.cuda.synchronize(self._decoder.device)
        self._kept = {name: value.contiguous() for name, value in public_tensors(self._decoder).items()}
        gpu = str(cast("Any", torch.cuda.get_device_properties(self._decoder.device)).uuid)
        share = cast("Callable[[Tensor], tuple[Any, Any]]", reductions.reduce_tensor)  # pyright: ignore[reportUnknownMemberType]
        handles = [{gpu: share(value)[1]} for value in self._kept.values()]
        return TransferRound(describe(self._kept) | {"ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode()})


class NcclSender:
    """Broadcasts the learner's tensors to a server's workers on other GPUs, with vLLM's own communicator."""

    backend = "nccl"

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._groups: dict[str, Any] = {}

    @staticmethod
    def is_installed() -> bool:
        return find_spec("vllm") is not None

    def connect(self, url: str, world_size: int) -> TransferRound:
        address, port = _own_address(url), _free_port()

        def join() -> None:
            from vllm.distributed.device_communicators.pynccl import (  # pyright: ignore[reportMissingImports]
                PyNcclCommunicator,  # pyright: ignore[reportUnknownVariableType]
            )
            from vllm.distributed.utils import StatelessProcessGroup  # pyright: ignore

            group: Any = StatelessProcessGroup.create(host=address, port=port, rank=0, world_size=world_size + 1)  # pyright: ignore
            self._groups[url] = PyNcclCommunicator(group, device=self._decoder.device)

        ranks = {"rank_offset": 1, "world_size": world_size + 1}
        return TransferRound({"master_address": address, "master_port": port, **ranks}, join)

    def send(self, url: str) -> TransferRound:
        weights = public_tensors(self._decoder)

        def broadcast() -> None:
            with torch.cuda.device(self._decoder.device):
                stream = torch.cuda.current_stream()
                for value in weights.values():
                    self._groups[url].broadcast(value.contiguous(), src=0, stream=stream)
                stream.synchronize()

        return TransferRound(describe(weights), broadcast)


def _own_address(url: str) -> str:
    """The address under which the server at `url` reaches this machine."""
    host = url.split("://", 1)[1].rsplit("/", 1)[0].rsplit(":", 1)[0].strip("[]")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return probe.getsockname()[0]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]
