"""A follower: a process that computes its part of each pass that the leader sends."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from ragcache.machine import frozen_heap, keep_freed_memory
from ragcache.models.families import wrap_causal
from ragcache.models.parallel.collectives import (
    SETTLING,
    GlooCollectives,
    RankLost,
    SignsOfLife,
)
from ragcache.models.parallel.memory import MappedMemory
from ragcache.models.parallel.messages import read_message
from ragcache.models.parallel.passes import RankModel
from ragcache.models.parallel.plans import attach

_BEAT = 0.5  # seconds between two heartbeats


@dataclass(frozen=True, slots=True)
class RankProcess:
    """Things that the process of a follower has from its start on."""

    rank: int
    ranks: int
    memory: MappedMemory
    """The leader's memory."""
    connection: Connection
    """Receives messages of the leader, and sends an empty one when the rank is ready."""
    signs: SignsOfLife
    folder: Path
    """A folder that all ranks reach."""


def main() -> None:
    """Run a follower on a CPU until the leader closes the connection or ends."""
    run_process(_serve)


def _serve(process: RankProcess) -> None:
    connection, memory = process.connection, process.memory
    shard, key_heads, logits_width = read_message(connection.recv_bytes(), memory)
    causal = wrap_causal(shard)
    connection.send_bytes(b"")
    collectives = GlooCollectives(process.folder, process.rank, process.ranks, process.signs)
    collectives.connect()
    attach(shard, collectives)
    with frozen_heap():
        follow(
            RankModel(causal, key_heads, logits_width, collectives), memory, connection.recv_bytes
        )


def run_process(serve: Callable[[RankProcess], None]) -> None:
    """Run a follower, give its signs of life, and report its error to the leader.

    Args:
        serve: Follows the leader. Ends with `EOFError` when the leader has closed the model.
    """
    descriptor, nbytes, pipe, rank, ranks, leader = map(int, sys.argv[1:7])
    memory, connection = MappedMemory(descriptor, nbytes), Connection(pipe)
    signs = SignsOfLife(memory, ranks)
    threading.Thread(target=_beat, args=(signs, rank, leader), daemon=True).start()
    status = 0
    try:
        keep_freed_memory()
        serve(RankProcess(rank, ranks, memory, connection, signs, Path(sys.argv[7])))
    except EOFError:  # the leader has closed the model
        pass
    except BaseException as error:
        if isinstance(error, RankLost):
            time.sleep(SETTLING)  # the leader reports the rank that was lost, and ends this one
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
