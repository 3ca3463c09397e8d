"""The counts of the cluster's script, over a gateway in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ragcache.models import LoadedModel
from ragcache_api.http import ServiceSettings
from tests.api.cluster.local import LocalCluster, serving

pytest.importorskip("ray", reason="replicas run on Ray: pip install 'ragcache[ray]'")
cluster = pytest.importorskip("cluster")

TEXTS = [f"The {name} is kept by the north quay." for name in ("boat", "lamp", "rope")]
QUESTIONS = ["Where is the boat kept?", "Where is the lamp kept?"]


@dataclass
class LocalPlace:
    """A place whose replicas are services of this process."""

    folder: Path
    reader: LoadedModel

    def settings(self, replicas: int) -> ServiceSettings:
        return ServiceSettings.read(replicas=replicas, embedding="none", page=False)

    @contextmanager
    def cluster(self, settings: ServiceSettings) -> Iterator[Any]:
        local = LocalCluster(self.folder, self.reader)
        with serving(local.gateway(local.replicas())) as port:
            yield cluster.BenchClient(port)
        local.close()


@pytest.mark.slow
def test_all_that_is_ingested_is_encoded_once(
    socket_enabled: None, tmp_path: Path, reader: LoadedModel
) -> None:
    setting = cluster.ClusterSetting(TEXTS, QUESTIONS, replicas=2)
    found = cluster.measure_encodings(LocalPlace(tmp_path, reader), setting, lambda _: None)
    assert (found["modules"], found["encoded"]) == (3, 4)  # and the preamble
    assert sum(found["routed"]) >= len(QUESTIONS)
