"""A real PostgreSQL server in a temporary folder, started when a test first needs one and stopped with the tests."""

import atexit
import os
import pwd
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest


def server_program(name: str) -> str | None:
    """Where a program of the server is: on PATH, or where Debian puts it."""
    debian = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[4]))
    return str(debian[-1]) if debian else shutil.which(name)


@cache
def server_url() -> str:
    """Of the server that this process's tests share; skips the test where PostgreSQL is not installed."""
    if server_program("initdb") is None or server_program("pg_ctl") is None:
        pytest.skip("PostgreSQL is not installed; on Debian: apt install postgresql")
    server = Server(Path(tempfile.mkdtemp(prefix="pg-")))
    atexit.register(server.remove)
    server.start()
    return server.url


class Server:
    """One server. It runs as an ordinary user where the tests run as root, which PostgreSQL refuses."""

    def __init__(self, folder: Path, *, settings: str = "-c fsync=off") -> None:
        self.folder, self._settings = folder, settings
        self.url = f"postgresql://penstock@/postgres?host={folder}"
        self._user = None
        if os.geteuid() == 0:
            self._user = "postgres" if any(user.pw_name == "postgres" for user in pwd.getpwall()) else "nobody"
            shutil.chown(folder, self._user)
        self._run("initdb", "-D", str(folder / "data"), "-U", "penstock", "--auth=trust", "--no-sync", "-E", "UTF8", "--locale=C")

    def start(self) -> None:
        """Start it and wait until it takes connections."""
        options = f"-k {self.folder} -c listen_addresses= {self._settings}"
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-w", "-l", str(self.folder / "log"), "-o", options, "start")

    def stop(self, how: str = "fast") -> None:
        """Stop it; `immediate` is as good as a crash."""
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-w", "-m", how, "stop")

    def remove(self) -> None:
        """Stop it for good."""
        subprocess.run(
            [server_program("pg_ctl") or "", "-D", str(self.folder / "data"), "-m", "immediate", "stop"],
            user=self._user,
            cwd="/",
            capture_output=True,
        )
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, name: str, *arguments: str) -> None:
        command = [server_program(name) or name, *arguments]
        with tempfile.TemporaryFile() as reported:  # a pipe would be kept open by the server
            done = subprocess.run(command, user=self._user, cwd="/", stdout=reported, stderr=reported)
            reported.seek(0)
            assert done.returncode == 0, reported.read().decode()
