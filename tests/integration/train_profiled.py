"""The worker of the integration tests, with a profile of its model: $OPTIONS names the file."""

from __future__ import annotations

import functools
import json
import os

import elasticd
from tests.integration import train

if __name__ == "__main__":
    profile = json.loads(os.environ["OPTIONS"])["profile"]
    elasticd.Job = functools.partial(elasticd.Job, profile=profile)  # type: ignore[misc, assignment]
    train.main()
