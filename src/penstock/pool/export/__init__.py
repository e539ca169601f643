"""What a pool can be written to, and read back from. Each name stands for a function of a path; see `pool/transfer`."""

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
