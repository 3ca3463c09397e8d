"""The page behind the gateway of several replicas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ragcache.models import LoadedModel
from tests.api.cluster.local import LocalCluster, serving
from tests.api.page.conftest import Page, asked
from tests.conftest import write_notes

QUESTION = "How many days of leave does everybody have?"
pytestmark = [pytest.mark.enable_socket, pytest.mark.slow]


def test_a_replica_is_drained_and_resumed(
    opened: Callable[[str], Page], reader: LoadedModel, tmp_path: Path
) -> None:
    cluster = LocalCluster(tmp_path, reader)
    replicas = cluster.replicas(page=True)
    with serving(cluster.gateway(replicas, page=True)) as port:
        page = opened(f"http://127.0.0.1:{port}")
        page.open("replicas")
        page.find("[aria-label='Drain b']")
        assert len(page.all("[data-act=drain]")) == 2
        page.click("[aria-label='Drain a']")
        page.find(".state", "draining")
        assert [each.draining for each in replicas.replicas] == [True, False]
        page.click("[aria-label='Resume a']")
        page.until(lambda: len(page.all("[data-act=drain]")) == 2)
        assert not replicas.replicas[0].draining
        assert not page.faults()
    cluster.close()


def test_an_answer_goes_on_when_its_replica_is_gone(
    opened: Callable[[str], Page], reader: LoadedModel, tmp_path: Path
) -> None:
    cluster = LocalCluster(tmp_path, reader)
    cluster.rags[0].ingest("notes", write_notes(tmp_path / "notes"))
    replicas = cluster.replicas(page=True)
    with serving(cluster.gateway(replicas, page=True)) as port:
        page = opened(f"http://127.0.0.1:{port}")
        asked(page, QUESTION, "notes")
        said = page.find(".said .markdown").text
        for replica in replicas.replicas:
            replica.loses = 3
        page.click("[aria-label='Ask again']")
        page.until(lambda: sum(replicas.gone.values()) and not page.all(".streaming"))
        assert page.find(".exchange").get_attribute("data-status") == "done"
        assert page.find(".said .markdown").text == said
        assert not page.faults()
    cluster.close()
