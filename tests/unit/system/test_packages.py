"""The lines that say what to install name packages as they are published."""

from importlib import metadata

from penstock.system.packages import install_command


def test_an_extra_is_installed_by_the_names_of_its_packages():
    assert install_command("postgres") == "pip install 'psycopg[binary]>=3.2'"
    assert install_command("strands").split() == ["pip", "install", "'openai>=2'", "'strands-agents>=1.50'"]


def test_without_our_metadata_a_checkout_is_named(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert install_command("ray") == "pip install '.[ray]' in the checkout"
