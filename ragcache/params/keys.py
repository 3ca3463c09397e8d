"""`KeyParams`: the options of an API key of the service."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from ragcache.config import NAMESPACE, check_namespace, parse_bytes
from ragcache.errors import ConfigurationError
from ragcache.params.base import Params

Role = Literal["user", "admin"]


class KeyParams(Params):
    """Options of an API key.

    Raises:
        ConfigurationError: An option is unknown or has a value that cannot be used.

    Example:
        >>> KeyParams(role="admin")
        KeyParams(role='admin')
    """

    error = ConfigurationError

    role: Role = "user"
    """`user` may ask and ingest; `admin` may also use `/admin`."""
    namespace: Annotated[str, AfterValidator(check_namespace)] = NAMESPACE
    """Namespace that the key opens."""
    pin_bytes: Annotated[int, BeforeValidator(parse_bytes), Field(ge=0, lt=2**63)] = 0
    """Most bytes of states that a `user` keeps from eviction. `admin` has no limit."""
    recognize_recurring: bool = True
    """Whether texts that recur in the prompts of its holder are read from states."""
