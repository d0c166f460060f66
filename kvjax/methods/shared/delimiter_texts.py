"""Delimiters among a tokenizer's tokens: tokens whose text is only punctuation or line breaks."""

import unicodedata

from tokenizers import Tokenizer

_LINE_BREAKS = "\r\n"
_INDENTATION = " \t"
_SENTENCE_ENDS = frozenset(".!?。")  # and characters that normalise to them: full-width forms, the ellipsis

PAPER_MARKS = frozenset((".", "!", "?", "...", ";", ":", ",", "'", '"', "(", ")", "[", "]"))
"""The 13 candidates of DynSplit-KV, Table 7."""


def is_delimiter(text: str) -> bool:
    """Returns whether a text has punctuation (Unicode category P) or line breaks, and else only indentation."""
    marks = [char for char in text if char not in _INDENTATION]
    return bool(marks) and all(char in _LINE_BREAKS or unicodedata.category(char)[0] == "P" for char in marks)


def ends_sentence(text: str) -> bool:
    """Returns whether a delimiter closes a sentence: the pre-defined delimiters of SentenceKV (Zhu et al., 2025)."""
    return not _SENTENCE_ENDS.isdisjoint(unicodedata.normalize("NFKC", text))


def delimiter_texts(tokenizer: Tokenizer) -> dict[int, str]:
    """Returns the text of every token that is a delimiter, by id; special tokens never are."""
    tokens = sorted(tokenizer.get_vocab(with_added_tokens=True).values())  # some vocabularies have gaps
    texts = ((token, tokenizer.decode([token])) for token in tokens)
    return {token: text for token, text in texts if is_delimiter(text)}
