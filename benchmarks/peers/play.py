"""Play one case inside the environment of one package, and write down as JSON what was observed."""

import json
import sys
from dataclasses import asdict

from benchmarks.peers.cases import ALL
from benchmarks.peers.stage import Stage


def main(row: str) -> None:
    """Leave the workers to whoever started us."""
    (case,) = (one for one in ALL if one.row == row)
    stage = Stage()
    observed = case.play(stage)
    (stage.directory / "observed").write_text(json.dumps(asdict(observed)))


if __name__ == "__main__":
    main(sys.argv[1])
