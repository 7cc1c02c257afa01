"""lm-evaluation-harness on a server, with scores of continuations only.

inl serve MODEL --port 8000
pip install "lm-eval[api]"
python examples/python/lm_eval_server.py --tasks arc_easy --model inl-server \
    --model_args model=NAME,base_url=http://127.0.0.1:8000/v1/completions,num_concurrent=32

The words are those of the harness's own ``local-completions``, which asks for the
log-probabilities of contexts too, and drops them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.openai_completions import LocalCompletionsAPI


class ScoredPrompt(list[int]):
    """Token ids of a context and its continuation, which begins at ``start``."""

    def __init__(self, ids: list[int], start: int) -> None:
        super().__init__(ids)
        self.start = start


@register_model("inl-server")
class ServerModel(LocalCompletionsAPI):
    """The harness's model of a server that takes ``prompt_logprobs_start``."""

    def batch_loglikelihood_requests(
        self, chunks: Iterable[list[Any]]
    ) -> tuple[list[ScoredPrompt], list[int], list[Any]]:
        """Return prompts, the lengths of their contexts, and keys of the cache."""
        inputs, lengths, keys = super().batch_loglikelihood_requests(chunks)
        prompts = list(map(ScoredPrompt, inputs, lengths))
        return prompts, lengths, keys

    def create_message(self, messages: Any, generate: bool = False) -> Any:
        """Return what is sent as a prompt: token ids if it is scored."""
        if isinstance(messages[0], ScoredPrompt):
            return messages
        return super().create_message(messages, generate)

    def _create_payload(
        self, messages: Any, generate: bool = False, *rest: Any, **options: Any
    ) -> dict[str, Any]:
        payload: dict[str, Any] = super()._create_payload(
            messages, generate, *rest, **options
        )
        if not generate:
            start = min(prompt.start for prompt in messages)
            payload |= {"max_tokens": 0, "prompt_logprobs_start": start}
        return payload

    @staticmethod
    def parse_logprobs(
        outputs: Any, tokens: Any = None, ctxlens: Any = None, **options: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is greedy."""
        for answer in outputs if isinstance(outputs, list) else [outputs]:
            for choice in answer["choices"]:
                # The harness leaves out the last token: the one that it generates.
                choice["logprobs"]["token_logprobs"].append(None)
                choice["logprobs"]["top_logprobs"].append(None)
        found: list[tuple[float, bool]] = LocalCompletionsAPI.parse_logprobs(
            outputs, tokens, ctxlens, **options
        )
        return found


if __name__ == "__main__":
    cli_evaluate()
