"""Stores the pictures that models saw: each once, under its digest, in the folder `pictures` next to the pool."""

import re
from hashlib import sha256
from pathlib import Path

from penstock.errors import PoolError
from penstock.system.files import write_file

FOLDER = "pictures"
DIGEST = re.compile(r"[0-9a-f]{64}")
MAX_BYTES = 4 << 30
"""The limit for all pictures of a run."""


class PictureStore:
    """The pictures of the run in `folder`. Several processes may write there; blocks: call it in a thread."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._folder = folder / FOLDER
        self._max_bytes = max_bytes

    def put(self, content: bytes) -> bool:
        """Store a picture durably. Returns False if there is no room for it."""
        path = self.path(sha256(content).hexdigest())
        if path.exists():
            return True
        if self.size_bytes() + len(content) > self._max_bytes:
            return False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_file(path, content)
        except OSError as cause:
            raise PoolError(f"{path}: a picture cannot be stored: {cause.strerror or cause}") from cause
        return True

    def read(self, digest: str) -> bytes:
        """Return the picture's bytes; PoolError if they are missing or damaged."""
        if not DIGEST.fullmatch(digest):  # a caller's text must not become a path
            raise PoolError(f"{digest[:80]!r} is not the digest of a picture")
        try:
            content = self.path(digest).read_bytes()
        except OSError as cause:
            raise PoolError(f"picture {digest} is not in {self._folder}: {cause.strerror or cause}") from cause
        if sha256(content).hexdigest() != digest:
            raise PoolError(f"picture {digest} is damaged on disk; restore {self._folder} from a copy")
        return content

    def path(self, digest: str) -> Path:
        return self._folder / digest

    def size_bytes(self) -> int:
        """Returns the size of complete pictures; files that another process is still writing have other names."""
        files = self._folder.iterdir() if self._folder.exists() else ()
        return sum(file.stat().st_size for file in files if DIGEST.fullmatch(file.name))
