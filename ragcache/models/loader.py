"""Loading models (a folder, the hub, or the reader in the package) and their prompt frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ragcache.errors import ConfigurationError, MissingExtra, ModelNotFound, UnsupportedModel
from ragcache.hub import hub_answers, local_or_hub
from ragcache.models.dtype import (
    AUTO,
    FP8,
    DTypeChoice,
    Recall,
    check_quantization,
    choose_dtypes,
    convert,
    measure_anew,
    parse_dtype,
)
from ragcache.models.model import CausalLM
from ragcache.models.plain import PlainForCausalLM, PlainLM
from ragcache.models.quiet import quiet_loading
from ragcache.models.reader import READER, read_reader
from ragcache.models.tokenizer import PromptTokenizer, tokenizer_fingerprint
from ragcache.modes import PRIMED, ROOTED, ReuseMode

if TYPE_CHECKING:
    from ragcache.models.plain_checkpoint import PlainCheckpoint  # needs more than torch

INSTRUCTION = (
    "Answer the question using only the documents below. "
    "Give only the answer, in as few words as possible."
)
"""Default instruction before documents: the best of nine for two models
(docs/measurements/quality.md)."""
READER_INSTRUCTION = (
    "Answer the question from the documents below. "
    "Be brief: give only the answer, in the words of the documents."
)
"""Default instruction of the embedded reader, which was trained with it."""
NO_ANSWER = "<|no_answer|>"
FIXED_DAY = datetime(2024, 7, 26)  # Llama's templates name it where they know none
_ANOTHER_DAY = datetime(2031, 1, 5, 13, 14, 15)
_DIRECTIVES = [f"%{flag}{letter}" for flag in ("-", "") for letter in "dmyHIMSj"]
_DIRECTIVES += [f"%{letter}" for letter in "aAwbBYpfUWcxXeFDTGuVZz"]
_MARK = "\u2063ragcache\u2063"  # placeholder for the content of the user turn; no text contains it


@dataclass(frozen=True)
class LoadedModel:
    """A patched model with its tokenizer."""

    name: str
    causal: CausalLM
    tokenizer: Any
    dtypes: DTypeChoice | None = field(default=None, kw_only=True)
    """Dtypes of computation and states, and why. Set by `load_model`."""
    extractive: bool = field(default=False, kw_only=True)
    """Whether answers are quotations unless a request says otherwise, as for the embedded
    reader."""
    default_mode: ReuseMode = field(default=ROOTED, kw_only=True)
    """Mode of questions and chats that name none. Set by `load_model`."""
    instruction: str = field(default=INSTRUCTION, kw_only=True)
    """Instruction before documents, unless a folder or a collection has another."""
    keep_words: bool = field(default=True, kw_only=True)
    """Whether BPE keeps words (`PromptTokenizer`). On a CPU, `load_model` saves their memory."""

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        return tokenizer_fingerprint(self.tokenizer)

    @cached_property
    def prompt_tokenizer(self) -> PromptTokenizer:
        """Tokenizes untrusted texts, and the text of a template around them."""
        return PromptTokenizer(self.tokenizer, keep_words=self.keep_words)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end an answer, of the model and of the tokenizer."""
        config = self.causal.model.generation_config
        listed = config.eos_token_id if config is not None else None
        ids = listed if isinstance(listed, list) else [listed]
        return frozenset(i for i in (*ids, self.tokenizer.eos_token_id) if i is not None)

    @cached_property
    def no_answer_id(self) -> int | None:
        """The token by which a reader says that the documents hold no answer, if it has one."""
        found: int | None = self.tokenizer.get_vocab().get(NO_ANSWER)
        return found

    def encode(self, text: str) -> list[int]:
        """Token ids of a template's text. Control tokens in it are recognized."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def encode_untrusted(self, text: str, *, first: bool = False) -> list[int]:
        """Token ids of an untrusted text, in which `<|end|>` is five ordinary characters. `first`:
        the text begins the prompt."""
        return self.prompt_tokenizer.encode(text, first=first)

    def decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


def load_model(
    name: str | Path | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = AUTO,
    states_dtype: str | torch.dtype = AUTO,
    long_context: bool = False,
    quantization: str | None = None,
    tensor_parallel: int = 1,
    recall: Recall = measure_anew,
) -> LoadedModel:
    """Load and patch a model.

    Args:
        name: A folder, a hub name, or a GGUF file (`model.gguf`, or `ORG/REPO/model.gguf` of
            the hub; extra `gguf`). Defaults to the embedded reader.
        device: Device of the model.
        dtype: Dtype of the computation: `float32`, `bfloat16`, `float16`, or `auto`: the
            checkpoint's, or float32 on a CPU that is slow in it, if that fits the memory.
        states_dtype: Dtype of kept states. `auto` is the checkpoint's, unless `dtype` is
            narrower; on a GPU it is the dtype of the computation.
        long_context: Use the long-context factors of LongRoPE (Phi-3.5, Phi-4-mini) for every
            text. The window becomes the whole context.
        quantization: `int8` or `int4` quantizes the weights of linear layers, for a CPU. `auto`
            does so where it makes decoding quicker: in 8 bits, but in 4 the layers whose weights 4
            bits hold no worse, or all where 8 do not fit the memory. `fp8` is for NVIDIA GPUs from
            Ada and Hopper on, and rounds activations too.
        tensor_parallel: Number of processes that the model will be split over (`split_model`).
            A model that cannot be split is refused before its weights are read.
        recall: Keeps the times behind `auto` for later processes, as `Ledger.recall_fact` does.
            By default every process measures anew.

    Raises:
        ModelNotFound: The model cannot be read.
        UnsupportedModel: Its architecture is not served, or cannot be split.
        ConfigurationError: A dtype or quantization is unknown or does not fit the file, or this
            machine has no such device.
        MissingExtra: A GGUF file needs packages that are not installed.

    Example:
        >>> loaded = load_model(dtype="float32")
        >>> loaded.causal.dtype, loaded.causal.states_dtype
        (torch.float32, torch.bfloat16)
    """
    place, wanted = _device(device), parse_dtype(dtype)
    parse_dtype(states_dtype)  # an unknown name is refused before anything is read
    check_quantization(quantization, place)
    source = str(READER if name is None else name)
    if tensor_parallel > 1:
        from ragcache.models.parallel.leader import check_options

        check_options(place, quantization, tensor_parallel, embedded=source == str(READER))
    if place.type != "cpu" and quantization == AUTO:
        quantization = None
    plain = place.type == "cpu" and not long_context and tensor_parallel == 1
    if plain and source == str(READER) and quantization in (None, AUTO):
        model, tokenizer = read_reader(READER)
        stored, quantization = model.dtype, None
    else:
        reading = _Reading(wanted, long_context, quantization, tensor_parallel, recall)
        model, tokenizer, stored, quantization = _read_checkpoint(source, reading, plain=plain)
    choice = choose_dtypes(
        model,
        place,
        dtype,
        states_dtype,
        stored if wanted else model.dtype,
        quantized=quantization is not None,
        recall=recall,
    )
    if quantization is not None:
        choice = _quantize(model, quantization, choice, place, recall)
    # ranks copy their parts from main memory, each to its own device
    home = place if tensor_parallel == 1 else torch.device("cpu")
    causal = _wrap(convert(model, choice.compute).to(home))
    causal.states_dtype = choice.states
    called = "ragcache-reader" if name is None else source
    return LoadedModel(
        called,
        causal,
        tokenizer,
        dtypes=choice,
        extractive=name is None,
        default_mode=ROOTED if name is None else _default_mode(causal),
        instruction=READER_INSTRUCTION if source == str(READER) else INSTRUCTION,
        keep_words=place.type != "cpu",
    )


def _default_mode(causal: CausalLM) -> ReuseMode:
    """Return the default mode of a model that was not trained on modules.

    Its answers in `primed` are nearer to its answers in `exact`. Models with recurrent layers and
    models whose states cannot move were not measured (docs/internals/adr, 91).
    """
    return PRIMED if causal.divides and causal.scheme.movable else ROOTED


def _wrap(model: Any) -> CausalLM:
    """Wrap a plain model, or patch one of transformers."""
    if isinstance(model, PlainForCausalLM):
        return PlainLM(model)
    from ragcache.models.trial import wrap

    return wrap(model)


class _Reading(NamedTuple):
    """How a checkpoint is read. See `load_model`."""

    dtype: torch.dtype | None
    long_context: bool
    quantization: str | None
    ranks: int
    recall: Recall


class _Checkpoint(NamedTuple):
    """A checkpoint that was read."""

    model: Any
    tokenizer: Any
    stored: Any
    """Dtype of its file."""
    quantization: str | None
    """The quantization that `auto` stands for."""


def _read_checkpoint(source: str, reading: _Reading, *, plain: bool) -> _Checkpoint:
    """Read a checkpoint, without transformers if `plain` allows it and what transformers made of
    its files is kept. Raises as `load_model`."""
    from safetensors import SafetensorError

    from ragcache.models.plain_checkpoint import find_plain

    gguf = source.endswith(".gguf")
    # A name that nothing answers to fails before transformers is imported, which takes seconds.
    place = source if gguf else local_or_hub(source)
    try:
        place = _converted(source) if gguf else place
        folder = _checkpoint_folder(place) if plain else None
        known = None if folder is None else find_plain(folder)
        if known is not None:
            return _read_plain(known, reading)
        with quiet_loading():
            return _read_by_transformers(place, reading, folder)
    except (UnsupportedModel, ConfigurationError, MissingExtra, ModelNotFound):
        raise
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise ModelNotFound(
            f"cannot load the model {source!r}: {error}. Give a folder with config.json, weights "
            "and tokenizer, or the name of a hub model that this machine can reach; without a "
            "model the embedded reader is used"
        ) from error


def _read_plain(checkpoint: PlainCheckpoint, reading: _Reading) -> _Checkpoint:
    """Read a checkpoint without transformers."""
    model, quantization = checkpoint.read_model(reading.dtype, reading.quantization, reading.recall)
    return _Checkpoint(model, checkpoint.read_tokenizer(), checkpoint.dtype, quantization)


def _read_by_transformers(place: str, reading: _Reading, folder: Path | None) -> _Checkpoint:
    """Read a checkpoint by transformers, or let it say how to read it without. folder: of its
    files, if it may be read without."""
    from transformers import AutoConfig, AutoTokenizer

    from ragcache.models.checkpoint import load_checkpoint, text_class
    from ragcache.models.plain_checkpoint import keep_plain

    tokenizer, config = AutoTokenizer.from_pretrained(place), AutoConfig.from_pretrained(place)
    if folder is not None and (known := keep_plain(folder, tokenizer, config)) is not None:
        return _read_plain(known, reading)
    dtype, long_context, quantization, ranks, recall = reading
    text = config.get_text_config(decoder=True)
    stored: Any = config.dtype or text.dtype or dtype
    if ranks > 1:
        from ragcache.models.parallel.plans import check_split

        check_split(text_class(text), text, ranks)
    if quantization == AUTO:
        from ragcache.models.quantized_trial import choose_quantization

        quantization = choose_quantization(
            text_class(text), text, AUTO, dtype or stored or torch.float32, recall
        )
    model = load_checkpoint(
        place,
        None if quantization else dtype,
        long_context=long_context,
        quantization=quantization,
    )
    return _Checkpoint(model, tokenizer, stored, quantization)


def _checkpoint_folder(place: str) -> Path | None:
    """The folder of a checkpoint, here or in the hub's cache."""
    if Path(place).is_dir():
        return Path(place)
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(place, "config.json")).parent
    except (OSError, ValueError):  # transformers says what is wrong
        return None


def _quantize(
    model: Any, quantization: str, choice: DTypeChoice, device: torch.device, recall: Recall
) -> DTypeChoice:
    """Quantize a model for a GPU, or let packed layers choose their products. Returns the choice
    with the name of the weights."""
    if quantization == FP8:
        from ragcache.models.fp8 import quantize_fp8

        quantize_fp8(model, model.get_output_embeddings(), device)
    else:
        from ragcache.models.quantized import use_packed_products

        use_packed_products(model, choice.compute, recall)
    return replace(choice, reason=f"{choice.reason}; weights in {quantization}")


def _converted(source: str) -> str:
    """The checkpoint of a GGUF file, here or on the hub. Raises `MissingExtra` or
    `ModelNotFound`."""
    if not all(map(find_spec, ("gguf", "accelerate"))):
        raise MissingExtra("GGUF files need two more packages: pip install 'ragcache[gguf]'")
    path, parts = Path(source).expanduser(), source.split("/", 2)
    if not path.is_file():
        if len(parts) < 3 or not parts[0]:
            raise ModelNotFound(
                f"cannot load the model {source!r}: there is no such file. Give a GGUF file, or "
                "one of the hub as ORGANIZATION/REPOSITORY/FILE.gguf"
            )
        from transformers.utils import cached_file

        cached = not hub_answers()
        path = Path(cached_file("/".join(parts[:2]), parts[2], local_files_only=cached))
    from ragcache.models.gguf import convert_gguf

    return str(convert_gguf(path))


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f"{name!r} is not a device; give cpu, cuda or cuda:1") from error
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigurationError(
            f"this machine has {count} usable GPUs, so there is no {name}; check the driver with "
            "nvidia-smi and that torch was built for CUDA, or run on cpu"
        )
    return device


@dataclass(frozen=True, slots=True)
class PromptFrame:
    """Texts of the model's chat template around the modules of a prompt."""

    preamble: str
    """Text up to the first module: template, then instruction."""
    question: str
    """Text before the question."""
    epilogue: str
    """Rest of the template, up to the start of the answer."""
    dated: bool = False
    """Whether the template prints today's date. The frame uses `FIXED_DAY`; a question then has to
    say the date."""
    instruction: str = field(default=INSTRUCTION, compare=False, kw_only=True)
    """End of the preamble, chosen by the user."""


def prompt_frame(
    tokenizer: Any, instruction: str = INSTRUCTION, kwargs: Mapping[str, Any] | None = None
) -> PromptFrame:
    """Splits the tokenizer's chat template at the inside of the user turn. instruction: the text
    before the documents. kwargs: variables of the template."""
    rendered, dated = f"{tokenizer.bos_token or ''}{_MARK}\nAnswer:", False
    if getattr(tokenizer, "chat_template", None):
        turns = [{"role": "user", "content": _MARK}]
        rendered = render_undated(tokenizer, turns, generate=True, kwargs=kwargs)
        another = render_undated(tokenizer, turns, generate=True, kwargs=kwargs, day=_ANOTHER_DAY)
        dated = rendered != another
    if rendered.count(_MARK) != 1:
        raise UnsupportedModel(
            "this model's chat template does not repeat the user's text exactly once, so modules "
            "cannot be placed inside the user turn"
        )
    before, _, after = rendered.partition(_MARK)
    preamble = f"{before}{instruction}\n\n"
    return PromptFrame(preamble, "Question: ", after, dated, instruction=instruction)


def render_undated(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    generate: bool,
    kwargs: Mapping[str, Any] | None = None,
    day: datetime = FIXED_DAY,
) -> str:
    """The chat template's text of some messages, as it would be on a fixed day: states that follow
    it keep their keys at midnight (docs/internals/adr/0027). kwargs: variables of the template."""
    template = tokenizer.get_chat_template()
    if "strftime_now" in template:
        template = _strftime_macro(day) + template
    text: str = tokenizer.apply_chat_template(
        messages,
        chat_template=template,
        tokenize=False,
        add_generation_prompt=generate,
        **(kwargs or {}),
    )
    return text


def _strftime_macro(day: datetime) -> str:
    """Jinja's macro in place of the function that formats today's date. transformers takes no
    function for a template, so the directives are replaced one by one."""
    filters = "".join(
        f"|replace({directive!r},{day.strftime(directive)!r})" for directive in _DIRECTIVES
    )
    return (
        "{%- macro strftime_now(format) -%}{%- for part in format.split('%%') -%}"
        "{{- '' if loop.first else '%' -}}{{- part" + filters + " -}}"
        "{%- endfor -%}{%- endmacro +%}"
    )
