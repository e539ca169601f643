"""The client over real HTTP: what it sends, what a refusal becomes, and files that are sent and fetched through faults."""

import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from penstock.errors import ConfigError, ControllerError
from penstock_controller import client as client_module
from penstock_controller.client import ControllerClient, all_rows
from penstock_controller.downloads import download_dataset, download_files, upload_dataset


class Seen(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Scripted:
    """A server whose answers are a list for each path: (status, body), the last one for ever; a body of None cuts the line."""

    def __init__(self) -> None:
        self.answers: dict[str, list[tuple[int, Any]]] = {}
        self.seen: list[Seen] = []
        self.url = ""

    def next(self, path: str) -> tuple[int, Any]:
        left = self.answers.get(urlsplit(path).path, [(404, {"error": "no such route", "code": "NOT_FOUND"})])
        return left.pop(0) if len(left) > 1 else left[0]


@pytest.fixture
def server() -> Generator[Scripted]:
    script = Scripted()

    class Answers(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            script.seen.append(Seen(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            status, content = script.next(self.path)
            if content is None:
                self.close_connection = True
                return
            sent = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(sent) + (10 if status == 299 else 0)))  # 299: promises more than comes
            self.end_headers()
            self.wfile.write(sent)

        do_GET = do_POST = do_PUT = do_DELETE = _answer

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with _served(Answers) as url:
        script.url = url
        yield script


@contextmanager
def _served(handler: type[BaseHTTPRequestHandler]) -> Generator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{serving.server_address[1]}"
        finally:
            serving.shutdown()
            thread.join()


@pytest.fixture
def client(server, monkeypatch) -> ControllerClient:
    monkeypatch.setattr(client_module, "RETRY_PAUSES_S", (0.0, 0.0))  # faults of these tests pass at once
    return ControllerClient(f"{server.url}/", "secret-token", "acme/agents")


def test_request_has_token_repository_and_encoded_name(client, server):
    server.answers["/api/cli/models/run%2Fstep-3"] = [(200, {"id": "x"})]
    assert client.model("run/step-3") == {"id": "x"}
    seen = server.seen[0]
    assert seen.headers["authorization"] == "Bearer secret-token" and seen.headers["x-osmosis-git"] == "acme/agents"
    assert seen.path == "/api/cli/models/run%2Fstep-3"


def test_delete_sends_a_body_and_accepts_empty_replies(client, server):
    server.answers["/api/cli/environment-secrets"] = [(204, b"")]
    assert client.delete_secret("KEY", "user") == {}
    assert (server.seen[0].method, json.loads(server.seen[0].body)) == ("DELETE", {"name": "KEY", "scope": "user"})


def test_a_refusal_keeps_its_code_status_and_issues(client, server):
    issues = [{"key": "train.lr", "message": "too large", "key_correction": None}]
    server.answers["/api/cli/eval-runs"] = [(400, {"error": "2 problems", "code": "CONFIG_INVALID", "issues": issues})]
    with pytest.raises(ControllerError, match="problems") as refused:
        client.submit_run("eval", {})
    assert (refused.value.code, refused.value.status, refused.value.details["issues"]) == ("CONFIG_INVALID", 400, issues)
    assert len(server.seen) == 1  # what changes something is never sent twice


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"\xff"])
def test_foreign_reply_has_a_code(client, server, body):
    server.answers["/api/cli/verify"] = [(200, body)]
    with pytest.raises(ControllerError, match="reply") as answer:
        client.verify()
    assert answer.value.code == "CONTROLLER_ANSWER"


def test_connection_faults_have_codes(client, server):
    server.answers["/api/cli/verify"] = [(0, None)]
    codes = {}
    for name, asked in {"cut": client, "nothing": ControllerClient("http://127.0.0.1:1", "x")}.items():
        with pytest.raises(ControllerError) as answer:
            asked.verify()
        codes[name] = answer.value.code
    assert codes == {"cut": "CONTROLLER_UNREACHABLE", "nothing": "CONTROLLER_UNREACHABLE"}


@pytest.mark.parametrize("url", ["nonsense", "ftp://host", "http://", "http://host:port", "http://[::1"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="address"):
        ControllerClient(url, "x").verify()


def test_all_pages_are_walked_along_their_offsets(client, server):
    page = {"datasets": [{"id": 1}], "next_offset": 1}
    server.answers["/api/cli/datasets"] = [(200, page), (200, page | {"next_offset": 2}), (200, {"datasets": [], "next_offset": 3})]
    assert len(list(all_rows(lambda offset: client.datasets(offset=offset), "datasets"))) == 2
    assert [seen.path.rpartition("=")[2] for seen in server.seen] == ["0", "1", "2"]


def test_a_snapshot_is_sent_again_after_a_passing_fault(client, server, tmp_path):
    archive = tmp_path / "code.tar.gz"
    archive.write_bytes(b"x" * 700_000)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    server.answers[f"/api/cli/snapshots/{digest}"] = [(503, {"error": "later"}), (0, None), (201, {"snapshot": digest})]
    answer: list[tuple[int, int | None]] = []
    assert client.put_snapshot(archive, digest, lambda stage, done, total: answer.append((done, total)))["snapshot"] == digest
    assert [len(seen.body) for seen in server.seen] == [700_000] * 3
    assert answer[-1] == (700_000, 700_000)


def test_refused_upload_is_not_repeated(client, server, tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text("{}\n")
    upload = {"method": "simple", "presigned_url": f"{server.url}/put"}
    server.answers["/api/cli/datasets"] = [(200, {"id": "d1", "upload": upload})]
    server.answers["/put"] = [(413, {"error": "too large", "code": "BODY_TOO_LARGE"})]
    server.answers["/api/cli/datasets/d1/abort"] = [(200, {})]
    with pytest.raises(ControllerError, match="large"):
        upload_dataset(client, file)
    assert [seen.path for seen in server.seen] == ["/api/cli/datasets", "/put", "/api/cli/datasets/d1/abort"]
    assert "authorization" not in server.seen[1].headers


def test_cut_dataset_download_is_retried(client, server, tmp_path):
    server.answers["/api/cli/datasets/d"] = [(200, {"id": "d", "file_name": "d", "file_size": 5})]
    server.answers["/api/cli/datasets/d/download"] = [(200, {"presigned_url": f"{server.url}/get", "file_name": "../d.jsonl"})]
    server.answers["/get"] = [(299, b"half"), (200, b"whole")]
    path = download_dataset(client, "d", tmp_path)
    assert path == tmp_path / "d.jsonl" and path.read_bytes() == b"whole"
    server.answers["/get"] = [(299, b"half")]
    with pytest.raises(ControllerError):
        download_dataset(client, "d", tmp_path / "e.jsonl")
    assert [each.name for each in tmp_path.iterdir()] == ["d.jsonl"]


def _offer(server: Scripted, files: dict[str, bytes]) -> list[dict[str, Any]]:
    items = [{"path": path, "url": f"{server.url}/f/{index}"} for index, path in enumerate(files)]
    server.answers["/api/cli/eval-runs/r/samples/download-urls"] = [(200, {"items": items})]
    for index, content in enumerate(files.values()):
        server.answers[f"/f/{index}"] = [(200, content)]
    return [{"path": path, "size": len(content)} for path, content in files.items()]


def test_run_files_are_fetched_unless_complete(client, server, tmp_path):
    files = _offer(server, {"metrics.json": b"{}", "trajectories/row_0_run_0.json": b"[1]"})
    fetched = download_files(client, "eval", "r", files, tmp_path / "into")
    assert (sorted(fetched.downloaded), fetched.bytes) == (["metrics.json", "trajectories/row_0_run_0.json"], 5)
    again = download_files(client, "eval", "r", files, tmp_path / "into")
    assert (again.downloaded, len(again.skipped)) == ([], 2)
    assert len(download_files(client, "eval", "r", files, tmp_path / "into", overwrite=True).downloaded) == 2


@pytest.mark.parametrize("path", ["../outside", "/etc/outside", "a/../../outside", "a\\b", ""])
def test_path_outside_the_folder_is_skipped(client, server, tmp_path, path):
    files = _offer(server, {"metrics.json": b"{}", path: b"x"})
    fetched = download_files(client, "eval", "r", files, tmp_path / "into")
    assert fetched.downloaded == ["metrics.json"] and list(fetched.failed) == [path]
    assert [each.name for each in tmp_path.iterdir()] == ["into"]


def test_expired_link_is_renewed_and_failures_are_separate(client, server, tmp_path):
    files = _offer(server, {"a": b"aa", "b": b"bb"})
    server.answers["/f/0"] = [(403, {"error": "over", "code": "LINK_EXPIRED"}), (200, b"aa")]
    server.answers["/f/1"] = [(410, {"error": "gone", "code": "GONE"})]
    fetched = download_files(client, "eval", "r", files, tmp_path)
    assert (fetched.downloaded, fetched.failed) == (["a"], {"b": "gone"})
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_unwritable_folder_is_refused_first(client, server, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="place"):
        download_files(client, "eval", "r", [{"path": "a", "size": 1}], Path(tmp_path / "file" / "below"))
    assert server.seen == []
