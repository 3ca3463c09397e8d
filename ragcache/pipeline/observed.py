"""Observed modules: texts that recur in the prompts of a namespace, kept as modules in memory.

A text that recurs (`ragcache.pipeline.prompt_observer`) becomes a module, whose states are encoded
in the background. From then on the text is read like an ingested one. A text that its caller marks
is a module at once, and its first prompt encodes it. Observed modules belong to no collection, and
end with the process unless `OpenConfig.observed_storage` keeps them on the disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import get_args

from ragcache.db import ModuleRow
from ragcache.db.observed import ObservedText, ObservedTexts
from ragcache.errors import EngineClosed, RagCacheError, StoreError
from ragcache.models import LoadedModel
from ragcache.modes import PRIMED, ROOTED, Encoding, ReuseMode
from ragcache.params.open import ObservedStorage
from ragcache.pipeline.gate import ModeGate
from ragcache.pipeline.keeper import Keeper
from ragcache.pipeline.module_states import ModuleEncoder, portions
from ragcache.pipeline.prompt_observer import PromptObserver
from ragcache.recognition import (
    NO_DOCUMENT,
    Fingerprints,
    FingerprintTable,
    RecognizedModule,
    find,
)
from ragcache.recurrence import Span, gaps, pieces
from ragcache.states import KVKey

logger = logging.getLogger(__name__)

SECONDS_TO_LIVE: dict[ObservedStorage, float] = {"memory": 3600.0, "disk": 86_400.0}
"""Seconds after its last use at which an observed module may end, by `observed_storage`."""

OTHER_MODE = {ROOTED: PRIMED, PRIMED: ROOTED}
"""Mode in which recurring texts are read where the gate refuses the one that a chat asks for."""

_REFRESHES = 100
"""Most refreshes of a stored text's end during its time to live."""


@dataclass(slots=True)
class ObservedModule:
    """A text that recurred, and the uses of its states."""

    row: ModuleRow
    """The text as a module without a document."""
    token_ids: tuple[int, ...]
    keys: tuple[KVKey, ...]
    """Keys of its states, one for each encoding of the mode that it was first read in."""
    nbytes: int
    """Bytes of the states in the model's format."""
    hits: int = 0
    """Prompts that read the states."""
    used_at: float = field(default_factory=time.time)
    """Unix seconds of the last use."""
    kept_until: float = 0.0
    """Unix seconds until which its caller has asked to keep it."""
    kept_by: str = ""
    """Name of that caller."""

    @property
    def id(self) -> str:
        """Digest of the text."""
        return self.row.name


class ObservedModules:
    """The observed modules of one namespace, which reads no text of another one. Thread-safe."""

    def __init__(
        self,
        model: LoadedModel,
        encoder: ModuleEncoder,
        gate: ModeGate,
        background: Executor,
        *,
        budget_bytes: int,
        min_module_tokens: int,
        module_tokens: int,
        is_idle: Callable[[], bool],
        rows: ObservedTexts | None = None,
    ) -> None:
        """Create an empty set of modules.

        Args:
            model: The model.
            encoder: Encoder of the namespace's modules.
            gate: The gate. A mode that it refuses, or has not measured yet, reads nothing.
            background: One thread, which compares prompts and encodes new modules.
            budget_bytes: Most bytes of states. 0 turns detection off.
            min_module_tokens: Fewest tokens of a module.
            module_tokens: Most tokens of a module.
            is_idle: Tells whether no request is running.
            rows: The texts that outlive the process. Without them all are in memory alone.
        """
        self._model, self._encoder, self._gate = model, encoder, gate
        self._background = background
        self._observer = PromptObserver(background, is_idle, self._encode_texts)
        self._budget_bytes = budget_bytes
        self._min_module_tokens, self._module_tokens = min_module_tokens, module_tokens
        self._rows, self._refreshed = rows, time.time()
        self._modules: OrderedDict[str, ObservedModule] = OrderedDict()  # least recently used first
        self._table = FingerprintTable(Fingerprints.of(()))
        self._lock = threading.Lock()
        self._loading = threading.Lock()  # texts that are being loaded are not forgotten meanwhile

    def find(
        self, text: str, covered: Sequence[RecognizedModule], mode: ReuseMode
    ) -> list[RecognizedModule]:
        """Return the observed modules in a prompt.

        The background finds out which of its other texts recur, and encodes them.

        Args:
            text: The prompt.
            covered: Ingested modules in the prompt, which are left out.
            mode: The mode that the prompt is read in.

        Returns:
            All modules in the prompt, ingested and observed, by position.
        """
        if not self._reads(mode):
            return list(covered)
        self._observer.begin_prompt()
        found = [*covered]
        if self._gate.passes(mode):
            for gap in gaps(len(text), [(each.begin, each.end) for each in covered]):
                found += self._find_in(text, gap)
        found.sort(key=lambda each: each.begin)
        self._observer.add_prompt(text, [(each.begin, each.end) for each in found], mode)
        return found

    def mode_for(self, mode: ReuseMode) -> ReuseMode:
        """Return the mode in which a chat without ingested texts reads recurring ones.

        Where the gate refuses `rooted` or `primed`, they are read in the other one of both, if that
        was measured near enough to `exact`.

        Args:
            mode: The mode that the chat asks for.
        """
        other = OTHER_MODE.get(mode)
        if other is None or self._gate.passes(mode) or not self._gate.is_near(other):
            return mode
        return other

    def keep(self, text: str, seconds: float, mode: ReuseMode, keeper: Keeper) -> None:
        """Make modules of a text at once, and keep them for a time.

        Encodes nothing: the next prompt with the text encodes its states and counts their tokens
        as created. A text is left as it is if the mode reads no states on this model, and a text
        under `min_module_tokens` always. Texts beyond a budget, of observed modules or of the
        caller, are modules that are not kept.

        Args:
            text: The text, as prompts have it.
            seconds: Seconds from now.
            mode: The mode that its prompts are read in.
            keeper: The caller.
        """
        if not self._reads(mode) or not self._gate.passes(mode):
            return
        until = time.time() + seconds
        for piece in pieces(text, self._module_tokens, lambda part: len(self._tokens(part))):
            made = self._module_of(piece.strip(), mode)
            if made is not None:
                self._keep(made, until, keeper)

    def end_kept(self) -> None:
        """Let texts go whose time is over. They stay modules while there is room."""
        now = time.time()
        with self._lock:
            over = [each for each in self._modules.values() if 0 < each.kept_until <= now]
            for each in over:
                each.kept_until, each.kept_by = 0.0, ""
        self._unpin([key for each in over for key in each.keys])

    def load(self) -> None:
        """Recognize the texts that earlier processes have stored for this model.

        Tokenizes all of them. Modules that this process has made meanwhile stay, and count as used
        more recently.
        """
        with _tolerated("stored recurring texts are not read"), self._loading:
            if self._rows is None or not self._budget_bytes:
                return
            loaded = [self._loaded(each) for each in self._rows.stored()]
            with self._lock:
                for each in reversed(loaded):
                    if each is not None and each.id not in self._modules:
                        self._modules[each.id] = each
                        self._modules.move_to_end(each.id, last=False)
                self._make_room()
                self._rebuild()

    def _loaded(self, stored: ObservedText) -> ObservedModule | None:
        """Return a stored text as a module, or None if all its states are of other models."""
        ids = self._tokens(stored.text)
        own = (self._encoder.key(ids, each) for each in get_args(Encoding))
        keys = tuple(key for key in own if key in stored.keys)
        if not keys:
            return None
        nbytes = self._model.causal.module_bytes(len(ids)) * len(keys)
        row = ModuleRow(NO_DOCUMENT, stored.id, "", "", stored.text)
        used_at = stored.expires_at - self._stored_seconds
        return ObservedModule(row, ids, keys, nbytes, used_at=used_at)

    def end_unused(self) -> None:
        """Let modules go that nobody has used for long, and note the uses of stored ones."""
        now = time.time()
        with self._lock:
            ended = [each for each in self._modules.values() if self._is_over(each, now)]
            for each in ended:
                del self._modules[each.id]
            if ended:
                self._rebuild()
        if self._rows is None:
            self._encoder.store.evict([key for each in ended for key in each.keys])
        elif now - self._refreshed >= self._seconds / _REFRESHES:
            self._refresh(self._rows, now)  # ended texts go with their rows, which others may read

    def _refresh(self, rows: ObservedTexts, now: float) -> None:
        """Move the ends of stored texts that were used since the last time, or are kept."""
        with self._lock:
            used = [
                each.id
                for each in self._modules.values()
                if each.used_at >= self._refreshed or each.kept_until > now
            ]
        with _tolerated("the use of recurring texts is noted later"):
            if used:
                rows.refresh(used, now + self._stored_seconds)
            self._refreshed = now

    def _unpin(self, keys: Sequence[KVKey]) -> None:
        """Allow the eviction of states that no operator has pinned."""
        if keys:
            store = self._encoder.store
            store.memory.pin(set(keys) - store.ledger.pinned(keys), pinned=False)

    def tokens_of(self, module: ModuleRow) -> tuple[int, ...]:
        """Return the tokens of an observed module that `find` returned."""
        with self._lock:
            known = self._modules.get(module.name)
        return known.token_ids if known else self._tokens(module.text)

    def all(self) -> list[ObservedModule]:
        """Return the modules, the most recently used one first."""
        with self._lock:
            return [replace(each) for each in reversed(self._modules.values())]

    def forget(self, ids: Sequence[str] | None = None) -> int:
        """Remove modules and their states, by default all with all fingerprints.

        Returns:
            The number of removed modules.
        """
        with self._loading:
            if ids is None:
                self._observer.forget()
            with self._lock:
                chosen = [each for each in ids or self._modules if each in self._modules]
                keys = [key for each in chosen for key in self._modules.pop(each).keys]
                self._rebuild()
            self._unpin(keys)
            self._encoder.store.evict(keys)
            if self._rows is not None:
                self._encoder.store.discard(self._rows.delete(ids))
        return len(chosen)

    @property
    def waiting(self) -> int:
        """Number of texts that wait to be encoded."""
        return self._observer.waiting

    @property
    def unstored(self) -> int:
        """Number of modules that are in memory alone."""
        return len(self._modules) if self._rows is None else 0

    def end(self) -> None:
        """Forget everything, and recognize nothing any more: the namespace was deleted."""
        with self._loading:
            self._budget_bytes, self._rows = 0, None
        self.forget()

    def _find_in(self, text: str, gap: Span) -> list[RecognizedModule]:
        """Return the observed modules between two ingested ones, and count their uses."""
        matches, now = find(text[gap.begin : gap.end], self._table), time.time()
        with self._lock:
            for each in matches:
                if known := self._modules.get(each.module.name):
                    known.hits, known.used_at = known.hits + 1, now
                    self._modules.move_to_end(known.id)
        if not gap.begin:
            return matches
        return [
            replace(each, begin=each.begin + gap.begin, end=each.end + gap.begin)
            for each in matches
        ]

    def _encode_texts(self, texts: Mapping[str, ReuseMode], pause: Callable[[], None]) -> None:
        """Make modules of texts that recur, and encode them. Runs in the background.

        Args:
            texts: The modes of the prompts in which the texts recurred.
            pause: Waits for a pause between requests.
        """
        try:
            modes = {mode: self._measured_mode(mode) for mode in set(texts.values())}
            made = dict[str, tuple[ObservedModule, Sequence[Encoding]]]()
            for text, asked in texts.items():
                if mode := modes[asked]:
                    new = self._modules_of(text, mode)
                    made |= {module.id: (module, mode.encodings) for module in new}
            for portion in portions([*made.values()]):
                pause()
                self._encode(portion)
        except EngineClosed:
            pass
        except RagCacheError as error:
            logger.warning("recurring texts were not encoded: %s", error)

    def _measured_mode(self, mode: ReuseMode) -> ReuseMode | None:
        """Return the mode in which texts of prompts in a mode are read, if the gate passes it.

        Measures a mode without figures first.
        """
        if not self._gate.passes(mode):
            self._gate.measure([mode])
        if mode in OTHER_MODE and not self._gate.passes(mode):
            self._gate.measure([OTHER_MODE[mode]])
        mode = self.mode_for(mode)
        return mode if self._gate.passes(mode) else None

    def _modules_of(self, text: str, mode: ReuseMode) -> Iterator[ObservedModule]:
        """Yield the parts of a text that are no modules yet, and long enough."""
        for piece in pieces(text, self._module_tokens, lambda part: len(self._tokens(part))):
            made = self._module_of(piece.strip(), mode)
            if made is not None and made.id not in self._modules:
                yield made

    def _encode(self, made: Sequence[tuple[ObservedModule, Sequence[Encoding]]]) -> None:
        """Encode modules together, each in its encodings, and recognize them from now on."""
        wanted = [
            (module.token_ids, encoding)
            for encoding in get_args(Encoding)
            for module, encodings in made
            if encoding in encodings
        ]
        tokens, encodings = [each for each, _ in wanted], [each for _, each in wanted]
        with self._encoder.lease(tokens, encodings):
            self._enter([module for module, _ in made])

    def _module_of(self, text: str, mode: ReuseMode) -> ObservedModule | None:
        """Return a text as a module. A text that is too short or too long is none."""
        ids, encodings = self._tokens(text), mode.encodings
        nbytes = self._model.causal.module_bytes(len(ids)) * len(encodings)
        if len(ids) < self._min_module_tokens or nbytes > self._budget_bytes:
            return None
        name = sha256(text.encode()).hexdigest()[:16]
        keys = tuple(self._encoder.key(ids, each) for each in encodings)
        return ObservedModule(ModuleRow(NO_DOCUMENT, name, "", "", text), ids, keys, nbytes)

    def _enter(self, modules: Sequence[ObservedModule]) -> None:
        """Recognize modules from now on, and end others for which there is no room."""
        if not self._budget_bytes:  # the namespace was deleted meanwhile
            self._encoder.store.evict([key for each in modules for key in each.keys])
            return
        with self._lock:
            self._modules |= {each.id: each for each in modules}
            ended = self._make_room()
            self._rebuild()
        self._encoder.store.evict([key for each in ended for key in each.keys])
        if self._rows is not None:
            with suppress(RuntimeError):  # the folder has been closed
                self._background.submit(self._record, self._rows, modules, ended)

    def _record(
        self,
        rows: ObservedTexts,
        modules: Sequence[ObservedModule],
        ended: Sequence[ObservedModule],
    ) -> None:
        """Store modules, and delete ended ones. Runs in the background."""
        if not self._budget_bytes:  # the namespace was deleted meanwhile
            return
        with _tolerated("recurring texts are not stored"):
            for each in modules:
                until = max(time.time() + self._stored_seconds, each.kept_until)
                rows.keep(ObservedText(each.id, each.row.text, each.keys, until))
            with self._lock:
                gone = [each.id for each in (*modules, *ended) if each.id not in self._modules]
            if gone:
                self._encoder.store.discard(rows.delete(gone))

    def _keep(self, module: ObservedModule, until: float, keeper: Keeper) -> None:
        """Keep a module until a time, unless the kept ones would exceed a budget."""
        with self._lock:
            known = self._modules.get(module.id)
            now = time.time()
            each = known or module
            if each.kept_until > now and each.kept_by == keeper.name:
                each.kept_until = max(each.kept_until, until)
            elif each.kept_until <= now and self._has_room(module.nbytes, keeper, now):
                each.kept_until, each.kept_by = until, keeper.name
            if known is not None:
                self._modules.move_to_end(known.id)
            kept = each.kept_until > now
        if known is None:
            self._enter([module])
        if kept:
            self._encoder.store.memory.pin(module.keys, pinned=True)

    def _has_room(self, nbytes: int, keeper: Keeper, now: float) -> bool:
        """Tell whether a caller may keep more bytes."""
        kept = [each for each in self._modules.values() if each.kept_until > now]
        own = sum(each.nbytes for each in kept if each.kept_by == keeper.name)
        every = sum(each.nbytes for each in kept)
        limit = self._budget_bytes if keeper.budget_bytes is None else keeper.budget_bytes
        return own + nbytes <= limit and every + nbytes <= self._budget_bytes

    def _reads(self, mode: ReuseMode) -> bool:
        """Tell whether prompts in a mode read observed modules on this model."""
        causal = self._model.causal
        readable = causal.scheme.movable and causal.composes
        return bool(self._budget_bytes) and mode.reads_states and readable

    @property
    def _seconds(self) -> float:
        """Seconds after its last use at which a module may end."""
        return SECONDS_TO_LIVE["memory" if self._rows is None else "disk"]

    @property
    def _stored_seconds(self) -> float:
        """Seconds after which a stored text ends: a use at the last moment is noted before."""
        return self._seconds * (1 + 1 / _REFRESHES)

    def _is_over(self, module: ObservedModule, now: float) -> bool:
        return module.kept_until <= now and now - module.used_at >= self._seconds

    def _make_room(self) -> list[ObservedModule]:
        """Remove modules beyond the budget or unused for long, and return them.

        The newest module stays, and so do modules that their callers keep.
        """
        ended: list[ObservedModule] = []
        now = time.time()
        used = sum(each.nbytes for each in self._modules.values())
        for each in list(self._modules.values())[:-1]:
            if each.kept_until > now:
                continue
            if used <= self._budget_bytes and not self._is_over(each, now):
                break
            used -= each.nbytes
            ended.append(self._modules.pop(each.id))
        return ended

    def _rebuild(self) -> None:
        rows = [each.row for each in self._modules.values()]
        self._table = FingerprintTable(Fingerprints.of(rows))

    def _tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self._model.encode_untrusted(text))


@contextmanager
def _tolerated(consequence: str) -> Iterator[None]:
    """Warn of errors of the ledger instead of raising them."""
    try:
        yield
    except StoreError as error:
        logger.warning("%s; %s", error, consequence)
