"""`make audit` fails on a known vulnerability of a locked version, and passes without a network."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

ROOT = Path(__file__).parents[3]


@contextmanager
def osv(vulnerable: dict[str, str]) -> Iterator[str]:
    """Answers as OSV does, with one vulnerability for each named package."""

    class Double(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))["queries"]
            assert all(one["version"] and one["package"]["ecosystem"] == "PyPI" for one in asked)
            names = [one["package"]["name"] for one in asked]
            self._answer({"results": [{"vulns": [{"id": vulnerable[name]}]} if name in vulnerable else {} for name in names]})

        def do_GET(self) -> None:
            self._answer({"id": self.path.rsplit("/", 1)[1], "aliases": ["CVE-1"], "summary": "it is bad"})

        def _answer(self, body: object) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Double)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def audit(url: str, exceptions: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PENSTOCK_OSV": url, "PENSTOCK_AUDIT_EXCEPTIONS": str(exceptions), "NO_PROXY": "127.0.0.1"}
    return subprocess.run([sys.executable, ROOT / "tools/audit.py"], env=environment, capture_output=True, text=True, timeout=100)


def written(path: Path, until: date) -> Path:
    path.write_text(f'[[exception]]\nid = "CVE-1"\nreason = "never called"\nuntil = {until}\n')
    return path


def test_a_known_vulnerability_fails_unless_it_is_excepted(tmp_path: Path) -> None:
    today = date.today()
    with osv({}) as url:
        assert audit(url, ROOT / "tools/audit.toml").returncode == 0
    with osv({"aiohttp": "GHSA-1"}) as url:
        found = audit(url, ROOT / "tools/audit.toml")
        assert found.returncode == 1 and "aiohttp" in found.stdout and "GHSA-1, CVE-1: it is bad" in found.stdout
        assert "1 known vulnerabilities" in found.stderr and "Traceback" not in found.stderr
        excepted = audit(url, written(tmp_path / "excepted.toml", today + timedelta(2)))
        assert excepted.returncode == 0 and "excepted: never called" in excepted.stdout
        assert audit(url, written(tmp_path / "late.toml", today - timedelta(2))).returncode == 1


def test_without_a_network_it_reports_it_and_passes() -> None:
    done = audit("http://127.0.0.1:9", ROOT / "tools/audit.toml")
    assert done.returncode == 0 and "not reachable: skipped" in done.stdout
