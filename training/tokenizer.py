"""Trains the reader's tokenizer: byte-level BPE with single digits and single Chinese characters.

    python3 training/tokenizer.py --data DIR --text training/build/text --out training/build/tokenizer

Numbers and Chinese names are then copied piece by piece, and an answer's tokens are the document's.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from corpus import load_corpus

VOCABULARY = 16384
PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
NO_ANSWER = "<|no_answer|>"  # the whole answer where the documents hold none
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


def natural_texts(folder: Path, megabytes: float, rng: random.Random) -> Iterator[str]:
    """Documents of `gather.py`, at random, of both languages alike."""
    files = sorted(folder.glob("*.jsonl.gz"))
    left = dict.fromkeys(("en", "zh"), megabytes * 5e5)
    share = megabytes * 4e6 / max(1, sum(f.stat().st_size for f in files))
    for file in rng.sample(files, len(files)):
        with gzip.open(file, "rt", encoding="utf-8") as rows:
            for row in rows:
                if rng.random() > share:
                    continue
                document = json.loads(row)
                if left[document["language"]] > 0:
                    left[document["language"]] -= len(document["text"].encode())
                    yield document["text"]


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
        special_tokens=[PAD, USER, ASSISTANT, END, NO_ANSWER],
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
    parser.add_argument("--text", type=Path, required=True, help="what gather.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--megabytes", type=float, default=80, help="of natural text")
    arguments = parser.parse_args()
    corpus = load_corpus(Path(__file__).parent, arguments.data)
    rng = random.Random(0)
    natural = natural_texts(arguments.text, arguments.megabytes, rng)
    tokenizer = train(chain(corpus.texts(rng), natural))
    save(tokenizer, arguments.out)
    sample = "The fire drill is on 14 March at 8:30, said Marta Quill. 消防演习在三月十四日。"
    print(tokenizer.get_vocab_size(), tokenizer.encode(sample).tokens)


if __name__ == "__main__":
    main()
