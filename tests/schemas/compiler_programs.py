"""Prompt programs that the tests compile."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from ragcache_schemas import Content, MaxTokens, prompt_program, turn

COMPANY = "Tide & <Sons>"


class Season(Enum):
    DRY = 1
    WET = 2


@prompt_program
def weather(season: Season, month: Annotated[str, MaxTokens(3)]) -> Content:
    yield f"In {month}, "
    match season:
        case Season.DRY:
            yield "it is dry."
        case Season.WET:
            yield "it rains."


@prompt_program(name="travel")
def trip(
    days: Annotated[str, MaxTokens(5, scaffold="three days")],
    place: str,
    *,
    season: Season = Season.DRY,
    month: str = "May",
    cheap: bool = False,
    first: bool = True,
) -> Content:
    """This says what the function is for, and is no text of the prompt."""
    yield f"""
        Plan a trip of {days!s:>3} for {COMPANY}.
          It has 100% sun & <b>fun</b>.
    """
    if cheap:
        yield "Mind the price.\n"
    match place:
        case "miami" | "florida":
            yield f"Miami has beaches. {weather(season, month=month)}"
        case "rome":
            yield "Rome is old.\n"
        case _:
            yield f"Stay {days}. "
            yield weather(season, month)
    if first:
        yield "It is the first trip."
    else:
        yield "It is not the first trip."
    yield " Seats: " + ("window" if len(place) > 4 else "aisle") + "."


@prompt_program
def chat(topic: Annotated[str, MaxTokens(6)], formal: bool) -> Content:
    with turn("system"):
        yield "You teach."
        if formal:
            yield " Be formal."
    with turn("user"):
        yield f"Tell me about {topic.upper()}."
