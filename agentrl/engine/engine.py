"""The loop thread: admits, prefills, decodes and samples, and runs queued commands between steps.

Guarantees: only this thread uses model, cache and scheduler; other threads send it functions through a queue. A
submitted request always ends: finished, aborted, or failed with the message of the exception. An exception in a model
step fails the requests of that step and no others. No cache entry survives a weight change, except those of requests
that ``in_place`` has frozen. A pause with a lease ends with it (:mod:`agentrl.engine.pause_lease`).
"""

import itertools
import logging
import queue
import random
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import torch

from agentrl.engine.admission import CHUNK, Admission
from agentrl.engine.expert_record import note_experts, retract
from agentrl.engine.live_adapter import LiveAdapter, is_adapter
from agentrl.engine.make_runner import Runner
from agentrl.engine.pause_lease import PauseLease
from agentrl.engine.prompts import compute_prompts
from agentrl.engine.request import Finish, Request
from agentrl.engine.sampling import sample
from agentrl.engine.scheduler import Scheduler
from agentrl.engine.weight_store import copy_weights, load_weights
from agentrl.host.worker_threads import settle

T = TypeVar("T")
GATHER_SECONDS = 0.05  # longest wait for more requests before an idle engine starts: a fraction of a prefill
GATHER_GAP = 0.004  # a pause in the arrivals as long as this ends the wait
PAUSE_MODES = ("abort", "retract", "in_place")
log = logging.getLogger(__name__)


class QueueFullError(RuntimeError):
    """More requests wait than ``max_waiting`` allows; the server answers HTTP 503."""


class Engine:
    """Runs a model runner and a scheduler in one thread.

    Args:
        build: Makes the runner; called in the loop thread, which then owns it.
        max_running: Number of slots.
        max_waiting: Maximum number of waiting requests beyond the slots.
        max_tokens: Most tokens of all running requests together; ``None``: slots times context.
        prefill_chunk: Tokens of a long prompt that are computed between two decode steps.
        seed: Seed of the random stream that gives a seed to each request without one.
        version: Weight version at the start.
        threads: Torch threads of the loop; 0 leaves torch's choice.
        clock: Returns seconds, for the lease of a pause.
    """

    def __init__(
        self,
        build: Callable[[], Runner],
        *,
        max_running: int = 64,
        max_waiting: int = 4096,
        max_tokens: int | None = None,
        prefill_chunk: int = CHUNK,
        seed: int | None = None,
        version: str = "0",
        threads: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the engine; :meth:`start` starts its thread."""
        self.scheduler = Scheduler(max_running, max_tokens)
        self.max_waiting = max_waiting
        self.version = version
        self.adapter = LiveAdapter()
        self.paused = False
        self.lease = PauseLease(clock)
        self.failed_steps = 0
        self.ready: Future[Runner] = Future()
        self._build = build
        self._threads = threads
        self._seeds = random.Random(seed)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._weights = 0  # number of weight changes
        self._admission = Admission(self.scheduler, prefill_chunk)
        self._twins = itertools.count()  # names of sets of requests with equal caches
        self._live: set[str] = set()
        self._lock = threading.Lock()  # guards _live and _seeds, which callers' threads use
        self._thread = threading.Thread(target=self._loop, name="agentrl-engine", daemon=True)

    # Methods for other threads.

    def start(self) -> "Engine":
        """Start the thread, which first builds the runner; the future ``ready`` holds the result."""
        self._thread.start()
        return self

    @property
    def alive(self) -> bool:
        """Whether the loop thread lives."""
        return self._thread.is_alive()

    @property
    def runner(self) -> Runner:
        """The runner, once ready."""
        return self.ready.result(timeout=0)

    def next_seed(self) -> int:
        """Draws a seed for a request without one."""
        with self._lock:
            return self._seeds.getrandbits(63)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; ``on_update`` of each is called with its progress.

        Args:
            requests: New requests; their rids must not be in use.

        Raises:
            QueueFullError: If too many requests are unfinished.
            ValueError: If a rid is in use.
        """
        with self._lock:
            if len(self._live) + len(requests) > self.scheduler.max_running + self.max_waiting:
                raise QueueFullError(f"{len(self._live)} requests are unfinished, the queue is full")
            rids = [request.rid for request in requests]
            taken = sorted(self._live.intersection(rids)) or sorted({rid for rid in rids if rids.count(rid) > 1})
            if taken:
                raise ValueError(f"rid {taken[0]!r} is already in use")
            self._live.update(rids)
        self._commands.put(lambda: self.scheduler.add(requests))

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function in the loop thread between two steps."""
        future: Future[T] = Future()
        self._commands.put(lambda: settle(future, function))
        return future

    def abort(self, rid: str = "", *, everything: bool = False) -> "Future[int]":
        """End requests now, with the tokens that they have.

        Args:
            rid: A request's own or parent id; unknown ids are ignored.
            everything: End all requests.

        Returns:
            Number of ended requests.
        """
        return self.call(lambda: self._abort(lambda r: everything or rid in (r.rid, r.parent), "aborted by the client"))

    def pause(self, mode: str, holder: str = "", seconds: float | None = None) -> "Future[None]":
        """Stop stepping: ``abort`` ends all requests, ``retract`` requeues running ones, ``in_place`` freezes them."""
        return self.call(lambda: self._pause(mode, holder, seconds))

    def resume(self, holder: str = "") -> "Future[None]":
        """Continue after a pause."""
        return self.call(lambda: self._resume(holder))

    def load(self, folder: str, version: str | None, *, abort_all: bool = False) -> "Future[int]":
        """Load weights, or an adapter for them, from a folder between two steps; returns the bytes read."""

        def whole(model: torch.nn.Module) -> int:
            read = load_weights(model, folder, self.runner.adopt)
            self.adapter.forget(model, written=None)
            return read

        def adapter(model: torch.nn.Module) -> int:
            return self.adapter.load(model, folder)

        return self.call(lambda: self._load(adapter if is_adapter(folder) else whole, version, abort_all))

    def take(self, tensors: Mapping[str, torch.Tensor], version: str | None, *, abort_all: bool) -> "Future[int]":
        """Copy some parameters into the model between two steps; returns their bytes."""

        def some(model: torch.nn.Module) -> int:
            taken = copy_weights(model, tensors)
            self.adapter.forget(model, written=tensors)
            return taken

        return self.call(lambda: self._load(some, version, abort_all))

    def stop(self, timeout: float = 2.0) -> bool:
        """Abort everything and end the thread.

        Args:
            timeout: Seconds to wait for a step in progress.

        Returns:
            Whether the thread ended.
        """
        self._commands.put(self._stop)
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # Methods for the loop thread.

    def _loop(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        self.build()
        if self.ready.exception() is not None:
            return
        while not self._stopping:
            self.turn(block=self.paused or not self.scheduler.unfinished)

    def build(self) -> None:
        """Make the runner; ``ready`` holds the result. For the loop thread, or a caller of :meth:`turn`."""
        settle(self.ready, self._build)

    def turn(self, *, block: bool = False) -> None:
        """Run one turn of the loop: commands, prefills, one decode step.

        Args:
            block: Wait for a command first.
        """
        self._obey(block=block)
        if self.paused and self.lease.left() == 0:
            log.warning("the pause of %s was not renewed, generation continues", self.lease.holder or "a client")
            self._resume()
        if not self.paused and not self._stopping:
            self._step()

    def _obey(self, *, block: bool) -> None:
        """Run queued commands, waiting for one if there is nothing else to do.

        Requests rarely come alone. After the first request it waits for those that follow closely, so that the
        members of a group share one prefill.
        """
        if block:
            try:
                self._commands.get(timeout=self.lease.left())()
            except queue.Empty:
                return  # the lease of a pause has ended
            end = time.monotonic() + GATHER_SECONDS
            while self.scheduler.waiting and not self.paused and time.monotonic() < end:
                try:
                    self._commands.get(timeout=GATHER_GAP)()
                except queue.Empty:
                    break
        while not self._commands.empty():
            self._commands.get()()

    def _step(self) -> None:
        groups, long = self._admission.next(self.runner)
        if long:
            slot, tokens = len(self.scheduler.running), self._admission.chunk
            self._guarded(long, partial(self.runner.prefill_part, long[0].prefix, slot, tokens))
        if groups:
            self._guarded([request for group in groups for request in group], lambda: self._admit(groups))
        if groups or long:
            self._obey(block=False)
        if self.scheduler.running and not self.paused and not self._stopping:
            self._guarded(list(self.scheduler.running), self._decode)

    def _guarded(self, involved: Sequence[Request], step: Callable[[], object]) -> None:
        """Turn an exception of a step into the error of its requests; this is the boundary of the engine's loop."""
        try:
            step()
        except Exception as error:
            self.failed_steps += 1
            log.error("a model step failed: %s", traceback.format_exc())
            for request in involved:
                request.end(Finish("error", message=f"{type(error).__name__}: {error}"))
            self.scheduler.drop_waiting(involved)
            self._sweep()
            for request in involved:
                self._report(request)

    def _admit(self, groups: list[list[Request]]) -> None:
        """Prefill each group once, then sample each member's first token."""
        first, slots = len(self.scheduler.running), list[range]()
        for group in groups:
            slots.append(range(first, first + len(group)))
            first += len(group)
        logits = compute_prompts(self.runner, groups, slots)
        for group in groups:
            twin = next(self._twins)
            for request in group:
                request.twin, request.weights = twin, self._weights
        members = [request for group in groups for request in group]
        for request in members:
            self.scheduler.place(request)
            if request.limit == 0:
                request.end(Finish("length"))
        rows = torch.repeat_interleave(torch.tensor([len(group) for group in groups], device=logits.device))
        self._sample(members, logits[rows])

    def _decode(self) -> None:
        running = list(self.scheduler.running)
        logits = self.runner.decode(
            [r.last for r in running], [r.length - 1 for r in running], [r.twin for r in running]
        )
        self._sample(running, logits)

    def _sample(self, requests: Sequence[Request], logits: torch.Tensor) -> None:
        """Append one token to each request that has not ended, and report."""
        drawn = sample(logits, requests, self.runner.native)
        twins: dict[tuple[int, int], int] = {}
        for row, request in enumerate(requests):
            if request.finish is not None:
                continue
            if row in drawn.broken:
                request.end(Finish("error", message="the model gave NaN or infinite logits"))
            else:
                token = drawn.tokens[row]
                request.append(token, drawn.logprobs[row], self.version)
                request.twin = twins.setdefault((request.twin, token), next(self._twins))
        self._sweep()
        for request in requests:
            if request.finish is not None or request.stream:
                self._report(request)

    def _sweep(self) -> None:
        """Free the slots of ended requests, the last slot first so that moves stay valid."""
        for slot in range(len(self.scheduler.running) - 1, -1, -1):
            request = self.scheduler.running[slot]
            if request.finish is not None:
                if request.finish.kind != "error":
                    note_experts(self.runner, slot, request)
                    if request.weights == self._weights:
                        self.runner.keep(request.cached, slot)
                moved = self.scheduler.release(slot)
                if moved != slot:
                    self.runner.move(moved, slot, self.scheduler.running[slot].length)

    def _report(self, request: Request) -> None:
        if request.finish is not None:
            with self._lock:
                self._live.discard(request.rid)
        request.on_update(request)

    def _abort(self, matches: Callable[[Request], bool], message: str) -> int:
        chosen = [request for request in self.scheduler.unfinished if matches(request)]
        for request in chosen:
            request.end(Finish("abort", message=message))
        self.scheduler.drop_waiting(chosen)
        self._sweep()
        for request in chosen:
            self._report(request)
        return len(chosen)

    def _pause(self, mode: str, holder: str, seconds: float | None) -> None:
        self.lease.take(holder, seconds)
        self.paused = True
        if mode == "abort":
            self._abort(lambda request: True, "generation was paused")
        elif mode == "retract":
            retract(self.scheduler, self.runner)

    def _resume(self, holder: str = "") -> None:
        self.lease.check(holder)
        self.lease.drop()
        self.paused = False

    def _load(self, load: Callable[[torch.nn.Module], int], version: str | None, abort_all: bool) -> int:
        if abort_all:
            self._abort(lambda request: True, "aborted by a weight update")
        try:
            read = load(self.runner.loaded.model)
        finally:  # a load that failed may have written some tensors
            self.runner.weights_changed()
        self._weights += 1
        if not self.paused:
            retract(self.scheduler, self.runner)
        if not self.scheduler.running:
            self.runner.clear()
        if version is not None:
            self.version = version
        return read

    def flush(self) -> bool:
        """Release the cache's memory; returns False if requests run. For the loop thread only."""
        if self.scheduler.unfinished:
            return False
        self.runner.clear()
        return True

    def _stop(self) -> None:
        self._stopping = True
        if self.ready.done() and self.ready.exception() is None:
            self._abort(lambda request: True, "the server is stopping")
