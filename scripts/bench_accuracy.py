"""What weights in few bits lose: mean log-probability of a text's tokens, beside that of the model in f32.

    python scripts/bench_accuracy.py [--model=DIR_OR_GGUF] [--text=FILE] [--tokens=1024] [--types=bfloat16,int8,int4]

The text is read by dense attention; the default is a document of this repository, which the reference model has not
seen. "KL" is the mean divergence of the predicted distribution from the one in f32, "same" the share of tokens whose
most likely successor is the same.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import kvjax
from kvjax.models.transformer import Transformer
from kvjax.ops import weights

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = flags.DEFINE_string("model", str(ROOT / "kvjax/reference"), "directory or GGUF file of the model")
TEXT = flags.DEFINE_string("text", str(ROOT / "docs/store.md"), "text file")
TOKENS = flags.DEFINE_integer("tokens", 1024, "tokens of the text", lower_bound=2)
TYPES = flags.DEFINE_list("types", ["bfloat16", "int8", "int4"], "types of the weights")


def predictions(kind: str, text: str) -> tuple[np.ndarray, np.ndarray, str]:
    """Returns the text's tokens, the log-probabilities of all tokens after each, and the model in words."""
    few = kind if kind in weights.KINDS else None
    llm = kvjax.load(MODEL.value, "float32" if few else kind, weights=few)
    tokens = np.asarray(llm.encode(text, start=True))[: TOKENS.value]
    if len(tokens) < TOKENS.value:
        raise app.UsageError(f"--text={TEXT.value} has {len(tokens)} tokens, and --tokens={TOKENS.value}; lower it")

    @jax.jit
    def logprobs(params, tokens):
        logits = Transformer(llm.config).apply({"params": params}, tokens, jnp.arange(tokens.shape[1])[None])
        return jax.nn.log_softmax(logits[0, :-1].astype(jnp.float32))

    return tokens, np.asarray(logprobs(llm.params, jnp.asarray(tokens)[None])), repr(llm)


def main(_) -> None:
    text = pathlib.Path(TEXT.value).read_text()
    tokens, exact, model = predictions("float32", text)
    at = np.arange(len(tokens) - 1)
    before = exact[at, tokens[1:]]
    print(model)
    print(f"{'float32':10} log-probability {before.mean():.4f}")
    for kind in TYPES.value:
        _, found, model = predictions(kind, text)
        difference = found[at, tokens[1:]] - before
        divergence = np.sum(np.exp(exact) * (exact - found), axis=-1)
        error = difference.std() / len(difference) ** 0.5
        print(f"{kind:10} log-probability {before.mean() + difference.mean():.4f}, difference {difference.mean():+.4f} "
              f"(standard error {error:.4f}), KL {divergence.mean():.5f}, "
              f"same {(exact.argmax(-1) == found.argmax(-1)).mean():.1%}; {model}", flush=True)


if __name__ == "__main__":
    app.run(main)
