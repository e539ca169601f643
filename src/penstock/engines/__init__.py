"""Engines: token ids in; ids, log-probabilities and versions out. Each name opens one with `open(folder, name, section)`."""

from penstock.registry import Registry

ENGINES = Registry("engine", {"embedded": "penstock.engines.embedded:open_engine"})
