"""A pool over SQL: the statements that SQLite and PostgreSQL share."""
