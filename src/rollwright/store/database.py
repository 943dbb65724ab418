"""The database of an experience store: its tables, connections, transactions and identity.

A **group** (all rows of one task) is the unit that is completed, sampled, used and released; an **experience** is one of its rows.
**uses** records which batch consumed a group and under which checkpoint of the trainer. A use without a checkpoint is undone
when the trainer restarts.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rollwright.errors import ConfigError, StoreError

try:
    import sqlalchemy as sa
except ModuleNotFoundError:
    raise ConfigError(
        "the experience store needs SQLAlchemy, which is not installed: pip install 'rollwright[store]'."
    ) from None

from sqlalchemy import event, exc
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.pool import StaticPool

SCHEMA_VERSION = 1

#: States of a task.
CLAIMED, FINISHED, RELEASED = 0, 1, 2
#: States of a group.
OPEN, READY, DROPPED = 0, 1, 2

#: SQLite assigns ids only in columns of type INTEGER.
_Id = sa.BigInteger().with_variant(sa.Integer, "sqlite")

metadata = sa.MetaData()

#: Properties of the store: schema version, run, number of tasks.
facts = sa.Table(
    "facts", metadata, sa.Column("name", sa.String(64), primary_key=True), sa.Column("value", sa.Text, nullable=False)
)

#: Counters; only ``recover`` lowers one (``batch``). On PostgreSQL, every writing transaction locks one first, which serialises writers.
counters = sa.Table(
    "counters", metadata, sa.Column("name", sa.String(64), primary_key=True), sa.Column("value", sa.BigInteger, nullable=False)
)

tasks = sa.Table(
    "tasks",
    metadata,
    sa.Column("ordinal", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("state", sa.SmallInteger, nullable=False),
    sa.Column("owner", sa.String(255), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),  # counts claims; an older attempt can no longer finish the task
    sa.Column("lease_until", sa.Float(53), nullable=False),  # seconds since 1970, by the database's clock
    sa.Index("tasks_by_state", "state", "lease_until"),
    sa.Index("tasks_by_owner", "owner", "state"),
)

groups = sa.Table(
    "groups",
    metadata,
    sa.Column("id", _Id, primary_key=True),
    sa.Column("name", sa.String(255), nullable=False, unique=True),
    sa.Column("ordinal", sa.BigInteger),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("state", sa.SmallInteger, nullable=False),
    sa.Column("sequence", sa.BigInteger),  # order of completion
    sa.Column("version", sa.BigInteger, nullable=False),  # of the oldest sampled token
    sa.Column("reward", sa.Float(53)),  # mean of its rows
    sa.Column("rows", sa.Integer, nullable=False),
    sa.Column("uses", sa.Integer, nullable=False),
    sa.Column("available_at", sa.Float(53), nullable=False),
    sa.Column("dropped_by", sa.String(255)),
    sa.Column("drop_checkpoint", sa.BigInteger),  # None while the drop is not committed
    sa.Index("groups_by_age", "state", "uses", "sequence"),
    sa.Index("groups_by_version", "state", "uses", "version", "sequence"),
    sa.Index("groups_by_ordinal", "ordinal"),
)

experiences = sa.Table(
    "experiences",
    metadata,
    sa.Column("id", _Id, primary_key=True),
    sa.Column("group_id", _Id, sa.ForeignKey("groups.id"), nullable=False),
    sa.Column("sample", sa.Integer, nullable=False),  # index of the sample in its group
    sa.Column("part", sa.Integer, nullable=False),  # index of the row in its sample
    sa.Column("eid", sa.String(255), nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("reward", sa.Float(53)),
    sa.Column("data", sa.LargeBinary, nullable=False),  # Experience.serialize()
    sa.UniqueConstraint("group_id", "sample", "part", name="experience_once"),
)

uses = sa.Table(
    "uses",
    metadata,
    sa.Column("id", _Id, primary_key=True),
    sa.Column("group_id", _Id, sa.ForeignKey("groups.id"), nullable=False),
    sa.Column("batch", sa.BigInteger, nullable=False),
    sa.Column("checkpoint", sa.BigInteger),  # None until the trainer's checkpoint commits it
    sa.Column("published", sa.Boolean, nullable=False),  # weights trained on it are published: it is no longer in training
    sa.Index("uses_by_group", "group_id"),
    sa.Index("uses_by_checkpoint", "checkpoint"),
    sa.Index("uses_by_published", "published"),
)

checkpoints = sa.Table(
    "checkpoints",
    metadata,
    sa.Column("sequence", _Id, primary_key=True),
    sa.Column("name", sa.String(255), nullable=False, unique=True),
    sa.Column("version", sa.BigInteger),
    sa.Column("batch", sa.BigInteger, nullable=False),
)

versions = sa.Table(
    "versions",
    metadata,
    sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("path", sa.Text, nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
)

drops = sa.Table(
    "drops", metadata, sa.Column("reason", sa.String(255), primary_key=True), sa.Column("rows", sa.BigInteger, nullable=False)
)

#: Longest wait of a writer for other processes, in seconds.
BUSY_SECONDS = 60.0
_SHORTEST_POLL, _LONGEST_POLL = 0.01, 0.25
#: Built once: SQLAlchemy takes longer to build a statement than SQLite takes to run it.
_COUNT = (
    sa.update(counters)
    .where(counters.c.name == sa.bindparam("counter"))
    .values(value=counters.c.value + sa.bindparam("by"))
    .returning(counters.c.value)
)
#: Modules of the supported databases, by the name of their dialect.
DIALECTS = {"sqlite": sqlite, "postgresql": postgresql}
_READ_ONLY = "rollwright_read_only"
_CREATION_LOCK = 0x524F4C4C  # PostgreSQL advisory lock that serialises the creation of the tables


class Database:
    """A SQLAlchemy engine with two kinds of transactions: readers see a consistent snapshot, and writers run one at a time.

    Args:
        url: ``sqlite:///path.db``, ``sqlite://`` (in memory, this process only) or ``postgresql://…``.
        run: identity of the run that owns the store. If None, the store of any run can be opened.
        create: create the tables if they are missing.

    Raises:
        StoreError: the store is missing or damaged, or belongs to another version or run.
        ConfigError: the URL or its driver is not usable.
    """

    def __init__(self, url: str, *, run: str | None = None, create: bool = True) -> None:
        self.engine = _engine(url)
        self.name = self.engine.url.render_as_string(hide_password=True)
        self.dialect = self.engine.dialect.name
        self._in_memory = isinstance(self.engine.pool, StaticPool)
        self._memory_lock = threading.RLock() if self._in_memory else contextlib.nullcontext()
        # Threads of one process wait for each other here, without a time limit. If they waited in the database, they would time out.
        self._writers = threading.RLock()
        if self.dialect == "sqlite" and not self._in_memory:
            path = Path(self.engine.url.database or "")
            if create:
                path.parent.mkdir(parents=True, exist_ok=True)
            elif not path.exists():
                raise StoreError(f"{self.name} does not exist: check store.url, or start the explorer, which creates it.")
        try:
            if create:
                self._create(run)
            self._check(run)
        except StoreError:
            self.close()
            raise
        except exc.SQLAlchemyError as error:
            self.close()
            raise StoreError(
                f"{self.name} cannot be used as an experience store ({_cause(error)}): check store.url; if the file is damaged, "
                "restore it from a copy or start a new store."
            ) from error

    @contextlib.contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """Open a transaction for reading a consistent snapshot of the store."""
        options = {"isolation_level": "REPEATABLE READ"} if self.dialect == "postgresql" else {}
        with self._memory_lock, self._translated(), self.engine.connect() as connection:
            connection = connection.execution_options(**{_READ_ONLY: True}, **options)
            with connection.begin():
                yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """Open a transaction that excludes other writers; it is rolled back if the block raises."""
        with self._memory_lock, self._writers, self._translated(), self.engine.begin() as connection:
            if self.dialect != "sqlite":  # SQLite's BEGIN IMMEDIATE has done this already
                connection.execute(sa.select(counters.c.value).where(counters.c.name == "epoch").with_for_update())
            yield connection

    def flush(self) -> None:
        """Make committed transactions survive a power failure (writes SQLite's WAL to the database file)."""
        if self.dialect == "sqlite" and not self._in_memory:
            with self._translated(), self.engine.connect() as connection:
                connection.connection.cursor().execute("PRAGMA wal_checkpoint(PASSIVE)").close()

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (exc.OperationalError, exc.TimeoutError) as error:
            raise StoreError(
                f"{self.name}: the database refused ({_cause(error)}): check that its disk is not full and that no other program holds it."
            ) from error
        except exc.DatabaseError as error:
            if type(error) is not exc.DatabaseError:
                raise
            raise StoreError(
                f"{self.name} is damaged ({_cause(error)}): restore it from a copy, or start a new store (store.url). rollwright check lists "
                "what can be read."
            ) from error

    def _create(self, run: str | None) -> None:
        with self.engine.begin() as connection:
            if self.dialect == "postgresql":
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATION_LOCK)))
            existing = set(sa.inspect(connection).get_table_names())
            if facts.name not in existing:
                if ours := sorted(existing & set(metadata.tables)):
                    raise StoreError(
                        f"{self.name} has a table {ours[0]!r} that no experience store made: give the store a database of its own."
                    )
                metadata.create_all(connection, checkfirst=False)
                connection.execute(
                    sa.insert(counters), [{"name": name, "value": 0} for name in ("next_ordinal", "sequence", "batch", "epoch")]
                )
                connection.execute(sa.insert(facts), [{"name": "schema", "value": str(SCHEMA_VERSION)}])
            if run is not None and fact(connection, "run") is None:
                set_fact(connection, "run", run)

    def _check(self, run: str | None) -> None:
        with self.reading() as connection:
            if facts.name not in sa.inspect(connection).get_table_names():
                raise StoreError(f"{self.name} is no experience store: check store.url.")
            schema, owner = fact(connection, "schema"), fact(connection, "run")
        if schema != str(SCHEMA_VERSION):
            raise StoreError(
                f"{self.name} has schema version {schema}, this installation reads {SCHEMA_VERSION}: export it with the version that wrote it."
            )
        if run is not None and owner != run:
            raise StoreError(
                f"{self.name} belongs to run {owner!r}, not to {run!r}: give this run a store of its own (store.url), or use the config of that run."
            )


def now(connection: sa.Connection) -> float:
    """Return seconds since 1970 by the clock that all users of the store share."""
    if connection.dialect.name == "postgresql":
        return float(connection.execute(sa.text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())
    return time.time()


def add_to(connection: sa.Connection, counter: str, by: int = 1) -> int:
    """Add to a counter and return its previous value."""
    return int(connection.execute(_COUNT, {"counter": counter, "by": by}).scalar_one()) - by


def counter_value(connection: sa.Connection, name: str) -> int:
    """Return the value of a counter."""
    return int(connection.execute(sa.select(counters.c.value).where(counters.c.name == name)).scalar_one())


def fact(connection: sa.Connection, name: str) -> str | None:
    """Return a property of the store, or None if it is not set."""
    return connection.execute(sa.select(facts.c.value).where(facts.c.name == name)).scalar_one_or_none()


def set_fact(connection: sa.Connection, name: str, value: str) -> None:
    """Set a property of the store."""
    statement = upsert(connection, facts).values(name=name, value=value)
    connection.execute(statement.on_conflict_do_update(index_elements=["name"], set_={"value": value}))


def upsert(connection: sa.Connection, table: Any) -> Any:
    """Return an INSERT statement of the connection's dialect, which supports ``ON CONFLICT``."""
    return DIALECTS[connection.dialect.name].insert(table)


def poll(look: Callable[[], tuple[Any, bool]], timeout: float | None, cancelled: Callable[[], bool]) -> Any:
    """Poll a store for changes by other processes. Returns the last result of ``look``.

    Args:
        look: returns a result, and True if no other result can follow. A truthy result ends the wait.
        timeout: longest wait in seconds; unlimited if None.
        cancelled: returns True to end the wait.
    """
    limit = None if timeout is None else time.monotonic() + timeout
    pause = _SHORTEST_POLL
    while True:
        found, ended = look()
        if found or ended or cancelled() or (limit is not None and time.monotonic() >= limit):
            return found
        time.sleep(pause if limit is None else max(0.0, min(pause, limit - time.monotonic())))
        pause = min(_LONGEST_POLL, pause * 1.5)


def count_rows(connection: sa.Connection, table: sa.Table, *conditions: Any) -> int:
    """Count the rows of a table that meet all conditions."""
    return connection.scalars(sa.select(sa.func.count()).select_from(table).where(*conditions)).one()


def _cause(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error).strip().splitlines()[0]


def _engine(url: str) -> sa.Engine:
    try:
        parsed = sa.make_url(url)
        if parsed.get_backend_name() not in ("sqlite", "postgresql"):
            raise ConfigError(
                f"store.url names {parsed.get_backend_name()!r}: SQLite (sqlite:///path.db) and PostgreSQL are supported."
            )
        if parsed.drivername == "postgresql":  # SQLAlchemy's default is psycopg2
            parsed = parsed.set(drivername="postgresql+psycopg")
        if parsed.get_backend_name() == "postgresql":
            return sa.create_engine(parsed, pool_pre_ping=True, pool_timeout=BUSY_SECONDS, isolation_level="READ COMMITTED")
    except (exc.ArgumentError, exc.NoSuchModuleError) as error:
        raise ConfigError(f"store.url is {url!r}, which is no database URL ({error}): write sqlite:///path.db.") from error
    except ModuleNotFoundError as error:
        package = "'rollwright[postgresql]'" if error.name == "psycopg" else error.name
        raise ConfigError(
            f"store.url names the driver {error.name!r}, which is not installed: pip install {package}."
        ) from error
    in_memory = parsed.database in (None, "", ":memory:")
    pooling: dict[str, Any] = {"poolclass": StaticPool} if in_memory else {"pool_timeout": BUSY_SECONDS}
    engine = sa.create_engine(parsed, connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False}, **pooling)

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # the listener below begins transactions
        if not in_memory:
            _enter_wal(connection)
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        read_only = connection.get_execution_options().get(_READ_ONLY)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


def _enter_wal(connection: sqlite3.Connection) -> None:
    """Switch the file to write-ahead logging. SQLite does not wait for other processes when it switches, so this function retries."""

    def switch() -> tuple[bool, bool]:
        with contextlib.suppress(sqlite3.OperationalError):
            connection.execute("PRAGMA journal_mode=WAL").fetchone()
        return connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal", False

    if not poll(switch, BUSY_SECONDS, lambda: False):
        raise sqlite3.OperationalError("database is locked")
