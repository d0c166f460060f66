"""Low-rank adapters fitted to a model's keys, and their errors on held-out text of every kind.

Each fit is a singular value decomposition, and from there a training on the attention of real queries
(`kvjax.calibration.refine_adapters`): Adam with a warm-up and a cosine, of which each layer keeps the adapter whose
loss on held-out text was the least. Adapters, optimiser and loss curve are kept every `eval_every` steps, so that a run
that was stopped goes on from there.

A row is one fit on one kind of training text, tried on one kind of test text; rows that the workdir has are skipped,
and adapters are saved as they are fitted. Measures, means over layers:

  reconstruction_error   ||K - K A A^T||^2 / ||K||^2
  score_error            relative L2 error of the scores without each query's mean, to which the softmax is invariant
  divergence             KL(true || predicted attention), nats
  recall                 share of a query's true top keys among the predicted ones
  attention_mass         attention on the tokens with the largest predicted attention, summed over all heads as in
                         KVSwap, over that on the best tokens
"""

import functools
import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from matplotlib.figure import Figure
from orbax.checkpoint import v1 as ocp
from tqdm import tqdm

import kvjax
from experiments import common, plots
from experiments.results import Run
from experiments.texts import docstrings, facts_in_code
from kvjax.calibration import collect_moments, fit_adapters, refine_adapters
from kvjax.calibration.refine_adapters import Objective
from kvjax.errors import ConfigError
from kvjax.eval.tasks import corpus, needles
from kvjax.methods.shared.adapters import Adapters, beside, load

_MEASURES = ("reconstruction_error", "score_error", "divergence", "recall", "attention_mass")
KINDS, FORMS = ("code", "prose", "needles", "mixed"), ("joint", "per_head")
Draw = Callable[[np.random.Generator], list[int]]  # a row of tokens


def name_of(kind: str) -> str:
    """Returns the name of a kind in tables and directories; for a user's file its name with a hash of its content."""
    if kind in KINDS:
        return kind
    return f"{pathlib.Path(kind).stem}_{hashlib.sha256(_content(kind)).hexdigest()[:8]}"


def _content(path: str) -> bytes:
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as cause:
        raise ConfigError(f"{path} cannot be read: {cause}; give a text file") from cause


def own_rows(llm: kvjax.LLM, path: str, held_out: bool, config) -> Draw:
    """Returns a function that draws rows of a text file; held-out rows come from its last fifth, the others from the
    rest."""
    stream = np.asarray(llm.encode(_content(path).decode("utf-8", errors="replace"), start=False))
    cut = len(stream) - len(stream) // 5
    part = stream[cut:] if held_out else stream[:cut]
    if len(part) < config.length:
        raise ConfigError(f"{path} has {len(stream)} tokens, the last fifth of them held out; give five times "
                          f"length={config.length} or more, or lower it")
    return lambda rng: needles.random_span(rng, part, config.length)


def rows_of(llm: kvjax.LLM, kind: str, held_out: bool, config) -> Draw:
    """Returns a function that draws rows of library files, of their docstrings, of files with repeated facts, of one of
    these at a time, or of a user's file."""
    if kind not in KINDS:
        return own_rows(llm, kind, held_out, config)
    if kind == "mixed":
        draws = [rows_of(llm, each, held_out, config) for each in KINDS if each != "mixed"]
        return lambda rng: draws[rng.integers(len(draws))](rng)
    texts = corpus.stdlib_documents(held_out)[: config.documents]
    text = "\n".join(docstrings(texts) if kind == "prose" else texts)
    stream = np.asarray(llm.encode(text, start=False))
    if kind == "needles":
        return lambda rng: facts_in_code(rng, llm, stream, config.length, held_out)[: config.length]
    return lambda rng: needles.random_span(rng, stream, config.length)


def batches(draw: Draw, count: int, config, *seed: int) -> Iterator[np.ndarray]:
    """Yields `count` batches of tokens[batch, length], each row drawn anew."""
    rng = np.random.default_rng((config.seed, *seed))
    for _ in range(count):
        yield np.asarray([draw(rng) for _ in range(config.batch)], np.int32)


def fits(llm: kvjax.LLM, kind: str, config, directory) -> Iterator[tuple[str, int, Adapters]]:
    """Yields form, ratio and adapters of every fit on one kind of text; saved fits are loaded."""
    draw = rows_of(llm, kind, False, config)
    moments = None
    for form in config.forms:
        for ratio in config.ratios:
            name = f"{name_of(kind)}_{form}_{ratio}"
            path = directory / f"{name}.safetensors"
            if not path.exists():
                moments = moments or collect_moments.key_moments(llm, batches(draw, config.train_batches, config, 1))
                fit_adapters.svd(moments, ratio, form == "joint", config.by_layer).save(path)
            yield form, ratio, load(path)
            if config.steps:
                trained = directory / f"{name}_trained.safetensors"
                if not trained.exists():
                    held_out = list(batches(rows_of(llm, kind, True, config), config.held_out_batches, config, 4))
                    train(llm, load(path), trained.with_suffix(""), draw, held_out, config).save(trained)
                yield f"{form}_trained", ratio, load(trained)


def train(llm: kvjax.LLM, start: Adapters, path: pathlib.Path, draw: Draw, held_out: list[np.ndarray], config):
    """Returns adapters trained from `start`; goes on where an earlier run stopped.

    Args:
      llm: the model.
      start: the first adapters.
      path: steps are kept in PATH_steps, and the loss curve in PATH_curve.json.
      draw: function that draws a row of training text.
      held_out: batches of held-out text, by which each layer chooses.
      config: the experiment's.
    """
    objective = objective_of(config)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, min(config.warmup_steps, config.steps - 1), config.steps,
        end_value=0.05 * config.learning_rate)
    tx = optax.adam(rate)
    curve_file, training = path.with_name(f"{path.name}_curve.json"), refine_adapters.begin(start, tx)
    kept = ocp.training.Checkpointer(path.with_name(f"{path.name}_steps").absolute())
    done = 0 if kept.latest is None else kept.latest.step
    if done:
        training = refine_adapters.Training(**kept.load(done, vars(training)))
    curve = [line for line in (json.loads(curve_file.read_text()) if done else []) if line["step"] <= done]
    with tqdm(total=config.steps, initial=done, desc=path.name, disable=None) as bar:
        while True:
            if done % config.eval_every == 0 or done == config.steps:
                training, losses = refine_adapters.keep_best(llm, training, held_out, start.joint, objective)
                if not curve or curve[-1]["step"] < done:
                    curve.append({"step": done, "rate": float(rate(done)), "held_out": losses.tolist()})
                curve_file.write_text(json.dumps(curve))
                if done:
                    kept.save(done, vars(training), overwrite=True)
            if done == config.steps:
                break
            (tokens,) = batches(draw, 1, config, 2, done)
            training, losses = refine_adapters.advance(llm, training, tokens, tx, start.joint, objective)
            curve[-1].setdefault("trained", []).append(float(np.mean(losses)))
            done += 1
            bar.update()
    kept.close()
    return Adapters([np.asarray(basis) for basis in training.best], start.joint, start.fingerprint)


def objective_of(config) -> Objective:
    """Returns what the training lowers; raises ConfigError for impossible settings."""
    return Objective(config.loss, config.group, config.sinks, config.window, config.ahead)


def measure(llm: kvjax.LLM, fitted: Adapters, rows: list[np.ndarray], moments, config) -> dict[str, float]:
    """Returns the means over layers and batches; `moments` are the batches' `collect_moments.key_moments`."""
    measures = []
    for tokens in rows:
        for i, query, key in collect_moments.layers_of(llm, tokens):
            sampled = refine_adapters.sample(query, key)
            measures.append(_scores(config.top, config.kept, fitted.joint, jnp.asarray(fitted.layers[i]), *sampled))
    means = {name: float(np.mean([values[name] for values in measures])) for name in measures[0]}
    errors = fit_adapters.reconstruction_error(moments, fitted)
    return {"reconstruction_error": float(np.mean(errors)), **means}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _scores(top, kept, joint, basis, query, key, position):
    """Returns the measures of one layer that need queries."""
    seen = jnp.arange(key.shape[1]) <= position[:, None]
    true = _centred(refine_adapters.exact_scores(query, key), seen)
    predicted = _centred(refine_adapters.low_rank_scores(basis, joint, query, key), seen)
    best, guess = (jax.lax.top_k(jnp.where(seen, scores, -jnp.inf), top)[1] for scores in (true, predicted))
    weight, expected = (jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).sum((1, 2)) for scores in (true, predicted))
    most = jnp.sum(jax.lax.top_k(weight, kept)[0], axis=-1)
    caught = jnp.sum(jnp.take_along_axis(weight, jax.lax.top_k(expected, kept)[1], axis=-1), axis=-1)
    return {
        "score_error": jnp.linalg.norm(predicted - true) / jnp.linalg.norm(true),
        "divergence": refine_adapters.score_loss(basis, joint, query, key, position),
        "recall": jnp.mean(jnp.any(best[..., :, None] == guess[..., None, :], axis=-1)),
        "attention_mass": jnp.mean(caught / most),
    }


def _centred(scores, seen):
    """Returns scores less each query's mean; zero where a query does not see the key."""
    mean = jnp.sum(jnp.where(seen, scores, 0.0), axis=-1, keepdims=True) / jnp.sum(seen, axis=-1, keepdims=True)
    return jnp.where(seen, scores - mean, 0.0)


def check(config) -> None:
    """Raises ConfigError for unknown names, missing files, and numbers with which nothing could be fitted."""
    common.check_counts(config, batch=1, length=2, train_batches=1, test_batches=1, steps=0, warmup_steps=0,
                        eval_every=1, held_out_batches=1, ratios=1, documents=1, top=1, kept=1)
    if config.steps == 1:
        raise ConfigError("steps=1 has no room for a schedule; give 2 or more, or 0 for no training")
    objective_of(config)
    if max(config.top, config.kept) > config.length:
        raise ConfigError(f"top={config.top} and kept={config.kept} must be at most length={config.length}; lower them")
    if not config.forms or set(config.forms) - set(FORMS):
        raise ConfigError(f"forms={tuple(config.forms)} must be some of {', '.join(FORMS)}")
    missing = [kind for kind in config.kinds if kind not in KINDS and not pathlib.Path(kind).is_file()]
    if not config.kinds or missing:
        raise ConfigError(f"kinds={tuple(config.kinds)} must be some of {', '.join(KINDS)}, or text files")
    if len(set(map(name_of, config.kinds))) < len(config.kinds):
        raise ConfigError(f"two of kinds={tuple(config.kinds)} are the same; leave one out")


def run(config: ml_collections.ConfigDict, workdir: str) -> None:
    """Fits on every kind of text and measures on every kind."""
    check(config)
    llm = common.load_model(config.model)
    if config.beside and (llm.folder is None or len(config.kinds) > 1):
        raise ConfigError("adapters are put beside a model that was loaded from files, one for each form and ratio; "
                          "give --config.model=PATH and one kind of text")
    run = Run(config, workdir, ("kinds", "ratios", "forms"))
    tests = {
        name_of(kind): list(batches(rows_of(llm, kind, True, config), config.test_batches, config, 3))
        for kind in config.kinds
    }
    moments = functools.cache(lambda task: collect_moments.key_moments(llm, tests[task]))
    done = {(row["method"], row["ratio"], row["fitted_on"], row["task"]) for row in run.logged()}
    for kind in config.kinds:
        name = name_of(kind)
        for form, ratio, fitted in fits(llm, kind, config, run.path / "adapters"):
            for task, rows in tests.items():
                if (form, ratio, name, task) not in done:
                    measured = measure(llm, fitted, rows, moments(task), config)
                    run.log(method=form, ratio=ratio, ranks=fitted.ranks, fitted_on=name, task=task,
                            context=config.length, seed=config.seed, **measured)
            if config.beside and form.endswith("_trained") == bool(config.steps):
                fitted.save(beside(llm.folder, fitted.joint, ratio))
    run.summary(run.logged())
    plots.save(plot(run.logged()), run.path / "adapters.png")
    curves = {file.name.removesuffix("_trained_curve.json"): json.loads(file.read_text())
              for file in sorted((run.path / "adapters").glob("*_curve.json"))}
    if curves:
        plots.save(plot_curves(curves), run.path / "training.png")
    print_table(run.logged())


def plot(rows: list[dict]) -> Figure:
    """Plots each measure against sigma, a column for each pair of texts: fitted on one, tried on the other."""
    pairs = list(dict.fromkeys((row["fitted_on"], row["task"]) for row in rows))
    figure, panels = plots.panels(len(_MEASURES) * len(pairs), columns=len(pairs), size=(3.4, 2.7))
    looks = plots.styles(row["method"] for row in rows)
    for axes, (measure, (fitted, tried)) in zip(panels, itertools.product(_MEASURES, pairs), strict=True):
        mine = [row for row in rows if (row["fitted_on"], row["task"]) == (fitted, tried)]
        plots.curves(axes, mine, "ratio", measure, looks=looks)
        plots.steps(axes, [row["ratio"] for row in mine])
        axes.set(title=f"{fitted} → {tried}", xlabel="sigma", ylabel=measure.replace("_", " "))
    return figure


def plot_curves(curves: dict[str, list[dict]]) -> Figure:
    """Plots the held-out loss of each training against its steps: the mean over layers, each at its best so far."""
    rows = []
    for name, lines in curves.items():
        best = np.minimum.accumulate([line["held_out"] for line in lines], axis=0).mean(axis=1)
        rows += [{"name": name, "step": line["step"], "nats": float(loss)}
                 for line, loss in zip(lines, best, strict=True)]
    figure, (axes,) = plots.panels(1, size=(5.2, 3.6))
    plots.curves(axes, rows, "step", "nats", lambda row: row["name"])
    axes.set(title="held-out loss of the best adapters so far", xlabel="step", ylabel="nats")
    return figure


def print_table(rows: list[dict]) -> None:
    """Prints the measures, a line per row."""
    print(f"{'adapters':>18}{'sigma':>6}{'fitted on':>10}{'tried on':>10}"
          + "".join(f"{name:>22}" for name in _MEASURES))
    for row in rows:
        print(f"{row['method']:>18}{row['ratio']:6}{row['fitted_on']:>10}{row['task']:>10}"
              + "".join(f"{row[name]:22.3f}" for name in _MEASURES))
