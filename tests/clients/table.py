"""The clients that are tested, each with the version, its script and the outcome.

`tests/clients/scripts/NAME/` holds the files of a client: settings first, and `ask.py`, `ask.mjs`
or `ask.sh`, which is run. The guide shows the same files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
RESOLVED = "2026-11-24"
"""Packages published after this day are left out, so that an environment is always the same."""
SERVICE, KEY, MODEL, COLLECTION = "http://127.0.0.1:8000", "YOUR_KEY", "ragcache-reader", "handbook"
"""Service, key, model and collection in the scripts. A test replaces the service and the key."""
PORT = "8181"
"""Port in the scripts of programs that listen. A test replaces it with a free one."""
QUESTION = "Where does the key of the pool car hang?"
ANSWER, SOURCE = "harbour office", "travel.md"
"""Words of the answer to `QUESTION`, and the document that they are from."""

TOOLS = (
    "The agent offers a tool and has its question answered from the collection. A model whose chat "
    "template has no tools, such as the embedded reader, always answers in text."
)
"""Note on agents."""


@dataclass(frozen=True, slots=True)
class Client:
    """A client of the service, pinned to the version that was run."""

    name: str
    """Folder of its scripts, name of its test and of its environment."""
    title: str
    """Name of the project, with the language if it has several."""
    url: str
    """Address of the project."""
    requirements: tuple[str, ...]
    """Packages with versions, as PyPI (`name==version`) or npm (`name@version`) has them."""
    group: str = "Libraries"
    """Heading of the guide that the client is under."""
    expects: tuple[str, ...] = (ANSWER, ANSWER)
    """Texts that the script prints, in this order: an answer in one piece, then a streamed one."""
    note: str = ""
    """A sentence of the guide on what is particular to this client."""
    fails: str = ""
    """Reason why the client does not work. Its script must then fail."""
    official: bool = False
    """Whether `make test-all` runs the client, too: a vendor's own one, or one that takes a
    collection for a model."""
    torch: bool = False
    """Whether the client needs torch. All others are installed without it."""
    seconds: float = 180
    """Time limit of the script."""

    @property
    def node(self) -> bool:
        """Whether the client comes from npm rather than PyPI."""
        return "==" not in self.requirements[0]

    @property
    def package(self) -> tuple[str, str]:
        """Name and version of the client itself, the first requirement."""
        name, _, version = re.sub(r"\[.*\]", "", self.requirements[0]).rpartition(
            "@" if self.node else "=="
        )
        return name, version

    @property
    def files(self) -> list[Path]:
        """Files of the client, the script that is run last."""
        files = [path for path in (SCRIPTS / self.name).rglob("*") if path.is_file()]
        return sorted(files, key=lambda path: (path == self.script, path))

    @property
    def script(self) -> Path:
        """The script that asks `QUESTION`."""
        [script] = (SCRIPTS / self.name).glob("ask.*")
        return script


LIBRARIES = (
    Client(
        "openai-python",
        "openai for Python",
        "https://github.com/openai/openai-python",
        ("openai==3.57.0",),
        expects=(ANSWER, SOURCE, ANSWER),
        official=True,
    ),
    Client(
        "openai-node",
        "openai for Node",
        "https://github.com/openai/openai-node",
        ("openai@7.57.0",),
        expects=(ANSWER, SOURCE, ANSWER),
    ),
    Client(
        "langchain-python",
        "LangChain for Python",
        "https://github.com/langchain-ai/langchain",
        ("langchain-openai==1.7.4",),
        expects=(ANSWER, SOURCE, ANSWER),
        note="LangChain keeps `usage` of an answer, whose `sources` has the number of modules by "
        "document. A program that runs the model itself uses [`ChatRagCache`](langchain.md).",
    ),
    Client(
        "langchain-mcp",
        "LangChain's MCP adapter",
        "https://github.com/langchain-ai/langchain-mcp-adapters",
        ("langchain-mcp-adapters==0.3.2",),
        expects=(COLLECTION, ANSWER, SOURCE),
        note="The adapter gives an agent the tools of the [Model Context Protocol](mcp.md).",
        official=True,
    ),
    Client(
        "langchain-node",
        "LangChain for Node",
        "https://github.com/langchain-ai/langchainjs",
        ("@langchain/openai@1.6.0", "@langchain/core@1.4.0"),
        expects=(ANSWER, SOURCE, ANSWER),
    ),
    Client(
        "anthropic-python",
        "anthropic for Python",
        "https://github.com/anthropics/anthropic-sdk-python",
        ("anthropic==2.14.0",),
        expects=(ANSWER, SOURCE, "input_tokens=", ANSWER),
        note="Anthropic's clients add `/v1/messages` to their base URL.",
        official=True,
    ),
    Client(
        "anthropic-node",
        "anthropic for Node",
        "https://github.com/anthropics/anthropic-sdk-typescript",
        ("@anthropic-ai/sdk@1.13.0",),
        expects=(ANSWER, SOURCE, ANSWER),
    ),
    Client(
        "langchain-anthropic",
        "LangChain for Python, by Anthropic's interface",
        "https://github.com/langchain-ai/langchain",
        ("langchain-anthropic==1.7.10",),
        expects=(ANSWER, "cache_read", ANSWER),
        official=True,
    ),
    Client(
        "llama-index",
        "LlamaIndex",
        "https://github.com/run-llama/llama_index",
        ("llama-index-llms-openai-like==0.8.1",),
        expects=(ANSWER, SOURCE, ANSWER),
        note="`OpenAI` of LlamaIndex takes only names of OpenAI's models; `OpenAILike` takes any.",
    ),
    Client(
        "haystack",
        "Haystack",
        "https://github.com/deepset-ai/haystack",
        ("haystack-ai==3.4.1",),
    ),
    Client(
        "litellm",
        "LiteLLM",
        "https://github.com/BerriAI/litellm",
        ("litellm==1.110.2",),
        expects=(ANSWER, SOURCE, ANSWER),
        note="The prefix `openai/` tells LiteLLM which interface the service speaks. The "
        "collection is part of the model's id.",
    ),
    Client(
        "instructor",
        "instructor",
        "https://github.com/567-labs/instructor",
        ("instructor==1.17.0",),
        expects=("place='", "place='"),
        note="An answer in a form is written by the model and not quoted. Use a model that follows "
        "instructions; the embedded reader has poor values, but for one string it writes what it "
        "quotes.",
    ),
    Client(
        "pydantic-ai",
        "Pydantic AI",
        "https://github.com/pydantic/pydantic-ai",
        ("pydantic-ai-slim[openai]==2.68.0",),
        note=TOOLS,
    ),
    Client(
        "openai-agents",
        "OpenAI Agents SDK",
        "https://github.com/openai/openai-agents-python",
        ("openai-agents==0.24.0",),
        note=TOOLS,
    ),
    Client(
        "openai-agents-node",
        "OpenAI Agents SDK for Node",
        "https://github.com/openai/openai-agents-js",
        ("@openai/agents@0.20.0", "openai@7.57.0", "zod@4.6.7"),
        note=TOOLS,
    ),
    Client(
        "vercel-ai",
        "Vercel AI SDK",
        "https://github.com/vercel/ai",
        ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92"),
    ),
    Client("llm", "llm", "https://github.com/simonw/llm", ("llm==0.36",), official=True),
    Client(
        "agno",
        "Agno",
        "https://github.com/agno-agi/agno",
        ("agno==3.1.10", "openai==3.57.0"),
    ),
    Client(
        "mastra",
        "Mastra",
        "https://github.com/mastra-ai/mastra",
        ("@mastra/core@1.71.0",),
    ),
    Client(
        "smolagents",
        "smolagents",
        "https://github.com/huggingface/smolagents",
        ("smolagents[openai]==1.26.0",),
    ),
    Client(
        "dspy",
        "DSPy",
        "https://github.com/stanfordnlp/dspy",
        ("dspy==3.4.1",),
        expects=(ANSWER,),
        note="`dspy.Predict` wraps the question in instructions, which take a model that follows "
        "them. The model itself takes the question as it is.",
    ),
    Client(
        "autogen",
        "AutoGen",
        "https://github.com/microsoft/autogen",
        ("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"),
        note=TOOLS,
    ),
    Client(
        "semantic-kernel",
        "Semantic Kernel",
        "https://github.com/microsoft/semantic-kernel",
        ("semantic-kernel==1.45.0",),
    ),
    Client(
        "crewai",
        "CrewAI",
        "https://github.com/crewAIInc/crewAI",
        ("crewai==1.15.30",),
        note="An `Agent` of CrewAI wraps the question in instructions, which take a model that "
        "follows them. The model itself takes the question as it is.",
    ),
)
"""SDKs and frameworks."""

PROGRAMS = (
    Client(
        "open-webui",
        "Open WebUI",
        "https://github.com/open-webui/open-webui",
        ("open-webui==0.12.4",),
        group="Programs",
        expects=(ANSWER, SOURCE, " office", SOURCE, "[DONE]"),
        note="Its page lists `ragcache-reader` and one model for each collection, "
        "`ragcache-reader/handbook`. Answers of these show their sources. A model that follows "
        "instructions writes titles, tags and follow-up questions; with the embedded reader, turn "
        "them off (Admin Panel, Settings, Interface).",
    ),
    Client(
        "librechat",
        "LibreChat",
        "https://github.com/danny-avila/LibreChat",
        (
            "@librechat/agents@3.9.2",
            "librechat-data-provider@0.8.524",
            "js-yaml@5.5.0",
        ),
        group="Programs",
        expects=("listed", ANSWER, ANSWER),
        note="LibreChat takes the service as a custom endpoint of its `librechat.yaml` and lists a "
        "model for each collection. The script does with the file what LibreChat's server does, "
        "by LibreChat's own packages.",
        seconds=400,
    ),
    Client(
        "opencode",
        "opencode",
        "https://github.com/sst/opencode",
        ("opencode-ai@1.18.33",),
        group="Programs",
        expects=(ANSWER,),
    ),
    Client(
        "continue",
        "Continue",
        "https://github.com/continuedev/continue",
        ("@continuedev/cli@1.5.47",),
        group="Programs",
        expects=(ANSWER,),
        note="The file also serves the extensions for editors, as `~/.continue/config.yaml`.",
    ),
    Client(
        "gptme",
        "gptme",
        "https://github.com/gptme/gptme",
        ("gptme==0.35.1",),
        group="Programs",
        expects=(ANSWER,),
    ),
    Client(
        "shell-gpt",
        "ShellGPT",
        "https://github.com/TheR1D/shell_gpt",
        ("shell-gpt==1.5.1", "click==8.5.1"),
        group="Programs",
        expects=(ANSWER,),
    ),
    Client(
        "gradio",
        "Gradio",
        "https://github.com/gradio-app/gradio",
        ("gradio==6.31.0", "openai==3.57.0"),
        group="Programs",
        expects=(ANSWER,),
        note="`load_chat` makes a page for chats. `Client` asks through the page.",
    ),
    Client(
        "codex",
        "Codex",
        "https://github.com/openai/codex",
        ("@openai/codex@0.171.0",),
        group="Programs",
        expects=(ANSWER,),
    ),
    Client(
        "claude-code",
        "Claude Code",
        "https://github.com/anthropics/claude-code",
        ("@anthropic-ai/claude-code@2.1.331",),
        group="Programs",
        expects=(ANSWER,),
    ),
    Client(
        "aider",
        "aider",
        "https://github.com/Aider-AI/aider",
        ("aider-chat==0.86.2",),
        group="Programs",
        expects=(ANSWER,),
        note="aider adds `Reply in LANGUAGE` to every question. `LC_ALL=C` keeps this out of the "
        "search.",
    ),
    Client(
        "litellm-proxy",
        "LiteLLM proxy",
        "https://github.com/BerriAI/litellm",
        ("litellm[proxy]==1.108.7",),
        group="Programs",
        expects=(ANSWER, SOURCE, " office", SOURCE, "[DONE]"),
        note="The service behind a proxy: its clients ask for `handbook`, or for any model of the "
        "service by its id.",
    ),
    Client(
        "lm-eval",
        "lm-evaluation-harness",
        "https://github.com/EleutherAI/lm-evaluation-harness",
        ("lm-eval[api]==0.4.13",),
        group="Programs",
        expects=("|exact_match|↑  |    1|", "|choices|", "|acc"),
    ),
    Client(
        "guidellm",
        "GuideLLM",
        "https://github.com/vllm-project/guidellm",
        ("guidellm==0.8.1",),
        group="Programs",
        expects=("Benchmarking complete",),
        torch=True,
    ),
)
"""Programs that people use as they are."""

CLIENTS = (*LIBRARIES, *PROGRAMS)
"""All clients, in the order of the guide."""
