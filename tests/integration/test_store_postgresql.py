"""The experience store over PostgreSQL: the tests of the store, on a real server."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from store_databases import new_postgresql_database

pytest.importorskip("sqlalchemy")

from rollwright.errors import ConfigError, StoreError
from rollwright.store import ExperienceStore

UNIT_TESTS = Path(__file__).resolve().parents[1] / "unit" / "store"

pytestmark = pytest.mark.slow


def test_what_holds_over_sqlite_holds_over_postgresql(postgresql):
    files = [UNIT_TESTS / "test_store.py", UNIT_TESTS / "test_store_model.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)],
        env={**os.environ, "ROLLWRIGHT_TEST_POSTGRESQL": postgresql},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_stores_opened_at_the_same_moment_make_the_tables_once(postgresql):
    url = new_postgresql_database(postgresql)

    def open_and_append(number: int) -> None:
        with ExperienceStore(url, run="together") as store:
            store.tasks.declare(4)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(open_and_append, range(8)))
    with ExperienceStore(url, run="together", create=False) as store:
        assert store.status().declared_tasks == 4
    with pytest.raises(StoreError, match="belongs to run 'together'"):
        ExperienceStore(url, run="another")


def test_a_url_without_a_driver_is_that_of_psycopg(postgresql):
    with ExperienceStore(new_postgresql_database(postgresql).replace("+psycopg", "")) as store:
        assert store.status().experiences == 0


def test_a_server_that_is_not_there_and_a_driver_that_is_not_installed_are_told():
    with pytest.raises(StoreError, match="cannot be used as an experience store") as refused:
        ExperienceStore("postgresql://nobody:secret@127.0.0.1:9/none")
    assert "secret" not in str(refused.value)
    with pytest.raises(ConfigError, match="'pg8000', which is not installed: pip install pg8000"):
        ExperienceStore("postgresql+pg8000://nobody@127.0.0.1:9/none")
