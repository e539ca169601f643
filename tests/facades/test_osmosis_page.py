"""What `docs/osmosis.md` says is so: paths that it lists can be imported, its sample loads."""

import importlib
import re
from pathlib import Path

from penstock.config import load_config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "osmosis.md").read_text()


def test_every_path_that_the_page_lists_can_be_imported():
    paths = re.findall(r"^\| `(osmosis_ai[\w.]+)`", PAGE, re.MULTILINE)
    more = re.search(r"`osmosis_ai\.rollout\.\{([^}]+)\}`", PAGE)
    assert len(paths) > 4 and more
    for path in [*paths, *(f"osmosis_ai.rollout.{name.strip()}" for name in more[1].split(","))]:
        importlib.import_module(path)


def test_pages_settings_are_a_run_that_loads(tmp_path):
    (settings,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "train.toml").write_text(settings)
    config = load_config(tmp_path / "train.toml")
    assert (config.agent.entry.name, config.workflow) == ("main.py", {"max_iterations": 4})
