"""The controller's folder is its owner's, and its words are made once."""

import multiprocessing
from pathlib import Path

import pytest

from penstock.controller.home import Home, default_home
from penstock.errors import ConfigError


def test_the_folder_and_its_words_are_for_the_owner_alone(tmp_path: Path) -> None:
    home = Home(tmp_path / "deep" / "home").create()
    assert home.path.stat().st_mode & 0o777 == 0o700
    assert home.token() == home.token() and len(home.token()) > 30
    assert (home.path / "token").stat().st_mode & 0o777 == 0o600
    assert home.secret("other") != home.secret("token")
    assert home.create() == home and not list(home.path.glob(".*"))


def test_processes_that_ask_at_once_are_told_the_same_word(tmp_path: Path) -> None:
    home = Home(tmp_path / "home").create()
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        assert len(set(pool.map(home.secret, ["token"] * 40))) == 1


def test_a_place_that_cannot_be_made_is_told_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be made.*set PENSTOCK_HOME"):
        Home(tmp_path / "file" / "home").create()


def test_the_place_is_chosen_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    assert default_home() == Home(tmp_path)
    monkeypatch.delenv("PENSTOCK_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert default_home() == Home(tmp_path / "state" / "penstock")
