"""LangChain's standard suites for chat models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from ragcache import RagCache, SourceDocument
from ragcache.models import LoadedModel
from ragcache_connectors.langchain import ChatRagCache
from tests.connectors.langchain.scripted_model import scripted_model


class _Flags:
    """Feature flags of the standard suite. Flags that are off have a reason; the others are on."""

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supports_image_inputs(self) -> bool:
        return False  # text models alone are served; so no URLs and no images of tools either

    @property
    def supports_pdf_inputs(self) -> bool:
        return False  # a loader makes text of them; so none of tools either

    @property
    def supports_audio_inputs(self) -> bool:
        return False  # text models alone are served; so no video either

    @property
    def supports_model_override(self) -> bool:
        return False  # a state folder is open with one model; another name is refused

    @property
    def enable_vcr_tests(self) -> bool:
        return False  # there is no HTTP to record

    @property
    def supported_usage_metadata_details(self) -> dict[str, list[str]]:
        # no audio, and no reasoning that is counted apart
        details = ["cache_read_input", "cache_creation_input"]
        return {"invoke": details, "stream": details}


class TestUnit(_Flags, ChatModelUnitTests):
    """Without a model: nothing is opened."""

    @property
    def chat_model_class(self) -> type[ChatRagCache]:
        return ChatRagCache

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {}


DOCUMENT = (
    "The survey boat Pipit is moored at the north quay, and its engine was serviced in March."
)


class _Integration(_Flags, ChatModelIntegrationTests):
    rag: RagCache

    @property
    def chat_model_class(self) -> type[ChatRagCache]:
        return ChatRagCache

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"rag": self.rag, "max_tokens": 160}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> Any:
        self._asked(stream)
        return self._asked(stream)

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> Any:
        return self._asked(stream)

    def _asked(self, stream: bool) -> Any:
        model = ChatRagCache(rag=self.rag, max_tokens=4)
        prompt = f"Use this: {DOCUMENT}\nWhere is the boat?"
        if not stream:
            return model.invoke(prompt)
        chunks = list(model.stream(prompt))
        return sum(chunks[1:], chunks[0])


class TestWithTools(_Integration):
    """A model whose template takes tools, and that chooses to call them."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _open(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with RagCache.open(tmp_path_factory.mktemp("state"), model=scripted_model()) as rag:
            ingest(rag)
            cls.rag = rag
            yield


@pytest.mark.slow
class TestWithTheReader(_Integration):
    """The embedded reader."""

    @property
    def has_tool_calling(self) -> bool:
        return False  # the reader's template takes no tools

    @property
    def has_structured_output(self) -> bool:
        return False  # it was trained to read, and does not end a JSON string by itself

    @property
    def supports_json_mode(self) -> bool:
        return False  # as structured output

    @property
    def supports_anthropic_inputs(self) -> bool:
        return False  # the suite's test binds tools

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"rag": self.rag, "max_tokens": 8}

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _open(cls, tmp_path_factory: pytest.TempPathFactory, reader: LoadedModel) -> Iterator[None]:
        with RagCache.open(tmp_path_factory.mktemp("state"), model=reader) as rag:
            ingest(rag)
            cls.rag = rag
            yield


def ingest(rag: RagCache) -> None:
    rag.ingest("notes", [SourceDocument(id="boats", text=DOCUMENT)])
