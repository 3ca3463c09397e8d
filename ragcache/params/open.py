"""`OpenConfig`: how a state folder is opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from ragcache.config import check_instruction
from ragcache.errors import ConfigurationError
from ragcache.modes import ReuseMode
from ragcache.params.base import Params
from ragcache.tiers import Size, TierOptions

ConversationStorage = Literal["none", "memory", "disk"]
ObservedStorage = Literal["memory", "disk"]
DType = Literal["auto", "float32", "bfloat16", "float16"]


def _checked_length(length: int | str) -> int | str:
    """Return a number of tokens, or `auto`."""
    if length == "auto":
        return length
    number = str(length)
    if not (number.isascii() and number.isdigit() and int(number)):
        raise ValueError(f"{length!r:.80} is no length; it must be 1 token or more, or 'auto'")
    return int(number)


class OpenConfig(TierOptions, Params):
    """Options of `RagCache.open`, with the options of the tiers.

    Sizes are numbers of bytes, or texts such as `8GiB`.

    Raises:
        ConfigurationError: An option is unknown or has a value that cannot be used.

    Example:
        >>> OpenConfig(host_bytes="8GiB", max_tokens=16)
        OpenConfig(host_bytes='8GiB', max_tokens=16)
    """

    error = ConfigurationError

    model: Any = None
    """The model: a folder, a hub name, or a loaded model. Defaults to the embedded reader."""
    embedding: Any = "auto"
    """Embedder of the search by meaning: `auto`, `minilm`, `none`, a folder or hub name of
    sentence-transformers, or LangChain's `Embeddings`. `auto` is `minilm` if its extra is
    installed, otherwise `none`. Missing vectors of a collection are computed once."""
    reranker: Any = None
    """Cross-encoder that reranks search results: a folder or hub name of sentence-transformers, or
    a `ragcache.retrieval.Reranker`. Off by default."""
    instruction: str | None = None
    """Instruction to the model, before the documents of every prompt. Other instructions need other
    states. Defaults to an answer in as few words as possible (`ragcache.models.INSTRUCTION`)."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Variables of the model's chat template for every prompt. A call may override them."""
    module_tokens: Annotated[int | str, AfterValidator(_checked_length)] = "auto"
    """Most tokens of a module. `auto` takes 384 for documents and 576 for recurring texts. With
    recurrent layers it takes the length from which keys and values have more bytes than the maps of
    these layers, if that is longer, and at most 2,048. It takes at most a quarter of the model's
    window, but never less than 384."""
    max_tokens: Annotated[int, Field(ge=1)] = 64
    """Most tokens of an answer, if the request sets no limit. Chats over OpenAI's API have the
    service's setting `chat_max_tokens`."""
    force_modes: bool = False
    """Serve every mode, even a mode that is far from `exact` on the model. By default, each mode is
    measured once per folder, before its first question."""
    default_mode: ReuseMode | None = None
    """Mode of questions and chats that name none (`AskOptions.mode`). Defaults to `rooted` for the
    embedded reader, for models with recurrent layers and for models whose states cannot move, and
    to `primed` for all others."""
    compose: Literal["auto", "order", "both"] = "auto"
    """How documents compose in the recurrent layers of a hybrid model: in the `order` of the
    prompt, or as the mean of `both` this order and its reverse, in which later documents do not
    outweigh earlier ones. `auto` takes the one that is nearer to `exact` on the model."""
    recognize_recurring: bool = True
    """Read texts that recur in prompts from states, without any ingestion. A text is read from its
    third prompt on."""
    min_module_tokens: Annotated[int, Field(ge=1)] = 96
    """Fewest tokens of a recurring text that is read from states."""
    observed_bytes: Size | None = None
    """Most memory for the states of recurring texts, of each namespace. Defaults to a tenth of
    `host_bytes`."""
    observed_storage: ObservedStorage = "memory"
    """Place of recurring texts and their states: `memory`, or `disk` for the ledger, the disk and
    remote storage as well, where they outlive the process."""
    conversation_storage: ConversationStorage = "memory"
    """Place of the states of chats' messages and answers, from which the next turn starts:
    `memory`, `disk` for disk and remote storage as well, or `none`."""
    conversation_bytes: Size | None = None
    """Bytes of a full tier that conversations keep beside documents. Defaults to a quarter of the
    tier."""
    conversation_seconds: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    """Seconds after its last turn at which a conversation ends. Defaults to an hour in memory and
    to a day on disk."""
    min_prefix_tokens: Annotated[int, Field(ge=1)] = 256
    """Fewest tokens of a chat, apart from its documents, that are kept."""
    draft_tokens: Annotated[int, Field(ge=0, le=16)] = 8
    """Most tokens of an answer that are guessed from its prompt and checked in one step, where the
    answer repeats the prompt. The answer stays the same. 0 guesses none."""
    max_gap_ms: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    """Longest gap between two tokens of an answer while prompts are computed or documents encoded
    beside it, in milliseconds. These then get as many tokens of each step as its time allows. By
    default the device's number of tokens is the limit."""
    queue: Annotated[int, Field(ge=1)] = 1024
    """Most requests that wait. Further requests are refused."""
    ingestion_bytes: Size = "256MiB"
    """Most bytes of documents that wait for background ingestion. Further documents are refused."""
    originals_bytes: Size = "4GiB"
    """Most bytes of uploaded files that the ledger keeps beside their documents, to be downloaded.
    Documents of further files are stored without them. 0 keeps none."""
    batch_documents: Annotated[int, Field(ge=1)] = 100
    """Most documents that an ingestion encodes before questions can find them."""
    batch_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    """Seconds after which an ingestion lets questions find the documents that it has encoded."""
    document_bytes: Size = "256MiB"
    """Most bytes that a file may unpack to, and most characters of its text."""
    document_memory: Size = "1GiB"
    """Most memory of the process that reads a file that is not plain text."""
    document_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """Most seconds of processor time of reading a file that is not plain text."""
    ocr: Any = None
    """Recognition of text on pages of PDFs that have none: `tesseract`, or a function that returns
    the text of a PNG picture. Off by default."""
    device: str = "cpu"
    """Device of the model: `cpu`, `cuda`, `cuda:1`."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that compute each layer of the model together: one for each GPU from `device` on,
    or on a CPU. States are the same for any number. A model that cannot be split is refused before
    its weights are read."""
    dtype: DType = "auto"
    """Data type that the model computes in. `auto` takes a fast type of this machine. Set it if
    several machines share states."""
    states_dtype: DType = "auto"
    """Data type of kept states. `auto` takes the data type of the checkpoint."""
    quantization: Literal["auto", "int8", "int4", "fp8"] | None = None
    """Quantize the weights to 8 or 4 bits, for a CPU (`int8`, `int4`), or to 8-bit floating point,
    for a GPU (`fp8`). `auto` does so on a CPU where decoding gets quicker. Off by default."""
    long_context: bool = False
    """Use the long-context factors of LongRoPE (Phi-3.5, Phi-4-mini) for every text. The window
    becomes the whole context. Off by default: the window ends at the model's original length."""
    warm_up: bool = False
    """Capture CUDA graphs when the folder is opened, instead of during the first requests."""
    private_bytes: Size | None = None
    """Memory for the states of questions and answers. Defaults to 512 MiB, on a GPU to a share of
    its memory."""
    ledger: str | None = None
    """URL of the ledger's database. Defaults to a file in the state folder."""
    stale_seconds: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 60.0
    """Seconds for which questions are answered from cached data if the ledger does not respond."""
    claim_patience: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Seconds that a question waits for states that another process is encoding."""

    @model_validator(mode="after")
    def _check_open(self) -> Self:
        check_instruction(self.instruction)
        return self
