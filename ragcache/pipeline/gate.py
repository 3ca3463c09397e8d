"""The gate: measures how far a mode is from `exact` before it serves on a model.

Built-in prompts place small documents in several orders at several positions. The gate compares the
distribution of each answer's first token in the mode with the distribution of the same prompt
computed as a whole, and refuses the mode if the two are too far apart. It also counts how many
answers stay the same, and proposes the cheapest mode that keeps nine of ten.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from statistics import fmean
from typing import NamedTuple, Self

from ragcache.db import Ledger
from ragcache.engine import Choice, Context, EncodeJob, LLMEngine, Request, SamplingParams, Segment
from ragcache.errors import EngineClosed, ModeRefused, PromptTooLong, StoreError
from ragcache.fidelity import compare_first_tokens
from ragcache.models import LoadedModel, prompt_frame
from ragcache.modes import GATED, ROOTED, Encoding, ReuseMode
from ragcache.pipeline.ask import lay_out, question_ids
from ragcache.pipeline.blend import blend_prompt
from ragcache.pipeline.module_states import Surroundings
from ragcache.pipeline.prompt import ModuleGroup, PromptLayout, build_context
from ragcache.states import KVKey, KVStates
from ragcache.states.quantization import KVDtype, quantize

logger = logging.getLogger(__name__)

VERSION = 2
"""Version of the measurement. Results of other versions are ignored."""

SHARE = 0.5
"""Limit of a mode's distance from `exact`, as a share of the distance between answers over
different documents."""

LEAST_LIMIT, MOST_LIMIT = 0.5, 2.0
"""Bounds of the limit, in nats (docs/internals/adr/0038-a-gate-for-modes.md)."""

ANSWER_TOKENS = 8
"""Most tokens of the answers that are compared."""

BOUND = 0.9
"""Share of answers that must be those of `exact` for a mode to be proposed as the default."""

PRIORITY = -360
"""Priority of a measurement's requests: prompts that arrive within an hour go first."""

WAVE = 8
"""Requests of a measurement that are submitted at once."""


class GateDocument(NamedTuple):
    """A built-in document, and questions that it answers."""

    text: str
    questions: tuple[str, str, str]


DOCUMENTS = (
    GateDocument(
        "# The ferry\n\nThe ferry Odalys crosses the sound at 7:40 and at 16:15. A return ticket "
        "costs 11 crowns. Bicycles travel free on weekdays. Tickets are sold by Henrike Solberg at "
        "the landing stage.",
        (
            "What does a return ticket for the ferry cost?",
            "Who sells the tickets of the ferry?",
            "When does the ferry cross the sound?",
        ),
    ),
    GateDocument(
        "# The mill\n\nThe windmill on Carrow Hill was built in 1783 by Anselm Prout. It grinds "
        "rye on Tuesdays and barley on Fridays. The miller, Jorun Askvik, keeps the key in a blue "
        "tin.",
        (
            "Who built the windmill?",
            "What does the mill grind on Fridays?",
            "Where does the miller keep the key?",
        ),
    ),
    GateDocument(
        "# The orchard\n\nThe orchard has 214 trees: pears along the wall, quinces by the well. "
        "The harvest begins on 9 September. Pickers are paid 16 crowns an hour by Teodor Lanz.",
        (
            "How many trees does the orchard have?",
            "When does the harvest begin?",
            "Who pays the pickers?",
        ),
    ),
    GateDocument(
        "# The school\n\nThe school stands in Weaver Lane and has 58 pupils. Lessons end at half "
        "past one. Ottilie Brandt teaches geography, and the bell is rung by the caretaker, Piet "
        "Moorman.",
        ("In which lane does the school stand?", "Who teaches geography?", "When do lessons end?"),
    ),
    GateDocument(
        "# The bakery\n\nThe bakery opens at five and sells rye bread for 4 crowns. Its oven burns "
        "birch wood. On Sundays Salome Winther bakes cardamom buns, which are gone by eight.",
        (
            "What does rye bread cost?",
            "Which wood does the oven of the bakery burn?",
            "Who bakes cardamom buns?",
        ),
    ),
    GateDocument(
        "# The lighthouse\n\nThe lighthouse at Skarn Point flashes every 12 seconds. It is 31 "
        "meters high and painted red and white. Its keeper, Matthis Oberg, writes a weather report "
        "at dawn.",
        (
            "How high is the lighthouse?",
            "Who is the keeper of the lighthouse?",
            "How often does the lighthouse flash?",
        ),
    ),
    GateDocument(
        "# The market\n\nThe market is held on the second Thursday of the month in Copper Square. "
        "A stall costs 25 crowns. Complaints go to Brigida Fenn, whose office is above the "
        "pharmacy.",
        (
            "Where is the market held?",
            "What does a stall cost?",
            "Where is the office of Brigida Fenn?",
        ),
    ),
    GateDocument(
        "# The bridge\n\nThe stone bridge over the Lemm has seven arches and carries 3 tonnes at "
        "most. It was mended in 1956 after the flood. Ludo Karst inspects it each spring by boat.",
        (
            "How many arches does the bridge have?",
            "When was the bridge mended?",
            "Who inspects the bridge?",
        ),
    ),
)

ORDERS = (
    (0, 3, 5, 6),
    (1, 4, 7, 2),
    (3, 6, 1, 4),
    (7, 2, 0, 5),
    (5, 0, 6, 1),
    (2, 7, 4, 3),
)
"""Documents of each prompt, by index into `DOCUMENTS`.

Orders come in three pairs without common documents, so that each document takes three of the four
places. Order n asks question n // 2 of each of its documents."""


@dataclass(frozen=True, slots=True)
class GateResult:
    """The distance of a mode from `exact` on a model, measured over the built-in prompts."""

    mode: str
    """The mode as users write it. A number in it is a power of two."""
    prompts: int
    """Number of prompts."""
    kl_divergence: float
    """Mean Kullback-Leibler divergence of the mode's first-token distributions from the
    distributions of `exact`, in nats."""
    agreement: float
    """Share of prompts with the same likeliest first token, 0 to 1."""
    limit: float
    """Divergence up to which the mode serves, in nats."""
    other_documents: float
    """Divergence between prompts with different documents, in nats: how much the model's answers
    depend on the documents. The limit follows from it."""
    seconds: float
    """Seconds of the measurement, which other modes may have shared."""
    equal_answers: float
    """Share of prompts whose greedy answers, of eight tokens at most, are the answers of `exact`, 0
    to 1."""

    @property
    def passes(self) -> bool:
        """Whether the mode serves."""
        return self.kl_divergence <= self.limit

    def __str__(self) -> str:
        return (
            f"{self.mode} {'serves' if self.passes else 'is refused'}: {self.kl_divergence:.2f} "
            f"nats from exact (limit {self.limit:.2f}), {self.agreement:.0%} of "
            f"{self.prompts} first tokens agree, {int(10 * self.equal_answers)} of 10 answers are "
            "those of exact"
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the JSON of a result."""
        return cls(**json.loads(text))


def propose_mode(results: Iterable[GateResult]) -> GateResult | None:
    """Return the cheapest mode whose answers are near enough to the answers of `exact`.

    Args:
        results: Results of modes that `GATED` lists, by what they compute for a question.

    Returns:
        The result of the proposed mode. None if no mode gives the answers of `exact` to a share
        `BOUND` of the built-in prompts.
    """
    costs = {str(mode): cost for cost, mode in enumerate(GATED)}
    near = [r for r in results if r.passes and r.equal_answers >= BOUND and r.mode in costs]
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
    _known: dict[str, GateResult | None] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _in_background: bool = field(default=False, init=False)
    _wanted: set[str] = field(default_factory=set, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _wanting: threading.Lock = field(default_factory=threading.Lock, init=False)

    def measure_in_background(self, modes: Sequence[ReuseMode] = (ROOTED,)) -> None:
        """Measure modes in a thread, now and whenever a prompt asks for an unknown one.

        Prompts do not wait for it: they are answered in `exact` meanwhile, and
        `Reuse.replaced_mode` names the mode that they asked for. A service calls this at its start,
        and `ragcache ask` for its one question.

        Args:
            modes: Modes to measure now, before any prompt asks for them.
        """
        if not self.model.causal.composes:  # every prompt is answered in `exact`
            return
        self._in_background = True
        for mode in modes:
            self.defers(mode)

    def defers(self, mode: ReuseMode) -> bool:
        """Tell whether prompts in a mode are to be answered in `exact` while it is measured.

        Starts the measurement. False unless modes are measured in the background.
        """
        if self.forced or not self._in_background or not mode.reads_states:
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
        if self.forced or not mode.reads_states:
            return True
        name = str(mode.measured)
        if name not in self._known:
            self._read(name)
        result = self._known.get(name)
        return name in self._known and (result is None or result.passes)

    def check_mode(self, mode: ReuseMode) -> None:
        """Refuse a mode that is too far from `exact`. Measures it if its result is unknown.

        Raises:
            ModeRefused: The mode is too far from `exact` on this model, or the model cannot read
                states.
        """
        if not mode.reads_states:
            return
        if not self.model.causal.composes:
            raise ModeRefused(
                f"mode {str(mode)!r} is refused on this model, which has recurrent layers: their "
                "states are sums over a whole text, so states of documents are not read. Ask in "
                "mode exact"
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
        return sorted({r.mode: r for r in (*known, *own)}.values(), key=lambda r: r.mode)

    def _fact(self, mode: str) -> str:
        causal = self.model.causal
        model = f"{causal.fingerprint}/{self.model.tokenizer_fingerprint}/{causal.device.type}"
        return f"gate/{VERSION}/{model}/{mode}"

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
        for result in measure_modes(self.model, self.engine, parsed) or ():
            self._known[result.mode] = result
            self._write(result)
        for mode in modes:
            self._known.setdefault(mode, None)

    def _write(self, result: GateResult) -> None:
        if self.ledger is None:
            return
        try:
            self.ledger.agree_on_fact(self._fact(result.mode), json.dumps(asdict(result)))
        except StoreError as error:
            logger.warning("%s; the result of mode %s is not kept", error, result.mode)


def measure_modes(
    model: LoadedModel, engine: LLMEngine, modes: Sequence[ReuseMode]
) -> list[GateResult] | None:
    """Measure modes over the built-in prompts.

    Prompts hold four documents each, or as many as the model's window allows. Without room for two,
    or if the model cannot read states, there is no result. Errors of the engine are raised
    unchanged.
    """
    if not model.causal.composes:
        return None
    for documents in (4, 3, 2):
        try:
            return _Measurement(model, engine, documents).run(modes)
        except PromptTooLong as error:
            logger.info("prompts of %d documents do not fit: %s", documents, error)
    return None


def measure_int8(model: LoadedModel, engine: LLMEngine) -> GateResult | None:
    """Measure `rooted` over the built-in prompts with states that were kept in eight bits.

    Returns None without room for two documents in the model's window.
    """
    for documents in (4, 3, 2):
        try:
            [result] = _Measurement(model, engine, documents, "int8").run([ROOTED])
            return result
        except PromptTooLong as error:
            logger.info("prompts of %d documents do not fit: %s", documents, error)
    return None


class _Slot(NamedTuple):
    """A document as it is encoded for a prompt."""

    document: int
    encoding: Encoding
    start: int | None
    """Position of states that cannot move."""


class _Measurement:
    """The built-in prompts in the tokens of a model, asked through the engine that serves it.

    Holds the states of at most one whole prompt and eight documents at a time.
    """

    def __init__(
        self, model: LoadedModel, engine: LLMEngine, count: int, kv_dtype: KVDtype = "model"
    ) -> None:
        """Tokenize the prompts, with `count` documents each. States are kept in `kv_dtype`."""
        self.kv_dtype = kv_dtype
        self.causal, self.engine, self.stop_ids = model.causal, engine, model.stop_ids
        frame = prompt_frame(model.tokenizer)
        self.preamble = tuple(model.encode(frame.preamble))
        self.surroundings = Surroundings(model, self.preamble)
        self.documents = [tuple(model.encode_untrusted(each.text)) for each in DOCUMENTS]
        self.orders = [order[:count] for order in ORDERS]
        self.questions = [
            [question_ids(model, frame, DOCUMENTS[each].questions[n // 2]) for each in order]
            for n, order in enumerate(self.orders)
        ]

    def run(self, modes: Sequence[ReuseMode]) -> list[GateResult]:
        begin = time.perf_counter()
        exact, others = self._in_exact()
        answers = [choice.token_ids for choice in exact]
        distance = compare_first_tokens(exact, others).kl_divergence
        limit = min(max(SHARE * distance, LEAST_LIMIT), MOST_LIMIT)
        found = []
        for mode in modes:
            choices = self._in_mode(mode)
            equal = [c.token_ids == answer for c, answer in zip(choices, answers, strict=True)]
            found.append((mode, compare_first_tokens(exact, choices), fmean(equal)))
        seconds = time.perf_counter() - begin
        return [
            GateResult(
                str(mode),
                len(exact),
                each.kl_divergence,
                each.agreement,
                limit,
                distance,
                seconds,
                equal,
            )
            for mode, each, equal in found
        ]

    def _in_exact(self) -> tuple[list[Choice], list[Choice]]:
        """Return the answers to all questions over prompts that are computed as a whole.

        The first list is over the documents of each question, the second over other documents,
        where answers have one token.
        """
        own: list[list[Choice]] = [[] for _ in self.orders]
        others: list[list[Choice]] = [[] for _ in self.orders]
        for n, order in enumerate(self.orders):
            tokens = [*self.preamble, *chain(*(self.documents[each] for each in order))]
            [whole] = self.engine.encode([EncodeJob(tokens)])
            own[n] = self._answers([_after(whole, each) for each in self.questions[n]])
            others[n ^ 1] = self._answers([_after(whole, q) for q in self.questions[n ^ 1]], 1)
        return list(chain(*own)), list(chain(*others))

    def _in_mode(self, mode: ReuseMode) -> list[Choice]:
        """Return the answers to all questions in a mode, over `AskPipeline`'s layout."""
        [root] = self.engine.encode([EncodeJob(self.preamble)])
        layouts = [
            self._lay_out(order, question, mode)
            for order, questions in zip(self.orders, self.questions, strict=True)
            for question in questions
        ]
        slots = dict.fromkeys(slot for layout in layouts for slot in self._slots(layout))
        encoded = self._encoded(list(slots))
        contexts = []
        for layout in layouts:
            states = [root, *(encoded[slot] for slot in self._slots(layout))]
            states = [quantize(each, self.kv_dtype).restore() for each in states]
            prompt = layout.prompt()
            if percent := mode.blend_percent:
                token_ids = [group.token_ids for group in layout.groups]
                prompt = blend_prompt(prompt, percent, states, token_ids, self.causal, self.engine)
            contexts.append(build_context(prompt, [KVKey("")] * len(states), states))
        return self._answers(contexts)

    def _lay_out(
        self, order: Sequence[int], question: Sequence[int], mode: ReuseMode
    ) -> PromptLayout:
        layout, groups, start = PromptLayout(self.preamble), [], len(self.preamble)
        for each in order:
            groups.append(ModuleGroup((each,), self.documents[each], start))
            start += len(self.documents[each])
        lay_out(layout, groups, question, mode)
        return layout

    def _slots(self, layout: PromptLayout) -> list[_Slot]:
        """Return each document of a prompt with its encoding.

        States that cannot move are encoded at their place in the prompt.
        """
        movable = self.causal.scheme.movable
        return [
            _Slot(group.modules[0], group.encoding, None if movable else group.start)
            for group in layout.groups[1:]
        ]

    def _encoded(self, slots: Sequence[_Slot]) -> dict[_Slot, KVStates]:
        """Encode documents behind the tokens that they see."""
        seen: dict[tuple[int, ...], Segment | None] = {(): None}
        jobs = []
        for slot in slots:
            token_ids = self.documents[slot.document]
            before, at = self.surroundings.place(len(token_ids), slot.encoding, slot.start)
            if before not in seen:
                [states] = self.engine.encode([EncodeJob(before)])
                seen[before] = Segment(states, 0)
            jobs.append(EncodeJob(token_ids, at, seen[before]))
        return dict(zip(slots, self.engine.encode(jobs), strict=True))

    def _answers(self, contexts: Sequence[Context], tokens: int = ANSWER_TOKENS) -> list[Choice]:
        sampling = SamplingParams(first_logprobs=True)
        wave = min(WAVE, self.engine.config.queue)
        choices: list[Choice] = []
        for start in range(0, len(contexts), wave):
            handles = [
                self.engine.submit_request(
                    Request(
                        context,
                        tokens,
                        stop_ids=self.stop_ids,
                        sampling=sampling,
                        priority=PRIORITY,
                    )
                )
                for context in contexts[start : start + wave]
            ]
            choices += [handle.result().choices[0] for handle in handles]
        return choices


def _after(states: KVStates, question: Sequence[int]) -> Context:
    """Return the context of a question that directly follows the states of its documents."""
    end = states.length + len(question)
    positions = tuple(range(states.length, end))
    return Context((Segment(states, 0),), tuple(question), positions, end)
