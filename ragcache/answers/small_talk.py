"""Small talk: greetings, thanks and farewells, which no document answers.

A search finds modules for such a message, too: every text that says "hello" shares a word with it.
"""

from __future__ import annotations

import re

from ragcache.retrieval.bm25 import STOP_WORDS

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_LONGEST = 80
"""Most characters of small talk. Longer messages are not looked at."""

_COURTESIES = frozenset(
    # English
    "hello hi hey hiya howdy greetings thanks thank thx cheers bye goodbye welcome "
    # German, French, Spanish, Portuguese, Italian, Dutch
    "hallo servus moin danke tschüss bonjour salut bonsoir merci revoir hola gracias adiós adios "
    "olá ola obrigado obrigada tchau ciao buongiorno buonasera salve grazie arrivederci bedankt "
    # Russian, Turkish, Arabic, Chinese, Japanese, Korean
    "привет здравствуйте спасибо пока merhaba selam teşekkürler مرحبا شكرا "
    "你好 您好 你们好 嗨 谢谢 多谢 再见 "
    "こんにちは こんばんは おはよう ありがとう ありがとうございます "
    "안녕 안녕하세요 감사합니다".split()
)
"""Words that greet, thank or part."""
_FILLERS = STOP_WORDS | frozenset(
    "again all day dear everyone everybody folks friend friends good great lot much night nice ok "
    "okay please really see so team there very well world "
    "beaucoup buenas buenos bom boa dia dias días noches tardes tarde muchas muito vielen dank "
    "guten gute morgen tag abend nacht auf wiedersehen au le la à tout le monde et mille".split()
)
"""Words that stand beside courtesies, and ask nothing by themselves."""
_PHRASES = re.compile(
    r"(?:good|guten?|buenos|buenas|bom|boa) (?:morning|afternoon|evening|day|night|morgen|tag|"
    r"abend|nacht|d[ií]as?|tardes?|noches|noite)|"
    r"how are (?:you|things)(?: doing)?(?: today)?|how's it going|what's up|"
    r"how do you do|nice to meet you|vielen dank|auf wiedersehen|wie geht's|"
    r"wie geht es (?:dir|ihnen)|comment ça va|ça va|qué tal|cómo estás|come stai|"
    r"see you(?: later| soon)?"
)
_COURTEOUS = "courteous"


def is_small_talk(message: str) -> bool:
    """Tell whether a message greets, thanks or parts, and says nothing else.

    Args:
        message: The user's message or question.

    Example:
        >>> is_small_talk("Good morning! How are you?")
        True
        >>> is_small_talk("Hello, where does the key hang?")
        False
    """
    if len(message) > _LONGEST:
        return False
    words = _WORD.findall(message.casefold().replace("’", "'"))
    rest = _PHRASES.sub(_COURTEOUS, " ".join(words)).split()
    courteous = [each == _COURTEOUS or each in _COURTESIES for each in rest]
    known = all(polite or each in _FILLERS for polite, each in zip(courteous, rest, strict=True))
    return any(courteous) and known
