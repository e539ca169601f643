"""The public surface equals the recorded one; `surface.py` records an intended change."""

import importlib
import json

import pytest
import surface


@pytest.mark.parametrize("part", surface.PARTS)
def test_public_surface_is_unchanged(part):
    recorded = json.loads((surface.GOLDEN / f"{part}.json").read_text())
    assert surface.PARTS[part]() == recorded


def test_documented_imports_still_work():
    documented = json.loads((surface.GOLDEN / "imports.json").read_text())
    missing = [(name, each) for name, names in documented.items() for each in names if not _has(name, each)]
    assert missing == []


def _has(name, attribute):
    return hasattr(importlib.import_module(name), attribute)


@pytest.mark.slow
def test_run_folder_is_unchanged():
    assert surface.run_folder() == json.loads((surface.GOLDEN / "run_folder.json").read_text())
