"""A front-end of engines elsewhere: ``python front_end_process.py JSON``.

Writes its address to the standard output. It ends when its standard input is closed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from inl.fleet.local_engines import until_parent_ends
from inl.fleet.server import FleetServer
from inl.serve.settings import ServerConfig
from inl.serve.signals import handle_signals
from inl.workers.settings import read_secret


def main() -> None:
    given = json.loads(sys.argv[1])
    _, _, port = given.get("address", "127.0.0.1:0").partition(":")
    config = ServerConfig(port=int(port), **given.get("server", {}))

    async def serve():
        secret = read_secret(os.environ)
        server = FleetServer(given["engines"], config, secret=secret)
        handle_signals(server.stop)

        def started(url):
            print(url.removeprefix("http://"), flush=True)

        serving = asyncio.create_task(server.serve(started))
        parent = asyncio.create_task(until_parent_ends())
        await asyncio.wait([serving, parent], return_when="FIRST_COMPLETED")
        parent.cancel()
        serving.cancel()
        await asyncio.gather(serving, parent, return_exceptions=True)

    asyncio.run(serve())


if __name__ == "__main__":
    main()
