"""The commands that pages show, and where each is run by a test: as it is written, or not here, for a reason.

A command of a code block is in one of three tables. `ALONE` are run in a clone's folder. `OF_A_CLUSTER` are
run, in order, while `elasticd up` and a job run, or once the job is over. `NOT_HERE` are not run by a test
of pages: each with its reason, and with the test that runs the like of it, where there is one. Pages of
`TUTORIALS` are played from their first command to the last one (`tests/pages/test_tutorials.py`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = tuple(sorted(path.name for path in (ROOT / "docs").glob("tutorial*.md")))
#: The first word of a line that is a command.
_PROGRAMS = frozenset(
    (
        *(
            "elasticd",
            "elasticd-agent",
            "make",
            "python",
            "python3",
            "pip",
            "torchrun",
            "git",
            "srun",
            "etcdctl",
        ),
        *("systemctl", "journalctl", "curl", "openssl", "kill", "apt-get", "useradd", "tensorboard"),
        *("accelerate", "docker", "kubectl", "ip", "export", "npm", "cd", "diff"),
    )
)


@dataclass(frozen=True)
class Shown:
    """A command as a page shows it, without the comment behind it."""

    page: str
    line: int
    text: str


#: What is run in a clone's folder by itself; of those that take minutes, in `make test-all` (`SLOW`).
ALONE = (
    "elasticd plan problem.json --json > old.json",
    "elasticd plan slower.json --current old.json",
    "elasticd plan slower.json --json > new.json",
    "elasticd plan --diff old.json new.json",
    "elasticd plan problem.json --explain",
    "elasticd plan slower.json --current old.json --explain",
    "elasticd simulate examples/scenarios/small.toml",
    "openssl rand -hex 32",
    "elasticd checkpoint list FOLDER",
    "elasticd checkpoint verify FOLDER",
    "elasticd checkpoint export FOLDER/NAME out.safetensors",
    "python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER/NAME all.pt",
    "elasticd simulate examples/scenarios/faults.toml",
    "elasticd simulate examples/scenarios/walk-70b.toml --plot walk.svg",
    "elasticd simulate examples/scenarios/day-1024.toml --json > day.json",
    "elasticd simulate examples/scenarios/packed.toml",
    "elasticd simulate examples/scenarios/modules.toml",
    "elasticd profile examples/train_lm.py:model --loss next_token_loss --batch batch --out profile.json",
    "elasticd profile train.py --out profile.json",
    "python train.py",
)
#: Those of `ALONE` that are run in `make test-all` alone.
SLOW = frozenset(ALONE[ALONE.index("openssl rand -hex 32") + 1 :])

#: While `elasticd up` runs, in this order. Those before "the job's end" run beside a job, the others after it.
OF_A_CLUSTER = (
    "elasticd up",
    "elasticd doctor",
    "elasticd run --job my-job --devices 2 examples/tutorial/train.py --steps 300 --out runs/my-job",
    "elasticd record run.jsonl.gz",
    "elasticd run --job my-job --devices 2 train.py",
    "elasticd status",
    "elasticd why",
    "elasticd top",
    "elasticd history",
    "elasticd logs",
    "elasticd jobs",
    "elasticd config get",
    "elasticd config set policy.horizon_steps 500",
    "elasticd config history",
    "elasticd config unset policy.horizon_steps",
    "elasticd config set policy.interleave 2",
    "elasticd pause",
    "elasticd resume",
    "elasticd checkpoint now my-job",
    "elasticd report --out run.html my-job",
    "elasticd stop my-job",
    "elasticd forget my-job",
    "elasticd stop my-job --now",
    "elasticd simulate --recorded run.jsonl.gz",
    "elasticd simulate --recorded run.jsonl.gz --config other.toml",
)
#: Of these, what runs until Ctrl-C.
UNTIL_INTERRUPTED = frozenset({"elasticd up", "elasticd record run.jsonl.gz"})
#: Of these, what needs a terminal's window: it is drawn anew until Ctrl-C.
SCREENS = frozenset({"elasticd top"})

#: What no test of pages runs: by regular expression, with the reason.
NOT_HERE = {
    r"git clone <this repository>.*": "test_a_clone_is_installed_as_readme_says runs it from this repository",
    r"pip install -e '\.\[train,daemon,embedded\]' -c constraints\.txt": "the same test",
    r"pip install '\.\[daemon\]'": "the same test",
    r"pip install torch --index-url .*": "a download of gigabytes for a machine with GPUs",
    r"make (venv|lint|test|test-all)": "they run this test",
    r"make demo": "tests/integration/test_demo.py runs elasticd demo",
    r"python -m tests\.machines\.test_wide_walks .*": "the same walks as tests/machines/test_wide_walks.py",
    r"make soak|python -m tests\.soak\.(soak|simulated) .*": "hours; tests/soak runs them at a smaller size",
    r"make bench (NAME=\w+|ARGS=).*": "every benchmark starts at its smallest size in tests/benchmarks",
    r"(\.venv/bin/)?python -m pytest -m (gpu|nccl)": "needs GPUs; elsewhere these tests are skipped",
    r"\.venv/bin/python benchmarks/_on_a_gpu\.py .*": "needs a GPU; tests/benchmarks/test_on_a_gpu.py tries it",
    r"torchrun --nnodes=2:8 .*": "two nodes of eight devices; tests/integration/test_restart_mode.py has fewer",
    r"elasticd run --job my-job --nnodes 2:8 .*": "tests/integration/test_run_any_script.py has one node",
    r"srun .*": "needs Slurm; tests/integration/test_operations_slurm.py runs it as a step of one task",
    r"elasticd adopt .*": "needs an etcd that was lost; tests/integration/test_adopted_job.py loses one",
    r"elasticd forget --node .*": "needs a node that died; tests/integration/test_absent_nodes.py forgets one",
    r"elasticd security init /etc/.*": "writes to /etc; tests/cli/test_security.py writes to a folder",
    r"elasticd checkpoint export FOLDER/NAME out.safetensors --module .*": "needs a job of several modules: "
    "tests/runtime/test_module_jobs",
    r"elasticd checkpoint export --hf .*": "needs a job of transformers: tests/models/test_huggingface_folders",
    r"elasticd run (--log-dir logs |--device-ids 2,3 |--devices 2 ).*train\.py": "tests/integration/"
    "test_launch_output.py runs them with a script of its own",
    r"elasticd logs --worker alpha/1 -f my-job": "the same test",
    r"etcdctl .*": "needs etcd's own client and a secured etcd; tests/store has the same calls",
}


def commands(page: Path) -> Iterator[Shown]:
    """The commands of a page's code blocks. A line that ends in a backslash, or inside of quotes, goes on."""
    lines, fence, at = page.read_text().splitlines(), "", 0
    while at < len(lines):
        line, start = lines[at], at
        at += 1
        if match := re.fullmatch(r"\s*```(\S*).*", line):
            fence = "" if fence else match[1] or "text"
            continue
        if not (fence or line.startswith("    ")) or fence in ("python", "toml", "mermaid", "json", "console"):
            continue
        text = re.sub(r"^\$ ", "", line.strip())
        words = [word for word in text.split() if not re.fullmatch(r"[A-Z_]+=\S*", word)]
        if not words or words[0].rpartition("/")[2] not in _PROGRAMS or "─" in text:
            continue
        while at < len(lines) and (text.endswith("\\") or _open(text)):
            text = f"{text.removesuffix(chr(92))}\n{lines[at].strip()}"
            at += 1
        yield Shown(page.name, start + 1, without_comment(text))


def _open(text: str) -> bool:
    """Whether a quotation does not end in this text."""
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return True
    return False


def without_comment(text: str) -> str:
    """A command without the comment behind it."""
    return re.sub(r"\s+#.*", "", text) if "\n" not in text else text


def shown_commands() -> list[Shown]:
    """The commands of all pages but the tutorials."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [each for page in pages if page.name not in TUTORIALS for each in commands(page)]


def reason(text: str) -> str | None:
    """Why no test of pages runs a command; None: one does, or should."""
    return next((why for regex, why in NOT_HERE.items() if re.fullmatch(regex, text, re.DOTALL)), None)
