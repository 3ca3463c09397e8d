"""Conversations: states of messages and answers are kept, and later turns start from them.

A prompt's own tokens are kept in runs of `BLOCK` to `MOST_TOKENS` tokens. The key of a run is a
digest of everything before its end, so that any sequence of runs of one prompt fits together. A
resumed prompt reads its runs as segments, as it reads documents: on every tier, and without a copy.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, takewhile
from typing import NamedTuple

from ragcache.db.conversations import ConversationDeletion, ConversationStates
from ragcache.db.references import CONVERSATION_MODE
from ragcache.engine import ComputedTokens, Context, Segment
from ragcache.engine.request import KeepStates
from ragcache.errors import RagCacheError
from ragcache.params.open import ConversationStorage
from ragcache.pipeline.keeper import Keeper
from ragcache.pipeline.module_states import ModuleEncoder
from ragcache.pipeline.prompt import PlacedStates, TokenPrompt
from ragcache.pipeline.retentions import Retentions
from ragcache.states import KVKey, KVStates
from ragcache.states.quantization import StoredStates
from ragcache.store import KVStore, Lease, LeaseRequest

logger = logging.getLogger(__name__)

BLOCK = 64
"""Runs of tokens begin and end at multiples of this number of own tokens."""
MOST_TOKENS = 1024
"""Most tokens of a run."""
MOST_ARRIVING = 16
"""Runs that wait to be stored, above which no more are kept."""


@dataclass(frozen=True, slots=True)
class PrefixRun:
    """Own tokens begin:end of a prompt, whose states are kept under one key."""

    key: KVKey
    begin: int
    end: int


class PrefixKeys:
    """Keys of all runs of a prompt's own tokens.

    Args:
        identity: Digest of the model, its tokenizer and the namespace.
        segments: States of documents in the prompt.
        token_ids: The prompt's own tokens, and the answer's.
        position_ids: Position of each token.
    """

    def __init__(
        self,
        identity: str,
        segments: Sequence[Segment | PlacedStates],
        token_ids: Sequence[int],
        position_ids: Sequence[int],
    ) -> None:
        self._digest = hashlib.sha256(identity.encode())
        self._digests = [self._digest.digest()]
        self._segments = sorted(segments, key=lambda each: each.start)
        self.length = 0
        """Number of tokens that may be in runs."""
        self._hash(token_ids, position_ids)

    def extended(self, token_ids: Sequence[int], position_ids: Sequence[int]) -> PrefixKeys:
        """Return the keys of a prompt that begins with these tokens. Hashes only what follows.

        Args:
            token_ids: All of its tokens.
            position_ids: Position of each token.
        """
        longer = copy(self)
        longer._digest = self._digest.copy()
        longer._digests, longer._segments = [*self._digests], [*self._segments]
        longer._hash(token_ids, position_ids)
        return longer

    def _hash(self, token_ids: Sequence[int], position_ids: Sequence[int]) -> None:
        """Hash the blocks behind the tokens that are hashed already."""
        end = len(token_ids) // BLOCK * BLOCK
        for begin in range(self.length, end, BLOCK):
            here = slice(begin, begin + BLOCK)
            positions = position_ids[here]
            while self._segments and self._segments[0].start < positions[-1]:
                segment = self._segments.pop(0)  # the tokens attend to it
                self._digest.update(f"{segment.name} at {segment.start},".encode())
            self._digest.update(struct.pack(f"<{2 * BLOCK}i", *token_ids[here], *positions))
            self._digests.append(self._digest.digest())
        self.length = end

    def run(self, begin: int, end: int) -> PrefixRun:
        """Return the run of tokens begin:end, which are multiples of `BLOCK`."""
        digest = hashlib.sha256(self._digests[end // BLOCK] + struct.pack("<i", begin))
        return PrefixRun(KVKey(digest.hexdigest()), begin, end)

    def runs_from(self, begin: int, limit: int) -> Iterator[PrefixRun]:
        """Yield the runs that begin at a token and end at `limit` or before, shortest first."""
        for end in range(begin + BLOCK, min(begin + MOST_TOKENS, limit) + 1, BLOCK):
            yield self.run(begin, end)

    def longest_prefix(self, is_known: Callable[[KVKey], bool], limit: int) -> list[PrefixRun]:
        """Return known runs that follow each other from the first token on, as far as possible.

        Args:
            is_known: Tells whether the states of a key are kept.
            limit: Most tokens.
        """
        last: dict[int, PrefixRun | None] = {0: None}  # the run that ends at a token
        limit = min(limit, self.length)
        for begin in range(0, limit, BLOCK):
            for run in self.runs_from(begin, limit) if begin in last else ():
                if run.end not in last and is_known(run.key):
                    last[run.end] = run
        found: list[PrefixRun] = []
        end = max(last)
        while (ending := last[end]) is not None:
            found.insert(0, ending)
            end = ending.begin
        return found


class PauseHint(NamedTuple):
    """Wishes of the caller for the conversation that an answer belongs to."""

    name: str | None = None
    """Name of the conversation. Defaults to the key of its first states."""
    seconds: float | None = None
    """Seconds after which the next turn may come. The states stay that long, within the budget."""
    keeper: Keeper = Keeper()
    """The caller, with its budget."""


_NO_HINT = PauseHint()


@dataclass(frozen=True, slots=True)
class ResumedContext:
    """A context whose first own tokens are read from kept states."""

    context: Context
    lease: Lease | None = None
    """Lease of the states, if there are any."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Number of these tokens by the tier of their states."""
    keep: KeepStates | None = None
    """Keeps the states that are computed now, for the next turn."""


@dataclass(eq=False)
class Conversations:
    """The kept conversations of a namespace. Thread-safe."""

    encoder: ModuleEncoder
    """Encoder of the namespace's modules, which knows model and store."""
    rows: ConversationStates
    """Owners of the states."""
    background: ThreadPoolExecutor
    """Thread that stores states."""
    storage: ConversationStorage
    """`OpenConfig.conversation_storage`."""
    seconds: float
    """Seconds after its last turn at which a conversation ends."""
    least_tokens: int
    """Fewest own tokens of a prompt and its answer that are kept."""
    compute_rate: Callable[[], float]
    """Returns the tokens of prompts that the engine computes a second. 0 before the first."""
    ended: bool = field(default=False, init=False)
    """Whether the namespace was deleted: nothing is kept any more."""
    retentions: Retentions = field(init=False)
    """States that pausing callers want to find again."""
    _arriving: dict[KVKey, Future[None]] = field(default_factory=dict, init=False)  # being stored
    _resumed: Counter[str] = field(default_factory=Counter, init=False)
    _counting: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        self.retentions = Retentions(self.encoder.store)

    @property
    def _store(self) -> KVStore:
        return self.encoder.store

    def resume(
        self, context: Context, *, keep: bool = True, hint: PauseHint = _NO_HINT
    ) -> ResumedContext:
        """Read the longest kept prefix of a context's own tokens.

        The last token is computed in any case: the answer continues from its logits.

        Args:
            context: The context.
            keep: Whether the next turn may start from this one.
            hint: Wishes of the caller for the conversation.
        """
        if self.storage == "none" or not all(each.name for each in context.segments):
            return ResumedContext(context)
        keys = PrefixKeys(
            self.encoder.identity, context.segments, context.token_ids, context.position_ids
        )
        runs, lease = self._lease(self._find_readable(keys, len(context.token_ids) - 1))
        keeper = partial(self._keep_answer, context, keys, runs, hint) if keep else None
        if lease is None:
            return ResumedContext(context, keep=keeper)
        tokens = Counter[str]()
        for run in runs:
            tokens[lease.source[run.key]] += run.end - run.begin
        with self._counting:
            self._resumed.update(tokens)
        segments = [
            each for run in runs for each in placed_segments(run, lease.found[run.key], context)
        ]
        read = runs[-1].end
        resumed = replace(
            context,
            segments=(*context.segments, *segments),
            token_ids=context.token_ids[read:],
            position_ids=context.position_ids[read:],
        )
        return ResumedContext(resumed, lease, tokens, keeper)

    def kept_tokens(self, prompt: TokenPrompt) -> int:
        """Return how many of a prompt's own tokens `resume` would read. Leases nothing."""
        if self.storage == "none":
            return 0
        positions, own = zip(*prompt.computed_tokens, strict=True)
        keys = PrefixKeys(self.encoder.identity, prompt.placed_states(), own, positions)
        runs = self._find_readable(keys, len(own) - 1)
        return runs[-1].end if runs else 0

    def _lease(self, runs: list[PrefixRun]) -> tuple[list[PrefixRun], Lease | None]:
        """Lease the states of runs. Returns the first of them that are there, and the lease."""
        if not runs:
            return [], None
        for run in runs:
            if arriving := self._arriving.get(run.key):
                arriving.result()
        lease = self._store.fetch([run.key for run in runs])
        here = list(takewhile(lambda run: run.key in lease.found, runs))
        if not here:
            lease.release()
            return [], None
        return here, lease

    def _keep_answer(
        self,
        context: Context,
        prompt: PrefixKeys,
        read: list[PrefixRun],
        hint: PauseHint,
        computed: ComputedTokens,
    ) -> None:
        """Keep the states that were computed for an answer. Runs in the engine's thread.

        Args:
            context: The context of the whole prompt.
            prompt: Keys of its runs.
            read: Runs of the prompt that were read.
            hint: Wishes of the caller for the conversation.
            computed: Tokens that were computed behind these runs.
        """
        begin = read[-1].end if read else 0
        tokens = (*context.token_ids[:begin], *computed.token_ids)
        positions = (*context.position_ids[:begin], *computed.position_ids)
        busy = len(self._arriving) > MOST_ARRIVING
        if self.ended or busy or len(tokens) < self.least_tokens:
            return
        keys = prompt.extended(tokens, positions)
        runs = list(_new_runs(keys, begin, len(context.token_ids)))
        states = {
            run.key: computed.read(run.begin - begin, run.end - begin)
            for run in runs
            if not self._is_known(run.key)
        }
        owned = [run.key for run in (*read, *runs)]
        if owned:
            self._store_later(hint, owned, states)

    def resumed_tokens(self) -> dict[str, int]:
        """Return the tokens of earlier turns that were read by this process, by tier."""
        with self._counting:
            return dict(self._resumed)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of all conversations by tier."""
        self._store.ledger.flush()  # counts the states in memory
        return self.rows.sizes()

    def delete(self, name: str | None = None, *, dry_run: bool = False) -> ConversationDeletion:
        """Delete a conversation from every tier, or all of them.

        Args:
            name: `GenerationParams.prompt_cache_key` of the conversation.
            dry_run: Change nothing.
        """
        self.settle()
        self._store.ledger.flush()
        deletion = self.rows.delete(name, dry_run=dry_run)
        self._store.discard(deletion.keys)
        return deletion

    def settle(self) -> None:
        """Wait until the states of answers that have ended are stored."""
        for arriving in list(self._arriving.values()):
            arriving.result()

    def end(self) -> None:
        """Keep nothing any more, also of answers that run. Waits for states that are stored now."""
        self.ended = True
        self.settle()

    def _is_known(self, key: KVKey) -> bool:
        return key in self._arriving or self._store.memory.is_known(key)

    def _find_readable(self, keys: PrefixKeys, limit: int) -> list[PrefixRun]:
        """Return the kept prefix as far as reading it takes less time than computing it."""
        to_read = self._store.memory.seconds_to_read
        return worth_reading(self._find(keys, limit), to_read, self.compute_rate())

    def _find(self, keys: PrefixKeys, limit: int) -> list[PrefixRun]:
        """Return the longest kept prefix, also of states that other processes have stored."""
        while True:
            runs = keys.longest_prefix(self._is_known, limit)
            if self.storage != "disk":
                return runs
            end = runs[-1].end if runs else 0
            following = [run.key for run in keys.runs_from(end, min(limit, keys.length))]
            self._store.look_up(following)
            if not any(map(self._is_known, following)):
                return runs

    def _store_later(
        self, hint: PauseHint, owned: Sequence[KVKey], states: Mapping[KVKey, KVStates]
    ) -> None:
        """Store states in the background. A later turn waits for them."""
        stored = Future[None]()
        self._arriving.update(dict.fromkeys(states, stored))
        try:
            self.background.submit(self._store_states, hint, owned, states, stored)
        except RuntimeError:  # the folder has been closed
            self._end_arrival(states, stored)

    def _store_states(
        self,
        hint: PauseHint,
        owned: Sequence[KVKey],
        states: Mapping[KVKey, KVStates],
        stored: Future[None],
    ) -> None:
        seconds = max(self.seconds, hint.seconds or 0.0)
        try:
            if self.ended:
                return
            self.rows.own(hint.name or owned[0], owned, time.time() + seconds)
            model = self.encoder.model.causal.fingerprint
            # does not wait: a request that holds a lease may wait for these states
            request = LeaseRequest("ingest", CONVERSATION_MODE, None, model, patience=0.0)
            for key, each in states.items():
                if self.storage == "disk":
                    self._store.put_states(key, each, request)
                else:
                    self._store.put_in_memory(key, each, request)
            if hint.seconds is not None:
                self.retentions.add(self._sizes(owned), hint.seconds, hint.keeper)
        except RagCacheError as error:
            logger.warning("%s; states of a conversation are not kept", error)
        finally:
            self._end_arrival(states, stored)

    def _sizes(self, keys: Sequence[KVKey]) -> dict[KVKey, int]:
        """Return the bytes of states in the last tier that has them. Leaves out missing ones."""
        memory = self._store.memory
        with memory.lock:
            return {
                key: index.entries.get(key).nbytes
                for index in memory.indexes
                for key in keys
                if key in index.entries
            }

    def _end_arrival(self, keys: Iterable[KVKey], stored: Future[None]) -> None:
        for key in keys:
            self._arriving.pop(key, None)
        stored.set_result(None)


def _new_runs(keys: PrefixKeys, begin: int, prompt: int) -> Iterator[PrefixRun]:
    """Yield the runs behind the kept ones. One of them ends with the prompt, for other answers."""
    cuts = {begin, keys.length, max(begin, min(prompt // BLOCK * BLOCK, keys.length))}
    for first, last in pairwise(sorted(cuts)):
        for start in range(first, last, MOST_TOKENS):
            yield keys.run(start, min(start + MOST_TOKENS, last))


def worth_reading(
    runs: Sequence[PrefixRun], seconds_to_read: Callable[[KVKey], float], compute_rate: float
) -> list[PrefixRun]:
    """Return the first runs of a prefix whose reading saves the most time.

    A run can be read only behind all runs before it. A run that no rate is known of is read.

    Args:
        runs: Known runs, which follow each other from the first token on.
        seconds_to_read: Returns the seconds of reading the states of a key.
        compute_rate: Tokens that are computed a second. 0 if unknown.
    """
    if not compute_rate:
        return [*runs]
    saved = most = 0.0
    length = 0
    for number, run in enumerate(runs, start=1):
        saved += (run.end - run.begin) / compute_rate - seconds_to_read(run.key)
        if saved >= most:
            most, length = saved, number
    return [*runs[:length]]


def placed_segments(run: PrefixRun, states: StoredStates, context: Context) -> Iterator[Segment]:
    """Yield the states of a run as segments without gaps in their positions."""
    tokens = context.token_ids[run.begin : run.end]
    positions = context.position_ids[run.begin : run.end]
    jumps = [at for at in range(1, len(tokens)) if positions[at] != positions[at - 1] + 1]
    for begin, end in pairwise([0, *jumps, len(tokens)]):
        part = states.part(begin, end, positions[begin])
        yield Segment(part, positions[begin], f"{run.key}[{begin}:{end}]", tokens[begin:end])
