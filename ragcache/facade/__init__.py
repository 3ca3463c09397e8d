"""What a `RagCache` does, by subject."""

from ragcache.facade.administration import Administration
from ragcache.facade.chats import Chats
from ragcache.facade.prompts import Prompts
from ragcache.facade.questions import Questions

__all__ = ["Administration", "Chats", "Prompts", "Questions"]
