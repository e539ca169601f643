"""Models: references, download, conversion, cache, and the tiny policy of the tests."""

from penstock.models.cache import ModelFolder, PullProgress, list_cached
from penstock.models.pull import check_reachable, find_cached, resolve

__all__ = ["ModelFolder", "PullProgress", "check_reachable", "find_cached", "list_cached", "resolve"]
