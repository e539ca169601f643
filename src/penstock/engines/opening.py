"""Opening the engine that `[engine]` names."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.config import EngineSection
from penstock.engines import ENGINES
from penstock.engines.base import Engine
from penstock.engines.checkpoint_files import refuse_damaged_weights


async def open_engine(
    section: EngineSection, model: Path, *, name: str, seed: int, decode: Callable[[Sequence[int]], str] | None
) -> Engine:
    """Opens the engine for the model in folder `model`, which a text endpoint does not read. Close it after use.

    `decode` turns token ids into text, for engines that constrain replies; None for text endpoints.
    """
    if not section.text_only:
        await asyncio.to_thread(refuse_damaged_weights, model)
    opener = ENGINES.load(section.name)
    return await asyncio.to_thread(opener, model, name=name, section=section, seed=seed, decode=decode)
