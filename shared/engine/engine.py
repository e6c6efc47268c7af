"""The engine: three threads that turn a batcher's plans into steps.

    planner    owns the batcher and its block pool; runs posted commands between steps, without waiting for one
    executor   runs the runner, one step after the other; owns nothing
    collector  waits for what a runner only launched, in its order, while the executor launches the next

Everything reaches the planner through one inbox, so it sleeps when there is nothing to do and no wake-up is lost.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from shared.contracts.errors import Unavailable
from shared.engine.batcher import Batcher
from shared.engine.sequence_update import SequenceUpdate
from shared.engine.step_plan import StepOutput, StepPlan
from shared.engine.step_time import StepObservation, context_of

T = TypeVar("T")
Blocks = tuple[tuple[int, int], ...]  # (group, block id)


PendingStep = Callable[[], StepOutput]
"""A launched step: a call waits for its end. Called once, by the collector thread, in the order of the launches."""


class Runner(Protocol):
    """What runs steps; called by the executor thread only."""

    def run(self, plan: StepPlan) -> StepOutput | PendingStep:
        """Compute one step, or launch it. Anything raised, here or by the wait, ends its sequences with an error."""
        ...

    def zero_blocks(self, blocks: Sequence[tuple[int, int]]) -> Callable[[], object] | None:
        """Overwrite (group, block id) with zeros; or launch it before any later step, and return what waits for it."""
        ...


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[], None]
    refuse: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Done:
    plan: StepPlan
    result: StepOutput | Exception
    duration_s: float


@dataclass(frozen=True, slots=True)
class _Launched:
    plan: StepPlan
    result: StepOutput | Exception | PendingStep
    started: float


@dataclass(frozen=True, slots=True)
class _Zeroing:
    blocks: Blocks
    wait: Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Zeroed:
    blocks: Blocks
    error: Exception | None


class _Stop:
    pass


class Engine:
    """Runs a batcher's sequences; up to depth + 1 steps are planned and not yet committed.

    Callbacks run on the planner thread and must not block: hand over and return. What they raise is reported to
    `on_error` and changes nothing.

    Args:
        on_updates: what steps and commands changed, in order; never an empty list.
        on_error: a step that failed, or a fault in a callback; the engine goes on.
        on_step: tokens, sequences, context and seconds of each step that succeeded.
        idle_tick_s: how often `progress` advances when nothing runs.
    """

    def __init__(
        self,
        batcher: Batcher,
        runner: Runner,
        on_updates: Callable[[list[SequenceUpdate]], None],
        *,
        on_error: Callable[[Exception], None] = lambda error: None,
        on_step: Callable[[StepObservation], None] = lambda observation: None,
        idle_tick_s: float = 0.5,
    ) -> None:
        self._batcher = batcher
        self._runner = runner
        self._on_updates = on_updates
        self._on_error = on_error
        self._on_step = on_step
        self._idle_tick_s = idle_tick_s
        self._inbox: queue.SimpleQueue[_Command | _Done | _Zeroed | _Stop] = queue.SimpleQueue()
        self._work: queue.SimpleQueue[StepPlan | Blocks | _Stop] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[_Launched | _Zeroing | _Stop] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards _closed against a command posted while the planner leaves
        self._closed = False
        self._stopping = False
        self._launches = False  # the runner only launches steps
        self._zeroing = 0  # zero orders with the executor
        self._progress = 0
        self._news: list[SequenceUpdate] = []  # of ended steps, not yet published
        self._planner = threading.Thread(target=self._plan_loop, name="engine-planner", daemon=True)
        self._executor = threading.Thread(target=self._execute_loop, name="engine-executor", daemon=True)
        self._collector = threading.Thread(target=self._collect_loop, name="engine-collector", daemon=True)
        self._broken: deque[tuple[int, frozenset[str]]] = deque(maxlen=batcher.config.depth + 1)

    @property
    def progress(self) -> int:
        """Counts ended steps and the planner's idle turns, one a tick at least; stands still while a step hangs.

        Any thread may read it.
        """
        return self._progress

    def start(self) -> None:
        """Start the threads. Raises RuntimeError when called twice."""
        self._collector.start()
        self._executor.start()
        self._planner.start()

    def stop(self, timeout: float) -> bool:
        """Stop, in this order: refuse commands, plan nothing new, end and report the steps in flight, leave.

        Sequences that have not ended are left as they are; who wants them ended cancels them first.

        Args:
            timeout: most seconds to wait.

        Returns:
            False when a thread still runs after that, because a step hangs; it can't keep the process alive.
        """
        if self._planner.ident is None:
            self._close()
            return True
        deadline = time.monotonic() + timeout
        self._inbox.put(_Stop())
        threads = (self._planner, self._executor, self._collector)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def call(self, fn: Callable[[Batcher], T]) -> Future[T]:
        """Run `fn` on the planner thread, between steps, in the order posted; never waits for a step in flight.

        Returns:
            A future with what `fn` returns or raises; Unavailable (code `engine_stopped`) when the engine has stopped.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(self._batcher)
            except BaseException as exc:
                future.set_exception(exc)
            else:
                future.set_result(result)

        def refuse() -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(Unavailable("the engine has stopped", code="engine_stopped"))

        with self._lock:
            if not self._closed:
                self._inbox.put(_Command(run, refuse))
                return future
        refuse()
        return future

    # ------------------------------------------------------------------------------------- planner thread

    def _plan_loop(self) -> None:
        while not (self._stopping and self._executor_is_idle()):
            for item in self._take_inbox():
                try:
                    self._handle(item)
                except Exception as exc:
                    self._report_error(exc)
            # while a step is out, a turn of this loop is no progress
            if self._executor_is_idle():
                self._progress += 1
            try:
                self._advance()
            except Exception as exc:
                self._report_error(exc)
            # last: whoever hears of it wants the interpreter, and the executor its next step first
            self._publish()
        self._work.put(_Stop())
        self._close()

    def _close(self) -> None:
        with self._lock:
            self._closed = True
        # nothing can be posted any more: what is left was posted while stopping
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, _Command):
                item.refuse()

    def _executor_is_idle(self) -> bool:
        return self._batcher.num_in_flight == 0 and self._zeroing == 0

    def _take_inbox(self) -> list[_Command | _Done | _Zeroed | _Stop]:
        """Everything posted, in order; sleeps until there is something, a batch is due, or an idle tick has passed."""
        wait_s = self._idle_tick_s
        if self._batcher.num_in_flight == 0:  # else the step's end comes first
            wait_s = min(wait_s, self._batcher.wait_s(time.monotonic()))
        try:
            items = [self._inbox.get(timeout=wait_s)]
        except queue.Empty:
            return []
        while not self._inbox.empty():  # nobody else takes from it
            items.append(self._inbox.get())
        return items

    def _handle(self, item: _Command | _Done | _Zeroed | _Stop) -> None:
        match item:
            case _Done():
                self._end_step(item)
            case _Command():
                self._publish()  # its answer must not overtake what came before it
                if self._stopping:
                    item.refuse()
                else:
                    item.run()
            case _Zeroed(blocks, None):
                self._zeroing -= 1
                self._batcher.zeroed(blocks)
            case _Zeroed(_, error):
                # the blocks stay held: better a smaller pool than somebody else's KV
                self._zeroing -= 1
                self._report_error(error)
            case _Stop():
                self._stopping = True

    def _end_step(self, done: _Done) -> None:
        plan, result = done.plan, done.result
        try:
            if isinstance(result, Exception):
                raise result
            self._news += self._batcher.commit(result)
        except Exception as exc:
            self._report_error(exc)
            self._news += self._batcher.fail_step(plan.step, f"{type(exc).__name__} in step {plan.step}")
        else:
            try:
                self._on_step(StepObservation(plan.num_tokens, len(plan.sequences), context_of(plan), done.duration_s))
            except Exception as exc:
                self._report_error(exc)
        self._progress += 1

    def _advance(self) -> None:
        """Hand the executor all it may have: blocks to zero first, then steps up to the depth."""
        blocks = self._batcher.take_blocks_to_zero()
        if blocks:
            self._zeroing += 1
            self._work.put(blocks)
        while not self._stopping and (plan := self._batcher.plan(time.monotonic())) is not None:
            self._work.put(plan)

    def _publish(self) -> None:
        updates, self._news = self._news, []
        updates += self._batcher.take_updates()
        if updates:
            try:
                self._on_updates(updates)
            except Exception as exc:
                self._report_error(exc)

    def _report_error(self, error: Exception | None) -> None:
        # nothing may end this thread, not even a reporter that fails
        try:
            if error is not None:
                self._on_error(error)
        except Exception:
            return

    # ------------------------------------------------------------------------------------- executor thread

    def _execute_loop(self) -> None:
        while True:
            work = self._work.get()
            match work:
                case _Stop():
                    self._launched.put(work)
                    return
                case StepPlan():
                    self._run(work)
                case _:
                    self._zero(work)

    def _run(self, plan: StepPlan) -> None:
        """Run a step without the rows that a step planned before it, and failed since, should have fed."""
        lost = self._lost(plan) if self._broken else frozenset[str]()
        started = time.perf_counter()
        result: StepOutput | Exception | PendingStep
        try:
            if not lost or lost.isdisjoint(row.seq_id for row in plan.sequences):
                result = self._runner.run(plan)
            elif sound := tuple(i for i, row in enumerate(plan.sequences) if row.seq_id not in lost):
                part = self._runner.run(replace(plan, sequences=tuple(plan.sequences[i] for i in sound)))
                result = _widen(plan, part, sound) if isinstance(part, StepOutput) else _widen_later(plan, part, sound)
            else:
                result = _widen(plan, StepOutput(plan.step, ()), ())
        except Exception as exc:
            result = exc
        if isinstance(result, Exception):
            self._note_broken(plan)
        self._launches = self._launches or not isinstance(result, StepOutput | Exception)
        if self._launches:  # steps end in order, also those that never began
            self._launched.put(_Launched(plan, result, started))
        else:
            assert isinstance(result, StepOutput | Exception)
            self._inbox.put(_Done(plan, result, time.perf_counter() - started))

    def _lost(self, plan: StepPlan) -> frozenset[str]:
        """Sequences of failed steps that were planned when this plan was."""
        oldest = plan.step - self._batcher.config.depth
        return frozenset[str]().union(*(seq_ids for step, seq_ids in tuple(self._broken) if step >= oldest))

    def _zero(self, blocks: Blocks) -> None:
        try:
            wait = self._runner.zero_blocks(blocks)
        except Exception as exc:
            self._inbox.put(_Zeroed(blocks, exc))
            return
        if wait is None:
            self._inbox.put(_Zeroed(blocks, None))
        else:  # until then they are nobody's: whoever gets them may fill them by another way than a step
            self._launched.put(_Zeroing(blocks, wait))

    def _note_broken(self, plan: StepPlan) -> None:
        self._broken.append((plan.step, frozenset(row.seq_id for row in plan.sequences)))

    # ------------------------------------------------------------------------------------- collector thread

    def _collect_loop(self) -> None:
        last_end = 0.0
        while not isinstance(launched := self._launched.get(), _Stop):
            if isinstance(launched, _Zeroing):
                self._inbox.put(_zeroed(launched.blocks, launched.wait))
                continue
            result = launched.result
            if not isinstance(result, StepOutput | Exception):
                try:
                    result = result()
                except Exception as exc:
                    result = exc
                    self._note_broken(launched.plan)
            end = time.perf_counter()
            # a step launched while the one before ran began when that one ended
            self._inbox.put(_Done(launched.plan, result, end - max(launched.started, last_end)))
            last_end = end


def _zeroed(blocks: Blocks, wait: Callable[[], object]) -> _Zeroed:
    try:
        wait()
    except Exception as exc:
        return _Zeroed(blocks, exc)
    return _Zeroed(blocks, None)


def _widen(plan: StepPlan, part: StepOutput, sound: tuple[int, ...]) -> StepOutput:
    """The output of a whole plan from that of some of its rows; the others get tokens that nobody will read."""
    if len(part.sampled) != len(sound):
        raise ValueError(f"step {plan.step}: the output does not fit the plan")
    sampled = [(0,) * row.num_sampled for row in plan.sequences]
    for i, tokens in zip(sound, part.sampled, strict=True):
        sampled[i] = tokens
    logprobs = {sound[i]: found for i, found in part.logprobs.items()}
    bad_rows = frozenset(sound[i] for i in part.bad_rows)
    stuck = frozenset(sound[i] for i in part.stuck)
    return replace(part, sampled=tuple(sampled), bad_rows=bad_rows, logprobs=logprobs, stuck=stuck)


def _widen_later(plan: StepPlan, part: PendingStep, sound: tuple[int, ...]) -> PendingStep:
    return lambda: _widen(plan, part(), sound)
