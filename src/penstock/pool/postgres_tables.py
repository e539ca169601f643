"""The PostgreSQL tables, as a numbered list of changes."""

from penstock.errors import PoolError
from penstock.pool.database import Database

MIGRATIONS = [
    (
        # lease_id: the last lease that held the group; oldest: the oldest version on a token that counts, once it is complete;
        # min_size: how many rollouts must have completed before the group is
        """CREATE TABLE groups (id TEXT PRIMARY KEY, channel TEXT NOT NULL, seq BIGINT NOT NULL, state TEXT NOT NULL,
           oldest BIGINT, lease_id TEXT, record BYTEA NOT NULL, crc BIGINT NOT NULL, min_size BIGINT NOT NULL DEFAULT 0)""",
        "CREATE INDEX groups_by_state ON groups (channel, state, seq, id)",
        "CREATE INDEX groups_by_seq ON groups (channel, seq, id)",
        # current: whether it is the last attempt at its place; ended: NULL while it runs
        """CREATE TABLE rollouts (id TEXT PRIMARY KEY, group_id TEXT NOT NULL, place BIGINT NOT NULL, channel TEXT NOT NULL,
           current INTEGER NOT NULL, ended TEXT, oldest BIGINT, message BYTEA NOT NULL, record BYTEA NOT NULL,
           crc BIGINT NOT NULL)""",
        "CREATE INDEX rollouts_by_group ON rollouts (group_id, current, place)",
        """CREATE TABLE nodes (rollout_id TEXT NOT NULL, id BIGINT NOT NULL, record BYTEA NOT NULL, token_ids BYTEA NOT NULL,
           crc BIGINT NOT NULL, PRIMARY KEY (rollout_id, id))""",
        """CREATE TABLE steps (rollout_id TEXT NOT NULL, id BIGINT NOT NULL, record BYTEA NOT NULL, completion_ids BYTEA NOT NULL,
           logprobs BYTEA NOT NULL, full_logprobs BYTEA, versions BYTEA NOT NULL, crc BIGINT NOT NULL,
           PRIMARY KEY (rollout_id, id))""",
        """CREATE TABLE grades (position BIGINT GENERATED ALWAYS AS IDENTITY, rollout_id TEXT NOT NULL, id BYTEA NOT NULL,
           record BYTEA NOT NULL, crc BIGINT NOT NULL, PRIMARY KEY (rollout_id, id))""",
        # id: the step that is marked, -1 for the whole rollout
        """CREATE TABLE marks (rollout_id TEXT NOT NULL, id BIGINT NOT NULL, record BYTEA NOT NULL, crc BIGINT NOT NULL,
           PRIMARY KEY (rollout_id, id))""",
        # what viewers and trainers follow; by: the transaction, since one with an earlier position may be committed later
        """CREATE TABLE changes (position BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, kind TEXT NOT NULL,
           channel TEXT NOT NULL, id TEXT NOT NULL, by XID8 NOT NULL DEFAULT pg_current_xact_id())""",
        # beat: counted up with each renewal
        "CREATE TABLE leases (id TEXT PRIMARY KEY, open INTEGER NOT NULL, beat BIGINT NOT NULL, lease_s DOUBLE PRECISION NOT NULL)",
        "CREATE INDEX leases_open ON leases (id) WHERE open = 1",
        """CREATE TABLE lease_groups (lease_id TEXT NOT NULL, position BIGINT NOT NULL, group_id TEXT NOT NULL,
           PRIMARY KEY (lease_id, position))""",
        """CREATE TABLE ledger (position BIGINT GENERATED ALWAYS AS IDENTITY, group_id TEXT PRIMARY KEY, lease_id TEXT NOT NULL,
           version BIGINT NOT NULL)""",
        # running counts of each writer, so that statistics need not read the tables above
        """CREATE TABLE tally (channel TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, writer TEXT NOT NULL,
           n BIGINT NOT NULL, PRIMARY KEY (channel, kind, name, writer))""",
    ),
    (
        # checksums over what several rows say together; NULL in rows of earlier formats
        "ALTER TABLE groups ADD COLUMN seal BYTEA",
        "ALTER TABLE rollouts ADD COLUMN seal BYTEA",
        "ALTER TABLE ledger ADD COLUMN seal BYTEA",
    ),
]
"""Each entry takes the tables from the format of its index to the next; an entry that was released is never changed."""


def migrate(database: Database, schema: str) -> None:
    """Bring the tables up to date, whole or not at all, and one process at a time."""
    database.begin()
    try:
        database.alone("migration")
        database.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
        database.execute("CREATE TABLE IF NOT EXISTS format (version INTEGER NOT NULL)")
        found = database.execute("SELECT version FROM format").fetchone()
        version: int = found[0] if found else 0
        if version > len(MIGRATIONS):
            raise PoolError(
                f"schema {schema} was written by a newer penstock (format {version}, known {len(MIGRATIONS)}); upgrade penstock"
            )
        for statement in [statement for change in MIGRATIONS[version:] for statement in change]:
            database.execute(statement)
        database.execute("DELETE FROM format")
        database.execute("INSERT INTO format (version) VALUES (?)", (len(MIGRATIONS),))
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise
