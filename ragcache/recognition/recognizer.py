"""The recognizer: fingerprints of a namespace's modules, as the catalogue holds them now."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from ragcache.errors import UnknownCollection
from ragcache.recognition.prints import Prints
from ragcache.recognition.search import Found, find
from ragcache.recognition.table import Table
from ragcache.store import Catalogue

Stamps = dict[str, tuple[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class _Indexed:
    stamps: Stamps
    parts: dict[str, Prints]
    table: Table


class Recognizer:
    """Finds modules of all collections of one catalogue. Thread-safe."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._indexed = _Indexed({}, {}, Table(Prints.joined(())))
        self._building = threading.Lock()

    def find(self, text: str) -> list[Found]:
        """The modules that stand in a text (see `find`). Collections come by name, modules in the
        order of their ids: of equal texts the first is meant."""
        return find(text, self._current().table)

    def _current(self) -> _Indexed:
        """The index over what the catalogue holds now, whoever changed it. Asks one query where
        nothing did; else the collections that changed are read, and no others."""
        if self._indexed.stamps == self._catalogue.stamps():
            return self._indexed
        with self._building:  # threads that ask at once wait for one index
            stamps, old = self._catalogue.stamps(), self._indexed
            if old.stamps != stamps:
                parts = {name: self._part(name, stamp, old) for name, stamp in stamps.items()}
                table = Table(Prints.joined([parts[name] for name in sorted(parts)]))
                self._indexed = _Indexed(stamps, parts, table)
            return self._indexed

    def _part(self, name: str, stamp: tuple[int, int], old: _Indexed) -> Prints:
        if old.stamps.get(name) == stamp:
            return old.parts[name]
        try:
            return Prints.of(self._catalogue.modules(name))
        except UnknownCollection:  # it went meanwhile, and its stamp will say so
            return Prints.of(())
