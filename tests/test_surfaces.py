"""Options are declared once: every surface offers each, or says why it does not."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from ragcache import AsyncRagCache, RagCache
from ragcache.engine import SamplingParams
from ragcache.errors import ConfigurationError, InvalidRequest, UnknownCollection
from ragcache.options import AskOptions
from ragcache.params import GenerationParams, OpenConfig, Params, SearchParams, Surface
from ragcache.pipeline.submit import sampling_params
from ragcache_api.cli.measure import PLANNING
from ragcache_api.cli.options import ASKING, ENCODING, INGESTING, ONE_ANSWER
from ragcache_api.http.anthropic import MessagesRequest
from ragcache_api.http.bodies import AnswerRequest, ChatRequest, CompletionRequest, PromptRequest
from ragcache_api.http.responses import ResponsesRequest
from ragcache_api.service_options import ServiceOptions
from ragcache_api.settings import ServiceSettings
from ragcache_connectors.langchain import ChatRagCache, RagCacheRetriever

SETS: tuple[type[Params], ...] = (GenerationParams, SearchParams, OpenConfig)
SURFACES: dict[type[Surface], tuple[type[Params], ...]] = {
    AnswerRequest: (GenerationParams, SearchParams),
    PromptRequest: (GenerationParams,),
    ChatRequest: (GenerationParams, SearchParams),
    CompletionRequest: (GenerationParams, SearchParams),
    MessagesRequest: (GenerationParams, SearchParams),
    ResponsesRequest: (GenerationParams, SearchParams),
    ChatRagCache: (GenerationParams, SearchParams),
    RagCacheRetriever: (SearchParams,),
    ServiceSettings: (OpenConfig,),
}


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.__name__)
def test_every_option_is_offered_or_withheld_with_a_reason(surface: type[Surface]) -> None:
    declared = {name for each in SURFACES[surface] for name in each.model_fields}
    assert declared <= surface.model_fields.keys()
    assert surface.withheld.keys() <= declared
    assert all(surface.withheld.values())


@pytest.mark.parametrize("body", [each for each in SURFACES if each.__name__.endswith("Request")])
def test_the_openapi_document_describes_what_a_body_offers(body: type[Surface]) -> None:
    shown = body.model_json_schema()["properties"]
    assert shown.keys() == body.model_fields.keys() - body.withheld.keys()
    documented = {name for each in SURFACES[body] for name in each.model_fields}
    assert all(shown[name].get("description") for name in shown.keys() & documented)


@pytest.mark.parametrize("options", SETS, ids=lambda options: options.__name__)
def test_an_option_has_a_default_and_a_text(options: type[Params]) -> None:
    for field in options.model_fields.values():
        assert field.description
        assert not field.is_required()


@pytest.mark.parametrize("face", [RagCache, AsyncRagCache])
def test_signatures_show_the_options_as_keywords(face: type) -> None:
    shown = inspect.signature(face.ask).parameters
    assert list(shown)[:2] == ["self", "question"]
    assert shown.keys() - {"self", "question"} == AskOptions.model_fields.keys()
    assert (shown["k"].default, shown["k"].kind) == (4, inspect.Parameter.KEYWORD_ONLY)
    assert shown["collection"].default is inspect.Parameter.empty
    assert "sources" in inspect.signature(face.ingest).parameters


def test_parameters_before_the_options_may_be_keywords(tmp_path: Path) -> None:
    with RagCache.open(tmp_path, embedding="none") as rag, pytest.raises(UnknownCollection):
        rag.ask(question="?", collection="none", k=1)  # type: ignore[call-arg]


def test_commands_offer_options_that_exist() -> None:
    assert ONE_ANSWER.reasons.keys() <= GenerationParams.model_fields.keys()
    for offer in (ENCODING, INGESTING, ASKING, PLANNING):
        assert sorted(offer.offered(ServiceOptions)) == sorted(offer.names)


def test_no_rule_of_one_set_hides_that_of_another() -> None:
    rules = [name for each in SETS for name in vars(each) if name.startswith("_check")]
    assert len(rules) == len(set(rules)), "pydantic keeps one validator of a name"


def test_both_names_of_the_token_limit_mean_the_same() -> None:
    assert GenerationParams(max_new_tokens=7) == GenerationParams(max_tokens=7)
    assert GenerationParams(max_tokens=7, max_new_tokens=7).max_tokens == 7
    assert GenerationParams(max_tokens=7, max_new_tokens=None).given() == {"max_tokens": 7}
    assert GenerationParams(max_tokens=7).replace(max_tokens=None).max_tokens is None
    with pytest.raises(InvalidRequest, match="max_tokens is 7 and max_new_tokens is 8"):
        GenerationParams(max_tokens=7, max_new_tokens=8)
    with pytest.raises(InvalidRequest, match="max_tokens is 0"):
        GenerationParams(max_new_tokens=0)


def test_the_sampler_and_the_options_agree() -> None:
    assert sampling_params(GenerationParams()) == SamplingParams()
    for field in fields(SamplingParams):
        declared = GenerationParams.model_fields[field.name]
        for each in declared.metadata:
            for name in ("ge", "le", "gt"):
                bound = getattr(each, name, None)
                if bound is None:
                    continue
                step = 0.001 if isinstance(declared.default, float) else 1
                outside = bound + (step if name == "le" else -step if name == "ge" else 0)
                with pytest.raises(InvalidRequest, match=f"{field.name} is"):
                    SamplingParams(**{field.name: outside})
                if name != "gt":
                    SamplingParams(**{field.name: bound})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"queue": -5}, "queue is -5; it must be at least 1"),
        ({"stale_seconds": 0}, "stale_seconds is 0; it must be at least 1"),
        ({"host_bytes": "8 gigs"}, "host_bytes: cannot read the size '8 gigs'"),
        ({"disk_bytes": 0}, "disk_bytes: 0 is no size"),
        ({"kv_dtype": "int4"}, "kv_dtype is 'int4'; it must be 'model' or 'int8'"),
        ({"instruction": " "}, "the instruction is blank"),
        ({"disk_size": 3}, "unknown option 'disk_size'; options: .*model, embedding"),
    ],
)
def test_a_folder_is_not_opened_with_what_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        RagCache.open("never-made", **options)
    assert not Path("never-made").exists()


NEW_PARAMETER = """
import dataclasses, importlib.util, json, sys
from pathlib import Path
from typing import Annotated
from pydantic import Field
import ragcache.params, ragcache.params.request as generation

name = "ragcache.engine.sampling_params"  # without its package, which would take the old class
path = Path(ragcache.__file__).with_name("engine") / "sampling_params.py"
spec = importlib.util.spec_from_file_location(name, path)
sampling = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sampling)

@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams(sampling.SamplingParams):
    typical_p: float = 1.0

class GenerationParams(generation.GenerationParams):
    typical_p: Annotated[
        float, Field(gt=0, le=1, description="Draw from the most typical tokens.")
    ] = 1.0

sampling.SamplingParams = SamplingParams
generation.GenerationParams = ragcache.params.GenerationParams = GenerationParams

from fastapi.testclient import TestClient
from typer.testing import CliRunner
from ragcache import RagCache, SourceDocument
from ragcache_api.cli.main import app
from ragcache_api.http import create_app
from ragcache_api.service_options import ServiceOptions
from ragcache_api.settings import ServiceSettings
from ragcache_api.service_options import ServiceOptions
from ragcache_api.settings import ServiceSettings
from ragcache_connectors.langchain import ChatRagCache, close_shared
from ragcache.engine import LLMEngine

seen, submit = [], LLMEngine.submit_request
def submit_request(self, request, **more):
    seen.append(request.sampling.typical_p)
    return submit(self, request, **more)
LLMEngine.submit_request = submit_request
folder = sys.argv[1]
asked = {"question": "Where is the key?", "collection": "n", "max_tokens": 1}
with RagCache.open(folder, embedding="none", force_modes=True) as rag:
    rag.ingest("n", [SourceDocument("a", "The spare key hangs in the boat hall.")])
    seen.clear()
    rag.ask("Where is the key?", collection="n", generation=GenerationParams(typical_p=0.9))
    served = create_app(rag, ServiceSettings(state=folder))
    with TestClient(served, base_url="http://localhost") as client:
        assert client.post("/v1/answers", json=asked | {"typical_p": 0.8}).status_code == 200
        chat = {"model": rag.internals.shared.model.name, "typical_p": 0.7, "max_tokens": 1,
                "messages": [{"role": "user", "content": "Hi"}]}
        assert client.post("/v1/chat/completions", json=chat).status_code == 200
        refused = client.post("/v1/answers", json=asked | {"typical_p": 7})
        assert refused.status_code == 422, refused.text
        assert "typical_p" in client.get("/openapi.json").text
    ChatRagCache(rag=rag, typical_p=0.6, max_tokens=1).invoke("Hi")
    ChatRagCache(rag=rag, max_tokens=1).bind(typical_p=0.5).invoke("Hi")
run = CliRunner().invoke
told = run(app, ["ask", "Where is the key?", "-c", "n", "--state", folder, "--typical-p", "0.4",
                 "--embedding", "none", "--max-tokens", "1"])
assert told.exit_code == 0, (told.output, told.exception)
assert "most typical tokens" in run(app, ["ask", "--help"], env={"COLUMNS": "200"}).output
print(json.dumps(seen))
"""


@pytest.mark.slow
def test_a_new_sampling_parameter_is_on_every_surface(tmp_path: Any) -> None:
    """Its field in `SamplingParams`, its effect in the sampler, and a field of `GenerationParams`
    are all that it takes."""
    command = [sys.executable, "-c", NEW_PARAMETER, str(tmp_path / "state")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "[0.9, 0.8, 0.7, 0.6, 0.5, 0.4]"
