"""Tasks of a loop are woken by one wake-up for all that came at once, and no loop is kept."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

from ragcache.engine.bell import bell_here, together
from tests.ragcache.engine.loops import CountingLoop


def in_a_loop(main: Callable[[], Any]) -> CountingLoop:
    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, CountingLoop)
        runner.run(main())
        return loop


async def ring_from_a_thread(count: int, *, at_once: bool) -> None:
    bell = bell_here()
    futures = [bell.waiter() for _ in range(count)]

    def ring_all() -> None:
        if at_once:
            with together():
                for future in futures:
                    bell.ring(future)
        else:
            for future in futures:
                bell.ring(future)

    thread = threading.Thread(target=ring_all)
    thread.start()
    await asyncio.wait_for(asyncio.gather(*futures), 60)
    thread.join()


def test_what_is_rung_together_wakes_a_loop_once() -> None:
    loop = in_a_loop(lambda: ring_from_a_thread(32, at_once=True))
    assert loop.woken == 1


def test_each_is_heard_that_is_rung_alone() -> None:
    for _ in range(20):
        assert in_a_loop(lambda: ring_from_a_thread(32, at_once=False)).woken > 0


def test_a_task_that_no_longer_waits_is_passed_by() -> None:
    async def main() -> None:
        bell = bell_here()
        gone, waiting = bell.waiter(), bell.waiter()
        gone.cancel()
        bell.ring(gone)
        bell.ring(waiting)
        await asyncio.wait_for(waiting, 60)

    in_a_loop(main)


def test_ringing_for_a_loop_that_was_closed_does_nothing_and_keeps_nothing() -> None:
    rung = []

    async def main() -> None:
        bell = bell_here()
        rung.append((bell, bell.waiter()))

    loop = weakref.ref(in_a_loop(main))
    bell, future = rung.pop()
    bell.ring(future)
    assert not future.done()
    del bell, future
    gc.collect()
    assert loop() is None


def test_tasks_of_one_loop_share_a_bell() -> None:
    async def main() -> None:
        async def mine() -> object:
            bell = bell_here()
            await asyncio.sleep(0)  # both tasks hold theirs by now
            return bell

        first, second = await asyncio.gather(mine(), mine())
        assert first is second

    in_a_loop(main)
