"""Routes of the embedder and the reranker that the service has loaded.

Embeddings have OpenAI's shape, ranks the shape of Jina, Cohere and vLLM.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from anyio import to_thread
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from ragcache.retrieval import embedder_name
from ragcache_api.http.bodies import Text, invalid, unsupported
from ragcache_api.http.client_fields import ClientModel
from ragcache_api.http.envelope import new_request_id
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.protocol import CompactResponse, ResponseModel, openai_problems
from ragcache_api.http.service import ContextDep, RequestContext

router = APIRouter(prefix="/v1", tags=["vectors"], responses=openai_problems())
T = TypeVar("T")
_TEXTS = 2048  # most texts of a request, as at OpenAI
_AT_ONCE = 64  # texts that are computed before the deadline is looked at again
ModelName = Annotated[str, Field(max_length=1000)]


class EmbeddingsRequest(ClientModel):
    """Texts to embed."""

    input: Text | Annotated[list[Text], Field(min_length=1, max_length=_TEXTS)] | list[Any]
    """A text, or a list of up to 2,048. Token ids are not served: the embedder has its own."""
    model: ModelName = ""
    """Name of the embedder. May be left out."""
    encoding_format: Literal["float", "base64"] = "float"
    """`base64` gives the bytes of a little-endian float32 vector."""
    dimensions: Annotated[int | None, Field(ge=1)] = None
    """Length of the vectors, which the embedder sets. Another length is refused."""
    input_type: Literal["document", "query"] = "document"
    """Whether texts are documents or questions, for embedders that tell them apart."""

    @property
    def texts(self) -> list[str]:
        """The texts. Raises `HTTPProblem` (400) for token ids."""
        given = [self.input] if isinstance(self.input, str) else self.input
        if not given or not all(isinstance(each, str) and each for each in given):
            raise invalid("input", "input is a text or a list of texts, none of them empty")
        if len(given) > _TEXTS:
            raise invalid("input", f"input has {len(given)} texts; send at most {_TEXTS}")
        return [str(each) for each in given]


class TextUsage(ResponseModel):
    """Numbers of tokens of the texts, as the served language model counts them."""

    prompt_tokens: int
    total_tokens: int


class Embedding(ResponseModel):
    """The vector of a text."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsResponse(ResponseModel):
    """The vectors of all texts, in their order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: TextUsage


class RerankDocument(ClientModel):
    """A document with its text in a field."""

    text: Text


class RerankRequest(ClientModel):
    """Texts to order by how well they answer a query."""

    query: Annotated[str, Field(min_length=1, max_length=1_000_000)]
    documents: Annotated[list[Text | RerankDocument], Field(min_length=1, max_length=_TEXTS)]
    """Up to 2,048 texts."""
    model: ModelName = ""
    """Name of the reranker. May be left out."""
    top_n: Annotated[int | None, Field(ge=1)] = None
    """Most documents to return. All by default."""
    return_documents: bool = True
    """Return the texts, too."""


class RankedText(ResponseModel):
    """The text of a ranked document."""

    text: str


class RankedDocument(ResponseModel):
    """A document with its score."""

    index: int
    """Place of the document in the request."""
    relevance_score: float
    """Score, 0 to 1."""
    document: RankedText | None = None


class RerankResponse(ResponseModel):
    """The documents, the best one first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: TextUsage


@router.post("/embeddings", response_model=EmbeddingsResponse)
async def embed_texts(body: EmbeddingsRequest, context: ContextDep) -> Response:
    """Embed texts with the embedder that finds documents."""
    embedder = context.service.shared.embedder
    if embedder is None:
        raise _missing("embedder", "embedding", "minilm")
    name = _short_name(embedder_name(embedder))
    _check_name(body.model, name)
    texts = body.texts
    embed = embedder.embed_documents
    if body.input_type == "query":
        embed = lambda texts: [embedder.embed_query(each) for each in texts]  # noqa: E731
    vectors = await _in_portions(context, embed, texts)
    if body.dimensions not in (None, len(vectors[0])):
        detail = f"{name} gives vectors of {len(vectors[0])} dimensions"
        raise unsupported("dimensions", f"{detail}; leave dimensions out")
    write = _base64_of if body.encoding_format == "base64" else list
    data = [
        {"object": "embedding", "index": index, "embedding": write(each)}
        for index, each in enumerate(vectors)
    ]
    usage = await to_thread.run_sync(_usage, context, texts)
    return CompactResponse({"object": "list", "data": data, "model": name, "usage": usage})


@router.post("/rerank", response_model=RerankResponse, response_model_exclude_none=True)
async def rerank_texts(body: RerankRequest, context: ContextDep) -> RerankResponse:
    """Order texts with the reranker that orders what a search finds."""
    reranker = context.service.shared.reranker
    if reranker is None:
        raise _missing("reranker", "reranker", "cross-encoder/ms-marco-MiniLM-L6-v2")
    name = _short_name(getattr(reranker, "model_name", type(reranker).__name__))
    _check_name(body.model, name)
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    score = lambda part: reranker.score_texts(body.query, part)  # noqa: E731
    scores = await _in_portions(context, score, texts)
    order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
    results = [
        RankedDocument(
            index=index,
            relevance_score=scores[index],
            document=RankedText(text=texts[index]) if body.return_documents else None,
        )
        for index in order
    ]
    usage = await to_thread.run_sync(_usage, context, [body.query, *texts])
    return RerankResponse(id=f"rerank-{new_request_id()}", model=name, results=results, usage=usage)


async def _in_portions(
    context: RequestContext, compute: Callable[[list[str]], Sequence[T]], texts: list[str]
) -> list[T]:
    """Compute a value for each text, in threads. Raises `DeadlineExceeded` between portions."""
    values: list[T] = []
    for start in range(0, len(texts), _AT_ONCE):
        _ = context.deadline
        part = texts[start : start + _AT_ONCE]
        values += await to_thread.run_sync(compute, part, limiter=context.service.readers)
    return values


def _missing(kind: str, setting: str, example: str) -> HTTPProblem:
    detail = f"the service has no {kind}: start it with the setting {setting}, such as {example!r}"
    return HTTPProblem(404, f"no-{kind}", detail)


def _check_name(given: str, name: str) -> None:
    """Raise `HTTPProblem` (404) unless a request names the loaded model, or none."""
    if given and not f"/{given}".endswith(f"/{name}"):
        detail = f"the model {given!r:.200} is not served here; {name!r} is"
        raise HTTPProblem(404, "model-not-found", detail, None, "model")


def _short_name(name: str) -> str:
    """Return the last part of a model's name, without the name of its class and folder."""
    known = PurePath(name.rpartition(":")[2]).name
    return known.rpartition(".")[2].lower() if known.startswith("ragcache.") else known


def _base64_of(vector: Sequence[float]) -> str:
    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode("ascii")


def _usage(context: RequestContext, texts: Sequence[str]) -> TextUsage:
    encode = context.service.shared.model.encode_untrusted
    tokens = sum(len(encode(each)) for each in texts)
    return TextUsage(prompt_tokens=tokens, total_tokens=tokens)
