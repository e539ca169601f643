"""Export formats of a pool, and those that can be read back. Each name stands for a function of a path; see `transfer`."""

from penstock.registry import Registry

EXPORTS = Registry(
    "export format",
    {
        "jsonl": "penstock.pool.export.jsonl:open_export",
        "parquet": "penstock.pool.export.parquet:open_export",
        "atif": "penstock.pool.export.atif:open_export",
    },
)

IMPORTS = Registry(
    "import format",
    {
        "jsonl": "penstock.pool.export.jsonl:read_export",
        "parquet": "penstock.pool.export.parquet:read_export",
    },
)
