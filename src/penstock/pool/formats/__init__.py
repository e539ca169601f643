"""What a pool can be written to, and read back from. Each name stands for a function of a path; see `pool/transfer`."""

from penstock.registry import Registry

EXPORTS = Registry(
    "export format",
    {
        "jsonl": "penstock.pool.formats.jsonl:open_export",
        "parquet": "penstock.pool.formats.parquet:open_export",
        "atif": "penstock.pool.formats.atif:open_export",
    },
)

IMPORTS = Registry(
    "import format",
    {
        "jsonl": "penstock.pool.formats.jsonl:read_export",
        "parquet": "penstock.pool.formats.parquet:read_export",
    },
)
