"""Checks of requests and modules before an engine accepts them."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

from ragcache.engine.encoding import EncodeJob, check_job
from ragcache.engine.kv_cache_manager import KVCacheManager
from ragcache.engine.request import (
    Request,
    Segment,
    check_place,
    check_states,
    check_tokens,
    check_window,
    context_length,
)
from ragcache.engine.runner import ModelRunner
from ragcache.errors import PromptTooLong, UnsupportedModel
from ragcache.states.quantization import StoredStates


class RequestChecker:
    """Checks requests against the model's window and the engine's pool. Thread-safe."""

    def __init__(self, runner: ModelRunner, kv_manager: KVCacheManager) -> None:
        self._runner, self._kv_manager = runner, kv_manager
        self._checked = WeakSet[StoredStates]()  # states that have passed the check

    def check_request(self, request: Request) -> None:
        """Check a request that is about to be submitted.

        Raises `PromptTooLong`, `UnsupportedModel` or `InvalidRequest` if it could never run.
        """
        context, model = request.context, self._runner.model
        for segment in context.segments:
            self._check_segment(segment)
        check_tokens(
            context.token_ids,
            context.position_ids,
            vocabulary=model.vocabulary,
            window=model.window,
        )
        if not model.scheme.movable and any(each.delta for each in context.segments):
            raise UnsupportedModel(
                "the model's positions are absolute, so that cached states cannot stand elsewhere "
                "than where they were encoded; place schemas with placement='schema'"
            )
        self.check_sizes(
            own=len(context.token_ids),
            documents=context.cached_tokens,
            end=context.next_position,
            max_tokens=request.max_tokens,
        )

    def check_jobs(self, jobs: Iterable[EncodeJob]) -> None:
        """Raise `PromptTooLong` or `InvalidRequest` for modules that could never be encoded."""
        for job in jobs:
            check_job(job, self._runner.model)
            if job.root is not None:
                self._check_segment(job.root)

    def _check_segment(self, segment: Segment) -> None:
        runner, states = self._runner, segment.states
        if states not in self._checked:
            check_states(states, runner.model, by_address=runner.asynchronous)
            self._checked.add(states)
        check_place(segment, runner.model.window)

    def check_sizes(
        self, *, own: int, documents: int, end: int, max_tokens: int, recomputed: int = 0
    ) -> None:
        """Raise `PromptTooLong` for a prompt and answer that can never run.

        Args:
            own: Tokens of question and template.
            documents: Tokens of the documents that the prompt reads.
            end: Position after the prompt.
            max_tokens: Maximum length of the answer.
            recomputed: Document tokens that the request computes anew.
        """
        window = self._runner.model.window
        if documents:
            check_window(documents, own, window=window, max_tokens=max_tokens)
        if end + max_tokens > window:
            raise PromptTooLong(
                f"{context_length(window)}, the prompt ends at position {end} and the answer needs "
                f"{max_tokens} more; shorten the prompt"
            )
        tokens = own + recomputed + max_tokens
        if not self._kv_manager.can_hold(tokens):
            limit = " beside those that are cached, which the pool of private states holds"
            raise PromptTooLong(
                f"{context_length(self._pool_tokens, limit)}, the request needs {tokens} tokens of "
                "its own; shorten the prompt, or open the folder with larger private_bytes"
            )

    def max_answer_tokens(self, computed: int, end: int) -> int:
        """Maximum length of an answer after a prompt of `computed` tokens that ends at position
        `end`.

        At least 1, so that `check_sizes` refuses a prompt that leaves no room.
        """
        left = self._pool_tokens - computed
        return max(1, min(left, self._runner.model.window - end))

    @property
    def _pool_tokens(self) -> int:
        pool = self._kv_manager.pool
        return pool.num_blocks * pool.block_size
