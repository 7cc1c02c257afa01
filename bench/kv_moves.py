"""Rates at which contents of caches move between processes and GPUs.

    python bench/kv_moves.py                                # on a machine with two GPUs
    python bench/kv_moves.py --device cpu --shape tiny --dtype float32 --gb 0.1 \\
        --prompt 300 --tokens 24 --parts transports requests

``--parts transports``: two processes, one of which sends contents of the 8B shape's
blocks, as prefilling engines do, and the other one cuts them to its blocks; over TCP,
and over each transport of a plugin that is installed here. SHA-256, which each side
computes of all contents, is measured in the same run.

``copies``: a tensor from one GPU to the other by torch (peer copy), over the host's
memory, and by NIXL, if it is installed, between two processes. Medians of 5.

``requests``: two processes with an engine each. A request that decodes after
``--prompt`` tokens leaves one and continues in the other, with its blocks and without
them, and its tokens are compared with those of a request that stays: in 16 bits they
may differ where the two likeliest are nearly equal, as programs of other sizes round
otherwise. The pause is the time from the last token here to the first one there.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from hashlib import sha256
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from kv_tiers import cache_bytes
from random_models import SHAPES, random_language

from inl import EngineConfig, InferenceEngine
from inl.dtypes import HostArray
from inl.engine.state_port import StatePort, take_contents
from inl.errors import DeviceError
from inl.kv_transfer.link import Kind, accept, connect
from inl.kv_transfer.read_ahead import ReadAhead
from inl.kv_transfer.span_messages import received_span, span_fields
from inl.kv_transfer.spans import Recut, TokenSpan
from inl.kv_transfer.transport import Room, Rooms
from inl.plugin import registry
from inl.spec.cache_layout import BlockLayout
from inl.testing.near_tie import compare

SECONDS = 120.0
SECRET = bytes(32)
BLOCK, SPAN = 16, 16
"""Tokens of a block, and blocks of a message."""


@contextmanager
def process(target: Callable[..., None], *parts: Any) -> Iterator[Connection]:
    """Run a function with a pipe in another process; yields this end."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    other = context.Process(target=target, args=(far, *parts), daemon=True)
    other.start()
    far.close()
    try:
        yield near
    finally:
        other.terminate()
        other.join(30)
        other.kill()


def layout() -> BlockLayout:
    """Return the layout of the 8B shape's blocks."""
    _, _, _, layers, _, heads, dim, _ = SHAPES["8b"]
    return BlockLayout(layers, BLOCK, heads, dim, "bfloat16")


def room_of(name: str | None) -> Any:
    """Return a context with memory of a transport, or ``None``."""
    return nullcontext() if name is None else Rooms(name).room()


def receive(pipe: Connection, name: str | None) -> None:
    """Receive contents until all were sent, as a decoding engine does."""
    listening = socket.create_server(("127.0.0.1", 0))
    with room_of(name) as room:
        pipe.send((listening.getsockname()[1], room and room.offer))
        sock, _ = listening.accept()
        link = accept(sock, SECRET, b"", time.monotonic() + SECONDS)
        recut, blocks = Recut(layout()), 0
        used = time.process_time()
        with nullcontext(link) if name is not None else ReadAhead(link) as messages:
            while True:
                message = messages.receive()
                if room is not None:
                    message = room.receive(link, message)
                if message.kind is Kind.DONE:
                    break
                blocks += len(list(recut.add(received_span(message))))
            link.send(Kind.READ, {"blocks": blocks})
            pipe.send(time.process_time() - used)
            pipe.recv()


def transport_rate(name: str | None, total: int) -> tuple[float, float, float]:
    """Return the GB/s that one ticket carries.

    And the processor's seconds for each GB of both sides.
    """
    shape = layout().parts(SPAN)["cells"].shape
    bits = np.random.default_rng(0).integers(0, 1 << 16, shape, np.uint16)
    parts = {"cells": HostArray(bits, "bfloat16", shape)}
    count = max(total // bits.nbytes, 1)
    tokens = [1] * (count * SPAN * BLOCK)
    with process(receive, name) as pipe, room_of(name) as room:
        port, offer = pipe.recv()
        link = connect(f"127.0.0.1:{port}", SECRET, time.monotonic() + SECONDS)
        began, used = time.perf_counter(), time.process_time()
        for number in range(count):
            span = TokenSpan(0, number * SPAN * BLOCK, BLOCK, parts)
            fields = span_fields("", span, tokens)
            if isinstance(room, Room):
                room.send(link, offer, fields, parts)
            else:
                link.send(Kind.SPAN, fields, parts)
        link.send(Kind.DONE, {})
        answer = link.receive()
        seconds, used = time.perf_counter() - began, time.process_time() - used
        assert answer.fields["blocks"] == count * SPAN, answer
        there = pipe.recv()
        pipe.send(None)
    size = count * bits.nbytes / 1e9
    return size / seconds, used / size, there / size


def transports(options: argparse.Namespace) -> None:
    """Print the rates of TCP and of each transport of a plugin."""
    data = bytes(256 << 20)
    began = time.perf_counter()
    sha256(data).digest()
    rate = len(data) / (time.perf_counter() - began) / 1e9
    print(f"SHA-256 of one thread: {rate:.2f} GB/s", flush=True)
    for name in (None, *registry().names("transport")):
        try:
            rate, *used = transport_rate(name, int(options.gb * 1e9))
        except (DeviceError, EOFError) as error:
            print(f"{name}: {error}")
            continue
        print(
            f"one ticket over {name or 'TCP'}: {rate:.2f} GB/s, of the processor "
            f"{used[0]:.2f} s to send a GB and {used[1]:.2f} s to receive it",
            flush=True,
        )


def median_rate(copy: Callable[[], None], count: int) -> str:
    """Return the median GB/s of a copy of ``count`` bytes."""
    rates = []
    for _ in range(6):
        began = time.perf_counter()
        copy()
        rates.append(count / (time.perf_counter() - began) / 1e9)
    return f"{statistics.median(rates[1:]):.1f} GB/s"


def hold(pipe: Connection, device: str, count: int) -> None:
    """Register memory of a GPU with NIXL for writes of another process."""
    import torch
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("inl-holder", nixl_agent_config())
    memory = torch.zeros(count, dtype=torch.uint8, device=device)
    agent.register_memory(memory)
    pipe.send((agent.get_agent_metadata(), memory.data_ptr()))
    while pipe.recv():
        torch.cuda.synchronize(device)
        pipe.send(int(memory.sum(dtype=torch.int64)))


def copies(options: argparse.Namespace) -> None:
    """Print the rates of copies between two GPUs."""
    import torch

    count = int(options.gb * 1e9)
    here, there = (
        torch.ones(count, dtype=torch.uint8, device=device)
        for device in options.devices
    )
    host = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    number = torch.device(options.devices[1]).index

    def wait() -> None:
        for device in options.devices:
            torch.cuda.synchronize(device)

    def peer() -> None:
        there.copy_(here, non_blocking=True)
        wait()

    def over_host() -> None:
        host.copy_(here, non_blocking=True)
        wait()
        there.copy_(host, non_blocking=True)
        wait()

    access = torch.cuda.can_device_access_peer(here.device, number)
    print(f"peer copy: {median_rate(peer, count)} (peer access: {access})")
    print(f"over pinned host memory: {median_rate(over_host, count)}", flush=True)
    try:
        import nixl  # noqa: F401
    except ImportError as error:
        print(f"NIXL: {error}")
        return
    nixl_copy(options, here, count)


def nixl_copy(options: argparse.Namespace, here: Any, count: int) -> None:
    """Print the rate of NIXL's writes of a tensor to the GPU of another process."""
    from nixl._api import nixl_agent, nixl_agent_config

    with process(hold, options.devices[1], count) as pipe:
        if not pipe.poll(SECONDS):
            raise RuntimeError("NIXL: the other process has registered nothing")
        metadata, address = pipe.recv()
        agent = nixl_agent("inl-writer", nixl_agent_config())
        agent.register_memory(here)
        other = agent.add_remote_agent(metadata)
        kind = "VRAM"
        number = here.device.index
        place = int(options.devices[1].partition(":")[2])
        own = agent.get_xfer_descs([(here.data_ptr(), count, number)], kind)
        target = agent.get_xfer_descs([(address, count, place)], kind)
        handle = agent.initialize_xfer("WRITE", own, target, other)

        def write() -> None:
            agent.transfer(handle)
            end = time.monotonic() + SECONDS
            while (state := agent.check_xfer_state(handle)) != "DONE":
                if state == "ERR" or time.monotonic() > end:
                    raise RuntimeError(f"NIXL: a write has ended as {state}")

        print(f"NIXL, GPU to GPU: {median_rate(write, count)}", flush=True)
        pipe.send(1)
        assert pipe.recv() == count, "other bytes have arrived than were written"


def engine(pipe: Connection, device: str, options: argparse.Namespace) -> None:
    """Run requests of the other side: to their end, to a move, or from one."""
    rows = options.prompt + options.tokens + 64
    config = EngineConfig(
        backend=device, dtype=options.dtype, context=rows, max_batch=4,
        cache_bytes=cache_bytes(options.shape, options.dtype, 4 * rows),
        check_weights=False, warm_up=True, kv_host="4GiB",
    )  # fmt: skip
    language = random_language(options.shape, rows)
    settings = {"max_tokens": options.tokens, "temperature": 0, "ignore_eos": True}
    port = StatePort("127.0.0.1:0", None)
    with InferenceEngine(language, config=config) as made:
        pipe.send(None)
        while (asked := pipe.recv()) is not None:
            what, value = asked
            made.reset_prefix_cache()
            if what == "whole":
                whole = made.generate(value, logprobs=2, **settings)
                pairs = [[x for _, x in each.top] for each in whole.logprobs]
                margins = [max(pair) - min(pair) for pair in pairs]
                pipe.send((list(whole.token_ids), margins))
            elif what == "leave":
                prompt, takes = value
                handle = made.submit(prompt, **settings)
                while len(handle.request.output_ids) < options.tokens // 2:
                    made.step()
                last = time.time()
                moved = made.export_request(handle)
                size = sum(
                    part.data.nbytes for x in moved.spans for part in x.parts.values()
                )
                bare = replace(moved, spans=()).to_bytes()
                # Tickets that nobody takes stay in the port until they expire.
                ticket = port.hold(moved) if takes else ""
                if takes and not ticket:
                    raise RuntimeError(f"the port has no room for {size} bytes")
                pipe.send((bare, port.address, ticket, size, last))
            else:
                pipe.send(arrived(made, *value))


def arrived(
    made: InferenceEngine, bare: bytes, address: str, ticket: str
) -> tuple[list[int], float, float]:
    """Continue a request; return its tokens, and when it had arrived and went on."""
    from inl.engine.moved_request import MovedRequest

    moved = MovedRequest.from_bytes(bare)
    if ticket:
        found = take_contents(
            address, None, ticket, [*moved.prompt_ids, *moved.output_ids]
        )
        moved = replace(moved, spans=found.spans, identity=found.identity)
    taken = time.time()
    handle = made.import_request(moved)
    before = len(handle.request.output_ids)
    while len(handle.request.output_ids) == before:
        made.step()
    first = time.time()
    return list(handle.result().token_ids), taken, first


def requests(options: argparse.Namespace) -> None:
    """Print the pause of a request that moves, with its blocks and without."""
    far, near = options.devices
    rng, wrong = np.random.default_rng(3), 0
    with (
        process(engine, far, options) as here,
        process(engine, near, options) as there,
    ):
        for pipe in (here, there):
            pipe.recv()
        pauses: dict[str, list[float]] = {"with its blocks": [], "computed again": []}
        for run in range(options.runs + 1):
            prompt = rng.integers(0, SHAPES[options.shape][0], options.prompt).tolist()
            here.send(("whole", prompt))
            wanted, margins = here.recv()
            for what, found in pauses.items():
                takes = found is pauses["with its blocks"]
                here.send(("leave", (prompt, takes)))
                bare, address, ticket, size, last = here.recv()
                there.send(("arrive", (bare, address, ticket)))
                tokens, taken, first = there.recv()
                result = compare(tokens, wanted, margins)
                stays = result.agreed >= min(len(wanted), options.tokens // 2)
                is_right = stays and result.allowed(options.dtype)
                wrong += not is_right
                if not run:
                    continue  # programs of other sizes are compiled
                found.append(first - last)
                print(
                    f"  {what}: {1e3 * (taken - last):.0f} ms until taken, "
                    f"{1e3 * (first - taken):.0f} ms to the next token, "
                    f"{size / 1e9:.2f} GB, {result.agreed} of {len(wanted)} tokens "
                    f"alike, gap {result.gap}, right: {is_right}", flush=True,
                )  # fmt: skip
        for what, found in pauses.items():
            print(f"a moved request of {options.prompt} tokens {what}: pause "
                  f"{1e3 * statistics.median(found):.0f} ms")  # fmt: skip
        print(f"{wrong} of {2 * (options.runs + 1)} are wrong: other tokens before the "
              "move, or where the likeliest two are not nearly equal")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"])
    parser.add_argument("--device", help="of both engines, such as cpu")
    parts = {"transports": transports, "copies": copies, "requests": requests}
    parser.add_argument("--parts", nargs="+", default=list(parts), choices=parts)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--gb", type=float, default=2.0, help="of each copy")
    parser.add_argument("--prompt", type=int, default=8000)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    if options.device:
        options.devices = [options.device] * 2
    for name in options.parts:
        print(f"{name}:", flush=True)
        parts[name](options)


if __name__ == "__main__":
    main()
