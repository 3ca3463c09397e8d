"""Routes of vLLM's interface for tokens, by which evaluations count and build prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from ragcache.modes import EXACT
from ragcache.pipeline.chat import ChatCall, Conversation
from ragcache_api.http.bodies import ChatMessage, Text, TokenIds, Tool, invalid
from ragcache_api.http.client_fields import ClientModel
from ragcache_api.http.model_ids import collection_in
from ragcache_api.http.protocol import ResponseModel, openai_problems
from ragcache_api.http.service import ContextDep, RequestContext
from ragcache_api.http.tools import plain_tool

router = APIRouter(tags=["tokens"], responses=openai_problems())


class TokensRequest(ClientModel):
    """Fields that requests about tokens share."""

    model: Annotated[str, Field(max_length=1000)] | None = None
    """Name of the served model. It may be left out."""


class TokenizeRequest(TokensRequest):
    """The body of `POST /tokenize`: a text or a conversation."""

    prompt: Text | None = None
    """A text, as `/v1/completions` continues it."""
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    """A conversation, as `/v1/chat/completions` answers it. The model's next message begins at its
    end."""
    tools: list[Tool] | None = None
    """Functions that the model may call."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the model's chat template, such as `enable_thinking`."""
    add_special_tokens: bool | None = None
    """Begin a text with the tokens that the model expects there. True by default."""
    add_generation_prompt: Literal[True] = True
    """Begin the model's next message. False is not served."""
    return_token_strs: bool | None = None
    """Return the text of each token, too."""


class TokenizeResponse(ResponseModel):
    """The tokens of a text or a conversation."""

    count: int
    """Number of tokens."""
    max_model_len: int
    """Most tokens of a prompt and its answer."""
    tokens: list[int]
    token_strs: list[str] | None = None
    """Tokens as the vocabulary writes them."""


class DetokenizeRequest(TokensRequest):
    """The body of `POST /detokenize`."""

    tokens: TokenIds


class DetokenizeResponse(ResponseModel):
    """A text."""

    prompt: str


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, context: ContextDep) -> TokenizeResponse:
    """Return the token ids of a text or a conversation, as an answer to it would read them."""
    _check_model(context, body)
    conversation, call = _conversation(body)
    model = context.service.shared.model
    tokens = await run_in_threadpool(_token_ids, context, conversation, call)
    lead = context.rag.internals.chat.template.lead
    if body.prompt is not None and body.add_special_tokens is False:
        tokens = tokens[len(lead) :]
    return TokenizeResponse(
        count=len(tokens),
        max_model_len=model.causal.window,
        tokens=tokens,
        token_strs=_names(context, tokens) if body.return_token_strs else None,
    )


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, context: ContextDep) -> DetokenizeResponse:
    """Return the text of token ids, with control tokens."""
    _check_model(context, body)
    size = len(context.service.tokenizer)
    for token in body.tokens:
        if not 0 <= token < size:
            raise invalid("tokens", f"token {token} is none of the model's, 0 to {size - 1}")
    text = context.service.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return DetokenizeResponse(prompt=text)


@router.get("/tokenizer_info")
async def tokenizer_info(context: ContextDep) -> dict[str, Any]:
    """Return the tokenizer's control tokens and chat template, as `tokenizer_config.json` does."""
    tokenizer = context.service.tokenizer
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens = {name: getattr(tokenizer, name, None) for name in names}
    return {
        "tokenizer_class": type(tokenizer).__name__,
        **{name: None if token is None else str(token) for name, token in tokens.items()},
        "model_max_length": context.service.shared.model.causal.window,
        "chat_template": getattr(tokenizer, "chat_template", None),
        "added_tokens_decoder": {
            str(number): {"content": token.content, "special": token.special}
            for number, token in tokenizer.added_tokens_decoder.items()
        },
    }


def _check_model(context: RequestContext, body: TokensRequest) -> None:
    if body.model is not None:
        collection_in(body.model, context.service.served_name)


def _conversation(body: TokenizeRequest) -> tuple[Conversation, ChatCall]:
    """Return what to tokenize, and how. Raises `HTTPProblem` (400) without a single input."""
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either a prompt or messages")
    if body.prompt is not None:
        return body.prompt, ChatCall(EXACT, recognize=False)
    if body.add_special_tokens:
        raise invalid("add_special_tokens", "the chat template writes control tokens")
    tools = [plain_tool(tool) for tool in body.tools or ()]
    call = ChatCall(
        EXACT, recognize=False, tools=tools or None, template_kwargs=body.chat_template_kwargs
    )
    return [each.plain() for each in body.messages or ()], call


def _token_ids(context: RequestContext, conversation: Conversation, call: ChatCall) -> list[int]:
    [prompt] = context.rag.internals.chat.prepare_prompts([conversation], call)
    return [token for _, token in prompt.computed_tokens]


def _names(context: RequestContext, tokens: Sequence[int]) -> list[str]:
    tokenizer = context.service.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    name_of = tokenizer.convert_ids_to_tokens if backend is None else backend.id_to_token
    return [name_of(token) or "" for token in tokens]
