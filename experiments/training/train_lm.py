"""Training of the reference language model: real text and retrieval, with rows that grow longer in stages."""

import collections
import functools
import json
import multiprocessing
import pathlib
import shutil
from concurrent.futures import ProcessPoolExecutor

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from matplotlib.figure import Figure
from orbax.checkpoint import v1 as ocp
from tokenizers import Tokenizer
from tqdm import tqdm

from experiments import common, plots
from experiments.results import Run
from experiments.training import lm_data
from kvjax.errors import ConfigError
from kvjax.eval.intervals import wilson
from kvjax.eval.tasks import needles
from kvjax.models import checkpoint
from kvjax.models.config import ModelConfig, RopeConfig
from kvjax.models.transformer import Transformer

ASKED = 64  # questions of each kind in an evaluation


def read_tokenizer(path: str) -> Tokenizer:
    """Returns the tokenizer of a file; raises ConfigError if it cannot be read, or does not mark beginning and end of a
    text."""
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as cause:  # tokenizers raises no narrower class
        raise ConfigError(f"tokenizer={path} cannot be used ({cause}); give a tokenizer.json") from cause
    missing = [mark for mark in ("<|bos|>", "<|eos|>") if tokenizer.token_to_id(mark) is None]
    if missing:
        raise ConfigError(f"tokenizer={path} has no token {missing[0]}; give one that has <|bos|> and <|eos|>")
    return tokenizer


def model_config(config: ml_collections.ConfigDict, tokenizer: Tokenizer) -> ModelConfig:
    """Returns the reference architecture: Llama with tied embeddings."""
    shape = dict(config.model)
    theta = shape.pop("rope_theta")
    return ModelConfig(
        family="llama", vocab_size=tokenizer.get_vocab_size(), tie_embeddings=True, rope=RopeConfig(theta),
        bos_token_id=tokenizer.token_to_id("<|bos|>"), eos_token_ids=(tokenizer.token_to_id("<|eos|>"),), **shape,
    )


def optimiser(config: ml_collections.ConfigDict) -> optax.GradientTransformation:
    """Returns Muon for the matrices of the layers and AdamW for embedding and norms; warm-up, plateau, linear decay."""
    total = sum(steps for _, steps in config.stages)
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
    """Returns the cross-entropy averaged with the given weights, and that of each token."""
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(loss * weights) / jnp.maximum(jnp.sum(weights), 1.0), loss


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(3, 4))
def train_step(model, tx, dtype, params, opt_state, batch, answer_weight):
    """Takes one step whose products have type `dtype`; parameters and their updates are f32."""
    def objective(params):
        rounded = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        logits = model.apply({"params": rounded}, batch["tokens"][:, :-1], batch["positions"]).astype(jnp.float32)
        total, loss = weighted_loss(logits, batch["tokens"][:, 1:], batch["weights"])
        answers = batch["weights"] >= answer_weight
        right = (jnp.argmax(logits, -1) == batch["tokens"][:, 1:]) & answers
        return total, {
            "loss": total,
            "answer_loss": jnp.sum(loss * answers) / jnp.maximum(jnp.sum(answers), 1),
            "answer_accuracy": jnp.sum(right) / jnp.maximum(jnp.sum(answers), 1),
            "text_loss": jnp.sum(loss * (batch["weights"] == 1.0)) / jnp.maximum(jnp.sum(batch["weights"] == 1.0), 1),
        }

    (_, metrics), grads = jax.value_and_grad(objective, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, metrics


@functools.partial(jax.jit, static_argnums=0)
def _predictions(model, params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return jnp.argmax(model.apply({"params": params}, tokens, positions), -1)


def exact_answers(model, params, tokenizer, stream, length, count, samples=ASKED, batch=8, seed=7) -> float:
    """Returns the share of held-out single questions among `count` needles that greedy decoding answers exactly.

    The greedy answer is exact when every token of it is the argmax after the ones before.
    """
    rng = np.random.default_rng(seed)
    rows, spans = [], []
    for _ in range(samples):
        facts = needles.draw_needles(rng, count, held_out=True, digits=5)
        cue = needles.encode(tokenizer, "\n" + facts[0].cue)
        answer = needles.encode(tokenizer, f" {facts[0].value}")
        room = length - len(cue) - len(answer)
        text = needles.haystack(rng, tokenizer, stream, room, facts)
        rows.append([*text, *cue, *answer])
        spans.append(len(answer))
    rows, right = np.asarray(rows, np.int32), 0
    for start in range(0, samples, batch):
        guess = np.asarray(_predictions(model, params, rows[start : start + batch]))
        for row, got, span in zip(rows[start : start + batch], guess, spans[start : start + batch], strict=True):
            right += bool(np.all(got[-span - 1 : -1] == row[-span:]))
    return right / samples


def first_params(config: ml_collections.ConfigDict, model: Transformer):
    """Returns the parameters of the checkpoint to continue from, or random ones."""
    if config.start:
        stored, params = checkpoint.load(config.start, model.config)
        if stored != model.config:
            raise ConfigError(f"start={config.start} has an unembedding of its own; give a model with tied embeddings")
        return params
    token = jnp.zeros((1, 8), jnp.int32)
    return model.init(jax.random.key(config.seed), token, token)["params"]


def row_lengths(config: ml_collections.ConfigDict) -> list[int]:
    """Returns the row length of every step: drawn from the lengths of its stage."""
    rng = np.random.default_rng(config.seed)
    return [int(rng.choice(lengths)) for lengths, steps in config.stages for _ in range(steps)]


def batches(rows: lm_data.Rows, config: ml_collections.ConfigDict, plan: list[int], start: int):
    """Yields (step, row length, batch) while worker processes draw later batches."""
    spawned = multiprocessing.get_context("spawn")  # a fork of a process with JAX's threads may hang
    pool = ProcessPoolExecutor(config.drawers, spawned, lm_data.start_drawing, (rows,))
    upcoming: collections.deque = collections.deque()
    try:
        for step in range(start, len(plan)):
            for later in range(step + len(upcoming), min(step + 4 * config.drawers, len(plan))):
                row = plan[later]
                upcoming.append(pool.submit(lm_data.draw, (config.seed, later), config.batch_tokens // row, row))
            yield step, plan[step], upcoming.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def export(config: ml_collections.ConfigDict, params, directory: pathlib.Path) -> None:
    """Writes the model as a Hugging Face directory."""
    tokenizer = Tokenizer.from_file(config.tokenizer)
    directory.mkdir(parents=True, exist_ok=True)
    checkpoint.save_params(params, model_config(config, tokenizer), directory)
    shutil.copy(config.tokenizer, directory / "tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def plot(lines: list[dict]) -> Figure:
    """Plots the losses and the exact answers over the steps, answers with their 95 % interval."""
    figure, (left, right) = plots.panels(2, size=(5.2, 3.6))
    names = ("text_loss", "answer_loss")  # 0: no row of the batch had any
    losses = [{"step": line["step"], "name": name, "nats": line[name]}
              for line in lines for name in names if line.get(name)]
    plots.curves(left, losses, "step", "nats", lambda row: row["name"].replace("_", " "))
    asked = [{"step": line["step"], "name": name, "share": line[name], "interval": wilson(line[name], ASKED)}
             for line in lines for name in sorted(line, key=len) if name.startswith("exact_1_")]
    plots.curves(right, asked, "step", "share", lambda row: f"{row['name'].split('_')[-1]} tokens", "interval")
    left.set(title="training", xlabel="step", ylabel="nats per token")
    right.set(title="one needle, held out", xlabel="step", ylabel="share of exact answers")
    plots.shares(right)
    return figure


def check(config: ml_collections.ConfigDict) -> None:
    """Raises ConfigError for settings with which nothing could be trained."""
    common.check_some(config, "stages")
    common.check_counts(config, seed=0, drawers=1, batch_tokens=1, log_every=1, eval_every=1, checkpoint_every=1)
    if config.dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype={config.dtype!r} is not a type to train in; use float32 or bfloat16")
    for stage in config.stages:
        check_stage(stage, config.batch_tokens)


def check_stage(stage, batch_tokens: int) -> None:
    """Raises ConfigError if a stage is not (row lengths, number of steps), or a row is longer than a batch."""
    match stage:
        case (tuple() | list() as rows, steps):
            common.check_counts({"rows": rows, "steps": steps}, rows=1, steps=1)
        case _:
            raise ConfigError(f"stage {stage!r} must be row lengths and a number of steps, such as ((128, 256), 100)")
    if max(rows) > batch_tokens:
        raise ConfigError(f"a row of {max(rows)} tokens is longer than batch_tokens={batch_tokens}; raise it")


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Trains stage after stage; resumes from the newest checkpoint of the workdir; exports at the end."""
    check(config)
    tokenizer = read_tokenizer(config.tokenizer)
    model, tx = Transformer(model_config(config, tokenizer)), optimiser(config)
    trained = Transformer(model.config, "cudnn") if config.dtype == "bfloat16" else model
    params = first_params(config, model)
    run = Run(config, workdir, None)  # longer stages, or another rate, continue from the checkpoint
    state = {"params": params, "opt_state": tx.init(params)}
    checkpoints = ocp.training.Checkpointer(run.path.absolute() / "checkpoints")
    done = checkpoints.latest.step if checkpoints.latest is not None else 0
    state = checkpoints.load(done, state) if done else state
    run.keep_only(lambda line: line["step"] <= done)  # later steps are run again
    stream = lm_data.encode_corpus(tokenizer, held_out=False)
    rows = lm_data.Rows(tokenizer, stream, lm_data.Mixture(**config.mixture), config.model.max_position)
    held_out = lm_data.encode_corpus(tokenizer, held_out=True)
    plan = row_lengths(config)
    for step, length, data in tqdm(batches(rows, config, plan, done), total=len(plan), initial=done, disable=None):
        state["params"], state["opt_state"], metrics = train_step(
            trained, tx, config.dtype, state["params"], state["opt_state"], data, config.mixture.answer_weight
        )
        now, last = step + 1, step + 1 == len(plan)
        if now % config.log_every == 0 or last:
            run.log(step=now, length=length, **{k: float(v) for k, v in metrics.items()})
        if now % config.eval_every == 0 or last:
            exact = functools.partial(exact_answers, model, state["params"], tokenizer, held_out)
            recent = sorted(set(plan[max(0, now - config.eval_every) : now]))
            run.log(step=now, **{f"exact_{n}_of_{size}": exact(size, n) for n in (1, 4) for size in recent})
        if now % config.checkpoint_every == 0 or last:
            checkpoints.save(now, state, overwrite=True)
    checkpoints.close()
    export(config, state["params"], run.path / "hf")
    plots.save(plot(run.logged()), run.path / "curves.png")
    run.summary([line for line in run.logged() if any(key.startswith("exact") for key in line)])
