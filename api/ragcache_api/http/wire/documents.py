"""Collections, documents, schemas and jobs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ragcache import SourceDocument
from ragcache_api.http.wire.common import CollectionName, Identified, Told, Wire

Id = Annotated[str, Field(min_length=1, max_length=1000)]


class CollectionSent(Wire):
    """A collection to make, without documents."""

    name: CollectionName


class CollectionMade(Told):
    """created: false where it was there already."""

    name: str
    created: bool


class CollectionTold(Told):
    name: str
    documents: int
    modules: int


class DocumentSent(Wire):
    id: Id
    text: Annotated[str, Field(max_length=50_000_000)]
    uri: Annotated[str, Field(max_length=4000)] = ""
    metadata: dict[str, Any] = Field(default_factory=dict)

    def source(self) -> SourceDocument:
        return SourceDocument(self.id, self.text, self.uri, self.metadata)


class DocumentsSent(Wire):
    """Documents to store, each in place of an earlier one of its id."""

    documents: Annotated[list[DocumentSent], Field(min_length=1, max_length=10_000)]


class DocumentTold(Told):
    id: str
    uri: str
    digest: str
    modules: int
    metadata: dict[str, Any]


class JobTold(Identified):
    """An ingestion. done and total count modules; times are Unix seconds."""

    target: str
    status: str
    done: int
    total: int
    error: str
    started_at: float | None
    finished_at: float | None


class SchemaSent(Wire):
    """A hand-written schema, in PML. One of the same name is replaced."""

    text: Annotated[str, Field(min_length=1, max_length=10_000_000)]
    placement: Literal["schema", "compact"] = "schema"


class SchemaTold(Told):
    name: str
    placement: str
    text: str | None = None


MULTIPART = {
    "required": True,
    "content": {
        "application/json": {"schema": {"$ref": "#/components/schemas/DocumentsSent"}},
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {
                    "files": {"type": "array", "items": {"type": "string", "format": "binary"}}
                },
                "required": ["files"],
            }
        },
    },
}
"""The body of an upload, for the OpenAPI document."""
