"""Models: references, download, conversion, cache, and the tiny policy of the tests."""

from penstock.models.cache import ModelFolder, Progress, kept
from penstock.models.pull import cached, check_reachable, resolve

__all__ = ["ModelFolder", "Progress", "cached", "check_reachable", "kept", "resolve"]
