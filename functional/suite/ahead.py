"""Rollouts ahead of training: a thread generates the samples of later steps, as far as a bound on their age allows."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from functional.runtime.errors import InterruptedRunError, RolloutError, RunError
from functional.runtime.rollout.completion import Completion

LOOK_S = 0.5
"""How often who waits for the thread looks whether anything else has ended the wait."""


class StoppedError(InterruptedRunError):
    """The rollouts under way are not wanted any more."""


class Ahead:
    """Generates step after step in a thread of its own, and keeps what is finished until its step is trained.

    Before step s the trainer has policy version s - 1 at most. So what version v makes for step s is s - 1 - v versions
    old at most, and generation for it begins once v is new enough, or the trainer itself waits for it: after updates
    that failed its version is a lower one, which the fleet has too.
    """

    def __init__(
        self,
        generate: Callable[[int], list[Completion]],
        version: Callable[[], int],
        steps: range,
        bound: int,
    ) -> None:
        """generate: the samples of a step, in this object's thread, in which it must ask `look` often; version: of the
        fleet; bound: versions that a sample may be behind the trainer."""
        self._generate = generate
        self._version = version
        self._steps = steps
        self._bound = bound
        self._finished: dict[int, list[Completion]] = {}
        self._failure: BaseException | None = None
        self._wanted = 0
        self._stopped = self._held = self._busy = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="rollouts ahead", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def give_up(self) -> None:
        """Have the thread end at its next look."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def stop(self, patience_s: float) -> None:
        """End the thread, and what it has under way. Raises RunError when it is still there after `patience_s`."""
        self.give_up()
        if self._thread.ident is None:
            return
        self._thread.join(patience_s)
        if self._thread.is_alive():
            raise RunError(f"the thread of rollouts ahead is still there {patience_s:g} s after it was to end")

    def look(self) -> None:
        """Raises StoppedError once nobody wants what is under way."""
        if self._stopped:
            raise StoppedError("rollouts ahead were stopped")

    def notice(self) -> None:
        """The fleet may have another version."""
        with self._changed:
            self._changed.notify_all()

    def take(self, step: int, trained: int, check: Callable[[], None]) -> list[Completion]:
        """The samples of a step, once they are there. trained: the trainer's version; check is called all along, and
        what it raises ends the wait. Raises what generation ended with, and RolloutError for a sample beyond the
        bound, which must not be trained on."""
        with self._changed:
            self._wanted = step
            self._changed.notify_all()
            while step not in self._finished:
                if self._failure is not None:
                    raise self._failure
                if not self._thread.is_alive():
                    raise RolloutError(f"rollouts ahead ended before those of step {step}")
                self._changed.wait(LOOK_S)
                check()
            completions = self._finished.pop(step)
        for completion in completions:
            made = completion.policy_version
            if made is None or not 0 <= trained - made <= self._bound:
                raise RolloutError(
                    f"step {step}: request {completion.request_id} was answered by policy version {made}, and the "
                    f"trainer has {trained}: more than {self._bound} apart (grpo.async_grpo.max_trajectory_age_steps)"
                )
        return completions

    def finished(self) -> list[Completion]:
        """What waits for its step."""
        with self._changed:
            return [completion for completions in self._finished.values() for completion in completions]

    @contextmanager
    def held(self, check: Callable[[], None]) -> Iterator[None]:
        """Nothing is under way meanwhile. check: as `take` has it."""
        with self._changed:
            self._held = True
        try:
            with self._changed:
                while self._busy:
                    self._changed.wait(LOOK_S)
                    check()
            yield
        finally:
            with self._changed:
                self._held = False
                self._changed.notify_all()

    def _work(self) -> None:
        try:
            for step in self._steps:
                self._await_turn(step)
                completions = self._generate(step)
                with self._changed:
                    self._finished[step] = completions
                    self._busy = False
                    self._changed.notify_all()
        except StoppedError:
            pass
        except BaseException as failure:  # whatever it is, the run must end with it
            self._failure = failure
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _await_turn(self, step: int) -> None:
        """Wait until generation for the step may begin. Raises StoppedError."""
        with self._changed:
            while not self._may_begin(step):
                self.look()
                self._changed.wait()
            self.look()
            self._busy = True

    def _may_begin(self, step: int) -> bool:
        return not self._held and (step == self._wanted or step - 1 - self._version() <= self._bound)
