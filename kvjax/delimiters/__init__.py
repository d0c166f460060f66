"""Which tokens mark semantic boundaries for a model, and how strongly (DynSplit-KV, section 3).

    candidates.py   which token ids are delimiters, found from the tokenizer
    importance.py   Algorithm 1: importance of a boundary from attention maps
    table.py        weights of a model's delimiters, kept in a file with the model's fingerprint
"""

from kvjax.delimiters.candidates import delimiter_texts, ends_sentence
from kvjax.delimiters.importance import Importance, boundary_scores
from kvjax.delimiters.table import Delimiters, Tally

__all__ = ["Delimiters", "Importance", "Tally", "boundary_scores", "delimiter_texts", "ends_sentence"]
