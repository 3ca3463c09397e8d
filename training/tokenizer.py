"""Trains the reader's tokenizer: byte-level BPE with single digits and single Chinese characters.

    python3 training/tokenizer.py --data DIR --packs training/build/packs/pack-0 \
        --out training/build/tokenizer

Numbers and Chinese names are then copied piece by piece, and an answer's tokens are the document's.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from corpus import load_corpus
from markup import is_chinese
from pack import read_texts
from special_tokens import ALL, END, PAD

VOCABULARY = 16384
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

# Words with their leading space, single Chinese characters and digits, punctuation, line ends.
_SPLIT = Regex(
    r"'(?:s|t|re|ve|m|ll|d)|\p{Han}| ?[\p{L}&&[^\p{Han}]]+| ?\p{N}| ?[^\s\p{L}\p{N}]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def natural_texts(packs: list[Path], megabytes: float, rng: random.Random) -> Iterator[str]:
    """Documents at random, as many bytes of either language."""
    texts = read_texts(packs, 2)
    left = dict.fromkeys((False, True), megabytes * 5e5)
    for text in rng.sample(texts, len(texts)):
        chinese = is_chinese(text[:600])
        if left[chinese] > 0:
            left[chinese] -= len(text.encode())
            yield text


def train(texts: Iterator[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_SPLIT, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=ALL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, model_max_length=WINDOW
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--packs", type=Path, nargs="+", required=True, help="folders of pack.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--megabytes", type=float, default=60, help="of natural text")
    arguments = parser.parse_args()
    corpus = load_corpus(Path(__file__).parent, arguments.data)
    rng = random.Random(0)
    natural = natural_texts(arguments.packs, arguments.megabytes, rng)
    tokenizer = train(chain(corpus.texts(rng), natural))
    save(tokenizer, arguments.out)
    sample = "The fire drill is on 14 March at 8:30, said Marta Quill. 消防演习在三月十四日。"
    print(tokenizer.get_vocab_size(), tokenizer.encode(sample).tokens)


if __name__ == "__main__":
    main()
