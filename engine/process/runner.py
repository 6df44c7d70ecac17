"""A runner in a separate process, to which plans are sent: `python -m engine.process.runner`.

There is only one runner unless a model is divided; then each rank is one. The executor writes each message to all
runners and waits for all answers, of which the first rank's counts unless one of them is an error. A runner answers
every message once, in order, but starts each message on arrival, so that steps are launched ahead. Messages are
MessagePack, typed and checked on arrival; an array is sent as its type, shape and bytes. Nothing is ever unpickled. The
connection is the process's standard input; when it closes, for whatever reason, the process ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from queue import SimpleQueue
from typing import Any, Literal, get_origin

import msgspec
import numpy as np

from engine import errors
from engine.backends.native.ranks import Ranks, shared_memory
from engine.config import EngineConfig
from engine.errors import AdapterError, EngineDeadError, OctavoError, RankError
from engine.execution.executor import LocalExecutor, LocalReading, ModelFacts, Reading
from engine.execution.memory import is_out_of_memory
from engine.execution.page_content import Bytes
from engine.execution.pending import LateStep
from engine.host.children import be_killed_with_parent, leave_signals_to_parent, start_child, take_standard_input
from engine.host.cpus import cpus_of_rank, engine_environment, memory_nodes, threads_of_rank
from engine.host.logs import LogFormat, adopt_libraries, configure, configured
from engine.interface.adapters import AdapterInfo
from engine.interface.sampling_table import EDIT, TABLE, Masks
from engine.model.adapters import Adapter
from engine.scheduling.plan import Int32, StepPlan, StepResult

logger = logging.getLogger("octavo.process")

_RECORDS = {"table": TABLE, "edits": EDIT}  # types of arrays that we name ourselves


class StartRunner(msgspec.Struct, tag=True):
    """The first message: the engine process's settings for loading and logging. `log_format`: the format of log lines
    on stderr; None: Python's default. `lifeline`: the descriptor of a socket that closes when the engine's process
    ends. `rank`: the runner's number. `memory`: the descriptor of the memory in which several ranks meet."""

    config: EngineConfig
    log_level: int
    log_format: LogFormat | None
    lifeline: int | None = None
    rank: int = 0
    memory: int | None = None


class LaunchStep(msgspec.Struct, tag=True, omit_defaults=True):
    """`Executor.launch`. `masks_follow`: whether the next message has the masks for the plan's sampling."""

    plan: StepPlan
    masks_follow: bool = False


class Filled(msgspec.Struct, tag=True):
    """The masks of the launched step, filled while it computes; None if that failed. This message has no answer."""

    masks: Masks | None


class Copy(msgspec.Struct, tag=True):
    """`Executor.copy_pages`."""

    copies: Int32


class ReadAdapterFiles(msgspec.Struct, tag=True):
    """`Executor.read_adapter`. Its answer is an `AdapterRead`, after those of later messages if reading takes long.
    `number`: distinguishes this message from an earlier one of the same name whose sender has stopped waiting."""

    name: str
    source: str
    number: int = 0


class ReadPage(msgspec.Struct, tag=True):
    """`Content.read`. `kind`: the position in `Executor.contents`."""

    kind: int
    page: int


class WritePages(msgspec.Struct, tag=True):
    """`Content.write`."""

    kind: int
    pages: Int32
    content: Bytes


class FillSlot(msgspec.Struct, tag=True):
    """`Executor.load_adapter`."""

    name: str
    slot: int


class Do(msgspec.Struct, tag=True):
    """A call of a method of `Executor` that returns nothing."""

    method: Literal["unload_adapter", "trial", "release"]
    arguments: list[int] = []


class Failure(msgspec.Struct, tag=True):
    """The error that a message raised."""

    kind: str
    message: str
    out_of_memory: bool

    def error(self) -> Exception:
        """The original exception. Its type is preserved for the engine's own exceptions and for running out of
        memory."""
        own = getattr(errors, self.kind, None)
        if isinstance(own, type) and issubclass(own, OctavoError):
            return own(self.message)
        if self.out_of_memory:
            return MemoryError(f"{self.kind}: {self.message}")
        return RunnerError(f"{self.kind}: {self.message}")


class RunnerAnswer(msgspec.Struct, tag=True, omit_defaults=True):
    """The result of a message: facts at the start, the result of a step, facts about an adapter, a page, or nothing."""

    facts: ModelFacts | None = None
    content: Bytes | None = None
    result: StepResult | None = None
    adapter: AdapterInfo | None = None


class AdapterRead(msgspec.Struct, tag=True):
    """The answer to the `ReadAdapterFiles` of this name and number."""

    name: str
    answer: RunnerAnswer | Failure
    number: int = 0


class RunnerError(RuntimeError):
    """An exception in the runner's process, with its name and message."""


def _pack(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        kind = next((name for name, record in _RECORDS.items() if record == value.dtype), value.dtype.str)
        return kind, value.shape, np.ascontiguousarray(value).tobytes()
    raise TypeError(f"{type(value).__name__} cannot be sent to a runner")


def _unpack(kind: Any, value: Any) -> Any:
    if (get_origin(kind) or kind) is not np.ndarray:
        raise TypeError(f"{kind} cannot be received")
    name, shape, data = value
    # A copy, and so writable.
    return np.frombuffer(bytearray(data), _RECORDS.get(name, name)).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
Order = StartRunner | LaunchStep | Filled | Copy | ReadPage | WritePages | ReadAdapterFiles | FillSlot | Do
_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order, dec_hook=_unpack)
_replies: msgspec.msgpack.Decoder[RunnerAnswer | Failure | AdapterRead] = msgspec.msgpack.Decoder(
    RunnerAnswer | Failure | AdapterRead, dec_hook=_unpack
)


class _Late:
    """The answer to a message, which may not have come yet. `replies`: those of the runners that have come."""

    def __init__(self, executor: ProcessExecutor, runners: int):
        self._executor = executor
        self.replies: list[RunnerAnswer | Failure | None] = [None] * runners

    @property
    def reply(self) -> RunnerAnswer | Failure | None:
        """The runners' answer, once all have replied: the cause of an error if there is one."""
        if None in self.replies:
            return None
        failures = [reply for reply in self.replies if isinstance(reply, Failure)]
        causes = [failure for failure in failures if failure.kind != RankError.__name__]
        return next(iter(causes or failures or self.replies))

    @property
    def ready(self) -> bool:
        """Whether `result` returns without waiting."""
        return self._executor.await_reply(self, wait=False)

    def answer(self) -> RunnerAnswer:
        """The result of the message; waits for it. Raises the exception that the message raised."""
        self._executor.await_reply(self, wait=True)
        reply = self.reply
        assert reply is not None
        if isinstance(reply, Failure):
            raise reply.error()
        return reply

    def result(self) -> StepResult:
        """The step's result; waits for it."""
        result = self.answer().result
        assert result is not None
        return result


class _Reading(_Late):
    """An adapter that the process reads."""

    def __init__(self, executor: ProcessExecutor, runners: int, name: str, number: int):
        super().__init__(executor, runners)
        self.name, self.number = name, number

    def wait(self) -> None:
        """`Reading.wait`."""
        self.answer()


class _Remote:
    """`Content` of the runner's process."""

    def __init__(self, executor: ProcessExecutor, kind: int, size: int):
        self._executor, self._kind, self.size = executor, kind, size

    def read(self, page: int) -> Callable[[], Bytes]:
        late = self._executor.send(ReadPage(self._kind, page))

        def wait() -> Bytes:
            content = late.answer().content
            assert content is not None
            return content

        return wait

    def write(self, pages: Sequence[int], content: Bytes) -> None:
        self._executor.send(WritePages(self._kind, np.array(pages, dtype=np.int32), content)).answer()


class ProcessExecutor:
    """The engine's side of the connection. Raises OctavoError: why the model cannot be loaded, with the type raised in
    the process; EngineDeadError: the process ended without a message."""

    def __init__(self, config: EngineConfig):
        self._runners: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lifelines: list[socket.socket] = []  # they close with this process, and the kernel kills the runners
        self._expected: deque[_Late] = deque()
        self._reading: dict[str, _Reading] = {}  # adapters that are being read, by name
        self._num_read = 0  # adapters, so far
        self._dead: EngineDeadError | None = None
        self._mutex = threading.RLock()  # the threads that move pages between memory and a disk send messages, too
        count = config.tensor_parallel_size
        memory = shared_memory(count) if count > 1 else None
        try:
            lifelines = [self._begin(config, memory) for _ in range(count)]
            level = logging.getLogger().getEffectiveLevel()
            starts = [
                StartRunner(config, level, configured(), lifeline, rank, memory)
                for rank, lifeline in enumerate(lifelines)
            ]
            facts = self.send(*starts).answer().facts
        except BaseException:
            self.close()
            raise
        finally:
            if memory is not None:
                os.close(memory)
        assert facts is not None
        self.facts: ModelFacts = facts

    def _begin(self, config: EngineConfig, memory: int | None) -> int:
        """Start a runner; returns its descriptor of a lifeline."""
        threads = threads_of_rank(config.threads, config.tensor_parallel_size)
        ours, theirs = socket.socketpair()
        self._lifelines.append(ours)
        with theirs:
            shared = (theirs.fileno(),) if memory is None else (theirs.fileno(), memory)
            line, process = start_child(f"{__package__}.runner", engine_environment(threads), pass_fds=shared)
            self._runners.append(Connection(line.detach()))
            self._processes.append(process)
            return theirs.fileno()

    @property
    def pid(self) -> int:
        """The id of the first runner's process."""
        return self.pids[0]

    @property
    def pids(self) -> list[int]:
        """The ids of the runners' processes, by rank."""
        return [process.pid for process in self._processes]

    def launch(self, plan: StepPlan) -> LateStep:
        batch = plan.sampling
        if batch is None or batch.fill is None:
            return LateStep(candidates=self.send(LaunchStep(plan)))
        with self._mutex:  # no thread sends a message between the two
            late = self.send(LaunchStep(replace(plan, sampling=replace(batch, fill=None)), masks_follow=True))
            masks: Masks | None = None
            try:
                masks = batch.fill()
            finally:
                self._post(Filled(masks))
        return LateStep(candidates=late)

    def copy_pages(self, copies: Int32) -> None:
        self.send(Copy(copies)).answer()

    def contents(self) -> list[_Remote]:
        return [_Remote(self, kind, size) for kind, size in enumerate(self.facts.content_sizes)]

    def read_adapter(self, name: str, source: Adapter | str) -> _Reading:
        if not isinstance(source, str):
            raise AdapterError("a runner in its own process loads adapters from files. Give the adapter's path.")
        self._num_read += 1
        reading = self._reading[name] = _Reading(self, len(self._runners), name, self._num_read)
        self._post(ReadAdapterFiles(name, source, reading.number))
        return reading

    def load_adapter(self, reading: Reading, slot: int) -> AdapterInfo:
        assert isinstance(reading, _Reading)
        late = self.send(FillSlot(reading.name, slot))
        try:
            info = late.answer().adapter
        except EngineDeadError:
            raise
        except Exception:
            self.unload_adapter(slot)  # other ranks may have filled the slot
            raise
        assert info is not None
        parts = [
            reply.adapter for reply in late.replies if isinstance(reply, RunnerAnswer) and reply.adapter is not None
        ]
        if len(parts) == 1:
            return info
        whole = hashlib.blake2b(b"".join(part.digest for part in parts), digest_size=len(info.digest))
        return replace(info, digest=whole.digest(), num_bytes=sum(part.num_bytes for part in parts))

    def unload_adapter(self, slot: int) -> None:
        self.send(Do("unload_adapter", [slot])).answer()

    def trial(self) -> None:
        self.send(Do("trial")).answer()

    def release(self) -> None:
        self.send(Do("release")).answer()

    @property
    def watched(self) -> list[int]:
        return [runner.fileno() for runner in self._runners]

    def check(self) -> None:
        with self._mutex:
            for rank, runner in enumerate(self._runners):
                while runner.poll():
                    self._receive(rank)

    def close(self) -> None:
        for runner in self._runners:
            runner.close()
        for process in self._processes:
            try:
                process.wait(2.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for lifeline in self._lifelines:
            lifeline.close()

    def await_reply(self, late: _Late, *, wait: bool) -> bool:
        """Read replies until this one has arrived or none is left; returns whether it has arrived. Raises
        EngineDeadError if a process has ended, or a rank did not come."""
        while late.reply is None:
            with self._mutex:
                lacking = {self._runners[rank]: rank for rank, reply in enumerate(late.replies) if reply is None}
                if not lacking:  # another thread has read them
                    break
                try:
                    ready = wait_for(list(lacking), None if wait else 0)
                except OSError as error:  # `_undivided` closed them
                    raise self._ended(min(lacking.values())) from error
                for runner in ready:
                    assert isinstance(runner, Connection)
                    self._receive(lacking[runner])
                if not ready:
                    return False
        return True

    def _receive(self, rank: int) -> None:
        try:
            with self._undivided():
                reply = _replies.decode(self._runners[rank].recv_bytes())
                if isinstance(reply, AdapterRead):
                    reading = self._reading.get(reply.name)
                    if reading is not None and reading.number == reply.number:
                        reading.replies[rank] = reply.answer
                        if reading.reply is not None:
                            del self._reading[reply.name]
                    return
                next(late for late in self._expected if late.replies[rank] is None).replies[rank] = reply
                while self._expected and self._expected[0].reply is not None:
                    self._expected.popleft()
        except (EOFError, OSError) as error:
            raise self._ended(rank) from error
        if isinstance(reply, Failure) and isinstance(problem := reply.error(), EngineDeadError):
            raise self._die(problem)

    @contextlib.contextmanager
    def _undivided(self) -> Iterator[None]:
        """A context for sending a message: if it is interrupted, for example by Ctrl-C, later messages could not be
        understood."""
        try:
            yield
        except (EOFError, OSError):
            raise
        except BaseException:
            for runner in self._runners:
                runner.close()
            raise

    def send(self, *messages: msgspec.Struct) -> _Late:
        """Send a message that is answered to all runners, or one to each."""
        late = _Late(self, len(self._runners))
        self._post(*messages, late=late)
        return late

    def _post(self, *messages: msgspec.Struct, late: _Late | None = None) -> None:
        if self._dead is not None:
            raise self._dead
        encoded = [_encoder.encode(message) for message in messages]
        rank = 0
        try:
            with self._mutex, self._undivided():
                if late is not None:
                    self._expected.append(late)
                for rank, runner in enumerate(self._runners):
                    runner.send_bytes(encoded[rank % len(encoded)])
        except OSError as error:
            raise self._ended(rank) from error

    def _ended(self, rank: int) -> EngineDeadError:
        """The error that a runner's process has ended, which is the answer to everything from now on."""
        process, count = self._processes[rank], len(self._runners)
        try:
            status = f"with status {process.wait(0.3)}"
        except subprocess.TimeoutExpired:
            status = "its connection is closed"
        name = f"the process {process.pid} of rank {rank} of {count}"
        if count == 1:
            name = f"the runner's process {process.pid}"
        return self._die(EngineDeadError(f"{name} has ended ({status}); start the engine again."))

    def _die(self, error: EngineDeadError) -> EngineDeadError:
        """Answer everything with this error from now on, and end all runners: one that hangs would keep its memory."""
        self._dead = error
        for process in self._processes:
            process.kill()
        return error


def main() -> None:
    """Load what the first message asks for, and carry out the others until the connection closes."""
    leave_signals_to_parent()
    line = Connection(take_standard_input().detach())
    held: list[socket.socket] = []
    with contextlib.suppress(OSError):  # the engine is gone
        _serve(line, gone=lambda: os._exit(0), hold=lambda lifeline: held.append(_held(lifeline)))


def _held(lifeline: int) -> socket.socket:
    found = socket.socket(fileno=lifeline)
    be_killed_with_parent(found)
    return found


def _serve(
    line: Connection, gone: Callable[[], None] = lambda: None, hold: Callable[[int], object] = lambda lifeline: None
) -> None:
    """Serve until the connection closes; then `gone` is called at once on another thread. `hold` is called with the
    descriptor of the lifeline.

    One thread reads messages and one answers, whatever is being computed. So the two sides never block each other with
    large writes, and steps are launched ahead of answers.
    """
    orders: SimpleQueue[bytes | None] = SimpleQueue()
    threading.Thread(target=_read, args=(line, orders, gone), name="octavo-orders", daemon=True).start()
    first = orders.get()
    if first is None:
        return
    start = _orders.decode(first)
    assert isinstance(start, StartRunner)
    if start.lifeline is not None:
        hold(start.lifeline)
    if start.log_format is None:
        logging.basicConfig(level=start.log_level)
    else:
        configure(start.log_level, start.log_format)
    from engine.execution import starting  # heavy

    if start.log_format is not None:
        adopt_libraries()
    ranks = None
    if start.memory is not None:
        count = start.config.tensor_parallel_size
        if (cpus := cpus_of_rank(start.rank, count, memory_nodes())) is not None:
            os.sched_setaffinity(0, cpus)
        ranks = Ranks(start.rank, count, start.memory)
        os.close(start.memory)
    try:
        executor = starting.start(start.config) if ranks is None else starting.start(start.config, ranks=ranks)
    except Exception as error:
        line.send_bytes(_encoder.encode(_failure(error)))
        return
    line.send_bytes(_encoder.encode(RunnerAnswer(facts=executor.facts)))
    due: SimpleQueue[LateStep | RunnerAnswer | Failure | AdapterRead] = SimpleQueue()
    read: dict[str, LocalReading] = {}  # adapters that are not in their slots yet, by name
    threading.Thread(target=_answer, args=(line, due, gone), name="octavo-answers", daemon=True).start()
    while (data := orders.get()) is not None:
        order = _orders.decode(data)
        if isinstance(order, LaunchStep) and order.masks_follow:
            due.put(_launch_masked(executor, order.plan, orders))
        elif isinstance(order, ReadAdapterFiles):
            _read_adapter(executor, order, due, read)
        else:
            due.put(_carry_out(executor, order, read))


def _read(line: Connection, orders: SimpleQueue[bytes | None], gone: Callable[[], None]) -> None:
    """Pass on the engine's messages, and None at the end, which does not wait for a load or step that hangs."""
    try:
        while True:
            orders.put(line.recv_bytes())
    except (EOFError, OSError):
        orders.put(None)
        gone()


def _read_adapter(
    executor: LocalExecutor,
    order: ReadAdapterFiles,
    due: SimpleQueue[LateStep | RunnerAnswer | Failure | AdapterRead],
    read: dict[str, LocalReading],
) -> None:
    """Read an adapter on another thread, and answer. `read` has it from now on, unless it cannot be loaded: another
    runner of the model may have read it earlier, and then this one has to load it before it is read."""
    reading = read[order.name] = executor.read_adapter(order.name, order.source)

    def answer(future: Future[Any]) -> None:
        error = future.exception()
        if error is not None and read.get(order.name) is reading:
            del read[order.name]
        due.put(AdapterRead(order.name, RunnerAnswer() if error is None else _failure(error), order.number))

    reading.future.add_done_callback(answer)


def _answer(
    line: Connection, due: SimpleQueue[LateStep | RunnerAnswer | Failure | AdapterRead], gone: Callable[[], None]
) -> None:
    try:
        while True:
            line.send_bytes(_encoder.encode(_reply(due.get())))
    except OSError:  # the engine is gone, which the other thread notices, too
        return
    except BaseException:  # else the engine would wait forever
        logger.exception("an answer could not be sent")
        gone()


def _launch_masked(executor: LocalExecutor, plan: StepPlan, orders: SimpleQueue[bytes | None]) -> LateStep | Failure:
    """Launch a step. The next message holds the step's masks; the step waits for them when it needs them."""
    taken: list[Filled] = []

    def take() -> Masks:
        if not taken:
            data = orders.get()
            filled = None if data is None else _orders.decode(data)
            taken.append(filled if isinstance(filled, Filled) else Filled(None))
        masks = taken[0].masks
        if masks is None:
            raise RunnerError("the masks of the step could not be filled")
        return masks

    try:
        assert plan.sampling is not None
        return executor.launch(replace(plan, sampling=replace(plan.sampling, fill=take)))
    except Exception as error:
        return _failure(error)
    finally:
        if not taken:  # the step failed earlier: the message is not for the next step
            with contextlib.suppress(RunnerError):
                take()


def _carry_out(
    executor: LocalExecutor, order: Order, read: dict[str, LocalReading]
) -> LateStep | RunnerAnswer | Failure:
    try:
        if isinstance(order, LaunchStep):
            return executor.launch(order.plan)
        if isinstance(order, Copy):
            executor.copy_pages(order.copies)
        elif isinstance(order, ReadPage):
            return RunnerAnswer(content=executor.contents()[order.kind].read(order.page)())
        elif isinstance(order, WritePages):
            executor.contents()[order.kind].write(order.pages.tolist(), order.content)
        elif isinstance(order, FillSlot):
            return RunnerAnswer(adapter=executor.load_adapter(read.pop(order.name), order.slot))
        elif isinstance(order, Do):
            getattr(executor, order.method)(*order.arguments)
        else:
            raise RunnerError(f"{type(order).__name__} is not an order that a runner process takes")
        return RunnerAnswer()
    except Exception as error:
        return _failure(error)


def _reply(due: LateStep | RunnerAnswer | Failure | AdapterRead) -> RunnerAnswer | Failure | AdapterRead:
    if not isinstance(due, LateStep):
        return due
    try:
        return RunnerAnswer(result=due.result())
    except Exception as error:
        return _failure(error)


def _failure(error: BaseException) -> Failure:
    if not isinstance(error, OctavoError) and not is_out_of_memory(error):
        logger.error("the runner failed", exc_info=error)
    return Failure(type(error).__name__, str(error), is_out_of_memory(error))


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # do not wait for libraries' threads
