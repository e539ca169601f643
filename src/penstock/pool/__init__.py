"""Pools: where steps, grades and leases are kept. Each name stands for a `PoolClass`; calling it opens the pool of a folder."""

from penstock.pool.base import PoolClass
from penstock.registry import Registry

POOLS = Registry(
    "pool",
    {
        "sqlite": "penstock.pool.sqlite:SqlitePool",
        "memory": "penstock.pool.memory:MemoryPool",
        "postgres": "penstock.pool.postgres:PostgresPool",
    },
    base=PoolClass,
)
