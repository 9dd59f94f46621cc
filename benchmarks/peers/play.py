"""Run one case in the environment of one package, and write its observation as JSON."""

import json
import sys
from dataclasses import asdict

from benchmarks.peers.cases import ALL
from benchmarks.peers.stage import Stage


def main(row: str) -> None:
    """Run the case; the parent process stops the workers."""
    (case,) = (one for one in ALL if one.row == row)
    stage = Stage()
    observed = case.play(stage)
    (stage.directory / "observed").write_text(json.dumps(asdict(observed)))


if __name__ == "__main__":
    main(sys.argv[1])
