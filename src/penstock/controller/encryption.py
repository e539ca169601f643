"""Encryption of the vault's secrets, and the key for it.

A secret is encrypted with AES-256-GCM of the `cryptography` library. The cipher's key is derived from the vault's key with
HKDF-SHA256; the nonce is 12 random bytes, new for each encryption. Scope and name are authenticated with the ciphertext: one
that was changed, or moved to another name, is refused. Texts are padded to a multiple of 64 bytes: only that length shows.

This protects secrets in a database, a backup or a log that others can read. It does not protect them from whoever can read the
key (a file of mode 0600 beside the database, or an entry in the operating system's keyring) or this process's memory.
"""

import hmac
import importlib
import secrets
from contextlib import suppress
from hashlib import sha256, shake_256
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from penstock.controller.home import Home
from penstock.errors import ConfigError, ControllerError
from penstock.system.files import check_key

VERSION, VERSION_1 = b"\x02", b"\x01"
"""First byte of a ciphertext: of `SecretCipher`, and of the older format that `decrypt_version_1` reads."""
NONCE_BYTES, TAG_BYTES, PADDING_BYTES = 12, 16, 64
KEY_FILE, KEYRING_MARKER = "vault.key", "vault.keyring"
KEYRING_SERVICE = "penstock controller"


def vault_key(home: Home) -> bytes:
    """Returns the vault's key: from the keyring if `use_keyring` moved it there, else from its file; generated on first use."""
    if not (home.path / KEYRING_MARKER).exists():
        return home.key(KEY_FILE)
    stored = _keyring().get_password(KEYRING_SERVICE, str(home.path.resolve()))
    if not stored:
        text = f"the key of the secrets in {home.path} is in the operating system's keyring, which does not give it out"
        raise ConfigError(f"{text}; unlock the keyring, or remove {home.path / KEYRING_MARKER} and set all secrets again")
    return stored.encode()


def use_keyring(home: Home) -> None:
    """Moves the key from its file to the operating system's keyring; ConfigError if the keyring does not store it."""
    key, ring, name = vault_key(home).decode(), _keyring(), str(home.path.resolve())
    try:
        ring.set_password(KEYRING_SERVICE, name, key)
        stored = ring.get_password(KEYRING_SERVICE, name)
    except Exception as cause:
        raise ConfigError(f"the operating system's keyring refused the key: {cause}; the key stays in its file") from cause
    if stored != key:
        raise ConfigError("the operating system's keyring did not keep the key; it stays in its file")
    (home.path / KEYRING_MARKER).touch(mode=0o600)  # before the file is removed: a kill in between must not lose the key
    with suppress(FileNotFoundError):
        (home.path / KEY_FILE).unlink()


def _keyring() -> Any:
    try:
        return importlib.import_module("keyring")
    except ImportError as cause:
        raise ConfigError("the operating system's keyring needs a package: pip install keyring") from cause


class SecretCipher:
    """Encrypts texts. `context` (scope and name) is authenticated, and must be the same for decryption."""

    def __init__(self, key: bytes) -> None:
        check_key(key, "the vault's key is damaged", "put it back from a backup, or set all secrets again with a new one")
        self._aead = AESGCM(HKDF(algorithm=SHA256(), length=32, salt=None, info=b"penstock vault: AES-256-GCM").derive(key))

    def __repr__(self) -> str:
        return "SecretCipher(…)"

    def encrypt(self, text: str, *context: str) -> bytes:
        """Returns the version, the nonce, and the ciphertext with its tag."""
        plain = text.encode("utf-8", "surrogatepass")
        padded = len(plain).to_bytes(8, "big") + plain
        padded += bytes(-len(padded) % PADDING_BYTES)
        nonce = secrets.token_bytes(NONCE_BYTES)
        return VERSION + nonce + self._aead.encrypt(nonce, padded, _framed(VERSION, *(part.encode() for part in context)))

    def decrypt(self, encrypted: bytes, *context: str) -> str:
        """Returns the text; ControllerError if it was not encrypted with this key and `context`."""
        version, nonce, ciphertext = encrypted[:1], encrypted[1 : 1 + NONCE_BYTES], encrypted[1 + NONCE_BYTES :]
        if version != VERSION or len(ciphertext) < TAG_BYTES:
            raise _unreadable(context)
        try:
            padded = self._aead.decrypt(nonce, ciphertext, _framed(VERSION, *(part.encode() for part in context)))
        except InvalidTag:
            raise _unreadable(context) from None
        return _unpadded(padded)


def decrypt_version_1(key: bytes, encrypted: bytes, *context: str) -> str:
    """Decrypts the version 1 format, which is no longer written; ControllerError if that fails.

    Version, nonce of 32 bytes, padded text XOR a SHAKE-256 keystream, HMAC-SHA256 tag of 32 bytes.
    """
    nonce, hidden, tag = encrypted[1:33], encrypted[33:-32], encrypted[-32:]
    hiding = hmac.digest(key, b"penstock vault: hiding", sha256)
    signing = hmac.digest(key, b"penstock vault: signing", sha256)
    signed = _framed(VERSION_1, nonce, *(part.encode() for part in context), hidden)
    if encrypted[:1] != VERSION_1 or not hmac.compare_digest(tag, hmac.digest(signing, signed, sha256)):
        raise _unreadable(context)
    stream = shake_256(b"penstock vault" + hiding + nonce).digest(len(hidden))
    return _unpadded(bytes(a ^ b for a, b in zip(hidden, stream, strict=True)))


def _framed(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def _unpadded(padded: bytes) -> str:
    return padded[8 : 8 + int.from_bytes(padded[:8], "big")].decode("utf-8", "surrogatepass")


def _unreadable(context: tuple[str, ...]) -> ControllerError:
    text = f"the secret {' '.join(context)} cannot be read with this controller's key; set it again"
    return ControllerError(text, code="VAULT_UNREADABLE", status=500)
