"""JSON objects that carry their own checksum."""

import json

import pytest

from penstock.system.files import add_checksum, remove_checksum

TEXT = b'{"step":3,"reward":0.5}'


def test_the_checksum_is_the_last_entry_and_comes_off_again():
    sealed = add_checksum(TEXT, "run")
    assert list(json.loads(sealed)) == ["step", "reward", "checksum"]
    assert remove_checksum(sealed, "run") == remove_checksum(sealed + b"\n", "run") == TEXT


def test_text_without_a_checksum_is_returned_as_it_is():
    assert remove_checksum(TEXT, "run") == TEXT


def test_changed_byte_or_another_key_is_reported():
    sealed = add_checksum(TEXT, "run")
    for text, key in ((sealed.replace(b"0.5", b"0.7"), "run"), (sealed, "other")):
        with pytest.raises(ValueError, match="checksum"):
            remove_checksum(text, key)
