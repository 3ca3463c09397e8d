"""Distance of a mode from `exact` on a model, measured over the prompts of the gate.

Built-in prompts place small documents in several orders at several positions. The distribution of
each answer's first token in a mode is compared with the distribution of the same prompt computed as
a whole, and equal answers are counted.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import NamedTuple, Self

from ragcache.engine import Choice, Context, EncodeJob, LLMEngine, Request, SamplingParams, Segment
from ragcache.errors import PromptTooLong
from ragcache.fidelity import compare_first_tokens
from ragcache.models import LoadedModel, prompt_frame
from ragcache.modes import COMPOSITIONS, ROOTED, Compose, Encoding, ReuseMode
from ragcache.pipeline.ask import lay_out, question_ids
from ragcache.pipeline.module_states import Surroundings
from ragcache.pipeline.prompt import ModuleGroup, PromptLayout, TokenPrompt, build_context
from ragcache.states import KVKey, KVStates
from ragcache.states.quantization import KVDtype, quantize

logger = logging.getLogger(__name__)

SHARE = 0.5
"""Limit of a mode's distance from `exact`, as a share of the distance between answers over
different documents."""

LEAST_LIMIT, MOST_LIMIT = 0.5, 2.0
"""Bounds of the limit, in nats (docs/internals/adr/0038-a-gate-for-modes.md)."""

ANSWER_TOKENS = 8
"""Most tokens of the answers that are compared."""

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

PEOPLE = (
    "Amund Berg",
    "Cora Ellis",
    "Ines Falk",
    "Jakob Lund",
    "Mirka Toth",
    "Olav Reim",
    "Pia Stark",
)
THINGS = (
    *("ladders", "lamps", "nets", "ovens", "pumps", "ropes", "scales", "tables"),
    *("tents", "tools", "wagons"),
)
PLACES = (
    *("the old barn", "the town hall", "the harbor", "the station", "the cellar of the inn"),
    *("the boathouse", "the north tower", "the workshop", "the greenhouse"),
)
DAYS = "Monday", "Tuesday", "Wednesday", "Thursday", "Friday"
"""Words of the notices that lengthen documents."""

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
class SizeResult:
    """The distance of a mode from `exact` over prompts of one size."""

    documents: int
    """Number of modules of each prompt."""
    module_tokens: int
    """Number of tokens of each module, about."""
    prompts: int
    kl_divergence: float
    """Mean Kullback-Leibler divergence over the tokens of `exact`'s answers, in nats."""
    equal_answers: float
    """Share of prompts whose greedy answers are the answers of `exact`, 0 to 1."""

    def __str__(self) -> str:
        return f"{self.documents} x {self.module_tokens}: {self.equal_answers:.0%}"


@dataclass(frozen=True, slots=True)
class GateResult:
    """The distance of a mode from `exact` on a model, measured over the built-in prompts."""

    mode: str
    """The mode as users write it. A number in it is a power of two."""
    prompts: int
    """Number of prompts. On models with recurrent layers these are the prompts of one size: with as
    many documents as lead farthest from `exact`."""
    kl_divergence: float
    """Mean Kullback-Leibler divergence of the mode's first-token distributions over these prompts
    from the distributions of `exact`, in nats."""
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
    to 1. The least share over all sizes of prompts, on models with recurrent layers."""
    compose: Compose = "order"
    """How documents compose in recurrent layers: the way that is nearer to `exact`."""
    compositions: Mapping[str, Mapping[str, float]] = field(default_factory=dict, hash=False)
    """Divergence of each way to compose, by the number of documents. The largest
    divergence of the nearest way decides. Empty for models without recurrent layers."""
    sizes: tuple[SizeResult, ...] = ()
    """The distance by number and length of modules, as far as it was measured
    (`ragcache.pipeline.gate_sizes`)."""

    @property
    def equal_share(self) -> float:
        """Share of answers that are the answers of `exact`: over prompts of all sizes that were
        measured, or else over the built-in prompts, 0 to 1."""
        if not self.sizes:
            return self.equal_answers
        equal = sum(size.prompts * size.equal_answers for size in self.sizes)
        return equal / sum(size.prompts for size in self.sizes)

    @property
    def passes(self) -> bool:
        """Whether the mode serves."""
        return self.kl_divergence <= self.limit

    def __str__(self) -> str:
        composed = f" (documents compose in {self.compose})" if self.compositions else ""
        return (
            f"{self.mode}{composed} {'serves' if self.passes else 'is refused'}: "
            f"{self.kl_divergence:.2f} nats from exact (limit {self.limit:.2f}), "
            f"{self.agreement:.0%} of {self.prompts} first tokens agree, "
            f"{int(10 * self.equal_share)} of 10 answers are those of exact{self._by_size()}"
        )

    def _by_size(self) -> str:
        sizes = ", ".join(map(str, self.sizes))
        return f" (modules x tokens: {sizes})" if sizes else ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the JSON of a result."""
        values = json.loads(text)
        sizes = tuple(SizeResult(**each) for each in values.pop("sizes"))
        return cls(**values, sizes=sizes)


def measure_modes(
    model: LoadedModel,
    engine: LLMEngine,
    modes: Sequence[ReuseMode],
    kv_dtype: KVDtype = "model",
) -> list[GateResult] | None:
    """Measure modes over the built-in prompts.

    Prompts hold four documents each, or as many as the model's window allows. Without room for two
    there is no result. Errors of the engine are raised unchanged.

    Args:
        model: The model.
        engine: The engine of the model.
        modes: Modes.
        kv_dtype: Storage format of the states.
    """
    for documents in (4, 3, 2):
        try:
            return Measurement(model, engine, documents, kv_dtype).run(modes)
        except PromptTooLong as error:
            logger.info("prompts of %d documents do not fit: %s", documents, error)
    return None


def measure_compositions(
    model: LoadedModel,
    engine: LLMEngine,
    modes: Sequence[ReuseMode],
    ways: Sequence[Compose] = COMPOSITIONS,
) -> list[GateResult] | None:
    """Measure modes on a model with recurrent layers, over questions about early documents.

    A state behind many documents forgets the first ones before a state behind few does. Prompts
    therefore hold two, four and eight documents, as far as the window allows, and ask about
    documents of the first half. The largest divergence decides.

    Args:
        model: The model.
        engine: The engine of the model.
        modes: Modes. Modes that read parts of modules have no result.
        ways: Ways to compose documents. The nearest way decides.

    Returns:
        The results. None if the model cannot read states in any of the modes, or without room for
        two documents.
    """
    whole = [mode for mode in modes if not mode.reads_parts]
    if not model.causal.composes or not whole:
        return None
    begin, limit, found = time.perf_counter(), (0.0, 0.0), list[_Composed]()
    for documents in COMPOSED:
        try:
            measurement = Measurement(model, engine, documents, asked=documents // 2)
            exact, others = measurement.in_exact()
            rows = list[_Composed]()  # of one size: all ways are compared over the same sizes
            for mode in whole:
                prompts = measurement.prompts(mode)
                for way in ways:
                    compared = measurement.compare(prompts, exact, way)
                    rows.append(_Composed(str(mode), way, documents, len(exact), *compared))
        except PromptTooLong as error:
            logger.info("prompts of %d documents do not fit: %s", documents, error)
            break
        found += rows
        if others:
            limit = limit_of(exact, others)
    if not found:
        return None
    seconds = time.perf_counter() - begin
    return [_nearest(str(mode), found, *limit, seconds) for mode in whole]


COMPOSED = (2, 4, 8)
"""Numbers of documents of the prompts over which compositions are measured."""


class _Composed(NamedTuple):
    """A mode and a way to compose, compared with `exact` over prompts of one size."""

    mode: str
    way: Compose
    documents: int
    prompts: int
    kl_divergence: float
    agreement: float
    equal_answers: float


def _nearest(
    mode: str, found: Sequence[_Composed], limit: float, distance: float, seconds: float
) -> GateResult:
    """Return the result of a mode: of the nearest way, the number of documents that is worst."""
    ways: dict[Compose, list[_Composed]] = {}
    for each in found:
        if each.mode == mode:
            ways.setdefault(each.way, []).append(each)
    worst = {way: max(rows, key=lambda row: row.kl_divergence) for way, rows in ways.items()}
    nearest = min(worst.values(), key=lambda row: row.kl_divergence)
    rows = ways[nearest.way]
    return GateResult(
        mode,
        nearest.prompts,
        nearest.kl_divergence,
        nearest.agreement,
        limit,
        distance,
        seconds,
        min(row.equal_answers for row in rows),
        nearest.way,
        {way: {str(r.documents): r.kl_divergence for r in each} for way, each in ways.items()},
    )


def limit_of(exact: Sequence[Choice], others: Sequence[Choice]) -> tuple[float, float]:
    """Return the limit of a mode's divergence from `exact`, and the divergence between answers over
    different documents, from which the limit follows."""
    distance = compare_first_tokens(exact, others).kl_divergence
    return min(max(SHARE * distance, LEAST_LIMIT), MOST_LIMIT), distance


def measure_int8(model: LoadedModel, engine: LLMEngine) -> GateResult | None:
    """Measure `rooted` over the built-in prompts with states that were kept in eight bits.

    Returns None without room for two documents in the model's window, or if the model cannot read
    states.
    """
    if not model.causal.composes:
        return None
    found = measure_modes(model, engine, [ROOTED], "int8")
    return None if found is None else found[0]


class _Slot(NamedTuple):
    """A document as it is encoded for a prompt."""

    document: int
    encoding: Encoding
    start: int | None
    """Position of states that cannot move."""


class MeasuredPrompt(NamedTuple):
    """A prompt, and the states that it reads."""

    prompt: TokenPrompt
    states: list[KVStates]


class Measurement:
    """The built-in prompts in the tokens of a model, asked through the engine that serves it.

    Holds the states of at most one whole prompt and eight documents at a time.
    """

    def __init__(
        self,
        model: LoadedModel,
        engine: LLMEngine,
        count: int,
        kv_dtype: KVDtype = "model",
        asked: int | None = None,
        module_tokens: int = 0,
        orders: int = len(ORDERS),
    ) -> None:
        """Tokenize the prompts.

        Args:
            model: The model.
            engine: The engine of the model.
            count: Number of documents of each prompt.
            kv_dtype: Storage format of the states.
            asked: Number of first documents that are asked about. Defaults to all.
            module_tokens: Number of tokens to which notices lengthen each document.
            orders: Number of orders of the documents.
        """
        self.kv_dtype = kv_dtype
        self.causal, self.engine, self.stop_ids = model.causal, engine, model.stop_ids
        frame = prompt_frame(model.tokenizer, model.instruction)
        self.preamble = tuple(model.encode(frame.preamble))
        self.surroundings = Surroundings(model, self.preamble)
        every = range(len(DOCUMENTS))
        self.documents = [_lengthened(each, module_tokens, model) for each in every]
        rests = [[each for each in every if each not in order] for order in ORDERS]
        whole = zip(ORDERS[:orders], rests[:orders], strict=True)
        self.orders = [(*order, *rest)[:count] for order, rest in whole]
        self.questions = [
            [
                question_ids(model, frame, DOCUMENTS[each].questions[n // 2])
                for each in order[:asked]
            ]
            for n, order in enumerate(self.orders)
        ]

    def run(self, modes: Sequence[ReuseMode]) -> list[GateResult]:
        begin = time.perf_counter()
        exact, others = self.in_exact()
        limit, distance = limit_of(exact, others)
        found = [(str(mode), *self.compare(self.prompts(mode), exact)) for mode in modes]
        seconds = time.perf_counter() - begin
        return [
            GateResult(mode, len(exact), divergence, agreement, limit, distance, seconds, equal)
            for mode, divergence, agreement, equal in found
        ]

    def compare(
        self, prompts: Sequence[MeasuredPrompt], exact: Sequence[Choice], compose: Compose = "order"
    ) -> tuple[float, float, float]:
        """Return divergence, agreement and share of equal answers of prompts, beside `exact`."""
        contexts = [
            build_context(prompt, [KVKey("")] * len(states), states, compose)
            for prompt, states in prompts
        ]
        choices = self._answers(contexts)
        compared = compare_first_tokens(exact, choices)
        pairs = zip(choices, exact, strict=True)
        equal = fmean(one.token_ids == other.token_ids for one, other in pairs)
        return compared.kl_divergence, compared.agreement, equal

    def in_exact(self) -> tuple[list[Choice], list[Choice]]:
        """Return the answers to all questions over prompts that are computed as a whole.

        The first list is over the documents of each question, the second over other documents,
        where answers have one token. It is empty if prompts hold all documents.
        """
        own: list[list[Choice]] = [[] for _ in self.orders]
        others: list[list[Choice]] = [[] for _ in self.orders]
        for n, order in enumerate(self.orders):
            tokens = [*self.preamble, *chain(*(self.documents[each] for each in order))]
            [whole] = self.engine.encode([EncodeJob(tokens)])
            own[n] = self._answers([after_states(whole, each) for each in self.questions[n]])
            if len(order) < len(self.documents):
                others[n ^ 1] = self._answers(
                    [after_states(whole, q) for q in self.questions[n ^ 1]], 1
                )
        return list(chain(*own)), list(chain(*others))

    def prompts(self, mode: ReuseMode) -> list[MeasuredPrompt]:
        """Return the prompts of all questions in a mode, in `AskPipeline`'s layout."""
        [root] = self.engine.encode([EncodeJob(self.preamble)])
        layouts = [
            self._lay_out(order, question, mode)
            for order, questions in zip(self.orders, self.questions, strict=True)
            for question in questions
        ]
        slots = dict.fromkeys(slot for layout in layouts for slot in self._slots(layout))
        encoded = self._encoded(list(slots))
        prompts = []
        for layout in layouts:
            states = [root, *(encoded[slot] for slot in self._slots(layout))]
            states = [quantize(each, self.kv_dtype).restore() for each in states]
            prompts.append(MeasuredPrompt(layout.prompt(), states))
        return prompts

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


def _lengthened(number: int, tokens: int, model: LoadedModel) -> tuple[int, ...]:
    """Return a built-in document with as many notices as fit into so many tokens."""
    found: tuple[int, ...] = ()
    text, notice = DOCUMENTS[number].text, 100 * number
    longer = tuple(model.encode_untrusted(text))
    while not found or len(longer) <= tokens:
        found = longer
        text = f"{text}\n\n{_notice(notice)}"
        longer = tuple(model.encode_untrusted(text))
        notice += 1
    return found


def _notice(number: int) -> str:
    who, what = PEOPLE[number % len(PEOPLE)], THINGS[number % len(THINGS)]
    where, day = PLACES[number % len(PLACES)], DAYS[number % len(DAYS)]
    return (
        f"Notice {number}: {who} keeps {number % 13 + 2} {what} in {where}, and lends them on "
        f"{day} for {number % 17 + 3} crowns."
    )


def after_states(states: KVStates, question: Sequence[int]) -> Context:
    """Return the context of a question that directly follows the states of its documents."""
    end = states.length + len(question)
    positions = tuple(range(states.length, end))
    return Context((Segment(states, 0),), tuple(question), positions, end)
