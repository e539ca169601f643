"""The records that a flow submits. They go to Penstock's pool, which is durable and not an actor."""

from typing import TYPE_CHECKING

from claw_r1._names import lazy_attributes

if TYPE_CHECKING:
    from claw_r1.data_pool.data_model import Step

__all__ = ["Step"]

_POOL = "the pool is Penstock's own; read it with `penstock pool` or the gateway's GET /api/stats, /api/steps, /api/trajectories"
_EXPORT = "sequences are packed by penstock.train; `penstock pool export` writes them for other trainers"

__getattr__ = lazy_attributes(
    __name__,
    {"Step": f"{__name__}.data_model"},
    {
        "DataPool": _POOL,
        "DataPoolConfig": _POOL,
        "TrainingBackend": _EXPORT,
        "TreeVerlBackend": _EXPORT,
        "VerlBackend": _EXPORT,
    },
)
