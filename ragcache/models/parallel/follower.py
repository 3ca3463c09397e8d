"""A follower: a process that computes its part of each pass that the leader sends."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from ragcache.machine import frozen_heap, keep_freed_memory
from ragcache.models.families import wrap_causal
from ragcache.models.parallel.collectives import GlooCollectives, SignsOfLife
from ragcache.models.parallel.memory import MappedMemory
from ragcache.models.parallel.messages import read_message
from ragcache.models.parallel.passes import RankModel
from ragcache.models.parallel.plans import attach

_BEAT = 0.5  # seconds between two heartbeats


def main() -> None:
    """Run a follower until the leader closes the connection or ends."""
    descriptor, nbytes, pipe, rank, ranks, leader = map(int, sys.argv[1:7])
    memory, connection = MappedMemory(descriptor, nbytes), Connection(pipe)
    signs = SignsOfLife(memory, ranks)
    threading.Thread(target=_beat, args=(signs, rank, leader), daemon=True).start()
    status = 0
    try:
        keep_freed_memory()
        shard, key_heads, logits_width = read_message(connection.recv_bytes(), memory)
        causal = wrap_causal(shard)
        connection.send_bytes(b"")
        collectives = GlooCollectives(Path(sys.argv[7]), rank, ranks, signs)
        attach(shard, collectives)
        with frozen_heap():
            follow(
                RankModel(causal, key_heads, logits_width, collectives),
                memory,
                connection.recv_bytes,
            )
    except EOFError:  # the leader has closed the model
        pass
    except BaseException as error:
        traceback.print_exc()
        with suppress(OSError):  # the leader may have ended
            connection.send_bytes(f"{type(error).__name__}: {error}".encode())
        status = 1
    sys.stderr.flush()
    os._exit(status)  # libraries need not be taken apart, which may wait for other ranks


@torch.inference_mode()
def follow(model: RankModel, memory: MappedMemory, receive: Callable[[], bytes]) -> None:
    """Compute passes, until `receive` raises an error."""
    while True:
        model.forward(read_message(receive(), memory))


def _beat(signs: SignsOfLife, rank: int, leader: int) -> None:
    """Give signs of life, and end this process with the leader's."""
    wake = threading.Event()
    while os.getppid() == leader:
        signs.beat(rank)
        wake.wait(_BEAT)
    os._exit(1)
