"""The tables of an experience store.

A **group** (all rows of one task) is what is completed, sampled, used and released; an **experience** is one of its rows.
Who consumed what, and under which checkpoint of the trainer, stands in **uses**: a use without a checkpoint is undone when
the trainer is restarted.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    UniqueConstraint,
)

SCHEMA_VERSION = 1

#: States of a task.
CLAIMED, FINISHED, RELEASED = 0, 1, 2
#: States of a group.
OPEN, READY, DROPPED = 0, 1, 2

#: SQLite numbers rows by itself only in a column of type INTEGER.
_Id = BigInteger().with_variant(Integer, "sqlite")

metadata = MetaData()

#: What the store says about itself: schema version, run, number of tasks.
facts = Table("facts", metadata, Column("name", String(64), primary_key=True), Column("value", Text, nullable=False))

#: Numbers that only grow. Every writing transaction locks them first, so writers follow one another.
counters = Table(
    "counters", metadata, Column("name", String(64), primary_key=True), Column("value", BigInteger, nullable=False)
)

tasks = Table(
    "tasks",
    metadata,
    Column("ordinal", BigInteger, primary_key=True, autoincrement=False),
    Column("state", SmallInteger, nullable=False),
    Column("owner", String(255), nullable=False),
    Column("attempt", Integer, nullable=False),  # counts claims; an older attempt can no longer finish the task
    Column("lease_until", Float(53), nullable=False),  # seconds since 1970, by the database's clock
    Index("tasks_by_state", "state", "lease_until"),
    Index("tasks_by_owner", "owner", "state"),
)

groups = Table(
    "groups",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("name", String(255), nullable=False, unique=True),
    Column("ordinal", BigInteger),
    Column("attempt", Integer, nullable=False),
    Column("state", SmallInteger, nullable=False),
    Column("sequence", BigInteger),  # order of completion
    Column("version", BigInteger, nullable=False),  # of the oldest sampled token
    Column("reward", Float(53)),  # mean of its rows
    Column("rows", Integer, nullable=False),
    Column("uses", Integer, nullable=False),
    Column("available_at", Float(53), nullable=False),
    Column("dropped_by", String(255)),
    Column("drop_checkpoint", BigInteger),  # None while the drop is not committed
    Index("groups_by_age", "state", "uses", "sequence"),
    Index("groups_by_version", "state", "uses", "version", "sequence"),
    Index("groups_by_ordinal", "ordinal"),
)

experiences = Table(
    "experiences",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("group_id", _Id, ForeignKey("groups.id"), nullable=False),
    Column("sample", Integer, nullable=False),  # index of the sample in its group
    Column("part", Integer, nullable=False),  # index of the row in its sample
    Column("eid", String(255), nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("reward", Float(53)),
    Column("data", LargeBinary, nullable=False),  # Experience.serialize()
    UniqueConstraint("group_id", "sample", "part", name="experience_once"),
)

uses = Table(
    "uses",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("group_id", _Id, ForeignKey("groups.id"), nullable=False),
    Column("batch", BigInteger, nullable=False),
    Column("checkpoint", BigInteger),  # None until the trainer's checkpoint commits it
    Column("published", Boolean, nullable=False),  # weights trained on it are out: it no longer counts as in training
    Index("uses_by_group", "group_id"),
    Index("uses_by_checkpoint", "checkpoint"),
    Index("uses_by_published", "published"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("sequence", _Id, primary_key=True),
    Column("name", String(255), nullable=False, unique=True),
    Column("version", BigInteger),
    Column("batch", BigInteger, nullable=False),
)

versions = Table(
    "versions",
    metadata,
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("path", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
)

drops = Table("drops", metadata, Column("reason", String(255), primary_key=True), Column("rows", BigInteger, nullable=False))
