"""Encryption of small texts with what Python itself brings, and the key for it.

A text is sealed with a stream cipher and then authenticated (encrypt-then-MAC). From the key, two others are derived by
HMAC-SHA256, one for each use. The keystream is SHAKE-256 over the first of them and a random nonce of 32 bytes, new for each
text; the tag is HMAC-SHA256 under the second over the nonce, the encrypted text and what the text belongs to, each with its
length before it. So a sealed text that was changed, or moved to another name, is refused. It hides everything but the length
of the text, in steps of 64 bytes.

What this protects against: that a database, a backup or a log which others see tells the secrets. What it does not: whoever
can read the key (a file of mode 0600 beside the database, or an entry in the keyring of the operating system) or this process's
memory can read them all. Its parts are standard and so is the way they are joined, yet it is no library that others have reviewed.
"""

import hmac
import importlib
import secrets
from contextlib import suppress
from hashlib import sha256, shake_256
from typing import Any

from penstock.controller.home import Home
from penstock.errors import ConfigError, ControllerError

VERSION = b"\x01"
NONCE, TAG, STEP = 32, 32, 64
"""In bytes: of the nonce and the tag, and what the length of a text is rounded up to."""
FILE, MARK = "vault.key", "vault.keyring"
SERVICE = "penstock controller"


class Seal:
    """Seals texts under one key; `belongs` says what a text belongs to, and must be the same when it is opened."""

    def __init__(self, key: bytes) -> None:
        if len(key) < 32:
            raise ConfigError(f"the vault's key has {len(key)} bytes; it must have at least 32 random ones")
        self._hiding = hmac.new(key, b"penstock vault: hiding", sha256).digest()
        self._signing = hmac.new(key, b"penstock vault: signing", sha256).digest()

    def __repr__(self) -> str:
        return "Seal(…)"

    def close(self, text: str, *belongs: str) -> bytes:
        """`text`, for no one's eyes."""
        plain = text.encode("utf-8", "surrogatepass")
        padded = len(plain).to_bytes(8, "big") + plain
        padded += bytes(-len(padded) % STEP)
        nonce = secrets.token_bytes(NONCE)
        hidden = self._mask(padded, nonce)
        return VERSION + nonce + hidden + self._tag(nonce, hidden, belongs)

    def open(self, sealed: bytes, *belongs: str) -> str:
        """The text; ControllerError where it was not sealed with this key for this."""
        version, nonce, hidden, tag = sealed[:1], sealed[1 : 1 + NONCE], sealed[1 + NONCE : -TAG], sealed[-TAG:]
        if version != VERSION or not hmac.compare_digest(tag, self._tag(nonce, hidden, belongs)):
            text = f"the secret {' '.join(belongs)} cannot be read with this controller's key; set it again"
            raise ControllerError(text, code="VAULT_UNREADABLE", status=500)
        padded = self._mask(hidden, nonce)
        return padded[8 : 8 + int.from_bytes(padded[:8], "big")].decode("utf-8", "surrogatepass")

    def _mask(self, text: bytes, nonce: bytes) -> bytes:
        stream = shake_256(b"penstock vault" + self._hiding + nonce).digest(len(text))
        return (int.from_bytes(text, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(text), "big")

    def _tag(self, nonce: bytes, hidden: bytes, belongs: tuple[str, ...]) -> bytes:
        parts = [VERSION, nonce, *(name.encode() for name in belongs), hidden]
        framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.new(self._signing, framed, sha256).digest()


def vault_key(home: Home) -> bytes:
    """The key of this controller: from the operating system's keyring where `use_keyring` put it, else from a file; made once."""
    if not (home.path / MARK).exists():
        return home.secret(FILE)
    kept = _keyring().get_password(SERVICE, str(home.path.resolve()))
    if not kept:
        text = f"the key of the secrets in {home.path} is in the operating system's keyring, which does not give it out"
        raise ConfigError(f"{text}; unlock the keyring, or remove {home.path / MARK} and set all secrets again")
    return kept.encode()


def use_keyring(home: Home) -> None:
    """Move the key from its file to the operating system's keyring; ConfigError where there is none that keeps it."""
    key, ring, name = vault_key(home).decode(), _keyring(), str(home.path.resolve())
    try:
        ring.set_password(SERVICE, name, key)
        kept = ring.get_password(SERVICE, name)
    except Exception as cause:
        raise ConfigError(f"the operating system's keyring refused the key: {cause}; the key stays in its file") from cause
    if kept != key:
        raise ConfigError("the operating system's keyring did not keep the key; it stays in its file")
    (home.path / MARK).touch(mode=0o600)
    with suppress(FileNotFoundError):
        (home.path / FILE).unlink()


def _keyring() -> Any:
    try:
        return importlib.import_module("keyring")
    except ImportError as cause:
        raise ConfigError("the operating system's keyring needs a package: pip install keyring") from cause
