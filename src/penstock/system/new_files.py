"""Files and folders that appear whole or not at all, and never over another one."""

import os
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import ConfigError


@contextmanager
def fresh(out: Path) -> Generator[Path]:
    """A path beside `out` to write a file or folder to, which becomes `out` at the end."""
    if os.path.lexists(out):
        raise ConfigError(f"{out} is there already; give another path with --out, or move it away")
    part = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield part
        _sync(part)
        if os.path.lexists(out):
            raise ConfigError(f"{out} came to be meanwhile; give another path with --out, or move it away")
        part.rename(out)
    except OSError as cause:
        raise ConfigError(f"{out}: cannot be written: {cause.strerror or cause}; choose another place with --out") from cause
    finally:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)


def _sync(part: Path) -> None:
    """Bring it to disk before it gets its name."""
    for path in [*part.iterdir(), part] if part.is_dir() else [part]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def escape(message: str) -> str:
    """Text with lone surrogates in a form that any file can hold; other text, unless it begins with NUL, as it is."""
    if not message.startswith("\0") and not any("\ud800" <= character <= "\udfff" for character in message):
        return message
    return "\0" + message.encode("utf-8", "surrogatepass").hex()


def unescape(text: str) -> str:
    """What `escape` was given."""
    return bytes.fromhex(text[1:]).decode("utf-8", "surrogatepass") if text.startswith("\0") else text
