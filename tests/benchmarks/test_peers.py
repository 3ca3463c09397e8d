"""The scripts for vLLM, with a stand-in for vLLM that takes the arguments that they give."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import conversations
import pytest
import recurring
from typer.testing import CliRunner

from ragcache.models.reader import READER

COMPUTED = 16  # tokens of a prompt that the stand-in has in its cache


class Peer:
    """Stands in for `vllm.LLM`."""

    made: ClassVar[list[Peer]] = []

    def __init__(self, model: str, **options: Any) -> None:
        self.options, self.prompts = options, []
        self.made.append(self)

    def generate(self, prompts: list[dict[str, Any]], params: Any, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        self.prompts += [each["prompt_token_ids"] for each in prompts]
        completion = SimpleNamespace(token_ids=[5] * params.max_tokens)
        return [SimpleNamespace(num_cached_tokens=COMPUTED, outputs=[completion]) for _ in prompts]


@pytest.fixture(autouse=True)
def peer(monkeypatch: pytest.MonkeyPatch) -> None:
    Peer.made = []
    vllm, config, inputs = (ModuleType(name) for name in ("vllm", "vllm.config", "vllm.inputs"))
    vllm.LLM, vllm.SamplingParams = Peer, SimpleNamespace  # type: ignore[attr-defined]
    config.KVTransferConfig = SimpleNamespace  # type: ignore[attr-defined]
    inputs.TokensPrompt = dict  # type: ignore[attr-defined]
    for module in (vllm, config, inputs):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("blend", [False, True], ids=["prefix cache", "blending"])
def test_the_trace_of_recurring_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blend: bool
) -> None:
    monkeypatch.setattr(recurring.os, "environ", {})
    file = tmp_path / "figures.json"
    given = ["--model", str(READER), "--conversations", "2", "--chunks", "6", "--sentences", "2"]
    given += ["--json", str(file), *(["--blend"] if blend else [])]
    run = CliRunner().invoke(recurring.app, ["vllm", *given], catch_exceptions=False)
    assert run.exit_code == 0
    plain, reusing = Peer.made
    assert plain.prompts == reusing.prompts
    assert len(plain.prompts) == 16
    assert plain.options == {"enable_prefix_caching": blend}
    assert ("kv_transfer_config" in reusing.options) is blend
    figures = json.loads(file.read_text())
    assert figures["peer"] == ("lmcache" if blend else "vllm")
    assert figures["ttft_speedup"] > 0


def test_the_agents(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    given = [
        "--model",
        "any",
        "--offload",
        "1",
        "--pool",
        "4096",
        "--sessions",
        "2",
        "--turns",
        "2",
    ]
    run = CliRunner().invoke(
        conversations.app, ["vllm", *given, "--json", str(file)], catch_exceptions=False
    )
    assert run.exit_code == 0
    lost, kept = Peer.made
    assert kept.options["kv_offloading_backend"] == "native"
    assert "kv_offloading_backend" not in lost.options
    assert lost.prompts == kept.prompts
    assert json.loads(file.read_text())["recomputed_share_agents"] > 0
