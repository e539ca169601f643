"""The recordings that come with penstock, for `penstock view --demo`: the tiny policy learns to multiply, and is evaluated."""

import tarfile
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

ARCHIVE = Path(__file__).parent / "demo.tar.xz"


@contextmanager
def demo_folder() -> Generator[Path]:
    """Yields a temporary folder with the run and its evaluations."""
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder:
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)
