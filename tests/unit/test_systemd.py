"""The unit files, judged by systemd's own tools. No running systemd is needed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

UNITS = Path(__file__).resolve().parents[2] / "systemd"
EXPOSURE_LIMIT = 2.0

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="systemd-analyze is not installed: 'apt-get install systemd', or 'make setup-test'",
)


def copy_units(folder: Path, extra: str = "") -> list[Path]:
    """Copies whose ExecStart names a program that exists; `extra` goes into the [Service] section."""
    copies = []
    for unit in sorted(UNITS.iterdir()):
        text = unit.read_text().replace("ExecStart=/usr/bin/moe-l2d ", "ExecStart=/bin/true ")
        copy = folder / unit.name
        copy.write_text(text.replace("[Service]\n", f"[Service]\n{extra}"))
        copies.append(copy)
    return copies


def complaints(units: list[Path]) -> str:
    """What systemd says about the units; an unknown key is only a line on stderr, the exit code stays 0."""
    command = ["systemd-analyze", "verify", "--man=no", *map(str, units)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return result.stderr + (f"exit code {result.returncode}" if result.returncode else "")


def setting(unit: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", (UNITS / unit).read_text(), re.MULTILINE)


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """systemd-analyze verify has nothing to say about any unit."""
    assert complaints(copy_units(tmp_path)) == ""


def test_an_unknown_key_would_be_noticed(tmp_path: Path) -> None:
    """The check above does catch a mistyped key, which systemd itself only warns about."""
    assert "WatchdogSeconds" in complaints(copy_units(tmp_path, "WatchdogSeconds=3\n"))


def test_a_wrong_value_would_be_noticed(tmp_path: Path) -> None:
    """The check above does catch a value that systemd would ignore."""
    assert "gently" in complaints(copy_units(tmp_path, "KillMode=gently\n"))


def test_exposure_is_low(tmp_path: Path) -> None:
    """systemd's own exposure score of the service is at most 2.0 ("OK" starts below 4)."""
    service = next(unit for unit in copy_units(tmp_path) if unit.suffix == ".service")
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(service)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    match = re.search(r"Overall exposure level for \S+: ([\d.]+)", result.stdout)
    assert match, result.stdout + result.stderr
    assert float(match[1]) <= EXPOSURE_LIMIT, result.stdout


def test_memory_limits_are_on_the_slice_alone() -> None:
    """A limit on the service would stop covering the arena after a restart: only the slice has them."""
    for key in ("MemoryMax", "MemoryHigh", "MemorySwapMax"):
        assert setting("moe-l2d.service", key) == []
        assert len(setting("moe-l2.slice", key)) == 1
    assert setting("moe-l2d.service", "Slice") == ["moe-l2.slice"]


def test_a_wrong_configuration_is_not_tried_again() -> None:
    """The daemon's exit codes for mistakes that a restart cannot mend are those that prevent it."""
    from moe_l2d.errors import ConfigError, Denied

    codes = set(setting("moe-l2d.service", "RestartPreventExitStatus")[0].split())
    assert {str(ConfigError.exit_code), str(Denied.exit_code)} <= codes
