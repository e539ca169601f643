"""Pools: where steps, grades and leases are kept. Each name stands for `open_pool(folder, *, url="", clock=…) -> Pool`."""

from penstock.registry import Registry

POOLS = Registry(
    "pool",
    {
        "sqlite": "penstock.pool.sqlite:open_pool",
        "memory": "penstock.pool.memory:open_pool",
        "postgres": "penstock.pool.postgres:open_pool",
    },
)
