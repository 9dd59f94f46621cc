"""docker-compose.yml follows the compose specification, checked by its JSON schema without
Docker.
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]


def check(path: Path) -> subprocess.CompletedProcess[str]:
    """Validate against the schema that check-jsonschema carries, offline."""
    command = [
        sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec",
        str(path),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_compose_file_is_valid() -> None:
    done = check(ROOT / "docker-compose.yml")
    assert done.returncode == 0, done.stdout


def test_a_misspelt_key_is_found(tmp_path: Path) -> None:
    broken = tmp_path / "docker-compose.yml"
    broken.write_text(
        (ROOT / "docker-compose.yml").read_text().replace("healthcheck:", "heathcheck:", 1)
    )
    done = check(broken)
    assert done.returncode != 0
    assert "heathcheck" in done.stdout


def test_every_server_is_waited_for_until_it_is_healthy() -> None:
    services = YAML(typ="safe").load(ROOT / "docker-compose.yml")["services"]
    servers = {name for name, service in services.items() if "image" in service}
    assert servers == {"redis", "postgres", "rabbitmq"}
    assert all("healthcheck" in services[name] for name in servers)
    for service in ("worker-a", "worker-b", "page"):
        waited = services[service]["depends_on"] | services["migrate"]["depends_on"]
        assert {name for name, how in waited.items() if how["condition"] == "service_healthy"} == {
            *servers,
            "provider",
        }
        assert waited["migrate"] == {"condition": "service_completed_successfully"}


def test_every_module_that_a_service_runs_exists() -> None:
    services = YAML(typ="safe").load(ROOT / "docker-compose.yml")["services"]
    commands = [" ".join(service.get("command", ())) for service in services.values()]
    modules = {
        name for command in commands for name in re.findall(r"example_project[\w.]*", command)
    }
    assert len(modules) == 5
    for name in modules:
        assert importlib.util.find_spec(name) is not None, name
    for name in ("worker-a", "worker-b"):
        assert (services[name]["init"], services[name]["restart"]) == (True, "always")
        assert f"--hostname={name}@%h" in services[name]["command"]
