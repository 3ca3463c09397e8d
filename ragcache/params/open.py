"""How a state folder is opened: `OpenConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ragcache.config import check_instruction
from ragcache.errors import ConfigurationError
from ragcache.params.base import Params, Size

DType = Literal["auto", "float32", "bfloat16", "float16"]
KVDType = Literal["model", "int8"]


class OpenConfig(Params):
    """How a state folder is opened. Sizes are bytes, or texts such as `8GiB`.

    Raises:
        ConfigurationError: An option is unknown or has a value that cannot be used.

    Example:
        >>> OpenConfig(host_bytes="8GiB", max_tokens=16)
        OpenConfig(max_tokens=16, host_bytes='8GiB')
    """

    error = ConfigurationError

    model: Any = None
    """The model: a folder, a hub name, or loaded. The embedded reader by default."""
    embedding: Any = "auto"
    """Retrieval by meaning: `auto`, `minilm`, `none`, a folder or hub name of
    sentence-transformers, or LangChain's `Embeddings`. `auto` is `minilm` where that extra is
    installed. Vectors that a collection lacks are computed once."""
    reranker: Any = None
    """A cross-encoder that orders what was found: a folder or hub name of sentence-transformers,
    or a `ragcache.retrieval.Reranker`. None by default."""
    instruction: str | None = None
    """What the model is to do with the documents. States are kept by it. By default a brief
    answer in the words of the documents (`ragcache.models.INSTRUCTION`)."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Variables of the model's chat template in every prompt. A call may set others."""
    module_tokens: Annotated[int, Field(ge=1)] = 384
    """Most tokens of a module."""
    max_tokens: Annotated[int, Field(ge=1)] = 64
    """Most tokens of an answer, unless a request says otherwise. Chats of OpenAI's interface may
    fill the window."""
    force_modes: bool = False
    """Serve every mode, also one that is far from `exact` on the model. Off by default: a mode is
    measured before its first question, once a folder."""
    queue: Annotated[int, Field(ge=1)] = 1024
    """Most requests that wait. One more is refused."""
    ingestion_bytes: Size = "256MiB"
    """Most bytes of documents that wait to be stored. More are refused."""
    device: str = "cpu"
    """Device of the model: `cpu`, `cuda`, `cuda:1`."""
    dtype: DType = "auto"
    """Data type that the model computes in. `auto` takes what is fast on this machine; give one
    where several machines share their states."""
    states_dtype: DType = "auto"
    """Data type of kept states. `auto` takes the checkpoint's."""
    quantization: Literal["int8", "int4"] | None = None
    """Weights in 8 or 4 bits (extra `quantized`). By default they stay as they are stored."""
    long_context: bool = False
    """Use the long factors of LongRoPE (Phi-3.5, Phi-4-mini) for every text. The window becomes
    the whole context."""
    warm_up: bool = False
    """Capture a GPU's graphs at opening, not with the first steps."""
    private_bytes: Size | None = None
    """Memory for the states of questions and answers: 512 MiB, or a share of a GPU by default."""
    host_bytes: Size = "2GiB"
    """Budget of the host tier."""
    device_bytes: Size | None = None
    """Budget of the tier on the GPU. By default what the engine leaves free there."""
    device_kv_dtype: KVDType = "model"
    """How that tier keeps states."""
    disk_bytes: Size | None = None
    """Budget of the disk tier. Unlimited by default."""
    remote: str | None = None
    """URL of a remote tier for fsspec: `s3://BUCKET/PATH`, `file:///MOUNT`."""
    remote_bytes: Size | None = None
    """Budget of the remote tier. Unlimited by default."""
    kv_dtype: KVDType = "model"
    """How the host, the disk and the remote tier keep states."""
    ledger: str | None = None
    """URL of a database in place of the file in the state folder."""
    stale_seconds: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 60.0
    """Seconds that questions do without a ledger that does not answer."""
    claim_patience: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Seconds that a question waits for what another process encodes."""

    @model_validator(mode="after")
    def _check_open(self) -> Self:
        check_instruction(self.instruction)
        return self
