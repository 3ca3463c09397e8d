"""The reader's training corpus: sections of text with the questions that they answer.

Sources, each an endless stream of `Section`s:

* `Paragraphs`: the templates of `paragraphs/`, filled anew every time;
* `Sentences`: natural questions over encyclopaedic sentences (sentence_questions.jsonl) with the
  answer spans of `labels/`; numbers and rare words are swapped for others at every reading, so
  that answers cannot be memorised and must be copied;
* `Searches`: natural search questions over a paragraph (qed.jsonl), swapped in the same way;
* `chinese`: Chinese questions over encyclopaedic paragraphs (cmrc2018.trial.json), and `papers`:
  questions over scientific articles (covid_qa.json), drawn like the searches;
* `Natural`: the text that the reader was pretrained on, with questions made by rules;
* `Prose`: plain text without questions, for distraction and for cloze questions.

Of all but the templates some lose the sentence that answers a question, which is then unanswerable.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from markup import is_chinese
from questions import chinese_questions, english_questions, split_sentences
from templates import Filled, Template, fill, parse_file

# Before this line the questions come from articles that XQuAD, an evaluation set, draws on.
FIRST_SENTENCE = 9_995
CHINESE_HELD_OUT = 0.15  # the last paragraphs of the Chinese questions: the evaluation's
LOST_SENTENCES = 0.2  # of the passages lose the sentence that answers one of their questions

Section = Filled


@dataclass(frozen=True)
class Paragraphs:
    templates: tuple[Template, ...]
    swapper: Swapper
    swap_share: float = 0.0  # of the fillings whose rare words are swapped as well

    def draw(self, rng: random.Random) -> Section:
        section = fill(rng.choice(self.templates), rng)
        if rng.random() < self.swap_share:
            section = self.swapper.swapped(section, rng)
        return section if rng.random() > 0.06 else lowered(section)


@dataclass(frozen=True)
class Passage:
    """A natural text with questions; drawn with its numbers and rare words swapped."""

    text: str
    questions: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Passages:
    passages: tuple[Passage, ...]
    swapper: Swapper

    def draw(self, rng: random.Random) -> Section:
        passage = rng.choice(self.passages)
        section = Filled("", passage.text, passage.questions)
        if rng.random() < LOST_SENTENCES:
            section = lose_sentence(section, rng)
        return self.swapper.swapped(section, rng) if rng.random() < 0.6 else section


@dataclass(frozen=True)
class Natural:
    """Documents of one language; a draw is a few paragraphs in a row."""

    documents: tuple[str, ...]
    swapper: Swapper
    longest: int = 1300  # characters of a draw

    def draw(self, rng: random.Random) -> Section:
        section = self._passage(rng)
        for _ in range(2):  # dialogue and lists give few questions: look elsewhere
            if len(section.questions) < 2:
                section = self._passage(rng)
        if rng.random() < LOST_SENTENCES:
            section = lose_sentence(section, rng)
        return self.swapper.swapped(section, rng) if rng.random() < 0.35 else section

    def _passage(self, rng: random.Random) -> Section:
        blocks = rng.choice(self.documents).split("\n\n")
        start = rng.randrange(len(blocks))
        title = next((b for b in reversed(blocks[: start + 1]) if b.startswith("#")), "")
        picked: list[str] = []
        for block in blocks[start:]:
            if block.startswith("#"):
                continue
            room = self.longest - sum(map(len, picked))
            if room < 80:
                break
            picked.append(block if len(block) <= room else _whole_sentences(block, room))
        section = Filled(title.strip("# "), "\n\n".join(filter(None, picked)), ())
        return self._asked(section, rng)

    @staticmethod
    def _asked(section: Section, rng: random.Random) -> Section:
        ask = chinese_questions if is_chinese(section.text) else english_questions
        pairs = []
        for sentence in split_sentences(section.text):
            made = ask(sentence, rng)
            if made:
                pairs.append(rng.choice(made))
        kept = [(q, a) for q, a in pairs if section.text.count(a) <= 3]
        return Filled(section.title, section.text, tuple(rng.sample(kept, min(6, len(kept)))))


def _whole_sentences(block: str, room: int) -> str:
    sentences, length = [], 0
    for sentence in split_sentences(block):
        length += len(sentence) + 1
        if length > room:
            break
        sentences.append(sentence)
    return ("" if is_chinese(block) else " ").join(sentences)


def lose_sentence(section: Section, rng: random.Random) -> Section:
    """Takes out a sentence that alone holds an answer; what it answered is unanswerable then."""
    once = [pair for pair in section.questions if section.text.count(pair[1]) == 1]
    if not once:
        return section
    question, answer = rng.choice(once)
    sentence = next((s for s in split_sentences(section.text) if answer in s), None)
    if sentence is None or len(sentence) > 0.6 * len(section.text):
        return section
    text = " ".join(section.text.replace(sentence, "", 1).split(" ")).replace("  ", " ").strip()
    kept = tuple((q, a) for q, a in section.questions if a in text)
    return Filled(section.title, text, kept, (*section.unanswerable, question))


@dataclass(frozen=True)
class Prose:
    sentences: tuple[tuple[str, ...], ...]

    def draw(self, rng: random.Random) -> Section:
        run = rng.choice(self.sentences)
        start = rng.randrange(max(1, len(run) - 6))
        picked = run[start : start + rng.randint(3, 9)]
        cloze = [c for c in (self._cloze(s, rng) for s in picked) if c]
        return Filled("", " ".join(picked), tuple(rng.sample(cloze, min(2, len(cloze)))))

    @staticmethod
    def _cloze(sentence: str, rng: random.Random) -> tuple[str, str] | None:
        words = sentence.split()
        if len(words) < 9:
            return None
        size = rng.randint(1, 3)
        at = rng.randint(3, len(words) - size - 2)
        answer = " ".join(words[at : at + size]).strip(".,;:!?\"'()")
        left = " ".join(words[max(0, at - rng.randint(4, 9)) : at])
        right = " ".join(words[at + size : at + size + rng.randint(2, 7)])
        return (f"{left} ___ {right}", answer) if answer else None


_WORD = re.compile(r"[A-Za-zÀ-ÿ]+|\d+")


@dataclass(frozen=True)
class Swapper:
    """Swaps rare words and numbers for others, the same way all through a sample."""

    frequent: frozenset[str]
    rare: tuple[str, ...]

    @classmethod
    def over(cls, texts: list[str]) -> Swapper:
        counts = Counter(w.lower() for text in texts for w in _WORD.findall(text))
        ranked = [w for w, _ in counts.most_common() if w.isalpha()]
        rare = tuple(w for w in ranked[2500:] if len(w) > 3)
        return cls(frozenset(ranked[:2500]), rare)

    def swapped(self, section: Section, rng: random.Random) -> Section:
        swap = self._mapping(section, rng)
        questions = tuple((apply_swap(q, swap), apply_swap(a, swap)) for q, a in section.questions)
        vain = tuple(apply_swap(q, swap) for q in section.unanswerable)
        return Filled(apply_swap(section.title, swap), apply_swap(section.text, swap), questions, vain)

    def _mapping(self, section: Section, rng: random.Random) -> dict[str, str]:
        texts = [section.title, section.text, *(t for pair in section.questions for t in pair)]
        texts += section.unanswerable
        words = sorted({w for text in texts for w in _WORD.findall(text)})
        share = rng.uniform(0.2, 0.9)
        return {
            w: self._other(w, rng)
            for w in words
            if (w.isdigit() or (w.lower() not in self.frequent and len(w) > 3))
            and rng.random() < share
        }

    def _other(self, word: str, rng: random.Random) -> str:
        if word.isdigit():
            first = str(rng.randint(1, 9)) if word[0] != "0" else "0"
            if len(word) == 4 and word[:2] in ("18", "19", "20"):
                first, word = word[:2], word[1:]
            return first + "".join(rng.choice("0123456789") for _ in word[1:])
        other = rng.choice(self.rare)
        return other.capitalize() if word[:1].isupper() else other


def apply_swap(text: str, swap: dict[str, str]) -> str:
    return _WORD.sub(lambda m: swap.get(m.group(), m.group()), text) if swap else text


def lowered(section: Section) -> Section:
    questions = tuple((q.lower(), a.lower()) for q, a in section.questions)
    vain = tuple(q.lower() for q in section.unanswerable)
    return Filled(section.title.lower(), section.text.lower(), questions, vain)


def detokenise(text: str) -> str:
    """Undoes Penn-Treebank spacing: `-lrb- afc -rrb-` becomes `(afc)`."""
    for mark, char in {"-lrb-": "(", "-rrb-": ")", "-lsb-": "[", "-rsb-": "]"}.items():
        text = text.replace(mark, char)
    text = text.replace("``", '"').replace("''", '"').replace(" -- ", "–")
    text = re.sub(r" ([,.;:?!%)\]]|'s\b|n't\b|'re\b|'ve\b|'ll\b|'\B)", r"\1", text)
    text = re.sub(r"([(\[$£]) ", r"\1", text)
    text = re.sub(r'" ([^"]*?) ?"', r'"\1"', text)
    return re.sub(r"(\w) - (\w)", r"\1-\2", text).strip()


@dataclass(frozen=True)
class Corpus:
    paragraphs: Paragraphs
    held_out: Paragraphs
    sentences: Passages
    searches: Passages
    chinese: Passages
    papers: Passages
    prose: Prose
    natural: dict[str, Natural] = field(default_factory=dict)  # by language; empty without packs

    def texts(self, rng: random.Random) -> Iterator[str]:
        """Text for the tokenizer, the paragraph templates weighing most."""
        for template in self.paragraphs.templates:
            for _ in range(8):
                section = fill(template, rng)
                yield "\n".join([f"# {section.title}", section.text, *sum(section.questions, ())])
        for source in (self.sentences, self.searches, self.chinese):
            for passage in source.passages:
                yield "\n".join([passage.text, *(q for q, _ in passage.questions)])
        for run in self.prose.sentences:
            yield " ".join(run)


def load_corpus(
    training: Path, data: Path, swap_share: float = 0.3, documents: list[str] | None = None
) -> Corpus:
    """documents: natural text to ask about, of both languages."""
    seen, held_out = load_templates(training)
    sentences = _sentences(data / "sentence_questions.jsonl", training / "labels" / "spans.tsv")
    searches = _searches(data / "qed.jsonl")
    prose = Prose(tuple(_prose(data)))
    everything = [p.text for p in (*sentences, *searches)] + [" ".join(r) for r in prose.sentences]
    swapper = Swapper.over(everything)
    by_language: dict[str, list[str]] = {"en": [], "zh": []}
    for document in documents or ():
        by_language["zh" if is_chinese(document[:600]) else "en"].append(document)
    lengths = {"en": 1300, "zh": 420}
    natural = {k: Natural(tuple(v), swapper, lengths[k]) for k, v in by_language.items() if v}
    return Corpus(
        Paragraphs(tuple(seen), swapper, swap_share),
        Paragraphs(tuple(held_out), swapper),
        Passages(tuple(sentences), swapper),
        Passages(tuple(searches), swapper),
        Passages(tuple(chinese_passages(data / "cmrc2018.trial.json")[0]), swapper),
        Passages(tuple(_papers(data / "covid_qa.json")), swapper),
        prose,
        natural,
    )


def load_templates(training: Path) -> tuple[list[Template], list[Template]]:
    """The paragraphs to train on, and those that `held_out.txt` names (`file paragraph` lines)."""
    held = set((training / "held_out.txt").read_text(encoding="utf-8").splitlines())
    seen: list[Template] = []
    held_out: list[Template] = []
    for file in sorted((training / "paragraphs").glob("*.txt")):
        for template in parse_file(file):
            (held_out if f"{file.stem} {template.name}" in held else seen).append(template)
    return seen, held_out


def _sentences(questions: Path, labels: Path) -> list[Passage]:
    """Runs of neighbouring sentences, each with its labelled questions."""
    spans: dict[int, tuple[int, int]] = {}
    if labels.exists():
        for row in labels.read_text().splitlines():
            number, first, last = map(int, row.split("\t"))
            spans[number] = (first, last)
    facts: dict[str, list[tuple[str, str]]] = {}
    for number, row in enumerate(questions.read_text(encoding="utf-8").splitlines()):
        if number < FIRST_SENTENCE:
            continue
        record = json.loads(row)
        pairs = facts.setdefault(detokenise(record["sentence"]), [])
        if number in spans:
            first, last = spans[number]
            answer = detokenise(" ".join(record["sentence"].split()[first : last + 1]))
            pairs.append((detokenise(record["question"]), answer))
    items = list(facts.items())
    passages = []
    for start in range(0, len(items), 5):
        run = items[start : start + 5]
        text = " ".join(sentence for sentence, _ in run)
        pairs = tuple((q, a) for _, pairs in run for q, a in pairs if a in text)
        passages.append(Passage(text, pairs))
    return passages


def _searches(path: Path) -> list[Passage]:
    passages = []
    for row in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(row)
        text, answer = detokenise(record["context"]), detokenise(record["answers"][0])
        pairs = ((record["question"] + "?", answer),) if answer in text else ()
        passages.append(Passage(" ".join(text.split()[:260]), pairs))
    return passages


def squad_passages(path: Path) -> list[Passage]:
    """The paragraphs of a SQuAD-style file, each with its questions and their first answers."""
    return [
        Passage(p["context"], tuple((q["question"], q["answers"][0]["text"]) for q in p["qas"]))
        for article in json.loads(path.read_text(encoding="utf-8"))["data"]
        for p in article["paragraphs"]
    ]


def chinese_passages(path: Path) -> tuple[list[Passage], list[Passage]]:
    """To train on, and held out."""
    passages = squad_passages(path)
    kept = round(len(passages) * (1 - CHINESE_HELD_OUT))
    return passages[:kept], passages[kept:]


def _papers(path: Path) -> list[Passage]:
    """The surroundings of each answer in a long article."""
    passages = []
    for article in json.loads(path.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            context = paragraph["context"]
            for asked in paragraph["qas"]:
                answer = asked["answers"][0]
                start = context.rfind(". ", 0, max(0, answer["answer_start"] - 300)) + 2
                text = " ".join(context[start : answer["answer_start"] + len(answer["text"]) + 400].split())
                words = " ".join(answer["text"].split())
                if len(words.split()) <= 12 and words in text:
                    passages.append(Passage(text, ((asked["question"], words),)))
    return passages


def _prose(data: Path) -> Iterator[tuple[str, ...]]:
    """Runs of sentences of the plain texts at hand."""
    texts = []
    if (book := data / "war_and_peace.txt").exists():
        texts.append(book.read_text(encoding="utf-8"))
    if (papers := data / "covid_qa.json").exists():
        texts += [p.text for p in squad_passages(papers)]
    if (meetings := data / "qmsum.val.jsonl").exists():
        for row in meetings.read_text(encoding="utf-8").splitlines():
            turns = json.loads(row)["meeting_transcripts"]
            texts.append(detokenise(" ".join(turn["content"] for turn in turns)))
    for text in texts:
        sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z\"“])", " ".join(text.split()))
        kept = tuple(s for s in sentences if 20 < len(s) < 400)
        for start in range(0, len(kept), 60):
            if len(kept[start : start + 60]) > 12:
                yield kept[start : start + 60]
