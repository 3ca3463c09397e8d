"""`ragcache bench cluster`: its corpus, and its parts over a front in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from ragcache import Generation, RagCache
from ragcache.bench.routing import topic_workload
from ragcache.models import LoadedModel
from ragcache.retrieval import CollectionIndex
from ragcache_api.cli.main import app
from ragcache_api.http import ServiceSettings
from tests.api.cluster.local import LocalCluster, serving

pytest.importorskip("ray", reason="replicas run on Ray: pip install 'ragcache[ray]'")
bench = pytest.importorskip("ragcache_api.cluster.bench")

TEXTS = bench.made_up_texts(6)
QUESTIONS = [" ".join(text.split()[0] for text in TEXTS[first::3]) for first in range(3)]
SETTING = bench.ClusterSetting(2, documents=TEXTS, questions=QUESTIONS, requests=12)


@dataclass
class LocalPlace:
    """A `_Place` whose replicas are services of this process."""

    folder: Path
    reader: LoadedModel

    def settings(self, replicas: int, **more: Any) -> ServiceSettings:
        return ServiceSettings.read(replicas=replicas, embedding="none", page=False, **more)

    @contextmanager
    def cluster(self, settings: ServiceSettings, **_: Any) -> Iterator[Any]:
        cluster = LocalCluster(self.folder, self.reader)
        with serving(cluster.front(cluster.replicas())) as port:
            yield bench.BenchClient(port)
        cluster.close()


def test_questions_find_the_modules_that_they_are_for() -> None:
    workload = topic_workload(requests=40)
    index = CollectionIndex(np.arange(96, dtype=np.int64), bench.made_up_texts(96))
    for modules, question in zip(workload.requests, bench.questions_for(workload), strict=True):
        found = index.search_sparse(question, len(modules))
        assert {number for number, _ in found} == set(modules)


@pytest.mark.slow
def test_all_that_is_ingested_is_encoded_once(
    socket_enabled: None, tmp_path: Path, reader: LoadedModel
) -> None:
    found = bench.measure_encodings(LocalPlace(tmp_path, reader), SETTING, lambda _: None)
    assert (found["modules"], found["encoded"]) == (6, 7)  # and the preamble
    assert sum(found["routed"]) >= len(QUESTIONS)
    with LocalPlace(tmp_path, reader).cluster(SETTING) as client:
        figures = bench._hit_rate(client, QUESTIONS, SETTING)
    assert figures["modules"] == 4
    assert 0 <= figures["hits"] <= 1


def test_a_step_takes_its_simulated_time(tmp_path: Path, reader: LoadedModel) -> None:
    """Two steps of 0.1 s, which are as long again for each request beyond the slots."""
    with RagCache.open(tmp_path, reader, embedding=None) as rag:
        bench._simulate_steps(rag.internals.shared.engine.core.runner, seconds=0.1, slots=1)
        generation = Generation(max_new_tokens=2, min_new_tokens=2, ignore_eos=True)
        answer = rag.chat([{"role": "user", "content": "Hi"}], generation=generation)
    assert answer.timings.total >= 0.2


def test_a_part_that_is_none_is_named() -> None:
    done = CliRunner().invoke(app, ["bench", "cluster", "--ledger", "x", "--part", "all"])
    assert done.exit_code == 2
    assert "parts: encodings, topics" in " ".join(done.output.split())
