"""The records that a flow submits, and a queue for programs that move them by themselves. Runs use Penstock's durable pool."""

from typing import TYPE_CHECKING

from penstock_compat.lazy import lazy_attributes

if TYPE_CHECKING:
    from claw_r1.data_pool.data_model import Step
    from claw_r1.data_pool.data_pool import DataPool, DataPoolConfig

__all__ = ["DataPool", "DataPoolConfig", "Step"]

_EXPORT = "sequences are packed by penstock.train; `penstock pool export` writes them for other trainers"

__getattr__ = lazy_attributes(
    __name__,
    {"Step": f"{__name__}.data_model"} | dict.fromkeys(("DataPool", "DataPoolConfig"), f"{__name__}.data_pool"),
    {
        "TrainingBackend": _EXPORT,
        "TreeVerlBackend": _EXPORT,
        "VerlBackend": _EXPORT,
    },
)
