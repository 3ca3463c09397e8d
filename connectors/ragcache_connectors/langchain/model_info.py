"""The model behind a chat: its name, its style of tool calls, its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragcache import RagCache
    from ragcache.engine import SampledToken
    from ragcache.models import LoadedModel
    from ragcache.structured import ToolStyle


@dataclass(frozen=True)
class ModelInfo:
    """Facts about the model of an open `RagCache`. Made for each call."""

    rag: RagCache

    @property
    def model(self) -> LoadedModel:
        return self.rag.internals.shared.model

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def identity(self) -> dict[str, Any]:
        """What distinguishes this model, its defaults and the texts that it recognizes."""
        namespace = self.rag.internals
        return {
            "fingerprint": self.model.causal.fingerprint,
            "state": namespace.shared.database.name,
            "namespace": namespace.name,
            "max_new_tokens": namespace.shared.config.max_new_tokens,
            "instruction": namespace.shared.instruction,  # the states of documents have read it
        }

    @cached_property
    def style(self) -> ToolStyle | None:
        """How the model writes tool calls; None where its template takes no tools."""
        from ragcache.structured import tool_style

        return tool_style(self.model.tokenizer)

    def count_tokens(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None = None
    ) -> int:
        """Tokens of a conversation's prompt, up to where the answer begins."""
        from ragcache.pipeline import ChatTemplate

        template = ChatTemplate(self.model)
        return template.count(template.render_chat(messages, tools))

    def logprobs(self, chosen: Sequence[SampledToken]) -> dict[str, Any]:
        """Log-probabilities in OpenAI's form, which LangChain's other chat models give too."""
        from ragcache.engine import LogprobFormat

        return LogprobFormat(self.model.tokenizer).chat(chosen)
