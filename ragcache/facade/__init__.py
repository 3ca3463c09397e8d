"""What a `RagCache` does, by subject."""

from ragcache.facade.administration import Administration
from ragcache.facade.chats import Chats
from ragcache.facade.keeping import Keeping
from ragcache.facade.prompts import Prompts
from ragcache.facade.questions import Questions
from ragcache.facade.retrieval import Retrieval

__all__ = ["Administration", "Chats", "Keeping", "Prompts", "Questions", "Retrieval"]
