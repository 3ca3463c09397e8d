"""Recognition: texts of ingested modules inside of prompts."""

from ragcache.recognition.recognizer import Recognizer
from ragcache.recognition.rolling import WINDOW
from ragcache.recognition.search import Found, find

__all__ = ["WINDOW", "Found", "Recognizer", "find"]
