"""Opening what answers: an engine with the renderer of its model, or an endpoint, which needs none."""

import asyncio
from pathlib import Path
from typing import NamedTuple

from penstock.chat.renderer import Renderer
from penstock.config import EngineSection
from penstock.engines import ENGINES
from penstock.engines.base import Engine


class Opened(NamedTuple):
    """What a gateway answers with; close the engine after use."""

    engine: Engine
    renderer: Renderer | None
    """None where the engine gives text."""


async def open_engine(section: EngineSection, model: Path, *, name: str, seed: int) -> Opened:
    """Open what `[engine]` names for the model in folder `model`, which an endpoint has no use for."""
    renderer = None if section.relays else await asyncio.to_thread(Renderer.load, model)
    decode = renderer and renderer.tokenizer.decode
    opener = ENGINES.load(section.name)
    return Opened(await asyncio.to_thread(opener, model, name=name, section=section, seed=seed, decode=decode), renderer)
