"""The CPU backend beside its peers, on one machine and in one run.

    python bench/cpu_peers.py --rounds 5 --json peers.json --plot peers.png

Makes an environment for each peer, converts the same weights into each one's format,
then runs every row in a process of its own, round after round, so that what a
neighbor of the machine does hits all of them alike. Needs the standard library and
pip; see bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from peers.catalog import CONVERTER, LLAMA_VERSION, Row, Unknown, inl_rows, peer_of
from peers.catalog import select as select_rows
from peers.commands import Failed, parse_line, run_logged
from peers.environments import (
    build_portable,
    environment,
    inl_environment,
    is_portable,
    llama_server,
)
from peers.instructions import ISAS, check_rows
from peers.machine import cpu_name, load_average, usable_cores
from peers.models import Models
from peers.picture import check_picture, draw
from peers.progress import bar, say
from peers.report import (
    Result,
    Spread,
    answers,
    judge,
    notes,
    ratios,
    show_ratios,
    table,
)
from peers.requantize import requantized
from peers.turns import TOKENS, Player, compare_turns, show_turns, take_turns

HERE = Path(__file__).parent
DRIVERS = HERE / "peers" / "drivers"
FULL = {
    "repeats": 5,
    "tokens": 128,
    "batches": [8, 32],
    "batch_tokens": 64,
    "batch_repeats": 1,
}
STARTS = 3
"""Starts of a row in a round before the one that is measured whole."""
QUICK = {**FULL, "repeats": 1, "tokens": 16, "batches": [8], "batch_tokens": 4}


def arguments() -> argparse.Namespace:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    parse = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parse.add_argument
    add("--peers", help="such as llama.cpp,openvino:int8; all; none (only INL)")
    where = "interpreter that has INL, or a checkout to install (default: this one)"
    add("--inl", type=Path, default=HERE.parent, help=where)
    add("--inl-dtypes", default="auto", help="a row of INL for each: auto,openvino")
    models = "GGUF files, one table each (default: INL's default model)"
    add("--model", type=Path, nargs="+", default=[None], help=models)
    kinds = "also each model in these kinds, such as Q8_0 Q5_K_M, a table each"
    add("--requantize", nargs="+", default=[], metavar="KIND", help=kinds)
    forced = "instruction set for INL and llama.cpp, and no other peers"
    add("--isa", choices=ISAS, help=forced)
    add("--rounds", type=int, default=5)
    turns = "after the rounds: all rows loaded at once, measured in so many turns"
    add("--turns", type=int, default=0, help=turns)
    add("--threads", type=int, default=usable_cores())
    add("--cache", type=Path, default=Path(base) / "inl-peers")
    add("--quick", action="store_true", help="one short round: does it work?")
    rest = "seconds before each row: some cores slow down under load"
    add("--rest", type=float, default=0, help=rest)
    add("--limit", type=float, default=900, help="seconds for one row of one round")
    add("--json", type=Path, help="file for everything that was measured")
    add("--plot", type=Path, help="file for a picture; needs matplotlib")
    found = parse.parse_args()
    cores = usable_cores()
    if found.rounds < 1 or found.turns < 0 or not 1 <= found.threads <= cores:
        parse.error(f"--rounds: 1 or more; --turns: 0 or more; --threads: 1 to {cores}")
    return found


class Bench:
    """Environments, models and results of one run."""

    def __init__(self, options: argparse.Namespace, model: Path | None) -> None:
        self.options = options
        self.cache = options.cache.expanduser().absolute()
        self.sizes = QUICK if options.quick else FULL
        self.rounds = 1 if options.quick else options.rounds
        self.rest = options.rest
        self.has_ended = False
        """Whether Ctrl-C has ended the rounds or the turns."""
        self.bandwidths: list[float] = []
        self.jobs: dict[str, tuple[Path, Path, dict[str, Any]]] = {}
        say(f"cache {self.cache}; logs in {self.cache / 'logs'}")
        say("preparing the environment for converting")
        self.converter = environment(self.cache, "convert", CONVERTER)
        self.inl = self._inl()
        source = (model or self._default_model()).absolute()
        self.models = Models.of(source, self.cache, self.converter)
        say("asking float32 for its answer")
        self.facts = self.models.facts()

    def _inl(self) -> Path:
        given = self.options.inl.expanduser().absolute()
        if given.is_dir():
            say(f"installing INL from {given}")
            return inl_environment(self.cache, given)
        return given

    def _default_model(self) -> Path:
        code = "from inl.checkpoints.hub.resolve import default_model as m; print(m())"
        log = self.cache / "logs" / "model.log"
        return Path(run_logged([self.inl, "-c", code], log, limit=600).strip())

    def prepare(self, row: Row) -> Result:
        """Install and convert what a row needs; a failure is its result."""
        result = Result(row)
        try:
            self._prepare(row, result)
        except Failed as reason:
            result.failures.append(str(reason))
            say(f"{row.title}: {reason}")
        return result

    def _prepare(self, row: Row, result: Result) -> None:
        more: dict[str, Any] = {}
        if row.peer == "inl":
            python, driver = self.inl, "run_inl.py"
        else:
            peer = peer_of(row)
            driver = peer.driver
            python = environment(self.cache, peer.name, peer.requirements, peer.removed)
            if peer.name == "llama.cpp":
                program = llama_server(self.cache, python, self.options.isa)
                more = {"program": str(program), "version": LLAMA_VERSION}
        made = self.models.make(row.model, python)
        result.weight_bytes = made.weight_bytes
        more |= {"model": str(made.path), "mode": row.mode}
        self.jobs[row.key] = (python, DRIVERS / driver, more)

    def try_llama(self, results: list[Result]) -> None:
        """Find out whether a native build runs here, and build another if not."""
        mine = [r for r in results if r.row.peer == "llama.cpp" and not r.failures]
        if not mine or self.options.isa or is_portable(self.cache):
            return
        try:
            self.run(mine[0].row, QUICK | {"batches": []}, seed=0)
        except Failed:
            say("llama.cpp: the native build fails here; building without AMX")
            try:
                build_portable(self.cache, self.jobs[mine[0].row.key][0])
            except Failed as reason:
                for each in mine:
                    each.failures.append(str(reason))

    def run(self, row: Row, sizes: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Run one row once. Raises :class:`Failed`."""
        limit, settings, log = self.options.limit, self._settings(), self._log(row)
        with self._command(row, sizes, seed) as command:
            out = run_logged(command, log, limit=limit, environment=settings)
        return parse_line(out)

    @contextmanager
    def _command(
        self, row: Row, sizes: Mapping[str, Any], seed: int
    ) -> Iterator[list[object]]:
        """Give the command of a row's process, as long as its job is needed."""
        python, driver, more = self.jobs[row.key]
        job = {
            "threads": self.options.threads,
            "vocabulary": self.facts["vocabulary"],
            "question": self.facts["question_ids"],
            "question_tokens": len(self.facts["answer"]),
            "seed": seed,
            "build": self.llama_build(),
            "only_start": False,
            "turns": False,
            **sizes,
            **more,
        }
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "job.json"
            file.write_text(json.dumps({**job, "started": time.time()}), "utf-8")
            yield [python, driver, file]

    def _log(self, row: Row) -> Path:
        return self.cache / "logs" / f"{row.key.replace(':', '-')}.log"

    def _settings(self) -> dict[str, str]:
        """Give what a row's process finds in its environment."""
        count = str(self.options.threads)
        settings = dict.fromkeys(("OMP_NUM_THREADS", "INL_THREADS"), count)
        settings |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        # Installed packages have their byte code, and starts must not compile it.
        settings["PYTHONDONTWRITEBYTECODE"] = ""
        if self.options.isa:
            settings["INL_CPU_ISA"] = ISAS[self.options.isa].inl
        return settings

    def run_once(self, row: Row, seed: int) -> dict[str, Any]:
        """Run a row for one round, after starts of which the first is not counted.

        Its files are in the page cache then, whatever ran before.
        """
        start = {**self.sizes, "only_start": True}
        starts = [self.run(row, start, seed=0) for _ in range(STARTS)][1:]
        found = self.run(row, self.sizes, seed)
        seconds = [each["ready_seconds"] for each in (*starts, found)]
        return found | {"ready_seconds": median(seconds)}

    def llama_build(self) -> str:
        """Name the build of llama.cpp."""
        native = "portable" if is_portable(self.cache) else "native"
        return self.options.isa or native

    def measure_bandwidth(self) -> None:
        """Read memory as fast as it goes, in this same run."""
        command = [self.converter, HERE / "peers" / "bandwidth.py"]
        log = self.cache / "logs" / "bandwidth.log"
        out = run_logged([*command, self.options.threads], log, limit=120)
        self.bandwidths.append(float(json.loads(out)))

    def play(self, results: list[Result]) -> None:
        """Go through all rounds; each begins with another row.

        Ctrl-C ends them, and what has been measured so far is shown.
        """
        able = [each for each in results if not each.failures]
        try:
            self._play(able)
        except KeyboardInterrupt:
            if not self.bandwidths:
                raise  # there is nothing to show
            self.has_ended = True
            self.rounds = min((len(each.rounds) for each in able), default=0)
            say("\nended: the figures are those of the rounds so far")
        for result in able:
            if not result.rounds and not result.failures:
                result.failures.append("ended before its first round")

    def _play(self, able: list[Result]) -> None:
        for number in range(self.rounds):
            self.measure_bandwidth()
            start = number * len(able) // self.rounds
            for place, result in enumerate(able[start:] + able[:start]):
                done = number * len(able) + place
                bar(done, self.rounds * len(able), result.row.title)
                time.sleep(self.rest)
                try:
                    found = self.run_once(result.row, seed=number + 1)
                except Failed as reason:
                    result.failures.append(f"round {number + 1}: {reason}")
                    continue
                result.rounds.append(found)
                result.weight_bytes = found["weight_bytes"] or result.weight_bytes
        bar(1, 1, "done")

    def take_turns(self, results: list[Result]) -> None:
        """Take turns, if asked for; Ctrl-C ends them as it ends rounds."""
        if not self.options.turns or self.has_ended:
            return
        able = [each for each in results if not each.failures]
        try:
            take_turns(able, self.options.turns, self.player)
        except KeyboardInterrupt:
            self.has_ended = True
            say("\nended: the figures are those of the turns so far")

    @contextmanager
    def player(self, row: Row) -> Iterator[Player]:
        """Start a row's process for turns, and end it."""
        sizes = {**self.sizes, "turns": True, "tokens": TOKENS}
        limit, settings, log = self.options.limit, self._settings(), self._log(row)
        with (
            self._command(row, sizes, seed=0) as command,
            Player(command, log, limit=limit, settings=settings) as player,
        ):
            yield player

    def finish(self, results: list[Result]) -> None:
        """Judge the answers."""
        ran = [each for each in results if each.rounds]
        texts = self.models.texts([each.rounds[-1]["said"] for each in ran])
        for result, text in zip(ran, texts, strict=True):
            result.text = text
            judge(result, self.facts)


def machine(bench: Bench, load: float | None) -> dict[str, Any]:
    """Say on what, and how, everything was measured."""
    return {
        "cpu": cpu_name(),
        "threads": bench.options.threads,
        "cores": usable_cores(),
        "load_before": load,
        "python": sys.version.split()[0],
        "model": bench.facts["name"],
        "rounds": bench.rounds,
        "turns": bench.options.turns,
        "ended": bench.has_ended,
        "quick": bench.options.quick,
        "sizes": bench.sizes,
        "llama_build": bench.llama_build(),
        "isa": bench.options.isa,
        "rest_seconds": bench.rest,
        "read_bandwidth": Spread.of(bench.bandwidths)._asdict(),
    }


def show(bench: Bench, about: dict[str, Any], results: list[Result]) -> None:
    speed = Spread.of(bench.bandwidths)
    print(f"{about['cpu']}, {about['threads']} threads; {about['model']}")
    print(
        f"read bandwidth {speed.median / 1e9:.1f} GB/s ({speed.least / 1e9:.1f} to "
        f"{speed.most / 1e9:.1f}); {bench.rounds} rounds; load before: "
        f"{about['load_before']}"
    )
    if bench.options.quick:
        print("--quick: short and single calls, no figures to quote")
    print(f"\n{table(results, speed.median)}")
    print("\nINL against the best peer (over 1: ahead)")
    print(show_ratios(ratios(results)))
    if bench.options.turns:
        print("\nINL against each peer, in turns (over 1: ahead)")
        print(show_turns(results))
    print(f"\n{answers(results, bench.facts)}\n\nversions and modes\n{notes(results)}")


def record(about: dict[str, Any], results: list[Result]) -> dict[str, Any]:
    """Everything, for a file."""
    rows = [
        {
            "title": each.row.title,
            "key": each.row.key,
            "sensible": each.sensible,
            "agrees": each.agrees,
            "text": each.text,
            "weight_bytes": each.weight_bytes,
            "bandwidth_share": each.share(about["read_bandwidth"]["median"]),
            "failures": each.failures,
            "rounds": each.rounds,
            "turns": each.turns,
            "turns_failure": each.turns_failure,
        }
        for each in results
    ]
    return {
        "machine": about,
        "rows": rows,
        "ratios": ratios(results),
        "turns": compare_turns(results),
    }


def compare(options: argparse.Namespace, model: Path | None) -> dict[str, Any]:
    """Measure all rows with one model, and show them; gives the record."""
    load = load_average()
    rows = rows_of(options)
    bench = Bench(options, model)
    results = [bench.prepare(row) for row in rows]
    bench.try_llama(results)
    bench.play(results)
    bench.take_turns(results)
    bench.finish(results)
    about = machine(bench, load)
    show(bench, about, results)
    if options.plot:
        several = len(options.model) > 1 or options.requantize
        name = bench.models.source.stem if several else ""
        path = options.plot.with_stem("-".join(filter(None, (options.plot.stem, name))))
        draw(results, path, f"{about['model']} on {about['cpu']}")
    return record(about, results)


def rows_of(options: argparse.Namespace) -> list[Row]:
    """Rows of the table. Raises :class:`Unknown`."""
    rows = [*inl_rows(options.inl_dtypes), *select_rows(options.peers)]
    check_rows(options.isa, rows)
    return rows


def models_of(options: argparse.Namespace) -> Iterator[Path | None]:
    """Give the models, each followed by its other kinds. Raises :class:`Failed`."""
    for model in options.model:
        yield model
        for kind in options.requantize:
            if model is None:
                raise Failed("--requantize: found no --model, accepted: GGUF files")
            say(f"quantizing {model.name} to {kind}")
            yield requantized(model.absolute(), kind, options.cache.absolute())


def main() -> None:
    options = arguments()
    try:
        rows_of(options)
        if options.plot:
            check_picture(options.plot)
        found = []
        for model in models_of(options):
            found.append(compare(options, model))
            if found[-1]["machine"]["ended"]:
                break
    except (Failed, Unknown) as reason:
        sys.exit(f"cpu_peers: {reason}")
    if options.json:
        text = json.dumps(found if len(found) > 1 else found[0], indent=1)
        options.json.write_text(text, "utf-8")
    if found[-1]["machine"]["ended"]:
        sys.exit(130)


if __name__ == "__main__":
    main()
