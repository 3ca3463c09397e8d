"""Fields that clients of OpenAI and vLLM send beside the options of an answer.

Each field that changes an answer is served or refused by name. A field in none of the tables below
is ignored: clients add names of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


@dataclass(frozen=True, slots=True)
class UnservedField:
    """A field that is refused, because ignoring it would change the answer."""

    remedy: str
    """Remedy for the caller."""
    neutral: tuple[Any, ...] = (None, False, 0, "", [], {})
    """Values that ask for nothing, and are accepted."""

    def refuses(self, value: Any) -> bool:
        """Tell whether a value asks for something."""
        return not any(value == each for each in self.neutral)


_FORM = UnservedField("structured_outputs gives the answer a form")
_TOKENS = UnservedField("POST /tokenize returns the tokens of a text")
_STATES = UnservedField("the store moves states between its tiers by itself")

UNSERVED: Mapping[str, UnservedField] = {
    "allowed_token_ids": _FORM,
    "audio": UnservedField("an answer is text"),
    "bad_words": _FORM,
    "cache_salt": UnservedField("tenants are separated by the namespaces of their keys"),
    "ec_transfer_params": _STATES,
    "functions": UnservedField("give tools"),
    "guided_whitespace_pattern": UnservedField("JSON is written on one line"),
    "include_reasoning": UnservedField("reasoning is a part of the text", (None, True)),
    "include_stop_str_in_output": UnservedField("stop strings are cut off"),
    "kv_transfer_params": _STATES,
    "logit_bias": _FORM,
    "logprob_token_ids": UnservedField("the likeliest tokens are reported"),
    "modalities": UnservedField("an answer is text", (None, [], ["text"])),
    "moderation": UnservedField("nothing is moderated"),
    "prompt_embeds": UnservedField("give a text"),
    "return_prompt_text": _TOKENS,
    "return_token_ids": _TOKENS,
    "return_tokens_as_token_ids": _TOKENS,
    "stop_token_ids": UnservedField("give stop"),
    "structural_tag": UnservedField("give tools, or structured_outputs.json"),
    "thinking_token_budget": UnservedField("give max_tokens", (None, -1)),
    "truncate_prompt_tokens": UnservedField("shorten the prompt; nothing is cut off silently"),
    "use_beam_search": UnservedField("give n for several answers"),
    "verbosity": UnservedField("say in a message how long an answer may be", (None, "medium")),
    "vllm_xargs": UnservedField("no extension reads them"),
    "watermarking": UnservedField("tokens are drawn without a watermark"),
    "web_search_options": UnservedField("give a collection"),
}
"""Fields that are refused everywhere."""

UNSERVED_IN_CHATS: Mapping[str, UnservedField] = {
    **UNSERVED,
    "add_generation_prompt": UnservedField("the model writes the next message", (None, True)),
    "add_special_tokens": UnservedField("the chat template writes control tokens"),
    "chat_template": UnservedField("chat_template_kwargs sets variables of the model's template"),
    "continue_final_message": UnservedField("/v1/completions continues a text"),
    "documents": UnservedField("give a collection, or the documents as a message"),
    "echo": UnservedField("/v1/completions repeats a prompt"),
}
"""Fields that are refused in chats."""

UNSERVED_IN_COMPLETIONS: Mapping[str, UnservedField] = {
    **UNSERVED,
    "add_special_tokens": UnservedField("a text begins as the model expects it", (None, True)),
    "suffix": UnservedField("write the suffix into the prompt"),
}
"""Fields that are refused in completions."""

IGNORED: Mapping[str, str] = {
    "guided_decoding_backend": "llguidance holds all answers to their forms",
    "length_penalty": "only beam search reads it, which is refused",
    "media_io_kwargs": "messages have no media",
    "metadata": "a client's own record",
    "mm_processor_kwargs": "messages have no media",
    "prediction": "it saves time only",
    "prompt_cache_options": "states are found by their text",
    "reasoning_effort": "a template that knows it takes it in chat_template_kwargs",
    "request_id": "the header X-Request-ID names a request",
    "return_mm_kwargs": "messages have no media",
    "return_token_offsets": "only routes that render prompts read it",
    "routed_experts_prompt_start": "routing of experts is not reported",
    "safety_identifier": "a client's own record",
    "service_tier": "there is one tier",
    "session_id": "states are found by their text",
    "spaces_between_special_tokens": "texts have no control tokens",
    "stream_interval": "a chunk is sent for every token",
    "truncation_side": "only truncate_prompt_tokens reads it, which is refused",
    "user": "a client's own record",
}
"""Fields that are ignored, with the reason that they change no answer."""


class ClientModel(BaseModel):
    """A part of a request of a client of OpenAI or vLLM."""

    model_config = ConfigDict(
        extra="allow", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )


class JsonSchema(ClientModel):
    """A JSON schema for the answer."""

    name: str = "answer"
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """The schema itself."""


class ResponseFormat(ClientModel):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    """The schema for the type `json_schema`."""

    def options(self) -> dict[str, Any]:
        """Return the option of `GenerationParams`, if there is one. Raises `ValueError`."""
        if self.type == "json_object":
            return {"json_object": True}
        if self.type == "text":
            return {}
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise ValueError("response_format holds no json_schema.schema")
        return {"json_schema": self.json_schema.schema_}


Choices = Annotated[list[str], Field(min_length=1, max_length=10_000)]
GuidedJson = dict[str, Any] | str


class StructuredOutputs(ClientModel):
    """The form of the answer, as vLLM takes it."""

    model_config = ConfigDict(extra="forbid")
    json_: GuidedJson | None = Field(default=None, alias="json")
    """A JSON schema for the answer."""
    regex: str | None = None
    """A regular expression that matches the whole answer."""
    choice: Choices | None = None
    """Texts of which the answer is one."""
    grammar: str | None = None
    """A grammar in GBNF, with the rule `root`."""
    json_object: bool | None = None
    """Answer with any JSON object."""
    structural_tag: Any = None
    """Refused: tools and JSON schemas serve its purpose."""
    whitespace_pattern: str | None = None
    """Refused: JSON is written on one line."""
    disable_any_whitespace: bool = False
    """Without effect: JSON is written on one line."""
    disable_additional_properties: bool = False
    """Without effect: objects have the properties that the schema allows by name."""
    disable_fallback: bool = False
    """Without effect: there is one implementation."""

    @field_validator("structural_tag", "whitespace_pattern")
    @classmethod
    def _is_not_served(cls, value: Any) -> Any:
        if value is not None:
            raise ValueError("it is not served; give json, regex, choice, grammar or json_object")
        return value


class RepetitionDetection(ClientModel):
    """The patterns that end an answer by repetition, as vLLM takes them."""

    model_config = ConfigDict(extra="forbid")
    max_pattern_size: Annotated[int, Field(ge=0, le=256)] = 0
    """Longest pattern, in tokens. 0 ends no answer."""
    min_pattern_size: Annotated[int, Field(ge=0, le=1)] = 0
    """Shortest pattern, in tokens. Only 1, for which 0 stands, is served."""
    min_count: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Number of times in a row that a pattern must come, at least 2."""

    def options(self) -> dict[str, int]:
        """Return the options of `GenerationParams`."""
        if not self.max_pattern_size:
            return {"repetition_limit": 0}
        return {
            "repetition_limit": max(self.min_count, 1),
            "repetition_period": self.max_pattern_size,
        }


class ClientOptions(ClientModel):
    """Fields of OpenAI and vLLM that mean options of `GenerationParams` under other names."""

    response_format: ResponseFormat | None = None
    """The form of the answer: any text, any JSON object, or JSON that matches a schema."""
    structured_outputs: StructuredOutputs | None = None
    """The form of the answer, as vLLM takes it."""
    guided_json: GuidedJson | None = None
    """`structured_outputs.json` of earlier vLLM."""
    guided_regex: str | None = None
    """`structured_outputs.regex` of earlier vLLM."""
    guided_choice: Choices | None = None
    """`structured_outputs.choice` of earlier vLLM."""
    guided_grammar: str | None = None
    """`structured_outputs.grammar` of earlier vLLM."""

    repetition_detection: RepetitionDetection | None = None
    """The patterns that end an answer by repetition, as vLLM takes them."""

    def client_options(self) -> dict[str, Any]:
        """Return the options of `GenerationParams` that these fields ask for.

        Raises:
            ValueError: As `form_options`.
        """
        ending = {} if self.repetition_detection is None else self.repetition_detection.options()
        return self.form_options() | ending

    def form_options(self) -> dict[str, Any]:
        """Return the option of `GenerationParams` for the form of the answer, if one is given.

        Raises:
            ValueError: Two of the fields ask for a form, or a form is incomplete.
        """
        asked = {
            f"guided_{name}": {option: value}
            for name, option in _OPTIONS.items()
            if (value := getattr(self, f"guided_{name}", None)) is not None
        }
        if self.response_format is not None and (options := self.response_format.options()):
            asked["response_format"] = options
        given = {} if self.structured_outputs is None else self.structured_outputs.model_dump()
        for name, option in _OPTIONS.items():
            if value := given.get("json_" if name == "json" else name):
                asked[f"structured_outputs.{name}"] = {option: value}
        if len(asked) > 1:
            raise ValueError(f"an answer has one form; {' and '.join(asked)} were given")
        return next(iter(asked.values()), {})


_OPTIONS = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "json_object": "json_object",
}
"""Options of `GenerationParams` by vLLM's names."""
