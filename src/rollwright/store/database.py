"""The database under an experience store: connections, transactions, identity."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollwright.errors import ConfigError, StoreError

try:
    import sqlalchemy
    import sqlalchemy.exc
except ModuleNotFoundError:
    raise ConfigError(
        "the experience store needs SQLAlchemy, which is not installed: pip install 'rollwright[store]'."
    ) from None

from sqlalchemy import Connection, Engine, bindparam, create_engine, event, func, insert, select, text, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError
from sqlalchemy.pool import StaticPool

from rollwright.store.schema import SCHEMA_VERSION, counters, facts, metadata

#: Seconds that a writer waits for others.
BUSY_SECONDS = 60.0
_COUNT = (
    update(counters)
    .where(counters.c.name == bindparam("counter"))
    .values(value=counters.c.value + bindparam("by"))
    .returning(counters.c.value)
)
_COUNTERS = ("next_ordinal", "sequence", "batch", "epoch")
_READ_ONLY = "rollwright_read_only"
_CREATION_LOCK = 0x524F4C4C  # PostgreSQL advisory lock that serialises the creation of the tables


class Database:
    """A SQLAlchemy engine with two kinds of transactions: readers that see one state, and writers one after another.

    Args:
        url: ``sqlite:///path.db``, ``sqlite://`` (in memory, this process only) or another SQLAlchemy URL.
        run: identity of the run that owns the store; None to open whatever is there.
        create: make the tables where they are missing.

    Raises:
        StoreError: the store is missing, damaged, of another version or of another run.
    """

    def __init__(self, url: str, run: str | None, create: bool) -> None:
        self.engine = _engine(url)
        self.name = self.engine.url.render_as_string(hide_password=True)
        self.dialect = self.engine.dialect.name
        self._memory_lock = threading.RLock() if isinstance(self.engine.pool, StaticPool) else contextlib.nullcontext()
        # The threads of a process wait for each other here, without a limit, and not in the database, which gives up.
        self._writers = threading.RLock()
        path = self.engine.url.database if self.dialect == "sqlite" else None
        if path and path != ":memory:":
            if not create and not Path(path).exists():
                raise StoreError(f"{self.name} does not exist: check store.url, or start the explorer, which creates it.")
            if create:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
        try:
            if create:
                self._create(run)
            self._check(run)
        except StoreError:
            self.close()
            raise
        except (DBAPIError, sqlalchemy.exc.SQLAlchemyError) as error:
            self.close()
            raise StoreError(
                f"{self.name} cannot be used as an experience store ({_cause(error)}): check store.url; if the file is damaged, "
                "restore it from a copy or start a new store."
            ) from error

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that sees one state of the store and changes nothing."""
        with self._memory_lock, self._translated(), self.engine.connect() as connection:
            options: dict[str, Any] = {_READ_ONLY: True}
            if self.dialect == "postgresql":
                options["isolation_level"] = "REPEATABLE READ"
            connection = connection.execution_options(**options)
            with connection.begin():
                yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that no other writer runs beside; it is undone where the block raises."""
        with self._memory_lock, self._writers, self._translated(), self.engine.connect() as connection, connection.begin():
            if self.dialect != "sqlite":  # SQLite's BEGIN IMMEDIATE has done this already
                connection.execute(select(counters.c.value).where(counters.c.name == "epoch").with_for_update())
            yield connection

    def now(self, connection: Connection) -> float:
        """Seconds since 1970 by the one clock that all users of the store share."""
        if self.dialect == "postgresql":
            return float(connection.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())
        return time.time()

    def count(self, connection: Connection, name: str, by: int = 1) -> int:
        """Adds to a counter; returns its value before."""
        return int(connection.execute(_COUNT, {"counter": name, "by": by}).scalar_one()) - by

    def counter(self, connection: Connection, name: str) -> int:
        """A counter's value."""
        return int(connection.execute(select(counters.c.value).where(counters.c.name == name)).scalar_one())

    def fact(self, connection: Connection, name: str) -> str | None:
        """What the store says about itself under a name."""
        return connection.execute(select(facts.c.value).where(facts.c.name == name)).scalar_one_or_none()

    def set_fact(self, connection: Connection, name: str, value: str) -> None:
        """Records a fact, in place of what stood there."""
        connection.execute(
            self.upsert(facts)
            .values(name=name, value=value)
            .on_conflict_do_update(index_elements=["name"], set_={"value": value})
        )

    def upsert(self, table: Any) -> Any:
        """An INSERT that knows ``ON CONFLICT``, of this database's dialect."""
        return (postgresql.insert if self.dialect == "postgresql" else sqlite.insert)(table)

    def flush(self) -> None:
        """Makes what is committed survive a power failure too (SQLite's WAL is written through)."""
        if self.dialect == "sqlite" and isinstance(self._memory_lock, contextlib.nullcontext):
            with self._translated(), self.engine.connect() as connection:
                connection.connection.cursor().execute("PRAGMA wal_checkpoint(PASSIVE)").close()

    def close(self) -> None:
        """Closes all connections."""
        self.engine.dispose()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (OperationalError, sqlalchemy.exc.TimeoutError) as error:
            raise StoreError(
                f"{self.name}: the database refused ({_cause(error)}): check that its disk is not full and that no other program holds it."
            ) from error

    def _create(self, run: str | None) -> None:
        with self.engine.connect() as connection, connection.begin():
            if self.dialect == "postgresql":
                connection.execute(select(func.pg_advisory_xact_lock(_CREATION_LOCK)))
            existing = set(sqlalchemy.inspect(connection).get_table_names())
            if facts.name in existing:
                if run is not None and self.fact(connection, "run") is None:
                    self.set_fact(connection, "run", run)
                return
            ours = existing & set(metadata.tables)
            if ours:
                raise StoreError(
                    f"{self.name} has a table {sorted(ours)[0]!r} that no experience store made: give the store a database of its own."
                )
            metadata.create_all(connection, checkfirst=False)
            connection.execute(insert(counters), [{"name": name, "value": 0} for name in _COUNTERS])
            connection.execute(insert(facts), [{"name": "schema", "value": str(SCHEMA_VERSION)}])
            if run is not None:
                connection.execute(insert(facts), [{"name": "run", "value": run}])

    def _check(self, run: str | None) -> None:
        with self.reading() as connection:
            if facts.name not in sqlalchemy.inspect(connection).get_table_names():
                raise StoreError(f"{self.name} is no experience store: check store.url.")
            schema, owner = self.fact(connection, "schema"), self.fact(connection, "run")
        if schema != str(SCHEMA_VERSION):
            raise StoreError(
                f"{self.name} has schema version {schema}, this installation reads {SCHEMA_VERSION}: export it with the version that wrote it."
            )
        if run is not None and owner != run:
            raise StoreError(
                f"{self.name} belongs to run {owner!r}, not to {run!r}: give this run a store of its own (store.url), or use the config of that run."
            )


def _cause(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error).strip().splitlines()[0]


def _engine(url: str) -> Engine:
    try:
        parsed = sqlalchemy.make_url(url)
        if parsed.get_backend_name() not in ("sqlite", "postgresql"):
            raise ConfigError(
                f"store.url names {parsed.get_backend_name()!r}: SQLite (sqlite:///path.db) and PostgreSQL are supported."
            )
        if parsed.drivername == "postgresql":  # SQLAlchemy's default is psycopg2
            parsed = parsed.set(drivername="postgresql+psycopg")
        if parsed.get_backend_name() == "postgresql":
            return create_engine(parsed, pool_pre_ping=True, pool_timeout=BUSY_SECONDS, isolation_level="READ COMMITTED")
    except (ArgumentError, NoSuchModuleError) as error:
        raise ConfigError(f"store.url is {url!r}, which is no database URL ({error}): write sqlite:///path.db.") from error
    except ModuleNotFoundError as error:
        package = "'rollwright[postgresql]'" if error.name == "psycopg" else error.name
        raise ConfigError(
            f"store.url names the driver {error.name!r}, which is not installed: pip install {package}."
        ) from error
    in_memory = parsed.database in (None, "", ":memory:")
    arguments: dict[str, Any] = {"connect_args": {"timeout": BUSY_SECONDS, "check_same_thread": False}}
    if in_memory:
        arguments["poolclass"] = StaticPool
    else:
        arguments["pool_timeout"] = BUSY_SECONDS
    engine = create_engine(parsed, **arguments)

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # we begin transactions ourselves
        if in_memory:
            return
        cursor = connection.cursor()
        _enter_wal(cursor)
        cursor.execute("PRAGMA synchronous=NORMAL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        read_only = connection.get_execution_options().get(_READ_ONLY)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


def _enter_wal(cursor: Any) -> None:
    """Switches the file to write-ahead logging; SQLite does not wait for others when it switches, so we do."""
    import sqlite3

    limit = time.monotonic() + BUSY_SECONDS
    while cursor.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        try:
            cursor.execute("PRAGMA journal_mode=WAL").fetchone()
        except sqlite3.OperationalError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.01)
