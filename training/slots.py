"""Endless values for the typed slots of the paragraph templates (FORMAT.md lists the types).

Every generator takes a random generator and the arguments that stand in the template and returns
the value's written forms: the form under "" stands for `{name}`, one under "first" for
`{name.first}`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

Forms = dict[str, str]
Generator = Callable[[random.Random, str], Forms]


def _load_words(path: Path) -> dict[str, list[str]]:
    """Each line: `[name] one two` or, where entries hold spaces, `[name] one|two three`."""
    words = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, entries = line.removeprefix("[").partition("] ")
        words[name] = entries.split("|") if "|" in entries else entries.split()
    return words


WORDS = _load_words(Path(__file__).with_name("words.txt"))
COMMON_NOUNS = (
    "colour animal bird tree flower food drink metal fabric instrument sport language vehicle "
    "tool garment furniture gem disease subject weather role ship book weekday month country"
).split()


def _pick(rng: random.Random, name: str) -> str:
    return rng.choice(WORDS[name])


def _one(text: str) -> Forms:
    return {"": text}


def _range(arguments: Sequence[str], low: float, high: float) -> tuple[float, float]:
    numbers = [float(a.replace(",", "")) for a in arguments]
    return (numbers[0], numbers[1]) if len(numbers) >= 2 else (low, high)


def _invented(rng: random.Random) -> str:
    parts = [_pick(rng, "syllable_a"), _pick(rng, "syllable_c"), _pick(rng, "syllable_b")]
    if rng.random() < 0.6:
        del parts[1]
    return "".join(parts).capitalize()


def _person(rng: random.Random, first_names: str) -> Forms:
    first = _pick(rng, first_names) if rng.random() < 0.85 else _invented(rng)
    last = _pick(rng, "last") if rng.random() < 0.55 else _invented(rng)
    if rng.random() < 0.04:
        last = f"{last}-{_pick(rng, 'last')}"
    title = rng.choice(["Dr", "Ms" if first_names == "first_female" else "Mr", "Professor"])
    return {"": f"{first} {last}", "first": first, "last": last, "title": f"{title} {last}"}


def person(rng: random.Random, _: str) -> Forms:
    return _person(rng, rng.choice(["first_female", "first_male"]))


def org(rng: random.Random, _: str) -> Forms:
    name = _pick(rng, "org_first") if rng.random() < 0.5 else _invented(rng)
    forms = [
        f"{name} {_pick(rng, 'org_last')}",
        f"{name} & {_pick(rng, 'last')}",
        f"the {name} {_pick(rng, 'org_last')}",
        f"{_pick(rng, 'last')} {_pick(rng, 'org_last')}",
    ]
    return _one(rng.choices(forms, [5, 1, 1, 2])[0])


def town(rng: random.Random, _: str) -> Forms:
    return _one(_pick(rng, "town_real") if rng.random() < 0.3 else _invented(rng))


def river(rng: random.Random, _: str) -> Forms:
    name = _invented(rng)[:6].rstrip("aeiou") + rng.choice(["", "a", "e", "en"])
    return _one(rng.choice([f"the {name}", f"the River {name}", f"the {name} River"]))


def hill(rng: random.Random, _: str) -> Forms:
    return _one(rng.choice(["Mount {}", "{} Fell", "{} Hill", "Ben {}", "{} Peak"]).format(
        _invented(rng)
    ))


def street(rng: random.Random, _: str) -> Forms:
    name = _pick(rng, "street_first") if rng.random() < 0.7 else _invented(rng)
    return _one(f"{name} {_pick(rng, 'street_last')}")


def address(rng: random.Random, _: str) -> Forms:
    return _one(f"{rng.randint(1, 240)} {street(rng, '')['']}")


def building(rng: random.Random, _: str) -> Forms:
    name = _invented(rng) if rng.random() < 0.5 else _pick(rng, "last")
    last = _pick(rng, "building_last")
    return _one(rng.choice([f"{name} {last}", f"the {name} {last}"]))


def room(rng: random.Random, _: str) -> Forms:
    forms = [
        f"Room {rng.randint(1, 9)}.{rng.randint(1, 40):02d}",
        f"Room {rng.randint(1, 480)}",
        f"the {_pick(rng, 'room_name')} Room",
        f"{rng.choice('ABCDEFG')}{rng.randint(1, 30)}",
        f"room {rng.randint(1, 480)}",
    ]
    return _one(rng.choice(forms))


def date(rng: random.Random, _: str) -> Forms:
    day, month = rng.randint(1, 28), _pick(rng, "month")
    forms = [f"{day} {month}", f"{month} {day}", f"{day} {month} {rng.randint(1890, 2026)}"]
    return _one(rng.choices(forms, [4, 1, 2])[0])


def year(rng: random.Random, arguments: str) -> Forms:
    low, high = _range(arguments.split(), 1780, 2025)
    return _one(str(rng.randint(int(low), int(high))))


def time(rng: random.Random, _: str) -> Forms:
    hour, minute = rng.randint(1, 12), rng.choice([0, 5, 10, 15, 20, 30, 40, 45, 50])
    half = rng.choice(["am", "pm"])
    forms = [
        f"{hour}:{minute:02d}",
        f"{rng.randint(6, 23)}:{minute:02d}",
        f"{hour} {half}",
        f"{hour}{half}",
        f"{hour}.{minute:02d} {half}",
        f"{rng.choice(['half past', 'quarter past', 'quarter to'])} {WORDS['number'][hour]}",
        f"{WORDS['number'][hour]} o'clock",
        rng.choice(["noon", "midnight", "midday"]),
    ]
    return _one(rng.choices(forms, [4, 4, 4, 1, 2, 2, 1, 0.4])[0])


def _count(rng: random.Random, value: float) -> str:
    whole = round(value)
    if 1 < whole <= 12 and rng.random() < 0.45:
        return WORDS["number"][whole]
    return f"{whole:,}" if rng.random() < 0.7 else str(whole)


def duration(rng: random.Random, arguments: str) -> Forms:
    unit, *limits = arguments.split() or [rng.choice(["minutes", "days", "weeks", "months"])]
    low, high = _range(limits, 2, 30)
    return _one(f"{_count(rng, rng.uniform(low, high))} {unit}")


def integer(rng: random.Random, arguments: str) -> Forms:
    low, high = _range(arguments.split(), 2, 90)
    value = rng.randint(int(low), int(high))
    return _one(f"{value:,}" if value > 9999 or (value > 999 and rng.random() < 0.7) else str(value))


def decimal(rng: random.Random, arguments: str) -> Forms:
    low, high = _range(arguments.split(), 0.1, 20)
    return _one(f"{rng.uniform(low, high):.{rng.choice([1, 1, 2])}f}")


def word(rng: random.Random, arguments: str) -> Forms:
    low, high = _range(arguments.split(), 2, 12)
    return _one(WORDS["number"][rng.randint(int(low), min(int(high), 20))])


def ordinal(rng: random.Random, arguments: str) -> Forms:
    low, high = _range(arguments.split(), 1, 12)
    return _one(WORDS["ordinal"][min(rng.randint(int(low), int(high)), 12) - 1])


def money(rng: random.Random, arguments: str) -> Forms:
    low, high = _range(arguments.split(), 2, 900)
    value = rng.uniform(low, high)
    cents = value < 50 and rng.random() < 0.3
    number = f"{value:.2f}" if cents else f"{max(1, round(value)):,}"
    forms = [f"£{number}", f"${number}", f"€{number}", f"{number} euros", f"{number} pounds"]
    return _one(rng.choices(forms, [4, 3, 1.5, 1, 0.5])[0])


def percent(rng: random.Random, arguments: str) -> Forms:
    low, high = _range(arguments.split(), 1, 99)
    value = rng.uniform(low, high)
    number = f"{value:.1f}" if rng.random() < 0.15 else str(round(value))
    return _one(number + rng.choice(["%", "%", " percent", " per cent"]))


def measure(rng: random.Random, arguments: str) -> Forms:
    *unit, low, high = arguments.split() if any(c.isdigit() for c in arguments) else (
        *(arguments.split() or ["metres"]), "2", "90"
    )
    value = rng.uniform(float(low.replace(",", "")), float(high.replace(",", "")))
    number = f"{value:.1f}" if value < 20 and rng.random() < 0.3 else _count(rng, max(2, value))
    return _one(f"{number} {' '.join(unit)}")


def phone(rng: random.Random, _: str) -> Forms:
    forms = [
        str(rng.randint(1000, 9999)),
        f"01632 960 {rng.randint(100, 999)}",
        f"extension {rng.randint(100, 9999)}",
        f"555-{rng.randint(1000, 9999)}",
        f"0800 {rng.randint(100, 999)} {rng.randint(100, 999)}",
    ]
    return _one(rng.choice(forms))


def email(rng: random.Random, _: str) -> Forms:
    name = _pick(rng, "email_name") if rng.random() < 0.7 else _pick(rng, "last").lower()
    return _one(f"{name}@{_pick(rng, 'email_host')}.{rng.choice(['example', 'org', 'com', 'net'])}")


def url(rng: random.Random, _: str) -> Forms:
    host = _pick(rng, "email_host")
    return _one(rng.choice([f"{host}.example/{_pick(rng, 'email_name')}", f"www.{host}.example"]))


def code(rng: random.Random, _: str) -> Forms:
    letters = "".join(rng.choices("ABCDEFGHJKLMNPRSTVWX", k=2))
    forms = [
        f"{letters}-{rng.randint(10, 999)}",
        f"{letters}{rng.randint(10, 99)}",
        f"Form {rng.randint(2, 60)}{rng.choice(['', 'A', 'B', 'C'])}",
        f"{letters[0]}{rng.randint(1, 9)}",
        f"{rng.randint(2, 90)}-{letters}",
    ]
    return _one(rng.choice(forms))


def product(rng: random.Random, _: str) -> Forms:
    name = _pick(rng, "product") if rng.random() < 0.6 else _invented(rng)
    tails = ["", f" {rng.randint(2, 12)}", " Pro", " Mini", f" {rng.choice('XSTQ')}{rng.randint(1, 90)}"]
    return _one(name + rng.choice(tails))


def choice(rng: random.Random, arguments: str) -> Forms:
    return _one(rng.choice(arguments.split("|")).strip())


def _common(name: str) -> Generator:
    return lambda rng, _: _one(_pick(rng, name))


TYPES: dict[str, Generator] = {
    **{name: _common(name) for name in COMMON_NOUNS},
    "person": person,
    "female": lambda rng, _: _person(rng, "first_female"),
    "male": lambda rng, _: _person(rng, "first_male"),
    "first": lambda rng, _: _one(person(rng, "")["first"]),
    "org": org, "town": town, "river": river, "hill": hill, "street": street,
    "address": address, "building": building, "room": room, "date": date, "year": year,
    "time": time, "duration": duration, "int": integer, "decimal": decimal, "word": word,
    "ordinal": ordinal, "money": money, "percent": percent, "measure": measure,
    "phone": phone, "email": email, "url": url, "code": code, "product": product,
    "choice": choice,
}  # fmt: skip
