"""The databases that the store's tests run on: SQLite's, or where a PostgreSQL server is named, new ones of it."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

#: SQLAlchemy URL of a server where schemas may be made; tests/integration/test_store_postgresql.py sets it.
SERVER = os.environ.get("ROLLWRIGHT_TEST_POSTGRESQL")


def new_database(path: Path | None = None) -> str:
    """URL of an empty database; SQLite's is in memory where no path is given."""
    if SERVER is not None:
        return new_postgresql_database(SERVER)
    return "sqlite://" if path is None else f"sqlite:///{path}"


def new_postgresql_database(server: str) -> str:
    """Make an empty schema on a PostgreSQL server, which takes a moment where a database takes many; returns its URL."""
    import sqlalchemy

    name = f"store_{uuid.uuid4().hex[:12]}"
    engine = sqlalchemy.create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text(f"CREATE SCHEMA {name}"))
    engine.dispose()
    url = sqlalchemy.make_url(server).update_query_dict({"options": f"-csearch_path={name}"})
    return url.render_as_string(hide_password=False)
