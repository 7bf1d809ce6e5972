"""The processes of `ggjit bench peers`: one for each engine, all alive, of which one computes at a time."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ggjit import bench_peer_worker

PEERS = ("llama_cpp", "ik_llama_cpp")
OURS, LIMITS = "ggjit", "limits"
QUIET, SETTLE = 0.01, 3.0  # seconds: twice in which waiting processes must use no CPU, and most to wait for that
_SOURCE = Path(bench_peer_worker.__file__)


def cpu_seconds(pid: int) -> float | None:
    """CPU time that all threads of a process have had; None where the system does not tell."""
    try:
        times = [int((t / "schedstat").read_text().split()[0]) for t in Path(f"/proc/{pid}/task").iterdir()]
    except (OSError, IndexError, ValueError):
        return None
    return sum(times) / 1e9 if times else None


class Worker:
    """An engine in a process of its own.

    Args:
        name: of the engine.
        python: that runs it.

    Attributes:
        started: `time.perf_counter()` when the process was started.
    """

    def __init__(self, name: str, python: str) -> None:
        self.name = name
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.started = time.perf_counter()
        # The source itself: the folder of a script would come first on its path, and is full of names like `types`.
        self.process = subprocess.Popen(
            [python, "-c", _SOURCE.read_text(), name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Send a request and wait for the answer.

        Raises:
            OSError: the process has ended, or the engine gives an error.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            print(json.dumps({"do": do, **request}), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            raise OSError(f"bench peers: {self.name} must keep running, got the end of its process: {lines[-1:]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise OSError(f"bench peers: {self.name} must do '{do}', got {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.close()
            self.process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self._errors.close()


class Crew:
    """Workers that take turns.

    Args:
        pythons: by engine.

    Attributes:
        idle: for each engine the largest share of a CPU that it used while another computed.
        is_idle_known: the system tells what waiting processes use.
    """

    def __init__(self, pythons: Mapping[str, str]) -> None:
        self.idle: dict[str, float] = {}
        self.is_idle_known = False
        self.workers: dict[str, Worker] = {}
        try:
            for name, python in pythons.items():
                self.workers[name] = Worker(name, python)
        except OSError:
            self.close()
            raise

    def ask(self, name: str, do: str, **request: Any) -> dict[str, Any]:
        """Let one engine compute while the others wait."""
        others = {n: w.process.pid for n, w in self.workers.items() if n != name}
        before = self._settle(others)
        start = time.perf_counter()
        answer = self.workers[name].ask(do, **request)
        wall = time.perf_counter() - start
        for other, used in before.items():
            now = cpu_seconds(others[other])
            if now is not None and wall > 0.05:
                self.is_idle_known = True
                self.idle[other] = max(self.idle.get(other, 0.0), (now - used) / wall)
        return answer

    def _settle(self, pids: Mapping[str, int]) -> dict[str, float]:
        """Wait until none of some processes uses CPU time; return what each has used so far.

        OpenMP's threads spin some milliseconds behind each parallel region before they sleep.
        """
        end = time.perf_counter() + SETTLE
        n_quiet = 0
        while True:
            before = {n: t for n, pid in pids.items() if (t := cpu_seconds(pid)) is not None}
            if n_quiet == 2 or time.perf_counter() > end:
                return before
            time.sleep(QUIET if before else 10 * QUIET)
            used = [(cpu_seconds(pids[n]) or t) - t for n, t in before.items()]
            n_quiet = n_quiet + 1 if all(t < QUIET / 20 for t in used) else 0

    def close(self) -> None:
        """End all processes."""
        for worker in self.workers.values():
            worker.close()

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def find_peers(given: Iterable[str] = ()) -> dict[str, str]:
    """The Python of each peer: those given as NAME=PYTHON, else this one where the package is installed.

    Raises:
        ValueError: an unknown name, or there is no peer at all.
    """
    found = {name: sys.executable for name in PEERS if importlib.util.find_spec(name) is not None}
    for text in given:
        name, _, python = text.partition("=")
        if name not in PEERS or not python:
            raise ValueError(f"bench peers: --peer must be NAME=PYTHON with {' or '.join(PEERS)}, got {text!r}")
        found[name] = python
    if not found:
        raise ValueError(
            f"bench peers: a peer must be installed here ({' or '.join(PEERS)}), got none; --peer NAME=PYTHON names "
            "the Python of an environment that has one"
        )
    return {name: found[name] for name in PEERS if name in found}


def check_options(peers: Mapping[str, str], options: Mapping[str, Mapping[str, float]]) -> None:
    """Ask each peer whether its parameters have the fields that are to be set.

    Raises:
        ValueError: a name is that of no peer here, or a field is not there.
    """
    for name, fields in options.items():
        if name not in (*peers, LIMITS):
            raise ValueError(f"bench peers: --peer-option must name one of {', '.join((*peers, LIMITS))}, got {name!r}")
        known = ["buffer_nbytes"] if name == LIMITS else _fields(name, peers[name])
        for field_name in fields:
            if field_name not in known:
                raise ValueError(
                    f"bench peers: --peer-option {name}.FIELD must be one of {', '.join(known)}, got {field_name!r}"
                )


def _fields(name: str, python: str) -> list[str]:
    worker = Worker(name, python)
    try:
        found: list[str] = worker.ask("fields")["fields"]
        return found
    finally:
        worker.close()
