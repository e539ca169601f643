"""An OpenAI-compatible endpoint on a real port: it answers what the test says, and keeps what it was asked."""

import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, dict[str, str], str]


def says(text: str) -> Answer:
    return 200, {}, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


class JudgeDouble:
    def __init__(self, answer: Callable[[int, dict[str, Any]], Answer]) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.url = ""
        self._answer, self._lock = answer, threading.Lock()

    def take(self, body: dict[str, Any], key: str | None) -> Answer:
        with self._lock:
            self.asked.append(body)
            self.keys.append(key)
            return self._answer(len(self.asked), body)


@contextmanager
def judge_double(answer: Callable[[int, dict[str, Any]], Answer]) -> Generator[JudgeDouble]:
    """`answer(number, body)` gives status, headers and body of the number-th request, from 1 on."""
    double = JudgeDouble(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, headers, text = double.take(body, self.headers.get("authorization"))
            self.send_response(status)
            for name, value in {"content-length": str(len(text.encode())), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            text = json.dumps({"data": [{"id": "m"}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        double.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield double
        finally:
            server.shutdown()
            thread.join()
