"""Fields of OpenAI's and vLLM's requests are served, refused by name, or ignored for a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from starlette.testclient import TestClient

from ragcache_api.http import client_fields
from ragcache_api.http.bodies import ChatRequest, CompletionRequest, GenerationRequest
from ragcache_api.http.errors import HTTPProblem
from tests.api.http.test_openai_routes import ask, complete

# Fields of vLLM's request classes at commit 002032ee2b18e1f7bd924ec47b62504ba3866063, and the
# fields of 0.10 that later versions renamed.
VLLM_COMMON = """
frequency_penalty logit_bias logprobs max_tokens model n presence_penalty response_format seed stop
stream stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty
watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo add_special_tokens
structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt kv_transfer_params
ec_transfer_params vllm_xargs repetition_detection thinking_token_budget stream_interval
guided_json guided_regex guided_choice guided_grammar guided_decoding_backend
guided_whitespace_pattern structural_tag
""".split()
VLLM_CHAT = """
messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort include_reasoning
parallel_tool_calls add_generation_prompt continue_final_message documents chat_template
chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text
""".split()
VLLM_TEXT = ["prompt", "suffix", "prompt_embeds"]

KNOWN: dict[type[GenerationRequest], set[str]] = {
    ChatRequest: {
        *chat_params.CompletionCreateParamsBase.__annotations__,
        *VLLM_COMMON,
        *VLLM_CHAT,
    },
    CompletionRequest: {
        *text_params.CompletionCreateParamsBase.__annotations__,
        *VLLM_COMMON,
        *VLLM_TEXT,
    },
}
REQUIRED: dict[type[GenerationRequest], dict[str, Any]] = {
    ChatRequest: {"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
    CompletionRequest: {"model": "m", "prompt": "Hi"},
}


@pytest.mark.parametrize("body", KNOWN, ids=lambda body: body.__name__)
def test_every_field_of_openai_and_vllm_is_classified(body: type[GenerationRequest]) -> None:
    declared = body.model_fields.keys()
    for name in sorted(KNOWN[body]):
        places = [name in declared, name in body.unserved, name in client_fields.IGNORED]
        assert any(places), f"{name} is neither served, refused nor ignored"
        assert sum(places[1:]) <= 1, f"{name} is both refused and ignored"
    assert all(client_fields.IGNORED.values())


REFUSED: dict[str, Any] = {
    "add_generation_prompt": False,
    "include_reasoning": False,
    "modalities": ["text", "audio"],
    "verbosity": "low",
}


@pytest.mark.parametrize("body", KNOWN, ids=lambda body: body.__name__)
def test_refused_fields_are_named_with_a_remedy(body: type[GenerationRequest]) -> None:
    for name, field in body.unserved.items():
        if name in body.model_fields:
            continue
        value = REFUSED.get(name, False if True in field.neutral else [1])
        with pytest.raises(HTTPProblem, match=f"{name} is not served: {field.remedy}") as caught:
            body.model_validate(REQUIRED[body] | {name: value}).generation(1.0)
        assert caught.value.info.param == name
        for neutral in field.neutral:
            body.model_validate(REQUIRED[body] | {name: neutral}).generation(1.0)


@pytest.mark.parametrize("body", KNOWN, ids=lambda body: body.__name__)
def test_ignored_fields_change_no_parameter(body: type[GenerationRequest]) -> None:
    plain = body.model_validate(REQUIRED[body]).generation(1.0)
    sent = REQUIRED[body] | dict.fromkeys(client_fields.IGNORED, "anything")
    assert body.model_validate(sent).generation(1.0) == plain


SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json_schema": json.dumps(SCHEMA)}),
    ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ("a", "b")}),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"ebnf": 'root ::= "a"'}),
    ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
    ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a", "b"]}, {"choice": ("a", "b")}),
    ({"guided_grammar": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"json_schema": SCHEMA},
    ),
    ({"response_format": {"type": "text"}}, {}),
    ({"regex": "a+"}, {"regex": "a+"}),
]


@pytest.mark.parametrize("body", KNOWN, ids=lambda body: body.__name__)
@pytest.mark.parametrize(("sent", "options"), FORMS)
def test_forms_of_vllm_and_openai_become_options(
    body: type[GenerationRequest], sent: dict[str, Any], options: dict[str, Any]
) -> None:
    generation = body.model_validate(REQUIRED[body] | sent).generation(1.0)
    assert generation.forms == tuple(options)
    assert {name: getattr(generation, name) for name in options} == options


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "one form"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "one form"),
        ({"guided_regex": "a", "ebnf": "b"}, "one grammar"),
        ({"guided_regex": "a", "regex": "b"}, "given twice"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "whitespace_pattern"),
        ({"structured_outputs": {"xml": "a"}}, "xml"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "start: /a/"}, "ebnf"),
        ({"guided_json": "no JSON"}, "JSON"),
    ],
)
def test_forms_that_cannot_be_are_refused(
    client: TestClient, sent: dict[str, Any], said: str
) -> None:
    for send in (ask, complete):
        refused = send(client, **sent)
        assert refused.status_code == 400, refused.text
        assert said in refused.json()["error"]["message"]


@pytest.mark.parametrize("sent", [{"guided_choice": ["so+", "no"]}, {"guided_regex": r"so\+|no"}])
def test_answers_keep_to_the_forms_of_vllm(client: TestClient, sent: dict[str, Any]) -> None:
    assert ask(client, **sent).json()["choices"][0]["message"]["content"] in ("so+", "no")
    assert complete(client, **sent).json()["choices"][0]["text"] in ("so+", "no")
