"""How weights travel to vLLM servers: which way is chosen, what is reported and measured, and what happens where one fails."""

import asyncio
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from engine_cases import read, run, write_policy
from test_train_servers import AGENT, TINY, tiny_server

from faults.upstream_cases import VERSIONS, FakeVllm, NumberedSender, engine_over
from penstock.config import load_config
from penstock.engines.embedded.decoder import load_decoder, public_state, public_tensors
from penstock.engines.retry import RetryPolicy
from penstock.engines.servers.server_weights import exchange
from penstock.errors import ConfigError, EngineError
from penstock.http.client import UpstreamError
from penstock.records import Sampling
from penstock.run.inputs import read_inputs
from penstock.train import publishing
from penstock.train.device import memory_split, pick_learner_device
from penstock.train.publishing import NcclSender
from penstock.train.trainer import train

SHORT = Sampling(max_tokens=4)
GONE_AT_ONCE = RetryPolicy(first_wait_s=0.0, recheck_s=0.0, down_s=0.0)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_takes_a_transfer(version: str, tmp_path: Path):
    async def case():
        async with transferring(version) as server, engine_over(server, folder=write_policy(tmp_path / "0")) as engine:
            sender = NumberedSender()
            for number in (3, 4):
                sender.number = number
                await engine.transfer(number, sender, tmp_path / str(number), asyncio.Event())
                assert (await read(engine, [1], SHORT)).logprobs == (-number - 1.0,) * 4
            calls = ["pause", "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"]
            assert server.calls[:6] == [*calls, "reset_prefix_cache"] and sender.connected == [1]
            assert not server.paused and not server.broken

    run(case())


@pytest.mark.parametrize("version", ["0.22.0", "0.32.0"])
@pytest.mark.parametrize("fault", ["the server refuses", "this side fails", "this side never ends", "the server is cut off"])
def test_a_transfer_that_fails_leaves_the_version_before_served(version: str, fault: str, tmp_path: Path):
    async def case():
        async with (
            transferring(version) as server,
            engine_over(server, folder=write_policy(tmp_path / "0"), policy=GONE_AT_ONCE, load_s=0.5) as engine,
        ):
            await engine.load(1, write_policy(tmp_path / "1"))
            sender, never = NumberedSender(), threading.Event()
            sender.number = 2
            if fault == "the server refuses":
                server.cut = spoil_update
            elif fault == "the server is cut off":
                server.cut = reset_update
            else:
                sender.work = fail if fault == "this side fails" else never.wait
            with pytest.raises(EngineError, match="version"):
                await engine.transfer(2, sender, tmp_path / "2", asyncio.Event())
            never.set()
            server.cut = None
            assert (engine.version, server.held, server.paused, server.broken) == (1, 1, False, False)
            assert set((await read(engine, [1], SHORT)).versions) == {1}
            sender.work = None
            await engine.transfer(2, sender, tmp_path / "2", asyncio.Event())
            assert (engine.version, server.held) == (2, 2)

    run(case())


def test_restarted_server_reads_the_folder_once_written(tmp_path: Path):
    async def case():
        async with transferring("0.22.0") as server, engine_over(server, folder=write_policy(tmp_path / "0")) as engine:
            sender, written = NumberedSender(), asyncio.Event()
            sender.number = 2
            await engine.transfer(2, sender, tmp_path / "2", written)
            await server.kill()
            with pytest.raises(EngineError):
                await read(engine, [1], SHORT)
            server.forget()
            await server.start()
            write_policy(tmp_path / "2")
            assert server.held == 0
            written.set()
            await engine.client.fleet.servers[0].up.wait()
            assert server.held == 2

    run(case())


def test_a_collective_that_never_ends_ends_with_the_deadline():
    async def case():
        never = threading.Event()
        with pytest.raises(UpstreamError, match=r"0\.05"):
            await exchange(asyncio.sleep(0), never.wait, 0.05)  # type: ignore[arg-type]
        with pytest.raises(UpstreamError, match="took"):
            await exchange(asyncio.sleep(600), None, 0.05)
        never.set()

    run(case())


def test_tensors_that_are_sent_are_those_of_model_folder(tmp_path: Path):
    decoder = load_decoder(write_policy(tmp_path / "0"))
    sent, saved = public_tensors(decoder), public_state(decoder)
    assert sent.keys() == saved.keys() and all(torch.equal(sent[name], saved[name]) for name in saved)
    owned = {value.untyped_storage().data_ptr() for value in decoder.state_dict().values()}
    assert all(value.untyped_storage().data_ptr() in owned for value in sent.values())  # nothing is copied


class RecordingCommunicator:
    """In place of vLLM's, which needs GPUs: it keeps what it was to broadcast."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def broadcast(self, value: torch.Tensor, *, src: int, stream: Any) -> None:
        assert src == 0 and value.is_contiguous()
        self.sent.append(value)

    def synchronize(self) -> None:
        """As its own stream."""


def test_nccl_is_reported_to_server_and_broadcast_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    heard, url = RecordingCommunicator(), "http://127.0.0.1:8000"
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: heard)
    decoder = load_decoder(write_policy(tmp_path / "0"))
    sender = NcclSender(decoder)
    info, join = sender.connect(url, 2)
    assert (info["rank_offset"], info["world_size"], info["master_address"], join is not None) == (1, 3, "127.0.0.1", True)
    sender._groups[url] = heard  # what `join` would have put there
    info, work = sender.send(url)
    assert set(info) == {"names", "dtype_names", "shapes"} and work is not None and heard.sent == []
    work()
    tensors = public_tensors(decoder)
    assert [list(value.shape) for value in heard.sent] == info["shapes"] and set(info["dtype_names"]) == {"float32"}
    assert all(torch.equal(tensors[name], value) for name, value in zip(info["names"], heard.sent, strict=True))


# Whole runs


def test_shared_memory_folder_is_used_and_reported(tmp_path: Path):
    events, steps = trained(tmp_path)
    assert "by a folder in shared memory, else a folder on disk" in texts(events)
    assert {step["publish_way"] for step in steps} == {"a folder in shared memory"}
    assert all(step["publish_bytes"] > 10_000 and step["publish_s"] >= 0 for step in steps)
    assert not list(publishing.SHARED_MEMORY.glob("penstock-*tiny*"))


def test_what_a_killed_process_of_the_run_left_in_memory_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(publishing, "SHARED_MEMORY", tmp_path)
    left, other = publishing.memory_folder("a[1]"), publishing.memory_folder("a[1]b")
    (left / "000001").mkdir(parents=True)
    other.mkdir()
    assert publishing.memory_folder("a[1]") != left and list(tmp_path.iterdir()) == [other]


def test_a_way_that_fails_is_told_and_the_next_one_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(publishing, "SHARED_MEMORY", tmp_path / "memory")
    (tmp_path / "memory").mkdir()

    def hide(server: FakeVllm) -> None:
        server.unseen = str(tmp_path / "memory")  # as a server in a container has a /dev/its own shm

    events, steps = trained(tmp_path, hide, "engine.down_s=0")
    assert {step["publish_way"] for step in steps} == {"a folder on disk"}
    failed = [fields["text"] for kind, fields in events if kind == "publish.failed"]
    assert "tried again by a folder on disk" in failed[0] and len(failed) == 2
    assert "from now on: it has failed 2 times in a row" in failed[1]


@pytest.mark.parametrize(
    ("settings", "way", "reported"),
    [((), "an adapter", "as an adapter, by name"),
     (("policies={planner={default=true}, executor={}}",), "2 adapters", "as 2 adapters, by name")],
)  # fmt: skip
def test_adapters_are_reported_and_measured_too(tmp_path: Path, settings: tuple[str, ...], way: str, reported: str):
    events, steps = trained(tmp_path, take_adapters, 'train.method="lora"', "train.rank=4", *settings)
    assert reported in texts(events)
    assert {step["publish_way"] for step in steps} == {way} and len(steps) == 2
    sizes = [file.stat().st_size for file in (tmp_path / "tiny/checkpoints/000002").rglob("adapter_model.safetensors")]
    for step in steps:  # a file has the names of its tensors too
        assert 0.5 * sum(sizes) < step["publish_bytes"] < sum(sizes) and step["publish_s"] > 0


def test_unavailable_transfer_is_rejected_with_its_needs(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"engine\.weights"):
        trained(tmp_path, lambda server: None, 'engine.weights="ipc"')


def test_servers_sleep_during_an_update(tmp_path: Path):
    servers: list[FakeVllm] = []

    def sleepy(server: FakeVllm) -> None:
        server.sleeps = True
        servers.append(server)

    _, steps = trained(tmp_path, sleepy, "engine.sleep=true")
    calls = servers[0].calls
    assert len(steps) == 2 and calls.count("sleep") == calls.count("wake_up") == 2
    assert calls[calls.index("sleep") + 1] == "wake_up" and not servers[0].asleep and not servers[0].paused


def test_a_server_that_cannot_sleep_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="--enable-sleep-mode"):
        trained(tmp_path, lambda server: None, "engine.sleep=true")


# The learner's device


def test_the_learner_has_the_precision_that_is_asked_for(tmp_path: Path):
    trained(tmp_path, lambda server: None, 'train.dtype="bfloat16"', 'train.device="cpu"')
    header = (tmp_path / "tiny/checkpoints/000002/model.safetensors").read_bytes()[8:400]
    assert b'"BF16"' in header


def test_a_device_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"train\.device"):
        trained(tmp_path, lambda server: None, 'train.device="cuda:7"')


def test_the_embedded_engine_has_the_learners_device(tmp_path: Path):
    config = load_config(TINY / "train.toml", [f'run.folder="{tmp_path}"', 'train.device="cpu"'])
    with pytest.raises(ConfigError, match=r"train\.device"):
        asyncio.run(train(config, read_inputs(config, silent), listener=silent, stop=asyncio.Event()))


def test_of_several_gpus_the_emptiest_is_the_learners(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((10, 70, 30)[index], 80))
    assert pick_learner_device("auto") == torch.device("cuda", 1)
    assert pick_learner_device("cpu") == torch.device("cpu")


def test_on_a_cpu_there_is_no_memory_to_split(tmp_path: Path):
    assert memory_split(load_decoder(write_policy(tmp_path / "0")), 0) == []


def take_adapters(server: FakeVllm) -> None:
    server.takes_adapters = True


def transferring(version: str) -> FakeVllm:
    server = FakeVllm(version=version)
    server.backend, server.insecure, server.confesses = "ipc", True, True
    return server


async def spoil_update(request: web.Request) -> web.StreamResponse | None:
    return web.json_response({"error": "made-up trouble"}, status=500) if request.path == "/update_weights" else None


async def reset_update(request: web.Request) -> web.StreamResponse | None:
    if request.path != "/update_weights":
        return None
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def fail() -> None:
    raise RuntimeError("made-up trouble")


def trained(folder: Path, prepare: Any = None, *settings: str) -> tuple[list[tuple[str, dict[str, Any]]], list[dict[str, Any]]]:
    """Train the tiny policy for two steps; returns the events and the metrics."""
    events: list[tuple[str, dict[str, Any]]] = []

    async def case() -> None:
        (prepare or (lambda server: None))(fresh := tiny_server())
        async with fresh as server:
            text = (TINY / "train.toml").read_text().replace("slots = 32", f'name = "vllm"\nurl = ["{server.url}"]')
            (folder / "agent.py").write_text(AGENT)
            (folder / "tasks.jsonl").write_text((TINY / "tasks.jsonl").read_text())
            (folder / "train.toml").write_text(text)
            given = [f'run.folder="{folder}"', "train.steps=2", "sampling.max_tokens=8", "train.checkpoint_every=1", *settings]
            config = load_config(folder / "train.toml", given)
            inputs = await asyncio.to_thread(read_inputs, config, silent)
            async with asyncio.timeout(120):
                await train(config, inputs, listener=lambda kind, fields: events.append((kind, fields)), stop=asyncio.Event())

    asyncio.run(case())
    return events, [fields for kind, fields in events if kind == "train.step"]


def texts(events: list[tuple[str, dict[str, Any]]]) -> str:
    return "\n".join(str(fields.get("text")) for kind, fields in events if kind == "stage")


def silent(kind: str, fields: dict[str, Any]) -> None:
    """Nobody watches."""
