"""The service's data: documents, their summaries, and a queue of planned maintenance."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from example_project.app import DATABASE_URL

engine = sa.create_engine(DATABASE_URL, pool_pre_ping=True)
Session = sessionmaker(engine)

UTC = timezone.utc


class Base(DeclarativeBase):
    """Base of the tables below."""


class Document(Base):
    """A document that the service keeps."""

    __tablename__ = "document"

    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str] = mapped_column(sa.String(200))
    size: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(sa.DateTime(timezone=True))


class Summary(Base):
    """What a daily summary found. No unique key: were it written twice, it would show."""

    __tablename__ = "summary"

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(sa.String(36), index=True)
    epoch: Mapped[int] = mapped_column(sa.BigInteger)
    documents: Mapped[int]
    total_size: Mapped[int]


class Maintenance(Base):
    """One planned step of retention. Nothing is ever deleted here: it is only planned."""

    __tablename__ = "maintenance"

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(sa.String(36), index=True)
    epoch: Mapped[int] = mapped_column(sa.BigInteger)
    document_id: Mapped[int] = mapped_column(sa.ForeignKey("document.id"))
    step: Mapped[str] = mapped_column(sa.String(40))


class Refusal(Base):
    """An audit line: a task that was turned away, and where."""

    __tablename__ = "refusal"

    id: Mapped[int] = mapped_column(primary_key=True)
    task_id: Mapped[str] = mapped_column(sa.String(255))
    epoch: Mapped[int] = mapped_column(sa.BigInteger)
    current_epoch: Mapped[int | None] = mapped_column(sa.BigInteger)
    stage: Mapped[str] = mapped_column(sa.String(40))


def prepare() -> None:
    """Make the tables and a dozen documents, unless they are there."""
    with engine.begin() as connection:
        if connection.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # Two workers may start at once.
        Base.metadata.create_all(connection)
    now = datetime.now(UTC)
    with Session.begin() as session:
        if session.scalar(sa.select(sa.func.count()).select_from(Document)):
            return
        session.add_all(
            Document(
                id=number,
                title=f"Document {number}",
                size=1000 * number,
                created_at=now - timedelta(days=90 * number),
            )
            for number in range(1, 13)
        )
