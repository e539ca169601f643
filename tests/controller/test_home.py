"""The controller's folder is its owner's, and its words are made once."""

import asyncio
import multiprocessing
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock_controller.api.app import make_app
from penstock_controller.api.links import SignedLinks
from penstock_controller.context import ControllerLimits, open_controller
from penstock_controller.home import KEY_FILES, Home, default_home


def test_the_folder_and_its_words_are_for_the_owner_alone(tmp_path: Path) -> None:
    home = Home(tmp_path / "deep" / "home").create()
    assert home.path.stat().st_mode & 0o777 == 0o700
    assert home.token() == home.token() and len(home.token()) > 30
    assert (home.path / "token").stat().st_mode & 0o777 == 0o600
    assert home.key("links") != home.key("token")
    assert home.create() == home and not list(home.path.glob(".*"))


def test_parallel_processes_get_the_same_token(tmp_path: Path) -> None:
    home = Home(tmp_path / "home").create()
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        assert len(set(pool.map(home.key, ["token"] * 40))) == 1


def test_unwritable_home_has_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="PENSTOCK_HOME"):
        Home(tmp_path / "file" / "home").create()


def test_the_place_is_chosen_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    assert default_home() == Home(tmp_path)
    monkeypatch.delenv("PENSTOCK_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert default_home() == Home(tmp_path / "state" / "penstock")


@pytest.mark.parametrize("name", KEY_FILES)
@pytest.mark.parametrize("content", [b"", b"half of a key"])
def test_a_controller_does_not_start_with_a_damaged_key(tmp_path: Path, name: str, content: bytes) -> None:
    home = Home(tmp_path / "home").create()
    (home.path / name).write_bytes(content)

    async def start() -> None:
        async with open_controller(home, ControllerLimits()) as controller:
            make_app(controller, "http://127.0.0.1:1")

    with pytest.raises(ConfigError, match=rf"{name} is damaged.*remove it and {KEY_FILES[name][:15]}"):
        asyncio.run(start())
    assert (home.path / name).read_bytes() == content


@pytest.mark.parametrize("key", [b"", b"short", b"\0" * 32])
def test_links_are_not_signed_with_a_key_that_anybody_has(key: bytes) -> None:
    with pytest.raises(ConfigError, match="damaged"):
        SignedLinks(key, "http://127.0.0.1:1")
