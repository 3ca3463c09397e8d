"""`GET /v1/models`."""

from __future__ import annotations

from fastapi import APIRouter

from ragcache_api.http.errors import Refusal
from ragcache_api.http.service import CallDep, Service
from ragcache_api.http.wire.common import openai_problems
from ragcache_api.http.wire.openai_told import Model, Models

router = APIRouter(prefix="/v1/models", tags=["openai"], responses=openai_problems())


@router.get("")
async def list_models(call: CallDep) -> Models:
    """The model that is served."""
    return Models(data=[_served(call.service)])


@router.get("/{name:path}")
async def get_model(name: str, call: CallDep) -> Model:
    """The model of a name."""
    check_model(call.service, name)
    return _served(call.service)


def check_model(service: Service, name: str) -> None:
    """Raises `Refusal` (404) for another model than the one that is served."""
    if name != service.model:
        raise Refusal(
            404, "model-not-found", f"the model {name!r:.200} is not served; {service.model!r} is",
            None, "model",
        )  # fmt: skip


def _served(service: Service) -> Model:
    return Model(id=service.model, created=int(service.started))
