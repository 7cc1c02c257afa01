"""The adapters of an engine: names, numbers at the runner, and their requests."""

from __future__ import annotations

import logging
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, final
from weakref import WeakSet

from inl.adapters.folder import read_adapter
from inl.adapters.weights import modules_of, with_adapters
from inl.errors import ModelError, RequestError
from inl.protocol.runner import AdapterSource
from inl.weights.load import stored_specs
from inl.weights.plan import plan_weights

if TYPE_CHECKING:
    from inl.engine.core import EngineCore
    from inl.engine.fair_lock import FairLock
    from inl.engine.request_handle import RequestHandle
    from inl.executor.model_loader import LanguageModel
    from inl.protocol.runner import Limits, Runner

log = logging.getLogger("inl")


def check_adapter(model: LanguageModel, path: str | Path, max_rank: int) -> str:
    """Check an adapter against its base model and return its digest.

    Raises as :func:`~inl.adapters.folder.read_adapter`.
    """
    tree = with_adapters(model.model.weights(model.config))
    plans = plan_weights(tree, (), stored_specs(model.checkpoint))
    return read_adapter(path, modules_of(plans), max_rank).digest


@final
class AdapterUse:
    """An adapter that a call has found by its name, and keeps until its requests end.

    As long as it is referenced, no other adapter gets the number at the runner.
    """

    __slots__ = ("__weakref__", "source")

    def __init__(self, source: AdapterSource) -> None:
        self.source = source


class AdapterRegistry:
    """Loads and unloads adapters while an engine serves. Thread-safe.

    An adapter that is unloaded keeps its number at the runner until the calls that have
    found it have finished and another adapter needs the number.
    """

    def __init__(
        self, model: LanguageModel, limits: Limits, core: EngineCore, lock: FairLock
    ) -> None:
        self._model, self._limits = model, limits
        self._core, self._lock = core, lock
        self._named: dict[str, AdapterSource] = {}
        self._sources: dict[int, AdapterSource] = {}
        """What the runner has loaded, unloaded adapters included."""
        self._uses: WeakSet[AdapterUse] = WeakSet()
        self._naming = threading.Lock()
        """Held for a moment: finding a name does not wait for a step."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests can choose."""
        return tuple(self._named)

    def load(self, name: str, path: str | Path) -> None:
        """Check an adapter's files and load it under a name.

        Raises :class:`~inl.errors.RequestError` and
        :class:`~inl.errors.ModelError`.
        """
        if not self._limits.adapters:
            raise RequestError(
                f"adapter {name!r}: this engine has no room for adapters; start it "
                "with EngineConfig(max_adapters=1) or more"
            )
        digest = check_adapter(self._model, path, self._limits.adapter_rank)
        self._lock.run(partial(self._load, name, str(Path(path).absolute()), digest))

    def _load(self, name: str, path: str, digest: str) -> None:
        if (loaded := self._named.get(name)) is not None:
            raise RequestError(
                f"adapter {name!r}: is loaded already, from {loaded.path}; unload it "
                "first, or choose another name"
            )
        source = AdapterSource(self._free_number(name), path, digest)
        self._sources.pop(source.number, None)
        self._core.load_adapter(source)
        self._sources[source.number] = source
        with self._naming:
            self._named[name] = source

    def _free_number(self, name: str) -> int:
        taken = {source.number for source in self._named.values()}
        with self._naming:
            # Adapters without a name: no later request can use them.
            used = {use.source.number for use in self._uses}
        live = {request.adapter for request in self._core.live.values()}
        ending = (used | live) - taken - {0}
        for number in range(1, self._limits.adapters + 1):
            if number not in taken | ending:
                return number
        waiting = f", and {len(ending)} that were unloaded still serve requests"
        raise RequestError(
            f"adapter {name!r}: {len(taken)} are loaded ({', '.join(self._named)})"
            f"{waiting if ending else ''}; accepted: {self._limits.adapters} "
            "(EngineConfig.max_adapters); unload one first"
        )

    def unload(self, name: str) -> None:
        """Refuse further requests for an adapter; those made before are served."""
        self._lock.run(partial(self._unload, name))

    def _unload(self, name: str) -> None:
        with self._naming:
            self._source(name)
            del self._named[name]

    def use(self, name: str | None) -> AdapterUse | None:
        """Find an adapter for a call; raises ``RequestError`` for other names."""
        if name is None:
            return None
        with self._naming:
            use = AdapterUse(self._source(name))
            self._uses.add(use)
        return use

    def _source(self, name: str) -> AdapterSource:
        source = self._named.get(name)
        if source is None:
            known = ", ".join(self._named) or "None, since no adapter is loaded"
            raise RequestError(f"adapter: found {name!r:.80}, accepts {known}")
        return source

    def load_all(self, runner: Runner) -> None:
        """Load every adapter at a runner that replaces a lost one.

        One whose files are gone is unloaded: others, and the base model, are served.
        """
        for source in list(self._sources.values()):
            try:
                runner.load_adapter(source)
            except ModelError as error:
                self._forget(source, error)

    def _forget(self, source: AdapterSource, error: ModelError) -> None:
        del self._sources[source.number]
        self._core.scheduler.adapters.pop(source.number, None)
        with self._naming:
            names = [name for name, each in self._named.items() if each is source]
            for name in names:
                del self._named[name]
        for name in names:
            log.error("adapter %s: was unloaded with a lost worker: %s", name, error)


def apply_adapter(use: AdapterUse | None, handle: RequestHandle) -> None:
    """Let a request use an adapter until it has finished."""
    if use is not None:
        source, request = use.source, handle.request
        handle.adapter_use = use
        request.adapter, request.adapter_digest = source.number, source.digest
