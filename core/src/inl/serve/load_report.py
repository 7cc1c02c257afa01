"""Percentiles, throughput and goodput of measured requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inl.serve.load_client import Sample

PERCENTILES = (50, 90, 95, 99)


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean and percentiles by nearest rank; ``None`` without values."""
    if not values:
        return None
    ordered = sorted(values)
    ranks = {f"p{part}": -(-part * len(ordered) // 100) - 1 for part in PERCENTILES}
    found = {name: ordered[max(rank, 0)] for name, rank in ranks.items()}
    return {"mean": sum(ordered) / len(ordered), **found}


def report(
    samples: Sequence[Sample],
    seconds: float,
    *,
    most_first: float | None = None,
    most_inter: float | None = None,
) -> dict[str, Any]:
    """Return the figures of a run that took ``seconds``.

    most_first, most_inter: bounds in seconds of the first token and of the mean time
    between tokens; goodput counts requests within both.
    """
    finished = [each for each in samples if not each.error and each.token_times]
    firsts = [each.first_token_seconds for each in finished]
    inters = [
        each.inter_token_seconds
        for each in finished
        if each.inter_token_seconds is not None
    ]
    good = [
        each
        for each in finished
        if (most_first is None or each.first_token_seconds <= most_first)
        and (most_inter is None or (each.inter_token_seconds or 0.0) <= most_inter)
    ]
    statuses: dict[str, int] = {}
    for each in samples:
        statuses[str(each.status)] = statuses.get(str(each.status), 0) + 1
    return {
        "requests": len(samples),
        "finished": len(finished),
        "statuses": statuses,
        "seconds": seconds,
        "requests_per_second": len(finished) / seconds,
        "goodput_requests_per_second": len(good) / seconds,
        "input_tokens_per_second": sum(e.prompt_tokens for e in finished) / seconds,
        "output_tokens_per_second": sum(e.completion_tokens for e in finished)
        / seconds,
        "first_token_seconds": percentiles(firsts),
        "inter_token_seconds": percentiles(inters),
        "end_to_end_seconds": percentiles([each.seconds for each in finished]),
        "errors": sorted({each.error for each in samples if each.error})[:5],
    }
