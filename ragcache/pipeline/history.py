"""Chats whose history holds texts that became modules after the chat had computed them.

Reading such a text from its own states changes the prompt, so that the kept states of everything
behind it are of no use. A chat goes on with its kept states as long as they save more.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from ragcache.pipeline.conversations import Conversations
from ragcache.pipeline.prompt import TokenPrompt
from ragcache.recognition import RecognizedModule

MOST_PLACES = 16_384
"""Most places of a namespace that are remembered."""

BuildPrompt = Callable[[Sequence[RecognizedModule]], TokenPrompt]
"""Builds the prompt that reads these modules from states."""


@dataclass(eq=False)
class HistoryReads:
    """The places of chats at which observed modules have been read. Thread-safe."""

    conversations: Conversations
    """The kept conversations of the namespace."""
    _read: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # the oldest first
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def choose(
        self, text: str, history: int, found: Sequence[RecognizedModule], build: BuildPrompt
    ) -> TokenPrompt:
        """Build the prompt of a chat that has to compute the fewest tokens.

        Observed modules that no earlier prompt has read at their place in the history are computed
        there if the kept states of the history then save more tokens than the modules.

        Args:
            text: The chat.
            history: End of the history in the text, in characters.
            found: Modules in the text, by position.
            build: Builds a prompt. Leases nothing.
        """
        places = dict(_observed_places(text, found))
        with self._lock:
            late = {at for at, place in places.items() if place not in self._read}
        late = {at for at in late if found[at].end <= history}
        whole = None
        if late:
            plain = build([each for at, each in enumerate(found) if at not in late])
            if kept := self.conversations.kept_tokens(plain):  # all that can speak for `plain`
                whole = build(found)
                saved = whole.read_tokens + self.conversations.kept_tokens(whole)
                if plain.read_tokens + kept > saved:
                    return plain
        self._remember(places.values())
        return build(found) if whole is None else whole

    def _remember(self, places: Iterable[bytes]) -> None:
        with self._lock:
            for place in places:
                self._read[place] = None
                self._read.move_to_end(place)
            while len(self._read) > MOST_PLACES:
                self._read.popitem(last=False)


def _observed_places(text: str, found: Sequence[RecognizedModule]) -> Iterator[tuple[int, bytes]]:
    """Yield the number of each observed module, with a digest of the text up to its end."""
    digest, done = blake2b(digest_size=16), 0
    for number, each in enumerate(found):
        if not each.ingested:
            digest.update(text[done : each.end].encode("utf-8", "surrogatepass"))
            done = each.end
            yield number, digest.digest()
