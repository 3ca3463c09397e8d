"""Recognition: texts of ingested modules inside of prompts."""

from ragcache.recognition.recogniser import Recogniser
from ragcache.recognition.rolling import WINDOW
from ragcache.recognition.search import Found, find

__all__ = ["WINDOW", "Found", "Recogniser", "find"]
