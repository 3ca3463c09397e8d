"""ragcache as an HTTP service: OpenAI's interface, documents, answers, and administration."""

from ragcache_api.http.app import create_app
from ragcache_api.settings import ServiceSettings

__all__ = ["ServiceSettings", "create_app"]
