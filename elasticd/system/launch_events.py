"""The events of a launcher's job, as its agent passes them on: one line each for the launcher's terminal."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from elasticd.backoff import Backoff
from elasticd.codec.message import encode
from elasticd.codec.safe_text import in_one_line
from elasticd.version import __version__
from elasticd.wire import unix_socket
from elasticd.wire.launch import FollowEvents, Following, Happened
from elasticd.wire.worker import to_worker

#: Seconds for an agent that is started beside the launcher, and for its answer.
AGENT_SECONDS, ANSWER_SECONDS = 5.0, 2.0
#: Seconds between attempts to reach an agent that is gone: doubled from the first to the second.
_AWAY = (0.2, 5.0)


class LaunchLink:
    """A launcher's connection to its agent, in a thread, made again when the agent was started again.

    Args:
        path: the agent's socket.
        job: its name.
        happened: called with each event of the job.
    """

    def __init__(self, path: str, job: str, happened: Callable[[Happened], None]) -> None:
        self._path, self._job, self._happened = path, job, happened
        self.refusal = ""  # why there is no agent, and what to do
        self._slots: tuple[int, ...] = ()
        self._known = threading.Condition()  # of what follows
        self._following: Following | None = None  # the answer to what was asked last
        self._unanswered = 0  # questions on the present connection; answers come in their order
        self._without_agent = False
        self._sock: socket.socket | None = None
        self._ended = False
        threading.Thread(target=self._run, name="elasticd-launch-link", daemon=True).start()

    def following(self) -> Following | None:
        """The devices of this node; None where no agent says so in time."""
        return self._answer(AGENT_SECONDS + ANSWER_SECONDS)

    def take(self, slots: tuple[int, ...]) -> Following | None:
        """Reserves these devices in place of those before, until this launcher hangs up. The agent's answer; if
        it says that another job uses one of them, none is reserved. None where no agent answers."""
        with self._known:
            self._slots, self._following = slots, None
            if self._sock is not None:
                self._follow(self._sock)
        return self._answer(ANSWER_SECONDS)

    def _answer(self, seconds: float) -> Following | None:
        with self._known:
            self._known.wait_for(lambda: self._following is not None or self._without_agent, seconds)
            return self._following

    def _follow(self, sock: socket.socket) -> None:
        """Asks, with the lock."""
        self._unanswered += 1
        with contextlib.suppress(OSError):  # the next connection asks again
            unix_socket.send(sock, encode(FollowEvents(job=self._job, slots=self._slots, release=__version__)))

    def close(self) -> None:
        """Hangs up, once what the agent has said is told."""
        self._ended = True
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def _connected(self, patience: float) -> socket.socket:
        try:
            return unix_socket.connect(self._path, patience)
        except OSError as error:
            self.refusal = str(error)
            raise

    def _run(self) -> None:
        pause, patience = Backoff(*_AWAY), AGENT_SECONDS
        while not self._ended:
            with contextlib.suppress(OSError, msgspec.DecodeError):
                sock = self._connected(patience)
                with self._known:
                    self._sock, self._unanswered, self._following = sock, 0, None
                    self._follow(sock)
                while (data := unix_socket.receive(sock)) is not None:
                    answer = to_worker(data)
                    if isinstance(answer, Following):
                        self._take_answer(answer)
                        pause.reset()
                    elif isinstance(answer, Happened):
                        self._happened(answer)
            with self._known:
                if self._sock is None:
                    self._without_agent = True
                    self._known.notify_all()
                else:
                    self._sock.close()
            patience = 0.0
            time.sleep(pause.next())

    def _take_answer(self, answer: Following) -> None:
        """An answer to a question that was asked anew since says nothing."""
        with self._known:
            self._unanswered -= 1
            if not self._unanswered:
                self._following, self._without_agent = answer, False
                self._known.notify_all()


class LaunchLines:
    """One line for each event that a user at a terminal waits for."""

    def __init__(self) -> None:
        self._devices: list[str] = []
        self._plans: dict[int, str] = {}
        self._fault = ""
        self._gone: list[str] = []
        self.begun = False  # a plan was recorded since the launch

    def line(self, event: Happened) -> str:
        """The line; empty for an event that is only a part of another one's."""
        match event.kind:
            case "job_gathered":
                self._devices = [str(device) for device in event.data.get("nodes", ())]
                return ""
            case "proposed":
                self._plans[_number(event)] = event.text
                return ""
            case "fenced":
                self._fault = event.text.partition(": ")[2] or event.text
                self._gone = [str(device) for device in event.data.get("gone", ())]
                return ""
            case "recorded":
                return in_one_line(self._recorded(event))
            case "finished" | "stopped":
                text = event.text.removeprefix("stopped: ") if event.data.get("requested") else event.text
                return in_one_line(f"job {event.job} {text}")
        return in_one_line(event.text)

    def _recorded(self, event: Happened) -> str:
        number = _number(event)
        reason = self._plans.pop(number, "").removeprefix(f"plan {number}: ")
        fault, self._fault = self._fault, ""
        begun, self.begun = self.begun, True
        step, again = event.data.get("step", 0), event.data.get("again", 0)
        if fault:
            without = f" without {', '.join(self._gone)}" if self._gone else ""
            repeated = f"; {again} {'step is' if again == 1 else 'steps are'} made again" if again else ""
            return f"{fault}; plan {number}{without} goes on from step {step}{repeated}"
        if not begun and self._devices:
            page = event.data.get("page", "")
            where = f"; {page}" if page else ""
            return f"job {event.job} on {', '.join(self._devices)}: plan {number}: {reason}{where}"
        return f"plan {number} from step {step} on: {reason}"


def _number(event: Happened) -> int:
    number = event.data.get("number", 0)
    return number if isinstance(number, int) else 0
