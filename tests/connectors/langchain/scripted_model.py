"""A tiny model that calls tools, without having been trained.

Its layers add nothing: the logits of the next token depend on the last one only, by a table. That
is enough to choose a tool call after a question, to close every string and
number, and to say something after a tool's answer; the rest of a call comes from the grammar.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ragcache.models import LoadedModel, wrap_causal

HIDDEN = 320  # more than there are tokens: each has a dimension of its own, and the last is 1
STRING = "你こ"  # what it writes into every string
SAID = "Hi!"  # where there are no tools
AFTER_TOOL = "Ok."

# The generation prompt ends with a character that tells what comes: a call, words after a tool's
# answer, or words where there are no tools.
TEMPLATE = """\
{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}{% for call in message['tool_calls'] or [] %}<tool_call>
{{ {"name": call['function']['name'], "arguments": call['function']['arguments']} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\
{% if not tools %}~{% elif messages[-1]['role'] == 'tool' %};{% else %}|{% endif %}{% endif %}"""


@cache
def tokenizer() -> Any:
    """A token for each byte, and the template's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({each: i for i, each in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")]
    )
    backend.add_tokens([AddedToken("<tool_call>"), AddedToken("</tool_call>")])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    made.chat_template = TEMPLATE
    return made


@cache
def scripted_model() -> LoadedModel:
    """The model, always the same."""
    config = LlamaConfig(
        vocab_size=len(tokenizer()), hidden_size=HIDDEN, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=1, max_position_embeddings=8192,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(tokenizer()), HIDDEN))
        model.model.embed_tokens.weight[:, -1] = 1
        model.lm_head.weight.copy_(_table())
    return LoadedModel("scripted", wrap_causal(model), tokenizer())


def _table() -> torch.Tensor:
    """[tokens, HIDDEN]: how much each token is wanted after each, and in the last column at all."""
    table = torch.zeros(len(tokenizer()), HIDDEN)
    for token, wanted in (("<|im_end|>", 0.5), ("}", 0.4), (",", 0.3), ('"', 0.2), ("{", 0.1)):
        table[_ids(token)[0], -1] = wanted
    chains = [
        _ids("|") + _ids("<tool_call>"),
        _ids("~" + SAID),
        _ids(";" + AFTER_TOOL),
        _ids(f'"{STRING}"'),
        _ids(" 3"),
    ]
    for chain in chains:
        for before, after in pairwise(chain):
            table[after, before] = 1
    return table


def _ids(text: str) -> list[int]:
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False)
    return ids
