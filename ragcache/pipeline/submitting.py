"""The way from a prompt to the engine, which questions and PML prompts share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ragcache.config import NAMESPACE, Settings
from ragcache.engine import Context, LLMEngine, Request, check_window
from ragcache.engine.handle import RequestChannel, RequestHandle
from ragcache.engine.request import Choice, RequestOutput, TokenDelta
from ragcache.models import LoadedModel
from ragcache.pipeline.answer import Ready
from ragcache.pipeline.asked import Asked, Returned
from ragcache.pipeline.generation import Generation
from ragcache.pipeline.monitor import RequestMonitor
from ragcache.store import Lease


@dataclass(frozen=True, slots=True)
class Submitter:
    """Checks requests before anything is leased, and submits them. namespace: whose requests share
    private states."""

    model: LoadedModel
    engine: LLMEngine
    returned: Returned
    settings: Settings
    namespace: str = NAMESPACE
    monitor: RequestMonitor = field(default_factory=RequestMonitor)

    def draft(
        self, own: int, documents: int, generation: Generation, *,
        recomputed: int = 0, end: int | None = None, reuse: bool = True,
    ) -> Request:  # fmt: skip
        """The request as far as sizes say what it is, so that what cannot run is refused at once.

        own, documents: tokens of question and template, and of what it reads. recomputed: those
        of the documents that it computes all the same. end: the position after the prompt, if it
        has gaps. reuse: False where nothing may be shared. Raises `InvalidRequest` or
        `PromptTooLong`.
        """
        computed = own + recomputed
        end = own + documents if end is None else end
        context = Context((), (0,) * computed, tuple(range(computed)), end)
        tenant = self.namespace if reuse else None
        most = self._room(context) if generation.unbounded else self.settings.max_new_tokens
        request = generation.request(context, self.model, most, tenant)
        check_window(
            documents,
            own,
            window=self.model.causal.window,
            max_new_tokens=request.max_new_tokens,
        )
        self.engine.core.check(request)
        return request

    def _room(self, context: Context) -> int:
        """The tokens that an answer can have at most; one where there is no room, so that the check
        says so."""
        pool = self.engine.core.pool
        left = pool.total * pool.chunk - len(context.token_ids)
        return max(1, min(left, self.model.causal.window - context.next_position))

    def submit(self, draft: Request, context: Context, ready: Ready, lease: Lease | None) -> Asked:
        """Queues the request. Raises `QueueFull` or `EngineClosed`; the lease is the caller's
        until this returns."""
        handle = self.engine.submit(replace(draft, context=context))
        asked = Asked(ready, handle, lease, self.returned)
        self.monitor.begin(self.namespace, ready, handle.channel)
        return asked

    def nothing_to_read(self, ready: Ready, now: float) -> Asked:
        """Retrieval found no module that shares anything with the question: nothing is made up."""
        channel = RequestChannel[TokenDelta, RequestOutput](lambda: None)
        channel.finish(RequestOutput((Choice((), "", "no_documents"),), 0, now, now, now, now))
        self.monitor.begin(self.namespace, ready, channel)
        return Asked(ready, RequestHandle(channel), None, self.returned)
