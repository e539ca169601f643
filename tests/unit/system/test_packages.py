"""The lines that say what to install name packages as they are published."""

import re
from importlib import metadata
from pathlib import Path

import pytest

from penstock.system.packages import install_command

ROOT = Path(__file__).parents[3]
PLACES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("src/penstock/**/*.py"), ROOT / "facades/README.md"]


def test_an_extra_is_installed_by_the_names_of_its_packages():
    assert install_command("postgres") == "pip install 'psycopg[binary]>=3.2'"
    assert install_command("strands").split() == ["pip", "install", "'openai>=2'", "'strands-agents>=1.50'"]


def test_without_our_metadata_a_checkout_is_named(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert install_command("ray") == "pip install '.[ray]' in a checkout of penstock"


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_no_line_installs_penstock_by_a_name_that_another_project_has(place):
    assert re.findall(r"pip install[^\n`]*[\s'\"]penstock\b.*", place.read_text()) == []
