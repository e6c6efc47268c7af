"""The engine: three threads that turn a batcher's plans into steps.

    planner    owns the batcher and its block pool; runs posted commands between steps, without waiting for one
               (but for the step that a stretch is at: a command ends it)
    executor   runs the runner, one step after the other; owns nothing
    collector  waits for what a runner only launched, in its order, while the executor launches the next

Everything reaches the planner through one inbox, so it sleeps when there is nothing to do and no wake-up is lost.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from ctypes import c_int32
from dataclasses import replace
from functools import partial
from typing import TypeVar

from shared.contracts.errors import Unavailable
from shared.engine.batcher import Batcher
from shared.engine.engine_parts import (
    Again,
    Blocks,
    Command,
    Done,
    Launched,
    Limits,
    PendingStep,
    Runner,
    Steps,
    Stop,
    Zeroed,
    Zeroing,
    widen,
    widen_later,
    zeroed,
)
from shared.engine.sequence_update import SequenceUpdate
from shared.engine.step_plan import StepOutput, StepPlan
from shared.engine.step_time import StepObservation, observed

T = TypeVar("T")


class Engine:
    """Runs a batcher's sequences; up to depth + 1 steps are planned and not yet committed.

    Callbacks run on the planner thread and must not block: hand over and return. What they raise is reported to
    `on_error` and changes nothing.

    Args:
        on_updates: what steps and commands changed, in order; never an empty list.
        on_error: a step that failed, or a fault in a callback; the engine goes on.
        on_step: tokens, sequences, context and seconds of each step that succeeded.
        idle_tick_s: how often `progress` advances when nothing runs.
        again: computes the step last run over and over within limits, each row with the token it drew, and answers
            what they draw; None where that cannot be or a row is bad. Called by the executor thread; calls what it is
            given when it has made everything ready, so that who wakes by that does not wait for the interpreter.

    Attributes:
        on_drawn: what steps of a stretch drew that another was begun behind, by the executor thread; `on_updates` tells
            it again when the stretch has ended. There are stretches only if both `again` and this are given.
        quiet_until: given when a step of a stretch ended (monotonic) and how long it took, in seconds, until when
            nobody wants to hear of those behind it: so long they are told together. Called by the executor thread.
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
        again: Again | None = None,
    ) -> None:
        self.on_drawn: Callable[[StepPlan, Steps], None] | None = None
        self.quiet_until: Callable[[float, float], float] = lambda ended_at, step_s: ended_at
        self._batcher = batcher
        self._runner = runner
        self._on_updates = on_updates
        self._on_error = on_error
        self._on_step = on_step
        self._idle_tick_s = idle_tick_s
        self._again = again
        self._inbox: queue.SimpleQueue[Command | Done | Zeroed | Stop] = queue.SimpleQueue()
        self._work: queue.SimpleQueue[StepPlan | Blocks | Stop] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[Launched | Zeroing | Stop] = queue.SimpleQueue()
        self._lock = threading.Lock()  # between who posts, and a planner that begins a stretch or leaves
        self._closed = False
        self._stopping = False
        self._interrupted = c_int32(0)  # not 0: a stretch has to end with the step it is at
        self._orders: list[Command | Stop] = []  # posted during a stretch
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
        self._inbox.put(Stop())
        self._interrupted.value = 1
        threads = (self._planner, self._executor, self._collector)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def call(self, fn: Callable[[Batcher], T], *, at_once: bool = True) -> Future[T]:
        """Run `fn` on the planner thread, between steps, in the order posted. Waits for no step in flight but the one
        that a stretch is at.

        Args:
            at_once: False waits for a stretch to end by itself.

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
                self._inbox.put(Command(run, refuse))
                if at_once:  # both under the lock: a mark that came late would end the stretch behind this order
                    self._interrupted.value = 1
                return future
        refuse()
        return future

    # ------------------------------------------------------------------------------------- planner thread

    def _plan_loop(self) -> None:
        while not (self._stopping and self._executor_is_idle()):
            for item in self._take_inbox():
                self._try_to_handle(item)
                if isinstance(item, Done):
                    orders, self._orders = self._orders, []
                    for order in orders:
                        self._try_to_handle(order)
            # while a step is out, a turn of this loop is no progress
            if self._executor_is_idle():
                self._progress += 1
            try:
                self._advance()
            except Exception as exc:
                self._report_error(exc)
            # last: whoever hears of it wants the interpreter, and the executor its next step first
            self._publish()
        self._work.put(Stop())
        self._close()

    def _close(self) -> None:
        with self._lock:
            self._closed = True
        # nothing can be posted any more: what is left was posted while stopping
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, Command):
                item.refuse()

    def _executor_is_idle(self) -> bool:
        return self._batcher.num_in_flight == 0 and self._zeroing == 0

    def _take_inbox(self) -> list[Command | Done | Zeroed | Stop]:
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

    def _try_to_handle(self, item: Command | Done | Zeroed | Stop) -> None:
        try:
            self._handle(item)
        except Exception as exc:
            self._report_error(exc)

    def _handle(self, item: Command | Done | Zeroed | Stop) -> None:
        match item:
            case Command() | Stop() if self._batcher.is_stretching:
                self._orders.append(item)
            case Done():
                self._end_step(item)
            case Command():
                self._publish()  # its answer must not overtake what came before it
                if self._stopping:
                    item.refuse()
                else:
                    item.run()
            case Zeroed(blocks, None):
                self._zeroing -= 1
                self._batcher.zeroed(blocks)
            case Zeroed(blocks, error):
                self._zeroing -= 1
                self._batcher.not_zeroed(blocks)
                self._report_error(error)
            case Stop():
                self._stopping = True

    def _end_step(self, done: Done) -> None:
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
                for observation in observed(plan, done.duration_s, result.repeats):
                    self._on_step(observation)
            except Exception as exc:
                self._report_error(exc)
        self._progress += 1

    def _advance(self) -> None:
        """Hand the executor all it may have: blocks to zero first, then steps up to the depth."""
        self._batcher.expire(time.monotonic())
        self._have_zeroed()
        may_stretch = self._may_stretch()
        while not self._stopping:
            plan = self._batcher.plan(time.monotonic(), may_stretch=may_stretch)
            if plan is None:
                self._have_zeroed()  # of who gave way: somebody may wait for it, and is planned when it is done
                return
            if plan.repeats > 1:  # its tokens are told by another thread, and must not overtake those before them
                self._publish()
            self._work.put(plan)

    def _have_zeroed(self) -> None:
        blocks = self._batcher.take_blocks_to_zero()
        if blocks:
            self._zeroing += 1
            self._work.put(blocks)

    def _may_stretch(self) -> bool:
        if self._again is None or self.on_drawn is None or self._batcher.is_stretching:
            return False
        with self._lock:  # what is posted from now on raises it
            self._interrupted.value = 0
            return self._inbox.empty()

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
                case Stop():
                    self._launched.put(work)
                    return
                case StepPlan():
                    self._run(work)
                case _:
                    self._zero(work)

    def _run(self, plan: StepPlan) -> None:
        """Run a step without the rows that a step planned before it, and failed since, should have fed."""
        lost = self._lost(plan) if self._broken else frozenset[str]()
        started = time.monotonic()
        result: StepOutput | Exception | PendingStep
        try:
            if not lost or lost.isdisjoint(row.seq_id for row in plan.sequences):
                result = self._runner.run(plan)
                if plan.repeats > 1 and isinstance(result, StepOutput):
                    result = self._stretch(plan, result, started)
            elif sound := tuple(i for i, row in enumerate(plan.sequences) if row.seq_id not in lost):
                part = self._runner.run(replace(plan, sequences=tuple(plan.sequences[i] for i in sound)))
                result = widen(plan, part, sound) if isinstance(part, StepOutput) else widen_later(plan, part, sound)
            else:
                result = widen(plan, StepOutput(plan.step, ()), ())
        except Exception as exc:
            result = exc
        if isinstance(result, Exception):
            self._note_broken(plan)
        self._launches = self._launches or not isinstance(result, StepOutput | Exception)
        if self._launches:  # steps end in order, also those that never began
            self._launched.put(Launched(plan, result, started))
        else:
            assert isinstance(result, StepOutput | Exception)
            self._inbox.put(Done(plan, result, time.monotonic() - started))

    def _stretch(self, plan: StepPlan, first: StepOutput, started: float) -> StepOutput:
        """Go on behind the first step of a stretch until all its steps are computed, its time is over, a row ends or
        somebody wants the planner."""
        again, tell = self._again, self.on_drawn
        if first.bad_rows or again is None or tell is None:
            return first
        untold: Steps = [(time.monotonic(), [tokens[0] for tokens in first.sampled])]
        steps, begun, until = list(untold), started, started + self._batcher.config.stretch_s
        while len(steps) < plan.repeats and not self._interrupted.value and plan.ending.isdisjoint(untold[-1][1]):
            ended = untold[-1][0]
            if ended >= until:  # steps take longer than they were thought to
                break
            quiet = min(until, self.quiet_until(ended, ended - begun))
            limits = Limits(plan.repeats - len(steps), quiet, plan.ending, self._interrupted)
            try:
                more = again(partial(tell, plan, untold), limits)
            except Exception as exc:  # the step is planned anew, and fails for good if it does again
                self._report_error(exc)
                break
            if more is None:
                break
            steps += more
            begun, untold = steps[-2][0], more
        taken_s = time.monotonic() - started
        sampled = zip(*[drawn for _, drawn in steps], strict=True)
        return StepOutput(plan.step, tuple(sampled), duration_s=taken_s, repeats=len(steps))

    def _lost(self, plan: StepPlan) -> frozenset[str]:
        """Sequences of failed steps that were planned when this plan was."""
        oldest = plan.step - self._batcher.config.depth
        return frozenset[str]().union(*(seq_ids for step, seq_ids in tuple(self._broken) if step >= oldest))

    def _zero(self, blocks: Blocks) -> None:
        try:
            wait = self._runner.zero_blocks(blocks)
        except Exception as exc:
            self._inbox.put(Zeroed(blocks, exc))
            return
        if wait is None:
            self._inbox.put(Zeroed(blocks, None))
        else:  # until then they are nobody's: whoever gets them may fill them by another way than a step
            self._launched.put(Zeroing(blocks, wait))

    def _note_broken(self, plan: StepPlan) -> None:
        self._broken.append((plan.step, frozenset(row.seq_id for row in plan.sequences)))

    # ------------------------------------------------------------------------------------- collector thread

    def _collect_loop(self) -> None:
        last_end = 0.0
        while not isinstance(launched := self._launched.get(), Stop):
            if isinstance(launched, Zeroing):
                self._inbox.put(zeroed(launched.blocks, launched.wait))
                continue
            result = launched.result
            if not isinstance(result, StepOutput | Exception):
                try:
                    result = result()
                except Exception as exc:
                    result = exc
                    self._note_broken(launched.plan)
            end = time.monotonic()
            # a step launched while the one before ran began when that one ended
            self._inbox.put(Done(launched.plan, result, end - max(launched.started, last_end)))
            last_end = end
