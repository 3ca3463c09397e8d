"""Questions about natural sentences, made by rules: each asks for a run of the sentence's own words.

English sentences of a simple build are inverted ("The board was founded in 1920 by Ann Lee." gives
"When was the board founded by Ann Lee?"); a Chinese question keeps the order of words and puts a
question word in the answer's place. Sentences that fit no rule give none: text is plentiful.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

Pair = tuple[str, str]  # question, answer

_MONTH = "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
_NUMBER_WORD = (
    "(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|fifteen|twenty|thirty|forty|fifty|"
    "sixty|seventy|eighty|ninety|a hundred|one hundred|several hundred)"
)
_NUMBER = rf"(?:\d[\d,]*(?:\.\d+)?|{_NUMBER_WORD})"
_DATE = re.compile(
    rf"\b(?P<prep>[Ii]n|[Oo]n|[Bb]y|[Ss]ince|[Uu]ntil|[Aa]fter|[Bb]efore|[Dd]uring) "
    rf"(?P<answer>(?:\d{{1,2}} {_MONTH}(?: \d{{4}})?|{_MONTH} \d{{1,2}}(?:, \d{{4}})?|{_MONTH} \d{{4}}|"
    rf"(?:1[0-9]|20)\d\d))\b"
)
_COUNT = re.compile(
    rf"(?P<before>\b(?:about |nearly |at least |more than |over |up to |within )?)"
    rf"(?P<answer>{_NUMBER}(?: (?:million|billion|hundred|thousand))?) (?P<noun>(?:[a-z]+ )?[a-z]{{3,}}s)\b"
)
_BY = re.compile(r"\bby (?P<answer>(?:the )?[A-Z][\w.'’-]+(?: (?:of |the |and )?[A-Z][\w.'’-]+){0,4})(?=[ ,.;]|$)")
_PLACE = re.compile(r"\b(?:in|at|near) (?P<answer>(?:the )?[A-Z][\w'’-]+(?: (?:of )?[A-Z][\w'’-]+){0,3})(?=[ ,.;]|$)")
_OBJECT = re.compile(
    r"^(?P<verb>[a-z]+) (?P<answer>(?:an?|the|its|their|his|her|all|any|each|every) [\w'’ -]+?)"
    r"(?=(?:,|;|\.| (?:to|for|with|in|on|at|by|from|when|if|that|which|who|and|or|before|after|as|"
    r"under|within|until|unless|because|so|where|while|into|through|using|than|during|is|are|was)\b|$))"
)
_NOUN = re.compile(
    r"^(?P<answer>(?:an?|the|one of the) [\w'’ -]+?)(?=(?:,|;|\.| (?:that|which|who|whose|where|when|and|"
    r"but|for|to|from|with|used|by|in|on|at|as|because|if|or)\b|$))"
)
_AUXILIARIES = frozenset(
    "is are was were has have had can could will would must should may might shall".split()
)
_MODALS = frozenset("can could will would must should may might shall".split())
_PRONOUNS = frozenset(
    "i you he she it we they this that these those there here who which what when where if as while "
    "although though because since unless his her its their my our your such one but and or so then "
    "for in on at by to from with after before during under of not how why let".split()
)
_BREAKS = frozenset("that which who whom whose when where if because while but and".split())
_PEOPLE = frozenset(
    "committee minister board council director manager secretary team employee employees president "
    "king queen emperor owner teacher officer commission department member members staff user users "
    "author chairman governor general bishop pope doctor engineer agency court judge students "
    "administrator administrators leader people government".split()
)
_PAST = dict(
    pair.split(":")
    for pair in (
        "became:become began:begin wrote:write went:go took:take made:make gave:give came:come "
        "built:build held:hold led:lead left:leave lost:lose met:meet paid:pay said:say sent:send "
        "sold:sell spent:spend stood:stand taught:teach told:tell thought:think understood:understand "
        "won:win bought:buy brought:bring broke:break chose:choose drew:draw drove:drive fell:fall "
        "felt:feel fought:fight flew:fly forgot:forget found:find got:get grew:grow heard:hear "
        "kept:keep knew:know lay:lie rose:rise saw:see sought:seek spoke:speak swore:swear threw:throw "
        "wore:wear ran:run sank:sink sang:sing shot:shoot struck:strike died:die"
    ).split()
)
_NOT_PAST = frozenset("need needed-by speed indeed red bed united seed feed hundred sacred".split())


def split_sentences(text: str) -> list[str]:
    """Sentences of both languages, whole."""
    return [
        s.strip()
        for s in re.split(r"(?<=[.!?][\"”’) ])\s*(?=[A-Z\"“])|(?<=[.!?])\s+(?=[A-Z\"“])|(?<=[。！？；])|\n+", text)
        if s and s.strip()
    ]


def english_questions(sentence: str, rng: random.Random) -> list[Pair]:
    """Questions that a sentence answers, none repeated."""
    if not 30 <= len(sentence) <= 260 or sentence[-1] != "." or not sentence[0].isupper():
        return []
    if any(c in sentence for c in "?!\"“”[]{}|=:;/\n") or sentence.count("(") != sentence.count(")"):
        return []
    found = dict.fromkeys(_english(re.sub(r"\s*\([^()]*\)", "", sentence)[:-1], rng))
    return [(_polish(q), a) for q, a in found if _is_good(q, a) and a in sentence]


def _polish(question: str) -> str:
    head = re.match(r"(?:\S+ ){6,}?\S+(?=, )", question)
    question = head[0] if head and len(question.split()) > 12 else question
    question = re.sub(r"\s+([,.])", r"\1", " ".join(question.split())).strip(" ,.")
    return question[:1].upper() + question[1:] + "?"


def _is_good(question: str, answer: str) -> bool:
    return 4 <= len(question.split()) <= 24 and len(answer.split()) <= 9 and answer not in question


def _english(sentence: str, rng: random.Random) -> Iterator[Pair]:
    lead = re.match(rf"({_DATE.pattern}), ", sentence)
    if lead:
        rest = sentence[lead.end() :]
        for subject, auxiliary, predicate in _clauses(rest):
            yield f"{_when(lead['answer'], rng)} {auxiliary} {_lowered(subject)} {predicate}", lead["answer"]
    for subject, auxiliary, predicate in _clauses(sentence):
        yield from _about_predicate(_lowered(subject), auxiliary, predicate, rng)
    for subject, verb_phrase in _subjects(sentence):
        word = "Who" if _is_person(subject) else "What"
        if len(verb_phrase.split()) <= 18:
            yield f"{word} {verb_phrase}", subject


def _when(answer: str, rng: random.Random) -> str:
    if re.fullmatch(r"\d{4}", answer):
        return rng.choice(["When", "When", "In what year", "In which year", "What year"])
    return rng.choice(["When", "When", "On what date"]) if any(c.isdigit() for c in answer) else "When"


def _lowered(subject: str) -> str:
    first, _, rest = subject.partition(" ")
    return f"{first.lower()} {rest}" if first in ("The", "A", "An", "Each", "Every", "All", "Some", "Most", "Many") else subject


def _is_person(subject: str) -> bool:
    names = [w for w in subject.split() if w[:1].isupper() and w != "The"]
    return subject.lower().split()[-1] in _PEOPLE or subject.startswith(("Mr", "Mrs", "Dr", "King", "Queen", "Sir")) or (
        len(names) == len(subject.split()) >= 2
    )


_ADVERBS = frozenset("also never often then now today usually always even still already allows know".split())


def _begins_with_noun(tokens: list[str]) -> bool:
    if not tokens or "'" in tokens[0] or tokens[0].endswith(","):
        return False
    return tokens[0].lower() not in _PRONOUNS | _ADVERBS and not tokens[0].endswith("ly")


def _clauses(sentence: str) -> Iterator[tuple[str, str, str]]:
    """Subject, auxiliary and predicate, where the sentence begins with its subject. A past tense
    without an auxiliary gives `did` and the plain verb."""
    tokens = sentence.split()
    if not _begins_with_noun(tokens):
        return
    for i, token in enumerate(tokens[:12]):
        if i and token in _AUXILIARIES:
            rest = tokens[i + 1 :]
            yield " ".join(tokens[:i]), token, " ".join(rest)
            return
        if i and (plain := plain_form(token)) and tokens[i - 1].lower() not in ("the", "a", "an", "of", "to"):
            yield " ".join(tokens[:i]), "did", " ".join([plain, *tokens[i + 1 :]])
            return
        if token.endswith(",") or token.lower() in _BREAKS:
            return


def plain_form(verb: str) -> str | None:
    """The infinitive of a past tense, where it is clear."""
    if verb in _PAST:
        return _PAST[verb]
    if not re.fullmatch(r"[a-z]{2,}ed", verb) or verb in _NOT_PAST:
        return None
    stem = verb[:-2]
    if stem.endswith("i"):
        return stem[:-1] + "y"
    if re.search(r"([bdgmnprt])\1$", stem):
        return stem[:-1]
    if re.search(r"(?:[vcuz]|[^s]s|[dr]g|at|[^aeo]in|[^aeo]ir|[^eo]ur|[aiou]k|bl|pl|tl|dl|[aiu]d|[iu]t|[^e]ar|or|op|[iu]n|iz|ag|ang|ir|fin|ib|ap|ut|ot|ec|im|um)$", stem) and not re.search(
        r"(?:sh|ch|ss|x|ain|oin|air|our|oar|ook|eak|ear|oat|eat|reat|eed|oad|aid|isit|imit|edit|dit|rist|itt|ult|ent|ant|est|ist|pt|ct|rn|wn|gn|ign|turn|join|on|en|er|lk|rk|nk|ad|il|el|ow|aw|ew|ay|oy|ey)$", stem
    ):
        return stem + "e"
    return stem


def _about_predicate(subject: str, auxiliary: str, predicate: str, rng: random.Random) -> Iterator[Pair]:
    asked = f"{auxiliary} {subject}"
    for match in _DATE.finditer(predicate):
        if match["prep"].lower() in ("in", "on", "during"):
            yield f"{_when(match['answer'], rng)} {asked} {_without(predicate, match)}", match["answer"]
        else:
            yield f"{match['prep']} when {asked} {_without(predicate, match)}", match["answer"]
    for match in _COUNT.finditer(predicate):
        rest = predicate[: match.start()] + predicate[match.end() :]
        count = f"{match['answer']} {match['noun']}" if rng.random() < 0.3 else match["answer"]
        if match["before"].strip() == "within":
            yield f"Within how many {match['noun']} {asked} {rest}", count
        else:
            yield f"How many {match['noun']} {asked} {rest}", count
    for match in _BY.finditer(predicate):
        if auxiliary in ("is", "are", "was", "were"):
            head = rng.choice(["By whom", "Who"])
            tail = " by" if head == "Who" else ""
            yield f"{head} {asked} {_without(predicate, match)}{tail}", match["answer"]
    for match in _PLACE.finditer(predicate):
        yield f"Where {asked} {_without(predicate, match)}", match["answer"]
    if auxiliary in _MODALS or auxiliary == "did":
        match = _OBJECT.match(predicate)
        if match:
            rest = predicate[match.end() :]
            tail = rest if rng.random() < 0.7 and len(rest) < 90 else ""
            yield f"What {asked} {match['verb']}{tail}", match["answer"]
    if auxiliary in ("is", "are", "was", "were"):
        match = _NOUN.match(predicate)
        if match and len(subject.split()) <= 6:
            yield f"What {asked}", match["answer"]


def _without(text: str, match: re.Match[str]) -> str:
    return f"{text[: match.start()].rstrip()} {text[match.end() :].lstrip()}"


def _subjects(sentence: str) -> Iterator[Pair]:
    """A subject of a few words, and the verb with all after it."""
    tokens = sentence.split()
    if not _begins_with_noun(tokens):
        return
    for i, token in enumerate(tokens[:8]):
        if i and (token in _AUXILIARIES or plain_form(token)):
            if any(t in _ADVERBS or t.endswith("ly") for t in tokens[:i]):
                return
            yield " ".join(tokens[:i]), " ".join(tokens[i:])
            return
        if token.endswith(",") or token.lower() in _BREAKS:
            return


_HAN_NUMBER = r"(?:[0-9][0-9,.]*|[一二三四五六七八九十百千万两〇零]+)"
_HAN_DATE = re.compile(rf"(?P<answer>{_HAN_NUMBER}年(?:{_HAN_NUMBER}月(?:{_HAN_NUMBER}日)?)?)(?!以|内|级|限|龄|度)")
_HAN_COUNT = re.compile(
    rf"(?P<answer>{_HAN_NUMBER}(?P<unit>个月|小时|分钟|工作日|万元|亿元|公里|毫升|平方米|个|名|位|人|次|天|日|元|"
    r"件|条|种|部|座|米|克|倍|岁|票|章|项|步|秒|页|台|套))"
)
_HAN_PERCENT = re.compile(r"(?P<answer>百分之[一二三四五六七八九十百点]+|\d+(?:\.\d+)?%)")
_HAN_AGENT = re.compile(r"由(?P<answer>[\u4e00-\u9fff、]{2,18}?)(?=负责|组成|制定|批准|决定|规定|承担|任命|领导|主持|提出|审批|公布|管理|开发|创建|编写)")
_HAN_DUTY = re.compile(r"^(?P<answer>[\u4e00-\u9fff、]{2,20}?)(?=应当|不得|必须|有权|负责)")
_HAN_MEANING = re.compile(r"^(?P<subject>[^，。是]{2,20})，?是指(?P<answer>[^。；]{4,60})")
_HAN_IS = re.compile(r"^(?P<subject>[^，。是不]{2,14})是(?P<answer>(?:一|中|最|由|用|指|[\u4e00-\u9fff])[^，。；]{3,24})")
_HAN_TITLE = re.compile(r"(?P<answer>《[^》]{2,30}》)")
_HAN_PLACE = re.compile(r"(?:位于|坐落于|设在)(?P<answer>[^，。；]{2,20})")
_HAN_TERM = re.compile(r"(?P<answer>[A-Za-z][A-Za-z0-9 .+-]{1,24}[A-Za-z0-9])")
_HAN_THROUGH = re.compile(r"(?:使用|通过|采用|利用|根据|依照|按照)(?P<answer>[\u4e00-\u9fff]{2,14}?)(?=来|进行|实现|，|。|的规定|提供|创建)")
_HAN_AGENTS = tuple("人 员 部门 机关 单位 政府 委员会 法院 检察院 公司 企业 者 机构 组织 用户 会 院 局".split())


def chinese_questions(sentence: str, rng: random.Random) -> list[Pair]:
    """Questions that a Chinese sentence answers: a question word stands where the answer stood."""
    sentence = sentence.strip()
    if not 8 <= len(sentence) <= 150 or any(c in sentence for c in "？?！“”{}|=<>"):
        return []
    sentence = re.sub(r"^(?:第[一二三四五六七八九十百千零]+条\s*|[（(][一二三四五六七八九十\d]+[)）]\s*|\d+[.、]\s*)", "", sentence)
    body = sentence.rstrip("。；;：:，, ")
    found = dict.fromkeys(_chinese(body, rng))
    return [(q.strip("，、 ") + "？", a) for q, a in found if 5 <= len(q) <= 60 and a not in q and a in sentence]


def _chinese(body: str, rng: random.Random) -> Iterator[Pair]:
    for match in _HAN_DATE.finditer(body):
        yield _put(body, match, rng.choice(["什么时候", "何时", "哪一年" if "月" not in match["answer"] else "哪一天"]), rng), match["answer"]
    for match in _HAN_COUNT.finditer(body):
        word = rng.choice(["多少", "几" if len(match["unit"]) < 3 else "多少"])
        yield _put(body, match, f"{word}{match['unit']}", rng), match["answer"]
    for match in _HAN_PERCENT.finditer(body):
        yield _put(body, match, rng.choice(["百分之多少", "多少"]), rng), match["answer"]
    for match in _HAN_AGENT.finditer(body):
        yield _put(body, match, rng.choice(["谁", "哪个部门", "什么机构"]) if len(match["answer"]) > 3 else "谁", rng), match["answer"]
    duty = _HAN_DUTY.match(body)
    if duty and duty["answer"].endswith(_HAN_AGENTS):
        yield _put(body, duty, rng.choice(["谁", "谁", "哪些人"]), rng), duty["answer"]
    meaning = _HAN_MEANING.match(body)
    if meaning:
        form = rng.choice(["什么是{}", "{}是指什么", "{}指的是什么"])
        yield form.format(meaning["subject"]), meaning["answer"]
    elif (plain := _HAN_IS.match(body)) and plain["subject"][0] not in "这那它其如但而且就可也还都只总":
        yield f"{plain['subject']}是什么", plain["answer"]
    for pattern, word in ((_HAN_TITLE, "什么"), (_HAN_TERM, "什么"), (_HAN_THROUGH, "什么")):
        for match in pattern.finditer(body):
            yield _put(body, match, word, rng), match["answer"]
    for match in _HAN_PLACE.finditer(body):
        yield _put(body, match, "哪里", rng), match["answer"]


def _put(body: str, match: re.Match[str], word: str, rng: random.Random) -> str:
    """The clauses around the answer, with a question word in its place."""
    start, end = match.span("answer")
    before, after = body[:start], body[end:]
    if rng.random() < 0.6 or len(body) > 50:  # the answer's own clause, and perhaps its neighbour
        clauses = before.split("，")
        before = "，".join(clauses[-2:]) if rng.random() < 0.4 else clauses[-1]
        after = after.split("，")[0]
    return f"{before}{word}{after}"
