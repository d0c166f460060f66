"""Training of the reference model's byte-level BPE on the standard library (about a minute).

    python -m scripts.train_tokenizer DIRECTORY

Numbers are split into groups of up to three digits, as in Llama 3, and every group of one to three digits is one token,
so that a value is a few tokens long and no digit pair is favoured.
"""

import pathlib
import sys

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from kvjax.eval.tasks import corpus

VOCAB_SIZE = 3072
SPECIAL = ["<|bos|>", "<|eos|>", "<|pad|>", "<|user|>"]
PATTERN = r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\n+|\s+(?!\S)|\s+"


def texts():
    yield from corpus.stdlib_documents(held_out=False)
    groups = [f"{n:0{width}d}" for width in (1, 2, 3) for n in range(10**width)]
    for _ in range(3_000):
        yield " ".join(groups)


def main(directory: str) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
    )
    path = pathlib.Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    missing = [g for w in (1, 2, 3) for g in (f"{n:0{w}d}" for n in range(10**w)) if tokenizer.token_to_id(g) is None]
    print(f"{tokenizer.get_vocab_size()} tokens; {len(missing)} digit groups without a token of their own")


if __name__ == "__main__":
    main(sys.argv[1])
