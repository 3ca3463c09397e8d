"""ragcache as a service: OpenAI's routes, documents and answers, and the operator's own."""

from ragcache_api.http.app import create_app
from ragcache_api.settings import ServiceSettings

__all__ = ["ServiceSettings", "create_app"]
