"""The page behind the gateway of several replicas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ragcache.models import LoadedModel
from tests.api.cluster.local import LocalCluster, serving
from tests.api.page.conftest import Page

pytestmark = [pytest.mark.enable_socket, pytest.mark.slow]


def test_a_replica_is_drained_and_resumed(
    opened: Callable[[str], Page], reader: LoadedModel, tmp_path: Path
) -> None:
    cluster = LocalCluster(tmp_path, reader)
    replicas = cluster.replicas(page=True)
    with serving(cluster.gateway(replicas, page=True)) as port:
        page = opened(f"http://127.0.0.1:{port}/admin/")
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
