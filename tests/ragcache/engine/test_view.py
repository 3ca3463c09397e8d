"""What the engine leaves for whoever watches."""

from __future__ import annotations

from ragcache.engine import Context, EncodeJob, Request, Segment
from ragcache.engine.encodings import States
from ragcache.engine.view import IDLE, SegmentUse
from ragcache.models import CausalLM
from tests.conftest import random_tokens
from tests.ragcache.engine.asked import module
from tests.ragcache.engine.engines import check_whole, core_of, drain, submit


def over(segments: tuple[Segment, ...], own: int, seed: int) -> Context:
    end = segments[-1].end
    return Context(
        segments, tuple(random_tokens(own, seed)), tuple(range(end, end + own)), end + own
    )


def test_a_step_tells_who_reads_what(causal: CausalLM) -> None:
    core = core_of(causal)
    assert core.view == IDLE
    shared, own = module(causal, 5), module(causal, 7)
    first = (Segment(shared, 0, "shared"),)
    handles = [
        submit(core, Request(over(first, 3, 1), 4)),
        submit(core, Request(over((*first, Segment(own, 5, "own")), 2, 2), 4)),
        submit(core, Request(over((Segment(own, 0),), 2, 3), 4)),
    ]
    core.add_encoding([EncodeJob(random_tokens(6))], States(lambda: None))
    core.step()
    view = core.view
    assert (view.rows, view.requests, view.encodings) == (3 + 2 + 2 + 6, 3, 1)
    assert view.segments == (SegmentUse("shared", 5, 2, 5), SegmentUse("own", 7, 1, 2))
    core.step()
    assert core.view.rows == 3
    assert core.view.segments == (SegmentUse("shared", 5, 2, 2), SegmentUse("own", 7, 1, 1))
    again = core.view
    core.step()
    assert core.view is again, "nobody joined or left"
    drain(core)
    assert core.view == IDLE
    assert [handle.channel.started for handle in handles] == [True] * 3
    check_whole(core)


def test_who_waits_has_not_started(causal: CausalLM) -> None:
    core = core_of(causal)
    handle = submit(core, Request(over((Segment(module(causal, 5), 0),), 3, 1), 4))
    assert not handle.channel.started
    calls: list[object] = []
    handle.channel.when_done(lambda: calls.append(handle.channel.outcome))
    drain(core)
    assert handle.channel.started
    assert calls == [handle.result(0)]
    handle.channel.when_done(lambda: calls.append("late"))
    assert calls[1:] == ["late"]
    assert handle.channel.count == 4
