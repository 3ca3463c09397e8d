"""The connectors of other frameworks, each with its framework as the registry has it today.

The framework's packages come after those of the tests' own environment: the tests need both.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.clients.environments import Environments
from tests.clients.table import Client
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.clients
CONNECTORS = (
    Client("llama_index", "LlamaIndex", "", ("llama-index-core==0.14.25",)),
    Client("haystack", "Haystack", "", ("haystack-ai==3.4.1",)),
)
RUN = """
import sys
sys.path.append(sys.argv[1])
import pytest
sys.exit(pytest.main([*sys.argv[2:], "-m", ""]))
"""


@pytest.mark.parametrize("client", CONNECTORS, ids=lambda client: client.name)
def test_connector_passes_its_tests(client: Client, environments: Environments) -> None:
    folder = environments.install(client).folder
    [packages] = folder.glob("lib/python*/site-packages")
    tests = REPOSITORY / "tests" / "connectors" / client.name
    done = subprocess.run(
        [sys.executable, "-c", RUN, packages, tests, "-rs"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout
