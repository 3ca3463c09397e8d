"""Workflows: their scripts and targets exist, and their languages are checked where they can be."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import REPOSITORY

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
SCRIPTS = sorted((REPOSITORY / ".ci").iterdir())


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    return [step for job in jobs.values() for step in job.get("steps", ())]


def test_there_are_three_workflows() -> None:
    assert [each.stem for each in WORKFLOWS] == ["ci", "nightly", "release"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda each: each.stem)
def test_what_a_workflow_runs_exists(workflow: Path) -> None:
    commands = "\n".join(step.get("run", "") for step in steps(workflow))
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    for script in re.findall(r"(?:\.ci|tools)/[\w.]+", commands):
        assert (REPOSITORY / script).is_file(), script
    for target in re.findall(r"make ([\w-]+)", commands):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda each: each.stem)
def test_actions_are_pinned_with_their_versions(workflow: Path) -> None:
    uses = re.findall(r"uses: (.+)", workflow.read_text(encoding="utf-8"))
    pinned = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    assert uses
    assert [each for each in uses if not each.startswith("./") and not pinned.fullmatch(each)] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda each: each.name)
def test_scripts_can_be_run(script: Path) -> None:
    assert os.access(script, os.X_OK)
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_matrix_is_that_of_the_metadata() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    declared = re.findall(r"Programming Language :: Python :: (3\.\d+)", text)
    ci = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert ci["jobs"]["linux"]["strategy"]["matrix"]["python"] == declared
    assert set(ci["jobs"]["portable"]["strategy"]["matrix"]["python"]) <= set(declared)
