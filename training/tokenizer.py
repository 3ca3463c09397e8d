"""Trains the reader's tokenizer: byte-level BPE with single digits, and the chat template.

    python3 training/tokenizer.py --data DIR --out training/build/tokenizer
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from corpus import load_corpus

VOCABULARY = 8192
PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
WINDOW = 4096

# The reader was trained to begin its answer with a space, so that an answer's first token is the
# same token as in the document it is copied from.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|> ' + message['content'] + '<|end|>' }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% else %}{{ '<|user|>' + message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# Words with their leading space, single digits, runs of punctuation, line ends.
_SPLIT = Regex(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+")


def train(texts: Iterator[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_SPLIT, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, USER, ASSISTANT, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, model_max_length=WINDOW
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    corpus = load_corpus(Path(__file__).parent, arguments.data)
    tokenizer = train(corpus.texts(random.Random(0)))
    save(tokenizer, arguments.out)
    sample = "The fire drill is on 14 March at 8:30, said Marta Quill."
    print(tokenizer.get_vocab_size(), tokenizer.encode(sample).tokens)


if __name__ == "__main__":
    main()
