"""Trains the reference language model: real text and retrieval, row length growing in stages."""

import functools
import pathlib
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from orbax.checkpoint import v1 as ocp
from tokenizers import Tokenizer

from experiments import lm_data
from experiments.results import Run
from kvjax.models.config import ModelConfig, RopeConfig
from kvjax.models.transformer import Transformer
from kvjax.tasks import needles


def model_config(config: ml_collections.ConfigDict, tokenizer: Tokenizer) -> ModelConfig:
    """The reference architecture: Llama, tied embeddings."""
    shape = dict(config.model)
    theta = shape.pop("rope_theta")
    return ModelConfig(
        family="llama", vocab_size=tokenizer.get_vocab_size(), tie_embeddings=True, rope=RopeConfig(theta),
        bos_token_id=tokenizer.token_to_id("<|bos|>"), eos_token_ids=(tokenizer.token_to_id("<|eos|>"),), **shape,
    )


def optimiser(config: ml_collections.ConfigDict) -> optax.GradientTransformation:
    """Muon on the matrices of the layers, AdamW on embedding and norms; warm-up, plateau, linear decay."""
    total = sum(steps for _, _, steps in config.stages)
    rate = optax.join_schedules(
        [
            optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps),
            optax.constant_schedule(config.learning_rate),
            optax.linear_schedule(config.learning_rate, 0.05 * config.learning_rate, config.decay_steps),
        ],
        [config.warmup_steps, total - config.decay_steps],
    )

    def dimensions(params):
        def one(path, leaf):
            embedding = any(getattr(key, "key", None) == "embedding" for key in path)
            return optax.contrib.MuonDimensionNumbers() if leaf.ndim == 2 and not embedding else None

        return jax.tree_util.tree_map_with_path(one, params)

    muon = optax.contrib.muon(
        rate, weight_decay=config.weight_decay, consistent_rms=0.2, adam_b2=0.98,
        muon_weight_dimension_numbers=dimensions,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def weighted_loss(logits, targets, weights):
    """Cross-entropy averaged with the given weights."""
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(loss * weights) / jnp.maximum(jnp.sum(weights), 1.0), loss


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def train_step(model, tx, params, opt_state, batch, answer_weight):
    def objective(params):
        logits = model.apply({"params": params}, batch["tokens"][:, :-1], batch["positions"])
        total, loss = weighted_loss(logits, batch["tokens"][:, 1:], batch["weights"])
        answers = batch["weights"] >= answer_weight
        right = (jnp.argmax(logits, -1) == batch["tokens"][:, 1:]) & answers
        return total, {
            "loss": total,
            "answer_loss": jnp.sum(loss * answers) / jnp.sum(answers),
            "answer_accuracy": jnp.sum(right) / jnp.sum(answers),
            "text_loss": jnp.sum(loss * (batch["weights"] == 1.0)) / jnp.maximum(jnp.sum(batch["weights"] == 1.0), 1),
        }

    (_, metrics), grads = jax.value_and_grad(objective, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, metrics


@functools.partial(jax.jit, static_argnums=0)
def _predictions(model, params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return jnp.argmax(model.apply({"params": params}, tokens, positions), -1)


def exact_answers(model, params, tokenizer, stream, length, count, samples=64, batch=8, seed=7) -> float:
    """Share of held-out single questions among `count` needles answered exactly under greedy decoding.

    An answer is the greedy one exactly when every one of its tokens is the argmax after the ones before.
    """
    rng = np.random.default_rng(seed)
    rows, spans = [], []
    for _ in range(samples):
        facts = needles.draw_needles(rng, count, held_out=True, digits=5)
        cue = needles.encode(tokenizer, "\n" + facts[0].cue)
        answer = needles.encode(tokenizer, f" {facts[0].value}")
        room = length - len(cue) - len(answer)
        text = needles.haystack(rng, tokenizer, stream, room, facts, facts[:1]).context
        rows.append([*text, *cue, *answer])
        spans.append(len(answer))
    rows, right = np.asarray(rows, np.int32), 0
    for start in range(0, samples, batch):
        guess = np.asarray(_predictions(model, params, rows[start : start + batch]))
        for row, got, span in zip(rows[start : start + batch], guess, spans[start : start + batch], strict=True):
            right += bool(np.all(got[-span - 1 : -1] == row[-span:]))
    return right / samples


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Trains stage after stage; resumes from the newest checkpoint of the workdir."""
    run = Run(config, workdir)
    tokenizer = Tokenizer.from_file(config.tokenizer)
    model = Transformer(model_config(config, tokenizer))
    tx = optimiser(config)
    params = model.init(jax.random.key(config.seed), jnp.zeros((1, 8), jnp.int32), jnp.zeros((1, 8), jnp.int32))
    state = {"params": params["params"], "opt_state": tx.init(params["params"])}
    checkpoints = ocp.training.Checkpointer(pathlib.Path(workdir).absolute() / "checkpoints")
    done = 0
    if checkpoints.latest is not None:
        done = checkpoints.latest.step
        state = checkpoints.load(done, state)
    rows = lm_data.Rows(
        tokenizer, lm_data.encode_corpus(tokenizer, held_out=False), lm_data.Mixture(**config.mixture),
        config.model.max_position,
    )
    held_out = lm_data.encode_corpus(tokenizer, held_out=True)
    plan = [(length, batch) for length, batch, steps in config.stages for _ in range(steps)]
    with ThreadPoolExecutor(1) as pool:
        upcoming = pool.submit(rows.batch, (config.seed, done), plan[done][1], plan[done][0]) if done < len(plan) else None
        for step in range(done, len(plan)):
            length, batch = plan[step]
            data = upcoming.result()
            if step + 1 < len(plan):
                upcoming = pool.submit(rows.batch, (config.seed, step + 1), plan[step + 1][1], plan[step + 1][0])
            state["params"], state["opt_state"], metrics = train_step(
                model, tx, state["params"], state["opt_state"], data, config.mixture.answer_weight
            )
            last = step + 1 == len(plan)
            if (step + 1) % config.log_every == 0 or last:
                run.log(step=step + 1, length=length, **{k: float(v) for k, v in metrics.items()})
            if (step + 1) % config.eval_every == 0 or last:
                scores = {
                    f"exact_{n}_of_{length}": exact_answers(model, state["params"], tokenizer, held_out, length, n)
                    for n in (1, 4)
                }
                run.log(step=step + 1, **scores)
            if (step + 1) % config.checkpoint_every == 0 or last:
                checkpoints.save(step + 1, state, overwrite=True)
    checkpoints.close()
