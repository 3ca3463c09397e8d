"""The trial of a family: a tiny random model against Hugging Face, before a model of it is served.

A wrong recipe gives wrong answers without an error: keys turned by other pairs, a layer without
positions that is turned, an unknown window. The first model of an architecture is therefore shrunk
to a few layers, heads, experts and words, with every flag as it is, and every parameter random: the
weights of norms and biases, too, which would hide what they do at 1 and 0. Two modules are encoded
away from their places, the second behind other text that no prompt contains, moved and read. The
log-probabilities of all tokens after them must be equal to Hugging Face's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ragcache.errors import UnsupportedModel
from ragcache.models.families import Family, family_of, wrap_causal
from ragcache.models.hybrid_trial import call_behind, hybrid_difference
from ragcache.models.model import CausalLM
from ragcache.models.properties import layer_changes
from ragcache.models.recurrent import LayerKinds
from ragcache.models.single_pass import forward_text
from ragcache.states import KVStates

HEADS, LAYERS, EXPERTS, WIDTH, VOCABULARY = 4, 2, 4, 64, 320
"""Sizes of the tiny model; a head keeps its own."""
WINDOW = 7  # of sliding windows: the first of the own tokens sees into both modules
MODULES, OWN = (24, 5), 15  # tokens of the modules at the beginning of the text, and after them
FEW = 2  # wanted rows of the own tokens, which the last layer computes alone
ELSEWHERE = (33, 9)  # where the modules are encoded, if they can move
BEHIND = (0, 9)  # tokens right before each module that it sees and that prompts do not contain
NOISE = 0.3  # on the weights of norms, and on biases
SEEDS = (7, 8, 9)  # experts of a near tie may differ by rounding; a wrong recipe fails for all
TOLERANCE = 1e-3  # of the spread of the log-probabilities; float32 differs by 1e-5 at most
_passed: set[str] = set()  # trials of this process


def wrap(model: Any) -> CausalLM:
    """Prepares a loaded Hugging Face model for the engine, in place, once its family has passed its
    trial. Raises `UnsupportedModel` before anything is changed."""
    family_of(model.config).check(model.config)
    try_family(type(model), model.config)
    return wrap_causal(model)


def try_family(
    kind: type[Any], config: Any, wrapped: Callable[[Any], CausalLM] = wrap_causal
) -> None:
    """Tries the family of a configuration, unless this process has done so. kind: the class of the
    model; wrapped: makes the engine's model of Hugging Face's. Raises `UnsupportedModel` where it
    answers otherwise than Hugging Face."""
    family = family_of(config)
    try:
        tiny = tiny_config(config, family)
        tried = f"{kind} {family} {tiny} {wrapped}"
        if tried in _passed:
            return
        differences = []
        for seed in SEEDS:
            differences.append(trial_difference(tiny_model(kind, tiny, seed), wrapped))
            if differences[-1] <= TOLERANCE:
                break
    except Exception as error:  # code of models raises any type
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
            "positions (silent_layers), at windows and caps, and at norms after the rotation"
        )
    _passed.add(tried)


def tiny_config(config: Any, family: Family) -> Any:
    """The configuration with few layers, heads, experts and words, and everything else, the size of
    a head included, as it is."""
    tiny, entries, layers = copy.deepcopy(config), config.to_dict(), _chosen_layers(config)
    heads = config.num_attention_heads
    head_dim = entries.get("head_dim") or config.hidden_size // heads
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
    if changes := layer_changes(config):
        tiny.per_layer_config = {
            number: _fewer_heads(changes[layer], heads)
            for number, layer in enumerate(layers)
            if layer in changes
        }
    if shared := getattr(config, "num_kv_shared_layers", 0):
        first = config.num_hidden_layers - shared
        tiny.num_kv_shared_layers = sum(layer >= first for layer in layers)
    for name, value in family.tiny.items():
        setattr(tiny, name, value(tiny) if callable(value) else value)
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
        for weight in model.state_dict().values():
            if weight.dim() > 1:  # large enough that positions and attention matter
                weight.normal_(0, weight.shape[-1] ** -0.5)
            elif weight.is_floating_point():
                weight.add_(torch.empty_like(weight).normal_(0, NOISE))
    return model.eval()


@torch.inference_mode()
def trial_difference(model: Any, wrapped: Callable[[Any], CausalLM] = wrap_causal) -> float:
    """Largest difference from Hugging Face's log-probabilities, as a share of their spread.

    Compares every token after two moved modules, which do not see each other. Models with recurrent
    layers: see `hybrid_difference`.
    """
    with torch.device("cpu"):
        if LayerKinds.of(model.config).recurrent:
            return hybrid_difference(model, wrapped, SEEDS[0])
        return _difference(model, wrapped)


def _difference(model: Any, wrapped: Callable[[Any], CausalLM]) -> float:
    generator = torch.Generator().manual_seed(SEEDS[0])
    vocabulary = model.get_input_embeddings().num_embeddings
    token_ids = torch.randint(vocabulary, (sum(MODULES) + OWN,), generator=generator)
    *modules, own = torch.split(token_ids, [*MODULES, OWN])
    behind = [torch.randint(vocabulary, (count,), generator=generator) for count in BEHIND]
    expected = expected_logits(model, modules, own, behind).log_softmax(-1)
    causal = wrapped(model)
    placed, at = [], 0
    for module, other, elsewhere in zip(modules, behind, ELSEWHERE, strict=True):
        start = elsewhere if causal.scheme.movable else at
        seen = []
        if len(other):
            states = causal.new_states(len(other))
            forward_text(causal, other, start - len(other), *states, wanted=0)
            seen.append((KVStates(*states, start - len(other)), start - len(other)))
        keys, values = causal.new_states(len(module))
        forward_text(causal, module, start, keys, values, seen, wanted=0)
        placed.append((KVStates(keys, values, start), at))
        at += len(module)
    found = [
        forward_text(causal, own, at, *causal.new_states(len(own)), placed, wanted=wanted)
        for wanted in (len(own), FEW)
    ]
    logits, again = torch.cat(found).log_softmax(-1), torch.cat([expected, expected[-FEW:]])
    return float((logits - again).abs().max() / expected.std())


def expected_logits(
    model: Any, modules: Sequence[Tensor], own: Tensor, behind: Sequence[Tensor]
) -> Tensor:
    """Logits of the own tokens by Hugging Face alone, [T, vocabulary]: the model runs each module
    where it is placed, right behind other tokens, and the module's keys and values join the
    cache."""
    cache, at = DynamicCache(), 0
    for module, other in zip(modules, behind, strict=True):
        alone, count = DynamicCache(), len(other)
        _call(model, torch.cat([other, module]), at - count, alone)
        for number, layer in enumerate(alone.layers):
            cache.update(layer.keys[:, :, count:], layer.values[:, :, count:], number)
        at += len(module)
    return _call(model, own, at, cache)


def _call(model: Any, token_ids: Tensor, start: int, cache: DynamicCache) -> Tensor:
    """Hugging Face's logits of tokens from a position on, behind a cache: [T, vocabulary]."""
    positions = torch.arange(start, start + len(token_ids))[None]
    return call_behind(model, token_ids, positions, cache)


def _chosen_layers(config: Any) -> list[int]:
    """The first layer of every kind that the configuration lists, and two at least. Layers that
    share states are kinds of their own."""
    count = config.num_hidden_layers
    own = count - getattr(config, "num_kv_shared_layers", 0)
    lists = [
        each
        for each in config.to_dict().values()
        if isinstance(each, list | tuple) and len(each) == count
    ]
    first: dict[str, int] = {}
    for layer in range(count):
        first.setdefault(repr([layer < own, *(each[layer] for each in lists)]), layer)
    others = [layer for layer in range(count) if layer not in first.values()]
    return sorted([*first.values(), *others[: max(0, LAYERS - len(first))]])


def _fewer_heads(changes: dict[str, Any], heads: int) -> dict[str, Any]:
    """A layer's properties, with as many query heads a key head as the model has."""
    name = "num_key_value_heads"
    return {**changes, name: max(1, changes[name] * HEADS // heads)} if name in changes else changes


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
        chosen = "per_tok" in name or name.startswith(("moe_", "top_k_"))
        return min(value, 1 if "shared" in name else EXPERTS // 2 if chosen else EXPERTS)
    if name in ("first_k_dense_replace", "num_dense_layers"):
        return min(value, 1)
    if name == "sliding_window":
        return WINDOW
    return value
