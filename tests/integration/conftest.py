"""Servers that several integration tests use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from postgresql_server import postgresql_programs, postgresql_server


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """URL of a PostgreSQL server of the tests' own, in a temporary directory."""
    pytest.importorskip("psycopg")
    if postgresql_programs() is None:
        pytest.skip("no PostgreSQL server is installed (Debian: postgresql)")
    with postgresql_server() as url:
        yield url
