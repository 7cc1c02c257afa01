"""Soak test of the engine core, whose outputs are checked against an oracle."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from random import Random

from hash_oracle import expected, expected_hidden
from inl.engine.core import EngineCore
from inl.engine.embedder import PooledRequest
from inl.kv.block_pool import BlockPool
from inl.kv.kv_cache_manager import KVCacheManager
from inl.protocol.runner import AdapterSource, Limits
from inl.runners.row_shares import all_ranks_limits
from inl.scheduling.plan import SchedulerConfig
from inl.scheduling.request import Request
from inl.scheduling.scheduler import Scheduler
from inl.spec.step import Bucket
from inl.testing.hash_runner import HashRunner
from toy_guide import ToyGrammar, ToyGuide


class WrongText(AssertionError):
    """An output that differs from the oracle."""


@dataclass
class Parts:
    """The classes under test; replace one to plant a fault."""

    runner: type = HashRunner
    kv_cache: type = KVCacheManager
    pool: type = BlockPool
    scheduler: type = Scheduler
    speculation: type | None = None
    """Verifies random drafts if set."""
    repeats: bool = False
    """Whether steps are repeated."""
    adapters: bool = False
    """Whether adapters are loaded, replaced and used."""
    pooled: bool = False
    """Whether some requests are pooled."""
    snapshots: type | None = None
    """Stores recurrent state, which the runner then has."""
    stages: int = 1
    """Of the pipeline that the runner is."""
    data_ranks: int = 1
    """Ranks that divide the rows of a step; the runner is made for as many."""
    resets: float = 0.0
    """Share of the calls before which an interrupt is as if it had come with steps in
    flight, after which the runner is reset."""


class World:
    """One engine with random limits, requests and cancellations."""

    def __init__(self, random, parts, lag=True):
        self.random = random
        self.repeats, self.resets = parts.repeats, parts.resets
        self.limits = random_limits(random)
        if parts.stages > 1:
            deep = max(self.limits.depth, parts.stages + 1)
            self.limits = replace(self.limits, stages=parts.stages, depth=deep)
        self.config = random_config(random)
        # Generators of their own: worlds without adapters or repeats stay the same.
        sizes = self.limits
        self.name = f"{sizes.slots} {sizes.blocks} {sizes.block_size} {sizes.vocab}"
        self.dice = Random(self.name) if parts.adapters else None
        self.reset_dice = Random(self.name)
        if self.dice:
            self.limits = replace(self.limits, adapters=2, adapter_rank=1)
        # As above.
        self.pool_dice = Random(self.name) if parts.pooled else None
        if parts.repeats:
            steps = Random(self.name).choice([2, 3, 8, 17])
            self.limits = with_repeaters(self.limits, steps)
            # Without a limit that depends on the time.
            self.config = replace(
                self.config, decode_steps=steps, repeat_seconds=float("inf")
            )
        pools = [
            parts.pool(blocks, self.limits.block_size) for blocks in self.limits.blocks
        ]
        self.snapshots, states = None, {}
        if parts.snapshots is not None:
            self.snapshots = parts.snapshots(8 * Random(self.name).choice([3, 20, 500]))
            states = {"snapshots": self.snapshots}
            sizes = {"snapshot_tokens": 2, "snapshot_interval": 8}
            self.config = replace(self.config, recurrent=True, **sizes)
        memory = parts.kv_cache(pools, self.limits.windows, **states)
        self.now = self.groups = 0
        options = {"clock": lambda: self.now}
        if parts.speculation is not None:
            self.config = replace(self.config, use_kv_cache=True)
            width = random.choice([2, 3, 6])
            self.limits = with_verifiers(self.limits, width)
            drafter = OracleDrafter(self)
            options["speculation"] = parts.speculation(drafter, width - 1)
        if parts.data_ranks > 1:
            # Each rank has the limits, and blocks of its own.
            self.limits = all_ranks_limits(self.limits, parts.data_ranks)
            budget = self.config.token_budget * parts.data_ranks
            self.config, memory = replace(self.config, token_budget=budget), None
        self.scheduler = parts.scheduler(
            self.limits, self.config, kv_cache=memory, **options
        )
        recurrent = {"recurrent": True} if self.snapshots is not None else {}
        self.runner = parts.runner(
            self.limits, lag=random if lag else None, **recurrent
        )
        self.engine = EngineCore(
            self.runner, scheduler=self.scheduler, on_step=self.see_step, **states
        )
        self.prefixes = [self.ids(random.randint(1, 30)) for _ in range(4)]
        self.requests, self.answers, self.live = {}, {}, []
        self.counts = Counter()

    def ids(self, count):
        return [self.random.randrange(self.limits.vocab) for _ in range(count)]

    def see_step(self, record):
        if self.limits.buckets:
            assert record.bucket in self.limits.buckets
        assert record.rows <= record.bucket.rows
        assert record.tokens <= record.bucket.tokens * record.bucket.repeat
        if record.bucket.repeat > 1:
            self.counts["repeated steps"] += 1
            self.counts["repeated tokens"] += record.tokens
            self.counts["repeated steps in flight"] += len(self.scheduler.in_flight) > 1
        self.counts["decode rows"] += record.decode_rows
        if record.bucket.verifies:
            self.counts["verifying steps"] += 1
            in_flight = len(self.scheduler.in_flight)
            self.counts["verifying steps in flight"] += in_flight > 1
            for request, start, stop, _ in self.scheduler.in_flight[-1].chunks:
                if request.guide is not None:
                    self.counts["guided drafts"] += stop - start - 1

    def arrive(self):
        random = self.random
        common = random.choice(self.prefixes)[: random.randint(0, 30)]
        ids = (common + self.ids(random.randint(1, 12)))[: self.scheduler.context - 1]
        served = self.scheduler.buckets.sampler
        draws = served != "greedy" and random.random() < 0.5
        more = (
            self.sampling()
            if served == "sample_filtered" and random.random() < 0.3
            else {}
        )
        adapter = self.adapter()
        if self.pool_dice and self.pool_dice.random() < 0.4:
            whole = [*ids, *self.pool_dice.choices(range(self.limits.vocab), k=99)]
            ids = (ids, whole[: self.scheduler.context])[self.pool_dice.random() < 0.1]
            fields = {"cache_salt": self.pool_dice.choice(["", "other"])}
            for _ in range(self.pool_dice.randint(1, 4)):
                self.add(PooledRequest(ids, **adapter, **fields))
                ids = [*ids[:-1], self.pool_dice.randrange(self.limits.vocab)]
            return
        group, samples = 0, 1
        if random.random() < 0.2:
            self.groups += 1
            group, samples = self.groups, random.randint(2, 4)
        fields = dict(
            max_tokens=random.choice([1, random.randint(2, 9), random.randint(9, 99)]),
            temperature=0.7 if draws else 0.0,
            **more,
            stop_ids=frozenset(self.ids(random.choice([0, 0, 0, 2]))),
            ignore_eos=random.random() < 0.3,
            allowed_token_ids=self.allowed(),
            **adapter,
            cache_salt=random.choice(["", "", "", "other"]),
            key=random.choice(["", "", "key"]),
            priority=random.choice([0, 0, 5]),
        )
        if served == "sample_filtered" and self.config.use_kv_cache:
            fields["prompt_logprobs"] = random.choice([None] * 9 + [0, 2])
            last = random.randrange(len(ids))
            fields["prompt_logprobs_start"] = random.choice([0, last])
        for _ in range(samples):
            late = self.now + random.randint(1, 200)
            fields["deadline"] = late if random.random() < 0.05 else None
            guide = self.guide() if fields["allowed_token_ids"] is None else None
            self.add(
                Request(
                    ids, **fields, guide=guide, sample_group=group,
                    seed=random.randint(-3, 3),
                )
            )  # fmt: skip
        self.counts["further samples"] += samples - 1

    def add(self, request):
        number = self.engine.add(request)
        self.requests[number], self.answers[number] = request, []
        self.live.append(number)
        self.counts["requests"] += 1

    def adapter(self):
        """Sometimes an adapter that is loaded; sometimes another one is loaded."""
        loaded, dice = self.scheduler.adapters, self.dice
        if dice is None:
            return {}
        used = {request.adapter for request in self.scheduler.live.values()}
        if (free := sorted({1, 2} - used)) and dice.random() < 0.3:
            digest = dice.choice(["a", "b", "c"])
            self.engine.load_adapter(AdapterSource(dice.choice(free), "", digest))
            self.counts["adapters"] += 1
        if not loaded or dice.random() < 0.3:
            return {}
        self.counts["requests of adapters"] += 1
        # One after the other, so that the requests of each come to an end.
        number = sorted(loaded)[self.counts["requests"] // 60 % len(loaded)]
        return {"adapter": number, "adapter_digest": loaded[number]}

    def guide(self):
        """Sometimes a grammar."""
        if self.random.random() < (0.97 if self.repeats else 0.8):
            return None
        self.counts["guided requests"] += 1
        seed, ends = self.random.randrange(10**9), {5, self.random.randrange(11)}
        return ToyGuide(ToyGrammar(seed, self.limits.vocab, ends))

    def allowed(self):
        """Sometimes a few tokens, which may include the end token."""
        if self.random.random() < (0.97 if self.repeats else 0.85):
            return None
        self.counts["masked requests"] += 1
        return [*self.ids(self.random.randint(1, 9)), self.random.choice([5, 6])]

    def sampling(self):
        """Random sampling parameters that the program ``sample_filtered`` serves."""
        random = self.random
        self.counts["full requests"] += 1
        fields = {
            "top_k": random.choice([0, 5]),
            "top_p": random.choice([1.0, 0.5]),
            "min_p": random.choice([0.0, 0.1]),
            "repetition_penalty": random.choice([1.0, 1.5]),
            "presence_penalty": random.choice([0.0, 0.5]),
            "frequency_penalty": random.choice([0.0, -0.5]),
        }
        biased = self.ids(random.choice([0, 0, 3]))
        bias = {token: random.uniform(-9, 9) for token in biased}
        return {**fields, "logit_bias": bias, "logprobs": random.choice([None, 3])}

    def step(self):
        """Compute one step and check finished requests."""
        self.now += 1
        for number, token, reason, error in self.engine.step():
            if error is not None:
                raise error
            if token is not None:
                self.answers[number].append(token)
            if reason is not None:
                self.live.remove(number)
                self.check(number, reason)
                self.counts[reason] += 1

    def check(self, number, reason):
        request, found = self.requests.pop(number), self.answers.pop(number)
        eos = frozenset() if request.ignore_eos else self.config.eos_ids
        context = self.scheduler.context
        if request.pooled:
            self.check_hidden(request, found, reason)
            return
        want, end = expected(
            request, self.limits, context, request.stop_ids | eos,
            self.snapshots is not None,
        )  # fmt: skip
        if reason in ("cancelled", "deadline"):
            want, end = want[: len(found)], reason
        if (found, reason) != (want, end):
            raise WrongText(f"request {number}: {found} {reason}, not {want} {end}")
        assert request.output_ids == found
        self.check_scores(request)
        self.check_prompt_scores(request, reason)

    def check_hidden(self, request, found, reason):
        assert found == request.output_ids == []
        if reason in ("cancelled", "deadline"):
            assert request.hidden is None
            return
        want = expected_hidden(request, self.limits, self.snapshots is not None)
        if reason != "stop" or request.hidden.tolist() != want:
            raise WrongText(f"{request.id}: {request.hidden} {reason}, not {want}")
        self.counts["hidden states"] += 1
        self.counts["cached hidden states"] += request.cached_tokens > 0

    def check_prompt_scores(self, request, reason):
        scores, vocab = request.prompt_token_logprobs, self.limits.vocab
        count = request.prompt_logprobs
        first = max(request.prompt_logprobs_start, 1)
        want = [None] * first
        for token in request.prompt[first:] if count is not None else ():
            top = [(token + step) % vocab for step in range(min(count, vocab))]
            want.append((token, -token / 4, tuple((near, -near / 4) for near in top)))
        if reason in ("cancelled", "deadline"):
            want = want[: len(scores)]
        assert scores == want
        self.counts["scored prompt tokens"] += len(scores) - first

    def check_scores(self, request):
        scores = [
            (each.token, each.logprob, each.top) for each in request.token_logprobs
        ]
        vocab = self.limits.vocab
        told = []
        for token in request.output_ids if request.logprobs is not None else ():
            top = [(token + step) % vocab for step in range(min(3, vocab))]
            told.append((token, -token / 4, tuple((near, -near / 4) for near in top)))
        assert scores == told

    def run(self, steps):
        random = self.random
        rate, crowd = random.choice([0.3, 0.9, 0.9]), random.choice([5, 40, 80])
        if self.repeats:  # steps are repeated while no request waits
            rate, crowd = rate / 6, crowd // 3
        while self.engine.stats.steps < steps:
            while not self.live or (random.random() < rate and len(self.live) < crowd):
                self.arrive()
            if self.resets and self.reset_dice.random() < self.resets:
                self.counts["resets"] += bool(self.scheduler.in_flight)
                self.engine._is_unsettled = True  # as an interrupt leaves it
            if random.random() < 0.03:
                self.engine.cancel(random.choice(self.live))
            self.step()
        for _ in range(100_000):
            if not self.engine.has_work:
                break
            self.step()
        self.check_nothing_is_left()
        stats = self.engine.stats
        self.counts.update(steps=stats.steps, tokens=stats.tokens, rows=stats.rows)
        self.counts["preemptions"] += stats.preemptions
        self.counts["prefix hit tokens"] += stats.prefix_hit_tokens
        if self.snapshots is not None:
            for name, count in self.snapshots.counts.items():
                self.counts[f"snapshots {name}"] += count
            assert self.snapshots.used_bytes <= self.snapshots.capacity
        if self.scheduler.speculation is not None:
            self.counts["drafts"] += self.scheduler.speculation.drafted
            self.counts["accepted drafts"] += self.scheduler.speculation.accepted
        return self.counts

    def check_nothing_is_left(self):
        assert not self.live
        assert not self.requests
        assert not self.engine.has_work
        assert not self.scheduler.running
        assert not len(self.scheduler.waiting)
        assert self.runner.slots_in_use == []
        for cache in self.scheduler.kv_caches:
            assert not cache.has_pending_frees
            for pool in cache.pools:
                assert pool.used_blocks == 0
                assert pool.available_blocks == pool.blocks - 1


class OracleDrafter:
    """Predicts some of the tokens to come and, at random, wrong ones."""

    def __init__(self, world):
        self.world, self.texts = world, {}
        self.right = world.random.choice([0.0, 0.5, 0.9, 1.0])

    def propose(self, queries):
        return [self.predict(query) for query in queries]

    def predict(self, query):
        world, random = self.world, self.world.random
        request = world.scheduler.live[query.request]
        if query.request not in self.texts:
            context = world.scheduler.context
            found, _ = expected(request, world.limits, context, frozenset())
            self.texts[query.request] = [*request.prompt, *found]
        text, start = self.texts[query.request], len(query.tokens)
        if query.tokens != text[:start]:
            raise WrongText(
                f"request {query.request}: found {query.tokens}, not {text}"
            )
        stop = start + random.randint(0, query.limit)
        vocab = world.limits.vocab
        return [
            token if random.random() < self.right else random.randrange(vocab)
            for token in text[start:stop]
        ]

    def forget(self, request):
        self.texts.pop(request, None)


def with_verifiers(limits, width):
    """Add programs that verify drafts, in most cases for as many rows as others."""
    most = max((bucket.rows for bucket in limits.buckets), default=0)
    samplers = {bucket.sampler for bucket in limits.buckets}
    sizes = [(most, most * 2), (most, most * width), (max(most // 2, 1), width)]
    verifiers = [
        Bucket(tokens, rows, width, sampler)
        for rows, tokens in sizes[: 3 if most else 0]
        for sampler in samplers
        if 1 < tokens <= rows * width
    ]
    return replace(limits, buckets=(*limits.buckets, *verifiers))


def with_repeaters(limits, steps):
    """Add programs of several steps, in most cases for as many rows as others."""
    rows = sorted({bucket.rows for bucket in limits.buckets})
    samplers = {bucket.sampler for bucket in limits.buckets}
    repeaters = [
        Bucket(count, count, 1, sampler, steps)
        for count in rows[-2:]
        for sampler in samplers
    ]
    buckets = (*limits.buckets, *sorted(repeaters))
    return replace(limits, buckets=buckets, decode_steps=steps)


def random_limits(random):
    slots = random.choice([2, 6, 13, 25, 33])
    buckets = []
    for _ in range(random.choice([0, 0, 1, 3, 6])):
        rows = random.choice([1, 6, 16, 32])
        tokens = rows + random.choice([0, 1, 20, 60])
        samplers = "greedy", "sample", "sample_filtered"
        buckets += [Bucket(tokens, rows, sampler=sampler) for sampler in samplers]
    if len(buckets) > 6 and random.random() < 0.4:
        most = random.choice([("greedy",), ("greedy", "sample")])
        buckets = [bucket for bucket in buckets if bucket.sampler in most]
    size = random.choice([1, 2, 4, 8])
    width = random.randint(40 // size, 100 // size)
    least = max(2, width // 2)
    plenty = random.choice([1, 2, 3, 5, 16])
    groups = random.choice([1, 1, 2])
    return Limits(
        slots=slots,
        blocks=tuple(
            1 + random.randint(least, 2 * least) * plenty for _ in range(groups)
        ),
        windows=random_windows(random, groups),
        block_size=size,
        max_blocks_per_seq=width,
        vocab=random.choice([11, 97, 50_000]),
        buckets=tuple(sorted(buckets)),
        depth=random.choice([1, 2, 2, 2, 2, 3]),
    )


def random_windows(random, groups):
    windows = [random.choice([None, random.randint(1, 20)]) for _ in range(groups)]
    return random.choice([(), tuple(windows), tuple(windows)])


def random_config(random):
    budget = random.choice([random.randint(1, 8), 24, 64, 512, 512])
    return SchedulerConfig(
        token_budget=budget,
        wait_tokens=1 if budget % 3 == 0 else 64,
        max_rows=random.choice([None, None, None, 3]),
        context=random.choice([None, None, 37]),
        eos_ids=frozenset({5}),
        use_kv_cache=random.random() < 0.92,
        prefix_cache=random.random() < 0.8,
    )


def soak(seed, steps, parts=None, *, world_steps=1_000, lag=True):
    """Run worlds for ``steps`` steps in total; returns their counts."""
    random, counts = Random(seed), Counter()
    while counts["steps"] < steps:
        world = World(random, parts or Parts(), lag)
        counts += world.run(min(world_steps, steps - counts["steps"]))
        counts["worlds"] += 1
    return counts
