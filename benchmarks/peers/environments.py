"""One pinned virtual environment for each package, made once and again when its requirements change."""

import hashlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
REQUIREMENTS = Path(__file__).parent / "requirements"
HOME = ROOT / "build" / "peers"


@dataclass(frozen=True)
class Package:
    """A column of the table; ``name`` is that of its adapter and of its requirements."""

    name: str
    title: str

    @property
    def pins(self) -> str:
        """Its requirements, with those they include."""
        pages = [REQUIREMENTS / "plain.txt", REQUIREMENTS / f"{self.name}.txt"]
        return "".join(page.read_text() for page in dict.fromkeys(pages))

    @property
    def version(self) -> str:
        """The version that is pinned; none for what is installed from the working tree."""
        distribution = "celery" if self.name == "plain" else self.title
        found = [line for line in self.pins.splitlines() if line.startswith(f"{distribution}==")]
        return found[0].partition("==")[2] if found else ""

    def environment(self, home: Path = HOME) -> Path:
        """The interpreter of its environment, installed if need be; raises CalledProcessError when pip fails."""
        place = home / self.name
        python, stamp = place / "bin" / "python", place / "installed"
        wanted = hashlib.sha256(f"{sys.version}\n{self.pins}".encode()).hexdigest()
        if not stamp.exists() or stamp.read_text() != wanted:
            subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
            pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
            subprocess.run([*pip, "--requirement", REQUIREMENTS / f"{self.name}.txt"], check=True, cwd=ROOT)
            stamp.write_text(wanted)
        return python


PACKAGES = (
    Package("plain", "Celery alone"),
    Package("once", "celery-once"),
    Package("singleton", "celery-singleton"),
    Package("heimdall", "celery-heimdall"),
    Package("once_task", "celery-once-task"),
    Package("leases", "celery_leases"),
)
"""The columns, in their order."""
