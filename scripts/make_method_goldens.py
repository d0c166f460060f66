"""Generator of goldens for methods that others have, too: tokens that kvpress keeps, and faiss's quantised keys.

    python -m scripts.make_method_goldens tests/goldens TEXT_FILE

Needs the extra `oracles`. kvpress prunes a prompt's cache after prefill. The kept tokens are found by comparing its
keys with those of an unpruned run, so that only kvpress's cache is used.

    pruned.npz: tokens [T + 1], window, chunk; of each method NAME_kept [L, K, T] bool, NAME_logits [V] of the last
                token, NAME_whole [V] the same without pruning
    pq.npz: keys [N, D], q [Q, D], centroids [parts, 2^bits, D / parts], code [parts, N], best [Q, 50] token numbers,
            score [Q, 50], error: squared, of a quantiser of faiss's own
"""

import contextlib
import pathlib
import sys

import faiss
import numpy as np
import torch
from kvpress import ChunkKVPress, ObservedAttentionPress, SnapKVPress, StreamingLLMPress
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache

LENGTH, KEPT, WINDOW, CHUNK = 240, 80, 20, 10
SIZE, PARTS, BITS, TOKENS = 32, 4, 5, 1500


class HeavyHitters(ObservedAttentionPress):
    """Press for H2O: sums instead of averages, and recent tokens whatever their sums."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        mean = super().score(module, hidden_states, keys, values, attentions, kwargs)
        sums = mean * torch.arange(keys.shape[2], 0, -1)
        sums[..., -WINDOW:] = torch.inf
        return sums


def presses() -> dict:
    """Returns a press of each kind that keeps KEPT of LENGTH tokens."""
    ratio = 1 - (KEPT + 0.5) / LENGTH  # rounded down
    return {
        "streaming_llm": StreamingLLMPress(ratio, n_sink=4),
        "snapkv": SnapKVPress(ratio, window_size=WINDOW, kernel_size=5),
        "chunkkv": ChunkKVPress(SnapKVPress(ratio, window_size=WINDOW, kernel_size=1), chunk_length=CHUNK),
        "h2o": HeavyHitters(ratio),
    }


def run(model, tokens: list[int], press=None) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns keys of each layer after the prompt [K, N, D], and the logits of the token after it."""
    cache, ids = DynamicCache(), torch.tensor([tokens])
    with torch.no_grad(), press(model) if press else contextlib.nullcontext():
        model.model(input_ids=ids[:, :LENGTH], past_key_values=cache)
    keys = [layer.keys[0].numpy().copy() for layer in cache.layers]
    with torch.no_grad():
        # With its true position the token sees everything that is left in the cache.
        out = model(input_ids=ids[:, LENGTH:], past_key_values=cache, position_ids=torch.tensor([[LENGTH]]))
    return keys, out.logits[0, -1].numpy()


def kept_of(pruned: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Returns the mask of the rows of a whole cache [K, T, D] that a pruned one has; each must be there once, equal to
    the last bit."""
    same = (pruned[:, :, None] == whole[:, None]).all(-1)
    if not (same.sum(-1) == 1).all():
        raise ValueError("a row of the pruned cache is not in the whole one, or is there twice")
    return same.any(1)


def pruned(model_directory: str, text: str) -> dict[str, np.ndarray]:
    """Returns the tokens that each press keeps of the text's first LENGTH ones. H2O's press needs attention weights,
    ChunkKV's must have none."""
    models = {kind: AutoModelForCausalLM.from_pretrained(model_directory, attn_implementation=kind).eval()
              for kind in ("eager", "sdpa")}
    tokens = Tokenizer.from_file(f"{model_directory}/tokenizer.json").encode(text).ids[: LENGTH + 1]
    arrays = {"tokens": np.asarray(tokens, np.int32), "window": np.int32(WINDOW), "chunk": np.int32(CHUNK)}
    for name, press in presses().items():
        model = models["eager" if name == "h2o" else "sdpa"]
        (whole, before), (left, logits) = run(model, tokens), run(model, tokens, press)
        kept = np.stack([kept_of(*pair) for pair in zip(left, whole, strict=True)])
        arrays |= {f"{name}_kept": kept, f"{name}_logits": logits, f"{name}_whole": before}
    return arrays


def made_up_keys() -> np.ndarray:
    """Returns keys in clumps, with dimensions of different sizes."""
    rng = np.random.default_rng(0)
    clump = 2 * rng.normal(size=(100, SIZE))[rng.integers(0, 100, TOKENS)]
    return ((clump + rng.normal(size=(TOKENS, SIZE))) * np.linspace(0.3, 2, SIZE)).astype(np.float32)


def unpacked(packed: np.ndarray) -> np.ndarray:
    """Returns codes of BITS bits each, which faiss packs one after the other, lowest bit first."""
    bits = np.unpackbits(packed, axis=1, bitorder="little")[:, : PARTS * BITS].reshape(len(packed), PARTS, BITS)
    return (bits * 2 ** np.arange(BITS)).sum(-1).T


def quantised() -> dict[str, np.ndarray]:
    """Returns faiss's codes, best inner products and error, with its own centroids."""
    keys, q = made_up_keys(), np.random.default_rng(1).normal(size=(6, SIZE)).astype(np.float32)
    index = faiss.IndexPQ(SIZE, PARTS, BITS, faiss.METRIC_INNER_PRODUCT)
    index.pq.cp.seed = 3
    index.train(keys)
    index.add(keys)
    score, best = index.search(q, 50)
    packed = index.pq.compute_codes(keys)
    centroids = faiss.vector_to_array(index.pq.centroids).reshape(PARTS, 2**BITS, -1)
    return {"keys": keys, "q": q, "centroids": centroids, "code": unpacked(packed), "best": best, "score": score,
            "error": np.square(keys - index.pq.decode(packed)).sum()}


def main(root: str, text_file: str) -> None:
    import kvjax

    package, text = pathlib.Path(kvjax.__file__).parent, pathlib.Path(text_file).read_text()
    np.savez_compressed(pathlib.Path(root) / "pruned.npz", **pruned(str(package / "reference"), text))
    np.savez_compressed(pathlib.Path(root) / "pq.npz", **quantised())


if __name__ == "__main__":
    main(*sys.argv[1:])
