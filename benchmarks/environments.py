"""A pinned virtual environment for each package, created again when its requirements change."""

import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
REQUIREMENTS = Path(__file__).parent / "requirements"
HOME = ROOT / "build" / "environments"


def pins(name: str) -> str:
    """The requirements of *name*, including those of included files."""
    lines = (REQUIREMENTS / f"{name}.txt").read_text().splitlines()
    included = [
        line.removeprefix("-r ").removesuffix(".txt") for line in lines if line.startswith("-r ")
    ]
    own = [line for line in lines if not line.startswith("-r ")]
    return "".join(map(pins, included)) + "".join(f"{line}\n" for line in own)


def version(name: str, distribution: str) -> str:
    """The version of *distribution* that *name* pins; empty for the working tree."""
    found = [line for line in pins(name).splitlines() if line.startswith(f"{distribution}==")]
    return found[0].partition("==")[2] if found else ""


def interpreter(name: str, home: Path = HOME) -> Path:
    """The interpreter of the environment, which is created if needed.

    Raises CalledProcessError when pip fails.
    """
    place = home / name
    python, stamp = place / "bin" / "python", place / "installed"
    wanted = hashlib.sha256(f"{sys.version}\n{pins(name)}".encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
        pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([*pip, "--requirement", REQUIREMENTS / f"{name}.txt"], check=True, cwd=ROOT)
        stamp.write_text(wanted)
    return python
