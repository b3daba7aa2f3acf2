"""The demo's settings: its cluster, its job and the lengths of its phases, as one value."""

from __future__ import annotations

from pathlib import Path

from elasticd_planner.value import Value, refuse

JOB = "demo"


class DemoScenario(Value, frozen=True, kw_only=True):
    """forward and backward: seconds that a token takes in one whole block on a normal emulated device. Half a
    block then takes 60 ms for a micro-batch, long enough for communication on two cores to stay small beside
    it. memory: bytes of an emulated device, too few for a whole replica (the report checks that).

    The phases are lengths in steps: what each must have run before the next begins. `steps` bounds them all,
    and leaves room for a plan more than usual.
    """

    nodes: tuple[str, ...] = ("alpha", "beta")
    devices: int = 2
    slow_device: str = "alpha/1"
    factor: float = 3.0
    forward: float = 0.12 / 128 / 3
    backward: float = 0.12 / 128 * 2 / 3
    memory: int = 5_600 * 1024
    layers: int = 5
    global_batch: int = 6
    micro_batch: int = 1
    tokens: int = 128
    steps: int = 80
    healthy_steps: int = 14
    replanned_steps: int = 17
    recovered_steps: int = 12

    def __post_init__(self) -> None:
        if self.steps < self.least_steps:
            refuse(
                f"--steps {self.steps} is too few for the demo: its phases alone take {self.least_steps}; "
                f"leave the option out, or ask for {self.least_steps + 10} or more"
            )

    @property
    def least_steps(self) -> int:
        """The phases, the steps of the first plan, and those that two detections and switches take."""
        return 2 * self.healthy_steps + self.replanned_steps + self.recovered_steps + 10

    @property
    def training(self) -> tuple[str, ...]:
        """The options of the training script, the same for the job and for its reference."""
        return (
            *("--layers", str(self.layers), "--global-batch", str(self.global_batch)),
            *("--micro-batch", str(self.micro_batch), "--tokens", str(self.tokens)),
            *("--steps", str(self.steps)),
        )

    def configuration(self, etcd: str, state: str) -> str:
        """The TOML that every process of the demo reads; agents add node and socket on their command lines.
        `state` is a folder of this run's own: its etcd is not the one of the run before."""
        return "\n".join(
            [
                "# Written by elasticd demo. The training is real, the speed of its devices is emulated.",
                '[cluster]\nname = "demo"',
                f'[etcd]\nendpoints = ["{etcd}"]',
                '[coordinator]\nname = "demo"\nhost = "127.0.0.1"\nport = 0',
                f'state = "{state}"',
                f'[agent]\naddress = "127.0.0.1"\ndevices = {self.devices}\nstate = "{state}"',
                f"[emulate]\nenabled = true\nforward = {self.forward!r}\nbackward = {self.backward!r}",
                f"memory = {self.memory}",
                "[chaos]\nenabled = true",
                "",
            ]
        )


class DemoError(Exception):
    """The demo cannot start or go on; the message says why and what to do."""


def training_script() -> Path:
    """examples/train_lm.py of the repository, else the copy in the installed package. Raises DemoError."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package.parent / "examples", package / "examples"):
        script = folder / "train_lm.py"
        if script.is_file():
            return script
    raise DemoError(
        f"examples/train_lm.py is neither beside {package} nor in it: run the demo from a clone of the "
        "repository, or install elasticd again"
    )
