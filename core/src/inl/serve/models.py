"""The models of a server, by name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from inl.errors import RequestError
from inl.serve.admission import Admission, Clients
from inl.serve.api_error import ApiError, model_not_found
from inl.serve.metrics import Metrics
from inl.serve.model_slot import ModelSlot, ModelSource
from inl.serve.ollama.fields import LATEST
from inl.serve.settings import ServerConfig


class Models:
    """Slots of all models; the first one is the default.

    max_batch: requests that each model computes at the same time.
    """

    def __init__(
        self,
        sources: Sequence[ModelSource],
        config: ServerConfig,
        metrics: Metrics,
        *,
        max_batch: int,
    ) -> None:
        names = [name for each in sources for name in (each.name, *each.adapters)]
        if len(set(names)) < len(names) or not names:
            raise RequestError(
                f"model: found the names {', '.join(names)}; accepts different ones, "
                "as --model NAME=PATH"
            )
        for name in names:
            if name.endswith(LATEST):
                plain = name.removesuffix(LATEST)
                raise RequestError(
                    f"model: found the name {name!r:.80}, accepts {plain!r:.80}: "
                    "clients of Ollama may add or leave out this tag"
                )
        self._executor = ThreadPoolExecutor(1, "inl-models")
        self.clients = Clients()
        self._slots = {
            source.name: ModelSlot(
                source,
                Admission(
                    max_running=max_batch,
                    max_queue=config.max_queue,
                    max_queued_tokens=config.max_queued_tokens,
                    max_per_client=config.max_per_key,
                    clients=self.clients,
                ),
                metrics.of(source.name),
                idle_seconds=config.idle_unload,
                executor=self._executor,
            )
            for source in sources
        }
        self.default = self._slots[names[0]]
        self._by_name: dict[str, ModelSlot] = {}
        self._index()
        self.on_names: Callable[[], Awaitable[None]] | None = None
        """Called after the names of adapters have changed."""
        self.frontend_problem: Callable[[], str | None] = lambda: None
        """Returns why requests may not reach this process."""
        self._naming, self._announcing = asyncio.Lock(), asyncio.Lock()
        for slot in self:
            slot.on_adapters = self._announce
        self.is_draining = False
        """Whether the server stops."""

    def __iter__(self) -> Iterator[ModelSlot]:
        return iter(self._slots.values())

    def __len__(self) -> int:
        return len(self._slots)

    def _index(self) -> None:
        self._by_name = {
            name: slot for slot in self for name in (slot.name, *slot.adapters)
        }

    @property
    def is_asleep(self) -> bool:
        """Whether all models are asleep."""
        return all(slot.admission.is_asleep for slot in self)

    def chosen(self, name: str | None) -> list[ModelSlot]:
        """Return the model of a name, or all; raises :class:`ApiError` 404."""
        return list(self) if name is None else [self.find(name)]

    async def load_adapter(self, model: str | None, name: str, path: str) -> None:
        """Load an adapter of a model under a name that requests can use.

        Raises :class:`ApiError` and the engine's errors.
        """
        slot = self.find(model)
        async with self._naming:
            if name in self._by_name:
                raise ApiError(
                    400,
                    f"lora_name: found {name!r:.80}, which is the name of a model or "
                    "an adapter; unload it first, or choose another name",
                    param="lora_name",
                )
            await slot.load_adapter(name, path)
            await self._announce()

    async def unload_adapter(self, name: str) -> None:
        """Refuse further requests for an adapter; raises :class:`ApiError` 404."""
        async with self._naming:
            slot = self._by_name.get(name)
            if slot is None or name == slot.name:
                known = [each for slot in self for each in slot.adapters]
                raise ApiError(
                    404,
                    f"lora_name: found {name!r:.80}, this server has the adapters "
                    f"{', '.join(known) or 'None'}",
                    param="lora_name",
                )
            await slot.unload_adapter(name)
            await self._announce()

    async def _announce(self) -> None:
        self._index()
        if self.on_names is not None:
            async with self._announcing:
                await self.on_names()

    def find(self, name: str | None) -> ModelSlot:
        """Return a model, by its name or that of an adapter; ``None`` is the default.

        Raises :class:`ApiError` 404.
        """
        if name is None:
            return self.default
        if name not in self._by_name:
            raise model_not_found(name, self._by_name)
        return self._by_name[name]

    def check_room(self, client: str) -> None:
        """Refuse a request if no model would admit it, before its body is read.

        Raises :class:`ApiError` 429 or 503.
        """
        if not any(slot.admission.has_room(client) for slot in self):
            self.default.admission.check(client)

    def drain(self) -> None:
        """Admit nothing more."""
        self.is_draining = True
        for slot in self:
            slot.admission.is_draining = True

    def close(self) -> None:
        """Unload all models."""
        self._executor.shutdown()
        for slot in self:
            slot.close()
