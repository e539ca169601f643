"""docs/scale.md: its example is a file that can be read, and it names every key and template with its default."""

import re
import tomllib
from pathlib import Path

from penstock.cli.scaffold import TEMPLATES
from penstock_controller.experiment import EvalFile, TrainFile, read_experiment

PAGE = (Path(__file__).parents[3] / "docs/scale.md").read_text().partition("## Workspaces")[2]


def test_the_example_is_an_experiment_file():
    [text] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    read = read_experiment(tomllib.loads(text), "eval", "the page")
    assert (read.secrets, read.warnings) == (("SEARCH_KEY",), ())


def test_every_key_is_there_with_its_default():
    rows = {line.split("|")[1]: line for line in PAGE.splitlines() if line.startswith("| `") and line.count("|") == 4}
    for file in (EvalFile, TrainFile):
        for name, table in file.model_fields.items():
            for key, field in getattr(table.annotation, "model_fields", {}).items():
                [row] = [row for keys, row in rows.items() if f"`{name}.{key}`" in keys or f"`{key}`" in keys]
                if not field.is_required() and field.default not in (None, []) and field.default_factory is None:
                    assert f"`{field.default}`" in row, row


def test_every_template_is_there():
    assert all(f"`{name}`" in PAGE for name in TEMPLATES)
