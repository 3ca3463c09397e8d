"""The gate: a mode serves on a model once it has been measured near enough to `exact`.

The gate measures each mode once for a folder, refuses a mode that is too far, and proposes the
cheapest mode that keeps nine of ten answers (`ragcache.pipeline.gate_measurement`).
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from ragcache.db import Ledger
from ragcache.engine import LLMEngine
from ragcache.errors import EngineClosed, ModeRefused, StoreError
from ragcache.models import LoadedModel
from ragcache.modes import COMPOSITIONS, GATED, Compose, ReuseMode
from ragcache.pipeline.gate_measurement import (
    GateResult,
    SizeResult,
    measure_compositions,
    measure_modes,
)
from ragcache.pipeline.gate_sizes import measure_sizes

logger = logging.getLogger(__name__)

VERSION = 3
"""Version of the measurement. Results of other versions are ignored."""

BOUND = 0.9
"""Share of answers that must be those of `exact` for a mode to be proposed as the default."""


def propose_mode(results: Iterable[GateResult]) -> GateResult | None:
    """Return the cheapest mode whose answers are near enough to the answers of `exact`.

    Args:
        results: Results of modes that `GATED` lists, by what they compute for a question.

    Returns:
        The result of the proposed mode. None if no mode gives the answers of `exact` to a share
        `BOUND` of the prompts that were measured.
    """
    costs = {str(mode): cost for cost, mode in enumerate(GATED)}
    near = [r for r in results if r.passes and r.equal_share >= BOUND and r.mode in costs]
    return min(near, key=lambda result: costs[result.mode], default=None)


@dataclass(eq=False)
class ModeGate:
    """Measures modes on a model, and refuses modes that are too far from `exact`.

    The ledger keeps each result under the model, its tokenizer and the type of its device, so that
    a mode is measured once per folder. Thread-safe: one caller measures, others wait.
    """

    model: LoadedModel
    engine: LLMEngine
    ledger: Ledger | None
    """The ledger that keeps the results. Without it they stay in memory."""
    forced: bool = False
    """Whether every mode serves without being measured."""
    compose: Literal["auto", "order", "both"] = "auto"
    """How documents compose in recurrent layers. See `OpenConfig.compose`."""
    _known: dict[str, GateResult | None] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _sizes: dict[str, tuple[SizeResult, ...]] = field(default_factory=dict, init=False)
    _in_background: bool = field(default=False, init=False)
    _wanted: set[str] = field(default_factory=set, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _wanting: threading.Lock = field(default_factory=threading.Lock, init=False)

    def measure_in_background(self, modes: Sequence[ReuseMode] | None = None) -> None:
        """Measure modes in a thread, now and whenever a prompt asks for an unknown one.

        Prompts do not wait for it: they are answered in `exact` meanwhile, and
        `Reuse.replaced_mode` names the mode that they asked for. A service calls this at its start,
        and `ragcache ask` for its one question.

        Args:
            modes: Modes to measure now, before any prompt asks for them. Defaults to the model's
                default mode.
        """
        if not self.model.causal.composes:  # every prompt is answered in `exact`
            return
        self._in_background = True
        for mode in (self.model.default_mode,) if modes is None else modes:
            self.defers(mode)

    def defers(self, mode: ReuseMode) -> bool:
        """Tell whether prompts in a mode are to be answered in `exact` while it is measured.

        Starts the measurement. False unless modes are measured in the background.
        """
        if self.forced or not self._in_background or not mode.reads_states:
            return False
        if not self._readable(mode):  # it is refused at once
            return False
        name = str(mode.measured)
        if name not in self._known and name not in self._wanted:
            self._read(name)
        if name in self._known:
            return False
        with self._wanting:
            self._wanted.add(name)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._measure_wanted, name="ragcache-gate", daemon=True
                )
                self._thread.start()
        return True

    def join(self) -> None:
        """Wait for the thread that measures, which a closed engine ends."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _measure_wanted(self) -> None:
        """Measure modes until none is wanted. After an error, the next prompt starts again."""
        while True:
            with self._wanting:
                names = sorted(self._wanted - self._known.keys())
                if not names:
                    self._wanted.clear()
                    self._thread = None
                    return
            try:
                self._results(names)
            except Exception as error:  # prompts go on in `exact`
                if not isinstance(error, EngineClosed):
                    logger.warning(
                        "%s could not be measured, and prompts are answered in exact: %r",
                        ", ".join(names),
                        error,
                    )
                with self._wanting:
                    self._wanted.clear()
                    self._thread = None
                return

    def passes(self, mode: ReuseMode) -> bool:
        """Tell whether a mode may serve. Measures nothing: a mode without a result may not."""
        if not mode.reads_states:
            return True
        if not self._readable(mode):
            return False
        if self.forced:
            return True
        name = str(mode.measured)
        if name not in self._known:
            self._read(name)
        result = self._known.get(name)
        return name in self._known and (result is None or result.passes)

    def is_near(self, mode: ReuseMode) -> bool:
        """Tell whether a mode was measured near enough to `exact`. Measures nothing."""
        return self.passes(mode) and self._known.get(str(mode.measured)) is not None

    def _readable(self, mode: ReuseMode) -> bool:
        """Whether the model can read states as a mode that reads states does."""
        causal = self.model.causal
        return causal.composes and (causal.divides or not mode.reads_parts)

    def check_mode(self, mode: ReuseMode) -> None:
        """Refuse a mode that is too far from `exact`. Measures it if its result is unknown.

        Raises:
            ModeRefused: The mode is too far from `exact` on this model, or the model cannot read
                states.
        """
        if not mode.reads_states:
            return
        causal = self.model.causal
        if not causal.composes:
            raise ModeRefused(
                f"mode {str(mode)!r} is refused on this model, which has recurrent layers that are "
                "not known to be affine in their states, so states of documents are not read. Ask "
                "in mode exact"
            )
        if mode.reads_parts and not causal.divides:
            raise ModeRefused(
                f"mode {str(mode)!r} is refused on this model: it reads parts of modules, and the "
                "model has recurrent layers, which keep one map of a whole module. Ask in mode "
                "rooted or exact"
            )
        if self.forced:
            return
        [result] = self._results([str(mode.measured)], waiting=True)
        if result is not None and not result.passes:
            raise ModeRefused(
                f"mode {str(mode)!r} is refused on this model: over {result.prompts} built-in "
                f"prompts its first tokens are {result.kl_divergence:.2f} nats from those of exact "
                f"(limit {result.limit:.2f}), and {result.agreement:.0%} agree. Ask in mode exact "
                "or in another that `ragcache doctor` shows to be near, or force it: "
                "RagCache.open(force_modes=True), --force-modes, RAGCACHE_FORCE_MODES=1"
            )

    def composition(self, mode: ReuseMode) -> Compose:
        """Return how documents compose in recurrent layers in a mode: `order` if the mode is not
        measured. Measures nothing."""
        if self.compose != "auto":
            return self.compose
        name = str(mode.measured)
        if self.forced and not self.model.causal.divides and name not in self._known:
            self._read(name)  # no check of the mode has read it
            self._known.setdefault(name, None)
        result = self._known.get(name)
        return "order" if result is None else result.compose

    def measure(self, modes: Sequence[str | ReuseMode] = GATED) -> list[GateResult | None]:
        """Return the results of modes, in order. Measures modes whose results are unknown.

        Args:
            modes: Modes, or their texts. Defaults to one mode of each kind.

        Returns:
            A result for each mode. Without a result, the model's window or the engine's pool is too
            small for the prompts, or the model cannot read states.

        Raises:
            RequestError: The engine failed.
            ConfigurationError: A mode is unknown.
        """
        return self._results([str(ReuseMode.parse(mode).measured) for mode in modes])

    def measure_sizes(
        self, modes: Sequence[str | ReuseMode] = GATED, seconds: float = 30.0
    ) -> list[GateResult]:
        """Return the results of modes with their distance by number and length of modules.

        Measures sizes that the ledger does not have for all of the modes.

        Args:
            modes: Modes, or their texts. Modes that are refused or cannot be measured are left out.
            seconds: Time after which no size begins.

        Raises:
            RequestError: The engine failed.
            ConfigurationError: A mode is unknown.
        """
        found = [each for each in self.measure(modes) if each is not None and each.passes]
        if not self.model.causal.divides:  # their prompts have several sizes already
            return found
        known = {each.mode: self._sizes_of(each.mode) for each in found}
        if not all(known.values()):
            wanted = [ReuseMode.parse(mode) for mode in known]
            with self._lock:
                measured = measure_sizes(self.model, self.engine, wanted, seconds)
            for mode, sizes in measured.items():
                self._write(self._sizes_fact(str(mode)), [asdict(each) for each in sizes])
                self._sizes[str(mode)] = known[str(mode)] = sizes
        return [replace(each, sizes=known[each.mode]) for each in found]

    def _sizes_of(self, mode: str) -> tuple[SizeResult, ...]:
        """Return the known results of a mode by size. Measures nothing."""
        if mode not in self._sizes and self.ledger is not None:
            with suppress(StoreError):
                text = self.ledger.get_fact(self._sizes_fact(mode))
                if text is not None:
                    self._sizes[mode] = tuple(SizeResult(**each) for each in json.loads(text))
        return self._sizes.get(mode, ())

    def _results(self, names: Sequence[str], *, waiting: bool = False) -> list[GateResult | None]:
        """Return the results of modes. Warns if an answer is waiting for a measurement."""
        with self._lock:
            for name in set(names) - self._known.keys():
                self._read(name)
            if missing := sorted(set(names) - self._known.keys()):
                logger.log(
                    logging.WARNING if waiting else logging.INFO,
                    "measuring how far %s is from exact on this model, once for this folder%s",
                    ", ".join(missing),
                    "; the first answer waits for it" if waiting else "",
                )
                self._measure(missing)
            return [self._known[name] for name in names]

    def results(self) -> list[GateResult]:
        """Return the known results of this model, sorted by mode. Measures nothing."""
        facts = {} if self.ledger is None else self.ledger.facts(self._fact(""))
        known = [GateResult.parse(text) for text in facts.values()]
        own = (result for result in self._known.copy().values() if result is not None)
        found = sorted({r.mode: r for r in (*known, *own)}.values(), key=lambda r: r.mode)
        return [replace(each, sizes=self._sizes_of(each.mode)) for each in found]

    def _fact(self, mode: str) -> str:
        causal = self.model.causal
        model = f"{causal.fingerprint}/{self.model.tokenizer_fingerprint}/{causal.device.type}"
        composing = "" if causal.divides else f"{self.compose}:"
        return f"gate/{VERSION}/{model}/{composing}{mode}"

    def _sizes_fact(self, mode: str) -> str:
        return f"sizes/{self._fact(mode)}"

    def _read(self, mode: str) -> None:
        """Read a result from the ledger. If the ledger fails, the mode is measured instead."""
        if self.ledger is None:
            return
        try:
            text = self.ledger.get_fact(self._fact(mode))
        except StoreError as error:
            logger.warning("%s; mode %s is measured again", error, mode)
            return
        if text is not None:
            self._known[mode] = GateResult.parse(text)

    def _measure(self, modes: Sequence[str]) -> None:
        parsed = [ReuseMode.parse(mode) for mode in modes]
        if self.model.causal.divides:
            results = measure_modes(self.model, self.engine, parsed)
        else:
            ways = COMPOSITIONS if self.compose == "auto" else (self.compose,)
            results = measure_compositions(self.model, self.engine, parsed, ways)
        for result in results or ():
            self._known[result.mode] = result
            self._write(self._fact(result.mode), asdict(result))
        for mode in modes:
            self._known.setdefault(mode, None)

    def _write(self, fact: str, value: object) -> None:
        if self.ledger is None:
            return
        try:
            self.ledger.agree_on_fact(fact, json.dumps(value))
        except StoreError as error:
            logger.warning("%s; the result %s is not kept", error, fact)
