"""Originals of uploads: the files as they were sent, next to their documents.

A job brings the files, under the digests of their contents. Each transaction that stores documents
of the job gives them their files (`place_originals`). A file is deleted with its document.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from sqlalchemy import ColumnElement, delete, exists, func, insert, select
from sqlalchemy.orm import Session

from ragcache.db.database import Database
from ragcache.db.sql import in_collection, insert_new
from ragcache.db.tables import (
    CollectionTable,
    DocumentTable,
    JobOriginalTable,
    JobTable,
    OriginalTable,
)

LARGEST = 1 << 28
"""Most bytes of a file that is kept."""

logger = logging.getLogger(__name__)


def add_originals(session: Session, job: int, originals: Mapping[str, bytes], budget: int) -> None:
    """Keep the files of a job, as many as fit, until it has ended.

    Args:
        session: Transaction of the ledger.
        job: Id of the job.
        originals: Contents by their digests.
        budget: Most bytes of all files in the ledger.
    """
    if not originals:
        return
    tables = (OriginalTable, JobOriginalTable)
    left = budget - sum(session.scalar(select(func.sum(t.nbytes))) or 0 for t in tables)
    refused = 0
    for digest, content in originals.items():
        if len(content) <= min(left, LARGEST):
            row = {"job_id": job, "digest": digest, "nbytes": len(content), "content": content}
            insert_new(session, JobOriginalTable, [row])
            left -= len(content)
        else:
            refused += 1
    if refused:
        logger.warning(
            "%d uploaded files are not kept, and their documents have no original to download: "
            "originals take at most %d bytes (option originals_bytes), and one at most %d",
            refused,
            budget,
            LARGEST,
        )


def place_originals(session: Session, job: int, namespace: str, collection: str) -> None:
    """Give a job's files to those documents of its collection that have none and name them."""
    has_one = exists().where(OriginalTable.document_id == DocumentTable.id)
    rows = (
        select(DocumentTable.id, JobOriginalTable.nbytes, JobOriginalTable.content)
        .join(CollectionTable)
        .join(JobOriginalTable, JobOriginalTable.digest == DocumentTable.original)
        .where(JobOriginalTable.job_id == job, ~has_one)
    )
    chosen = in_collection(rows, namespace, collection)
    session.execute(insert(OriginalTable).from_select(["document_id", "nbytes", "content"], chosen))


def forget_originals(session: Session, ended: ColumnElement[bool]) -> None:
    """Delete the files of the jobs of a condition, which have ended."""
    jobs = select(JobTable.id).where(ended)
    session.execute(delete(JobOriginalTable).where(JobOriginalTable.job_id.in_(jobs)))


def read_original(database: Database, document: int) -> bytes | None:
    """Return the uploaded file that a document was read from, if it is kept."""
    rows = select(OriginalTable.content).where(OriginalTable.document_id == document)
    with database.reading() as session:
        return session.scalar(rows)


def has_original(database: Database, document: int) -> bool:
    """Whether the uploaded file that a document was read from is kept."""
    rows = select(OriginalTable.document_id).where(OriginalTable.document_id == document)
    with database.reading() as session:
        return session.scalar(rows) is not None
