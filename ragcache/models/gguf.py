"""GGUF files: each is converted once, to a checkpoint in the cache folder.

transformers reads a GGUF file for minutes of processor time whenever a process opens it: it parses
the metadata four times, one number at a time, and multiplies the weights out in one thread.
`convert_gguf` parses the file once, multiplies the weights out in all threads, and keeps the result
as any other checkpoint: weights in bfloat16, configuration, tokenizer and chat template. A
checkpoint belongs to the digest of its file, so that a changed file is converted again and a moved
one is not.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from filelock import FileLock
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from ragcache.errors import ConfigurationError
from ragcache.files import sync
from ragcache.models.plain import PlainConfig, unknown_entry
from ragcache.models.quiet import quiet_loading

CONVERSION = 1
"""Version of the conversion. Raise it if the same file becomes another checkpoint."""
_STEPS = 10  # lines that report the progress of one conversion
_PIECE = 2**22  # bytes of a file that are read at once
_WEIGHTS = 2**22  # weights that are multiplied out at once
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
    from transformers import AutoConfig, AutoTokenizer

    from ragcache.models.families import family_of

    logger.info("converting %s to a checkpoint, once", file.name)
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    try:
        with quiet_loading(), _quick_reading(file) as reader:
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
            family_of(config).check(config)  # before anything is multiplied out
            tokenizer.save_pretrained(part)
            if not _write_plain(reader, config, part):
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


def _write_plain(reader: Any, config: Any, folder: Path) -> bool:
    """Write configuration and weights of a plain model, which need no model of transformers.
    Returns whether it is one."""
    from transformers import GenerationConfig

    from ragcache.models.checkpoint import text_class

    if unknown_entry(PlainConfig(**config.to_dict())) is not None:
        return False
    names = {tensor.name: _plain_name(tensor.name) for tensor in reader.tensors}
    if None in names.values():
        return False
    weights = {names[tensor.name]: _weight(tensor, config) for tensor in reader.tensors}
    config.dtype, config.architectures = torch.bfloat16, [text_class(config).__name__]
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return True


def _plain_name(name: str) -> str | None:
    """The name of a plain model's weight for the name in a GGUF file, if there is one."""
    *places, kind = name.split(".")
    if places[0] == "blk" and len(places) == 3 and places[2] in _LAYER_NAMES:
        return f"model.layers.{places[1]}.{_LAYER_NAMES[places[2]]}.{kind}"
    known = _NAMES.get(".".join(places))
    return None if known is None else f"{known}.{kind}"


def _weight(tensor: Any, config: Any) -> Tensor:
    """A weight of a GGUF file in bfloat16."""
    import gguf

    weight = torch.empty([int(size) for size in reversed(tensor.shape)], dtype=torch.bfloat16)
    rows = max(1, _WEIGHTS * len(weight) // weight.numel())
    for begin in range(0, len(weight), rows):  # small pieces of float32 reuse the same memory
        piece = gguf.dequantize(tensor.data[begin : begin + rows], tensor.tensor_type)
        weight[begin : begin + rows] = torch.from_numpy(piece)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    count = heads.get(tensor.name.split(".")[-2])
    if count is None or config.model_type not in _INTERLEAVED:
        return weight
    # dimensions 2i and 2i + 1 of a head turn as a pair there
    return weight.view(count, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


@contextmanager
def _quick_reading(file: Path) -> Iterator[Any]:
    """A parsed reader of a file. Within the block, transformers gets it, too, and everyone gets
    weights by all threads."""
    import gguf
    from transformers import modeling_gguf_pytorch_utils as legacy

    with _patching, ThreadPoolExecutor(torch.get_num_threads()) as threads, ExitStack() as patches:
        reader = _quick_reader()(file)
        total = sum(tensor.n_elements for tensor in reader.tensors)
        shared = _in_threads(gguf.dequantize, threads, file.name, total)
        for module, name, new in (
            (gguf, "GGUFReader", lambda _: reader),
            (gguf, "dequantize", shared),
            (legacy, "tqdm", lambda tensors, **_: tensors),  # progress is logged
        ):
            patches.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, new)
        yield reader


def _in_threads(
    dequantize: Callable[..., NDArray[np.float32]],
    threads: ThreadPoolExecutor,
    name: str,
    total: int,
) -> Callable[..., NDArray[np.float32]]:
    """A `dequantize` that shares the rows of a tensor among threads, and reports the progress."""
    done = 0

    def shared(data: NDArray[Any], kind: Any) -> NDArray[np.float32]:
        nonlocal done
        parts = np.array_split(data, threads._max_workers)
        weights = np.concatenate(list(threads.map(lambda part: dequantize(part, kind), parts)))
        before, done = done, done + weights.size
        if _STEPS * before // total < _STEPS * done // total:
            logger.info("converting %s: %.0f %%", name, 100 * done / total)
        return weights

    return shared


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
