"""Attacks on saved caches, through `Cache.save` and `LLM.restore`, with a table of the outcomes.

    python scripts/attack_saves.py [--out=DIR] [--share=1.0]

A cache in memory and one in a store file (once for each way to read it) are saved twice. Then processes are killed
while they save, bits of every file are flipped, files are cut, each system call of a save fails once, and the device is
full. After each try the directory is restored:

    right   the tokens of one of the two saves; after an interrupted save, those of the last confirmed save or of the
            one in progress
    typed   an error of kvjax's own (`kvjax.errors`)
    wrong   other tokens, a confirmed save that is gone, files that others may read, threads or descriptors left
            open, a process that does not end
    raw     any other error
    hung    no answer within a minute

The last three must be 0; otherwise the exit code is 1. `--share` makes all counts smaller, for a quick look.
"""

import collections
import contextlib
import errno
import json
import os
import pathlib
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
from absl import app, flags, logging

import kvjax
from kvjax.errors import KvjaxError
from kvjax.models.config import ModelConfig
from kvjax.models.transformer import Transformer
from kvjax.store.io.system import SystemIO

OUT = flags.DEFINE_string("out", None, "directory for summary.json; None: only the table is printed")
SHARE = flags.DEFINE_float("share", 1.0, "share of all tries, above 0 and up to 1")

CONFIG = ModelConfig(
    family="llama", vocab_size=40, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, max_position=512, tie_embeddings=True,
)
CONTEXT = [7 * i % 39 + 1 for i in range(90)]
QUESTION, NEW_TOKENS, SECONDS = [3, 5], 4, 60
KINDS = ("memory", "aio", "threads", "mmap")  # a cache in memory, or the engine that reads its blocks from a store
SAVES = 4  # caches of different lengths that a process saves one after the other until it is killed
OUTCOMES = ("right", "typed", "wrong", "raw", "hung")
Counts = dict[tuple[str, str], collections.Counter]


class Hung(BaseException):
    """Raised when there is no answer in time."""


def model() -> kvjax.LLM:
    """Returns a small model with random weights."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    params = Transformer(CONFIG).init(jax.random.key(3), tokens, tokens)["params"]
    return kvjax.LLM(CONFIG, jax.tree.map(lambda leaf: 4 * leaf if leaf.ndim > 1 else leaf, params))


class Attacked:
    """A directory with two saves of one kind, and the answers of each."""

    def __init__(self, llm: kvjax.LLM, kind: str, directory: pathlib.Path):
        self.llm, self.kind, self.directory = llm, kind, directory
        self.caches = [self._prefill()]
        for i in range(1, SAVES):
            self.caches.append(llm.generate([[i]], self.caches[-1], max_new_tokens=3).cache)
        self.answers = [self._answer(cache) for cache in self.caches]
        assert len({str(answer) for answer in self.answers}) == SAVES, "saves cannot be told apart"

    def save_twice(self) -> "Attacked":
        self.save(0)
        self.save(1)
        return self

    def _prefill(self) -> kvjax.Cache:
        method = kvjax.Quest(budget=24, sinks=2, window=4, page=4)
        return self.llm.prefill(CONTEXT, method=method, store=self._store(), capacity=160)

    def _store(self) -> kvjax.FlashStore | None:
        engine = None if self.kind == "aio" else self.kind
        return None if self.kind == "memory" else kvjax.FlashStore(file=self.directory / "blocks.kv", engine=engine)

    def _answer(self, cache: kvjax.Cache) -> tuple:
        result = self.llm.generate([QUESTION], cache, max_new_tokens=NEW_TOKENS)
        result.cache.close()
        return cache.length, result.tokens, cache.pending

    def save(self, number: int) -> None:
        self.caches[number].save(self.directory)

    def close(self) -> None:
        """Closes the store file, so that it can be restored."""
        for cache in self.caches:
            cache.close()

    def restored(self) -> tuple:
        """Returns the answer of the directory's save; raises what restoring or decoding raises."""
        settings = {} if self.kind in ("memory", "aio") else {"engine": self.kind}
        cache = self.llm.restore(self.directory, **settings)
        try:
            return self._answer(cache)
        finally:
            cache.close()

    def outcome(self, allowed: tuple[int, ...] = (0, 1)) -> str:
        """Restores and returns the outcome, given the numbers of the saves that may be there."""
        try:
            with alarm(SECONDS):
                answer = self.restored()
        except KvjaxError:
            return "typed"
        except Hung:
            return "hung"
        except BaseException as error:
            print(f"raw {self.kind}: {type(error).__name__}: {error}", file=sys.stderr)
            return "raw"
        return "right" if answer in [self.answers[number] for number in allowed] else "wrong"


@contextlib.contextmanager
def alarm(seconds: int) -> Iterator[None]:
    """Raises Hung in the block once `seconds` have passed."""
    def ring(*_):
        raise Hung

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def as_it_was(directory: pathlib.Path) -> Iterator[None]:
    """Restores every file of a directory to its former content on exit, in place."""
    kept = {path.name: path.read_bytes() for path in directory.iterdir()}
    try:
        yield
    finally:
        for path in directory.iterdir():
            if path.name not in kept:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for name, data in kept.items():
            path = directory / name
            if not path.exists() or path.read_bytes() != data:
                path.unlink(missing_ok=True)
                path.write_bytes(data)


# ---- damage


def flips(attacked: Attacked, name: str, bits: list[int], count: collections.Counter) -> None:
    """Flips one bit of a file at a time."""
    path = attacked.directory / name
    good = path.read_bytes()
    for bit in bits:
        with as_it_was(attacked.directory):
            with path.open("r+b") as file:
                file.seek(bit // 8)
                file.write(bytes([good[bit // 8] ^ 1 << bit % 8]))
            count[attacked.outcome()] += 1


def cuts(attacked: Attacked, name: str, lengths: list[int], count: collections.Counter) -> None:
    """Cuts a file to each of the lengths."""
    for length in lengths:
        with as_it_was(attacked.directory):
            os.truncate(attacked.directory / name, length)
            count[attacked.outcome()] += 1


def damage(attacked: Attacked, share: float, counts: Counts) -> None:
    """Flips bits of every file, all of a manifest and about 800 of the other files of each kind, and cuts every
    file."""
    rng = random.Random(0)
    names = sorted(path.name for path in attacked.directory.iterdir())
    each = max(1, round(800 * share / max(1, len([name for name in names if name != "cache.json"]))))
    for name in names:
        size = (attacked.directory / name).stat().st_size
        every = range(8 * size)
        some = list(every) if name == "cache.json" else rng.sample(every, min(each, len(every)))
        label = "bits of cache.json" if name == "cache.json" else "bits of state and blocks"
        flips(attacked, name, some[:: max(1, round(1 / share))] if name == "cache.json" else some,
              counts[attacked.kind, label])
        lengths = sorted({0, 1, size - 1, size // 2, *rng.sample(range(size), min(size, max(1, round(30 * share))))})
        cuts(attacked, name, lengths, counts[attacked.kind, "files cut"])


# ---- failing system calls


class Failing:
    """A system call whose n-th call fails, counted from `entered`."""

    CALLS = (
        (os, "open"), (os, "fsync"), (os, "replace"), (os, "mkdir"), (os, "fstat"), (os, "stat"), (os, "chmod"),
        (os, "listdir"), (os, "scandir"), (os, "unlink"), (SystemIO, "open"), (SystemIO, "pwrite"),
        (SystemIO, "preadv"), (SystemIO, "sync"), (SystemIO, "replace"), (SystemIO, "sync_directory"),
        (SystemIO, "lock"),
        (SystemIO, "free_bytes"), (SystemIO, "unlink"), (SystemIO, "sync_range"),
    )

    def __init__(self, owner, name: str, number: int, code: int):
        self.owner, self.name, self.number, self.code, self.calls = owner, name, number, code, 0
        self.call = getattr(owner, name)
        self.is_method = name in ("sync_directory", "lock", "replace", "free_bytes") and owner is SystemIO

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls == self.number:
            raise OSError(self.code, os.strerror(self.code))
        return self.call(*args, **kwargs)

    @contextlib.contextmanager
    def entered(self) -> Iterator["Failing"]:
        stand_in = (lambda *args, **kwargs: self(*args, **kwargs)) if self.is_method else staticmethod(self)
        with mock.patch.object(self.owner, self.name, stand_in if self.owner is SystemIO else self):
            yield self


def failing_calls(attacked: Attacked, share: float, counts: Counts) -> None:
    """Makes each call of a save fail once, in three ways; the last confirmed save, or the new one, must then be
    restored."""
    count = counts[attacked.kind, "system calls that fail"]
    codes = (errno.ENOSPC, errno.EIO, errno.EMFILE)[: max(1, round(3 * share))]
    for (owner, name), code in ((call, code) for call in Failing.CALLS for code in codes):
        for number in range(1, 2 + round(30 * share)):
            directory = pathlib.Path(tempfile.mkdtemp(dir=attacked.directory.parent))
            fresh = Attacked(attacked.llm, attacked.kind, directory).save_twice()
            failing = Failing(owner, name, number, code)
            count[_with_a_failure(fresh, failing)] += 1
            shutil.rmtree(directory)
            if failing.calls < number:
                break


def _with_a_failure(attacked: Attacked, failing: Failing) -> str:
    allowed, left = (1, 2), _left_of_process()
    try:
        with alarm(SECONDS), failing.entered():
            attacked.save(2)
        allowed = (2,)
    except KvjaxError:
        pass
    except Hung:
        return "hung"
    except BaseException as error:
        print(f"raw {attacked.kind} {failing.name} {failing.number}: {error!r}", file=sys.stderr)
        return "raw"
    if _left_of_process() > left or not _is_private(attacked.directory):
        return "wrong"
    attacked.close()
    outcome = attacked.outcome(allowed)
    return "wrong" if outcome == "typed" else outcome  # nothing is damaged, so the save must be there


def _left_of_process() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def _is_private(directory: pathlib.Path) -> bool:
    return all(not stat.S_IMODE(path.stat().st_mode) & 0o077 for path in (directory, *directory.iterdir()))


# ---- a device that is full


def full_device(attacked: Attacked, share: float, counts: Counts) -> None:
    """Saves to a small file system with less and less room, if one can be mounted."""
    count, place = counts[attacked.kind, "full device"], attacked.directory.parent / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True).returncode:
        print("no file system can be mounted here: no full device is tried")
        return
    try:
        for free in range(0, 1 << 20, max(4096, round((1 << 14) / share))):
            (place / "filler").write_bytes(bytes((1 << 20) - (1 << 12) - free))
            count[_on_full(attacked, place / "saved")] += 1
            shutil.rmtree(place / "saved", ignore_errors=True)
    finally:
        subprocess.run(["umount", place], check=False)


def _on_full(attacked: Attacked, directory: pathlib.Path) -> str:
    try:
        with alarm(SECONDS):
            attacked.caches[0].save(directory)
    except KvjaxError:
        left = [path.name for path in directory.iterdir()] if directory.exists() else []
        return "wrong" if left else "typed"
    except Hung:
        return "hung"
    except BaseException as error:
        print(f"raw {attacked.kind} on a full device: {type(error).__name__}: {error}", file=sys.stderr)
        return "raw"
    os.truncate(directory.with_name("filler"), 0)  # makes room, as decoding writes, too
    with contextlib.closing(attacked.llm.restore(directory)) as cache:
        return "right" if attacked._answer(cache) == attacked.answers[0] else "wrong"


# ---- processes that are killed, or must end


def killed(attacked: Attacked, tries: int, counts: Counts) -> None:
    """Kills a process that saves in a loop at a random moment; the last confirmed save, or the next, must then be
    restored."""
    count, rng = counts[attacked.kind, "processes killed"], random.Random(1)
    for _ in range(tries):
        child = subprocess.Popen(
            [sys.executable, __file__, "--child", str(attacked.directory), attacked.kind], stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        confirmed = [child.stdout.readline()]
        timer = threading.Timer(rng.random() * 0.6, child.kill)
        timer.start()
        confirmed += child.stdout.readlines()
        timer.join()
        child.wait()
        last = int(confirmed[-1])
        count[attacked.outcome((last % SAVES, (last + 1) % SAVES))] += 1
        if not _is_private(attacked.directory):
            count["wrong"] += 1


def child(directory: str, kind: str) -> None:
    """Saves caches of different lengths one after the other, and prints the number of each confirmed save."""
    attacked = Attacked(model(), kind, pathlib.Path(directory))
    for number in range(10**6):
        attacked.save(number % SAVES)
        print(number, flush=True)


def slow_ends(attacked: Attacked, counts: Counts) -> None:
    """Checks that a process ends within two seconds of a failed save; the quickest of three counts, as the machine may
    be busy."""
    program = f"""
import sys, time
sys.path.insert(0, {str(pathlib.Path(__file__).resolve().parent.parent)!r})
from scripts import attack_saves
import kvjax
llm = attack_saves.model()
cache = llm.prefill(attack_saves.CONTEXT)
try:
    cache.save({str(attacked.directory / "cache.json")!r} if {attacked.kind == "memory"} else "/proc/none/such")
except kvjax.errors.KvjaxError:
    print(time.time(), flush=True)
"""
    seconds = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=2 * SECONDS, check=True
        )
        seconds.append(time.time() - float(done.stdout))
    counts[attacked.kind, "ends after a failed save"]["right" if min(seconds) < 2 else "wrong"] += 1


# ---- all of it


def run(root: pathlib.Path, share: float, kinds: Sequence[str] = KINDS) -> Counts:
    """Runs all attacks on caches of these kinds, with this share of the tries; returns the counts of each outcome."""
    counts: Counts = collections.defaultdict(collections.Counter)
    llm = model()
    for kind in kinds:
        directory = root / kind / "saved"
        directory.mkdir(parents=True, mode=0o700)
        attacked = Attacked(llm, kind, directory).save_twice()
        full_device(attacked, share, counts)
        attacked.close()
        damage(attacked, share, counts)
        slow_ends(attacked, counts)
        failing_calls(attacked, share, counts)
        killed(attacked, max(1, round(60 * share)), counts)
    return counts


def table(counts: Counts) -> list[str]:
    """Returns Markdown lines, one for each attack and kind."""
    lines = ["| cache | attack | tries | " + " | ".join(OUTCOMES) + " |", "|---|---|" + "---|" * (1 + len(OUTCOMES))]
    for (kind, attack), count in counts.items():
        lines.append(f"| {kind} | {attack} | {count.total()} | "
                     f"{' | '.join(str(count[outcome]) for outcome in OUTCOMES)} |")
    return lines


def failed(counts: Counts) -> int:
    """Returns the number of tries that ended wrong, raw or hung."""
    return sum(count[outcome] for count in counts.values() for outcome in ("wrong", "raw", "hung"))


def main(_):
    warnings.simplefilter("ignore")
    logging.set_verbosity(logging.ERROR)
    with tempfile.TemporaryDirectory() as root:
        counts = run(pathlib.Path(root), SHARE.value)
    print("\n".join(table(counts)))
    if OUT.value is not None:
        rows = [{"cache": kind, "attack": attack, "tries": count.total(),
                 **{outcome: count[outcome] for outcome in OUTCOMES}} for (kind, attack), count in counts.items()]
        pathlib.Path(OUT.value).mkdir(parents=True, exist_ok=True)
        summary = {"experiment": "attack_saves", "config": {"share": SHARE.value}, "rows": rows}
        (pathlib.Path(OUT.value) / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return 1 if failed(counts) else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        app.run(main)
