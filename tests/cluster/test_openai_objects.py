"""Vector stores, files and responses of one process, as the clients of another find them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.api.http.server_process import start_server
from tests.cluster.machines import wait_until
from tests.cluster.services import Services

if TYPE_CHECKING:
    from openai import OpenAI

MODEL = "ragcache-reader"
BOATS = b"# Boats\n\nThe survey boat Pipit is moored at the north quay.\n"
KEYS = b"# Keys\n\nThe spare key of the boathouse hangs in the red cupboard.\n"
BOAT, KEY = "Where is the survey boat moored?", "Where does the spare key hang?"

Pair = tuple["OpenAI", "OpenAI"]


@pytest.fixture(params=["one ledger", "one folder"])
def pair(request: pytest.FixtureRequest, tmp_path: Path, socket_enabled: None) -> Iterator[Pair]:
    """Clients of two processes: over one PostgreSQL, or over one folder with SQLite."""
    from openai import OpenAI

    if request.param == "one ledger":
        services: Services = request.getfixturevalue("services")
        started = [services.start(machine).started for machine in ("a", "b")]
    else:
        started = [start_server(tmp_path / "state") for _ in range(2)]
    first, second = (
        OpenAI(base_url=f"{each.url}/v1", api_key="none", max_retries=0, timeout=60)
        for each in started
    )
    yield first, second
    for each in started:
        assert each.stop() == 0


def upload(client: OpenAI, store: str, name: str, text: bytes) -> str:
    """Adds a file to a store, and returns its id."""
    file = client.vector_stores.files.upload_and_poll(
        vector_store_id=store, file=(name, text), poll_interval_ms=100
    )
    assert (file.status, file.last_error) == ("completed", None)
    return file.id


def found(client: OpenAI, store: str, query: str) -> set[str]:
    """Names of the files that a search finds."""
    return {each.filename for each in client.vector_stores.search(store, query=query)}


def cited(client: OpenAI, store: str, question: str) -> set[str]:
    """Names of the files that an answer cites."""
    response = client.responses.create(
        model=MODEL,
        input=question,
        tools=[{"type": "file_search", "vector_store_ids": [store]}],
        extra_body={"min_confidence": 0},
    )
    message = response.output[-1]
    assert message.type == "message"
    return {each.filename for each in message.content[0].annotations}


def test_a_store_of_one_process_is_searched_in_another(pair: Pair) -> None:
    from openai import NotFoundError

    first, second = pair
    store = first.vector_stores.create(name="Harbour").id
    boats = upload(first, store, "boats.md", BOATS)
    assert store in [each.id for each in second.vector_stores.list()]
    assert found(second, store, BOAT) == {"boats.md"}
    assert cited(second, store, BOAT) == {"boats.md"}

    keys = upload(second, store, "keys.md", KEYS)
    wait_until(10, lambda: "keys.md" in found(first, store, KEY))
    assert cited(first, store, KEY) == {"keys.md"}
    assert first.files.content(keys).read() == KEYS
    assert first.vector_stores.retrieve(store).file_counts.completed == 2

    second.vector_stores.files.update(boats, vector_store_id=store, attributes={"year": 2026})
    first.vector_stores.files.poll(boats, vector_store_id=store)
    year = first.vector_stores.files.retrieve(boats, vector_store_id=store).attributes
    assert year == {"year": 2026}

    assert second.files.delete(boats).deleted
    with pytest.raises(NotFoundError):
        first.files.content(boats)
    with pytest.raises(NotFoundError):
        first.vector_stores.files.retrieve(boats, vector_store_id=store)
    wait_until(10, lambda: "boats.md" not in found(first, store, BOAT))
    assert "boats.md" not in cited(first, store, BOAT)

    assert first.vector_stores.delete(store).deleted
    with pytest.raises(NotFoundError):
        second.vector_stores.retrieve(store)
    with pytest.raises(NotFoundError):
        second.vector_stores.search(store, query=KEY)


def test_a_batch_of_one_process_is_followed_in_another(pair: Pair) -> None:
    first, second = pair
    store = first.vector_stores.create(name="Batch").id
    files = [
        client.files.create(file=(name, text), purpose="assistants").id
        for client, name, text in ((first, "boats.md", BOATS), (second, "keys.md", KEYS))
    ]
    batch = first.vector_stores.file_batches.create(store, file_ids=files)
    done = second.vector_stores.file_batches.poll(
        batch.id, vector_store_id=store, poll_interval_ms=100
    )
    assert (done.status, done.file_counts.completed) == ("completed", 2)
    listed = second.vector_stores.file_batches.list_files(batch.id, vector_store_id=store)
    assert sorted(each.id for each in listed) == sorted(files)
    assert found(second, store, KEY) >= {"keys.md"}


def test_a_response_of_one_process_goes_on_in_another(pair: Pair) -> None:
    from openai import NotFoundError

    first, second = pair
    asked = {"model": MODEL, "max_output_tokens": 8}
    response = first.responses.create(**asked, input="The boat is called Pipit.")
    assert second.responses.retrieve(response.id).output_text == response.output_text
    again = second.responses.create(
        **asked, input="What is it called?", previous_response_id=response.id
    )
    alone = second.responses.create(**asked, input="What is it called?", store=False)
    assert again.usage is not None
    assert alone.usage is not None
    assert response.usage is not None
    assert again.usage.input_tokens > alone.usage.input_tokens + response.usage.output_tokens
    third = first.responses.create(**asked, input="Who sails it?", previous_response_id=again.id)
    assert third.previous_response_id == again.id

    second.responses.delete(response.id)
    with pytest.raises(NotFoundError):
        first.responses.retrieve(response.id)
    with pytest.raises(NotFoundError):
        first.responses.create(**asked, input="And now?", previous_response_id=response.id)
