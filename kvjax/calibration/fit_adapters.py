"""Adapters by singular value decomposition of the key cache (KVSwap, section 3.2), from second moments alone.

With K_fltn = U diag(S) V^T, the right singular vectors V are the eigenvectors of K_fltn^T K_fltn, so the keys of all
tokens never have to be in memory together.
"""

import numpy as np

from kvjax import _validate
from kvjax.calibration.collect_moments import Moments
from kvjax.errors import ConfigError
from kvjax.methods.shared.adapters import Adapters


def svd(moments: Moments, ratio: int, joint: bool = True, by_layer: bool = False) -> Adapters:
    """Returns the orthonormal adapters that reconstruct keys best, at r = H_k d / sigma.

    Args:
      moments: second moments of the model's keys.
      ratio: sigma, how many times fewer numbers are stored per token.
      joint: whether one adapter covers the keys of all heads (the paper's choice); if not, each head has its own
        d / sigma dimensions, which gives the same total of numbers.
      by_layer: whether layers share the total of dimensions by what the next one would keep of their keys, relative to
        the layer's own (not in the paper); if not, all have the same number.

    Raises:
      ConfigError: the ratio is no positive integer, or leaves no dimension.
    """
    width = moments.gram[0].shape[0]
    size = width if joint else width // moments.heads
    if not _validate.whole(ratio, 1) or ratio > size:
        raise ConfigError(f"ratio={ratio!r} must be an integer from 1 to {size}, the number of dimensions")
    decomposed = [[np.linalg.eigh(block) for block in ([gram] if joint else _own_blocks(gram, moments.heads))]
                  for gram in moments.gram]
    ranks = [size // ratio] * len(decomposed)
    if by_layer:
        energy = np.stack([np.sum([values[::-1] for values, _ in blocks], axis=0) for blocks in decomposed])
        ranks = _shared_out(energy / energy.sum(1, keepdims=True), sum(ranks))
    layers = []
    for rank, blocks in zip(ranks, decomposed, strict=True):
        leading = np.concatenate([vectors[:, ::-1][:, :rank] for _, vectors in blocks])
        layers.append(leading.reshape(moments.heads, -1, rank))
    return Adapters(layers, joint, moments.fingerprint)


def _shared_out(energy: np.ndarray, total: int) -> list[int]:
    """Returns how many dimensions each layer gets of `total`, at least one each.

    Args:
      energy: share of a layer's energy in each of its dimensions [L, N], the largest first.
      total: dimensions of all layers.
    """
    best = np.argsort(-energy[:, 1:], axis=None, kind="stable")[: total - len(energy)]
    return (1 + np.bincount(best // (energy.shape[1] - 1), minlength=len(energy))).tolist()


def _own_blocks(gram: np.ndarray, heads: int) -> list[np.ndarray]:
    """Returns the moments [D, D] within each head."""
    size = gram.shape[0] // heads
    return [gram[i : i + size, i : i + size] for i in range(0, gram.shape[0], size)]


def reconstruction_error(moments: Moments, adapters: Adapters) -> list[float]:
    """Returns ||K - K A A^T||^2 / ||K||^2 of each layer, over the keys that the moments were collected from."""
    errors = []
    for gram, layer in zip(moments.gram, adapters.layers, strict=True):
        heads, _, rank = layer.shape
        parts = [(gram, layer.reshape(-1, rank))]
        if not adapters.joint:
            parts = list(zip(_own_blocks(gram, heads), layer, strict=True))
        lost = sum(_lost(block, basis.astype(np.float64)) for block, basis in parts)
        errors.append(float(lost / np.trace(gram)))
    return errors


def _lost(gram: np.ndarray, basis: np.ndarray) -> float:
    """Returns tr((I - A A^T) M (I - A A^T)); A need not be orthonormal."""
    rest = np.eye(len(gram)) - basis @ basis.T
    return float(np.trace(rest @ gram @ rest.T))
