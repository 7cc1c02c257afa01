"""lm-evaluation-harness on an engine of this process, without a server.

pip install "./core[cli]" ./plugins/inl-cpu lm-eval
python examples/python/lm_eval_engine.py --tasks arc_easy --model inl \
    --model_args model=smollm2-135m-instruct,backend=cpu

The words are those of the command ``lm_eval``. Of a log-likelihood only the tokens of
the continuation are scored; contexts that requests share are computed once.
"""

from __future__ import annotations

from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from inl import EngineConfig, InferenceEngine

Pair = tuple[Any, list[int], list[int]]
"""A key of the harness's cache, and the tokens of a context and its continuation."""


@register_model("inl")
class EngineModel(TemplateLM):
    """The harness's model on an engine.

    Other arguments of ``--model_args`` than ``model`` are fields of
    :class:`~inl.EngineConfig`; the engine chooses its batches.
    """

    def __init__(
        self,
        model: str = "",
        batch_size: object = None,
        max_batch_size: object = None,
        device: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        config = EngineConfig(**{"backend": device or "auto", **settings})
        self.engine = InferenceEngine.from_pretrained(model or None, config)
        self.max_length = self.engine.context - 1

    @property
    def eot_token_id(self) -> int | None:
        """The end token."""
        return self._id(self.engine.tokenizer.eos_token)

    @property
    def prefix_token_id(self) -> int | None:
        """The token before a text without a context."""
        return self._id(self.engine.tokenizer.bos_token) or self.eot_token_id

    def _id(self, token: str) -> int | None:
        return self.engine.tokenizer.token_id(token) if token else None

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return token ids, with those that the model's tokenizer adds by default."""
        special = add_special_tokens is not False
        return self.engine.tokenizer.encode(string, add_special=special)

    def _loglikelihood_tokens(
        self, requests: list[Pair], **_: Any
    ) -> list[tuple[float, bool]]:
        handles = []
        for _, context, continuation in requests:
            ids = (context + continuation)[-self.max_length :]
            start = len(ids) - len(continuation)
            if start < 1:
                raise ValueError(
                    f"continuation: found {len(continuation)} tokens, the context has "
                    f"room for {self.max_length - 1}"
                )
            handles.append(
                self.engine.submit(
                    ids, max_tokens=0, prompt_logprobs=1, prompt_logprobs_start=start
                )
            )
        answers = []
        for (key, *_), handle in zip(requests, handles, strict=True):
            found = handle.result().prompt_logprobs or ()
            scores = [each for each in found if each is not None]
            is_greedy = all(each.token == each.top[0][0] for each in scores)
            answers.append((sum(each.logprob for each in scores), is_greedy))
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answers[-1])
        return answers

    def loglikelihood_rolling(
        self,
        requests: list[Instance],
        disable_tqdm: bool = False,
    ) -> list[float]:
        """Return the log-likelihood of each whole text."""
        totals = []
        for (text,) in (each.args for each in requests):
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length - 1, 1
            )
            pairs: list[Pair] = [(None, *make_disjoint_window(w)) for w in windows]
            totals.append(sum(score for score, _ in self._loglikelihood_tokens(pairs)))
        return totals

    def generate_until(
        self,
        requests: list[Instance],
        disable_tqdm: bool = False,
    ) -> list[str]:
        """Return the text that follows each context, up to a stop string."""
        handles = []
        for context, given in (each.args for each in requests):
            count = given.get("max_gen_toks", 256)
            room = max(self.max_length - count, 1)
            handles.append(
                self.engine.submit(
                    self.tok_encode(context)[-room:], max_tokens=count,
                    temperature=given.get("temperature", 0.0), seed=0,
                    stop=given.get("until"),
                )
            )  # fmt: skip
        return [handle.result().text for handle in handles]


if __name__ == "__main__":
    cli_evaluate()
