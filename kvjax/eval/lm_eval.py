"""Model class for EleutherAI's lm-evaluation-harness, which runs its tasks on any method and store.

    pip install -c constraints.txt --no-build-isolation -e '.[lm-eval]'
    python -m kvjax.eval.lm_eval run --model kvjax --tasks TASK \\
        --model_args pretrained=DIR,method=quest,budget=256,store=flash,directory=/tmp

Model arguments other than those of `KvjaxLM` are settings of the method. The last `sparse_tokens` of a context and its
continuation or answer go through the cache token by token; requests with the same context share it.
"""

from lm_eval import utils
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences
from tqdm import tqdm

from kvjax.errors import ConfigError
from kvjax.eval.tasks.endpoint import Endpoint
from kvjax.inference.plan import Slots
from kvjax.llm import load
from kvjax.methods import make
from kvjax.store.flash.store import FlashStore
from kvjax.store.host import HostStore
from kvjax.store.io import profiles


@register_model("kvjax")
class KvjaxLM(TemplateLM):
    """Model from a local directory that answers by a method over a store.

    Args:
      pretrained: Hugging Face directory of the model.
      method: name in `kvjax.METHODS`; its settings are further arguments.
      store: memory, host or flash.
      directory: directory of a flash store's files.
      profile: name of the device that a flash store emulates.
      slots: blocks of a store that are kept in memory; None for those of one step.
      sparse_tokens: number of last tokens of a context that go through the cache.
      max_length: most tokens of a request; None for the model's longest context.
      max_gen_toks: most tokens of an answer, if the task does not say.
      add_bos_token: whether prompts begin with the model's begin-of-text token, as everywhere in kvjax; the harness's
        own model class leaves it out for most models.
      dtype: type of the weights: float32, bfloat16 or float16.
      cache_dtype: type of stored keys and values: float32, bfloat16, float16, int8 or int4.
      chunk: tokens of a context that `kvjax.LLM.prefill` reads at a time through the cache; None for a dense prefill.
      batch_size, max_batch_size, device: accepted because the harness passes them. Requests run one by one, on JAX's
        default device.
      **settings: settings of the method.

    Raises:
      ConfigError: a setting is impossible, or `batch_size` is not 1.
      CheckpointError: the model cannot be loaded.
    """

    def __init__(
        self, pretrained: str, method: str = "full", store: str = "memory", directory: str = ".",
        profile: str = profiles.NATIVE, slots: int | None = None, sparse_tokens: int = 32,
        max_length: int | None = None, max_gen_toks: int = 256, add_bos_token: bool = True,
        dtype: str = "float32", cache_dtype: str = "float32", chunk: int | None = None,
        batch_size: int | str | None = None, max_batch_size: int | None = None, device: str | None = None, **settings,
    ):
        super().__init__()
        if batch_size not in (None, 1, "1"):
            raise ConfigError(f"batch_size={batch_size} is not supported, as requests run one by one; leave it at 1")
        self.llm = load(pretrained, dtype)
        assert self.llm.tokenizer is not None, "`load` raises for a directory without a tokenizer"
        self.text = self.llm.tokenizer
        self.max_gen_toks, self.add_bos_token = max_gen_toks, add_bos_token
        self.endpoint = Endpoint(
            self.llm, make(method, settings), _store(store, directory, profile),
            None if slots is None else Slots(count=slots), sparse_tokens,
            max_length or self.llm.config.max_position, cache_dtype, chunk,
        )

    @property
    def eot_token_id(self) -> int:
        if not self.llm.eos_ids:
            raise ConfigError("the model has no end-of-text token, which the harness needs")
        return self.llm.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """Token that stands for an empty context."""
        return self.eot_token_id if self.text.bos_id is None else self.text.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """Returns the token ids of a text that nothing precedes."""
        with_start = self.add_bos_token if add_special_tokens is None else add_special_tokens
        return self.llm.encode(self.text.encode(string, with_start), start=False)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Returns the harness's own token ids of context and continuation, with two exceptions that can be scored.

        If a token spans the join and leaves none to the continuation, the continuation is encoded alone, with the
        spaces that the harness moves to it. A context without tokens becomes `prefix_token_id`.
        """
        before, rest = super()._encode_pair(context, continuation)
        before = before or [self.prefix_token_id]
        if not rest:
            moved = context[len(context.rstrip()):]
            rest = self.llm.encode(self.text.encode_continuation(moved + continuation, before), start=False)
        return before, rest

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs) -> list[tuple[float, bool]]:
        """Returns log-probability and greediness of each request; requests with the same context run together."""
        order = sorted(range(len(requests)), key=lambda i: requests[i][1])
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        answers = self.endpoint.loglikelihood([requests[i][1:] for i in order])
        progress = tqdm(answers, total=len(order), disable=disable_tqdm)
        for i, answer in zip(order, progress, strict=True):
            results[i] = answer
            self.cache_hook.add_partial("loglikelihood", requests[i][0], answer)
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each text, whose tokens are predicted one by one through the cache."""
        logprobs = []
        for (text,) in tqdm([request.args for request in requests], disable=disable_tqdm):
            ids = self.tok_encode(text, add_special_tokens=False)
            windows = utils.get_rolling_token_windows(ids, self.prefix_token_id, self.endpoint.max_length, 1)
            pairs = map(utils.make_disjoint_window, windows)
            logprobs.append(sum(logprob for logprob, _ in self.endpoint.loglikelihood(pairs)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), logprobs[-1])
        return logprobs

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Returns greedy answers. Raises ConfigError for tasks that sample."""
        texts = []
        for context, settings in tqdm([request.args for request in requests], disable=disable_tqdm):
            if settings.get("do_sample") and settings.get("temperature", 1.0) > 0:
                raise ConfigError("this task samples its answers; only greedy ones are supported")
            stop = handle_stop_sequences(settings.get("until"), eos=None)
            most = settings.get("max_gen_toks", self.max_gen_toks)
            texts.append(self.endpoint.generate(self.tok_encode(context), most, [mark for mark in stop if mark]))
            self.cache_hook.add_partial("generate_until", (context, settings), texts[-1])
        return texts

    @property
    def tokenizer_name(self) -> str:
        return self.text.fingerprint

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return (self.text.template or "") if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.text.apply_chat_template(chat_history, add_generation_prompt)


def _store(name: str, directory: str, profile: str):
    made = {
        "memory": lambda: None, "host": HostStore, "flash": lambda: FlashStore(directory=directory, profile=profile),
    }
    if name not in made:
        raise ConfigError(f"unknown store {name!r}; use one of {', '.join(made)}")
    return made[name]()


if __name__ == "__main__":
    cli_evaluate()
