"""The trial of a family: a tiny random model against Hugging Face, before a model of it is served.

A wrong recipe gives wrong answers without an error: keys turned by other pairs, a layer without
positions that is turned, an unknown window. The first model of an architecture is therefore shrunk
to a few layers, heads, experts and words, with every flag as it is. A module is encoded away from
its place, moved and read, and the log-probabilities must equal Hugging Face's over the whole text.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ragcache.attention import (
    AttentionMetadata,
    CausalBlock,
    ContiguousWrite,
    SharedKV,
    SharedQueries,
    over_heads,
    read_values,
)
from ragcache.errors import UnsupportedModel
from ragcache.models.families import Family, family_of, wrap_causal
from ragcache.models.model import CausalLM, ForwardBatch
from ragcache.states import KVStates

HEADS, LAYERS, EXPERTS, WIDTH, VOCABULARY = 4, 2, 4, 64, 320
"""Sizes of the tiny model; a head keeps its own."""
WINDOW = 7  # of sliding windows; the text is longer
TOKENS, MODULE = 47, 29  # of the text, and of the module at its beginning
ELSEWHERE = 33  # where the module is encoded, if it can move
SEEDS = (7, 8, 9)  # experts of a near tie may differ by rounding; a wrong recipe fails for all
TOLERANCE = 1e-3  # of the spread of the log-probabilities; float32 differs by 1e-5 at most
_passed: set[str] = set()  # trials of this process


def wrap(model: Any) -> CausalLM:
    """Prepares a loaded Hugging Face model for the engine, in place, once its family has passed its
    trial. Raises `UnsupportedModel` before anything is changed."""
    family_of(model.config).check(model.config)
    try_family(type(model), model.config)
    return wrap_causal(model)


def try_family(kind: type[Any], config: Any) -> None:
    """Tries the family of a configuration, unless this process has done so. kind: the class of the
    model. Raises `UnsupportedModel` where it answers otherwise than Hugging Face."""
    family = family_of(config)
    try:
        tiny = tiny_config(config, family)
        tried = f"{kind} {family} {tiny}"
        if tried in _passed:
            return
        differences = []
        for seed in SEEDS:
            differences.append(trial_difference(tiny_model(kind, tiny, seed)))
            if differences[-1] <= TOLERANCE:
                break
    except Exception as error:
        raise UnsupportedModel(
            f"the family of {config.model_type!r} models could not be tried on a tiny random "
            f"model: {type(error).__name__}: {error}. If the tiny configuration does not fit, name "
            "values that do (`Family.tiny`); else its row in ragcache.models.families is wrong"
        ) from error
    if not differences[-1] <= TOLERANCE:
        raise UnsupportedModel(
            f"the family of {config.model_type!r} models answers otherwise than Hugging Face: on "
            f"a tiny random model log-probabilities differ by {min(differences):.1%} of their "
            "spread. Its row in ragcache.models.families is wrong for this model: look at the "
            "pairs that its rotary positions turn (interleaved, backward), at layers without "
            "positions (silent_layers), at windows and at caps"
        )
    _passed.add(tried)


def tiny_config(config: Any, family: Family) -> Any:
    """The configuration with few layers, heads, experts and words, and everything else, the size of
    a head included, as it is."""
    tiny, entries, layers = copy.deepcopy(config), config.to_dict(), _chosen_layers(config)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    for name, value in entries.items():
        if isinstance(value, list | tuple) and len(value) == config.num_hidden_layers:
            setattr(tiny, name, [value[layer] for layer in layers])
        elif isinstance(value, int) and not isinstance(value, bool):
            setattr(tiny, name, _smaller(name, value))
    vars(tiny).pop("quantization_config", None)  # weights that are stored quantized are not random
    tiny.num_hidden_layers, tiny.num_attention_heads = len(layers), HEADS
    tiny.hidden_size = HEADS * head_dim
    if "head_dim" in entries:
        tiny.head_dim = head_dim
    for name in ("num_key_value_heads", "num_kv_heads"):
        if name in entries:
            setattr(tiny, name, {heads: HEADS, 1: 1}.get(entries[name] or heads, HEADS // 2))
    for name, value in family.tiny.items():
        setattr(tiny, name, value)
    return tiny


def tiny_model(kind: type[Any], config: Any, seed: int) -> Any:
    """A model with random weights in float32 on the CPU, with the attention that Hugging Face
    chooses for it; its fused one would leave a soft cap out."""
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(seed)
        model = kind._from_config(
            copy.deepcopy(config),
            dtype=torch.float32,
            attn_implementation="eager" if capped else None,
        )
        for weight in model.parameters():
            if weight.dim() > 1:  # large enough that positions and attention matter
                weight.normal_(0, weight.shape[-1] ** -0.5)
    return model.eval()


@torch.inference_mode()
def trial_difference(model: Any) -> float:
    """Largest difference from Hugging Face's log-probabilities, as a share of their spread.

    Compares the token after a text that begins with a moved module.
    """
    with torch.device("cpu"):
        return _difference(model)


def _difference(model: Any) -> float:
    generator = torch.Generator().manual_seed(SEEDS[0])
    vocabulary = model.get_input_embeddings().num_embeddings
    token_ids = torch.randint(vocabulary, (TOKENS,), generator=generator)
    expected = model(token_ids[None], use_cache=False).logits[0, -1].log_softmax(-1)
    causal = wrap_causal(model)
    start = ELSEWHERE if causal.scheme.movable else 0
    keys, values = causal.new_states(MODULE)
    _forward(causal, token_ids[:MODULE], start, keys, values)
    module = KVStates(keys, values, start)
    own = causal.new_states(TOKENS - MODULE)
    logits = _forward(causal, token_ids[MODULE:], MODULE, *own, module)
    difference = (logits.log_softmax(-1) - expected).abs().max() / expected.std()
    return float(difference)


def _forward(
    causal: CausalLM,
    token_ids: Tensor,
    start: int,
    keys: Tensor,
    values: Tensor,
    module: KVStates | None = None,
) -> Tensor:
    """Logits of the last token. keys, values: where the tokens' states go; module: what stands at
    position 0 before them."""
    rows = torch.arange(len(token_ids))
    positions = rows + start
    queries: SharedQueries | None = None
    shared: tuple[SharedKV, ...] = ()
    if module is not None:
        moved = rows.new_full((len(rows),), -module.start)
        turning = causal.scheme.relocation(moved) if module.start else None
        queries = SharedQueries(rows, over_heads(turning), -positions.float())
        states = module.keys, read_values(module.keys, module.values)
        shared = (SharedKV(*states, 0, len(rows)),)
    metadata = AttentionMetadata(
        shared_queries=queries,
        shared_kv=shared,
        causal_blocks=(CausalBlock(0, len(rows)),),
        paged_queries=None,
        writes=(ContiguousWrite(keys, values, 0, 0, len(rows)),),
        shared_index=rows[None],
        slopes=causal.scheme.slopes,
        positions=positions.float(),
        windows=causal.windows,
        softcap=causal.softcap,
    )
    return causal.forward(ForwardBatch(token_ids, positions, rows[-1:], metadata))[0]


def _chosen_layers(config: Any) -> list[int]:
    """The first layer of every kind that the configuration lists, and two at least."""
    count = config.num_hidden_layers
    lists = [
        each
        for each in config.to_dict().values()
        if isinstance(each, list | tuple) and len(each) == count
    ]
    first: dict[str, int] = {}
    for layer in range(count):
        first.setdefault(repr([each[layer] for each in lists]), layer)
    others = [layer for layer in range(count) if layer not in first.values()]
    return sorted([*first.values(), *others[: max(0, LAYERS - len(first))]])


def _smaller(name: str, value: int) -> int:
    if name.endswith("token_id"):
        return 0
    if name.endswith(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")):
        return min(value, WIDTH)
    if "vocab_size" in name:
        return min(value, VOCABULARY)
    if name in ("n_group", "topk_group"):
        return 1
    if "experts" in name or name in ("moe_topk", "moe_k"):
        chosen = "per_tok" in name or name.startswith("moe_")
        return min(value, 1 if "shared" in name else EXPERTS // 2 if chosen else EXPERTS)
    if name in ("first_k_dense_replace", "num_dense_layers"):
        return min(value, 1)
    if name == "sliding_window":
        return WINDOW
    return value
