"""Runs that are killed in the middle of a publication, at each request of it: `python -m bench.gpu.vllm_kill MODEL_FOLDER`.

Between a run and its server stands a relay, which kills the run with SIGKILL once a certain request has come so and so far. Then
another client asks the server, and its log-probabilities tell which version it holds. Last comes a run that is not killed. `--cpu`
tries the script itself, with weights that travel by a folder; see `vllm_train`.
"""

import json
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bench.gpu.vllm_train import CPU, KEPT, PATIENCE, RUNS, Run, Server, ask, ask_tokens, nearest, stop, tell

VERSION = 1 if CPU else 2
"""Whose publication is cut off; the one before it must be served then."""


class CutPoint(NamedTuple):
    path: str
    when: str
    """`asked`: nothing of it has reached the server; `half`: half of its body has; `sent`: all has; `answered`: it was answered."""
    delay_s: float = 0.0


TRANSFERRED = [
    CutPoint("/start_weight_update", "answered"),
    CutPoint("/update_weights", "asked"),
    CutPoint("/update_weights", "half"),
    CutPoint("/update_weights", "sent"),
    CutPoint("/update_weights", "sent", 0.005),
    CutPoint("/update_weights", "sent", 0.03),
    CutPoint("/update_weights", "answered"),
    CutPoint("/finish_weight_update", "sent"),
    CutPoint("/resume", "sent"),
]
BY_FOLDER = [CutPoint("/collective_rpc", "sent", 0.2), CutPoint("/reset_prefix_cache", "answered")]


class Relay:
    """Hands everything on between clients and a server, until the request of a cut point has come for the `nth` time."""

    def __init__(self, server: Server, point: CutPoint, nth: int) -> None:
        self.run: Run | None = None
        self.killed = threading.Event()
        self._port, self._point, self._left = int(server.url.rsplit(":", 1)[1]), point, nth
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            try:
                server = socket.create_connection(("127.0.0.1", self._port))
            except OSError:  # it is down
                client.close()
                continue
            armed = threading.Event()
            threading.Thread(target=self._pump, args=(client, server, armed, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, armed, False), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, armed: threading.Event, asks: bool) -> None:
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                if asks and not self.killed.is_set() and piece.startswith(f"POST {self._point.path}".encode()):
                    self._left -= 1
                    if not self._left:
                        self._cut(source, target, piece, armed)
                        continue
                if not asks and armed.is_set() and not self.killed.is_set():
                    self._kill()
                target.sendall(piece)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _cut(self, client: socket.socket, server: socket.socket, piece: bytes, armed: threading.Event) -> None:
        if self._point.when == "asked":
            self._kill()
            return
        while b"\r\n\r\n" not in piece:
            piece += client.recv(1 << 16)
        head, body = piece.split(b"\r\n\r\n", 1)
        found = re.search(rb"(?i)content-length: *(\d+)", head)
        length = int(found[1]) if found else 0
        while len(body) < length:
            body += client.recv(1 << 20)
        if self._point.when == "answered":
            armed.set()
        half = self._point.when == "half"
        server.sendall(head + b"\r\n\r\n" + (body[: length // 2] if half else body))
        if self._point.when != "answered":
            time.sleep(self._point.delay_s)
            self._kill()
        if half:
            server.shutdown(socket.SHUT_RDWR)

    def _kill(self) -> None:
        assert self.run is not None
        self.run.process.kill()
        self.killed.set()


def cut_off(folder: Path, model: Path, server: Server, point: CutPoint) -> None:
    """Kill a run there, and tell what the server holds then."""
    # Each version from 0 on goes out by the same requests.
    relay = Relay(server, point, VERSION + 1)
    name = "killed" + re.sub(r"\W+", "-", f"{point.path} {point.when} {point.delay_s * 1000:.0f}")
    relay.run = run = Run(folder, model, name, relay.url, f'engine.weights="{"memory" if CPU else "ipc"}"', "train.lr=1e-4", *KEPT)
    end = time.monotonic() + 90 * PATIENCE
    while not relay.killed.wait(0.2) and run.process.poll() is None and time.monotonic() < end:
        pass
    if not relay.killed.is_set():
        run.process.kill()
        tell(f"{name}: not reached; {run.log.read_text(errors='replace')[-1500:]}")
        return
    begun = time.monotonic()
    answer = ask_tokens(server, model)
    took = time.monotonic() - begun
    run.process.wait()
    if answer is None:
        tell(f"{name}: no answer after {took:.2f} s; {server.log.read_text(errors='replace')[-2500:]}")
        return
    choice = json.loads(answer)["choices"][0]
    tell(f"{name}: answered after {took:.2f} s, {choice['text']!r}, sampled with " + nearest(run, model, choice))
    run.remove()


def play(folder: Path, model: Path, server: Server, points: list[CutPoint]) -> None:
    try:
        server.wait_up()
        tell(f"{server.url} is up, vLLM {json.loads(ask(f'{server.url}/version') or b'{}').get('version')}")
        for point in points:
            cut_off(folder, model, server, point)
            if ask(f"{server.url}/health") is None:
                tell(f"{server.url} did not survive that; it is started again")
                server.restart()
        Run(folder, model, f"next-{server.url[-4:]}", server.url, "train.steps=2").finish()
    except Exception:
        tell(f"{server.url}: {traceback.format_exc()}\n{server.log.read_text(errors='replace')[-2500:]}")


def main(model: Path) -> None:
    signal.signal(signal.SIGTERM, stop)
    points, count = (BY_FOLDER, 1) if CPU else (TRANSFERRED, 3)
    options = [] if CPU else ["--weight-transfer-config", '{"backend": "ipc"}']
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        folder = Path(made)
        servers = [Server(folder, model, 8721 + number, *options) for number in range(count)]
        try:
            threads = [
                threading.Thread(target=play, args=(folder, model, server, points[number::count]), daemon=True)
                for number, server in enumerate(servers)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for process in RUNS:
                process.kill()
            for server in servers:
                server.kill()


if __name__ == "__main__":
    main(Path(next(argument for argument in sys.argv[1:] if not argument.startswith("--"))))
