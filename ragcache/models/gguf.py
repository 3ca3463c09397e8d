"""GGUF files: each is converted once, to a checkpoint in the cache folder.

transformers reads a GGUF file for minutes of processor time whenever a process opens it: it parses
the metadata four times, one number at a time, and multiplies the weights out in one thread.
`convert_gguf` parses the file once, multiplies the weights out by `gguf.c`, and keeps the result as
any other checkpoint: weights in bfloat16, configuration, tokenizer and chat template. A
checkpoint belongs to the digest of its file, so that a changed file is converted again and a moved
one is not.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from filelock import FileLock
from huggingface_hub import split_torch_state_dict_into_shards
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from ragcache.errors import ConfigurationError
from ragcache.files import sync
from ragcache.models.native import load_kernels
from ragcache.models.plain import PlainConfig, unknown_entry
from ragcache.models.quiet import quiet_loading

CONVERSION = 1
"""Version of the conversion. Raise it if the same file becomes another checkpoint."""
_STEPS = 10  # lines that report the progress of one conversion
_PIECE = 2**22  # bytes of a file that are read at once
_WEIGHTS = 2**22  # weights that are multiplied out at once without compiled functions
_SHARD = 2**28  # bytes of one file of weights
_HEADER = 12  # bytes of an array in the metadata before its elements: their type and number
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in ("q", "k", "v")},
    **{f"attn_{name}_norm": f"self_attn.{name}_norm" for name in ("q", "k")},
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
"""Names of a plain model's modules for the names in a GGUF file."""
_INTERLEAVED = ("llama", "mistral")
_patching = threading.Lock()  # one conversion at a time replaces functions of the package gguf

logger = logging.getLogger(__name__)


def convert_gguf(file: Path) -> Path:
    """Convert a GGUF file to a checkpoint, unless the cache folder has it.

    Any number of processes may convert the same file: one works, the others wait for it. A
    conversion that ends in the middle leaves nothing that is read. Progress is logged as INFO.

    Args:
        file: The GGUF file.

    Returns:
        The folder of the checkpoint.

    Raises:
        ConfigurationError: The cache folder cannot be written.
        OSError, ValueError: transformers does not read the file.

    Example:
        >>> folder = convert_gguf(Path("model.gguf"))
        >>> sorted(path.name for path in folder.iterdir())[:3]
        ['chat_template.jinja', 'config.json', 'generation_config.json']
    """
    folder = cache_folder() / f"{_digest(file)}-{CONVERSION}"
    if folder.exists():
        return folder
    try:
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                _write_checkpoint(file, folder)
    except PermissionError as error:
        raise ConfigurationError(
            f"cannot keep the checkpoint of {file} in {folder.parent}: {error}. Set the "
            "environment variable HF_ASSETS_CACHE to a folder that can be written"
        ) from error
    return folder


def cache_folder() -> Path:
    """The folder of converted files: in huggingface_hub's cache of assets, which the environment
    variables `HF_HOME` and `HF_ASSETS_CACHE` move. It may be deleted at any time."""
    from huggingface_hub import cached_assets_path

    return cached_assets_path("ragcache", namespace="models", subfolder="gguf")


def _digest(file: Path) -> str:
    """XXH3 of a file, read in pieces: a mapped file would count as memory of this process."""
    digest, piece = xxhash.xxh3_128(), memoryview(bytearray(_PIECE))
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(piece):
            digest.update(piece[:count])
    return digest.hexdigest()


def _write_checkpoint(file: Path, folder: Path) -> None:
    """Write the checkpoint of a GGUF file under another name, sync it, and name it `folder`."""
    compiling = threading.Thread(target=load_kernels)
    compiling.start()  # a compiler works while transformers is imported
    from transformers import AutoConfig, AutoTokenizer

    from ragcache.models.families import family_of

    logger.info("converting %s to a checkpoint, once", file.name)
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    try:
        with quiet_loading(), _quick_reading(file) as source:
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
            family_of(config).check(config)  # before anything is multiplied out
            tokenizer.save_pretrained(part)
            compiling.join()
            if not _write_plain(source, config, part):
                _write_model(file, config, part)
        for written in (*part.iterdir(), part):
            sync(written)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    logger.info("converted %s; the checkpoint is %s", file.name, folder)


def _write_model(file: Path, config: Any, folder: Path) -> None:
    """Write configuration and weights as transformers reads them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        file.parent, config=config, dtype=torch.bfloat16, gguf_file=file.name
    )
    model.hf_quantizer.remove_quantization_config(model)
    model.save_pretrained(folder)


def _write_plain(source: _Source, config: Any, folder: Path) -> bool:
    """Write configuration and weights of a plain model, which need no model of transformers.
    Returns whether it is one."""
    from transformers import GenerationConfig

    from ragcache.models.checkpoint import text_class

    if unknown_entry(PlainConfig(**config.to_dict())) is not None:
        return False
    tensors = {}
    for tensor in source.reader.tensors:
        if (name := _plain_name(tensor.name)) is None:
            return False
        tensors[name] = tensor
    config.dtype, config.architectures = torch.bfloat16, [text_class(config).__name__]
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    _write_weights(source, tensors, config, folder)
    return True


def _write_weights(source: _Source, tensors: Mapping[str, Any], config: Any, folder: Path) -> None:
    """Write weights. A file is written while the weights of the next are multiplied out."""
    shapes = {
        name: torch.empty(_shape(each), dtype=torch.bfloat16, device="meta")
        for name, each in tensors.items()
    }
    split = split_torch_state_dict_into_shards(
        shapes, filename_pattern="model{suffix}.safetensors", max_shard_size=_SHARD
    )
    with ThreadPoolExecutor(1) as writer:
        written: list[Future[None]] = []
        for file, names in split.filename_to_tensors.items():
            weights = {name: _weight(source, tensors[name], config) for name in names}
            wait(written)  # no more than two files are in memory
            written.append(writer.submit(_save, weights, folder / file))
        for each in written:
            each.result()
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _save(weights: dict[str, Tensor], file: Path) -> None:
    save_file(weights, file, metadata={"format": "pt"})
    sync(file)


def _plain_name(name: str) -> str | None:
    """The name of a plain model's weight for the name in a GGUF file, if there is one."""
    *places, kind = name.split(".")
    if places[0] == "blk" and len(places) == 3 and places[2] in _LAYER_NAMES:
        return f"model.layers.{places[1]}.{_LAYER_NAMES[places[2]]}.{kind}"
    known = _NAMES.get(".".join(places))
    return None if known is None else f"{known}.{kind}"


def _weight(source: _Source, tensor: Any, config: Any) -> Tensor:
    """A weight of a GGUF file in bfloat16."""
    weight = torch.empty(_shape(tensor), dtype=torch.bfloat16)
    source.multiply_out(tensor.data, tensor.tensor_type, weight)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    count = heads.get(tensor.name.split(".")[-2])
    if count is None or config.model_type not in _INTERLEAVED:
        return weight
    # dimensions 2i and 2i + 1 of a head turn as a pair there
    return weight.view(count, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _shape(tensor: Any) -> list[int]:
    """Shape of a tensor of a GGUF file, which names the last dimension first."""
    return [int(size) for size in reversed(tensor.shape)]


class _Source:
    """A parsed GGUF file.

    Attributes:
        reader: The file's reader.
    """

    def __init__(self, file: Path) -> None:
        import gguf

        self.reader = _quick_reader()(file)
        self._sizes, self._library, self._name = gguf.GGML_QUANT_SIZES, gguf.dequantize, file.name
        self._total, self._done = sum(each.n_elements for each in self.reader.tensors), 0

    def multiply_out(self, data: NDArray[Any], kind: Any, out: Tensor) -> None:
        """Write weights to `out`, and log the progress.

        Args:
            data: Weights as the file has them, row by row.
            kind: Type of their quantization.
            out: Of the weights' shape, in float32 or bfloat16.
        """
        kernels, blocks = load_kernels(), out.numel() // self._sizes[kind][0]
        if kernels is None or not kernels.dequantize(data, int(kind), blocks, out):
            rows = max(1, _WEIGHTS * len(data) // out.numel())
            for begin in range(0, len(data), rows):  # small pieces reuse the same memory
                piece = self._library(data[begin : begin + rows], kind)
                out[begin : begin + rows] = torch.from_numpy(np.require(piece, requirements="W"))
        before, self._done = self._done, self._done + out.numel()
        if _STEPS * before // self._total < _STEPS * self._done // self._total:
            logger.info("converting %s: %.0f %%", self._name, 100 * self._done / self._total)

    def dequantize(self, data: NDArray[Any], kind: Any) -> NDArray[np.float32]:
        """The weights as `gguf.dequantize` returns them."""
        weights, size = self._sizes[kind]
        out = torch.empty(*data.shape[:-1], data.shape[-1] * data.itemsize // size * weights)
        self.multiply_out(data, kind, out)
        numbers: NDArray[np.float32] = out.numpy()
        return numbers


@contextmanager
def _quick_reading(file: Path) -> Iterator[_Source]:
    """A parsed file. Within the block, transformers reads it in the same way, and parses its
    metadata once."""
    import gguf
    from transformers import modeling_gguf_pytorch_utils as legacy

    with _patching, ExitStack() as patches:
        source = _Source(file)
        for module, name, new in (
            (gguf, "GGUFReader", lambda _: source.reader),
            (gguf, "dequantize", source.dequantize),
            (legacy, "tqdm", lambda tensors, **_: tensors),  # progress is logged
            (legacy, "load_gguf_checkpoint", _parsing_once(legacy.load_gguf_checkpoint)),
        ):
            patches.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, new)
        yield source


def _parsing_once(load: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """A `load_gguf_checkpoint` that parses the metadata of a file once."""
    parse = cache(load)

    def load_once(path: Any, return_tensors: bool = False, **others: Any) -> dict[str, Any]:
        if return_tensors:
            return load(path, return_tensors=True, **others)
        return {part: dict(entries) for part, entries in parse(path).items()}

    return load_once


def _quick_reader() -> type[Any]:
    """A `GGUFReader` that takes a tenth of the time for the arrays of a vocabulary."""
    from gguf import GGUFReader, GGUFValueType

    class QuickReader(GGUFReader):
        def _get_field_parts(
            self, orig_offs: int, raw_type: int
        ) -> tuple[int, list[Any], list[int], list[Any]]:
            kind, at = GGUFValueType(raw_type), orig_offs + _HEADER
            if kind != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            parts = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
            inner, count = GGUFValueType(parts[0][0]), int(parts[1][0])
            if inner in self.gguf_scalar_to_np:
                values = self._get(at, self.gguf_scalar_to_np[inner], count)
                parts += list(values.view(np.ndarray).reshape(-1, 1))
                return at + values.nbytes - orig_offs, parts, [*range(2, 2 + count)], [kind, inner]
            if inner != GGUFValueType.STRING:
                return super()._get_field_parts(orig_offs, raw_type)
            data = self.data.view(np.ndarray)  # slices of a memory map take ten times as long
            for _ in range(count):
                size = data[at : at + 8].view(np.uint64)
                end = at + 8 + int(size[0])
                parts += (size, data[at + 8 : end])
                at = end
            return at - orig_offs, parts, [*range(3, 3 + 2 * count, 2)], [kind, inner]

    return QuickReader
