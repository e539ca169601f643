"""A program: real servers on sockets for the fuzzer, watched from inside: stalls of their event loop, memory, errors in the log.

Usage: `fuzz_server.py KIND FOLDER`. It prints its targets as one line of JSON, and then a report for each line on stdin.
"""

import asyncio
import ctypes
import gc
import json
import logging
import resource
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, redirect_stdout
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("helpers", "controller", "flow/rollout")]

from penstock.chat.renderer import Renderer
from penstock.gateway import Gateway, auth, session
from penstock.gateway.request import GatewayLimits
from penstock.http import server
from penstock.http.listen import bind
from penstock.pool import POOLS
from penstock.records import Sampling
from penstock.testing import ScriptedEngine, write_tokenizer
from penstock_compat.gateway.routes import reward_by_rule

SECRET = b"a secret for tests only"
TICK_S = 0.005
CACHE_BYTES = 4 << 20
"""Of sessions, lowered here: the fuzzer's requests would take half an hour to fill what a gateway has. No seam leads to it."""
CACHED_TOKENS = 500
in_flight: dict[asyncio.Task, str] = {}
"""The fuzzer's number of each request that is being answered."""


class LoopMonitor:
    """The longest time that the event loop did not turn, and the errors in the log.

    On a busy machine the loop is late because others compute. So a stall counts as far as this process computed meanwhile.
    """

    def __init__(self):
        self.longest_s = self.longest_wall_s = 0.0
        self.stalls = deque(maxlen=20)
        self.errors = []
        self._loop = asyncio.get_running_loop()
        self._before = list[str]()
        self._reported = False
        """Whether a report kept the loop since the last tick."""
        self._tick(time.perf_counter(), time.process_time())

    def _tick(self, due, cpu):
        late, used = (0.0, 0.0) if self._reported else (time.perf_counter() - due, time.process_time() - cpu)
        stall, self._reported = min(late, used), False
        if stall > 0.05:
            self.stalls.append((round(stall, 3), sorted({*self._before, *in_flight.values()})))
        self.longest_s, self.longest_wall_s = max(self.longest_s, stall), max(self.longest_wall_s, late)
        self._before = list(in_flight.values())
        self._loop.call_later(TICK_S, self._tick, time.perf_counter() + TICK_S, time.process_time())

    def report(self):
        self._reported = True
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        reported = {
            "rss_mb": rss_mb(),
            "peak_mb": peak,
            "stall_s": self.longest_s,
            "wall_stall_s": self.longest_wall_s,
            "stalls": [*self.stalls],
        }
        return reported | {"errors": self.errors[:20], "tasks": len(asyncio.all_tasks())}


class ErrorList(logging.Handler):
    """Keeps tracebacks and what the HTTP server reports, with the request whose task logged them."""

    def __init__(self, errors):
        super().__init__()
        self._errors = errors

    def emit(self, record):
        if record.exc_info or (record.levelno >= logging.ERROR and record.name in ("asyncio", "penstock.http.server")):
            try:
                number = in_flight.get(asyncio.current_task(), "?")
            except RuntimeError:
                number = "?"
            self._errors.append(f"request {number}: {self.format(record)[-3000:]}")


def rss_mb():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def note_requests():
    """Note which request each task answers. No seam: the server makes the exchange itself."""
    original = server.RequestExchange.__call__

    async def call(self, scope, receive, send):
        task = asyncio.current_task()
        in_flight[task] = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-fuzz"), "?")
        try:
            await original(self, scope, receive, send)
        finally:
            del in_flight[task]

    server.RequestExchange.__call__ = call


@asynccontextmanager
async def gateway(folder: Path, *, is_open: bool = False) -> AsyncGenerator[list]:
    renderer, pool = Renderer.load(write_tokenizer(folder / "model")), POOLS.load("sqlite")(folder / "store", url="")
    engine = ScriptedEngine(lambda prompt: "It is 42.", renderer.tokenizer, context_length=4096, chunk=8)
    engine.prompts, engine.samplings = deque(maxlen=1), deque(maxlen=1)
    sampling, limits = {"": Sampling(max_tokens=64)}, GatewayLimits(calls_per_s=1e6)
    session.MAX_ADOPTED_BYTES, session.MAX_CLOSED, auth.MAX_CACHED_TOKENS = CACHE_BYTES, CACHED_TOKENS, CACHED_TOKENS
    opened = Gateway(engine, renderer, pool, secret=SECRET, sampling=sampling, limits=limits, is_open=is_open)
    opened.reward_function = reward_by_rule
    try:
        async with opened:
            routes = [(route.method, route.path, str(route.access)) for route in opened.app.listed]
            name = "open gateway" if is_open else "gateway"
            yield [{"name": name, "url": opened.base_url.removesuffix("/v1"), "routes": routes, "secret": SECRET.decode()}]
    finally:
        await pool.close()


@asynccontextmanager
async def open_gateway(folder):
    async with gateway(folder, is_open=True) as targets:
        yield targets


@asynccontextmanager
async def controller(folder):
    import aiohttp
    import api_cases
    from served_controller import ROWS, ControllerClient, add_training

    from penstock_controller.api.app import make_app, serve_controller
    from penstock_controller.api.auth import ApiTokens
    from penstock_controller.context import ControllerLimits, open_controller
    from penstock_controller.home import Home

    limits = ControllerLimits(runs=0, queued=5, snapshot_mb=1, dataset_mb=1)
    async with (
        open_controller(Home(folder / "home"), limits) as opened,
        serve_controller(opened) as url,
        aiohttp.ClientSession() as session,
    ):
        client = ControllerClient(opened, url, session)
        assert (await client.upload("rows", ROWS))[0] == 200
        run, out = add_training(opened.runs, opened.home, "trained")
        out.mkdir(parents=True, exist_ok=True)
        (out / "metrics.jsonl").write_bytes(b'{"step": 1, "steps": 2, "reward": 0.5}\n{"step": 2, "steps": 2, "reward": 0.7}\n')
        await asyncio.to_thread(api_cases.repository, folder / "repository", api_cases.project())
        opened.repositories.register("acme/agents", folder / "repository")
        _, begun = await client.begin("more", ROWS)
        _, shown = await client.ask("GET", "datasets/rows/download")
        items = {"items": [{"path": "summary.jsonl"}]}
        _, outputs = await client.ask("POST", "eval-runs/asked/samples/download-urls", items)
        links = [begun["upload"]["presigned_url"], shown["presigned_url"], outputs["items"][0]["url"]]
        device, _ = ApiTokens(opened.database, opened.home.token()).create("laptop")
        snapshot = api_cases.archive(api_cases.project())
        routes = [(next(iter(route.methods - {"HEAD"})), route.path, route.name) for route in make_app(opened, url).routes]
        yield [
            {
                "name": "controller",
                "url": url,
                "routes": routes,
                "token": opened.home.token(),
                "device": device,
                "links": [link.removeprefix(url) for link in links],
                "dataset": begun["id"],
                "snapshot": snapshot.hex(),
                "run": run.id,
            }
        ]


@asynccontextmanager
async def rollout(folder):
    from rollout_cases import good_grade
    from server_cases import backend_of, said

    from penstock_compat.rollout_server.app import create_rollout_server, serving
    from penstock_compat.rollout_server.delivery import DeliveryPolicy
    from penstock_compat.rollout_server.executor_callbacks import CallbackListener
    from penstock_compat.rollout_server.rollouts import ServerLimits

    async def no_transcripts(rollout_id):
        return {}

    policy = DeliveryPolicy(attempt_s=2, first_wait_s=0.01, longest_wait_s=0.02, deadline_s=0.1)
    app = create_rollout_server(
        backend=backend_of(said, good_grade),
        configure_logging=False,
        token="the token",
        journal=folder / "journal.db",
        limits=ServerLimits(delivery=policy, max_settled=500, drain_s=1),
    )
    sock = bind("127.0.0.1", 0)
    async with CallbackListener(no_transcripts, host="127.0.0.1", port=0, linger_s=0) as listener, serving(app, sock):
        for number in range(20):
            listener.expect(f"r-{number}")
        urls = listener.urls("r-1")
        shared = {"token": "the token", "key": listener.key, "completed": urls.completed, "graded": urls.graded}
        routes = [(next(iter(route.methods - {"HEAD"})), route.path, "token") for route in app.routes]
        base = f"http://127.0.0.1:{sock.getsockname()[1]}"
        back = urls.completed.removeprefix(listener.url).replace("r-1/completed", "{rollout}")
        calls = [("POST", f"{back}/completed", "key"), ("POST", f"{back}/graded", "key")]
        yield [
            {"name": "rollout server", "url": base, "routes": routes, **shared},
            {"name": "callbacks", "url": listener.url, "routes": calls, **shared},
        ]


@asynccontextmanager
async def view(folder):
    from view_cases import make_run

    from penstock.view.app import SCREENS, serve_view
    from penstock.view.sources import FolderSource

    folder.mkdir(parents=True, exist_ok=True)
    await asyncio.to_thread(make_run, folder)
    async with serve_view(FolderSource(folder), host="127.0.0.1", port=0, token="the token") as url:
        known = "run=run&group=train-0&rollout=train-0.1.1&call=1&step=1&end=agent_error&text=train-0"
        routes = [("GET", "/", ""), ("GET", "/main.js", ""), *(("GET", f"/api/{name}?{known}", "") for name in SCREENS)]
        yield [{"name": "view", "url": url.rstrip("/"), "routes": routes, "token": "the token"}]


KINDS = {"view": view, "gateway": gateway, "open": open_gateway, "controller": controller, "rollout": rollout}


async def main(kind: str, folder: Path) -> None:
    note_requests()
    async with KINDS[kind](folder) as targets:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        monitor = LoopMonitor()
        logging.getLogger().addHandler(ErrorList(monitor.errors))
        print(json.dumps({"targets": targets}), flush=True)
        while await reader.readline():
            print(json.dumps(monitor.report()), flush=True)


def prepare(kind: str, folder: Path) -> None:
    """What needs the main thread without a loop: an evaluation for the controller to show."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "controller":
        import api_cases

        sys.path.append(str(api_cases.ENGINE_FOLDER))
        with redirect_stdout(sys.stderr):
            api_cases.carry_out(folder / "home", "asked")


if __name__ == "__main__":
    prepare(sys.argv[1], Path(sys.argv[2]))
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
